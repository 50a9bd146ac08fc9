"""Jobs of a real Slurm: the documented prolog and epilog, and the cgroups of its processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.records import GpuFacts
from gpuledger_agent.host.cgroup import locate
from gpuledger_agent.host.job_directory import job_files_in, parse_job_files
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from tests.real.services.slurm import Slurm

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
