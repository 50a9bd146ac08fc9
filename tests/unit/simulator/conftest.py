"""A small cluster for the simulator's tests, and a clock that stands still."""

from typing import Any

import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation

EPOCH_NS = 1_790_000_000_000_000_000
GIB = 1 << 30

CONTENT: dict[str, Any] = {
    "name": "two-nodes",
    "seed": 3,
    "nodes": [
        {"name": "node-a", "gpus": {"model": "NVIDIA H100 80GB HBM3", "count": 2}},
        {"name": "node-b", "gpus": [{"model": "NVIDIA L4"}], "cgroup_driver": "v1"},
    ],
    "pods": [
        {
            "namespace": "team-a",
            "name": "train-0",
            "node": "node-a",
            "owner": {"kind": "PyTorchJob", "name": "train"},
            "qos": "guaranteed",
            "containers": [
                {
                    "name": "main",
                    "processes": [
                        {
                            "command": "/opt/bin/train --steps 9",
                            "gpus": [0, 1],
                            "memory_bytes": 40 * GIB,
                            "load": {"busy_ratio": 0.9, "kernel_seconds": 0.02},
                        }
                    ],
                }
            ],
        },
        {
            "namespace": "team-b",
            "name": "chat-5d8f7c9b4d-abcde",
            "node": "node-a",
            "owner": {"kind": "Deployment", "name": "chat"},
            "start_seconds": 2,
            "end_seconds": 8.25,
            "containers": [
                {
                    "name": "server",
                    "processes": [
                        {
                            "command": "serve",
                            "gpus": [1],
                            "memory_bytes": 10 * GIB,
                            "load": {"busy_ratio": 0.5, "kernel_seconds": 0.01},
                        }
                    ],
                }
            ],
        },
        {
            "namespace": "team-b",
            "name": "render-1-xyz",
            "node": "node-b",
            "owner": {"kind": "Job", "name": "render-1"},
            "qos": "besteffort",
            "end_seconds": 6,
            "containers": [
                {
                    "name": "main",
                    "processes": [
                        {
                            "command": "render",
                            "comm": "re) S 1 (nder",
                            "gpus": [0],
                            "memory_bytes": GIB,
                            "kind": "graphics",
                        }
                    ],
                }
            ],
        },
    ],
    "host_processes": [
        {
            "node": "node-a",
            "command": "burn",
            "gpus": [0],
            "memory_bytes": GIB,
            "start_seconds": 3,
            "load": {"busy_ratio": 0.3},
            "memory_visible": False,
        }
    ],
}


@pytest.fixture
def epoch_ns() -> int:
    return EPOCH_NS


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start_ns=EPOCH_NS)


@pytest.fixture
def simulation(clock: ManualClock) -> Simulation:
    return Simulation(parse_scenario(CONTENT), epoch_ns=EPOCH_NS, clock=clock)


@pytest.fixture
def same_simulation(clock: ManualClock) -> Simulation:
    """Return another run of the same scenario, epoch and clock, as in another process."""
    return Simulation(parse_scenario(CONTENT), epoch_ns=EPOCH_NS, clock=clock)
