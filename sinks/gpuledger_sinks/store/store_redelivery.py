"""Append the rows of refused events to the store, beside the sink that goes on there.

Under a stream of its own: the offsets of the sink's partitions stay where they are. A row has the
place of the record that its event was read from. An event that is handed over again has rows whose
first and last offset are its own, and nothing else has: what the event was refused for, it has
added to no row before. So it is looked up whether they are there, and each event is added once,
however often a replay is begun anew.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NamedTuple

from typing_extensions import override

from gpuledger.bus.protocol import Bus, Record
from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.settings.secret import shown_url
from gpuledger.store.commits import describe
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.redelivery import Redelivery, Refusals, RefusedEvent
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.buffer import DayWindow, rows_of
from gpuledger_sinks.store.minute_sums import (
    MINUTES_A_DAY,
    MinuteSums,
    Row,
    bookings_days,
    bookings_of,
)
from gpuledger_sinks.store.table import EntriesTable, StaleTableError, TimedTable, UsageTable

_STREAM: Final = "gpuledger-dead-letters"
_MAX_BATCH: Final = 100
"""Events of one commit: each costs a file a day, and one event may be a hundred megabytes."""


@asynccontextmanager
async def open_redelivery(
    *,
    bus: Bus,
    settings: StoreSettings,
    readiness: Readiness,  # noqa: ARG001  # as OpenRedelivery has it
    clock: Clock,
) -> AsyncIterator["StoreRedelivery"]:
    """Open the redelivery to the table of these settings; it is loaded with the first batch."""
    yield StoreRedelivery(stream=bus.topics.group(_STREAM), settings=settings, clock=clock)


class StoreRedelivery(Redelivery):
    """Appends a batch in one commit."""

    max_batch = _MAX_BATCH

    def __init__(self, *, stream: str, settings: StoreSettings, clock: Clock) -> None:
        self._usage = UsageTable(store_uri=settings.uri, storage_options=settings.storage_options)
        self._entries = (
            EntriesTable(store_uri=settings.uri, storage_options=settings.storage_options)
            if settings.entries
            else None
        )
        self.receiver = f"store {shown_url(settings.uri)}"
        self._stream, self._clock = stream, clock
        self._window = DayWindow(
            max_age_seconds=settings.max_age_seconds,
            max_future_seconds=settings.max_future_seconds,
        )

    @override
    async def deliver(self, batch: Sequence[RefusedEvent]) -> Refusals:
        """Append the rows of all events whose days are stored, or of none."""
        booked: list[_Booked] = []
        refusals = [self._book(booked, each) for each in batch]
        if booked:
            await in_daemon_thread(partial(self._append, booked))
        return refusals

    def _book(self, booked: list["_Booked"], refused: RefusedEvent) -> str | None:
        now_ns = self._clock.time_ns()
        record, event = refused
        try:
            bookings = bookings_of(event)
            entries = list(rows_of(event, record, ingested_time_ns=now_ns))
        except ValueError as error:
            return f"invalid: {error}"
        if refusal := self._window.refusal_of(bookings_days(bookings), now_ns=now_ns):
            return f"{refusal.reason}: {refusal.detail}"
        sums = MinuteSums()
        sums.add(event, bookings, record, ingested_time_ns=now_ns)
        booked.append(_Booked(record, sums, entries))
        return None

    def _append(self, booked: Sequence["_Booked"]) -> None:
        """Append to each table what it has not got."""
        self._append_to(self._usage, booked, rows_of=lambda each: each.sums.rows(), tells=True)
        if self._entries is not None:
            self._append_to(self._entries, booked, rows_of=lambda each: each.entries)

    def _append_to(
        self,
        table: TimedTable,
        booked: Sequence["_Booked"],
        *,
        rows_of: Callable[["_Booked"], Iterable[Row]],
        tells: bool = False,
    ) -> None:
        last = table.load([self._stream]).get(self._stream, 0)
        days = {minute // MINUTES_A_DAY for each in booked for minute in each.sums.minutes}
        places = {(each.record.partition, each.record.offset) for each in booked}
        stored = table.single_events(places, days=days)
        new = [each for each in booked if (each.record.partition, each.record.offset) not in stored]
        rows = [row for each in new for row in rows_of(each)]
        if not rows:
            return
        now_ns = self._clock.time_ns()
        hours = {minute // 60 for each in new for minute in each.sums.minutes}
        # Any number that grows: which letters are done is on the topic of letters, not here.
        number = {self._stream: max(now_ns, last + 1)}
        try:
            table.append(
                rows,
                number,
                time_ms=now_ns // NS_PER_MS,
                # Repeated: behind many replayed letters nobody would find it any more.
                commit_info=describe(
                    hours=hours if tells else None, valid_through=table.complete_through()
                ),
            )
        except StaleTableError as error:
            raise ReceiverUnavailableError(f"another replay appends there: {error}") from error


class _Booked(NamedTuple):
    """A refused event that is to be stored."""

    record: Record
    sums: MinuteSums
    entries: Sequence[Row]
