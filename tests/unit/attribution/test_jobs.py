"""Slurm jobs from the simulator to the join: their booked use and their allocated time."""

import asyncio
from collections import defaultdict
from typing import Any, Final

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import NS_PER_SECOND
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import Category, NodeSample, ProcessChange, ProcessRecord
from gpuledger.runtime import Readiness
from gpuledger_agent.context import run_agent
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import play
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.unit.agent.test_service import EPOCH_NS, SleepersClock, read_all

GIB: Final = 1 << 30
V2: Final = "/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0"
V1: Final = "/slurm/uid_1000/job_{}/step_0"


def process(job: int, path: str, gpu: int, start: float, end: float) -> dict[str, Any]:
    return {
        "node": "node-a",
        "command": "python train.py",
        "cgroup": path.format(job),
        "gpus": [gpu],
        "memory_bytes": GIB,
        "load": {"busy_ratio": 0.5},
        "start_seconds": start,
        "end_seconds": end,
    }


def scenario(path: str, driver: str) -> dict[str, Any]:
    """Return two successive jobs on a GPU, along with a pod's, and a job that runs nothing."""
    return {
        "name": "slurm",
        "nodes": [
            {
                "name": "node-a",
                "gpus": {"model": "NVIDIA L4", "count": 3},
                "cgroup_driver": driver,
            }
        ],
        "pods": [
            {
                "namespace": "team-a",
                "name": "train",
                "node": "node-a",
                "containers": [
                    {
                        "name": "main",
                        "processes": [
                            {
                                "command": "train",
                                "gpus": [1],
                                "memory_bytes": GIB,
                                "load": {"busy_ratio": 0.25},
                            }
                        ],
                    }
                ],
            }
        ],
        "host_processes": [
            process(4242, path, 0, 5.0, 15.0),
            process(4243, path, 0, 20.0, 30.0),
            {
                "node": "node-a",
                "command": "dcgmi",
                "cgroup": "/user.slice/user-1000.slice/slurm/uid_0/job_1",
                "gpus": [2],
                "memory_bytes": GIB,
                "load": {"busy_ratio": 0.1},
            },
        ],
        "jobs": [
            {"id": "4242", "node": "node-a", "gpus": [0], "start_seconds": 4, "end_seconds": 16},
            {"id": "4243", "node": "node-a", "gpus": [0, 2], "start_seconds": 19},
        ],
    }


async def played(scenario: dict[str, Any]) -> tuple[list[NodeSample], list[ProcessRecord]]:
    clock, bus = SleepersClock(sleepers=1, rings_after_seconds=40), MemoryBus()
    node = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock).node("node-a")
    agent = asyncio.create_task(
        run_agent(
            host=play(node),
            bus=bus,
            settings=AgentSettings(node_name="node-a"),
            readiness=Readiness(),
        )
    )
    await clock.rung.wait()
    agent.cancel()
    await asyncio.gather(agent, return_exceptions=True)
    return await read_all(bus)


@pytest.mark.parametrize(("path", "driver"), [(V2, "systemd"), (V1, "v1")])
async def test_a_job_has_what_its_processes_used_and_what_the_scheduler_allocated(
    path: str, driver: str
) -> None:
    samples, records = await played(scenario(path, driver))
    used: defaultdict[tuple[int, str, str | None], float] = defaultdict(float)
    allocated: defaultdict[tuple[int, str | None], float] = defaultdict(float)
    for sample in samples:
        books = book_tick(sample)
        assert list(imbalances(books, sample.interval_ns)) == []
        for row in books:
            gpu = row.reading.index
            for entry in row.entries:
                if entry.category is Category.IDLE:
                    allocated[gpu, entry.job_id] += (entry.allocated_ns or 0) / NS_PER_SECOND
                else:
                    used[gpu, entry.category.value, entry.job_id] += (
                        entry.busy_ns or 0
                    ) / NS_PER_SECOND

    # Each ran for ten seconds, half of them busy.
    assert used[0, "job", "4242"] == pytest.approx(5.0, abs=0.3)
    assert used[0, "job", "4243"] == pytest.approx(5.0, abs=0.3)
    assert used[1, "pod", None] == pytest.approx(10.0, abs=0.5)
    # A user's directory is not a job's, and the allocatee of the GPU has not used it.
    assert {category for gpu, category, _ in used if gpu == 2} == {"host"}
    assert {job for _, category, job in used if category == "job"} == {"4242", "4243"}
    assert allocated[0, "4242"] == pytest.approx(12.0, abs=1.5)
    assert allocated[0, "4243"] == pytest.approx(21.0, abs=1.5)
    assert allocated[2, "4243"] == pytest.approx(21.0, abs=1.5)
    assert (1, "4242") not in allocated
    seen = {one.job_id for one in records if one.change is ProcessChange.SEEN}
    assert seen == {None, "4242", "4243"}
