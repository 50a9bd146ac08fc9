"""How far each partition is done, and what a sink says of it: for one assignment of a partition.

An epoch is one assignment of a partition to this member. A partition that is revoked and assigned
again has another one, as in between somebody else may have had it, or its topic may have been made
anew: what was done of records of an earlier epoch says nothing of the later one. So the loop gives
the sink a context with each call, which counts for the epochs of that call and for no other. Here
is neither bus nor receiver.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count

from gpuledger.bus.protocol import Consumer, TopicPartition
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.lag import Lag

Epochs = Mapping[TopicPartition, int]


class Progress:
    """For each partition that is held the offset of the next record that is not done yet."""

    def __init__(self) -> None:
        self._next_epoch = count(1)
        self._epochs: dict[TopicPartition, int] = {}
        self._done: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}

    def begin(self, partitions: Collection[TopicPartition]) -> None:
        """Begin an epoch of each of these: nothing of it is done."""
        self.end(partitions)
        epoch = next(self._next_epoch)
        self._epochs |= dict.fromkeys(partitions, epoch)

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
        """Record that everything before `next_offset` is done; never goes back in an epoch."""
        self._done[partition] = max(next_offset, self._done.get(partition, 0))

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return what is done beyond what was committed."""
        return {
            partition: offset
            for partition, offset in self._done.items()
            if self._committed.get(partition) != offset
        }

    def committed(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Record that these offsets have been committed."""
        self._committed.update(offsets)


@dataclass(frozen=True, kw_only=True)
class EpochContext:
    """Takes acknowledgements of what was polled in certain epochs, and of nothing else.

    A sink may work on a batch for as long as its receiver is away. Where the partition was revoked
    meanwhile, the sink has let go of what it held of it, and whatever it says of it afterwards is
    not heard, also where the same member has been assigned the partition again.
    """

    consumer: Consumer
    dead_letters: DeadLetterQueue
    progress: Progress
    lag: Lag
    epochs: Epochs

    def is_current(self, partition: TopicPartition) -> bool:
        """Return whether the partition is held in the epoch of this context."""
        return self.progress.is_current(partition, self.epochs)

    def acknowledge(
        self,
        partition: TopicPartition,
        next_offset: int,
        *,
        time_ns: int | None = None,
        is_committed: bool = False,
    ) -> None:
        """Record that all before `next_offset` is done, unless its epoch has ended."""
        if not self.is_current(partition):
            return
        time_ms = None if time_ns is None else time_ns // 1_000_000
        self.lag.done(partition, next_offset, time_ms=time_ms)
        if not is_committed:
            self.progress.done(partition, next_offset)
