"""The store sink: appends rows made from events, exactly once.

This module connects the parts of the sink and decides when to write. `maintenance_lag` measures how
far the store's maintenance is behind, `resuming` sets partitions to their positions and records
gaps, and `stored` writes rows. `gpuledger_sinks.loop` polls and commits.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog
from typing_extensions import override

from gpuledger.bus.protocol import Bus, Gap, Record, TopicPartition
from gpuledger.clock import NS_PER_SECOND, NS_PER_US, Clock
from gpuledger.errors import NotAssignedError
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check, CheckSeverity, Readiness, RetryingCaller
from gpuledger.settings.secret import shown_url
from gpuledger.store.damaged_files import local_folder
from gpuledger_sinks.errors import ReceiverUnavailableError, retry_receiver
from gpuledger_sinks.metrics import SENT_TOTAL, count_dropped
from gpuledger_sinks.protocol import Batch, Partitions, Refusal, RejectedEvent, Sink, SinkContext
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.buffer import DayWindow, RowBuffer, rows_of
from gpuledger_sinks.store.dimensions import DIMENSIONS, FollowedTopic, open_followed
from gpuledger_sinks.store.maintenance_lag import MaintenanceLag, measured_lag
from gpuledger_sinks.store.minute_sums import Row, TooManyRowsError, bookings_days, bookings_of
from gpuledger_sinks.store.resuming import GapRecorder, Resuming
from gpuledger_sinks.store.seen import SeenTable
from gpuledger_sinks.store.store_redelivery import MAX_REDELIVERED, StoreRedelivery
from gpuledger_sinks.store.stored import Appending, Stored, Streams, Target
from gpuledger_sinks.store.table import (
    EntriesTable,
    GapsTable,
    StaleTableError,
    StreamTable,
    UsageTable,
)
from gpuledger_sinks.timelines import SeenTicks
from gpuledger_sinks.watermarks import WatermarkRelay, open_relay

NAME: Final = STORE.name
_DIMENSIONS_SECONDS: Final = 2.0
"""Maximum time for the last update of the other tables; the next owner reads what is missing."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoreTables:
    """The tables of a store that a sink writes."""

    usage: UsageTable
    entries: EntriesTable | None
    """`None` if single ticks are not stored."""
    gaps: GapsTable
    seen: SeenTable
    dimensions: Mapping[str, StreamTable]
    """The tables that readers join with usage rows, by name."""

    @classmethod
    def of(cls, settings: StoreSettings) -> "StoreTables":
        """Return the tables that these settings require, without opening them."""
        where: dict[str, Any] = {
            "store_uri": settings.uri,
            "storage_options": settings.storage_options,
        }
        return cls(
            usage=UsageTable(**where),
            entries=EntriesTable(**where) if settings.entries else None,
            gaps=GapsTable(**where),
            seen=SeenTable(**where),
            dimensions={each.schema.name: StreamTable(each.schema, **where) for each in DIMENSIONS},
        )


@asynccontextmanager
async def open_sink(
    *,
    bus: Bus,
    settings: StoreSettings,
    readiness: Readiness,
    clock: Clock,
    group: str,  # noqa: ARG001  # required by OpenSink
) -> AsyncIterator["StoreSink"]:
    """Open the sink that appends the rows of every event to the store.

    The sink raises UserError if a table has rows of another topic than the one that is read.
    """
    tables = StoreTables.of(settings)
    async with open_store(
        tables, bus=bus, settings=settings, readiness=readiness, clock=clock
    ) as sink:
        yield sink


@asynccontextmanager
async def open_store(
    tables: StoreTables,
    *,
    bus: Bus,
    settings: StoreSettings,
    readiness: Readiness,
    clock: Clock,
) -> AsyncIterator["StoreSink"]:
    """Open the sink that appends to these tables."""
    check = readiness.check("store.receiver", severity=CheckSeverity.WARNING)
    disk_check: Check | None = None
    if local_folder(settings.uri) is not None:
        disk_check = readiness.check("store.disk")
        disk_check.ok()
    retrying = retry_receiver(
        sink=NAME,
        check=check,
        clock=clock,
        receiver=shown_url(settings.uri),
        disk_check=disk_check,
    )
    # All consumer groups use the same streams, because the tables have one sequence of offsets.
    streams = Streams(group=bus.topics.group(STORE.group), generation=settings.generation)
    targets = targets_of(tables.usage, tables.entries, streams=streams)
    recorder = GapRecorder(
        gaps=tables.gaps, rows=targets[-1].table, stored=targets[0].stored, clock=clock
    )
    async with (
        open_relay(NAME, bus=bus, readiness=readiness, clock=clock) as relay,
        open_followed(
            tables.dimensions,
            bus=bus,
            streams=streams,
            readiness=readiness,
            clock=clock,
            settings=settings,
        ) as dimensions,
        measured_lag(settings, clock=clock) as maintenance_lag,
    ):
        yield StoreSink(
            relay=relay,
            dimensions=dimensions,
            redelivery=StoreRedelivery(topics=bus.topics, settings=settings, clock=clock),
            settings=settings,
            clock=clock,
            retrying=retrying,
            recorder=recorder,
            targets=targets,
            resuming=Resuming(
                targets=targets,
                seen=tables.seen,
                gaps=tables.gaps,
                recorder=recorder,
                retrying=retrying,
                topic=bus.topics.events.name,
                retry_brokers=retry_receiver(sink=NAME, check=Check(), clock=clock),
            ),
            appending=Appending(targets=targets, seen=tables.seen, clock=clock),
            maintenance_lag=maintenance_lag,
        )


def targets_of(
    usage: UsageTable, entries: EntriesTable | None, *, streams: Streams
) -> list[Target]:
    """Return the targets for rows of events: `usage`, and `entries` if it is written."""
    targets = [
        Target(
            table=usage,
            stored=Stored(streams=streams),
            rows_of=lambda pending: list(pending.sums.rows()),
            announces_hours=True,
        )
    ]
    if entries is not None:
        stored = Stored(streams=streams)
        targets.append(Target(table=entries, stored=stored, rows_of=lambda pending: pending.rows))
    return targets


class StoreSink(Sink):
    """Collects rows and appends them with the offsets up to which they were read."""

    name = NAME
    max_redelivered = MAX_REDELIVERED

    def __init__(
        self,
        *,
        settings: StoreSettings,
        clock: Clock,
        retrying: RetryingCaller[ReceiverUnavailableError],
        recorder: GapRecorder,
        targets: Sequence[Target],
        resuming: Resuming,
        appending: Appending,
        maintenance_lag: MaintenanceLag,
        relay: WatermarkRelay,
        dimensions: Sequence[FollowedTopic],
        redelivery: StoreRedelivery,
    ) -> None:
        self._settings, self._clock, self._retrying = settings, clock, retrying
        self.receiver = shown_url(settings.uri)
        self._recorder, self._resuming, self._appending = recorder, resuming, appending
        self._maintenance_lag = maintenance_lag
        self._relay = relay
        self._dimensions, self._redelivery = dimensions, redelivery
        self._usage, *others = targets
        self._entries = others[0] if others else None
        self._pending = RowBuffer()
        self._window = DayWindow(
            max_age_seconds=settings.max_age_seconds,
            max_future_seconds=settings.max_future_seconds,
        )
        self._seen = SeenTicks(clock=clock)
        self._lock = asyncio.Lock()

    @override
    async def assign(self, partitions: Partitions) -> None:
        """Record new partitions; `prepare` sets them to their position."""
        self._resuming.require(partitions)

    @override
    async def handle_gap(self, gap: Gap) -> None:
        """Keep a gap until its row is written; rows of later events are written after it."""
        self._recorder.add(gap)

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Set new partitions to the position at which the tables end; return these partitions.

        Raises UserError if a table has rows of another topic.
        """
        async with self._lock:
            if not self._resuming.is_due(context.consumer):
                return frozenset()
            # An append whose caller was cancelled may still change the offsets that are looked up.
            await self._appending.end()
            # The flush may find that other partitions must be looked up again.
            await self._flush(context)
            seen = await self._resuming.seek(context.consumer)
            # Replaces the ticks seen in memory, because later records are read again.
            for partition, ticks in seen.items():
                self._seen.restore(partition, ticks)
            sought = frozenset(seen)
            self._relay.follow(sought)
            for each in self._dimensions:
                each.follow(sought)
            return sought

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Collect the rows of a poll, and write if it is time."""
        async with self._lock:
            self._maintenance_lag.begin_if_due()
            for each in self._dimensions:
                each.begin_if_due()
            if self._recorder.of(self._resuming.ready(context.consumer)):
                # Rows before the gap are written first, because the gap begins after the last
                # stored row. The flush may find that partitions must be looked up again; their gaps
                # wait.
                await self._flush(context)
                ready = self._resuming.ready(context.consumer)
                await self._resuming.record(self._recorder.of(ready))
            ready = self._resuming.ready(context.consumer)
            for batch in batches:
                # A flush within an earlier batch may have required this partition to be sought.
                if batch.partition in ready and not self._resuming.is_needed(batch.partition):
                    await self._collect(batch, context)
                else:
                    # The batch is read again after the stored rows, and its dead letters are made
                    # again.
                    context.dead_letters.drop(
                        batch.partition.partition, topic=batch.partition.topic
                    )
            if self._is_full() or self._pending.is_due(
                now_ns=self._clock.monotonic_ns(),
                after_ns=round(self._settings.flush_seconds * NS_PER_SECOND),
                max_rows=self._settings.flush_rows,
            ):
                await self._flush(context)
            await self._record_done(context)

    async def _record_done(self, context: SinkContext) -> None:
        """Record how far partitions without unwritten rows are done, for their watermarks."""
        self._relay.begin_if_due()
        for at in self._resuming.ready(context.consumer) - self._pending.last_offsets.keys():
            if self._recorder.of([at]):
                continue
            # If the partition was just revoked, the next owner records its progress.
            with suppress(NotAssignedError):
                self._relay.record_done(at.partition, await context.consumer.position(at))

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Try once to write the pending rows; the next owner resumes where the tables end."""
        async with self._lock:
            try:
                await self._flush_once(context)
                # Also keeps the last descriptions of a pipeline that ends with its bus.
                try:
                    async with asyncio.timeout(_DIMENSIONS_SECONDS):
                        await asyncio.gather(*(each.update() for each in self._dimensions))
                except TimeoutError:
                    _log.warning("versions_delayed", seconds=_DIMENSIONS_SECONDS)
            finally:
                # Rows that could not be written are read again by their partitions' next owner,
                # which also makes their dead letters.
                for topic, partition in self._pending.last_offsets:
                    context.dead_letters.drop(partition, topic=topic)
                self._resuming.require(self._pending.last_offsets)
                self._resuming.cancel(partitions)
                self._pending = RowBuffer()
                self._seen.forget(partitions)
                self._relay.forget(partitions)
                for each in self._dimensions:
                    each.forget(partitions)

    @override
    async def redeliver(self, rejected: Sequence[RejectedEvent], /) -> Sequence[Refusal | None]:
        """Append rows that are not stored yet; return why each event is rejected, or `None`."""
        return await self._redelivery.deliver(rejected)

    async def _collect(self, batch: Batch, context: SinkContext) -> None:
        """Collect the rows of a batch; if they are too many, write before the batch ends."""
        partition, clock = batch.partition, self._clock
        for record, event in batch.items:
            if self._is_full():
                await self._flush(context)
                if partition not in self._resuming.ready(context.consumer):
                    context.dead_letters.drop(partition.partition, topic=partition.topic)
                    return
            self._add_event(partition, record, event, context)
            self._pending.read_to(partition, record.offset, now_ns=clock.monotonic_ns())
        # Includes undecodable records at the end of the batch, which have only dead letters.
        self._pending.read_to(partition, batch.next_offset - 1, now_ns=clock.monotonic_ns())

    def _add_event(
        self, partition: TopicPartition, record: Record, event: GpuEvent, context: SinkContext
    ) -> None:
        if not self._seen.is_new(partition, event):
            count_dropped(NAME, "duplicate")
            return
        now_ns = self._clock.time_ns()
        try:
            bookings = bookings_of(event)
            rows: list[Row] = []
            if self._entries is not None and self._entries.lacks(partition, record.offset):
                rows = list(rows_of(event, record, ingested_time_ns=now_ns))
        except TooManyRowsError as error:
            context.dead_letters.reject(record, reason="too_large", detail=str(error))
            return
        except ValueError as error:
            context.dead_letters.reject(record, reason="invalid", detail=str(error))
            return
        if refusal := self._window.refusal_of(bookings_days(bookings), now_ns=now_ns):
            context.dead_letters.reject(record, reason=refusal.reason, detail=refusal.detail)
            return
        # If a sink was killed between the commits of two tables, the table that is ahead already
        # has these rows.
        if self._usage.lacks(partition, record.offset):
            self._pending.add_sums(event, bookings, record, ingested_time_ns=now_ns)
        if rows:
            self._pending.add(rows, time_ns=event.time_ns)

    def _is_full(self) -> bool:
        return self._pending.is_full(max_bytes=self._settings.flush_bytes)

    async def _flush(self, context: SinkContext) -> None:
        if self._pending.row_count:
            await self._retrying(lambda: self._flush_once(context))
        else:
            # The retrying caller would pass the check, although no table is queried.
            await self._flush_once(context)

    async def _flush_once(self, context: SinkContext) -> None:
        pending = self._pending
        try:
            if pending.row_count:
                # Dead letters are published first. The commit moves the offsets, after which dead
                # letters are not made again.
                await context.dead_letters.flush()
                self._must_be_held(pending, context)
                await self._must_still_be_of_topic(context)
                # Rows and offsets are committed last, because this cannot be undone.
                with self._retrying.awaiting():
                    await self._appending.append(
                        pending,
                        seen={at: self._seen.state_of(at) for at in pending.last_offsets},
                        valid_through=self._valid_through(pending, context),
                    )
        except StaleTableError as error:
            # These rows must not be written again, because another sink may have stored some of
            # them. Their records are read again from the table's new offsets.
            _log.warning("rows_withdrawn", error=str(error), count=pending.row_count)
            self._resuming.require(context.consumer.assignment())
        else:
            SENT_TOTAL.labels(sink=NAME).inc(pending.row_count)
            for partition, last_offset in pending.last_offsets.items():
                context.acknowledge(partition, last_offset + 1, time_ns=pending.newest_ns)
            if pending.row_count:
                partitions = len(pending.last_offsets)
                _log.info("rows_stored", count=pending.row_count, partition_count=partitions)
        self._pending = RowBuffer()

    def _valid_through(self, pending: RowBuffer, context: SinkContext) -> dict[str, int]:
        """Return the time through which each assigned partition is complete after this write.

        The times are in microseconds, by partition number. Partitions without rows are included:
        otherwise a partition without nodes would hold back the watermark of the whole store.
        """
        found: dict[str, int] = {}
        for at in self._resuming.ready(context.consumer):
            last = pending.last_offsets.get(at)
            until_ns = (
                self._relay.complete_until_ns(at.partition)
                if last is None
                else self._relay.complete_with_ns(at.partition, last + 1)
            )
            if until_ns is not None:
                found[str(at.partition)] = until_ns // NS_PER_US
        return found

    def _must_be_held(self, pending: RowBuffer, context: SinkContext) -> None:
        """Raise StaleTableError if a partition was revoked after its rows were collected.

        The dead letters of its records were dropped at the revocation, so the commit must not move
        the offset past these records.
        """
        for at in pending.last_offsets:
            if not context.is_current(at) or self._resuming.is_needed(at):
                raise StaleTableError(f"{at} was revoked before its rows were stored")

    async def _must_still_be_of_topic(self, context: SinkContext) -> None:
        """Raise an error if the topic was recreated since the rows were collected.

        Called after the last row was read and before any is written: if the topic still has the
        same id, all rows come from it. Raises UserError, or StaleTableError if no row of these
        partitions is stored yet.
        """
        topic_id = await self._resuming.topic_id_now(context.consumer)
        if topic_id == self._resuming.topic_id:
            return
        # The collected rows are dropped, because a row does not show from which topic it comes.
        read, self._pending = self._pending.last_offsets, RowBuffer()
        await self._resuming.refuse_rows(read, topic_id=topic_id)
