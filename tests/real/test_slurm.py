"""Jobs of a real Slurm: the guide's prolog and epilog, the cgroups of processes, and waits."""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import duckdb
import pytest

from gpuledger.errors import ArgumentError
from gpuledger.records import GpuFacts
from gpuledger.store.views import create_views
from gpuledger_agent.host.cgroup import locate
from gpuledger_agent.host.job_directory import job_files_in, parse_job_files
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_reports.capacity.queue import REPORT
from gpuledger_reports.capacity.report import Question
from gpuledger_reports.capacity.slurm_jobs import Job, read_slurm_jobs
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.times import HOUR_US, Window
from tests.real.services.slurm import Slurm
from tests.real.services.starter import running
from tests.unit.reports.stores import node_row, write_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.real.services.starter import Starter

pytestmark = pytest.mark.extended

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "slurm.md"
# The driver numbers these GPUs in the other order than their device files.
BUS_BY_MINOR = {0: "0000:0b:00.0", 1: "0000:0a:00.0"}
GPUS = DeviceIndex.of(
    GpuFacts(
        uuid=f"GPU-{minor}", index=1 - minor, minor_number=minor, instances=[], capabilities=[]
    )
    for minor in BUS_BY_MINOR
)
TASKS = [number * (number + 1) // 2 for number in range(25)]
"""Tasks of an array: more characters than `sacct` shows by default."""


def script(name: str, *, folder: Path) -> Path:
    """Write one of the guide's scripts, with the paths of a machine with two GPUs."""
    programs, facts = folder / "programs", folder / "gpus"
    programs.mkdir(exist_ok=True)
    smi = programs / "nvidia-smi"
    rows = sorted((1 - minor, bus) for minor, bus in BUS_BY_MINOR.items())
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{i}, 0000{bus.upper()}'\n" for i, bus in rows))
    smi.chmod(0o755)
    for minor, bus in BUS_BY_MINOR.items():
        (facts / bus).mkdir(parents=True, exist_ok=True)
        (facts / bus / "information").write_text(f"Device Minor: \t {minor}\n")
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    text = next(block for block in blocks if f"# {name}" in block)
    text = text.replace("/run/", f"{folder}/").replace("/proc/driver/nvidia/gpus", str(facts))
    path = folder / name
    path.write_text(text.replace("#!/bin/sh\n", f"#!/bin/sh\nPATH={programs}:$PATH\n", 1))
    path.chmod(0o755)
    return path


def test_a_job_is_allocated_the_gpu_that_slurm_gave_it_until_it_ends(
    starter: Starter, slurm_programs: Mapping[str, Path], tmp_path: Path
) -> None:
    scripts = {name: script(name, folder=tmp_path) for name in ("Prolog", "Epilog")}
    folder = starter.new_folder("slurm")
    slurm = starter.start(
        Slurm(programs=slurm_programs, folder=folder, gpu_count=len(BUS_BY_MINOR), scripts=scripts)
    )
    files, end = job_files_in(tmp_path / "gpu-jobs"), folder / "end"
    job = folder / "job"
    job.write_text(
        "#!/bin/sh\necho $SLURM_JOB_GPUS > gpus\ncat /proc/self/cgroup > cgroup.new\n"
        f"mv cgroup.new cgroup\nwhile [ ! -e {end} ]; do sleep 0.1; done\n"
    )

    def allocated() -> dict[str, str]:
        try:
            found = parse_job_files(files(), GPUS).allocations
        except OSError:
            return {}
        return {one.gpu_uuid: one.job_id for one in found}

    submitted = slurm.run("sbatch", "--parsable", "--gres=gpu:1", str(job))
    slurm.wait_until((folder / "cgroup").exists)
    assert locate((folder / "cgroup").read_text()).job_id == submitted.strip()
    minor = (folder / "gpus").read_text().strip()
    assert allocated() == {f"GPU-{minor}": submitted.strip()}
    end.touch()
    slurm.wait_until(lambda: not allocated())


class Seen(NamedTuple):
    """The jobs that the guide's command listed, by name: for an array, each of its tasks."""

    before: dict[str, list[Job]]
    """While `running` had all GPUs, and `waiting`, the last job, was known."""
    after: dict[str, list[Job]]
    """After `running` had ended and others had started."""


@pytest.fixture(scope="module")
def seen(slurm_programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("slurm")
    end, job, file = folder / "end", folder / "job", folder / "sacct.txt"
    job.write_text(f"#!/bin/sh\nwhile [ ! -e {end} ]; do sleep 0.1; done\n")
    (command,) = re.findall(
        r"^SLURM_TIME.*?sacct.txt$", GUIDE.read_text(), re.DOTALL | re.MULTILINE
    )
    part = Slurm(programs=slurm_programs, folder=folder, gpu_count=2, scripts={})
    with running(part) as slurm:

        def submit(name: str, *options: str) -> str:
            given = ("--parsable", f"--job-name={name}", *options, str(job))
            return slurm.run("sbatch", *given).strip()

        def jobs() -> dict[str, list[Job]]:
            environment = os.environ | slurm.environment
            subprocess.run(["/bin/sh", "-c", command], env=environment, cwd=folder, check=True)
            found: dict[str, list[Job]] = {}
            with suppress(ArgumentError):  # no job requests GPUs yet
                for each in read_slurm_jobs(str(file), "slurm_jobs"):
                    found.setdefault(str(each["job_name"]), []).append(each)
            return found

        def known(column: str) -> set[str]:
            return {name for name, of in jobs().items() if all(each[column] for each in of)}

        first = submit("running", "--gres=gpu:2")
        slurm.wait_until(lambda: known("scheduled") == {"running"})
        array = submit("array", "--gres=gpu:1", f"--array={','.join(map(str, TASKS))}")
        cancelled = submit("cancelled", "--gres=gpu:2")
        submit("without-gpu")
        submit("held", "--gres=gpu:1", "--hold")
        submit("dependent", "--gres=gpu:1", f"--dependency=afterok:{first}")
        slurm.wait_until(lambda: jobs().keys() == {"running", "array", "cancelled"})
        slurm.run("scancel", array, cancelled)
        slurm.wait_until(lambda: known("given_up") == {"array", "cancelled"})
        submit("waiting", "--gres=gpu:2")
        slurm.wait_until(lambda: "waiting" in jobs())
        before = jobs()
        end.touch()
        slurm.wait_until(lambda: known("scheduled") == {"running", "waiting", "dependent"})
        return Seen(before, jobs())


def test_the_guides_command_lists_each_task_of_an_array(seen: Seen) -> None:
    for jobs in seen:
        ids = [str(job["pod_uid"]).partition("_")[2] for job in jobs["array"]]
        assert sorted(map(int, ids)) == TASKS


def test_jobs_that_are_held_or_depend_on_others_or_request_no_gpus_are_not_listed(
    seen: Seen,
) -> None:
    assert seen.before.keys() == {"running", "array", "cancelled", "waiting"}
    assert seen.after.keys() == {*seen.before, "dependent"}


def test_a_dependent_job_waits_from_the_end_of_the_job_before_it(seen: Seen) -> None:
    (dependent,), (waiting,) = seen.after["dependent"], seen.after["waiting"]
    # It was submitted before `waiting`, but eligible only when `running` ended.
    assert int(dependent["created"] or 0) > int(waiting["created"] or 0)


def test_the_report_counts_jobs_that_waited_ran_or_were_cancelled(
    seen: Seen, tmp_path: Path
) -> None:
    # Times are whole seconds, and the window does not include its end.
    now_us = (int(time.time()) + 1) * 10**6
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path / "store", nodes=[node_row()]))
        question = Question(
            window=Window(now_us - HOUR_US, now_us),
            by=("workload", "shape", "queue"),
            policy=BillPolicy(prices=[]),
            options={"history": None, "slurm_jobs": [*chain.from_iterable(seen.after.values())]},
        )
        rows = REPORT.read(connection, question).rows
    states = ("pods", "waiting", "never_scheduled")
    assert {
        (row["workload"], row["shape"], row["queue"]): tuple(row[name] for name in states)
        for row in rows
    } == {
        ("SlurmJob/running", "2 GPUs", "gpu"): (1, 0, 0),
        ("SlurmJob/array", "1 GPU", "gpu"): (len(TASKS), 0, len(TASKS)),
        ("SlurmJob/cancelled", "2 GPUs", "gpu"): (1, 0, 1),
        ("SlurmJob/waiting", "2 GPUs", "gpu"): (1, 0, 0),
        ("SlurmJob/dependent", "1 GPU", "gpu"): (1, 0, 0),
    }
    (waited,) = (row["wait_max_seconds"] for row in rows if row["workload"] == "SlurmJob/waiting")
    assert waited > 0
