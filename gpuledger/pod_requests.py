"""The amounts that a pod requests as a whole, from the requests of its containers. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from gpuledger.records import PendingContainer

_SIDECAR: Final = "sidecar"
_INIT: Final = "init"


def requested_amounts(containers: Iterable[PendingContainer]) -> dict[str, int]:
    """Return the amount of each resource that must be free on one node, as schedulers count it.

    The containers are in the order in which they start. Ordinary containers and sidecars run at the
    same time. An init container runs only with the sidecars that started before it.
    """
    together, sidecars, highest = Counter[str](), Counter[str](), Counter[str]()
    for container in containers:
        amounts = Counter(container.requested.resources)
        if container.kind == _INIT:
            # The union of counters has the higher amount of each resource.
            highest |= amounts + sidecars
            continue
        together += amounts
        if container.kind == _SIDECAR:
            sidecars += amounts
    return dict(together | highest)
