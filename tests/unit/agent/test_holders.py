"""The agent with and without a kubelet, and with a `/proc` that is not the machine's."""

import asyncio
from typing import Any

from agent.context import run_agent
from agent.settings import AgentSettings, KubeletSettings
from agent.source_selection import play
from gpuledger.bus.memory import MemoryBus
from gpuledger.records import NodeSample, ProcessRecord
from gpuledger.runtime import Readiness
from simulator.scenario.load import parse_scenario
from simulator.simulation import SimulatedNode, Simulation
from tests.unit.agent.test_service import EPOCH_NS, SleepersClock, read_all

GIB = 1 << 30
SCENARIO: dict[str, Any] = {
    "name": "holders",
    "nodes": [{"name": "node-a", "gpus": {"model": "NVIDIA L4", "count": 2}}],
    "pods": [
        {
            "namespace": "team-a",
            "name": "train",
            "node": "node-a",
            "containers": [
                {
                    "name": "main",
                    "processes": [{"command": "train", "gpus": [0], "memory_bytes": GIB}],
                    "devices": [{"gpu": 0}, {"gpu": 1}],
                }
            ],
        }
    ],
}


def simulate(clock: SleepersClock, *, host_pid: bool = True) -> SimulatedNode:
    (node,) = SCENARIO["nodes"]
    scenario = parse_scenario({**SCENARIO, "nodes": [{**node, "host_pid": host_pid}]})
    return Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a")


async def run_for(
    seconds: float, *, settings: AgentSettings, host_pid: bool = True, sleepers: int
) -> tuple[list[NodeSample], list[ProcessRecord], Readiness]:
    clock = SleepersClock(sleepers=sleepers, rings_after_seconds=seconds)
    node, bus, readiness = simulate(clock, host_pid=host_pid), MemoryBus(), Readiness()
    agent = asyncio.create_task(
        run_agent(
            host=play(node),
            bus=bus,
            settings=settings,
            readiness=readiness,
        )
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    return *await read_all(bus), readiness


async def test_a_tick_says_what_the_kubelet_gave_to_whom_used_or_not() -> None:
    samples, _, readiness = await run_for(
        20, settings=AgentSettings(node_name="node-a"), sleepers=2
    )
    last = samples[-1]

    assert [one.gpu_uuid for one in last.allocations] == [gpu.uuid for gpu in last.gpus]
    assert {(one.namespace, one.pod, one.container) for one in last.allocations} == {
        ("team-a", "train", "main")
    }
    assert readiness.check("kubelet").detail == "2 devices are with containers"


async def test_a_kubelet_that_nobody_wants_to_hear_of_is_not_asked() -> None:
    settings = AgentSettings(node_name="node-a", kubelet=KubeletSettings(enabled=False))
    samples, _, readiness = await run_for(5, settings=settings, sleepers=1)

    assert [sample.allocations for sample in samples] == [[]] * len(samples)
    assert "kubelet" not in str(readiness.report())


async def test_without_the_machines_proc_readings_go_on_and_nobody_is_named() -> None:
    samples, processes, readiness = await run_for(
        20, settings=AgentSettings(node_name="node-a"), host_pid=False, sleepers=2
    )

    assert len(samples) > 10
    assert all(len(sample.gpus) == 2 for sample in samples)
    assert [sample for sample in samples if sample.processes or sample.containers] == []
    assert processes == []
    assert "hostPID: true" in readiness.check("procfs").detail
    assert not readiness.check("procfs").is_ok


async def test_attribution_that_is_turned_off_is_no_failure() -> None:
    settings = AgentSettings(node_name="node-a", attribution=False)
    samples, processes, readiness = await run_for(5, settings=settings, sleepers=2)

    assert [sample for sample in samples if sample.processes] == []
    assert processes == []
    assert readiness.check("procfs").is_ok
