"""The played kubelet: its responses lead the agent to the GPUs of the scenario."""

from pathlib import Path
from typing import Any

import pytest

from gpuledger.errors import UserError
from gpuledger.records import DeviceAllocation, GpuFacts, MigInstance
from gpuledger_agent.host.kubelet.assignments import DeviceIndex, allocate, find_assignments
from gpuledger_agent.host.kubelet.messages import parse_answer
from gpuledger_agent.host.node_pods import ContainerName, ContainerNames, list_folder
from gpuledger_agent.host.procfs import check_procfs
from gpuledger_agent.settings import KubeletSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kubelet import link_logs
from gpuledger_simulator.scenario.load import load_scenario, parse_scenario
from gpuledger_simulator.simulation import SimulatedNode, Simulation

QUICKSTART = Path(__file__).parents[3] / "scenarios" / "quickstart.yaml"
EPOCH_NS = 1_795_000_000_000_000_000
GIB = 1 << 30


def simulate(scenario: dict[str, Any], *, at_seconds: float = 1) -> SimulatedNode:
    clock = ManualClock(start_ns=EPOCH_NS)
    clock.advance(at_seconds)
    return Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock).node("node-a")


def facts(node: SimulatedNode) -> list[GpuFacts]:
    """Return the facts of the node's GPUs as in an inventory."""
    found = []
    for gpu in node.gpus:
        cut = gpu.cut(0)
        instances = [
            MigInstance(
                uuid=one.uuid,
                gpu_instance=one.gpu_instance,
                compute_instance=one.compute_instance,
                profile=one.profile,
                placement_start=one.start,
            )
            for one in (cut.instances if cut else ())
        ]
        index = gpu.facts.index
        found.append(
            GpuFacts(
                uuid=gpu.facts.uuid,
                index=index,
                minor_number=index,
                instances=instances,
                capabilities=[],
            )
        )
    return found


async def allocated(node: SimulatedNode) -> list[DeviceAllocation]:
    pods = parse_answer(await node.kubelet.list_pods())
    assignments = find_assignments(pods, KubeletSettings().resource_names)
    allocations, unresolved = allocate(assignments, DeviceIndex.of(facts(node)))
    assert not unresolved
    return allocations


def container(**given: object) -> dict[str, Any]:
    return {
        "name": "node-a",
        "nodes": [
            {
                "name": "node-a",
                "gpus": [
                    {"model": "NVIDIA L4"},
                    {
                        "model": "NVIDIA H100 80GB HBM3",
                        "mig": [{"instances": ["1g.10gb", "3g.40gb", "1g.10gb"]}],
                    },
                ],
            }
        ],
        "pods": [
            {
                "namespace": "team-a",
                "name": "train",
                "node": "node-a",
                "containers": [{"name": "main", **given}],
            }
        ],
    }


def process(*gpus: int, instance: int | None = None) -> dict[str, Any]:
    return {"command": "train", "gpus": list(gpus), "memory_bytes": GIB, "instance": instance}


@pytest.mark.parametrize(
    ("device", "gpu", "gpu_instance", "replica"),
    [
        ({"gpu": 0}, 0, None, None),
        ({"gpu": 0, "replica": 3}, 0, None, "3"),
        ({"gpu": 1, "instance": 1}, 1, 2, None),
        ({"gpu": 1, "instance": 1, "replica": 0}, 1, 2, "0"),
        ({"gpu": 1, "instance": 0, "ids": "old-mig"}, 1, 1, None),
        ({"gpu": 0, "ids": "gke"}, 0, None, None),
        ({"gpu": 0, "ids": "gke", "replica": 1}, 0, None, "1"),
        ({"gpu": 1, "instance": 1, "ids": "gke"}, 1, 2, None),
        ({"gpu": 1, "instance": 1, "ids": "gke", "replica": 0}, 1, 2, "0"),
        ({"gpu": 0, "claim": "one-gpu"}, 0, None, None),
        ({"gpu": 1, "instance": 1, "claim": "one-part"}, 1, 2, None),
        ({"gpu": 1, "instance": 0, "claim": "one-part"}, 1, 1, None),
        ({"gpu": 1, "instance": 2, "claim": "one-part"}, 1, 3, None),
    ],
)
async def test_a_device_id_in_every_form_leads_to_its_gpu(
    device: dict[str, Any], gpu: int, gpu_instance: int | None, replica: str | None
) -> None:
    node = simulate(container(devices=[device]))

    (one,) = await allocated(node)
    assert (one.gpu_uuid, one.gpu_instance, one.replica) == (
        node.gpus[gpu].facts.uuid,
        gpu_instance,
        replica,
    )
    assert one.claim == (f"team-a/{device['claim']}" if "claim" in device else None)
    assert (one.namespace, one.pod, one.container) == ("team-a", "train", "main")


async def test_by_default_a_container_has_the_gpus_of_its_processes() -> None:
    on_both = container(processes=[process(0), process(0), process(1, instance=1)])
    idle = container(devices=[{"gpu": 0}])
    borrowed = container(processes=[process(0)], devices=[])

    assert [(one.resource_name, one.replica) for one in await allocated(simulate(on_both))] == [
        ("nvidia.com/gpu", None),
        ("nvidia.com/mig-3g.40gb", None),
    ]
    assert len(await allocated(simulate(idle))) == 1
    assert await allocated(simulate(borrowed)) == []


async def test_containers_on_one_gpu_have_a_share_each() -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    shared = [one for one in await allocated(simulation.node("gpu-node-2")) if one.replica]

    assert len(shared) > 1
    assert len({one.device_id for one in shared}) == len(shared)


async def test_successive_containers_on_a_gpu_each_have_the_whole_gpu() -> None:
    scenario = container(processes=[process(0)])
    first = scenario["pods"][0]
    scenario["pods"] = [first | {"end_seconds": 20}, first | {"name": "next", "start_seconds": 100}]
    found = [one for at in (1, 101) for one in await allocated(simulate(scenario, at_seconds=at))]

    assert [(one.pod, one.replica) for one in found] == [("train", None), ("next", None)]


async def test_a_pod_is_listed_from_its_start_until_some_time_after_its_end() -> None:
    scenario = container(devices=[{"gpu": 0}])
    scenario["pods"][0] |= {"start_seconds": 10, "end_seconds": 20}
    listed = [bool(await allocated(simulate(scenario, at_seconds=at))) for at in (9, 10, 21, 60)]

    assert listed == [False, True, True, False]


async def test_an_ended_pod_is_listed_at_most_until_the_next_one_of_its_name_starts() -> None:
    """Its log directory remains."""
    scenario = container(devices=[{"gpu": 0}])
    scenario["nodes"][0]["ended_pods_listed_seconds"] = 600
    first = scenario["pods"][0] | {"end_seconds": 20}
    following = first | {"start_seconds": 25, "end_seconds": 60}
    scenario["pods"] = [first, following | {"containers": container()["pods"][0]["containers"]}]
    for seconds, listed, logs in ((24, 1, 1), (26, 0, 2)):
        node = simulate(scenario, at_seconds=seconds)
        assert len(await allocated(node)) == listed
        assert len(node.kubelet.pod_folders()) == logs


def test_the_names_of_log_files_identify_the_containers(tmp_path: Path) -> None:
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario(QUICKSTART), epoch_ns=EPOCH_NS, clock=clock)
    link_logs(simulation.node("gpu-node-1").kubelet, tmp_path)
    names = ContainerNames(list_names=list_folder(tmp_path), clock=clock)
    (pod,) = [one for one in simulation.pods if one.spec.name == "llm-finetune-worker-0"]

    assert names.name_of(pod.container_ids["pytorch"]) == ContainerName(
        namespace="research", pod="llm-finetune-worker-0", container="pytorch"
    )


def test_the_scenario_decides_whether_the_agent_sees_the_hosts_proc() -> None:
    hidden = container()
    hidden["nodes"][0]["host_pid"] = False

    assert check_procfs(simulate(container()).procfs).is_on
    assert not check_procfs(simulate(hidden).procfs).is_on


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ({"gpu": 2}, "team-a/train main: devices: no GPU 2"),
        ({"gpu": 0, "instance": 0}, "GPU 0 has no instance 0"),
        ({"gpu": 1, "instance": 3}, "GPU 1 has no instance 3"),
    ],
)
def test_a_missing_device_is_reported_as_an_error_of_the_scenario(
    device: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        parse_scenario(container(devices=[device]))
