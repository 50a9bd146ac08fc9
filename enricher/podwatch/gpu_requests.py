"""How many GPUs a pod asks for, by resource name. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from enricher.podwatch.objects import ApiContainer, PodSpec, Quantity

_SUFFIXES: Final = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def gpus_requested(spec: PodSpec, prefixes: tuple[str, ...]) -> dict[str, int]:
    """Return what the pod holds at most at a time, as the scheduler counts it.

    Containers run side by side, together with the init containers that are restarted always; the
    other init containers run alone before them.
    """
    inits = spec.init_containers or []
    beside = [one for one in inits if one.restart_policy == "Always"]
    total = _sum([*(spec.containers or []), *beside], prefixes)
    for alone in inits:
        total |= _sum([alone], prefixes)
    return dict(total)


def _sum(containers: Sequence[ApiContainer], prefixes: tuple[str, ...]) -> Counter[str]:
    total: Counter[str] = Counter()
    for container in containers:
        for name, amount in _amounts(container, prefixes):
            total[name] += amount
    return total


def _amounts(container: ApiContainer, prefixes: tuple[str, ...]) -> Iterable[tuple[str, int]]:
    """Yield a container's requests; devices cannot be overcommitted, so a limit is one as well."""
    resources = container.resources
    if resources is None:
        return
    for name, quantity in {**(resources.limits or {}), **(resources.requests or {})}.items():
        if name.startswith(prefixes) and (amount := parse_quantity(quantity)):
            yield name, amount


def parse_quantity(quantity: Quantity) -> int:
    """Read a whole Kubernetes quantity such as `2` or `1k`; 0 for what is none."""
    text = str(quantity)
    digits = text.rstrip("kMGi")
    if not (digits.isascii() and digits.isdigit()):
        return 0
    suffix = text[len(digits) :]
    return int(digits) * (_SUFFIXES.get(suffix, 0) if suffix else 1)
