"""The store sink's shell: events in, rows appended, exactly once.

Here live the wiring, and when what was read is written. Where reading goes on is `resuming`'s, what
becomes of gaps `recording`'s, how rows are written beside it `appending`'s; the consume loop is
`sinks.consuming`'s.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import structlog

from gpuledger.bus.protocol import Bus, Gap, Record, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.settings.address import shown_url
from gpuledger.topics import EVENTS
from sinks.consuming import consume
from sinks.duplicates import SeenTicks
from sinks.metrics import SENT_TOTAL, count_dropped
from sinks.protocol import Batch, ConsumerConfig, Partitions, SinkContext
from sinks.retrying import Retrying
from sinks.store.admission import DayWindow
from sinks.store.appending import Appending
from sinks.store.buffer import RowBuffer
from sinks.store.maintenance import Maintenance
from sinks.store.recording import GapRecording
from sinks.store.resuming import Resuming
from sinks.store.rows import rows_of
from sinks.store.settings import StoreSettings
from sinks.store.stored import Stored
from sinks.store.streams import Streams
from sinks.store.table import EntriesTable, GapsTable, StaleTableError

GROUP: Final = "gpuledger-store"
NAME: Final = "store"
_log = structlog.get_logger(__name__)


async def run_store(
    *,
    bus: Bus,
    settings: StoreSettings,
    readiness: Readiness,
    member: str | None = None,
    group: str = GROUP,
    clock: Clock | None = None,
) -> None:
    """Append every event's entries to the store until cancelled.

    Raises UserError where the table is of another topic than the one that is read.
    """
    clock = clock or SystemClock()
    receiver = readiness.check("store.receiver", severity=CheckSeverity.WARNING)
    sink = _make_sink(settings, clock=clock, check=receiver)
    how = ConsumerConfig(
        group=group,
        member=member,
        decoders={EVENTS.name: Decoder(topic=EVENTS.name, record=GpuEvent)},
        max_poll_records=settings.max_poll_records,
        receiver=shown_url(settings.uri),
        on_gap=sink.note_gap,
    )
    await consume(
        bus=bus,
        sink=sink,
        how=how,
        check=readiness.check("store.bus"),
        gaps=readiness.check("store.gaps", severity=CheckSeverity.WARNING),
        clock=clock,
    )


def _make_sink(settings: StoreSettings, *, clock: Clock, check: Check) -> "StoreSink":
    where: dict[str, Any] = {"store_uri": settings.uri, "storage_options": settings.storage_options}
    table, gaps = EntriesTable(**where), GapsTable(**where)
    retrying = Retrying(sink=NAME, check=check, clock=clock, receiver=shown_url(table.uri))
    stored = Stored(streams=Streams(group=GROUP, generation=settings.generation))
    recording = GapRecording(gaps=gaps, entries=table, stored=stored, clock=clock)
    return StoreSink(
        settings=settings,
        clock=clock,
        retrying=retrying,
        recording=recording,
        resuming=Resuming(
            table=table, gaps=gaps, recording=recording, stored=stored, retrying=retrying
        ),
        appending=Appending(table=table, stored=stored, clock=clock),
        maintenance=Maintenance(tables=[table, gaps], settings=settings, clock=clock),
    )


class StoreSink:
    """Collects rows and appends them with the offsets up to which they were read."""

    name = NAME

    def __init__(
        self,
        *,
        settings: StoreSettings,
        clock: Clock,
        retrying: Retrying,
        recording: GapRecording,
        resuming: Resuming,
        appending: Appending,
        maintenance: Maintenance,
    ) -> None:
        self._settings, self._clock, self._retrying = settings, clock, retrying
        self._recording, self._resuming, self._appending = recording, resuming, appending
        self._maintenance = maintenance
        self._pending = RowBuffer()
        self._window = DayWindow(
            max_age_seconds=settings.max_age_seconds,
            max_future_seconds=settings.max_future_seconds,
        )
        self._seen = SeenTicks(clock=clock)
        self._lock = asyncio.Lock()

    async def assign(self, partitions: Partitions, desk: SinkContext) -> None:  # noqa: ARG002  # a sink's method
        """Remember that these have yet to be set to where the table ends."""
        self._resuming.need(partitions)

    async def note_gap(self, gap: Gap) -> None:
        """Remember a gap until it has its row, which it gets before any event behind it."""
        self._recording.note(gap)

    async def prepare(self, desk: SinkContext) -> Partitions:
        """Set partitions newly held to where the table ends."""
        async with self._lock:
            if not self._resuming.is_due(desk.consumer):
                return frozenset()
            await self._appending.end()
            # The flush may find other partitions in need of it.
            await self._flush(desk)
            sought = await self._resuming.seek(desk.consumer)
            self._seen.forget(sought)
            return sought

    async def take(self, batches: Sequence[Batch], desk: SinkContext) -> None:
        """Collect the rows of a poll and write when it is time."""
        async with self._lock:
            self._maintenance.begin_if_due()
            if self._gaps_to_record(desk):
                await self._flush(desk)
                await self._resuming.record(self._gaps_to_record(desk))
            settled = self._resuming.settled(desk.consumer)
            for batch in batches:
                if batch.partition in settled and not self._resuming.is_needed(batch.partition):
                    await self._collect(batch, desk)
                else:
                    _leave(batch, desk)
            if self._is_due():
                await self._flush(desk)

    async def release(self, partitions: Partitions, desk: SinkContext) -> None:
        """Write what is held, in one attempt; the next owner begins where the table ends."""
        async with self._lock:
            try:
                await self._flush_once(desk)
            finally:
                # What could not be written is read again by whoever holds its partitions then, and
                # what could not be told of it is told then.
                for topic, number in self._pending.last_offsets:
                    desk.office.drop(number, topic=topic)
                self._resuming.need(self._pending.last_offsets)
                self._resuming.need_not(partitions)
                self._pending = RowBuffer()
                self._seen.forget(partitions)

    def _gaps_to_record(self, desk: SinkContext) -> list[Gap]:
        return self._recording.of(self._resuming.settled(desk.consumer))

    async def _collect(self, batch: Batch, desk: SinkContext) -> None:
        """Collect the rows of a batch, and write in its midst where they are too many."""
        for record, event in batch.items:
            if self._is_full():
                await self._flush(desk)
                if batch.partition not in self._resuming.settled(desk.consumer):
                    _leave(batch, desk)
                    return
            self._take_event(batch.partition, record, event, desk)
            self._read_to(batch.partition, record.offset)
        self._read_to(batch.partition, batch.next_offset - 1)

    def _take_event(
        self, partition: TopicPartition, record: Record, event: GpuEvent, desk: SinkContext
    ) -> None:
        if not self._seen.is_new(partition, event):
            count_dropped(NAME, "duplicate")
            return
        try:
            rows = list(rows_of(event, record))
        except ValueError as error:
            desk.office.bury(record, reason="invalid", detail=str(error))
            return
        days = {row[0] for row in rows}
        if refusal := self._window.refusal_of(days, now_ns=self._clock.time_ns()):
            desk.office.bury(record, reason=refusal.reason, detail=refusal.detail)
        else:
            self._pending.add(rows, time_ns=event.time_ns)

    def _read_to(self, partition: TopicPartition, offset: int) -> None:
        self._pending.read_to(partition, offset, now_ns=self._clock.monotonic_ns())

    def _is_full(self) -> bool:
        return self._pending.is_full(max_bytes=self._settings.flush_bytes)

    def _is_due(self) -> bool:
        return self._is_full() or self._pending.is_due(
            now_ns=self._clock.monotonic_ns(),
            after_ns=round(self._settings.flush_seconds * 1e9),
            max_rows=self._settings.flush_rows,
        )

    async def _flush(self, desk: SinkContext) -> None:
        if self._pending.rows:
            await self._retrying(lambda _: self._flush_once(desk))
        else:
            # The table is not asked, so this says nothing of whether it answers.
            await self._flush_once(desk)

    async def _flush_once(self, desk: SinkContext) -> None:
        pending = self._pending
        try:
            if pending.rows:
                # The rows take the offsets with them: what was put aside would not be read again.
                await desk.office.flush()
                self._must_be_held(pending, desk)
                await self._must_still_be_of_topic(desk)
                with self._retrying.awaiting():
                    await self._appending.append(pending)
        except StaleTableError as error:
            _log.warning("rows_withdrawn", error=str(error), count=len(pending.rows))
            self._resuming.need(desk.consumer.assignment())
        else:
            _acknowledge(pending, desk)
        self._pending = RowBuffer()

    def _must_be_held(self, pending: RowBuffer, desk: SinkContext) -> None:
        """Raise StaleTableError where a partition was given up since it was read.

        The letters of its records were dropped, and the rows would take the offsets with them.
        """
        for at in pending.last_offsets:
            if not desk.is_current(at) or self._resuming.is_needed(at):
                raise StaleTableError(f"{at} was given up before its rows were stored")

    async def _must_still_be_of_topic(self, desk: SinkContext) -> None:
        """Raise UserError where what was collected may be another topic's than it began with.

        Asked after the last row was read and before any is written: a topic that has its identity
        now has had it all the time.
        """
        topic_id = await self._resuming.topic_id_now(desk.consumer)
        if topic_id == self._resuming.topic_id:
            return
        # Nothing of it is written: no row tells which topic it is of.
        read, self._pending = self._pending.last_offsets, RowBuffer()
        await self._resuming.refuse_rows(read, topic_id=topic_id)


def _leave(batch: Batch, desk: SinkContext) -> None:
    """Leave what is given up or set back meanwhile: it is read again behind what is stored."""
    desk.office.drop(batch.partition.partition, topic=batch.partition.topic)


def _acknowledge(pending: RowBuffer, desk: SinkContext) -> None:
    SENT_TOTAL.labels(sink=NAME).inc(len(pending.rows))
    for partition, last_offset in pending.last_offsets.items():
        desk.acknowledge(partition, last_offset + 1, time_ns=pending.newest_ns)
    if pending.rows:
        partitions = len(pending.last_offsets)
        _log.info("rows_stored", count=len(pending.rows), partition_count=partitions)
