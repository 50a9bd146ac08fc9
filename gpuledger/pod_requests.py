"""The amounts that a pod requests as a whole, from the requests of its containers. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from gpuledger.records import PendingContainer

_SIDECAR: Final = "sidecar"
_INIT: Final = "init"
_MAX_AMOUNT: Final = 2**63 - 1
"""The maximum of a record's field."""


def requested_amounts(containers: Iterable[PendingContainer]) -> dict[str, int]:
    """Return the amount of each resource that must be free on one node, as schedulers count it."""
    return amounts_together((each.kind, each.requested.resources) for each in containers)


def amounts_together(
    containers: Iterable[tuple[str | None, Mapping[str, int]]],
) -> dict[str, int]:
    """Return the amounts that containers need together, given the kind and amounts of each.

    The containers are in the order in which they start. Ordinary containers and sidecars run at the
    same time. An init container runs only with the sidecars that started before it.
    """
    together, sidecars, highest = Counter[str](), Counter[str](), Counter[str]()
    for kind, requested in containers:
        amounts = Counter(requested)
        if kind == _INIT:
            # The union of counters has the higher amount of each resource.
            highest |= amounts + sidecars
            continue
        together += amounts
        if kind == _SIDECAR:
            sidecars += amounts
    return {name: min(amount, _MAX_AMOUNT) for name, amount in (together | highest).items()}
