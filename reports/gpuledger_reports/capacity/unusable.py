"""Measures the free GPU capacity that typical pods cannot use. Pure.

This is the measure of FGD ("Beware of Fragmentation", USENIX ATC 2023): a node's free GPU capacity
that a pod cannot use, averaged over the pods of a mix. If a node lacks anything that the pod needs,
the pod cannot use any free capacity of the node. Otherwise, it cannot use GPUs whose free part is
smaller than the part that it needs of each GPU. Pods that do not request GPUs are not in the mix.

Amounts of GPUs are in parts per million of a device: of a GPU, or of a MIG instance.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

WHOLE: Final = 1_000_000
"""A whole GPU."""


class Shape(NamedTuple):
    """The needs of a pod on one node."""

    gpus: int
    """Number of GPUs."""
    share: int = WHOLE
    """The part that the pod needs of each of these GPUs."""
    cpu_millicores: int | None = None
    """`None` if it is unknown. Unknown amounts are not compared."""
    memory_bytes: int | None = None


class Room(NamedTuple):
    """The free part of a node."""

    free: tuple[int, ...]
    """The free part of each GPU, the fullest GPU first."""
    cpu_millicores: int | None = None
    memory_bytes: int | None = None


GPUS: Final = "gpus"
CPU: Final = "cpu"
MEMORY: Final = "memory"


def lacks(room: Room, shape: Shape) -> str | None:
    """Return the resource that a node lacks for a pod; `None` if the pod fits.

    GPUs are compared first, then CPU, then memory.
    """
    if len(room.free) - bisect_left(room.free, shape.share) < shape.gpus:
        return GPUS
    for name, has, needs in (
        (CPU, room.cpu_millicores, shape.cpu_millicores),
        (MEMORY, room.memory_bytes, shape.memory_bytes),
    ):
        if has is not None and needs is not None and has < needs:
            return name
    return None


def _unusable_on(room: Room, shape: Shape) -> tuple[int, str]:
    """Return how much free GPU capacity of a node a pod cannot use, and the resource it lacks."""
    lacking = lacks(room, shape)
    if lacking is not None:
        return sum(room.free), lacking
    return sum(room.free[: bisect_left(room.free, shape.share)]), GPUS


class Unusable(NamedTuple):
    """Free capacity that pods of a mix cannot use, on average over the mix: FGD's F."""

    total: float
    by_lack: Mapping[str, float]
    """Its parts by the resource that pods lack."""
    by_size: Mapping[Shape, float]
    """Its parts by the GPUs that pods need."""


def find_unusable(rooms: Iterable[Room], mix: Mapping[Shape, int]) -> Unusable:
    """Return the mean capacity that pods of a mix cannot use; `mix` counts pods by shape."""
    # Many nodes are equal, and most have no free GPU.
    alike = Counter(room for room in rooms if room.free and room.free[-1])
    of_lack, of_size, pods = Counter[str](), Counter[Shape](), sum(mix.values())
    for shape, number in mix.items():
        lost = Counter[str]()
        for room, nodes in alike.items():
            amount, lacking = _unusable_on(room, shape)
            lost[lacking] += nodes * amount
        for lacking, amount in lost.items():
            of_lack[lacking] += number * amount
            of_size[Shape(shape.gpus, shape.share)] += number * amount
    return Unusable(
        sum(of_lack.values()) / pods if pods else 0.0,
        {name: amount / pods for name, amount in of_lack.items()},
        {size: amount / pods for size, amount in of_size.items()},
    )
