"""The true allocated and used times of a fleet's pods, from their requests and kernels.

These times are exact. The agent sees a start or an end only in its next sample, so each time also
has a bound, the maximum difference of a bill.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gpuledger.clock import NS_PER_SECOND
from tests.fleet import TICK_SECONDS, VALID_SECONDS
from tests.fleet_oracle import LineKey
from tests.fleet_scenario import Fleet, FleetPod, Life

USED_RATIO: Final = 0.01
"""The documented maximum error of measured time, relative to the GPU's time."""
LAG_SECONDS: Final = 1.0
"""Maximum time by which the first sample begins before the agent starts, and by which the last
sample ends before the agent ends."""


@dataclass(kw_only=True)
class Time:
    """A time in seconds, and the maximum difference of a bill."""

    seconds: float = 0.0
    bound: float = 0.0


def allocated_in(fleet: Fleet) -> Mapping[LineKey, Time]:
    """Return the allocated time of each pod on each GPU."""
    found: dict[LineKey, Time] = defaultdict(Time)
    simulation = fleet.simulate()
    for node, count in fleet.gpus.items():
        for index in range(count):
            memory = simulation.node(node).gpus[index].facts.memory_bytes
            pods = [pod for pod in fleet.pods if (pod.node, pod.gpu) == (node, index)]
            shares = {pod: float(share) for pod in pods if (share := pod.share(memory))}
            for known in _known(fleet, node):
                _allocate(fleet, shares, known, found)
    return found


def _allocate(
    fleet: Fleet, shares: Mapping[FleetPod, float], known: Life, found: Mapping[LineKey, Time]
) -> None:
    """Add the allocated time of the pods of one GPU while its allocations are known."""
    lives = {pod: _common(_listed(fleet, pod), known) for pod in shares}
    borders = sorted({*known, *(border for life in lives.values() for border in life)})
    is_scaled = False
    for begin, end in pairwise(borders):
        running = [pod for pod, life in lives.items() if life[0] <= begin and end <= life[1]]
        total = sum(shares[pod] for pod in running)
        is_scaled |= total > 1
        for pod in running:
            found[_key(fleet, pod)].seconds += shares[pod] / max(1.0, total) * (end - begin)
    for pod, life in lives.items():
        # If more than the GPU is allocated, the shares of its other pods matter too.
        ticks = sum(
            # A share starts up to two samples after its pod. Other borders are exact to a sample.
            2 * (known[0] < begin) + (end < known[1])
            for begin, end in (lives.values() if is_scaled else [life])
            if begin < end
        )
        # The last answer of the kubelet may be older by a sample.
        ticks += 2 * sum(at in life and at not in fleet.lives[pod.node] for at in known)
        found[_key(fleet, pod)].bound += shares[pod] * (2 * LAG_SECONDS + ticks * TICK_SECONDS)


def _listed(fleet: Fleet, pod: FleetPod) -> Life:
    """Return the time in which a pod runs and the agent has been able to see its share.

    Pods behind a reservation pod have no devices of their own, so the kubelet's answer about
    devices does not matter.
    """
    silent, again = fleet.unanswered.get(pod.node, (0.0, 0.0))
    begin, end = pod.life
    return (again if silent <= begin < again and pod.way != "kai" else begin), end


def _common(one: Life, other: Life) -> Life:
    begin = max(one[0], other[0])
    return begin, max(begin, min(one[1], other[1]))


def used_in(fleet: Fleet) -> Mapping[LineKey, Time]:
    """Return the used time of each pod on each GPU."""
    found: dict[LineKey, Time] = defaultdict(Time)
    for name, node in fleet.simulate().nodes.items():
        begin, end = fleet.lives[name]
        for gpu in node.gpus:
            for process in gpu.processes:
                assert process.pod
                spec = process.pod.spec
                time = found[LineKey(name, gpu.facts.uuid, spec.namespace, spec.name)]
                span_ns = (round(begin * NS_PER_SECOND), round(end * NS_PER_SECOND))
                time.seconds += gpu.busy_ns(process, *span_ns) / NS_PER_SECOND
                time.bound = USED_RATIO * (end - begin) + 2 * LAG_SECONDS
    return found


def unknown_in(fleet: Fleet, node: str) -> Time:
    """Return the time for which the allocations of a node's GPUs are unknown."""
    begin, end = fleet.lives[node]
    known = sum(until - since for since, until in _known(fleet, node))
    return Time(seconds=end - begin - known, bound=2 * TICK_SECONDS * (node in fleet.unanswered))


def _known(fleet: Fleet, node: str) -> Iterator[Life]:
    """Yield the times in which the allocations of a node are known."""
    begin, end = fleet.lives[node]
    silent, again = fleet.unanswered.get(node, (end, end))
    expired = min(silent + VALID_SECONDS, end)
    if expired >= again:
        yield begin, end
        return
    yield begin, expired
    if again < end:
        yield again, end


def _key(fleet: Fleet, pod: FleetPod) -> LineKey:
    return LineKey(pod.node, fleet.uuid(pod.node, pod.gpu), pod.namespace, pod.name)
