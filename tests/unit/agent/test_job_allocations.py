"""The agent with and without a kubelet, and with a `/proc` that is not the host's."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import NodeSample, ProcessRecord
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import run_tasks
from gpuledger_agent.context import run_agent
from gpuledger_agent.settings import AgentSettings, KubeletSettings
from gpuledger_agent.source_selection import play
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation
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
    seconds: float, *, settings: AgentSettings, host_pid: bool = True
) -> tuple[list[NodeSample], list[ProcessRecord], Readiness]:
    clock = SleepersClock(sleepers=1, rings_after_seconds=seconds)
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


async def test_a_tick_has_the_allocations_from_the_kubelet_used_or_not() -> None:
    samples, _, readiness = await run_for(20, settings=AgentSettings(node_name="node-a"))
    last = samples[-1]

    assert [allocation.gpu_uuid for allocation in last.allocations] == [
        gpu.uuid for gpu in last.gpus
    ]
    assert {(one.namespace, one.pod, one.container) for one in last.allocations} == {
        ("team-a", "train", "main")
    }
    assert last.allocations_unknown is None
    assert readiness.check("kubelet").detail == "2 devices are allocated to containers"


async def test_a_disabled_kubelet_is_not_queried() -> None:
    settings = AgentSettings(node_name="node-a", kubelet=KubeletSettings(enabled=False))
    samples, _, readiness = await run_for(5, settings=settings)

    assert [sample.allocations for sample in samples] == [[]] * len(samples)
    assert {sample.allocations_unknown for sample in samples} == {None}
    assert "kubelet" not in str(readiness.report())


class HangingKubelet:
    """A kubelet that never answers."""

    def __init__(self) -> None:
        self.requests = 0

    async def list_pods(self) -> bytes:
        self.requests += 1
        await asyncio.Event().wait()
        return b""

    async def list_allocatable(self) -> bytes:
        return await self.list_pods()


async def test_a_kubelet_that_does_not_answer_delays_no_tick() -> None:
    clock, bus, kubelet = (
        SleepersClock(sleepers=1, rings_after_seconds=20),
        MemoryBus(),
        HangingKubelet(),
    )
    host = replace(play(simulate(clock)), kubelet=kubelet)
    settings = AgentSettings(node_name="node-a")
    async with run_tasks(run_agent(host=host, bus=bus, settings=settings, readiness=Readiness())):
        await clock.rung.wait()
    samples, _ = await read_all(bus)

    assert kubelet.requests == 1
    assert len(samples) in (20, 21)
    assert not any(sample.allocations or sample.late for sample in samples)
    assert {sample.allocations_unknown for sample in samples} == {True}


async def test_without_the_hosts_proc_readings_continue_and_processes_are_not_reported() -> None:
    samples, processes, readiness = await run_for(
        20, settings=AgentSettings(node_name="node-a"), host_pid=False
    )

    assert len(samples) > 10
    assert all(len(sample.gpus) == 2 for sample in samples)
    assert [sample for sample in samples if sample.processes or sample.containers] == []
    assert processes == []
    assert "hostPID: true" in readiness.check("procfs").detail
    assert not readiness.check("procfs").is_ok


async def test_disabled_attribution_does_not_fail_a_check() -> None:
    settings = AgentSettings(node_name="node-a", attribution=False)
    samples, processes, readiness = await run_for(5, settings=settings)

    assert [sample for sample in samples if sample.processes] == []
    assert processes == []
    assert readiness.check("procfs").is_ok


def job(name: str, start: float, end: float) -> dict[str, Any]:
    (pod,) = SCENARIO["pods"]
    return {**pod, "name": name, "start_seconds": start, "end_seconds": end}


async def allocated_to(
    *pods: dict[str, Any],
    seconds: float,
    faults: Sequence[dict[str, Any]] = (),
    listed_seconds: float = 5,
    agent_from: float = 0,
) -> dict[str, list[tuple[float, float]]]:
    """Return the (start, end) times for which ticks give each pod the first GPU, by pod name.

    Two spans are one if no tick lies between them. The kubelet lists a pod for `listed_seconds`
    after its end.
    """
    clock = SleepersClock(sleepers=1, rings_after_seconds=seconds)
    (node_content,) = SCENARIO["nodes"]
    nodes = [{**node_content, "ended_pods_listed_seconds": listed_seconds}]
    content = {**SCENARIO, "nodes": nodes, "pods": list(pods), "faults": list(faults)}
    scenario = parse_scenario(content)
    clock.advance(agent_from)
    node = Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a")
    bus, settings = MemoryBus(), AgentSettings(node_name="node-a")
    agent = asyncio.create_task(
        run_agent(host=play(node), bus=bus, settings=settings, readiness=Readiness())
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    allocated: dict[str, list[tuple[float, float]]] = {}
    for sample in (await read_all(bus))[0]:
        if not sample.gpus:
            continue  # the wait is in the machine's time, and a busy machine needed longer
        end = (sample.time_ns - EPOCH_NS) / NS_PER_SECOND
        begin = end - sample.interval_ns / NS_PER_SECOND
        first = min(sample.gpus, key=lambda gpu: gpu.index)
        for pod in {one.pod for one in sample.allocations if one.gpu_uuid == first.uuid}:
            spans = allocated.setdefault(pod, [])
            is_next = bool(spans) and spans[-1][1] == pytest.approx(begin, abs=1e-6)
            spans.append((spans.pop()[0] if is_next else begin, end))
    return allocated


TICK_SECONDS = 1.0
LAG_SECONDS = 0.5
"""A tick covers the time of the driver's windows; its allocations are those at its end."""
FIRST_GPU_IS_AWAY = {"node": "node-a", "kind": "lost", "gpus": [0]}
DRIVER_IS_AWAY = {"node": "node-a", "kind": "driver_reload"}
FAULTS: dict[str, list[dict[str, Any]]] = {
    "answers": [],
    "is lost all the while": [{**FIRST_GPU_IS_AWAY, "start_seconds": 1}],
    "is lost at the start": [{**FIRST_GPU_IS_AWAY, "start_seconds": 3, "end_seconds": 9}],
    "is lost at the end": [{**FIRST_GPU_IS_AWAY, "start_seconds": 12, "end_seconds": 20}],
    "is without its driver": [{**DRIVER_IS_AWAY, "start_seconds": 1}],
}


def is_exact(spans: Sequence[tuple[float, float]], start: float, end: float) -> bool:
    """Return whether it is one span of the right length, within a tick, and at the right place."""
    ((began, ended),) = spans
    slack = TICK_SECONDS + LAG_SECONDS
    return (
        abs((ended - began) - (end - start)) < TICK_SECONDS
        and abs(began - start) < slack
        and abs(ended - end) < slack
    )


@pytest.mark.parametrize("listed_seconds", [5, 86_400])
@pytest.mark.parametrize(
    ("start", "faults"),
    [(5.01, "answers"), (5.99, "answers"), *((5.3, faults) for faults in FAULTS)],
)
async def test_a_job_has_its_device_from_start_to_end_even_if_the_kubelet_lists_it_longer(
    start: float, faults: str, listed_seconds: float
) -> None:
    end = start + 11.3
    allocated = await allocated_to(
        job("job", start, end),
        seconds=40,
        faults=FAULTS[faults],
        listed_seconds=listed_seconds,
    )

    assert list(allocated) == ["job"]
    assert is_exact(allocated["job"], start, end), allocated


@pytest.mark.parametrize("listed_seconds", [5, 86_400])
@pytest.mark.parametrize("faults", ["answers", "is without its driver"])
async def test_three_jobs_in_a_row_on_one_device_each_get_their_own_time(
    faults: str, listed_seconds: float
) -> None:
    spans = {"a": (2.0, 16.0), "b": (17.0, 29.6), "c": (30.0, 70.6)}
    jobs = (job(name, *span) for name, span in spans.items())
    allocated = await allocated_to(
        *jobs, seconds=85, faults=FAULTS[faults], listed_seconds=listed_seconds
    )

    assert set(allocated) == set(spans)
    assert all(is_exact(allocated[name], *span) for name, span in spans.items()), allocated


async def test_a_pod_that_ended_before_the_agent_started_has_no_allocation_even_if_listed() -> None:
    allocated = await allocated_to(
        job("former", 1.0, 9.0),
        job("job", 12.0, 80.0),
        seconds=50,
        listed_seconds=86_400,
        agent_from=20,
    )

    assert list(allocated) == ["job"]


async def test_successive_pods_of_one_name_have_their_device_without_a_process() -> None:
    without_processes = {
        "containers": [{"name": "main", "processes": [], "devices": [{"gpu": 0}]}],
    }
    first, second = (
        job("job", 5.3, 16.6) | without_processes,
        job("job", 23.4, 31.0) | (without_processes),
    )
    allocated = await allocated_to(first, second, seconds=50)

    one, other = allocated["job"]
    assert is_exact([one], 5.3, 16.6), allocated
    assert is_exact([other], 23.4, 31.0), allocated


@pytest.mark.parametrize("monitors", [True, False])
async def test_the_mig_check_names_the_remedy_if_instances_are_hidden(*, monitors: bool) -> None:
    clock = SleepersClock(sleepers=1, rings_after_seconds=8)
    group = {"model": "NVIDIA H100 80GB HBM3", "mig": [{"instances": ["3g.40gb"]}]}
    node = {"name": "node-a", "gpus": group, "driver": {"mig_monitor": monitors}}
    scenario = parse_scenario({"name": "cut", "nodes": [node]})
    host = play(Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock).node("node-a"))
    bus, readiness, settings = MemoryBus(), Readiness(), AgentSettings(node_name="node-a")
    async with run_tasks(run_agent(host=host, bus=bus, settings=settings, readiness=readiness)):
        await clock.rung.wait()
    samples, _ = await read_all(bus)

    check = readiness.check("mig")
    assert check.is_ok is monitors
    assert ("NVIDIA_MIG_MONITOR_DEVICES=all" in check.detail) is not monitors
    board, *instances = samples[-1].gpus
    assert board.mig_enabled
    assert board.energy_millijoules
    assert len(instances) == monitors
