"""What came of records and is not delivered yet, partition number by partition number.

Here lives the gathering alone: a delivery costs several requests, so that each one carries as much
as is worth it. How it is delivered is `delivery`'s business.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.topics import MARKS

_MARKS: Final = MARKS.name


@dataclass(kw_only=True, eq=False)
class Slice:
    """What came of one partition number: in all inputs it has the same nodes."""

    number: int
    messages: dict[TopicPartition, list[Message]] = field(default_factory=dict)
    """What is to be published, in the order in which it was made."""
    marks: Sequence[Message] = ()
    """How far the nodes are booked with that, never to be seen before it."""
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """How far the inputs are read with that."""
    last_time_ms: int | None = None
    """Event time of the last record in it."""

    @property
    def marks_place(self) -> TopicPartition:
        """Where the marks go."""
        return TopicPartition(_MARKS, self.number)

    def add(self, place: TopicPartition, messages: Sequence[Message]) -> None:
        """Add messages behind those that are there."""
        if messages:
            self.messages.setdefault(place, []).extend(messages)


class Slices:
    """The slices of a worker, from one delivery to the next; bounded by records and by time."""

    def __init__(self, *, most_records: int, most_seconds: float) -> None:
        self._most_records = most_records
        self._most_seconds = most_seconds
        self._slices: dict[int, Slice] = {}
        self._records = 0
        self._begun_at = 0.0

    def at(self, number: int, *, now: float) -> Slice:
        """Give the slice of a partition number; the first one begins the time."""
        if not self._slices:
            self._begun_at = now
        return self._slices.setdefault(number, Slice(number=number))

    def count(self, records: int) -> None:
        """Count records whose work is in a slice."""
        self._records += records

    def seconds_left(self, *, now: float) -> float | None:
        """Give how long more may be gathered, at least 0; `None` where nothing waits."""
        if not self._slices:
            return None
        if self._records >= self._most_records:
            return 0.0
        return max(0.0, self._begun_at + self._most_seconds - now)

    def take(self) -> list[Slice]:
        """Give all slices, and begin anew."""
        taken, self._slices, self._records = list(self._slices.values()), {}, 0
        return taken

    def drop(self, numbers: Iterable[int]) -> None:
        """Drop what came of these partitions: whoever has them next does it again."""
        for number in numbers:
            self._slices.pop(number, None)
