"""How far each partition is done: what may be committed, and what has been.

Here lives bookkeeping of offsets alone; it knows neither bus nor receiver.
"""

from collections.abc import Collection, Mapping
from itertools import count

from gpuledger.bus.protocol import TopicPartition

Epochs = Mapping[TopicPartition, int]


class Progress:
    """For each partition that is held the offset of the next record that is not done yet.

    An epoch is one assignment of a partition to this member. A partition that is revoked and
    assigned again has another one, as in between somebody else may have had it, or its topic may
    have been made anew: what was done of records of an earlier epoch says nothing of the later one.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._epochs: dict[TopicPartition, int] = {}
        self._done: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}

    def begin(self, partitions: Collection[TopicPartition]) -> None:
        """Begin an epoch of each of these: nothing of it is done."""
        self.end(partitions)
        number = next(self._numbers)
        self._epochs |= dict.fromkeys(partitions, number)

    def end(self, partitions: Collection[TopicPartition]) -> None:
        """End the epochs of these: they are somebody else's now."""
        for known in (self._epochs, self._done, self._committed):
            for partition in partitions:
                known.pop(partition, None)

    @property
    def epochs(self) -> Epochs:
        """The epoch of each partition that is held, as of now."""
        return dict(self._epochs)

    def is_current(self, partition: TopicPartition, epochs: Epochs) -> bool:
        """Return whether the partition is held, and has been since these epochs were taken."""
        return partition in epochs and epochs[partition] == self._epochs.get(partition)

    def done(self, partition: TopicPartition, next_offset: int) -> None:
        """Note that everything before `next_offset` is done; never goes back in an epoch."""
        self._done[partition] = max(next_offset, self._done.get(partition, 0))

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return what is done beyond what was committed."""
        return {
            partition: offset
            for partition, offset in self._done.items()
            if self._committed.get(partition) != offset
        }

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Note that these offsets have been committed."""
        self._committed.update(offsets)
