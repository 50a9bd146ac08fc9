"""How far a consumer is behind, from the times of the events that it has not finished.

This module only computes the lag; it has no metric and no loop. The lag is computed on request, so
it grows while no record is processed. If all records are processed, the lag is 0, however old the
last event is. While the bus does not answer, records may wait unseen, so the lag is the time since
its last answer.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock

UNAVAILABLE_SECONDS: Final = 30.0
"""Time without an answer after which the bus counts as unavailable; consumers poll every second."""


class Lag:
    """Tracks the records that a consumer has polled but not finished, and computes the lag.

    The lag (`seconds`) is that of the partition that is furthest behind. The lag of a partition is
    the longest of the times that apply, or 0:

    - The age of its oldest record that was polled and is not done.
    - The age of its last record that is done, or the time since a later poll that reached its end.
      This applies if all polled records are done, but it has not been read to its end.
    - The time since further records arrived on it, if it cannot be polled.

    The lag is never less than the time for which the bus has withheld existing records. If the bus
    has not answered for `UNAVAILABLE_SECONDS`, the lag is at least the time since its last answer.
    """

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._withheld_seconds: Callable[[], float] = float
        self._open: dict[TopicPartition, deque[tuple[int, int]]] = {}
        """For each batch that is not done: the offset after the batch, and its first record's
        time."""
        self._ends: dict[TopicPartition, int] = {}
        """The partitions' end offsets when they were first queried after the last poll."""
        self._arrived_ms: dict[TopicPartition, int] = {}
        """When records after the offset in `_ends` were first seen, in ms since the epoch."""
        self._newest_ms: int | None = None
        self._reached_ms: dict[TopicPartition, int] = {}
        """The time up to which each partition is done, in ms since the epoch: the time of its last
        event that is done, or of a later poll that reached the partition's end."""
        self._at_end: frozenset[TopicPartition] = frozenset()
        self._answered_ns: int | None = None
        """When the bus last answered for all partitions, by the monotonic clock."""

    def polled(
        self,
        batch: Mapping[TopicPartition, Sequence[Record]],
        *,
        at_end: Collection[TopicPartition] = (),
    ) -> None:
        """Record the result of a poll, which may be empty.

        `at_end` contains the partitions that are known to have been read to their end.
        """
        self._at_end = frozenset(at_end)
        self._ends.clear()
        self._arrived_ms.clear()
        for partition, records in batch.items():
            if not records:
                continue
            batches = self._open.setdefault(partition, deque())
            if batches and records[0].offset < batches[-1][0]:
                batches.clear()  # the consumer went back, so these records are polled again
            batches.append((records[-1].offset + 1, records[0].timestamp_ms))
        # If all records up to the end are done, records that a later poll returns arrive from now
        # on.
        now_ms = self._clock.time_ns() // NS_PER_MS
        for partition in self._at_end & self._reached_ms.keys():
            if not self._open.get(partition):
                self._reached_ms[partition] = max(now_ms, self._reached_ms[partition])

    def answered(self) -> None:
        """Record that the bus has just answered for all partitions.

        The first call must come before the first poll, so that an outage at the start counts.
        """
        self._answered_ns = self._clock.monotonic_ns()

    def ends(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record the current end offsets of partitions that cannot be polled."""
        for partition, end in offsets.items():
            if end > self._ends.setdefault(partition, end):
                self._arrived_ms.setdefault(partition, self._clock.time_ns() // NS_PER_MS)

    def done(
        self, partition: TopicPartition, next_offset: int, *, time_ms: int | None = None
    ) -> None:
        """Record that all records before `next_offset` are done.

        `time_ms` is the time of the newest event among them.
        """
        batches = self._open.get(partition)
        while batches and batches[0][0] <= next_offset:
            batches.popleft()
        if time_ms is not None:
            self._newest_ms = max(time_ms, self._newest_ms or 0)
            # Not the maximum with the known time: after a poll that reached the end, older records
            # may arrive, for example those of a spool.
            self._reached_ms[partition] = time_ms

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Forget the polled records of these partitions, because they will be polled again."""
        for partition in partitions:
            self._open.pop(partition, None)

    def drop(self, partitions: Collection[int]) -> None:
        """Forget the partitions with these numbers, in every topic."""
        known = self._open.keys() | self._reached_ms.keys()
        self.keep([at for at in known if at.partition not in partitions])

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Forget all other partitions, because other members of the group read them now."""
        for known in (self._open, self._ends, self._arrived_ms, self._reached_ms):
            for partition in [at for at in known if at not in partitions]:
                del known[partition]

    def follow(self, withheld_seconds: Callable[[], float]) -> None:
        """Set the function that returns for how long existing records have been withheld.

        Withheld records were not polled, so this class does not know their times.
        """
        self._withheld_seconds = withheld_seconds

    def newest_seconds(self) -> float:
        """Return the time of the newest event that is done, since the epoch; 0 if there is none."""
        return (self._newest_ms or 0) / 1e3

    def seconds(self) -> float:
        """Return the lag in seconds: that of the records, of a transaction or of the bus."""
        first_ms = {at: batches[0][1] for at, batches in self._open.items() if batches}
        unread = self._reached_ms.keys() - self._at_end - first_ms.keys()
        reached_ms = [self._reached_ms[partition] for partition in unread]
        oldest_ms = min([*first_ms.values(), *reached_ms, *self._arrived_ms.values()], default=None)
        seconds = [self._withheld_seconds()]
        if oldest_ms is not None:
            seconds.append(self._clock.time_ns() / NS_PER_SECOND - oldest_ms / 1e3)
        if self._answered_ns is not None:
            silent_seconds = (self._clock.monotonic_ns() - self._answered_ns) / NS_PER_SECOND
            if silent_seconds > UNAVAILABLE_SECONDS:
                seconds.append(silent_seconds)
        return max(seconds)
