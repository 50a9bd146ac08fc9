"""One partition kept in memory: offsets, reading, compaction and a bound on what is kept.

No consumer, no group and no waiting here: only the records of one partition.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final

from gpuledger.bus.protocol import Message, Record, TopicPartition

OVERHEAD_BYTES: Final = 200
"""What CPython holds for a record beside the bytes of its key and value."""
KEPT_AFTER_DROPPING: Final = 0.875
"""Dropping an eighth at a time keeps the cost of a drop in proportion to what was appended."""
FEWEST_TO_COMPACT: Final = 1000

_offset = attrgetter("offset")


class PartitionLog:
    """The records of one partition, in the order of their offsets, which may have holes."""

    def __init__(
        self,
        place: TopicPartition,
        *,
        topic_id: str,
        compacted: bool,
        max_bytes: int,
        max_records: int,
    ) -> None:
        self.place = place
        self.end_offset = 0
        """The offset that the next record gets."""
        self.expired_before = 0
        """Records before this offset were removed by age or bound, not by compaction."""
        self.topic_id = topic_id
        """The identity of the topic; another one after it was made anew."""
        self.compacted = compacted
        self.readers: set[Callable[[], None]] = set()
        """Called after each append."""
        self._records: list[Record] = []
        self._bytes = 0
        self._max_bytes = max_bytes
        self._max_records = max_records
        self._compact_at = FEWEST_TO_COMPACT
        self._tombstones_before = 0

    @property
    def first_offset(self) -> int:
        """The offset of the first record kept, or the end where none is."""
        return self._records[0].offset if self._records else self.end_offset

    def append(self, messages: Sequence[Message]) -> None:
        """Append all messages at once and wake the readers."""
        for offset, message in enumerate(messages, start=self.end_offset):
            record = Record(*self.place, offset, message.timestamp_ms, message.key, message.value)
            self._records.append(record)
            self._bytes += _size_bytes(record)
        self.end_offset += len(messages)
        self._keep_within_bounds()
        for wake in self.readers:
            wake()

    def read(self, offset: int, *, max_records: int) -> list[Record]:
        """Return the next records from an offset on; from a hole, the next record on."""
        start = bisect_left(self._records, offset, key=_offset)
        return self._records[start : start + max_records]

    def next_offset(self, offset: int) -> int:
        """Return the offset of the first record at or after an offset, or the end."""
        found = self.read(offset, max_records=1)
        return found[0].offset if found else self.end_offset

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the offset of the first record that is not older than that, or the end."""
        return next(
            (each.offset for each in self._records if each.timestamp_ms >= timestamp_ms),
            self.end_offset,
        )

    def remove_before(self, offset: int) -> None:
        """Remove what is before an offset, as retention does."""
        del self._records[: bisect_left(self._records, offset, key=_offset)]
        self._bytes = sum(map(_size_bytes, self._records))
        self.expired_before = max(self.expired_before, min(offset, self.end_offset))

    def begin_anew(self, topic_id: str) -> None:
        """Become the partition of another topic of the same name, without any record."""
        self._records.clear()
        self._bytes = self.end_offset = self.expired_before = self._tombstones_before = 0
        self.topic_id = topic_id
        for wake in self.readers:
            wake()

    def compact(self) -> None:
        """Keep the last record of each key; a tombstone goes with the second compaction."""
        last = {record.key: record.offset for record in self._records}
        self._records = [
            record
            for record in self._records
            if last[record.key] == record.offset
            and (record.value is not None or record.offset >= self._tombstones_before)
        ]
        self._bytes = sum(map(_size_bytes, self._records))
        self._tombstones_before = self.end_offset
        self._compact_at = max(FEWEST_TO_COMPACT, 2 * len(self._records))

    def _keep_within_bounds(self) -> None:
        if self.compacted:
            # What is left after compaction is the state itself, so it is not dropped by size.
            if len(self._records) >= self._compact_at:
                self.compact()
        elif len(self._records) > self._max_records or self._bytes > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        max_records = int(self._max_records * KEPT_AFTER_DROPPING)
        max_bytes = int(self._max_bytes * KEPT_AFTER_DROPPING)
        dropped = 0
        while len(self._records) - dropped > max_records or self._bytes > max_bytes:
            self._bytes -= _size_bytes(self._records[dropped])
            dropped += 1
        del self._records[:dropped]
        self.expired_before = self.first_offset


def _size_bytes(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"") + OVERHEAD_BYTES
