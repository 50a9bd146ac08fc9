"""The simulator's driver against a real Kubernetes API server."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kube.driver import drive
from gpuledger_simulator.scenario.load import load_scenario, parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.real.services.kube_client import KubeApiClient

EPOCH_NS = 1_790_000_000_000_000_000


@dataclass(frozen=True)
class Pod:
    uid: str
    node: str
    phase: str
    container_ids: list[str]


async def test_a_real_api_server_accepts_every_step_and_gives_each_pod_its_own_uid(
    start_kube_api: Callable[..., KubeApiClient], tmp_path: Path
) -> None:
    server = start_kube_api()
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(load_scenario("scenarios/e2e.yaml"), epoch_ns=EPOCH_NS, clock=clock)
    runs = []
    for file in (tmp_path / "first.json", tmp_path / "second.json"):
        # The second run replaces the objects that the first one left.
        await drive(simulation, kubeconfig=server.kubeconfig, uids=file)
        runs.append(orjson.loads(file.read_bytes())["uids"])
    assert len(runs[0]) == len(simulation.pods)
    assert not set(runs[0].values()) & set(runs[1].values())
    assert {pod.uid: pod for pod in _pods(server)} == {
        runs[1][pod.key]: Pod(
            uid=runs[1][pod.key],
            node=pod.spec.node,
            phase="Running",
            container_ids=[f"containerd://{one}" for one in pod.container_ids.values()],
        )
        for pod in simulation.pods
        if pod.spec.end_seconds is None
    }


async def test_a_real_api_server_binds_a_pod_that_waited(
    start_kube_api: Callable[..., KubeApiClient],
) -> None:
    server = start_kube_api()
    pod = {"namespace": "a", "name": "p", "node": "n", "containers": [{"name": "c"}]}
    scenario = {
        "name": "s",
        "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4"}}],
        "pods": [{**pod, "start_seconds": 30, "wait_seconds": 20}],
    }
    clock = ManualClock(start_ns=EPOCH_NS)
    simulation = Simulation(parse_scenario(scenario), epoch_ns=EPOCH_NS, clock=clock)

    await drive(simulation, kubeconfig=server.kubeconfig)

    (found,) = _pods(server)
    assert (found.node, found.phase) == ("n", "Running")
    _, answer = server.request("GET", "/api/v1/namespaces/a/pods/p")
    conditions = {each["type"]: each["status"] for each in answer["status"]["conditions"]}
    assert conditions == {"PodScheduled": "True", "Ready": "True"}


def _pods(server: KubeApiClient) -> list[Pod]:
    _, answer = server.request("GET", "/api/v1/pods")
    return [
        Pod(
            uid=item["metadata"]["uid"],
            node=item["spec"]["nodeName"],
            phase=item["status"]["phase"],
            container_ids=[one["containerID"] for one in item["status"]["containerStatuses"]],
        )
        for item in answer["items"]
    ]
