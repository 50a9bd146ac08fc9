"""How far behind a consumer is, by the time of the events that it has not finished.

Here lives the reckoning alone: no metric and no loop. It is asked when it is shown, so it grows
while nothing moves; and it is 0 where there is nothing to do, however long ago the last event was.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock


class Lag:
    """What a consumer has polled and not finished, and the newest time that it has finished.

    `seconds` is the age of the oldest record that was polled and is not done. Between two polls of
    which the last one brought something it is the age of the newest record that is done: more is
    likely to wait on the bus. After a poll that brought nothing it is 0, or the time since
    something came to a partition of which nothing can be polled. It is never less than the time
    for which the bus has withheld records that are there.
    """

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._withheld_seconds: Callable[[], float] = float
        self._open: dict[TopicPartition, deque[tuple[int, int]]] = {}
        """For each batch that is not done: the offset behind it, and its first record's time."""
        self._ends: dict[TopicPartition, int] = {}
        """Where partitions ended when it was looked at first since the last poll."""
        self._arrived_ms: dict[TopicPartition, int] = {}
        """When it was first seen that something came behind that."""
        self._newest_ms: int | None = None
        self._is_idle = True

    def polled(self, batch: Mapping[TopicPartition, Sequence[Record]]) -> None:
        """Record what a poll brought to work on, perhaps nothing."""
        self._is_idle = not any(batch.values())
        self._ends.clear()
        self._arrived_ms.clear()
        for partition, records in batch.items():
            if not records:
                continue
            batches = self._open.setdefault(partition, deque())
            if batches and records[0].offset < batches[-1][0]:
                batches.clear()  # it was gone back: what was polled comes again
            batches.append((records[-1].offset + 1, records[0].timestamp_ms))

    def ends(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record where partitions end by now, while nothing can be polled of them."""
        for partition, end in offsets.items():
            if end > self._ends.setdefault(partition, end):
                self._arrived_ms.setdefault(partition, self._clock.time_ns() // NS_PER_MS)

    def done(
        self, partition: TopicPartition, next_offset: int, *, time_ms: int | None = None
    ) -> None:
        """Record that all before `next_offset` is done; `time_ms` is its newest event's time."""
        batches = self._open.get(partition)
        while batches and batches[0][0] <= next_offset:
            batches.popleft()
        if time_ms is not None:
            self._newest_ms = max(time_ms, self._newest_ms or 0)

    def forget(self, partitions: Collection[TopicPartition]) -> None:
        """Forget what was polled of these partitions: it is polled again."""
        for partition in partitions:
            self._open.pop(partition, None)

    def drop(self, partitions: Collection[int]) -> None:
        """Forget partitions by their number, in every topic."""
        self.keep([at for at in self._open if at.partition not in partitions])

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Forget all partitions but these: the others are somebody else's now."""
        for known in (self._open, self._ends, self._arrived_ms):
            for partition in [at for at in known if at not in partitions]:
                del known[partition]

    def follow(self, withheld_seconds: Callable[[], float]) -> None:
        """Have asked for how long the consumer has been kept from records that are there.

        They were not polled, and so are no part of what is known of here.
        """
        self._withheld_seconds = withheld_seconds

    def newest_seconds(self) -> float:
        """Return the time of the newest event that is done, since the epoch; 0 before the first."""
        return (self._newest_ms or 0) / 1e3

    def seconds(self) -> float:
        """Return how far behind the consumer is now; never below 0."""
        first_ms = [batches[0][1] for batches in self._open.values() if batches]
        oldest_ms = min([*first_ms, *self._arrived_ms.values()], default=None)
        if oldest_ms is None and not self._is_idle:
            oldest_ms = self._newest_ms
        withheld_seconds = self._withheld_seconds()
        if oldest_ms is None:
            return withheld_seconds
        return max(withheld_seconds, self._clock.time_ns() / NS_PER_SECOND - oldest_ms / 1e3)
