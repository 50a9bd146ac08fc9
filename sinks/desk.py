"""The desk that the consume loop offers a sink: what the sink says counts for one assignment."""

from dataclasses import dataclass

from gpuledger.bus.protocol import Consumer, TopicPartition
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.lag import Lag
from sinks.offsets import Epochs, Progress


@dataclass(frozen=True, kw_only=True)
class EpochContext:
    """Takes acknowledgements of what was polled in certain epochs, and of nothing else.

    A sink may work on a batch for as long as its receiver is away. Where the partition was revoked
    meanwhile, the sink has let go of what it held of it, and whatever it says of it afterwards is
    not heard, also where the same member has been assigned the partition again.
    """

    consumer: Consumer
    office: DeadLetterQueue
    progress: Progress
    lag: Lag
    epochs: Epochs

    def is_current(self, partition: TopicPartition) -> bool:
        """Return whether the partition is held in the epoch of this desk."""
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
