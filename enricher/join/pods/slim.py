"""Makes pods' records small: what many of them say alike is kept once. Pure.

A record that was decoded has strings and dictionaries of its own. Nobody changes a record, so equal
ones can be the same object: that is more than half of a cached pod.
"""

from sys import intern
from typing import Final, TypeVar, cast

from msgspec.structs import replace

from gpuledger.records import PodRecord

V = TypeVar("V")
_MAX_SHARED: Final = 10_000


class Interner:
    """Remembers dictionaries, to give the same one for all that are equal."""

    def __init__(self) -> None:
        self._labels: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
        self._requests: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._labels) + len(self._requests)

    def slim(self, pod: PodRecord) -> PodRecord:
        """Return an equal record that shares with others what it can."""
        return replace(
            pod,
            namespace=intern(pod.namespace),
            node=intern(pod.node),
            owner_kind=_intern(pod.owner_kind),
            owner_name=_intern(pod.owner_name),
            labels=_shared(self._labels, pod.labels),
            containers=[replace(each, name=intern(each.name)) for each in pod.containers],
            gpus_requested=_shared(self._requests, pod.gpus_requested),
            phase=intern(pod.phase),
            qos_class=_intern(pod.qos_class),
            priority_class=_intern(pod.priority_class),
        )


def _intern(text: str | None) -> str | None:
    return text and intern(text)


def _shared(
    known: dict[tuple[tuple[str, V], ...], dict[str, V]], items: dict[str, V]
) -> dict[str, V]:
    key = tuple(items.items())
    found = known.get(key)
    if found is None:
        if len(known) >= _MAX_SHARED:
            known.clear()
        known[key] = found = {intern(name): _intern_value(value) for name, value in items.items()}
    return found


def _intern_value(value: V) -> V:
    return cast("V", intern(value)) if isinstance(value, str) else value
