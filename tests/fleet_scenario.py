"""Fleets of nodes as scenarios, with pods that get GPUs in every supported way.

The module also computes each pod's share of a GPU from the pod's request. It does not read
annotations or samples for this.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Final, Literal

from typing_extensions import override

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.identities import gpu_uuid
from gpuledger_simulator.plan import PlannedProcess
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.schema import Node
from gpuledger_simulator.simulation import Simulation

BEGIN_NS: Final = 1_790_812_800 * NS_PER_SECOND
"""2026-10-01T00:00:00Z, the beginning of the first hour."""
EPOCH_NS: Final = BEGIN_NS + 57 * 60 * NS_PER_SECOND
"""The beginning of the scenario."""
MODEL: Final = "NVIDIA L4"
ALWAYS: Final = 1e6
_SEED: Final = 7
_MIB: Final = 2**20
_GIB: Final = 2**30

Life = tuple[float, float]
"""Start and end, in seconds of the scenario."""
Way = Literal["device", "hami", "kai", "gpushare", "reservation", "none"]
"""How a pod gets a GPU: `device` means from the kubelet, `none` not at all, and `reservation` that
the pod reserves the GPU for other pods. The others are schedulers that share GPUs."""


def uuid_of(node: str, index: int) -> str:
    """Return the UUID of a node's GPU that was never in another node."""
    return gpu_uuid(_SEED, node, index)


@dataclass(frozen=True, kw_only=True)
class FleetPod:
    """A pod with at most one GPU, and at most one process on a GPU."""

    name: str
    node: str
    way: Way = "device"
    gpu: int = 0
    """Index of the allocated GPU."""
    amount: int = 100
    """The share: GiB of memory for `gpushare`, otherwise percent."""
    memory_mib: int = 64
    """The memory of the share, for `hami`."""
    uses: int | None = None
    """Index of the GPU on which its process runs."""
    load: float = 0.4
    life: Life = (0.0, ALWAYS)

    @property
    def namespace(self) -> str:
        """Return the pod's namespace."""
        return "kai-resource-reservation" if self.way == "reservation" else "team"

    def share(self, gpu_memory_bytes: int) -> Fraction:
        """Return the part of its GPU that is allocated to it while it runs."""
        if self.way == "gpushare":
            return Fraction(self.amount * _GIB, gpu_memory_bytes)
        if self.way == "hami":
            of_memory = Fraction(self.memory_mib * _MIB, gpu_memory_bytes)
            return max(of_memory, Fraction(self.amount, 100))
        return Fraction(0) if self.way in ("reservation", "none") else Fraction(self.amount, 100)

    def fields(self, number: int, *, gpu_uuid: str) -> dict[str, Any]:
        """Return the pod in the fields of a scenario; `number` is its replica."""
        counted = {"gpu": 0, "replica": number}
        devices = {
            "device": [{"gpu": self.gpu}],
            "reservation": [{"gpu": self.gpu}],
            # The ids of HAMi and cGPU only count shares, so they may name another GPU.
            "hami": [{**counted, "ids": "hami"}],
            "gpushare": [{**counted, "ids": "gpu-mem", "resource": "aliyun.com/gpu-mem"}],
        }
        card = f"{gpu_uuid},NVIDIA,{self.memory_mib},{self.amount}"
        annotations = {
            "hami": {"hami.io/vgpu-devices-allocated": f"{card}:;"},
            "kai": {"gpu-fraction": f"{self.amount / 100}"},
            "gpushare": {
                "scheduler.framework.gpushare.allocation": json.dumps({0: {self.gpu: self.amount}})
            },
        }
        group = {"runai-gpu-group": f"group-{self.gpu}"}
        process = {
            "command": "python main.py",
            "gpus": [self.uses],
            "load": {"busy_ratio": self.load, "kernel_seconds": 0.05},
            "memory_bytes": _GIB,
        }
        start, end = self.life
        return {
            "namespace": self.namespace,
            "name": self.name,
            "node": self.node,
            "labels": group if self.way in ("kai", "reservation") else {},
            "annotations": annotations.get(self.way, {}),
            "start_seconds": start,
            **({} if end == ALWAYS else {"end_seconds": end}),
            "containers": [
                {
                    "name": "main",
                    "devices": devices.get(self.way, []),
                    "processes": [] if self.uses is None else [process],
                }
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Nodes with pods."""

    gpus: Mapping[str, int]
    """The number of GPUs of each node."""
    pods: Sequence[FleetPod]
    lives: Mapping[str, Life]
    """For each node: the time for which its agent runs."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """For each node that gets the GPUs of an earlier one: the name of the earlier one."""
    unanswered: Mapping[str, Life] = field(default_factory=dict)
    """The time in which a node's kubelet does not answer."""

    def uuid(self, node: str, index: int) -> str:
        """Return the UUID of a node's GPU."""
        return uuid_of(self.moved.get(node, node), index)

    def uids(self) -> dict[FleetPod, str]:
        """Return the UID of each pod."""
        run = self.simulate()
        return {pod: run.uid(one) for pod, one in zip(self.pods, run.pods, strict=False)}

    def simulate(self, clock: Clock | None = None) -> Simulation:
        """Return a run of the fleet, with the agent's own pod on each node."""
        agents = [FleetPod(name=f"agent-{name}", node=name, way="none") for name in self.gpus]
        scenario = {
            "name": "fleet",
            "seed": _SEED,
            "nodes": [
                {
                    "name": name,
                    "gpus": {"model": MODEL, "count": count},
                    # A pod's name returns while the kubelet still lists the former pod.
                    "ended_pods_listed_seconds": 600,
                }
                for name, count in self.gpus.items()
            ],
            "pods": [
                pod.fields(number, gpu_uuid=self.uuid(pod.node, pod.gpu))
                for number, pod in enumerate([*self.pods, *agents])
            ],
        }
        return _Simulation(scenario, clock=clock, fleet=self)


class _Simulation(Simulation):
    """A run in which GPUs move."""

    def __init__(self, scenario: dict[str, object], *, clock: Clock | None, fleet: Fleet) -> None:
        self._fleet = fleet
        super().__init__(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock)

    @override
    def _make_gpus(self, node: Node, processes: list[PlannedProcess]) -> list[SimulatedGpu]:
        gpus = super()._make_gpus(node, processes)
        for gpu in gpus:
            uuid = self._fleet.uuid(node.name, gpu.facts.index)
            gpu.facts = replace(gpu.facts, uuid=uuid)
        return gpus
