"""A pod is billed for the GPU allocated to it, whatever allocated it and whatever it is called."""

import asyncio
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gpuledger.records import GpuFacts
from gpuledger.runtime import Readiness
from gpuledger_agent.context import AgentContext
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.host.job_directory import JobFiles, parse_job_files
from gpuledger_agent.host.kubelet.assignments import DeviceIndex
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import play
from gpuledger_enricher.podwatch.decode import PodReader
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.unit.cases.billed import Lines, lines_of

ROOT: Final = Path(__file__).parents[3]
DATA: Final = ROOT / "tests" / "data" / "cases"
EPOCH_NS: Final = 1_795_000_000_000_000_000


def with_cards(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return the scenario with HAMi's annotations, which name the second GPU of the node."""
    simulation = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS)
    card = simulation.node("counted").gpus[1].facts.uuid
    for pod in scenario["pods"]:
        if pod["node"] == "counted":
            pod["annotations"] = {"hami.io/vgpu-devices-allocated": f"{card},NVIDIA,20480,25:;"}
    return scenario


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    scenario = with_cards(yaml.safe_load((DATA / "holding.yaml").read_text()))
    return lines_of(scenario, tmp_path_factory.mktemp("holding"))


def test_a_pod_pays_for_its_fraction_of_a_gpu_that_another_pod_reserves(lines: Lines) -> None:
    fraction = lines["fraction-0"]
    assert fraction["billed_gpu_seconds"] > 0
    assert fraction["billed_gpu_seconds"] >= fraction["used_gpu_seconds"]


def test_a_pod_that_reserves_a_gpu_for_others_pays_nothing(lines: Lines) -> None:
    assert "gpu-reservation-placeholder-x7k2p" not in lines


def test_a_device_counts_whatever_its_resource_is_called(lines: Lines) -> None:
    assert "notebook-0" in lines
    assert lines["notebook-0"]["allocated_gpu_seconds"] > 0


@pytest.mark.parametrize("pod", ["quarter-0", "quarter-1"])
def test_a_share_given_by_hami_is_allocated_by_the_annotation(lines: Lines, pod: str) -> None:
    assert pod in lines
    assert lines[pod]["allocated_gpu_seconds"] > 0


def test_a_bill_shows_use_of_a_gpu_that_is_allocated_to_another_pod(lines: Lines) -> None:
    """On both line items, in a column whose name contains `others`."""
    for pod in ("hitchhiker-0", "payer-0"):
        reported = [value for name, value in lines[pod].items() if "others" in name]
        assert reported == [lines["hitchhiker-0"]["used_gpu_seconds"]], pod


@pytest.mark.parametrize(
    "name",
    [
        r"(Unallocated|NotAllocated|WithoutAllocation|NotGiven)",
        r"(Deleted|Gone|Orphan).*Pod|Pod(Deleted|Gone)",
    ],
    ids=["a GPU not allocated to the pod", "a pod that is gone"],
)
def test_an_alert_fires_for_use_without_an_allocation(name: str) -> None:
    rules = yaml.safe_load((ROOT / "k8s" / "chart" / "rules" / "gpuledger.rules.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert [alert for alert in alerts if re.search(name, alert)], alerts


POD: Final = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "uid": "4f9c1d2e-0000-4000-8000-000000000001",
        "name": "nccl-0",
        "namespace": "ns",
        "resourceVersion": "5",
        "creationTimestamp": "2026-11-01T00:00:00Z",
    },
    "status": {},
}


def requested(**limits: str) -> Mapping[str, int]:
    """Return the GPU requests that podwatch reads from a container with these limits."""
    settings = PodwatchSettings()
    reader = PodReader(
        cluster="c",
        labels=settings.labels,
        gpu_resource_prefixes=settings.gpu_resource_prefixes,
    )
    content = POD | {
        "spec": {
            "nodeName": "n1",
            "containers": [{"name": "main", "resources": {"limits": limits}}],
        }
    }
    record = reader.read(json.dumps(content).encode())
    assert record
    (container,) = record.containers
    return container.requested.resources if container.requested else {}


@pytest.mark.parametrize("nic", ["nvidia.com/mlnxnics", "nvidia.com/hostdev"])
def test_a_network_card_is_not_a_gpu_request(nic: str) -> None:
    assert requested(**{"nvidia.com/gpu": "1", nic: "2"}) == {"nvidia.com/gpu": 1}


@pytest.mark.parametrize("share", ["koordinator.sh/gpu-core", "tencent.com/vcuda-core"])
def test_a_share_of_another_scheduler_is_a_gpu_request(share: str) -> None:
    assert share in requested(**{share: "50"})


def returning(name: str, gpu: int, start: float, end: float | None = None) -> dict[str, Any]:
    lives = {"start_seconds": start} | ({"end_seconds": end} if end else {})
    devices = [{"gpu": gpu}] if gpu >= 0 else []
    containers = [{"name": "main", "devices": devices}]
    return {"namespace": "web", "name": name, "node": "n", "containers": containers, **lives}


async def allocated_at(scenario: dict[str, Any], seconds: float) -> list[str]:
    """Return the GPUs that are allocated after this time, by an agent that polls repeatedly."""
    clock = ManualClock(start_ns=EPOCH_NS)
    node = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock).node("n")
    host = play(node)
    index = DeviceIndex.of(
        [gpu.query(CallGroup.HEALTH, SampleCursor())["facts"] for gpu in host.gpus.open()]
    )
    context = AgentContext(host=host, settings=AgentSettings(node_name="n"), readiness=Readiness())
    allocations = context.allocations()
    assert allocations
    task = asyncio.create_task(allocations.run())
    try:
        for at in (30.0, 63.0, 66.0, seconds):
            clock.advance(at - clock.monotonic_ns() / 1e9)
            allocations.request_if_due()
            await allocations.wait_answer(5)
        places = {uuid: str(number) for number, uuid in index.by_index.items()}
        return sorted(places[one.gpu_uuid] for one in allocations.current(index))
    finally:
        task.cancel()


@pytest.mark.parametrize("seconds", [100.0, 600.0])
async def test_a_pod_is_not_allocated_the_gpu_of_an_ended_pod_of_the_same_name(
    seconds: float,
) -> None:
    """As in a StatefulSet whose pod is recreated while the kubelet still lists the previous one."""
    scenario = {
        "name": "again",
        "nodes": [
            {
                "name": "n",
                "ended_pods_listed_seconds": 600,
                "gpus": {"model": "NVIDIA L4", "count": 2},
            }
        ],
        "pods": [
            returning("web-0", 0, 0, 60),
            returning("web-0", 1, 65),
            returning("agent", -1, 0),
        ],
    }
    assert await allocated_at(scenario, seconds) == ["1"]


def prolog_in(page: str) -> str:
    """Return the shell script that a page documents as Slurm's prolog."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    return next(block for block in blocks if "# Prolog" in block)


def test_the_documented_prolog_gives_a_job_the_gpu_that_slurm_allocated(tmp_path: Path) -> None:
    """On a machine whose device files are not in the driver's order."""
    gpus, rows = [], []
    for index, minor in ((0, 4), (6, 0)):
        uuid, bus = f"GPU-{index}", f"{index}B:00.0"
        gpus.append(
            GpuFacts(uuid=uuid, index=index, minor_number=minor, instances=[], capabilities=[])
        )
        rows.append(f"{index}, 00000000:{bus}")
        facts = tmp_path / "gpus" / f"0000:{bus.lower()}" / "information"
        facts.parent.mkdir(parents=True)
        facts.write_text(f"Model: \t\t NVIDIA\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    smi = programs / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncat <<'ROWS'\n" + "\n".join(rows) + "\nROWS\n")
    smi.chmod(0o755)
    page = (ROOT / "docs" / "guides" / "slurm.md").read_text()
    script = prolog_in(page).replace("/run", str(tmp_path))
    script = script.replace("/proc/driver/nvidia/gpus", str(tmp_path / "gpus"))
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_GPUS": "0",
        # Slurm's cgroup shows the job only its own GPU.
        "CUDA_VISIBLE_DEVICES": "0",
    }
    subprocess.run(["/bin/sh", "-c", script], env=environment, check=True)
    files = {one.name: one.read_bytes() for one in (tmp_path / "gpu-jobs").iterdir()}
    allocated = parse_job_files(JobFiles(files), DeviceIndex.of(gpus)).allocations
    assert [one.gpu_uuid for one in allocated] == ["GPU-6"]
