"""Lists of the played API server over real HTTP."""

from typing import Any

import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kube import KubeApi
from gpuledger_simulator.simulation import Simulation
from tests.unit.simulator.kube.api_client import Client


def names(answer: dict[str, Any]) -> list[str]:
    return [item["metadata"]["name"] for item in answer["items"]]


async def test_a_list_has_the_current_pods_with_their_containers(
    client: Client, simulation: Simulation
) -> None:
    _, answer = await client.get()
    assert answer["kind"] == "PodList"
    assert names(answer) == ["train-0", "render-1-xyz"]
    train = answer["items"][0]
    assert train["spec"]["nodeName"] == "node-a"
    assert train["metadata"]["uid"] == simulation.uid(simulation.pods[0])
    (status,) = train["status"]["containerStatuses"]
    assert status["containerID"] == f"containerd://{simulation.pods[0].container_ids['main']}"
    assert train["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


async def test_pages_show_one_version_even_if_pods_change_in_between(
    client: Client, api: KubeApi
) -> None:
    _, first = await client.get(limit="1")
    await api.delete_pod("team-b", "render-1-xyz", grace_seconds=0)
    _, second = await client.get(limit="1", **{"continue": first["metadata"]["continue"]})
    assert names(first) + names(second) == ["train-0", "render-1-xyz"]
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]
    assert first["metadata"]["remainingItemCount"] == 1
    assert "continue" not in second["metadata"]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({"fieldSelector": "spec.nodeName=node-b"}, ["render-1-xyz"]),
        ({"fieldSelector": "spec.nodeName!="}, ["train-0", "render-1-xyz"]),
        ({"fieldSelector": "status.phase!=Running"}, []),
        ({"fieldSelector": "metadata.name=train-0,status.phase==Running"}, ["train-0"]),
        ({"labelSelector": "job-name"}, ["render-1-xyz"]),
        ({"labelSelector": "!job-name"}, ["train-0"]),
        ({"labelSelector": "job-name=render-1"}, ["render-1-xyz"]),
    ],
)
async def test_a_selector_filters_pods(
    client: Client, selector: dict[str, str], expected: list[str]
) -> None:
    _, answer = await client.get(**selector)
    assert names(answer) == expected


@pytest.mark.parametrize(
    ("query", "code", "reason"),
    [
        ({"resourceVersion": "999999"}, 504, "Timeout"),
        ({"resourceVersion": "7", "resourceVersionMatch": "Exact"}, 410, "Expired"),
        ({"resourceVersion": "x"}, 400, "BadRequest"),
        ({"continue": "x"}, 400, "BadRequest"),
        ({"fieldSelector": "spec.color=red"}, 400, "BadRequest"),
    ],
)
async def test_an_invalid_list_request_returns_a_status(
    client: Client, api: KubeApi, query: dict[str, str], code: int, reason: str
) -> None:
    api.compact()
    status, answer = await client.get(**query)
    assert (status, answer["kind"], answer["reason"]) == (code, "Status", reason)


async def test_a_page_from_before_a_compaction_has_expired(client: Client, api: KubeApi) -> None:
    _, first = await client.get(limit="1")
    api.compact()
    status, answer = await client.get(limit="1", **{"continue": first["metadata"]["continue"]})
    assert (status, answer["reason"]) == (410, "Expired")


async def test_one_object_is_returned_by_name_or_not_found(
    client: Client, clock: ManualClock
) -> None:
    _, train = await client.get("/api/v1/namespaces/team-a/pods/train-0")
    assert (train["kind"], train["apiVersion"]) == ("Pod", "v1")
    status, answer = await client.get("/api/v1/namespaces/team-a/pods/none")
    assert (status, answer["message"]) == (404, 'pods "none" not found')
    status, answer = await client.get("/api/v1/secrets")
    assert (status, answer["kind"]) == (404, "Status")


async def test_a_replica_set_is_owned_by_its_deployment(client: Client) -> None:
    path = "/apis/apps/v1/namespaces/team-b/replicasets/chat-5d8f7c9b4d"
    _, answer = await client.get(path)
    (owner,) = answer["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Deployment", "chat", True)


async def test_the_server_returns_its_version_and_its_nodes(client: Client) -> None:
    _, version = await client.get("/version")
    assert version["major"] == "1"
    _, nodes = await client.get("/api/v1/nodes")
    assert names(nodes) == ["node-a", "node-b"]
    assert nodes["items"][0]["status"]["capacity"]["nvidia.com/gpu"] == "2"
