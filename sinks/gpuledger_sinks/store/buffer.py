"""Events to rows of the table `entries`, and all that waits to be written. Pure.

What an event comes to in the table `usage` is `minute_sums`'s. `rows_of` writes the values of
`gpuledger.ledger.rows` as the store has them: one row an entry, values in the order of its columns,
no Arrow. `DayWindow` says of which days rows are stored: as far
back as ticks come late, as far ahead as clocks are. Each day is a folder with files of its own, and
a tick's time is its writer's word: days that are made up would each cost a file for a row. They are
held against this machine's clock, as every other time, Kafka's timestamp included, is the writer's
too. `RowBuffer` holds what was read between two writes, and how far each partition has been read.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import starmap
from typing import Final, NamedTuple

import orjson

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger.clock import NS_PER_DAY, NS_PER_SECOND
from gpuledger.ledger.entries import Origin, RecordPosition, booked_entries
from gpuledger.ledger.rows import STORE_COLUMNS, ColumnType, row_maker
from gpuledger.records import GpuEvent
from gpuledger_sinks.protocol import Refusal
from gpuledger_sinks.store.minute_sums import Booking, MinuteSums, Row, bookings_days


def rows_of(event: GpuEvent, position: RecordPosition, *, ingested_time_ns: int) -> Iterator[Row]:
    """Return one row for each entry of each GPU of the event, and of each settlement.

    Raises ValueError where `booked_entries` does.
    """
    return starmap(_make_row, booked_entries(event, Origin(position, ingested_time_ns)))


_make_row: Final = row_maker(
    STORE_COLUMNS,
    {
        ColumnType.DAY: "{} // 86_400_000_000_000",
        ColumnType.TIME: "{} // 1000",
        ColumnType.FLAG: "bool({})",
        # The text, not the word, which is of a class of its own. `value` is a property written in
        # Python: for four words a row it took a seventh of the time in which rows are made.
        ColumnType.CODE: "{}._value_",
        ColumnType.LABELS: "as_json({})",
    },
    # Sorted: rows of equal labels have equal text, which Parquet's dictionaries and people's GROUP
    # BY go by.
    {"as_json": lambda labels: orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()},
)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class DayWindow(NamedTuple):
    """The days of which rows are stored."""

    max_age_seconds: float
    max_future_seconds: float

    def refusal_of(self, days: Collection[int], *, now_ns: int) -> Refusal | None:
        """Return why an event is not stored of which there are rows of these days since 1970."""
        if not days:
            return None
        # A settlement may be of an earlier day than its tick, so an event has rows of several.
        first, last = min(days), max(days)
        if last > (now_ns + round(self.max_future_seconds * NS_PER_SECOND)) // NS_PER_DAY:
            setting = f"store.max_future_seconds is {self.max_future_seconds:.0f}"
            return Refusal("future", f"time_ns is of {_shown(last)}, too far ahead: {setting}")
        if first < (now_ns - round(self.max_age_seconds * NS_PER_SECOND)) // NS_PER_DAY:
            setting = f"store.max_age_seconds is {self.max_age_seconds:.0f}"
            return Refusal("too_old", f"time_ns is of {_shown(first)}, too long ago: {setting}")
        return None


def _shown(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return f"{day} days after 1970"


_SUMS_BYTES: Final = 3_000
"""Bytes of a row of `usage` in memory, with its key: in Python, and again as columns."""
_NUMBERS_BYTES: Final = 1_000
"""Bytes of a row in memory, its texts left out: in Python, and again as columns."""
MAX_DAYS: Final = 40
"""Days that a write may have rows of: each is a folder with a file of its own, which the writer
holds open. More than `max_age_seconds` and `max_future_seconds` leave, by default: nobody can have
it written for the days alone."""
DAYS_A_WAIT: Final = 4
"""So many files a `flush_seconds` are written at most where it is time alone that has them written:
rows are of one day or two, and of a few more where nodes are late or clocks are wrong."""


@dataclass
class RowBuffer:
    """What has been read and not been written."""

    sums: MinuteSums = field(default_factory=MinuteSums)
    """The rows of `usage`."""
    rows: list[Row] = field(default_factory=list)
    """The rows of `entries`, where these are stored."""
    last_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The last offset read of each partition, also where it brought no rows."""
    size_bytes: int = 0
    """About how much memory the rows take, once they are written."""
    days: set[int] = field(default_factory=set)
    """The days of which there are rows."""
    newest_ns: int | None = None
    """Time of the newest event among the rows."""
    since_ns: int | None = None
    """When the oldest of it came, by the monotonic clock."""

    @property
    def row_count(self) -> int:
        """How many rows there are to write."""
        return self.sums.row_count + len(self.rows)

    def add_sums(
        self, event: GpuEvent, bookings: Sequence[Booking], record: Record, *, ingested_time_ns: int
    ) -> None:
        """Take in what one event adds to the rows of `usage`."""
        former = self.sums.row_count
        self.sums.add(event, bookings, record, ingested_time_ns=ingested_time_ns)
        self.size_bytes += _SUMS_BYTES * (self.sums.row_count - former)
        # An event without devices has no rows, and so no days.
        if bookings:
            self._count(bookings_days(bookings), event.time_ns)

    def add(self, rows: Sequence[Row], *, time_ns: int) -> None:
        """Take in the rows of `entries` of one event."""
        self.rows.extend(rows)
        # Texts are copied into columns, so they count beside what a row takes by itself: somebody's
        # labels may be most of it.
        self.size_bytes += sum(
            _NUMBERS_BYTES + sum([len(value) for value in row if type(value) is str])
            for row in rows
        )
        self._count({row[0] for row in rows}, time_ns)

    def _count(self, days: Collection[int], time_ns: int) -> None:
        self.days.update(days)
        self.newest_ns = time_ns if self.newest_ns is None else max(self.newest_ns, time_ns)

    def read_to(self, partition: TopicPartition, offset: int, *, now_ns: int) -> None:
        """Note that the partition has been read up to and with `offset`."""
        self.last_offsets[partition] = offset
        if self.since_ns is None:
            self.since_ns = now_ns

    def is_full(self, *, max_bytes: int) -> bool:
        """Return whether it is to be written before any more is taken in."""
        return self.size_bytes >= max_bytes or len(self.days) >= MAX_DAYS

    def is_due(self, *, now_ns: int, after_ns: int, max_rows: int) -> bool:
        """Return whether it is time to write: too many rows, or the oldest waited too long.

        Rows of many days wait for longer, in proportion: small files of many days are what makes a
        table slow, and somebody may make up the days.
        """
        if self.since_ns is None:
            return False
        waits = max(1.0, len(self.days) / DAYS_A_WAIT)
        return self.row_count >= max_rows or now_ns - self.since_ns >= waits * after_ns
