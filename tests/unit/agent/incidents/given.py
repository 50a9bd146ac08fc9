"""A small cluster whose GPUs fail, and the driver's functions in C as nvidia-ml-py calls them."""
# ruff: noqa: ANN401  # ctypes' objects and scenarios have no types

from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from agent.nvml.library import Nvml
from simulator.clock import HandClock
from simulator.scenario import parse_scenario
from simulator.simulation import SimulatedNode, Simulation

EPOCH_NS = 1_790_000_000_000_000_000
SECOND_NS = 1_000_000_000
MODEL = "NVIDIA H100 80GB HBM3"


def failing_node(
    *incidents: dict[str, Any], clock: HandClock | None = None, **node: Any
) -> SimulatedNode:
    """Give a node of two GPUs to which this happens."""
    content = {
        "name": "failing",
        "nodes": [{"name": "node-a", "gpus": {"model": MODEL, "count": 2}, **node}],
        "incidents": [{"node": "node-a", "gpu": 0, **incident} for incident in incidents],
    }
    simulation = Simulation(
        parse_scenario(content),
        epoch_ns=EPOCH_NS,
        clock=clock or HandClock(start_ns=EPOCH_NS),
    )
    return simulation.node("node-a")


def gpus_of(node: SimulatedNode) -> Any:
    """Open the node's library and give its GPUs."""
    return Nvml(node.nvml).open()


class Functions:
    """The library's functions in C, as far as a test gives them; the others are missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, Callable[..., int]] = {}
        self.calls: list[str] = []
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", self._find)

    def _find(self, name: str) -> Callable[..., int]:
        self.calls.append(name)
        if name not in self.given:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return self.given[name]
