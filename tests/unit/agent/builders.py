"""Runs the agent of one simulated node from its start until some time has passed."""

import asyncio
from collections.abc import Sequence

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import Readiness
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.settings import AgentSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation

EPOCH_NS = 1_795_000_000_000_000_000


class RingingClock(ManualClock):
    """Advances with its only sleeper; rings once."""

    def __init__(self, *, rings_after_seconds: float) -> None:
        super().__init__(start_ns=EPOCH_NS)
        self._rings_at_ns = EPOCH_NS + round(rings_after_seconds * NS_PER_SECOND)
        self.rung = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if self.time_ns() >= self._rings_at_ns:
            self.rung.set()


async def watch(scenario: object, settings: AgentSettings, *, seconds: float) -> MemoryBus:
    """Return the bus with all that the agent of a scenario's only node published in some time."""
    clock, bus = RingingClock(rings_after_seconds=seconds), MemoryBus()
    simulation = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock)
    (node,) = simulation.nodes.values()
    machine = Host(
        gpus=NvmlSession(node.nvml, monotonic_ns=clock.monotonic_ns),
        procfs=node.procfs,
        clock=node.clock,
    )
    agent = asyncio.create_task(
        run_agent(host=machine, bus=bus, settings=settings, readiness=Readiness())
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    return bus


def short_lives(
    spans: Sequence[tuple[float, float]], *, busy_ratio: float = 0.8, accounting: str = "v2"
) -> dict[str, object]:
    """Return a scenario of one pod whose only container runs one process after another."""
    processes = [
        {
            "command": "python",
            "gpus": [0],
            "load": {"busy_ratio": busy_ratio, "kernel_seconds": 0.004},
            "memory_bytes": 2**30,
            "start_seconds": start,
            "end_seconds": end,
        }
        for start, end in spans
    ]
    return {
        "name": "short",
        "nodes": [
            {"name": "gpu-a", "gpus": {"model": "NVIDIA L4", "accounting": accounting}},
        ],
        "pods": [
            {
                "namespace": "research",
                "name": "short",
                "node": "gpu-a",
                "containers": [{"name": "main", "processes": processes}],
            }
        ],
    }
