"""Rows that wait to be written, and how far each partition they came from has been read.

Here lives the buffer between two writes. Pure: it neither reads a clock nor writes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuledger.bus.protocol import TopicPartition
from sinks.store.rows import Row


@dataclass
class Pending:
    """What has been read and not been written."""

    rows: list[Row] = field(default_factory=list)
    last_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The last offset read of each partition, also where it brought no rows."""
    newest_ns: int | None = None
    """Time of the newest event among the rows."""
    since_ns: int | None = None
    """When the oldest of it came, by the monotonic clock."""

    def add(self, rows: Iterable[Row], *, time_ns: int) -> None:
        """Take in the rows of one event."""
        self.rows.extend(rows)
        self.newest_ns = time_ns if self.newest_ns is None else max(self.newest_ns, time_ns)

    def read_to(self, partition: TopicPartition, offset: int, *, now_ns: int) -> None:
        """Note that the partition has been read up to and with `offset`."""
        self.last_offsets[partition] = offset
        if self.since_ns is None:
            self.since_ns = now_ns

    def is_due(self, *, now_ns: int, after_ns: int, most_rows: int) -> bool:
        """Say whether it is time to write: too many rows, or the oldest waited too long."""
        if self.since_ns is None:
            return False
        return len(self.rows) >= most_rows or now_ns - self.since_ns >= after_ns
