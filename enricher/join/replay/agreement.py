"""Whether two events of the same tick agree: in their books to the byte, in who the pods are.

The books are everything but `pods`, `holder_uids` and `late`. The description (the first two) may
have become more complete: a pod or a holder not known then may be known now, and what was absent
may be there; nothing else may change. Whether a pod without a name is pending or foreign follows
from the pods that the worker held beside its node's, so it is passed over. `late` tells how a tick
came, beside which others and by whose clock, so it is only counted. Pure functions over encoded
events; the pairing of events is `comparison`'s business.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from gpuledger.decode_errors import follow
from gpuledger.records import GpuEvent, PodState

_DESCRIPTION: Final = "pods"
_LATE: Final = "late"
_HOLDERS: Final = "holder_uids"
_NO_BOOKS: Final = frozenset({_DESCRIPTION, _HOLDERS, _LATE})
_ABSENT: Final = "(absent)"
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
    changes += _holder_changes(held_then, held_now)
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
        inner = list(_changes_within(name, _value(was), _value(is_)))
        # Equal values in other bytes: to the byte means to the byte.
        yield from inner or [EntryChange(name, _text(was), _text(is_))]


def _changes_within(path: str, was: Any, is_: Any) -> Iterator[EntryChange]:  # noqa: ANN401  # any JSON value
    """Yield the innermost values that differ, with their paths."""
    if isinstance(was, dict) and isinstance(is_, dict):
        for name in sorted(was.keys() | is_.keys()):
            yield from _changes_within(
                f"{path}.{name}", was.get(name, _ABSENT), is_.get(name, _ABSENT)
            )
    elif isinstance(was, list) and isinstance(is_, list) and len(was) == len(is_):
        for place, (one, other) in enumerate(zip(was, is_, strict=True)):
            yield from _changes_within(f"{path}[{place}]", one, other)
    elif was != is_:
        yield EntryChange(follow(GpuEvent, path)[0], was, is_)


def _described(pods: msgspec.Raw | None) -> dict[str, dict[str, Any]]:
    """Return each description under each container that it speaks of, or under its UID."""
    return {
        name: pod if pod["state"] != PodState.FOREIGN else pod | {"state": PodState.PENDING.value}
        for pod in msgspec.json.decode(pods or b"[]")
        for name in pod["container_ids"] or [pod.get("uid", "")]
    }


def _description_changes(
    then: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[EntryChange]:
    for name in sorted(then.keys() | now.keys()):
        was, is_ = then.get(name), now.get(name)
        path = f"{_DESCRIPTION}[{name}]"
        if was is None or is_ is None:
            yield EntryChange(path, was or _ABSENT, is_ or _ABSENT)
        elif was["state"] == is_["state"] or is_["state"] != PodState.KNOWN:
            yield from _losses(path, was, is_)


def _holders(uids: msgspec.Raw | None) -> dict[int, str]:
    """Return the holders that are known, by the position of the allocation."""
    told: list[str | None] = msgspec.json.decode(uids or b"[]")
    return {place: uid for place, uid in enumerate(told) if uid is not None}


def _holder_changes(then: Mapping[int, str], now: Mapping[int, str]) -> Iterator[EntryChange]:
    for place, uid in then.items():
        if now.get(place) != uid:
            yield EntryChange(f"{_HOLDERS}[{place}]", uid, now.get(place, _ABSENT))


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


def _value(raw: msgspec.Raw | None) -> Any:  # noqa: ANN401  # any JSON value
    return _ABSENT if raw is None else msgspec.json.decode(raw)


def _text(raw: msgspec.Raw | None) -> str:
    return _ABSENT if raw is None else bytes(raw).decode(errors="replace")
