"""What Kafka knows of the pods already: the topic of pods, read to its end.

Nobody is in a consumer group for that and nothing is committed: the topic itself is the state.
"""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

import structlog

from enricher.podwatch import metrics
from enricher.podwatch.interning import PodSharing
from enricher.versions import is_older
from gpuledger.bus.protocol import History, Producer, Record, TopicDescription
from gpuledger.clock import Clock
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import count_unreadable, describe_unreadable
from gpuledger.errors import BusError, UndecodableError
from gpuledger.records import PodRecord
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.retry import RetryingCaller
from gpuledger.topics import PODS

_decode: Final = Decoder(topic=PODS.name, record=PodRecord).decode
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class PodBus(History, Protocol):
    """What podwatch needs of a bus: to publish, and to read back what it published."""

    def producer(self) -> AbstractAsyncContextManager[Producer]:
        """Open a producer."""

    async def describe(self, topic: str) -> TopicDescription:
        """Return what is known of a topic now; `TopicsError` where it does not exist."""


class KnownPods:
    """The newest record of each pod; memory is bounded by the pods without a tombstone."""

    def __init__(self, *, topic_id: str | None = None) -> None:
        self.topic_id = topic_id
        """The identity of the topic that was read, as of before."""
        self.by_uid: dict[str, PodRecord] = {}
        self.overtaken: set[str] = set()
        """Pods behind whose newest record stands an older one."""
        self.undecodable = 0
        """How many records were none; a pod whose newest is one of them is unknown."""
        self._sharing = PodSharing()

    def take(self, records: Iterable[Record]) -> None:
        """Take records of the topic in the order of their partition."""
        for record in records:
            if record.unreadable is not None:
                count_unreadable(record)
                self._count_undecodable(describe_unreadable(record, record.unreadable))
                continue
            uid = (record.key or b"").decode(errors="replace")
            pod = self._read(uid, record.value) if record.value is not None else None
            if pod is None:
                self.by_uid.pop(uid, None)
                self.overtaken.discard(uid)
            else:
                self._put(pod)

    def _put(self, pod: PodRecord) -> None:
        known = self.by_uid.get(pod.uid)
        if known and is_older(pod, than=known):
            self.overtaken.add(pod.uid)
            return
        self.overtaken.discard(pod.uid)
        # Not under the record's key, which would be kept beside its own UID.
        self.by_uid[pod.uid] = self._sharing.share(pod)

    def _read(self, uid: str, value: bytes) -> PodRecord | None:
        try:
            pod: PodRecord = _decode(value)
        except UndecodableError as error:
            self._count_undecodable(str(error))
            return None
        if pod.uid != uid:
            self._count_undecodable(f"{PODS.name}: uid {pod.uid!r} under the key {uid!r}")
            return None
        return pod

    def _count_undecodable(self, error: str) -> None:
        self.undecodable += 1
        metrics.UNDECODABLE_RECORDS.inc()
        if count := _repeats.count("record"):
            _log.warning("record_skipped", error=error, count=count)


async def read_known(*, bus: PodBus, check: Check, clock: Clock) -> KnownPods:
    """Read the topic to its end, as often as it takes; a missing topic or right is waited for."""
    retry = RetryingCaller(
        on=BusError,
        check=check,
        passes_check=False,
        counter=metrics.READ_FAILURES,
        clock=clock,
        describe=lambda error: f"reading which pods are known: {error}",
    )
    check.waits("reading which pods are known")
    known = await retry(lambda: _read_once(bus))
    _tell(known, check)
    return known


async def _read_once(bus: PodBus) -> KnownPods:
    known = KnownPods(topic_id=(await bus.describe(PODS.name)).topic_id)
    async with bus.reader() as reader:
        for place, span in (await reader.spans(PODS.name)).items():
            async for records in reader.read(place, span):
                known.take(records)
    return known


def _tell(known: KnownPods, check: Check) -> None:
    count = len(known.by_uid)
    deleted = sum(pod.deleted_time_ns is not None for pod in known.by_uid.values())
    check.ok(f"{count} pods were known, {deleted} of them deleted")
    _log.info(
        "known_pods_read",
        count=count,
        deleted_count=deleted,
        undecodable_count=known.undecodable,
    )
