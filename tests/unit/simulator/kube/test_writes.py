"""Writes to the played API server, like those of a driver or a test."""

from pathlib import Path

import pytest
from msgspec import structs

from gpuledger.errors import UnavailableError, UserError
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.identities import FileUids
from gpuledger_simulator.kube import KubeApi, serve_kube_api, write_kubeconfig
from gpuledger_simulator.kube.driver import drive
from gpuledger_simulator.kube_objects import kube_time
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.unit.simulator.kube.api_client import Client

PODS = "/api/v1/namespaces/team-z/pods"
POD = {"metadata": {"name": "p", "uid": "mine"}, "spec": {"nodeName": "node-a", "containers": []}}


async def test_the_server_gives_a_pod_its_uid_and_keeps_its_spec(client: Client) -> None:
    status, created = await client.send("POST", PODS, POD)
    assert status == 201
    assert created["metadata"]["uid"] != "mine"
    assert created["metadata"]["namespace"] == "team-z"
    assert created["status"]["phase"] == "Pending"
    again, answer = await client.send("POST", PODS, POD)
    assert (again, answer["reason"]) == (409, "AlreadyExists")


async def test_a_status_patch_changes_only_the_status(client: Client) -> None:
    await client.send("POST", PODS, POD)
    patch = {"status": {"phase": "Running"}, "spec": {"nodeName": "elsewhere"}}
    _, patched = await client.send("PATCH", f"{PODS}/p/status", patch)
    assert (patched["status"]["phase"], patched["spec"]["nodeName"]) == ("Running", "node-a")
    _, patched = await client.send("PATCH", f"{PODS}/p", {"metadata": {"labels": {"a": "b"}}})
    assert patched["metadata"]["labels"] == {"a": "b"}
    assert patched["status"]["phase"] == "Running"


async def test_a_grace_period_marks_a_pod_and_no_grace_removes_it(client: Client) -> None:
    await client.send("POST", PODS, POD)
    await client.send("DELETE", f"{PODS}/p", {"gracePeriodSeconds": 30})
    _, marked = await client.get(f"{PODS}/p")
    assert "deletionTimestamp" in marked["metadata"]
    await client.send("DELETE", f"{PODS}/p", None, gracePeriodSeconds="0")
    assert (await client.get(f"{PODS}/p"))[0] == 404


@pytest.mark.parametrize(
    ("body", "code"), [([], 400), ({"metadata": {}}, 422), ({"spec": {}}, 422)]
)
async def test_an_invalid_object_is_rejected(client: Client, body: object, code: int) -> None:
    assert (await client.send("POST", PODS, body))[0] == code


async def test_simulated_nodes_use_the_uids_of_a_driven_server(
    simulation: Simulation, tmp_path: Path, epoch_ns: int
) -> None:
    empty = parse_scenario({"name": "empty", "nodes": [{"name": "n", "gpus": {"model": "x"}}]})
    target = KubeApi(Simulation(empty, epoch_ns=epoch_ns))
    uids = tmp_path / "uids.json"
    async with serve_kube_api(target, play=False) as url:
        write_kubeconfig(tmp_path / "kubeconfig", url)
        # The clock advances while the driver sleeps, so this takes no time.
        await drive(simulation, kubeconfig=tmp_path / "kubeconfig", uids=uids)
        pods = target.collections["pods"].items()
        read = FileUids(uids, epoch_ns=epoch_ns)
    assert [pod["metadata"]["name"] for pod in pods] == ["train-0"]  # the others have ended
    assert read.uid("team-a/train-0") == pods[0]["metadata"]["uid"]
    driven = Simulation(
        simulation.scenario, epoch_ns=epoch_ns, clock=ManualClock(start_ns=epoch_ns), uids=read
    )
    path = f"/proc/{driven.processes[0].pid}/cgroup"
    cgroup = driven.node("node-a").procfs.read(path).decode()
    assert pods[0]["metadata"]["uid"].replace("-", "_") in cgroup
    assert driven.truth(epoch_ns, epoch_ns + 1)[0].uid == pods[0]["metadata"]["uid"]


async def test_a_pod_of_an_earlier_run_is_replaced(simulation: Simulation, tmp_path: Path) -> None:
    target = KubeApi(simulation)  # holds the scenario's pods already
    await target.pod_driver.play_due()
    async with serve_kube_api(target, play=False) as url:
        write_kubeconfig(tmp_path / "kubeconfig", url)
        await drive(simulation, kubeconfig=tmp_path / "kubeconfig")
    (pod,) = target.collections["pods"].items()
    assert pod["metadata"]["uid"] != simulation.uid(simulation.pods[0])


async def test_a_rejected_request_is_reported_with_the_servers_message(
    simulation: Simulation, tmp_path: Path
) -> None:
    async with serve_kube_api(KubeApi(simulation), play=False) as url:
        write_kubeconfig(tmp_path / "kubeconfig", f"{url}/elsewhere")
        with pytest.raises(UnavailableError) as raised:
            await drive(simulation, kubeconfig=tmp_path / "kubeconfig")

    assert str(raised.value) == (
        "the API server returned 404: the server could not find the requested resource"
    )


async def test_before_the_api_server_creates_a_pod_its_process_has_no_cgroup(
    simulation: Simulation, tmp_path: Path, epoch_ns: int
) -> None:
    uids = FileUids(tmp_path / "none.json", epoch_ns=epoch_ns)
    early = Simulation(
        simulation.scenario, epoch_ns=epoch_ns, clock=ManualClock(start_ns=epoch_ns), uids=uids
    )
    with pytest.raises(FileNotFoundError):
        early.node("node-a").procfs.read(f"/proc/{early.processes[0].pid}/cgroup")


async def test_a_pod_hidden_from_the_api_server_still_has_a_uid(
    simulation: Simulation, tmp_path: Path, epoch_ns: int
) -> None:
    first, *others = simulation.scenario.pods
    hidden = structs.replace(first, in_api=False)
    scenario = structs.replace(simulation.scenario, pods=[hidden, *others])
    uids = FileUids(tmp_path / "none.json", epoch_ns=epoch_ns)
    played = Simulation(scenario, epoch_ns=epoch_ns, clock=simulation.clock, uids=uids)
    path = f"/proc/{played.processes[0].pid}/cgroup"
    cgroup = played.node("node-a").procfs.read(path).decode()
    assert played.uid(played.pods[0]).replace("-", "_") in cgroup


async def test_a_driver_reports_an_unreadable_kubeconfig_and_an_unreachable_server(
    simulation: Simulation, tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        await drive(simulation, kubeconfig=tmp_path / "none")
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9")
    with pytest.raises(UnavailableError):
        await drive(simulation, kubeconfig=tmp_path / "kubeconfig")


WAITING = {
    "name": "s",
    "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4"}}],
    "pods": [
        {
            "namespace": "a",
            "name": "p",
            "node": "n",
            "start_seconds": 30,
            "wait_seconds": 20,
            "containers": [{"name": "c"}],
        }
    ],
}


async def test_a_pod_that_waits_has_no_node_until_it_is_scheduled(epoch_ns: int) -> None:
    clock = ManualClock(start_ns=epoch_ns)
    api = KubeApi(Simulation(parse_scenario(WAITING), epoch_ns=epoch_ns, clock=clock))
    states, changed = [], ""
    for second in (9, 28, 29, 30):
        clock.advance_to(epoch_ns + second * 10**9)
        await api.pod_driver.play_due()
        (pod,) = api.collections["pods"].items()
        scheduled, *others = pod["status"]["conditions"]
        states.append((pod["spec"].get("nodeName"), scheduled["status"], len(others)))
        changed = scheduled["lastTransitionTime"]
    assert states == [(None, "False", 0), (None, "False", 0), ("n", "True", 0), ("n", "True", 1)]
    assert changed == kube_time(epoch_ns + 29 * 10**9)


async def test_a_driven_pod_that_waited_is_bound_to_its_node(tmp_path: Path, epoch_ns: int) -> None:
    clock = ManualClock(start_ns=epoch_ns)
    simulation = Simulation(parse_scenario(WAITING), epoch_ns=epoch_ns, clock=clock)
    empty = parse_scenario({"name": "empty", "nodes": [{"name": "n", "gpus": {"model": "x"}}]})
    target = KubeApi(Simulation(empty, epoch_ns=epoch_ns))
    async with serve_kube_api(target, play=False) as url:
        write_kubeconfig(tmp_path / "kubeconfig", url)
        await drive(simulation, kubeconfig=tmp_path / "kubeconfig")
    (pod,) = target.collections["pods"].items()
    assert (pod["spec"]["nodeName"], pod["status"]["phase"]) == ("n", "Running")


async def test_a_pod_is_bound_once_and_only_to_a_named_node(client: Client) -> None:
    await client.send("POST", PODS, {"metadata": {"name": "p"}, "spec": {"containers": []}})
    target = {"target": {"kind": "Node", "name": "node-a"}}
    codes = [
        (await client.send("POST", f"{PODS}/{name}/binding", body))[0]
        for name, body in (("p", {}), ("p", target), ("p", target), ("none", target))
    ]
    assert codes == [422, 201, 409, 404]
    _, bound = await client.get(f"{PODS}/p")
    assert bound["spec"]["nodeName"] == "node-a"
    (condition,) = bound["status"]["conditions"]
    assert (condition["type"], condition["status"]) == ("PodScheduled", "True")
