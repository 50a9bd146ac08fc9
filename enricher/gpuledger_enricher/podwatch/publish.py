"""At start, reads one of podwatch's topics to its end; then publishes to it.

There is no consumer group and no commit: the topic itself is the state. Records that the topic
already has are not published again, and objects that were deleted while no podwatch ran are
detected. While Kafka is unavailable, pending messages wait in the table.

Two podwatches may publish at once: a podwatch that lost the Lease while it was suspended sends the
rest of its batch when it resumes. So records are ordered by `resourceVersion`, never by offset
(`is_older`). If an object has an older record after its newest one, the object is published again,
because compaction keeps the last record.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, Generic

import structlog

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import (
    Bus,
    Message,
    Producer,
    Record,
    TopicDescription,
    is_other_topic,
)
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock
from gpuledger.codec import encode
from gpuledger.completeness import PODWATCH, RENEWED_AFTER_SECONDS, message_of
from gpuledger.dead_letter_queue import count_unreadable, describe_unreadable
from gpuledger.errors import BusError, UndecodableError
from gpuledger.keys import key_in, split_key
from gpuledger.records import PendingPodRecord, PodRecord, Watermark
from gpuledger.records.fitting import fit
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.retry import Backoff, RetryingCaller
from gpuledger.runtime.tasks import wait_event
from gpuledger.topics import Topics, partition_of_node
from gpuledger_enricher.podwatch import pod_metrics
from gpuledger_enricher.podwatch.kinds import ObjectKind
from gpuledger_enricher.podwatch.table import ObjectTable, ObjectWatermarks, PendingMessage
from gpuledger_enricher.watched_records import (
    RecordT,
    WatchedRecord,
    gone_time_ns,
    is_older,
)

POLL_INTERVAL_SECONDS: Final = 10.0
"""Interval between two checks that the topic exists and is still the same one."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()
Fence = Callable[[], None]
"""Called before each publish; raises an error if another podwatch may publish now."""


def let_pass() -> None:
    """Allow every publish; used without a Lease."""


class KnownRecords(Generic[RecordT]):
    """The newest record of each object; memory is bounded by the objects without a tombstone."""

    def __init__(
        self,
        *,
        kind: ObjectKind[RecordT],
        topics: Topics,
        cluster: str,
        topic_id: str | None = None,
    ) -> None:
        """`cluster` is the cluster of the objects; other clusters belong to other podwatches."""
        self._cluster = cluster
        self._kind = kind
        self._decoder = kind.decoder(topics)
        self.topic_id = topic_id
        """The topic's identity before the topic was read; `None` if it is unknown."""
        self.next_offsets: dict[int, int | None] = {}
        """The end offset of each partition."""
        self.newest_ns = 0
        """The newest timestamp of the records, in nanoseconds since the epoch."""
        self.by_identity: dict[str, RecordT] = {}
        self.overtaken: set[str] = set()
        """Identities of objects whose newest record is followed by an older record."""
        self.undecodable = 0
        """Number of unreadable records; an object whose newest record is unreadable is unknown."""
        self._share = kind.sharing()

    def ingest(self, records: Iterable[Record]) -> None:
        """Add records of the topic; the records of a partition must be in order."""
        for record in records:
            if record.unreadable is not None:
                count_unreadable(record)
                self._count_undecodable(describe_unreadable(record, record.unreadable))
                continue
            key = (record.key or b"").decode(errors="replace")
            cluster, identity = split_key(key)
            if identity and cluster != self._cluster:
                continue
            self.newest_ns = max(self.newest_ns, record.timestamp_ms * NS_PER_MS)
            found = self._read(key, record.value) if record.value is not None else None
            if found is None:
                # A tombstone, or an unreadable record: compaction drops the records before it.
                self.by_identity.pop(identity, None)
                self.overtaken.discard(identity)
                continue
            known = self.by_identity.get(identity)
            if known and is_older(found, than=known):
                self.overtaken.add(identity)
                continue
            self.overtaken.discard(identity)
            # The identity is a string of the record; the one from the key would take more memory.
            self.by_identity[self._kind.identity_of(found)] = self._share(found)

    def _read(self, key: str, value: bytes) -> RecordT | None:
        try:
            found = self._decoder.decode(value)
        except UndecodableError as error:
            self._count_undecodable(str(error))
            return None
        own = key_in(found.cluster, self._kind.identity_of(found))
        if own != key:
            # Compaction keeps the last record of a key, so this record has replaced a record of
            # another object.
            self._count_undecodable(f"{self._decoder.topic}: {own!r} has the wrong key {key!r}")
            return None
        return found

    def _count_undecodable(self, error: str) -> None:
        self.undecodable += 1
        pod_metrics.UNDECODABLE_RECORDS.labels(kind=self._kind.name).inc()
        if count := _repeats.count("record"):
            _log.warning("record_skipped", error=error, count=count)


async def read_known(
    *, kind: ObjectKind[RecordT], cluster: str, bus: Bus, check: Check, clock: Clock
) -> KnownRecords[RecordT]:
    """Read the topic to its end; retry even if the topic or a permission is missing."""

    async def read_once() -> KnownRecords[RecordT]:
        name = kind.topic(bus.topics).name
        # The identity is read first: if the topic is recreated while it is read, the publisher
        # detects a different topic.
        topic_id = (await bus.describe(name)).topic_id
        known = KnownRecords(kind=kind, topics=bus.topics, cluster=cluster, topic_id=topic_id)
        async with bus.reader() as reader:
            for partition, span in (await reader.spans(name)).items():
                known.next_offsets[partition.partition] = span.end
                async for records in reader.read(partition, span):
                    known.ingest(records)
        return known

    retry = RetryingCaller(
        on=BusError,
        check=check,
        passes_check=False,
        counter=pod_metrics.READ_FAILURES.labels(kind=kind.name),
        clock=clock,
        describe=lambda error: f"reading the known {kind.plural}: {error}",
    )
    check.waits(f"reading the known {kind.plural}")
    known = await retry(read_once)
    count = len(known.by_identity)
    deleted = sum(gone_time_ns(each) is not None for each in known.by_identity.values())
    check.ok(f"{count} known {kind.plural}, {deleted} of them deleted")
    _log.info(
        "known_objects_read",
        kind=kind.name,
        count=count,
        deleted_count=deleted,
        undecodable_count=known.undecodable,
    )
    return known


class RecordPublisher(Generic[RecordT]):
    """Publishes batches of records and the watermarks of their topic."""

    def __init__(
        self,
        *,
        kind: ObjectKind[RecordT],
        cluster: str,
        bus: Bus,
        table: ObjectTable[RecordT],
        check: Check,
        clock: Clock,
        batch_max: int,
        topic_id: str | None,
        next_offsets: dict[int, int | None] | None = None,
        publisher: str = PODWATCH,
        fence: Fence = let_pass,
        poll_interval_seconds: float = POLL_INTERVAL_SECONDS,
    ) -> None:
        """`topic_id` is the identity of the topic that was read.

        `next_offsets` are the ends of the topic's partitions, and `publisher` is the publisher's
        name in the watermarks.
        """
        self.watermarks = ObjectWatermarks(table=table, clock=clock)
        self._next_offsets = next_offsets or {}
        self._publisher = publisher
        self._bus = bus
        self._kind = kind
        self._cluster = cluster
        self._topic = kind.topic(bus.topics).name
        self._fence = fence
        self._table = table
        self._check = check
        self._clock = clock
        self._batch_max = batch_max
        self._topic_id = topic_id
        self._poll_interval_seconds = poll_interval_seconds
        self._checked_ns = 0
        # Not a `RetryingCaller`: the table changes between two attempts, so each attempt sends the
        # messages that are pending at that time, and parts of a batch may succeed.
        self._backoff = Backoff()
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Report that the table may have pending messages."""
        self._changed.set()

    def measure(self) -> None:
        """Set the gauges.

        Called once after each batch or list, not for each object, because objects change too often.
        """
        pod_metrics.OBJECTS.labels(kind=self._kind.name).set(len(self._table))
        pod_metrics.UNPUBLISHED.labels(kind=self._kind.name).set(self._table.unpublished)
        self._kind.measure(self._table)

    async def run(self) -> None:
        """Publish until cancelled; replace a failed producer after a pause."""
        while True:
            try:
                await self._with_one_producer()
            except BusError as error:
                pod_metrics.PUBLISH_FAILURES.labels(kind=self._kind.name).inc()
                self._check.failed(partial(self.describe_unpublished, behind=str(error)))
                await self._clock.sleep(self._backoff.next_seconds())

    def describe_unpublished(self, *, behind: str | None = None) -> str:
        """Return a text for the check: the error `behind`, and the number of pending objects."""
        count = f"{self._table.unpublished} {self._kind.plural} to publish"
        return count if behind is None else f"{behind}; {count}"

    async def _with_one_producer(self) -> None:
        """Publish until the topic's description changes; raise `BusError` if the bus fails."""
        topic = await self._describe_topic()
        self.watermarks.reset()
        async with self._bus.producer() as producer:
            # An open producer does not prove that publishing works: while messages are pending, the
            # check recovers only after an acknowledgement.
            if not self._check.has_failed or not self._table.unpublished:
                self._check.ok(self.describe_unpublished)
            while True:
                if self._kind.watermark_component is not None:
                    self.watermarks.begin()
                if batch := self._table.batch(self._batch_max):
                    await self._send(producer, batch, topic.partitions)
                    self.watermarks.acknowledge(batch)
                else:
                    # Cleared before the wait, and without an await since the table was found empty,
                    # so no wake-up is lost.
                    self._changed.clear()
                    if self.watermarks.complete_until_ns() is None:
                        seconds = min(self._poll_interval_seconds, RENEWED_AFTER_SECONDS)
                        await wait_event(self._changed, seconds)
                await self._renew_watermarks(producer, topic.partitions)
                passed_ns = self._clock.monotonic_ns() - self._checked_ns
                if (
                    passed_ns >= self._poll_interval_seconds * NS_PER_SECOND
                    and await self._describe_topic() != topic
                ):
                    return  # the producer has the metadata of the old topic

    async def _describe_topic(self) -> TopicDescription:
        """Return the topic's description; publish everything again if it is a different topic.

        While no object changes, only this request detects that the brokers are unavailable or that
        the topic was deleted.
        """
        found = await self._bus.describe(self._topic)
        self._checked_ns = self._clock.monotonic_ns()
        if is_other_topic(self._topic_id, found.topic_id):
            self._table.repeat_all(time_ns=self._clock.time_ns())
            self._next_offsets.clear()
            self.measure()
            _log.warning("topic_recreated", topic=self._topic, count=self._table.unpublished)
        self._topic_id = found.topic_id or self._topic_id
        return found

    async def _send(
        self, producer: Producer, batch: Sequence[PendingMessage[RecordT]], partitions: int
    ) -> None:
        """Send each partition its messages; acknowledged parts count even if other parts fail."""
        parts: dict[int, list[PendingMessage[RecordT]]] = defaultdict(list)
        for message in batch:
            node = key_in(self._cluster, message.node)
            parts[partition_of_node(node, partitions=partitions)].append(message)
        try:
            await _all_of(
                self._send_part(producer, partition, part) for partition, part in parts.items()
            )
        finally:
            self.measure()
        self._backoff.reset()
        self._check.ok(self.describe_unpublished)

    async def _send_part(
        self, producer: Producer, partition: int, part: list[PendingMessage[RecordT]]
    ) -> None:
        # Before each part, not once per batch: a part may wait long, and meanwhile the Lease may be
        # lost.
        self._fence()
        messages = [
            Message(
                key=key_in(self._cluster, message.identity).encode(),
                value=encode_bounded(message.record, kind=self._kind, topics=self._bus.topics)
                if message.record
                else None,
                timestamp_ms=message.seen_time_ns // NS_PER_MS,
            )
            for message in part
        ]
        self._next_offsets[partition] = await producer.publish(self._topic, partition, messages)
        self._table.acknowledge(part)
        tombstones = sum(message.record is None for message in part)
        of_kind = {"kind": self._kind.name}
        pod_metrics.PUBLISHED.labels(**of_kind, type="tombstone").inc(tombstones)
        pod_metrics.PUBLISHED.labels(**of_kind, type="record").inc(len(part) - tombstones)
        # The first message is the oldest. Never negative, even if the clock was set back.
        pod_metrics.LAG.labels(**of_kind).observe(
            max(0, self._clock.time_ns() - part[0].seen_time_ns) / NS_PER_SECOND
        )

    async def _renew_watermarks(self, producer: Producer, partitions: int) -> None:
        """Publish the watermark of each partition if it is due and known.

        The watermark covers only the list, the watch and the topic of this kind.
        """
        component, complete_until_ns = (
            self._kind.watermark_component,
            self.watermarks.complete_until_ns(),
        )
        if component is None or complete_until_ns is None:
            return
        self._fence()
        topic, time_ns = self._bus.topics.watermarks.name, self._clock.time_ns()
        ends = {each: self._next_offsets.get(each, 0) for each in range(partitions)}
        watermarks = [
            Watermark(
                component=component,
                cluster=self._cluster,
                partition=partition,
                complete_until_ns=complete_until_ns,
                topic=self._topic,
                next_offset=next_offset,
                publisher=self._publisher,
            )
            for partition, next_offset in ends.items()
            # The brokers do not report the offset of a batch that they already had.
            if next_offset is not None
        ]
        await _all_of(
            producer.publish(topic, each.partition, [message_of(each, time_ns=time_ns)])
            for each in watermarks
        )
        self.watermarks.record_published()
        timestamp = pod_metrics.WATERMARK_TIMESTAMP.labels(
            cluster=self._cluster, kind=self._kind.name
        )
        timestamp.set(complete_until_ns / NS_PER_SECOND)


async def _all_of(publications: Iterable[Awaitable[object]]) -> None:
    """Wait until all publications have ended, then raise the first failure.

    If the first failure were raised at once, the caller would close the producer while other
    publications still use it.
    """
    for result in await asyncio.gather(*publications, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def encode_bounded(record: RecordT, *, kind: ObjectKind[RecordT], topics: Topics) -> bytes:
    """Encode a record; shorten it if consumers would reject it or it is too large for a message.

    A record that a broker rejects would be sent again and again, and block its whole partition.
    """
    key, value = key_in(record.cluster, kind.identity_of(record)).encode(), encode(record)
    try:
        kind.decoder(topics).decode(value)
    except UndecodableError as error:
        _report_cut(record, kind, str(error))
        record, _ = fit(record)
        value = encode(record)
    if (size := size_bytes(key, value)) > MAX_MESSAGE_BYTES:
        _report_cut(record, kind, f"its record is too large: {size} bytes, max {MAX_MESSAGE_BYTES}")
        value = encode(kind.bare(record))
    return value


def _report_cut(record: RecordT, kind: ObjectKind[RecordT], detail: str) -> None:
    pod_metrics.CUT.labels(kind=kind.name).inc()
    if count := _repeats.count(kind.name):
        _log.warning(
            "record_shortened",
            kind=kind.name,
            object=full_name(record),
            detail=detail,
            count=count,
        )


def full_name(record: WatchedRecord) -> str:
    """Return an object's name; for a pod, `namespace/name`."""
    if isinstance(record, PodRecord | PendingPodRecord):
        return f"{record.namespace}/{record.name}"
    return record.name
