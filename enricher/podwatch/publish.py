"""Publishes what the table has due, for ever; while Kafka is away it waits in the table."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from enricher.podwatch import metrics
from enricher.podwatch.published_pods import PodBus
from enricher.podwatch.table import PendingMessage, PodTable
from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, Producer, TopicDescription, is_other_topic
from gpuledger.clock import Clock
from gpuledger.codec import Decoder, encode
from gpuledger.errors import BusError, UndecodableError
from gpuledger.records import PodRecord
from gpuledger.records.fitting import fit
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.retry import Backoff
from gpuledger.topics import PODS, partition_of_node

_NS_PER_MS: Final = 1_000_000
_NS: Final = 1_000_000_000
LOOK_SECONDS: Final = 10.0
"""How often the topic is looked at: whether it is there, and still the one that was published to.
"""
_decode: Final = Decoder(topic=PODS.name, record=PodRecord).decode
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
Fence = Callable[[], None]
"""Called before each publish; raises where another one may publish now."""


def let_pass() -> None:
    """Let everything pass: there is nobody else, or others do no harm."""


class PodPublisher:
    """Sends batches of pods to the partitions of their nodes."""

    def __init__(
        self,
        *,
        bus: PodBus,
        table: PodTable,
        check: Check,
        clock: Clock,
        batch_max: int,
        topic_id: str | None,
        fence: Fence = let_pass,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """Take the table, and the identity of the topic that knows what is not due in it."""
        self._bus = bus
        self._fence = fence
        self._table = table
        self._check = check
        self._clock = clock
        self._batch_max = batch_max
        self._topic_id = topic_id
        self._look_seconds = look_seconds
        self._looked_at_ns = 0
        # Not a `RetryingCaller`: the table changes between two attempts, so each sends what is due
        # then, and parts of a batch succeed by themselves.
        self._backoff = Backoff()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Report that the table may have something due."""
        self._changed.set()

    def measure(self) -> None:
        """Set the gauges: after batches and lists, not for each pod."""
        metrics.PODS.set(len(self._table))
        metrics.UNPUBLISHED.set(self._table.unpublished)

    async def forever(self) -> None:
        """Publish what comes; a producer that failed is replaced after a pause."""
        while True:
            try:
                await self._with_one_producer()
            except BusError as error:
                await self._pause(error)

    async def _with_one_producer(self) -> None:
        topic = await self._look()
        async with self._bus.producer() as producer:
            if not self._check.has_failed or not self._table.unpublished:
                self._check.ok(self._waiting)
            while True:
                if batch := self._table.batch(self._batch_max):
                    await self._send(producer, batch, topic.partitions)
                else:
                    await self._wait()
                if self._is_look_due() and await self._look() != topic:
                    return  # the producer knows the topic as it was

    async def _wait(self) -> None:
        """Wait for a change, or until it is time to look at the topic."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._look_seconds):
                await self._changed.wait()

    def _is_look_due(self) -> bool:
        return self._clock.monotonic_ns() - self._looked_at_ns >= self._look_seconds * _NS

    async def _look(self) -> TopicDescription:
        """Return what the topic is now; have all published again where it is another one.

        Without it nobody would hear, while no pod changes, that the brokers are away or that the
        topic was deleted.
        """
        found = await self._bus.describe(PODS.name)
        self._looked_at_ns = self._clock.monotonic_ns()
        if is_other_topic(self._topic_id, found.topic_id):
            self._table.repeat_all(time_ns=self._clock.time_ns())
            self.measure()
            _log.warning("topic_recreated", topic=PODS.name, count=self._table.unpublished)
        self._topic_id = found.topic_id or self._topic_id
        return found

    def _waiting(self) -> str:
        return f"{self._table.unpublished} pods are to be published"

    async def _pause(self, error: BusError) -> None:
        metrics.PUBLISH_FAILURES.inc()
        trouble = str(error)
        self._check.failed(lambda: f"{trouble}; {self._waiting()}")
        await self._clock.sleep(self._backoff.next_seconds())

    async def _send(
        self, producer: Producer, batch: Sequence[PendingMessage], partitions: int
    ) -> None:
        """Send each partition its part; what arrived counts even if others failed."""
        parts: dict[int, list[PendingMessage]] = defaultdict(list)
        for one in batch:
            parts[partition_of_node(one.node, partitions=partitions)].append(one)
        results = await asyncio.gather(
            *(self._send_part(producer, place, part) for place, part in parts.items()),
            return_exceptions=True,
        )
        self.measure()
        for failure in results:
            if failure is not None:
                raise failure
        self._backoff.reset()
        self._check.ok(self._waiting)

    async def _send_part(
        self, producer: Producer, partition: int, part: list[PendingMessage]
    ) -> None:
        self._fence()
        await producer.publish(PODS.name, partition, [_message(one) for one in part])
        self._table.acknowledge(part)
        tombstones = sum(one.pod is None for one in part)
        metrics.PUBLISHED.labels(kind="tombstone").inc(tombstones)
        metrics.PUBLISHED.labels(kind="record").inc(len(part) - tombstones)
        metrics.LAG.observe(max(0, self._clock.time_ns() - part[0].seen_time_ns) / _NS)


def _message(one: PendingMessage) -> Message:
    key, value = one.uid.encode(), _value(one.pod) if one.pod else None
    return Message(key=key, value=value, timestamp_ms=one.seen_time_ns // _NS_PER_MS)


def _value(pod: PodRecord) -> bytes:
    """Encode a pod; what nobody would decode, or take as one message, is cut."""
    value = encode(pod)
    try:
        _decode(value)
    except UndecodableError as error:
        _tell_cut(pod, str(error))
        pod, _ = fit(pod)
        value = encode(pod)
    if (size := len(pod.uid.encode()) + len(value)) > MAX_MESSAGE_BYTES:
        _tell_cut(pod, f"its record has {size} bytes, of {MAX_MESSAGE_BYTES} allowed")
        value = encode(_without_lists(pod))
    return value


def _without_lists(pod: PodRecord) -> PodRecord:
    """Return a pod with what names it, and nothing of which there may be any number."""
    return msgspec.structs.replace(
        pod, labels={}, annotations=None, containers=[], gpus_requested={}
    )


def _tell_cut(pod: PodRecord, detail: str) -> None:
    metrics.CUT.inc()
    if count := _repeats.count("pod"):
        _log.warning(
            "pod_shortened",
            pods=f"{pod.namespace}/{pod.name}",
            detail=detail,
            count=count,
        )
