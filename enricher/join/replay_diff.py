"""Whether two events of the same tick agree: in their books to the byte, in who the pods are.

The books are everything but `pods`, `holder_uids` and `late`. The description (the first two) may
have become more complete: a pod or a holder not known then may be known now, and what was absent
may be there; nothing else may change. Whether a pod without a name is pending or foreign follows
from the pods that the worker held beside its node's, so it is passed over. `late` tells how a tick
came, beside which others and by whose clock, so it is only counted. Pure functions over encoded
events, and the pairing of two streams of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from gpuledger.codec import follow
from gpuledger.records import GpuEvent, PodState

_DESCRIPTION: Final = "pods"
_LATE: Final = "late"
_HOLDERS: Final = "holder_uids"
_NO_BOOKS: Final = frozenset({_DESCRIPTION, _HOLDERS, _LATE})
_ABSENT: Final = "(absent)"
# States of a pod that is not known, which the pods beside it tell apart. One that a newer version
# has added is none of them: nobody knows what it means, so it has to be the same.
_PASSING: Final = frozenset({PodState.NAMED, PodState.PENDING, PodState.FOREIGN})
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Agreement(Enum):
    """How an event that was made again compares with the first one."""

    EQUAL = "equal"
    MORE_COMPLETE = "more complete"
    DIFFERENT = "different"


class EntryChange(NamedTuple):
    """A field that differs, and what stood there in each run."""

    field: str
    first: object
    replayed: object


class Compared(NamedTuple):
    """What came of comparing two events."""

    agreement: Agreement
    """How they agree."""
    changes: list[EntryChange]
    """The fields that differ and may not."""
    is_late_otherwise: bool
    """Whether only one of them is marked late."""


_THE_SAME: Final = Compared(Agreement.EQUAL, [], is_late_otherwise=False)


def compare_events(first: bytes, replayed: bytes) -> Compared:
    """Compare two encoded events; raises `msgspec.DecodeError` where one is no JSON object."""
    if first == replayed:
        return _THE_SAME
    then, now = _fields_of(first), _fields_of(replayed)
    changes = list(_book_changes(then, now))
    was, is_ = _described(then.get(_DESCRIPTION)), _described(now.get(_DESCRIPTION))
    held_then, held_now = _holders(then.get(_HOLDERS)), _holders(now.get(_HOLDERS))
    is_equal = was == is_ and held_then == held_now
    agreement = Agreement.EQUAL if is_equal else Agreement.MORE_COMPLETE
    changes += _description_changes(was, is_)
    changes += [
        EntryChange(f"{_HOLDERS}[{index}]", uid, held_now.get(index, _ABSENT))
        for index, uid in held_then.items()
        if held_now.get(index) != uid
    ]
    if changes:
        agreement = Agreement.DIFFERENT
    return Compared(agreement, changes, is_late_otherwise=then.get(_LATE) != now.get(_LATE))


def _book_changes(
    then: Mapping[str, msgspec.Raw], now: Mapping[str, msgspec.Raw]
) -> Iterator[EntryChange]:
    for name in sorted((then.keys() | now.keys()) - _NO_BOOKS):
        was, is_ = then.get(name), now.get(name)
        if was == is_:
            continue
        values = [_ABSENT if raw is None else msgspec.json.decode(raw) for raw in (was, is_)]
        if inner := list(_changes_within(name, *values)):
            yield from inner
        else:
            # Equal values in other bytes, as of a number written otherwise: to the byte means so.
            texts = [
                _ABSENT if raw is None else bytes(raw).decode(errors="replace")
                for raw in (was, is_)
            ]
            yield EntryChange(name, *texts)


def _changes_within(path: str, was: Any, is_: Any) -> Iterator[EntryChange]:  # noqa: ANN401  # any JSON value
    """Yield the innermost values that differ, with their paths."""
    if isinstance(was, dict) and isinstance(is_, dict):
        for name in sorted(was.keys() | is_.keys()):
            yield from _changes_within(
                f"{path}.{name}", was.get(name, _ABSENT), is_.get(name, _ABSENT)
            )
    elif isinstance(was, list) and isinstance(is_, list) and len(was) == len(is_):
        for index, (before, after) in enumerate(zip(was, is_, strict=True)):
            yield from _changes_within(f"{path}[{index}]", before, after)
    elif was != is_:
        yield EntryChange(follow(GpuEvent, path)[0], was, is_)


def _described(pods: msgspec.Raw | None) -> dict[str, dict[str, Any]]:
    """Return each description under each container that it speaks of, or under its UID."""
    return {
        name: _without_names(pod) if pod["state"] in _PASSING else pod
        for pod in msgspec.json.decode(pods or b"[]")
        for name in pod["container_ids"] or [pod.get("uid", "")]
    }


def _without_names(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a description without what holds only until more records are read."""
    kept = {name: value for name, value in pod.items() if name not in {"namespace", "name"}}
    return kept | {"state": PodState.PENDING.value}


def _description_changes(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[EntryChange]:
    for name in sorted(then.keys() | now.keys()):
        was, is_ = then.get(name), now.get(name)
        path = f"{_DESCRIPTION}[{name}]"
        if was is None or is_ is None:
            yield EntryChange(path, was or _ABSENT, is_ or _ABSENT)
        # From pending to known everything may come; only what was said must not go again.
        elif was["state"] == is_["state"] or is_["state"] != PodState.KNOWN:
            yield from _losses(path, was, is_)


def _holders(uids: msgspec.Raw | None) -> dict[int, str]:
    """Return the holders that are known, by the position of the allocation."""
    found: list[str | None] = msgspec.json.decode(uids or b"[]")
    return {index: uid for index, uid in enumerate(found) if uid is not None}


def _losses(path: str, was: Mapping[str, Any], is_: Mapping[str, Any]) -> Iterator[EntryChange]:
    """Yield what was said and is not any more; what is said now in addition is no loss."""
    for name, value in was.items():
        found = is_.get(name, _ABSENT)
        if name == "container_ids":
            continue  # a container that was pending apart may have joined its pod
        if name == "container_names" and isinstance(found, dict) and value.items() <= found.items():
            continue
        if value != found:
            yield EntryChange(f"{path}.{name}", value, found)


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
    """Takes the events of both runs, partition by partition, and says what differs.

    Both runs give a partition's events in the same order, so few wait for their counterpart; those
    that wait are bounded in bytes.
    """

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
                self.counts.missing += self._note(self._first.put(event_id, event), _MISSING)

    def take_replayed(self, events: Iterable[bytes]) -> None:
        """Take events of the replay."""
        for event in events:
            event_id = _id_of(event)
            if (other := self._first.pop(event_id)) is not None:
                self._pair(event_id, other, event)
            else:
                self.counts.extra += self._note(self._replayed.put(event_id, event), _EXTRA)

    def end_partition(self) -> None:
        """Count what found no counterpart."""
        self.counts.missing += self._note(self._first.clear(), _MISSING)
        self.counts.extra += self._note(self._replayed.clear(), _EXTRA)
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
            self._note([event_id], change)
        self._paired[event_id] = None
        # Remembered to recognise repetitions, which follow closely: at-least-once sends again what
        # one commit held.
        if len(self._paired) > MAX_REMEMBERED:
            del self._paired[next(iter(self._paired))]

    def _note(self, events: list[EventId], change: EntryChange) -> int:
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
