"""A packing of the pods that run on some nodes, and the GPUs that stay unusable. Pure.

The packing is greedy, so a better one may exist. If a pod does not fit, the present state counts as
the best packing.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Final, NamedTuple

from gpuledger_reports.capacity.unusable import (
    WHOLE,
    Room,
    Shape,
    Unusable,
    find_unusable,
    lacks,
)

_SMALLEST: Final = WHOLE // 20
"""The smallest part of a GPU that counts as free. Shares are rounded down to whole percents: seven
shares of a seventh leave 2 %."""


def pack(rooms: Iterable[Room], pods: Iterable[Shape]) -> list[Room] | None:
    """Return the nodes after all pods were placed on them; `None` if a pod does not fit.

    Pods are placed in order of size, the largest first, each on the fullest node on which it fits.
    """
    numbers = count()
    # The number of a node is new after each placing, so that equally full nodes fill in turn.
    nodes = sorted((sum(room.free), next(numbers), room) for room in rooms)
    for pod, alike in groupby(sorted(pods, key=_size, reverse=True)):
        # A node that lacks something for a pod lacks it for further pods of its shape.
        untried, place = 0, None
        for _ in alike:
            if place is None:
                fitting = (at for at in range(untried, len(nodes)) if not lacks(nodes[at][2], pod))
                place = next(fitting, None)
                if place is None:
                    return None
                untried = place + 1
            room = _after_placing(nodes.pop(place)[2], pod)
            # It is fuller than before, so the nodes from `untried` on keep their places.
            node = (sum(room.free), next(numbers), room)
            at = bisect_left(nodes, node)
            nodes.insert(at, node)
            place = None if lacks(room, pod) else at
    return [room for _, _, room in nodes]


def _size(pod: Shape) -> tuple[int, int, int]:
    return pod.gpus * pod.share, pod.cpu_millicores or 0, pod.memory_bytes or 0


def _after_placing(room: Room, pod: Shape) -> Room:
    """Return a node after a pod was placed on the fullest GPUs that have enough left."""
    first = bisect_left(room.free, pod.share)
    after = first + pod.gpus
    got = [_left(free - pod.share) for free in room.free[first:after]]
    return Room(
        tuple(sorted((*room.free[:first], *got, *room.free[after:]))),
        _minus(room.cpu_millicores, pod.cpu_millicores),
        _minus(room.memory_bytes, pod.memory_bytes),
    )


def _left(share: int) -> int:
    """Return the free part of a GPU; 0 if it is only the rounding error of equal shares."""
    return share if share >= _SMALLEST else 0


def _minus(has: int | None, needs: int | None) -> int | None:
    return None if has is None or needs is None else has - needs


class Pod(NamedTuple):
    """A pod or job on a node."""

    gpus: Mapping[str, int]
    """Its share of each of its GPUs, by UUID."""
    cpu_millicores: int | None = None
    memory_bytes: int | None = None
    is_fixed: bool = False
    """Whether it belongs to the node, such as a pod of a DaemonSet."""

    @property
    def shape(self) -> Shape:
        """The resources that it needs."""
        share = max(self.gpus.values())
        return Shape(len(self.gpus), share, self.cpu_millicores, self.memory_bytes)


@dataclass
class NodeState:
    """A node at an instant, with its GPUs of one kind."""

    cpu_millicores: int | None = None
    """The free part of the node's CPU."""
    memory_bytes: int | None = None
    gpus: set[str] = field(default_factory=set)
    """UUIDs of the GPUs."""
    pods: list[Pod] = field(default_factory=list)

    @property
    def room(self) -> Room:
        """The free parts of the node."""
        return Room(self._free(self.pods), self.cpu_millicores, self.memory_bytes)

    @property
    def emptied(self) -> Room:
        """The free parts of the node without the pods that can move."""
        moving = self.moving
        return Room(
            self._free(pod for pod in self.pods if pod.is_fixed),
            _sum(self.cpu_millicores, (pod.cpu_millicores for pod in moving)),
            _sum(self.memory_bytes, (pod.memory_bytes for pod in moving)),
        )

    @property
    def moving(self) -> list[Pod]:
        """The pods that can move."""
        return [pod for pod in self.pods if not pod.is_fixed]

    def _free(self, pods: Iterable[Pod]) -> tuple[int, ...]:
        free = dict.fromkeys(self.gpus, WHOLE)
        for pod in pods:
            for gpu, share in pod.gpus.items():
                free[gpu] -= share
        return tuple(sorted(map(_left, free.values())))


def _sum(has: int | None, freed: Iterable[int | None]) -> int | None:
    return None if has is None else has + sum(each or 0 for each in freed)


class Measured(NamedTuple):
    """The state of a kind of GPUs at an instant.

    `gpus` and `free` are in devices of this kind, `now` and `packed` in parts per million of one.
    """

    gpus: float
    free: float
    now: Unusable
    packed: Unusable
    knows_cpu: bool
    knows_memory: bool


def measure(nodes: Sequence[NodeState], mix: Mapping[Shape, int]) -> Measured:
    """Return what pods of a mix cannot use on nodes, now and after packing the running pods."""
    shapes = [pod.shape for node in nodes for pod in node.moving]
    amounts: list[NodeState | Shape] = [*nodes, *shapes, *mix]
    knows_cpu = all(each.cpu_millicores is not None for each in amounts)
    knows_memory = all(each.memory_bytes is not None for each in amounts)

    def known(shape: Shape) -> Shape:
        return shape._replace(
            cpu_millicores=shape.cpu_millicores if knows_cpu else None,
            memory_bytes=shape.memory_bytes if knows_memory else None,
        )

    usual = Counter[Shape]()
    for shape, number in mix.items():
        usual[known(shape)] += number
    rooms = [node.room for node in nodes]
    now = find_unusable(rooms, usual)
    packed = pack((node.emptied for node in nodes), map(known, shapes)) if now.total else None
    best = find_unusable(packed, usual) if packed is not None else now
    return Measured(
        gpus=sum(len(node.gpus) for node in nodes),
        free=sum(sum(room.free) for room in rooms) / WHOLE,
        now=now,
        packed=min(now, best, key=lambda found: found.total),
        knows_cpu=knows_cpu,
        knows_memory=knows_memory,
    )
