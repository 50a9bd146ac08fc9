"""Makes rows of the table `entries` from events, and buffers rows that wait to be written. Pure.

`minute_sums` makes the rows of the table `usage`. `rows_of` encodes the values of
`gpuledger.ledger.rows` for the store: one row per entry, as plain Python values in the order of the
columns.

`DayWindow` limits the days of rows, to allow for late ticks and for clocks that are ahead. Each day
is a directory with its own files, so each day that a writer invents would add a file. The days are
compared with this machine's clock, because all times of an event, including Kafka's timestamp, come
from its writer.

`RowBuffer` contains the rows made since the last write, and how far each partition was read.
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
    """Return one row for each entry of each GPU and for each late adjustment.

    Raises ValueError if the event refers to missing entries (`booked_entries`).
    """
    return starmap(_make_row, booked_entries(event, Origin(position, ingested_time_ns)))


_make_row: Final = row_maker(
    STORE_COLUMNS,
    {
        ColumnType.DAY: "{} // 86_400_000_000_000",
        ColumnType.TIME: "{} // 1000",
        ColumnType.FLAG: "bool({})",
        # Reads the plain text of an enum member directly. The property `value` is written in
        # Python; for four members per row, it took a seventh of the time for making rows.
        ColumnType.CODE: "{}._value_",
        ColumnType.LABELS: "as_json({})",
    },
    # Sorted: Parquet's dictionaries and users' GROUP BY need equal text for equal labels.
    {"as_json": lambda labels: orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()},
)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class DayWindow(NamedTuple):
    """The range of days whose rows are stored."""

    max_age_seconds: float
    max_future_seconds: float

    def refusal_of(self, days: Collection[int], *, now_ns: int) -> Refusal | None:
        """Return why an event with rows of these days is not stored, or `None` if it is stored.

        Days are numbered from 1970-01-01; `now_ns` is the current time since the epoch.
        """
        if not days:
            return None
        # A late adjustment may belong to an earlier day than its tick.
        first, last = min(days), max(days)
        if last > (now_ns + round(self.max_future_seconds * NS_PER_SECOND)) // NS_PER_DAY:
            setting = f"store.max_future_seconds is {self.max_future_seconds:.0f}"
            return Refusal("future", f"time_ns: {_shown(last)} is too far ahead; {setting}")
        if first < (now_ns - round(self.max_age_seconds * NS_PER_SECOND)) // NS_PER_DAY:
            setting = f"store.max_age_seconds is {self.max_age_seconds:.0f}"
            return Refusal("too_old", f"time_ns: {_shown(first)} is too long ago; {setting}")
        return None


def _shown(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).date().isoformat()
    except OverflowError:
        return f"{day} days after 1970"


_SUMS_BYTES: Final = 3_000
"""Memory per row of `usage` with its key, in bytes: as Python objects, and again as columns."""
_NUMBERS_BYTES: Final = 1_000
"""Memory per row of `entries` without its texts, in bytes: as Python objects, and again as columns.
"""
MAX_DAYS: Final = 40
"""Maximum number of days with rows in one write, because the writer holds a file open per day. The
default `max_age_seconds` and `max_future_seconds` allow fewer, so that invented days never trigger
a write."""
DAYS_A_WAIT: Final = 4
"""Number of days up to which rows wait only `flush_seconds`. Rows normally belong to one or two
days, and to a few more if nodes are late or clocks are wrong."""


@dataclass
class RowBuffer:
    """Rows that have been read and not written yet."""

    sums: MinuteSums = field(default_factory=MinuteSums)
    """The rows of `usage`."""
    rows: list[Row] = field(default_factory=list)
    """The rows of `entries`, if that table is written."""
    last_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The last offset read in each partition, even if its record made no rows."""
    size_bytes: int = 0
    """Approximate memory of the rows when they are written."""
    days: set[int] = field(default_factory=set)
    """The days with rows."""
    newest_ns: int | None = None
    """Time of the newest event among the rows."""
    since_ns: int | None = None
    """When the oldest record was received, by the monotonic clock; `None` without records."""

    @property
    def row_count(self) -> int:
        """The number of rows to write."""
        return self.sums.row_count + len(self.rows)

    def add_sums(
        self, event: GpuEvent, bookings: Sequence[Booking], record: Record, *, ingested_time_ns: int
    ) -> None:
        """Add an event's contribution to the rows of `usage`."""
        former = self.sums.row_count
        self.sums.add(event, bookings, record, ingested_time_ns=ingested_time_ns)
        self.size_bytes += _SUMS_BYTES * (self.sums.row_count - former)
        # An event without devices has no rows, and therefore no days.
        if bookings:
            self._count(bookings_days(bookings), event.time_ns)

    def add(self, rows: Sequence[Row], *, time_ns: int) -> None:
        """Add an event's rows of `entries`."""
        self.rows.extend(rows)
        # Texts are copied into columns, so they count in addition to the fixed size of a row, and
        # labels may be larger.
        self.size_bytes += sum(
            _NUMBERS_BYTES + sum([len(value) for value in row if type(value) is str])
            for row in rows
        )
        self._count({row[0] for row in rows}, time_ns)

    def _count(self, days: Collection[int], time_ns: int) -> None:
        self.days.update(days)
        self.newest_ns = time_ns if self.newest_ns is None else max(self.newest_ns, time_ns)

    def read_to(self, partition: TopicPartition, offset: int, *, now_ns: int) -> None:
        """Record that the partition has been read up to and including `offset`."""
        self.last_offsets[partition] = offset
        if self.since_ns is None:
            self.since_ns = now_ns

    def is_full(self, *, max_bytes: int) -> bool:
        """Return whether the rows must be written before more are added."""
        return self.size_bytes >= max_bytes or len(self.days) >= MAX_DAYS

    def is_due(self, *, now_ns: int, after_ns: int, max_rows: int) -> bool:
        """Return whether to write the rows: there are too many, or the oldest waited too long.

        If rows belong to more than `DAYS_A_WAIT` days, the wait is longer in proportion, because
        small files of many days make a table slow, and a writer of events may invent days.
        """
        if self.since_ns is None:
            return False
        waits = max(1.0, len(self.days) / DAYS_A_WAIT)
        return self.row_count >= max_rows or now_ns - self.since_ns >= waits * after_ns
