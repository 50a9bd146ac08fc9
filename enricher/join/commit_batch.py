"""What came of records and is not delivered yet, partition number by partition number.

Here lives the gathering alone: a delivery costs several requests, so that each one carries as much
as is worth it. How it is delivered is `delivery`'s business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuledger.bus.protocol import Message, Record, TopicPartition
from gpuledger.topics import PROGRESS, SAMPLES

_PROGRESS: Final = PROGRESS.name


@dataclass(kw_only=True, eq=False)
class CommitBatch:
    """What came of one partition number: in all inputs it has the same nodes."""

    number: int
    begun_at: float
    """When the first of it came, in seconds of the worker's clock."""
    records: int = 0
    """How many records came into it."""
    messages: dict[TopicPartition, list[Message]] = field(default_factory=dict)
    """What is to be published, in the order in which it was made."""
    marks: Sequence[Message] = ()
    """How far the nodes are booked with that, never to be seen before it."""
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """How far the inputs are read with that."""
    last_tick_ms: int | None = None
    """Event time of the last tick in it; `None` where other inputs alone came into it."""

    @property
    def marks_place(self) -> TopicPartition:
        """Where the marks go."""
        return TopicPartition(_PROGRESS, self.number)

    def count(self, place: TopicPartition, records: Sequence[Record]) -> None:
        """Count records of an input, at least one, whose work is in this slice."""
        self.records += len(records)
        self.offsets[place] = records[-1].offset + 1
        if place.topic == SAMPLES.name:
            self.last_tick_ms = records[-1].timestamp_ms

    def add(self, place: TopicPartition, messages: Sequence[Message]) -> None:
        """Add messages behind those that are there."""
        if messages:
            self.messages.setdefault(place, []).extend(messages)


class CommitBatches:
    """The slices of a worker, from one delivery to the next; bounded by records and by time."""

    def __init__(self, *, max_records: int, max_seconds: float) -> None:
        self._max_records = max_records
        self._max_seconds = max_seconds
        self._slices: dict[int, CommitBatch] = {}

    def at(self, number: int, *, now: float) -> CommitBatch:
        """Return the slice of a partition number, which begins now where there is none."""
        return self._slices.setdefault(number, CommitBatch(number=number, begun_at=now))

    def seconds_left(self, *, now: float) -> float | None:
        """Return how long more may be gathered, at least 0; `None` where nothing waits."""
        if not self._slices:
            return None
        if sum(each.records for each in self._slices.values()) >= self._max_records:
            return 0.0
        begun_at = min(each.begun_at for each in self._slices.values())
        return max(0.0, begun_at + self._max_seconds - now)

    def take(self) -> list[CommitBatch]:
        """Return all slices, and begin anew."""
        taken, self._slices = list(self._slices.values()), {}
        return taken

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop what came of these partitions: whoever has them next does it again."""
        for number in numbers:
            self._slices.pop(number, None)
