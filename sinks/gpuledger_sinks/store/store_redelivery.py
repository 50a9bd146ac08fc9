"""Appends the rows of rejected events to the store while the sink continues.

Redelivery has its own stream, so that the offsets of the sink's partitions do not change. A row has
the partition and offset of the record from which its event was originally read. A rejected event
was added to no row. Only its redelivery therefore makes rows that begin and end at the event's
offset. Such rows are looked up before each append. Each event is therefore appended once, however
often it is replayed. If another writer has appended to the stream meanwhile, the append fails and
the rows are looked up again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.store.commits import describe
from gpuledger.topics import Topics
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.protocol import Refusal, RejectedEvent
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
_Place = tuple[int, int]
"""The partition and the offset of an event."""
MAX_REDELIVERED: Final = 100
"""Maximum number of events per commit: each costs a file per day and may have 100 MB."""


class StoreRedelivery:
    """Appends a batch of rejected events in one commit per table."""

    def __init__(self, *, topics: Topics, settings: StoreSettings, clock: Clock) -> None:
        self._usage = UsageTable(store_uri=settings.uri, storage_options=settings.storage_options)
        self._entries = (
            EntriesTable(store_uri=settings.uri, storage_options=settings.storage_options)
            if settings.entries
            else None
        )
        self._stream, self._clock = topics.group(_STREAM), clock
        self._window = DayWindow(
            max_age_seconds=settings.max_age_seconds,
            max_future_seconds=settings.max_future_seconds,
        )

    async def deliver(self, rejected: Sequence[RejectedEvent]) -> Sequence[Refusal | None]:
        """Append the rows of events; return why each event is rejected, or `None`.

        Rows of valid events that are already stored are not appended again. Raises
        ReceiverUnavailableError if the storage fails or another sink was faster; the caller must
        then repeat the call.
        """
        # The key is the partition and offset, so that an event that is given twice is stored once.
        booked: dict[_Place, _Booked] = {}
        refusals = [self._book(booked, each) for each in rejected]
        if booked:
            await in_daemon_thread(partial(self._append, booked))
        return refusals

    def _book(self, booked: dict[_Place, "_Booked"], rejected: RejectedEvent) -> Refusal | None:
        now_ns = self._clock.time_ns()
        record, event = rejected
        try:
            bookings = bookings_of(event)
            entries = list(rows_of(event, record, ingested_time_ns=now_ns))
        except ValueError as error:
            return Refusal("invalid", str(error))
        if refusal := self._window.refusal_of(bookings_days(bookings), now_ns=now_ns):
            return refusal
        sums = MinuteSums()
        sums.add(event, bookings, record, ingested_time_ns=now_ns)
        booked[record.partition, record.offset] = _Booked(sums, entries)
        return None

    def _append(self, booked: Mapping[_Place, "_Booked"]) -> None:
        """Append to each table the rows that are not stored in it yet."""
        self._append_to(
            self._usage, booked, rows_of=lambda each: each.sums.rows(), records_hours=True
        )
        if self._entries is not None:
            self._append_to(self._entries, booked, rows_of=lambda each: each.entries)

    def _append_to(
        self,
        table: TimedTable,
        booked: Mapping[_Place, "_Booked"],
        *,
        rows_of: Callable[["_Booked"], Iterable[Row]],
        records_hours: bool = False,
    ) -> None:
        last = table.load([self._stream]).get(self._stream, 0)
        days = {minute // MINUTES_A_DAY for each in booked.values() for minute in each.sums.minutes}
        stored = table.single_events(booked, days=days)
        new = [each for place, each in booked.items() if place not in stored]
        rows = [row for each in new for row in rows_of(each)]
        if not rows:
            return
        now_ns = self._clock.time_ns()
        hours = {minute // 60 for each in new for minute in each.sums.minutes}
        # The number only has to grow, because stored events are looked up by their offsets.
        number = {self._stream: max(now_ns, last + 1)}
        try:
            table.append(
                rows,
                number,
                time_ms=now_ns // NS_PER_MS,
                # `valid_through` is repeated, because readers search only the newest commits.
                commit_info=describe(
                    hours=hours if records_hours else None, valid_through=table.complete_through()
                ),
            )
        except StaleTableError as error:
            raise ReceiverUnavailableError(f"overtaken by another sink: {error}") from error


class _Booked(NamedTuple):
    """The rows of a rejected event."""

    sums: MinuteSums
    entries: Sequence[Row]
