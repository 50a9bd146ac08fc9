"""The store sink's shell: events in, rows appended, exactly once.

Here live seeking to what the table has, flushing, and what is done when another consumer was
faster. Rows are made in `rows`, written in `table`; the consume loop is `sinks.consuming`'s.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from gpuledger.bus.protocol import Bus, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.errors import UserError
from gpuledger.records import GpuEvent
from gpuledger.service import Check, Readiness, Severity
from gpuledger.topics import EVENTS
from gpuledger.twins import twin_of
from sinks.consuming import consume
from sinks.duplicates import SeenTicks
from sinks.metrics import DROPPED_TOTAL, SENT_TOTAL
from sinks.protocol import Batch, Consuming, Desk, Partitions
from sinks.retrying import until_answered
from sinks.store.pending import Pending
from sinks.store.rows import rows_of
from sinks.store.settings import StoreSettings
from sinks.store.table import EntriesTable, StaleTableError

GROUP: Final = "gpuledger-store"
NAME: Final = "store"
_log = structlog.get_logger(__name__)


async def run_store(
    *,
    bus: Bus,
    settings: StoreSettings,
    readiness: Readiness,
    member: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Append every event's entries to the store until cancelled."""
    clock = clock or SystemClock()
    table = EntriesTable(store_uri=settings.uri, storage_options=settings.storage_options)
    sink = StoreSink(
        table=table,
        settings=settings,
        clock=clock,
        check=readiness.check("store.receiver", severity=Severity.WARNING),
    )
    how = Consuming(
        group=GROUP,
        member=member,
        decoders={EVENTS.name: Decoder(topic=EVENTS.name, record=twin_of(GpuEvent))},
        poll_records=settings.poll_records,
    )
    await consume(bus=bus, sink=sink, how=how, check=readiness.check("store.bus"), clock=clock)


class StoreSink:
    """Collects rows and appends them with the offsets up to which they were read."""

    name = NAME

    def __init__(
        self, *, table: EntriesTable, settings: StoreSettings, clock: Clock, check: Check
    ) -> None:
        self._table, self._settings, self._clock, self._check = table, settings, clock, check
        self._unsought: set[TopicPartition] = set()
        self._pending = Pending()
        self._seen = SeenTicks()
        self._lock = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None

    async def assign(self, partitions: Partitions, desk: Desk) -> None:  # noqa: ARG002  # a sink's method
        """Remember that these have yet to be set to where the table ends."""
        self._unsought |= partitions

    async def prepare(self, desk: Desk) -> Partitions:
        """Set partitions newly held to where the table ends."""
        async with self._lock:
            return await self._seek(desk)

    async def take(self, batches: Sequence[Batch], desk: Desk) -> None:
        """Collect the rows of a poll and write when it is time."""
        async with self._lock:
            for batch in batches:
                self._collect(batch, desk)
            if self._is_due():
                await self._flush(desk)

    async def release(self, partitions: Partitions, desk: Desk) -> None:
        """Write what is held, in one attempt; the next owner begins where the table ends."""
        async with self._lock:
            try:
                await self._flush_once(desk)
            finally:
                # What could not be written is read again by whoever holds its partitions then.
                self._unsought |= self._pending.last_offsets.keys()
                self._unsought -= partitions
                self._pending = Pending()
                self._seen.forget(partitions)

    async def _seek(self, desk: Desk) -> Partitions:
        if not desk.consumer.assignment() & self._unsought:
            return frozenset()
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing = None
        await self._flush(desk)
        # The flush may have found other partitions in need of it.
        wanted = desk.consumer.assignment() & self._unsought
        stored = await until_answered(
            lambda _: asyncio.to_thread(self._table.load, map(self._stream, wanted)),
            sink=NAME,
            check=self._check,
            clock=self._clock,
        )
        ends = await desk.consumer.end_offsets(wanted)
        for partition in wanted:
            after = stored.get(self._stream(partition), -1) + 1
            _refuse_foreign_offset(partition, after, ends[partition])
            await desk.consumer.seek(partition, after)
        self._unsought -= wanted
        self._seen.forget(wanted)
        return wanted

    def _stream(self, partition: TopicPartition) -> str:
        parts = [GROUP, self._settings.generation, partition.topic, str(partition.partition)]
        return "|".join(part for part in parts if part)

    def _collect(self, batch: Batch, desk: Desk) -> None:
        pending = self._pending
        for record, event in batch.items:
            if not self._seen.is_new(batch.partition, event):
                _drop("duplicate")
                continue
            try:
                rows = list(rows_of(event, record))
            except ValueError as error:
                _drop("invalid")
                desk.office.bury(record, reason="invalid", detail=str(error))
            else:
                pending.add(rows, time_ns=event.time_ns)
        pending.read_to(batch.partition, batch.next_offset - 1, now_ns=self._clock.monotonic_ns())

    def _is_due(self) -> bool:
        return self._pending.is_due(
            now_ns=self._clock.monotonic_ns(),
            after_ns=round(self._settings.flush_seconds * 1e9),
            most_rows=self._settings.flush_rows,
        )

    async def _flush(self, desk: Desk) -> None:
        await until_answered(
            lambda _: self._flush_once(desk), sink=NAME, check=self._check, clock=self._clock
        )

    async def _flush_once(self, desk: Desk) -> None:
        pending = self._pending
        try:
            if pending.rows:
                # The rows take the offsets with them: what was put aside would not be read again.
                await desk.office.flush()
                await self._append(pending)
        except StaleTableError as error:
            _log.warning("rows_withdrawn", error=str(error), count=len(pending.rows))
            self._unsought |= desk.consumer.assignment()
        else:
            _acknowledge(pending, desk)
        self._pending = Pending()

    async def _append(self, pending: Pending) -> None:
        """Write in a thread; where the waiting is cancelled, the next call waits for the same."""
        if self._writing is None:
            offsets = {self._stream(at): last for at, last in pending.last_offsets.items()}
            time_ms = self._clock.time_ns() // 1_000_000
            self._writing = asyncio.create_task(
                asyncio.to_thread(self._table.append, pending.rows, offsets, time_ms=time_ms)
            )
            self._writing.add_done_callback(_look_at)
        writing = self._writing
        # Cancelled or not, the outcome stays where it is until somebody has seen it.
        await asyncio.wait({writing})
        self._writing = None
        writing.result()


def _drop(reason: str) -> None:
    DROPPED_TOTAL.labels(sink=NAME, reason=reason).inc()


def _acknowledge(pending: Pending, desk: Desk) -> None:
    SENT_TOTAL.labels(sink=NAME).inc(len(pending.rows))
    for partition, last_offset in pending.last_offsets.items():
        desk.acknowledge(partition, last_offset + 1, time_ns=pending.newest_ns)
    if pending.rows:
        partitions = len(pending.last_offsets)
        _log.info("rows_stored", count=len(pending.rows), partition_count=partitions)


def _look_at(writing: asyncio.Task[None]) -> None:
    """Look at the outcome, so that asyncio does not complain where nobody waits any more."""
    if not writing.cancelled():
        writing.exception()


def _refuse_foreign_offset(partition: TopicPartition, after: int, end: int) -> None:
    if after > end:
        raise UserError(
            f"the store has {partition.topic}[{partition.partition}] up to offset {after - 1}, but "
            f"that partition ends at {end}: the topic was made anew or is another cluster's; "
            "set store.generation to a new name to go on after what is stored"
        )
