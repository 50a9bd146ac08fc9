"""The join once more, over ticks that are still kept: the pure part of `gpuledger replay`.

Here the stage is driven one partition after the other, so that memory is bounded by the pods and
nodes of one. Which records to read, and where the events go, is the command's business.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from typing_extensions import override

from enricher.join.stage import JoinStage
from enricher.join.validation import IsPlaced
from gpuledger.bus.protocol import Message, Record
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.topics import Topic, Topics

CONSUMER: Final = "gpuledger-replay"


class TimeRange(NamedTuple):
    """From `begin_ms` up to and without `end_ms`, milliseconds since the epoch."""

    begin_ms: int
    end_ms: int

    def has(self, timestamp_ms: int) -> bool:
        """Return whether a record of that time belongs to it."""
        return self.begin_ms <= timestamp_ms < self.end_ms


class Replay:
    """Makes the events of one partition's ticks again, as a worker that has just got it would."""

    def __init__(self, wanted: TimeRange, *, is_placed: IsPlaced, topics: Topics) -> None:
        self.unusable = _Unusable(topics.dead_letters)
        self._wanted = wanted
        self._stage = JoinStage(dead_letters=self.unusable, is_placed=is_placed, topics=topics)

    def take_pods(self, records: Sequence[Record]) -> None:
        """Take pods in; tombstones are left out: who was deleted later was there at the time."""
        self._stage.take_pods(
            [record for record in records if record.value is not None or record.unreadable]
        )

    def take_samples(self, records: Sequence[Record]) -> list[Message]:
        """Book ticks, and return the events of those in the range.

        Ticks before the range are booked for what the next one says of them: whether it repeats
        one, and how long nothing was covered in between.
        """
        events = self._stage.take_samples(records)
        return [event for event in events if self._wanted.has(event.timestamp_ms)]

    def end_partition(self, partition: int) -> None:
        """Forget what belongs to a partition whose ticks are all taken."""
        self._stage.forget(partition)


class _Unusable(DeadLetterQueue):
    """Counts what cannot be used: the first run has put it aside already."""

    def __init__(self, topic: Topic) -> None:
        super().__init__(consumer=CONSUMER, producer=_Nowhere(), topic=topic, partitions=1)
        self.first_detail: str | None = None

    @override
    def reject(self, record: Record, *, reason: str, detail: str) -> None:
        # Nothing is kept of it: a replay of days could meet as many as there are records.
        self.rejected += 1
        if self.first_detail is None:
            self.first_detail = detail


class _Nowhere:
    """A producer for dead letters that are never published."""

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Publish nothing."""
