"""A month of a small cluster as a scenario, and its true usage.

The truth comes only from the scenario: who had which GPU, for how long, and whose kernels ran. It
uses neither NVML nor the books.

The cluster is difficult on purpose. A kubelet lists pods for hours after their end, a pod name is
used again every day, one node's clock is set forward and back, each driver reports in another form,
a GPU is repartitioned in the middle of the month, and another is lost and stays lost.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from gpuledger.clock import NS_PER_SECOND
from gpuledger_simulator.plan import PlannedPod
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.schema import PluginDevice, Scenario
from gpuledger_simulator.simulation import Simulation

EPOCH_NS: Final = 1_790_812_800 * NS_PER_SECOND
"""2026-10-01T00:00:00Z."""
DAYS: Final = 30
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
LATE_NODE: Final = "lone"
LOST_DAY: Final = 25.0
CUT_AGAIN_DAY: Final = 15.0
USED, BLENDED = "batch", "render"
"""Tenants that are billed by use, and half by use and half by allocation."""
Live = tuple[float, float]
"""Start and end, in days."""


def scenario_of(day_seconds: float) -> Scenario:
    """Return the month with days of this length."""
    return parse_scenario(
        {
            "name": "month",
            # The longest sampling period of a known driver, so that fewer samples are played.
            "sample_period_seconds": 1.0,
            "nodes": _nodes(day_seconds),
            "pods": [pod for pods in _tenants(day_seconds) for pod in pods],
            "faults": [
                {
                    "node": "other",
                    "kind": "lost",
                    "gpus": [0],
                    "start_seconds": LOST_DAY * day_seconds,
                }
            ],
        }
    )


def _nodes(day: float) -> list[dict[str, Any]]:
    first = {"instances": ["1g.10gb", "3g.40gb"]}
    second = {"instances": ["2g.20gb", "4g.40gb"], "start_seconds": CUT_AGAIN_DAY * day}
    return [
        {
            "name": "many",
            "gpus": [{"model": H100}, {"model": H100, "mig": [first, second]}, {"model": L4}],
            "driver": {"stamps": "boot", "rounding": "down"},
            "ended_pods_listed_seconds": day / 2,
        },
        {
            "name": "other",
            "gpus": {"model": L4},
            "driver": {"processes": "mean"},
            "clock_steps": [
                {"at_seconds": 5 * day, "by_seconds": 2.0},
                {"at_seconds": 12 * day, "by_seconds": -2.0},
            ],
        },
        {"name": LATE_NODE, "gpus": {"model": L4}, "driver": {"processes": "newest"}},
    ]


def _tenants(day: float) -> Iterator[list[dict[str, Any]]]:
    random = Random(18)  # noqa: S311  # a scenario, not a secret

    def runs(
        namespace: str,
        days: Sequence[float],
        live: Live,
        **of: Any,  # noqa: ANN401  # as in `_pod`
    ) -> list[dict[str, Any]]:
        # Random offsets, so that no pod starts where a tick starts.
        return [
            _pod(namespace, [(each + at + random.uniform(0.0, 0.05)) * day for at in live], **of)
            for each in days
        ]

    month = range(0, DAYS, 5)
    # Pods with one name, one after another, like a StatefulSet's; another tenant in between.
    yield runs("research", month, (0.0, 2.9), gpu=0, load=0.9)
    yield runs("nightly", month, (3.0, 4.9), gpu=0, load=0.3)
    # Instances before the GPU is repartitioned, and after it.
    for begin in (0.0, CUT_AGAIN_DAY):
        halves = (begin, begin + CUT_AGAIN_DAY / 2)
        yield runs("serving", halves, (0.05, 7.3), gpu=1, instance=0, load=0.2)
        yield runs(USED, halves, (0.3, 3.6), gpu=1, instance=1, load=0.5)
    # Two pods that share one GPU by time-slicing.
    yield runs("chat", month, (0.0, 4.9), gpu=2, replica=0, load=0.3)
    yield runs("embed", month, (1.25, 3.75), gpu=2, replica=1, load=0.25)
    # Allocated all month and never used; the GPU is lost before the month ends.
    yield [_pod("hoard", [0.0], node="other", gpu=0, load=None)]
    yield runs(BLENDED, month, (0.0, 4.9), node=LATE_NODE, gpu=0, load=0.6)


def _pod(
    namespace: str,
    live: Sequence[float],
    *,
    gpu: int,
    load: float | None,
    node: str = "many",
    **device: int,
) -> dict[str, Any]:
    place = {"instance": device["instance"]} if "instance" in device else {}
    process = {
        "command": namespace,
        "memory_bytes": 2**30,
        "gpus": [gpu],
        "load": {"busy_ratio": load, "kernel_seconds": 0.5},
        **place,
    }
    allocated = {"gpu": gpu, **device}
    container = {
        "name": "main",
        "devices": [
            allocated | ({"resource": "nvidia.com/gpu.shared"} if "replica" in allocated else {})
        ],
        "processes": [] if load is None else [process],
    }
    return {
        "namespace": namespace,
        "name": f"{namespace}-0",
        "node": node,
        "owner": {"kind": "StatefulSet", "name": namespace},
        "start_seconds": live[0],
        **({"end_seconds": live[1]} if live[1:] else {}),
        "containers": [container],
    }


@dataclass
class TenantTruth:
    """A tenant's true usage, in seconds of whole GPUs by model."""

    allocated: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time for which it had a GPU that answered."""
    used: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time for which its kernels ran."""
    unresponsive: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time for which it had a GPU that was lost."""


def truth_of(
    simulations: Mapping[str, Simulation], *, until_seconds: float
) -> dict[str, TenantTruth]:
    """Return each namespace's true usage up to a second; `simulations` are by node."""
    found: dict[str, TenantTruth] = defaultdict(TenantTruth)
    for node, simulation in simulations.items():
        for pod in simulation.pods:
            if pod.spec.node == node:
                _add_truth(found[pod.spec.namespace], simulation, pod, until_seconds)
    return found


def _add_truth(
    truth: TenantTruth, simulation: Simulation, pod: PlannedPod, until_seconds: float
) -> None:
    begin, end = pod.start_ns, min(pod.end_ns, round(until_seconds * NS_PER_SECOND))
    for container in pod.spec.containers:
        for device in container.devices or ():
            gpu = simulation.node(pod.spec.node).gpus[device.gpu]
            share = _share_of(device, simulation, pod)
            lost = sum(
                _overlap(begin, end, fault.start_seconds, fault.end_seconds or until_seconds)
                for fault in simulation.scenario.faults
                if (fault.node, [device.gpu]) == (pod.spec.node, fault.gpus)
            )
            model = gpu.facts.name
            truth.allocated[model] += share * ((end - begin) / NS_PER_SECOND - lost)
            truth.unresponsive[model] += share * lost
            busy_ns = sum(gpu.busy_ns(one, begin, end) for one in gpu.processes if one.pod is pod)
            # The time of an instance counts by its fraction of the GPU.
            part = share if device.instance is not None else 1.0
            truth.used[model] += part * busy_ns / NS_PER_SECOND


def _share_of(device: PluginDevice, simulation: Simulation, pod: PlannedPod) -> float:
    """Return the fraction of the GPU: an instance's sevenths, one of the shares, or 1."""
    gpu = simulation.node(pod.spec.node).gpus[device.gpu]
    if device.instance is not None and (cut := gpu.cut(pod.start_ns)):
        return int(cut.instances[device.instance].profile[0]) / 7
    if device.replica is None:
        return 1.0
    shares = {
        other.replica
        for one in simulation.scenario.pods
        if one.node == pod.spec.node
        for container in one.containers
        for other in container.devices or ()
        if other.gpu == device.gpu
    }
    return 1 / len(shares)


def _overlap(begin_ns: int, end_ns: int, from_seconds: float, to_seconds: float) -> float:
    begin, end = begin_ns / NS_PER_SECOND, end_ns / NS_PER_SECOND
    return max(0.0, min(end, to_seconds) - max(begin, from_seconds))


PRICES: Final = {H100: 700, L4: 100}
"""Per hour; high enough that rounding to cents does not matter."""
POLICY: Final = f"""
prices:
  - {{name: h100, model: "{H100}", per_gpu_hour: {PRICES[H100]}}}
  - {{name: l4, model: "{L4}", per_gpu_hour: {PRICES[L4]}}}
basis:
  - {{match: {{namespace: {USED}}}, basis: used}}
  - {{match: {{namespace: {BLENDED}}}, basis: blended, allocated_weight: 0.5}}
close: {{min_data_coverage_ratio: 0.8}}
"""


def owed(namespace: str, truth: TenantTruth) -> float:
    """Return the amount that a namespace owes for its true usage by the policy above."""
    amount = 0.0
    for model, price in PRICES.items():
        allocated, used = truth.allocated.get(model, 0.0), truth.used.get(model, 0.0)
        seconds = {USED: used, BLENDED: (allocated + used) / 2}.get(namespace, allocated)
        amount += seconds / 3600 * price
    return amount
