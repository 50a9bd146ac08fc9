"""Rows that wait to be written, and how far each partition they came from has been read.

Here lives the buffer between two writes. Pure: it neither reads a clock nor writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuledger.bus.protocol import TopicPartition
from sinks.store.entry_rows import Row

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

    rows: list[Row] = field(default_factory=list)
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

    def add(self, rows: Sequence[Row], *, time_ns: int) -> None:
        """Take in the rows of one event."""
        self.rows.extend(rows)
        self.size_bytes += sum(map(_size_bytes, rows))
        self.days.update(row[0] for row in rows)
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
        return len(self.rows) >= max_rows or now_ns - self.since_ns >= waits * after_ns


def _size_bytes(row: Row) -> int:
    """Return about how much memory a row takes: its texts are copied into columns."""
    return _NUMBERS_BYTES + sum([len(value) for value in row if type(value) is str])
