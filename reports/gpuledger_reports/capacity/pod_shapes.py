"""The shape of a pod or Slurm job: how many GPUs, MIG instances or shares it requests. Pure.

A share of a GPU has a size if the request states it in percent of the GPU's cores, as with HAMi and
Koordinator. Other shares, such as replicas under their own resource name, and resource claims have
no known size here. Replicas that are named like whole GPUs count as whole GPUs. `waits` replaces
both by the parts that pods held.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import orjson

_MIG: Final = "mig-"
MIG_PROFILE: Final = re.compile(r"(?:(\d+)c\.)?(\d+)g\.\w+")
_SLICES: Final = 7
"""Compute slices of most GPUs that can be partitioned."""
GPU: Final = "nvidia.com/gpu"
_PERCENT_EACH: Final = {
    "nvidia.com/gpucores": GPU,
    "volcano.sh/vgpu-cores": "volcano.sh/vgpu-number",
}
"""Resources that state the percent of each share, and the resource that counts the shares."""
_PERCENT: Final = (
    "aliyun.com/gpu-core.percentage",
    "koordinator.sh/gpu-core",
    "tencent.com/vcuda-core",
)
"""Resources that state the percent of all shares together."""
_MAX_GPUS: Final = 1_000_000
"""A request for more is a mistake; one of them would exceed all others in a sum."""


class Request(NamedTuple):
    """The request of a pod, in words and in GPUs."""

    name: str
    """`4 GPUs`, `2 x 1g.10gb`, `share`, `claim` or `unknown`."""
    gpus: float | None
    """In whole GPUs; `None` if the size is unknown."""


_UNKNOWN_REQUEST: Final = Request("unknown", None)


def read_shape(requests: Iterable[str], fractions: Mapping[str, float]) -> Request:
    """Return the shape of a pod.

    `requests` has a JSON object for each container, as in the column `requested`. `fractions` maps
    MIG profiles, such as `1g.10gb.me`, to the part of a GPU; for other profiles, the part is
    derived from the name.
    """
    amounts = Counter[str]()
    try:
        for request in requests:
            amounts.update({name: int(amount) for name, amount in orjson.loads(request).items()})
    except (AttributeError, TypeError, ValueError):
        # Not a whole number, such as `1k`, or not an object of numbers.
        return _UNKNOWN_REQUEST
    found = _shape(amounts, fractions)
    return found if (found.gpus or 0) <= _MAX_GPUS else _UNKNOWN_REQUEST


def _shape(amounts: Mapping[str, int], fractions: Mapping[str, float]) -> Request:
    if not amounts:
        return Request("claim", None)
    if set(amounts) == {GPU}:
        count = amounts[GPU]
        return Request("1 GPU" if count == 1 else f"{count} GPUs", float(count))
    profiles = {name: name.partition(_MIG)[2] for name in amounts if MIG_PROFILE.search(name)}
    if set(amounts) == set(profiles) and not any(".shared" in name for name in amounts):
        parts = [(amounts[name], profile) for name, profile in sorted(profiles.items())]
        return Request(
            " + ".join(
                profile if count == 1 else f"{count} x {profile}" for count, profile in parts
            ),
            sum(count * _fraction(profile, fractions) for count, profile in parts),
        )
    return Request("share", _shared_gpus(amounts))


def _fraction(profile: str, fractions: Mapping[str, float]) -> float:
    if profile in fractions:
        return fractions[profile]
    compute, whole = re.search(MIG_PROFILE, profile).groups()  # type: ignore[union-attr]
    return int(compute or whole) / _SLICES


def _shared_gpus(amounts: Mapping[str, int]) -> float | None:
    percents = [amounts[name] for name in _PERCENT if name in amounts]
    percents += [
        amounts[name] * amounts.get(count, 1)
        for name, count in _PERCENT_EACH.items()
        if name in amounts
    ]
    return sum(percents) / 100 if percents else None
