"""One GPU with four MIG instances, and after 20 s with one; a pod in each of three."""

from typing import Any

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation

GIB = 1 << 30
EPOCH_NS = 1_790_000_000_000_000_000


def _pod(name: str, instance: int, *, held: int, busy: float) -> dict[str, Any]:
    process = {
        "command": name,
        "gpus": [0],
        "instance": instance,
        "end_seconds": 19.5,
        "memory_bytes": held * GIB,
        "load": {"busy_ratio": busy, "kernel_seconds": 0.02},
    }
    return {
        "namespace": "team-a",
        "name": name,
        "node": "node-a",
        "containers": [{"name": "main", "processes": [process]}],
    }


CUT: dict[str, Any] = {
    "name": "cut",
    "nodes": [
        {
            "name": "node-a",
            "gpus": {
                "model": "NVIDIA H100 80GB HBM3",
                "mig": [
                    {"instances": ["1g.10gb", "3g.40gb", ["1c.2g.20gb", "1c.2g.20gb"]]},
                    {"start_seconds": 20, "instances": ["7g.80gb"]},
                ],
            },
        }
    ],
    "pods": [
        _pod("infer", 0, held=5, busy=0.95),
        _pod("train", 1, held=30, busy=0.95),
        _pod("notebook", 2, held=6, busy=0.3),
    ],
}


def cut_simulation(clock: ManualClock, **driver: object) -> Simulation:
    """Return a run of the scenario on this kind of driver, with its clock at the start."""
    (node,) = CUT["nodes"]
    content = {**CUT, "nodes": [{**node, "driver": driver}]}
    return Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=clock)
