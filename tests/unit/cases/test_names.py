"""A pod or job keeps its name as long as it uses a GPU, and no use silently becomes the host's."""

from collections import Counter
from typing import Any, Final

import pytest

from gpuledger.records import Category
from gpuledger_agent.host.cgroup import locate
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import play
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import UIDS, pod, process

EPOCH_NS: Final = 1_795_000_000_000_000_000
SCOPE: Final = "/system.slice/slurmstepd.scope"
SLUID: Final = "s4M8TQ2XVB9C01"
NEW_FORMS: Final = (
    f"{SCOPE}/{SLUID}/step_0/user/task_0",
    f"{SCOPE}/{SLUID}/step_batch/user/task_special",
)
UNKNOWN_FORMS: Final = (
    f"{SCOPE}/4243.batch/step_0/user/task_0",
    "/kubepods.slice/kubepods-burstable.slice/workload-1.slice/main.scope",
)


def host_process(path: str) -> dict[str, Any]:
    return {
        "node": "n",
        "command": "python train.py",
        "cgroup": path,
        "gpus": [0],
        "load": {"busy_ratio": 0.7, "kernel_seconds": 0.01},
        "memory_bytes": 2**30,
    }


@pytest.mark.parametrize("path", [*NEW_FORMS, *UNKNOWN_FORMS])
def test_use_below_the_cgroups_of_slurm_or_the_kubelet_is_never_attributed_to_the_host(
    path: str,
) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    scenario = {
        "name": "slurm",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4", "count": 1}}],
        "pods": [],
        "host_processes": [host_process(path)],
    }
    simulation = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock)
    busy = Counter[str]()
    for tick in play(simulation.node("n"), clock, [1.0] * 4):
        for books in book_tick(tick.sample):
            for entry in books.entries:
                if entry.category is not Category.IDLE:
                    busy[entry.category.value] += entry.busy_ns or 0
    assert busy.total() > 2 * 10**9
    assert busy["host"] == 0


@pytest.mark.parametrize(
    ("path", "job"),
    [
        (f"{SCOPE}/job_4243/step_0/user/task_0", "4243"),
        (f"{SCOPE}/{SLUID}/step_0/user/task_0", SLUID),
        (f"{SCOPE}/system/processes", None),
        (f"/user.slice/{SLUID}/step_0", None),
    ],
)
def test_only_slurms_own_cgroup_names_a_job(path: str, job: str | None) -> None:
    assert locate(f"0::{path}").job_id == job


def test_a_deleted_pod_keeps_its_name_while_its_process_works() -> None:
    """For example after a forced deletion of a pod whose process cannot be killed."""
    given = Given()
    given.read_pod(pod())
    used = {"processes": [process(container=0, sm_utilization_ratio=0.5)]}
    named = given.take(**used)
    given.read_tombstone(UIDS[0])
    names = [(one.namespace, one.name) for one in named.pods]
    for _ in range(3):
        given.wait(600)
        event = given.take(time_ns=given.now_ns, **used)
        assert [(one.namespace, one.name) for one in event.pods] == names
