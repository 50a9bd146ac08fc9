"""The watermarks of a sink: the join's watermarks, published once their events are delivered.

After each commit, a sink records the offset up to which a partition is done. `WatermarkRelay` reads
the join's watermarks of these partitions. It publishes each watermark again in the sink's name,
once all events before it are done. A watermark is therefore never ahead of the data; if a sink is
killed after its commit, the watermark is only late. A published watermark stays true, whichever
sink owns the partition.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import structlog
from msgspec.structs import replace

from gpuledger.bus.protocol import (
    Bus,
    HistoryReader,
    Producer,
    Record,
    Span,
    TopicPartition,
)
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.codec import Decoder
from gpuledger.completeness import (
    JOIN,
    MAX_AHEAD_NS,
    Completeness,
    key_of,
    message_of,
    name_publisher,
)
from gpuledger.errors import BusError, UndecodableError
from gpuledger.records import Watermark
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks
from gpuledger_sinks.metrics import WATERMARK_TIMESTAMP

CHECK_INTERVAL_SECONDS: Final = 2.0
"""Time between two reads of the join's watermarks, which are published every 5 s."""
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_relay(
    component: str,
    *,
    bus: Bus,
    readiness: Readiness,
    clock: Clock,
    output: str | None = None,
) -> AsyncIterator["WatermarkRelay"]:
    """Open a relay that publishes the watermarks of `component`.

    The watermarks refer to offsets of the topic `output` if the component writes to a topic,
    otherwise to offsets of the events.
    """
    check = readiness.check(f"{component}.watermarks", severity=CheckSeverity.WARNING)
    async with bus.reader() as reader:
        relay = WatermarkRelay(
            component, bus=bus, reader=reader, check=check, clock=clock, output=output
        )
        try:
            yield relay
        finally:
            await relay.end()


class WatermarkRelay:
    """Relays the join's watermarks of the partitions assigned to a sink."""

    def __init__(
        self,
        component: str,
        *,
        bus: Bus,
        reader: HistoryReader,
        check: Check,
        clock: Clock,
        output: str | None,
    ) -> None:
        """Publish watermarks that name `component`; no other object may use `reader`."""
        self._component, self._bus, self._reader = component, bus, reader
        self._check, self._clock, self._output = check, clock, output
        self._topic = bus.topics.watermarks.name
        self._decoder = Decoder(topic=self._topic, record=Watermark)
        self._completeness = Completeness(component=JOIN, topic=bus.topics.events.name)
        self._positions: dict[int, int] = {}
        """The offset of the next watermark of each assigned partition."""
        self._published: dict[tuple[int, str], Watermark] = {}
        """The join's watermark that was relayed last, by partition and cluster."""
        self._producing = AsyncExitStack()
        self._producer: Producer | None = None
        self._next_ns: int | None = None
        self._running: asyncio.Task[None] | None = None

    def follow(self, partitions: Iterable[TopicPartition]) -> None:
        """Follow newly assigned partitions."""
        for at in partitions:
            self._positions.setdefault(at.partition, 0)

    def record_done(self, partition: int, next_offset: int) -> None:
        """Record that all events of a partition before `next_offset` are done and committed.

        Ignored for a revoked partition, because its records may not be done.
        """
        if partition in self._positions:
            self._completeness.read_to(partition, next_offset)

    def complete_with_ns(self, partition: int, next_offset: int) -> int | None:
        """Return the time through which a partition is complete once `next_offset` is committed.

        The time is in nanoseconds since the epoch; `None` if it is unknown.
        """
        return self._completeness.complete_with_ns(partition, next_offset)

    def complete_until_ns(self, partition: int) -> int | None:
        """Return the time through which a partition is complete, given the events recorded as done.

        The time is in nanoseconds since the epoch; `None` if it is unknown.
        """
        return self._completeness.complete_until_ns([partition])

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget revoked partitions."""
        for at in partitions:
            self._positions.pop(at.partition, None)
            self._completeness.forget(at.partition)
            for origin in [origin for origin in self._published if origin[0] == at.partition]:
                del self._published[origin]

    def begin_if_due(self) -> None:
        """Read and relay watermarks in the background if that is due and none runs."""
        now_ns = self._clock.monotonic_ns()
        if self._next_ns is not None and now_ns < self._next_ns:
            return
        if self._running is not None and not self._running.done():
            return
        self._next_ns = now_ns + round(CHECK_INTERVAL_SECONDS * NS_PER_SECOND)
        self._running = asyncio.create_task(self._relay())

    async def end(self) -> None:
        """Cancel a running relay and close the producer."""
        await end_tasks(self._running)
        await self._close()

    async def _relay(self) -> None:
        """Read new watermarks and publish the ones that are reached; failures are retried later."""
        try:
            partition_count = await self._read()
            # Collected before the end offsets are read, so that all reached events are before them.
            reached = [each for at in self._positions for each in self._completeness.of(at)]
            ends: Mapping[TopicPartition, Span] = {}
            if self._output is not None:
                ends = await self._reader.spans(self._output)
                if len(ends) < partition_count:
                    reached = []  # two partitions of events share a partition of the output
            await self._publish(reached, ends)
        except BusError as error:
            self._check.failed(str(error))
            await self._close()
            return
        until_ns = self._completeness.complete_until_ns(self._positions)
        WATERMARK_TIMESTAMP.labels(sink=self._component).set((until_ns or 0) / NS_PER_SECOND)
        self._check.ok()

    async def _read(self) -> int:
        """Read new watermarks of assigned partitions; return the topic's number of partitions."""
        spans = await self._reader.spans(self._topic)
        for at, span in spans.items():
            known = self._positions.get(at.partition)
            if known is None:
                continue
            # Start over if compaction removed the position, or if the topic was recreated.
            first = known if span.first <= known <= span.end else span.first
            async for records in self._reader.read(at, Span(first, span.end)):
                for record in records:
                    self._take(record)
            if at.partition in self._positions:
                self._positions[at.partition] = span.end
        return len(spans)

    def _take(self, record: Record) -> None:
        if record.value is None:
            return  # a deleted watermark, or a batch that cannot be unpacked
        try:
            watermark = self._decoder.decode(record.value)
        except UndecodableError as error:
            _log.warning("watermark_ignored", sink=self._component, error=str(error))
            return
        if watermark.complete_until_ns > self._clock.time_ns() + MAX_AHEAD_NS:
            ahead = f"complete_until_ns: {watermark.complete_until_ns} is ahead of this clock"
            _log.warning("watermark_ignored", sink=self._component, error=ahead)
        elif record.key == key_of(watermark) and record.partition == watermark.partition:
            self._completeness.take(watermark)

    async def _publish(
        self, reached: Iterable[Watermark], ends: Mapping[TopicPartition, Span]
    ) -> None:
        for watermark in reached:
            partition, origin = watermark.partition, (watermark.partition, watermark.cluster)
            if self._published.get(origin) == watermark:
                continue
            own = replace(
                watermark, component=self._component, publisher=name_publisher(self._component)
            )
            if self._output is not None:
                end = ends[TopicPartition(self._output, partition)].end
                own = replace(own, topic=self._output, next_offset=end)
            if self._producer is None:
                opening = self._bus.producer()
                self._producer = await self._producing.enter_async_context(opening)
            message = message_of(own, time_ns=self._clock.time_ns())
            await self._producer.publish(self._topic, partition, [message])
            if partition in self._positions:
                self._published[origin] = watermark

    async def _close(self) -> None:
        self._producer = None
        await self._producing.aclose()
