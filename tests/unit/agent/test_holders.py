"""The agent with and without a kubelet, and with a `/proc` that is not the machine's."""

import asyncio
from typing import Any

import pytest

from agent.context import run_agent
from agent.settings import AgentSettings, KubeletSettings
from agent.source_selection import play
from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import NS_PER_SECOND
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


def job(name: str, start: float, end: float) -> dict[str, Any]:
    (pod,) = SCENARIO["pods"]
    return {**pod, "name": name, "start_seconds": start, "end_seconds": end}


async def held_by(*pods: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return for how many seconds each pod held the first GPU, by its name."""
    clock = SleepersClock(sleepers=2, rings_after_seconds=seconds)
    scenario = parse_scenario({**SCENARIO, "pods": list(pods)})
    node = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a")
    bus, settings = MemoryBus(), AgentSettings(node_name="node-a")
    agent = asyncio.create_task(
        run_agent(host=play(node), bus=bus, settings=settings, readiness=Readiness())
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    held: dict[str, float] = {}
    for sample in (await read_all(bus))[0]:
        for pod in {one.pod for one in sample.allocations if one.gpu_uuid == sample.gpus[0].uuid}:
            held[pod] = held.get(pod, 0) + sample.interval_ns / NS_PER_SECOND
    return held


async def test_a_job_holds_until_it_ends_though_the_kubelet_lists_it_on() -> None:
    held = await held_by(job("job", 5, 16.3), seconds=40)

    # It ends to one tick; of a new process the kubelet is asked within a second, in the next tick.
    assert held == {"job": pytest.approx(11.3, abs=2.5)}


async def test_three_jobs_in_a_row_on_one_device_have_their_own_time_each() -> None:
    spans = {"a": (2, 16.0), "b": (17, 29.6), "c": (30, 70.6)}
    held = await held_by(*(job(name, *span) for name, span in spans.items()), seconds=85)

    assert held == {
        name: pytest.approx(end - start, abs=2.5) for name, (start, end) in spans.items()
    }
