"""Compares two events of the same tick: the books byte by byte, the descriptions by content.

The books are all fields except `late` and the description. The description consists of `pods`, the
pods and names in `containers` and `allocations`, `namespaces` and `node_description`. The second
event may have a more complete description: a pod that was unknown may be known, and absent values
may be present. All other changes are differences.

Two differences are not errors. The state of a pod without a record (named, pending or foreign)
depends on the other pods that the worker knew, so it is not compared. `late` depends on clocks and
on the other ticks, so its differences are only counted. The module has pure functions of encoded
events, and a class that pairs the events of two streams.
"""

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from gpuledger.codec import follow
from gpuledger.records import EventAllocation, EventContainer, GpuEvent, PodState

_LATE: Final = "late"
_PODS: Final = "pods"
_POINTERS: Final = {"containers": EventContainer, "allocations": EventAllocation}
"""Fields of an event that are lists of rows with a reference to a pod, and the type of their rows.
"""
_FROM_RECORDS: Final = {"containers": frozenset({"pod", "name"}), "allocations": frozenset({"pod"})}
"""In each of these lists, the columns that belong to the description. The other columns come from
the tick."""
_NAMESPACES: Final = "namespaces"
_NODE: Final = "node_description"
_NO_BOOKS: Final = frozenset({_PODS, *_POINTERS, _LATE, _NAMESPACES, _NODE})
_ABSENT: Final = "(absent)"
# States of an unknown pod that depend on the other pods that are known. States of a newer version
# are not included: their meaning is unknown here, so they must be equal.
_PASSING: Final = frozenset({PodState.NAMED, PodState.PENDING, PodState.FOREIGN})
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Agreement(Enum):
    """The result of comparing a replayed event with the first one."""

    EQUAL = "equal"
    MORE_COMPLETE = "more complete"
    DIFFERENT = "different"


class EntryChange(NamedTuple):
    """A field that differs, with its value in the first run and in the replay."""

    field: str
    first: object
    replayed: object


class Compared(NamedTuple):
    """The result of comparing two events."""

    agreement: Agreement
    """The result for the two events as a whole."""
    changes: list[EntryChange]
    """The differences that are errors."""
    is_late_otherwise: bool
    """Whether only one of the events is marked late."""


_THE_SAME: Final = Compared(Agreement.EQUAL, [], is_late_otherwise=False)


def compare_events(first: bytes, replayed: bytes) -> Compared:
    """Compare two encoded events; raise `msgspec.DecodeError` if one is not a JSON object."""
    if first == replayed:
        return _THE_SAME
    then, now = _fields_of(first), _fields_of(replayed)
    changes = list(_book_changes(then, now))
    was, is_ = _described(then), _described(now)
    places_were, places_are = _described_places(then), _described_places(now)
    is_equal = was == is_ and places_were == places_are
    agreement = Agreement.EQUAL if is_equal else Agreement.MORE_COMPLETE
    changes += _description_changes(was, is_)
    changes += _place_changes(places_were, places_are)
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
            # Equal values in different bytes, such as a number in another notation, are
            # differences.
            texts = [
                _ABSENT if raw is None else bytes(raw).decode(errors="replace")
                for raw in (was, is_)
            ]
            yield EntryChange(name, *texts)


def _changes_within(path: str, was: Any, is_: Any) -> Iterator[EntryChange]:  # noqa: ANN401  # any JSON value
    """Yield the innermost values that differ, each with its path."""
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


class _Described(NamedTuple):
    """One container in an event: the fields from the tick, and the description of its pod."""

    of_tick: Mapping[str, Any]
    description: Mapping[str, Any]


def _described(fields: Mapping[str, msgspec.Raw]) -> dict[str, _Described]:
    """Return each container that uses a GPU, or to which a GPU is allocated, by its path."""
    pods: list[dict[str, Any]] = msgspec.json.decode(fields.get(_PODS, b"[]"))
    found = {}
    for name, record in _POINTERS.items():
        names = record.__struct_fields__
        rows: list[list[Any]] = msgspec.json.decode(fields.get(name, b"[]"))
        for position, row in enumerate(rows):
            fields_of_row = dict(zip(names, row, strict=False))
            pod = {} if fields_of_row["pod"] is None else pods[fields_of_row["pod"]]
            description = (
                {"container": fields_of_row["name"], **pod} if "name" in fields_of_row else pod
            )
            if pod.get("state") in _PASSING:
                description = _without_guesses(description, keeps_uid=name != "allocations")
            of_tick = {
                key: value for key, value in fields_of_row.items() if key not in _FROM_RECORDS[name]
            }
            found[f"{name}[{position}]"] = _Described(of_tick, description)
    return found


def _without_guesses(pod: dict[str, Any], *, keeps_uid: bool) -> dict[str, Any]:
    """Return a description without values that may change when more records are read.

    The UID is kept if it comes from a container's cgroup path. If a pod is known only by its
    allocation, its UID is a guess from its name, and is removed.
    """
    guesses = {"namespace", "name"} if keeps_uid else {"namespace", "name", "uid"}
    kept = {name: value for name, value in pod.items() if name not in guesses}
    return kept | {"state": PodState.PENDING.value}


def _description_changes(
    then: Mapping[str, _Described], now: Mapping[str, _Described]
) -> Iterator[EntryChange]:
    for path in sorted(then.keys() | now.keys()):
        was, is_ = then.get(path), now.get(path)
        if was is None or is_ is None:
            yield EntryChange(
                path, was.of_tick if was else _ABSENT, is_.of_tick if is_ else _ABSENT
            )
            continue
        yield from _losses(path, was.of_tick, is_.of_tick)
        before, after = was.description, is_.description
        # A pod that was pending and is now known may have any new values. Otherwise, values must
        # not be lost.
        if before.get("state") == after.get("state") or after.get("state") != PodState.KNOWN:
            yield from _losses(f"{path}.pod", before, after)


def _described_places(fields: Mapping[str, msgspec.Raw]) -> dict[str, Mapping[str, Any] | None]:
    """Return the descriptions of the node and of the pods' namespaces, by path in the event."""
    pods: list[dict[str, Any]] = msgspec.json.decode(fields.get(_PODS, b"[]"))
    found: dict[str, Mapping[str, Any] | None] = {
        f"{_NAMESPACES}.{pod['namespace']}": None for pod in pods if "namespace" in pod
    }
    for namespace in msgspec.json.decode(fields.get(_NAMESPACES, b"[]")):
        found[f"{_NAMESPACES}.{namespace['name']}"] = namespace
    found[_NODE] = msgspec.json.decode(fields.get(_NODE, b"null"))
    return found


def _place_changes(
    then: Mapping[str, Mapping[str, Any] | None], now: Mapping[str, Mapping[str, Any] | None]
) -> Iterator[EntryChange]:
    for path, was in sorted(then.items()):
        # A pod that is in another namespace now is reported elsewhere, or its namespace was a
        # guess.
        if was is None or path not in now:
            continue
        is_ = now[path]
        if is_ is None:
            yield EntryChange(path, was, _ABSENT)
        else:
            yield from _losses(path, was, is_)


def _losses(path: str, was: Mapping[str, Any], is_: Mapping[str, Any]) -> Iterator[EntryChange]:
    """Yield the values that were lost or changed; new values are not reported."""
    for name, value in was.items():
        found = is_.get(name, _ABSENT)
        # A value that was unknown may be known now, and `requested` may contain more containers.
        if value is None:
            continue
        if name == "requested" and isinstance(found, dict) and value.items() <= found.items():
            continue
        if value != found:
            yield EntryChange(f"{path}.{name}", value, found)


MAX_WAITING_BYTES: Final = 64 * 2**20
MAX_REMEMBERED: Final = 50_000
_MISSING: Final = EntryChange("(event)", "there", "absent")
_EXTRA: Final = EntryChange("(event)", "absent", "there")


class EventId(msgspec.Struct, frozen=True, gc=False):
    """The fields that identify an event."""

    cluster: str
    node: str
    boot_id: str
    seq: int


class Difference(NamedTuple):
    """A field of an event that differs."""

    event: EventId
    change: EntryChange


class Counts(msgspec.Struct):
    """Numbers of events by the result of comparing the two runs."""

    equal: int = 0
    """Equal byte for byte, not counting `late` and the states of pods without a record."""
    more_complete: int = 0
    """Books are equal, and the description is more complete."""
    different: int = 0
    """Books differ, or the description has lost values."""
    missing: int = 0
    """Only in the first run."""
    extra: int = 0
    """Only in the replay."""
    repeated: int = 0
    """Events of the first run with the identity of an earlier event of that run; not compared
    again."""

    late_otherwise: int = 0
    """Marked late in one run only. These events are also counted in one of the fields above."""

    @property
    def compared(self) -> int:
        """Number of distinct events in the two runs together."""
        return self.equal + self.more_complete + self.different + self.missing + self.extra

    @property
    def is_agreed(self) -> bool:
        """Whether no event is different, missing or extra."""
        return not (self.different or self.missing or self.extra)


class Comparison:
    """Compares the events of both runs, partition by partition.

    Both runs have a partition's events in the same order, so few events wait for their counterpart.
    The total size of waiting events is limited.
    """

    def __init__(self, *, shown: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.counts = Counts()
        self.differences: list[Difference] = []
        """The first differences, at most `shown`."""
        self.changes = 0
        """Total number of fields that differ, including those not listed."""
        self._shown = shown
        self._first = _Waiting(max_waiting_bytes)
        self._replayed = _Waiting(max_waiting_bytes)
        self._paired: dict[EventId, None] = {}

    @property
    def needs_first(self) -> bool:
        """Whether to take events of the first run next, so that few events have to wait."""
        return self._first.bytes <= self._replayed.bytes

    def take_first(self, events: Iterable[bytes]) -> None:
        """Compare events of the first run; raise `msgspec.DecodeError` if one is invalid."""
        for event in events:
            event_id = _id_of(event)
            if event_id in self._paired or event_id in self._first.events:
                self.counts.repeated += 1
            elif (other := self._replayed.pop(event_id)) is not None:
                self._pair(event_id, event, other)
            else:
                self.counts.missing += self._note(self._first.put(event_id, event), _MISSING)

    def take_replayed(self, events: Iterable[bytes]) -> None:
        """Compare events of the replay; raise `msgspec.DecodeError` if one is invalid."""
        for event in events:
            event_id = _id_of(event)
            if (other := self._first.pop(event_id)) is not None:
                self._pair(event_id, other, event)
            else:
                self.counts.extra += self._note(self._replayed.put(event_id, event), _EXTRA)

    def end_partition(self) -> None:
        """Count the events without a counterpart as missing or extra, and start a new partition."""
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
        # The identity is remembered to recognize repetitions, which follow closely: at-least-once
        # delivery repeats the events of one commit.
        if len(self._paired) > MAX_REMEMBERED:
            del self._paired[next(iter(self._paired))]

    def _note(self, events: list[EventId], change: EntryChange) -> int:
        self.changes += len(events)
        left = max(0, self._shown - len(self.differences))
        self.differences += [Difference(event, change) for event in events[:left]]
        return len(events)


class _Waiting:
    """Events of one run that have no counterpart yet, the oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self.events: dict[EventId, bytes] = {}
        self.bytes = 0
        self._max_bytes = max_bytes

    def put(self, event_id: EventId, event: bytes) -> list[EventId]:
        """Add an event; remove and return the oldest events if they no longer fit."""
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
