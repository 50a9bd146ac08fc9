"""A small cluster whose GPUs fail, and the driver's C functions as nvidia-ml-py calls them."""
# ruff: noqa: ANN401  # ctypes' objects and scenarios have no types

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_int, cast, pointer
from dataclasses import dataclass
from typing import Any

import pynvml
from typing_extensions import override

from gpuledger.records import Incident
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
from tests.fakes.nvml import NO_INSTANCE
from tests.fakes.nvml_pointers import referent_of
from tests.hanging import HANG_SECONDS

EPOCH_NS = 1_790_000_000_000_000_000
SUCCESS: int = pynvml.NVML_SUCCESS
MODEL = "NVIDIA H100 80GB HBM3"


def failing_node(
    *incidents: dict[str, Any], clock: ManualClock | None = None, **node: Any
) -> SimulatedNode:
    """Return a node of two GPUs with these incidents."""
    content = {
        "name": "failing",
        "nodes": [{"name": "node-a", "gpus": {"model": MODEL, "count": 2}, **node}],
        "incidents": [{"node": "node-a", "gpu": 0, **incident} for incident in incidents],
    }
    simulation = Simulation(
        parse_scenario(content),
        epoch_ns=EPOCH_NS,
        clock=clock or ManualClock(start_ns=EPOCH_NS),
    )
    return simulation.node("node-a")


def gpus_of(node: SimulatedNode) -> Any:
    """Open the node's library and return its GPUs."""
    return NvmlSession(node.nvml, monotonic_ns=node.clock.monotonic_ns).open()


@dataclass
class Device:
    uuid: str
    handle: Any
    index: int = 0


def device(uuid: str) -> Device:
    """Return a GPU whose handle is a pointer, as in the library."""
    handle = cast(pointer(c_int(len(uuid))), pynvml.c_nvmlDevice_t)
    return Device(uuid, handle)


def supports(bits: int) -> Callable[..., int]:
    def answer(_handle: Any, types: Any) -> int:
        referent_of(types).value = bits
        return SUCCESS

    return answer


def v2(handle: Any, event_type: int, data: int = 0, instance: int = NO_INSTANCE) -> Any:
    def wait(_set: Any, event: Any, _timeout: Any) -> int:
        filled = referent_of(event)
        # The library returns its own pointer, which the binding wraps in another object.
        filled.device = cast(handle, pynvml.c_nvmlDevice_t)
        filled.eventType, filled.eventData = event_type, data
        filled.gpuInstanceId = filled.computeInstanceId = instance
        return SUCCESS

    return wait


def v3(uuid: str, event_type: int, **fields: Any) -> Any:
    def wait(_set: Any, event: Any) -> int:
        values = {
            "uuid": uuid.encode(),
            "eventType": event_type,
            "gpuInstanceId": NO_INSTANCE,
            "computeInstanceId": NO_INSTANCE,
            **fields,
        }
        for name, value in values.items():
            setattr(referent_of(event), name, value)
        return SUCCESS

    return wait


def fails(code: int) -> Callable[..., int]:
    return lambda *_: code


class PatientClock(ManualClock):
    """A clock that a test moves; sleeping does not advance it."""

    @override
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Reported:
    """The reported incidents, which a test can await."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self._queue: asyncio.Queue[Incident] = asyncio.Queue()

    def __call__(self, incident: Incident) -> None:
        self.incidents.append(incident)
        self._queue.put_nowait(incident)

    async def next(self) -> Incident:
        return await asyncio.wait_for(self._queue.get(), HANG_SECONDS)


def pausing(waits: asyncio.Event) -> Callable[[float], None]:
    """Return a pause for the played library that sets `waits` once events are waited for."""
    loop = asyncio.get_running_loop()

    def pause(seconds: float) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(waits.set)
        time.sleep(seconds)

    return pause
