"""The store sink's shell: events in, rows appended, exactly once.

Here live seeking to what the table has, flushing, and what is done when another consumer was
faster. Rows are made in `rows`, written in `table`; the consume loop is `sinks.consuming`'s.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from gpuledger.addresses import shown_url
from gpuledger.bus.protocol import Bus, Gap, GapReason, TopicPartition
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.errors import BusUnavailableError
from gpuledger.records import GpuEvent
from gpuledger.service import Check, Readiness, Severity
from gpuledger.topics import EVENTS
from gpuledger.twins import twin_of
from sinks.consuming import consume
from sinks.duplicates import SeenTicks
from sinks.errors import ReceiverUnavailableError
from sinks.metrics import DROPPED_TOTAL, SENT_TOTAL
from sinks.protocol import Batch, Consuming, Desk, Partitions
from sinks.retrying import until_answered
from sinks.store.gaps import recorded_up_to, row_of, stream_of
from sinks.store.identity import is_same_topic, number_of, other_topic, refuse_shorter_topic
from sinks.store.maintenance import Maintenance
from sinks.store.pending import Pending
from sinks.store.rows import rows_of
from sinks.store.settings import StoreSettings
from sinks.store.table import EntriesTable, GapsTable, StaleTableError
from sinks.store.threads import in_daemon_thread

GROUP: Final = "gpuledger-store"
NAME: Final = "store"
T = TypeVar("T")
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
    where: dict[str, Any] = {"store_uri": settings.uri, "storage_options": settings.storage_options}
    table, gaps = EntriesTable(**where), GapsTable(**where)
    sink = StoreSink(
        table=table,
        gaps=gaps,
        maintenance=Maintenance(tables=[table, gaps], settings=settings, clock=clock),
        settings=settings,
        clock=clock,
        check=readiness.check("store.receiver", severity=Severity.WARNING),
    )
    how = Consuming(
        group=group,
        member=member,
        decoders={EVENTS.name: Decoder(topic=EVENTS.name, record=twin_of(GpuEvent))},
        poll_records=settings.poll_records,
        receiver=shown_url(settings.uri),
        on_gap=sink.note_gap,
    )
    await consume(
        bus=bus,
        sink=sink,
        how=how,
        check=readiness.check("store.bus"),
        gaps=readiness.check("store.gaps", severity=Severity.WARNING),
        clock=clock,
    )


class StoreSink:
    """Collects rows and appends them with the offsets up to which they were read."""

    name = NAME

    def __init__(
        self,
        *,
        table: EntriesTable,
        gaps: GapsTable,
        maintenance: Maintenance,
        settings: StoreSettings,
        clock: Clock,
        check: Check,
    ) -> None:
        self._table, self._settings, self._clock = table, settings, clock
        self._check = check
        self._gaps_table, self._maintenance = gaps, maintenance
        self._unsought: set[TopicPartition] = set()
        self._pending = Pending()
        self._gaps: list[Gap] = []
        """Gaps that were not looked up in the table yet. A consumer reports a gap once, so that of
        a partition that is given up waits here: it may come back before anybody recorded it."""
        self._stored: dict[TopicPartition, int] = {}
        """The last offset that the table had of each partition when it was sought."""
        self._topic_id: str | None = None
        """The identity of the topic of which rows are collected."""
        self._has_identity: set[TopicPartition] = set()
        """Partitions of which the table knows the topic's identity."""
        self._seen = SeenTicks(clock=clock)
        self._lock = asyncio.Lock()
        self._writing: asyncio.Task[None] | None = None

    async def assign(self, partitions: Partitions, desk: Desk) -> None:  # noqa: ARG002  # a sink's method
        """Remember that these have yet to be set to where the table ends."""
        self._unsought |= partitions

    async def note_gap(self, gap: Gap) -> None:
        """Remember a gap until it has its row, which it gets before any event behind it."""
        self._gaps.append(gap)

    async def prepare(self, desk: Desk) -> Partitions:
        """Set partitions newly held to where the table ends."""
        async with self._lock:
            return await self._seek(desk)

    async def take(self, batches: Sequence[Batch], desk: Desk) -> None:
        """Collect the rows of a poll and write when it is time."""
        async with self._lock:
            self._maintenance.begin_if_due()
            if self._gaps_to_record(desk):
                await self._flush(desk)
                await self._until_answered(
                    lambda _: self._record_gaps_once(self._gaps_to_record(desk))
                )
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
        topic_id = await desk.consumer.topic_id(EVENTS.name)
        if topic_id != self._topic_id:
            # Whatever is held was sought in another topic.
            self._unsought |= desk.consumer.assignment()
        self._topic_id = topic_id
        wanted = desk.consumer.assignment() & self._unsought
        await self._must_be_of_topic(wanted)
        ends = await desk.consumer.end_offsets(wanted)
        for partition in wanted:
            last_offset = self._stored.get(partition, -1)
            refuse_shorter_topic(partition, last_offset=last_offset, end=ends[partition])
            await desk.consumer.seek(partition, last_offset + 1)
        self._unsought -= wanted
        self._seen.forget(wanted)
        return wanted

    async def _must_be_of_topic(self, wanted: Partitions) -> None:
        """Load what the table has of partitions; see that it is of the topic that there is now."""
        streams = [name for at in wanted for name in (self._stream(at), self._identity(at))]
        stored = await self._until_answered(
            lambda _: in_daemon_thread(partial(self._load, streams))
        )
        others: list[TopicPartition] = []
        for partition in sorted(wanted):
            self._stored.pop(partition, None)
            last_offset = stored.get(self._stream(partition))
            identity = stored.get(self._identity(partition))
            if last_offset is not None:
                self._stored[partition] = last_offset
            if identity is None:
                self._has_identity.discard(partition)
            else:
                self._has_identity.add(partition)
            if not is_same_topic(stored=identity, topic_id=self._topic_id):
                others.append(partition)
        if others:
            await self._refuse_other_topic(others, topic_id=self._topic_id)

    def _load(self, streams: Sequence[str]) -> dict[str, int]:
        # A reader of `gaps` shall find it empty, not absent.
        self._gaps_table.load([])
        return self._table.load(streams)

    async def _refuse_other_topic(
        self, partitions: Sequence[TopicPartition], *, topic_id: str | None
    ) -> None:
        """Raise UserError, once it is recorded that the rest of the old topic is not known."""
        gaps = [
            Gap(
                partition=partition,
                first_offset=self._stored.get(partition, -1) + 1,
                next_offset=0,
                reason=GapReason.TOPIC_RECREATED,
            )
            for partition in partitions
        ]
        await self._until_answered(lambda _: self._record_gaps_once(gaps))
        first = partitions[0]
        raise other_topic(first, last_offset=self._stored.get(first, -1), topic_id=topic_id)

    def _gaps_to_record(self, desk: Desk) -> list[Gap]:
        """Return the gaps of partitions that are held, and of which it is known what is stored."""
        known = desk.consumer.assignment() - self._unsought
        return [gap for gap in self._gaps if gap.partition in known]

    async def _record_gaps_once(self, gaps: Sequence[Gap]) -> None:
        """Give each gap its row; where another consumer does the same, look again."""
        by_stream: dict[str, list[Gap]] = {}
        for gap in gaps:
            stream = stream_of(self._stream(gap.partition), gap)
            by_stream.setdefault(stream, []).append(gap)
        for stream, alike in by_stream.items():
            try:
                await in_daemon_thread(partial(self._record_gaps, stream, alike))
            except StaleTableError as error:
                raise ReceiverUnavailableError(str(error)) from error
            self._gaps = [each for each in self._gaps if each not in alike]

    def _record_gaps(self, stream: str, gaps: Sequence[Gap]) -> None:
        """Write the rows of one stream in one commit: a poll may bring many gaps."""
        recorded = self._gaps_table.load([stream]).get(stream)
        time_ns = self._clock.time_ns()
        rows = []
        for gap in gaps:
            row = row_of(
                gap,
                stored=self._stored.get(gap.partition),
                recorded=recorded,
                topic_id=self._topic_id if gap.has_end else None,
                time_before_us=self._time_before_us(gap),
                detected_us=time_ns // 1000,
            )
            if row is not None:
                rows.append(row)
                recorded = recorded_up_to(gap)
        if rows and recorded is not None:
            self._gaps_table.append(rows, {stream: recorded}, time_ms=time_ns // 1_000_000)

    def _time_before_us(self, gap: Gap) -> int | None:
        if gap.time_before_ms is not None:
            return gap.time_before_ms * 1000
        newest = self._table.newest_time(gap.partition.partition)
        return None if newest is None else round(newest.timestamp() * 1e6)

    def _stream(self, partition: TopicPartition) -> str:
        parts = [GROUP, self._settings.generation, partition.topic, str(partition.partition)]
        return "|".join(part for part in parts if part)

    def _identity(self, partition: TopicPartition) -> str:
        return f"{self._stream(partition)}|topic_id"

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
        await self._until_answered(lambda _: self._flush_once(desk))

    async def _until_answered(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        return await until_answered(
            attempt,
            sink=NAME,
            check=self._check,
            clock=self._clock,
            receiver=shown_url(self._table.uri),
        )

    async def _flush_once(self, desk: Desk) -> None:
        pending = self._pending
        try:
            if pending.rows:
                # The rows take the offsets with them: what was put aside would not be read again.
                await desk.office.flush()
                await self._must_still_be_of_topic(desk)
                await self._append(pending)
        except StaleTableError as error:
            _log.warning("rows_withdrawn", error=str(error), count=len(pending.rows))
            self._unsought |= desk.consumer.assignment()
        else:
            _acknowledge(pending, desk)
        self._pending = Pending()

    async def _must_still_be_of_topic(self, desk: Desk) -> None:
        """Raise UserError where what was collected may be another topic's than it began with.

        Asked after the last row was read and before any is written: a topic that has its identity
        now has had it all the time.
        """
        if self._topic_id is None:
            return
        # Brokers that do not answer are no failure of the table. Polls go on meanwhile, and say so.
        topic_id = await until_answered(
            lambda _: _topic_id(desk), sink=NAME, check=Check(), clock=self._clock
        )
        if topic_id == self._topic_id:
            return
        stored = sorted(self._pending.last_offsets.keys() & self._stored.keys())
        # Nothing of it is written: no row tells which topic it is of.
        self._pending = Pending()
        if not stored:
            raise StaleTableError(f"the topic {EVENTS.name} was made anew before a row was stored")
        await self._refuse_other_topic(stored, topic_id=topic_id)

    async def _append(self, pending: Pending) -> None:
        """Write in a thread; where the waiting is cancelled, the next call waits for the same."""
        if self._writing is None:
            offsets = {self._stream(at): last for at, last in pending.last_offsets.items()}
            time_ms = self._clock.time_ns() // 1_000_000
            self._writing = asyncio.create_task(
                in_daemon_thread(
                    partial(
                        self._table.append,
                        pending.rows,
                        offsets,
                        time_ms=time_ms,
                        facts=self._new_identities(pending),
                    )
                )
            )
            self._writing.add_done_callback(_look_at)
        writing = self._writing
        # Cancelled or not, the outcome stays where it is until somebody has seen it.
        await asyncio.wait({writing})
        self._writing = None
        writing.result()
        self._stored |= pending.last_offsets
        self._has_identity |= pending.last_offsets.keys()

    def _new_identities(self, pending: Pending) -> dict[str, int]:
        """Give the topic's identity for each partition of which the table does not know it."""
        if self._topic_id is None:
            return {}
        number = number_of(self._topic_id)
        new = pending.last_offsets.keys() - self._has_identity
        return {self._identity(partition): number for partition in new}


async def _topic_id(desk: Desk) -> str | None:
    """Return the topic's identity of now; raise ReceiverUnavailableError where nobody answers."""
    try:
        return await desk.consumer.topic_id(EVENTS.name)
    except BusUnavailableError as error:
        raise ReceiverUnavailableError(str(error)) from error


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
