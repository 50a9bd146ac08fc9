"""Pairs the events of two runs by their identity and counts how they agree.

Both runs give a partition's events in the same order, so few wait for their counterpart; those
that wait are bounded in bytes. How one pair is compared is `agreement`'s business.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from enricher.join.replay.agreement import Agreement, EntryChange, compare_events

MAX_WAITING_BYTES: Final = 64 * 2**20
MAX_REMEMBERED: Final = 50_000
_MISSING: Final = EntryChange("(event)", "there", "absent")
_EXTRA: Final = EntryChange("(event)", "absent", "there")


class EventId(msgspec.Struct, frozen=True, gc=False):
    """What makes an event that event and no other."""

    node: str
    boot_id: str
    seq: int


class Difference(NamedTuple):
    """One field of one event that differs."""

    event: EventId
    change: EntryChange


class Counts(msgspec.Struct):
    """How many events agree, and how."""

    equal: int = 0
    """Equal to the byte, but for `late` and what a pod without a name is."""
    more_complete: int = 0
    """Equal in the books; of the pods more is known."""
    different: int = 0
    """Different in the books, or less is known of a pod."""
    missing: int = 0
    """Only in the first run."""
    extra: int = 0
    """Only in the replay."""
    repeated: int = 0
    """Once more in the first run, under the same identity; not compared again."""

    late_otherwise: int = 0
    """Marked late in one run only, whatever else; counted above as if that were equal."""

    @property
    def compared(self) -> int:
        """How many events there are in either run, each counted once."""
        return self.equal + self.more_complete + self.different + self.missing + self.extra

    @property
    def is_agreed(self) -> bool:
        """Whether nothing differs."""
        return not (self.different or self.missing or self.extra)


class Comparison:
    """Takes the events of both runs, partition by partition, and says what differs."""

    def __init__(self, *, shown: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.counts = Counts()
        self.differences: list[Difference] = []
        """The first ones of them."""
        self.changes = 0
        """How many fields differ, those not kept included."""
        self._shown = shown
        self._first = _Waiting(max_waiting_bytes)
        self._replayed = _Waiting(max_waiting_bytes)
        self._paired: dict[EventId, None] = {}

    @property
    def wants_first(self) -> bool:
        """Whether the first run's events are the ones to bring next, so that few have to wait."""
        return self._first.bytes <= self._replayed.bytes

    def take_first(self, events: Iterable[bytes]) -> None:
        """Take events of the first run; raises `msgspec.DecodeError` where one is none."""
        for event in events:
            event_id = _id_of(event)
            if event_id in self._paired or event_id in self._first.events:
                self.counts.repeated += 1
            elif (other := self._replayed.pop(event_id)) is not None:
                self._pair(event_id, event, other)
            else:
                self.counts.missing += self._tell(self._first.put(event_id, event), _MISSING)

    def take_replayed(self, events: Iterable[bytes]) -> None:
        """Take events of the replay."""
        for event in events:
            event_id = _id_of(event)
            if (other := self._first.pop(event_id)) is not None:
                self._pair(event_id, other, event)
            else:
                self.counts.extra += self._tell(self._replayed.put(event_id, event), _EXTRA)

    def end_partition(self) -> None:
        """Count what found no counterpart."""
        self.counts.missing += self._tell(self._first.clear(), _MISSING)
        self.counts.extra += self._tell(self._replayed.clear(), _EXTRA)
        self._paired.clear()

    def _pair(self, event_id: EventId, first: bytes, replayed: bytes) -> None:
        agreement, changes, is_late_otherwise = compare_events(first, replayed)
        self.counts.late_otherwise += is_late_otherwise
        if agreement is Agreement.EQUAL:
            self.counts.equal += 1
        elif agreement is Agreement.MORE_COMPLETE:
            self.counts.more_complete += 1
        else:
            self.counts.different += 1
        for change in changes:
            self._tell([event_id], change)
        self._paired[event_id] = None
        if len(self._paired) > MAX_REMEMBERED:
            del self._paired[next(iter(self._paired))]

    def _tell(self, events: list[EventId], change: EntryChange) -> int:
        self.changes += len(events)
        left = max(0, self._shown - len(self.differences))
        self.differences += [Difference(event, change) for event in events[:left]]
        return len(events)


class _Waiting:
    """Events of one run without their counterpart yet, the oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self.events: dict[EventId, bytes] = {}
        self.bytes = 0
        self._max_bytes = max_bytes

    def put(self, event_id: EventId, event: bytes) -> list[EventId]:
        """Let an event wait; return those that have waited too long for it."""
        self.bytes += len(event)
        self.events[event_id] = event
        given_up = []
        while self.bytes > self._max_bytes:
            oldest = next(iter(self.events))
            self.pop(oldest)
            given_up.append(oldest)
        return given_up

    def pop(self, event_id: EventId) -> bytes | None:
        event = self.events.pop(event_id, None)
        self.bytes -= len(event or b"")
        return event

    def clear(self) -> list[EventId]:
        left = list(self.events)
        self.events.clear()
        self.bytes = 0
        return left


_id_of: Final = msgspec.json.Decoder(EventId).decode
