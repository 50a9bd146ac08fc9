"""How far each partition is done: what may be committed, and what has been.

Here lives bookkeeping of offsets alone; it knows neither bus nor receiver.
"""

from collections.abc import Collection

from gpuledger.bus.protocol import TopicPartition


class Progress:
    """For each partition the offset of the next record that is not done yet."""

    def __init__(self) -> None:
        self._done: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}

    def done(self, partition: TopicPartition, next_offset: int) -> None:
        """Note that everything before `next_offset` is done; never goes back."""
        self._done[partition] = max(next_offset, self._done.get(partition, 0))

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Give what is done beyond what was committed."""
        return {
            partition: offset
            for partition, offset in self._done.items()
            if self._committed.get(partition) != offset
        }

    def committed(self, offsets: dict[TopicPartition, int]) -> None:
        """Note that these offsets have been committed."""
        self._committed.update(offsets)

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Drop all partitions but these: the others are somebody else's now."""
        for known in (self._done, self._committed):
            for partition in [at for at in known if at not in partitions]:
                del known[partition]
