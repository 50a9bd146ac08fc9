"""The agent on a node with a real kubelet, real containers and a device plugin."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger_agent.host.kubelet.allocations import SocketKubelet
from gpuledger_agent.host.kubelet.messages import parse_answer
from gpuledger_agent.host.kubelet.pod_list import KubeletPodList, PodListError, parse_pods
from gpuledger_agent.settings import KubeletApiSettings
from tests.real.node_pipeline import (
    DEADLINE_SECONDS,
    POLL_SECONDS,
    UUIDS,
    NodePipeline,
    booked,
    running_on,
    visible_gpus,
)
from tests.real.services.image import NAME as IMAGE
from tests.real.services.kubelet_node import (
    DRIVER,
    NODE,
    RESOURCE,
    DraDriver,
    KubeletNode,
    Scheduler,
    find_cgroups,
    read_or_empty,
)
from tests.real.services.starter import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from gpuledger.records import GpuEvent
    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.kubernetes import KubeApi
    from tests.real.services.starter import Starter

pytestmark = pytest.mark.extended

NAMESPACE = "default"
CLAIMED = UUIDS[-1]
"""The GPU that the device plugin leaves to a DRA driver."""
WAIT = "busybox mkfifo /end && read line </end"
DOWN_NS = 3 * 10**9
PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"


@pytest.fixture(scope="module")
def node(
    own_kube_api: Callable[..., KubeApi],
    node_programs: Mapping[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KubeletNode]:
    folder = tmp_path_factory.mktemp("node")
    with running(own_kube_api(folder=folder / "kubernetes")) as kube_api:
        made = KubeletNode(
            programs=node_programs, folder=folder, kube_api=kube_api, gpu_uuids=UUIDS[:-1]
        )
        with running(made):
            yield made


class Pods:
    """The pods of a test, as the API server has them."""

    def __init__(self, kube_api: KubeApiClient) -> None:
        self._kube_api = kube_api

    def create(self, name: str, *, gpus: int = 1, **spec: Any) -> None:  # noqa: ANN401  # fields of JSON
        """Assign a pod of one container to the node."""
        self._kube_api.apply(manifest(name, gpus=gpus, **spec))

    def read(self, name: str) -> dict[str, Any]:
        """Return a pod; raises LookupError if there is none."""
        status, found = self._kube_api.request("GET", f"{PATH}/{name}")
        if status != 200:
            raise LookupError(name)
        return dict(found)

    def delete(self, name: str, *, grace_seconds: int = 1) -> None:
        """Delete a pod; with a grace of 0 the API server forgets it at once."""
        self._kube_api.request("DELETE", f"{PATH}/{name}", {"gracePeriodSeconds": grace_seconds})

    def names(self) -> list[str]:
        """Return the names of all pods."""
        return [one["metadata"]["name"] for one in self._kube_api.request("GET", PATH)[1]["items"]]

    async def until(self, name: str, probe: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return a pod once `probe` returns true."""
        await until(lambda: probe(self.read(name)))
        return self.read(name)


async def until(probe: Callable[[], bool]) -> None:
    """Wait until `probe` returns true; other processes have no event for it."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not probe():  # noqa: ASYNC110  # see above
            await asyncio.sleep(POLL_SECONDS)


@pytest.fixture
async def pods(node: KubeletNode) -> AsyncIterator[Pods]:
    pods = Pods(node.kube_api)
    yield pods
    for name in pods.names():
        pods.delete(name, grace_seconds=0)
    # Only then does the kubelet give the devices to other pods.
    await until(lambda: not find_cgroups("pod*"))


def container(name: str, *, gpus: int = 1, **spec: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of JSON
    limits = {"limits": {RESOURCE: str(gpus)}} if gpus else {}
    common = {"name": name, "image": IMAGE, "imagePullPolicy": "Never"}
    return {**common, "resources": limits, **spec}


def manifest(name: str, *, gpus: int = 1, **spec: Any) -> dict[str, Any]:  # noqa: ANN401  # fields of JSON
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"team": name}},
        "spec": {
            "nodeName": NODE,
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 1,
            "containers": [container("main", gpus=gpus)],
            **spec,
        },
    }


def is_running(pod: dict[str, Any]) -> bool:
    return bool(pod["status"]["phase"] == "Running")


def container_id(pod: dict[str, Any], name: str = "main", *, kind: str = "container") -> str:
    (found,) = (one for one in pod["status"][f"{kind}Statuses"] if one["name"] == name)
    return str(found["containerID"]).removeprefix("containerd://")


def gpus_in(container_id: str) -> list[str]:
    """Return the GPUs that a container got, from the environment of its process."""
    return visible_gpus(pids_in(container_id)[0])


def pids_in(container_id: str) -> list[int]:
    """Return the processes of a container."""
    files = (folder / "cgroup.procs" for folder in find_cgroups(container_id))
    return [int(pid) for file in files for pid in read_or_empty(file).split()]


def key(pod: str, container: str = "main") -> str:
    return f"{NAMESPACE}/{pod}/{container}"


def allocated(event: GpuEvent) -> dict[str, set[str]]:
    """Return the containers to which each GPU is allocated, with an empty name for nobody."""
    return {uuid: set(booked(event, uuid).allocated) for uuid in UUIDS}


async def test_a_container_is_allocated_the_gpus_that_its_device_plugin_gave_it(
    node: KubeletNode, pods: Pods
) -> None:
    async with running_on(node) as pipeline:
        pods.create(
            "several",
            containers=[container("one"), container("two", gpus=2), container("none", gpus=0)],
        )
        pod = await pods.until("several", is_running)
        event = await pipeline.until(lambda event: bool(event.allocations))
    expected = {uuid: {""} for uuid in UUIDS}
    for name in ("one", "two"):
        for uuid in gpus_in(container_id(pod, name)):
            expected[uuid] = {key("several", name)}
    assert allocated(event) == expected
    assert [uuid for uuid, names in expected.items() if names == {""}] == [CLAIMED]


async def test_a_process_is_booked_on_the_pod_and_container_of_its_cgroup(
    node: KubeletNode, pods: Pods
) -> None:
    async with running_on(node) as pipeline:
        pods.create("used")
        pod = await pods.until("used", is_running)
        (uuid,) = gpus_in(container_id(pod))
        event = await pipeline.until(lambda event: set(booked(event, uuid).used) == {key("used")})
    found = booked(event, uuid)
    assert found.container_ids == {container_id(pod)}
    assert found.pod_uids == {pod["metadata"]["uid"]}
    assert found.used[key("used")] > 0
    _, *later = (event for event in pipeline.events if booked(event, uuid).used)
    assert_always_allocated(later, uuid, key("used"))


async def test_a_restarted_container_keeps_its_pod_and_its_gpu_and_has_another_id(
    node: KubeletNode, pods: Pods
) -> None:
    async with running_on(node) as pipeline:
        pods.create("restarted")
        before = container_id(await pods.until("restarted", is_running))
        (uuid,) = gpus_in(before)
        await pipeline.until(lambda event: booked(event, uuid).container_ids == {before})
        first = len(pipeline.events)
        kill(before)
        pod = await pods.until(
            "restarted",
            lambda pod: is_running(pod) and container_id(pod) != before,
        )
        event = await pipeline.until(
            lambda event: set(booked(event, uuid).used) == {key("restarted")}
        )
    assert booked(event, uuid).container_ids == {container_id(pod)}
    assert booked(event, uuid).pod_uids == {pod["metadata"]["uid"]}
    assert_always_allocated(pipeline.events[first:], uuid, key("restarted"))


async def test_a_static_pod_has_the_uid_of_the_api_server(node: KubeletNode, pods: Pods) -> None:
    file, name = node.kubelet.static_pods / "static.json", f"static-{NODE}"
    async with running_on(node) as pipeline:
        file.write_text(json.dumps(manifest("static")))
        await until(lambda: name in pods.names())
        pod = await pods.until(name, is_running)
        (uuid,) = gpus_in(container_id(pod))
        found = booked(
            await pipeline.until(lambda event: key(name) in booked(event, uuid).used), uuid
        )
        assert set(found.allocated) == {key(name)}
        assert found.pod_uids == {pod["metadata"]["uid"]}
        file.unlink()
        await pipeline.until(lambda event: set(booked(event, uuid).allocated) == {""})


async def test_init_containers_and_sidecars_are_booked_on_their_pod(
    node: KubeletNode, pods: Pods
) -> None:
    async with running_on(node) as pipeline:
        pods.create(
            "stages",
            initContainers=[
                container("sidecar", restartPolicy="Always"),
                container("prepare", command=["sh", "-c", WAIT]),
            ],
        )
        pod = await pods.until("stages", lambda pod: is_init_running(pod, "prepare"))
        (of_sidecar,) = gpus_in(container_id(pod, "sidecar", kind="initContainer"))
        prepare = container_id(pod, "prepare", kind="initContainer")
        (uuid,) = gpus_in(prepare)
        name = key("stages", "prepare")
        event = await pipeline.until(lambda event: name in booked(event, uuid).used)
        # The kubelet allocates the devices of all containers before it starts the first one.
        assert set(booked(event, uuid).allocated) == {key("stages")}
        assert set(booked(event, of_sidecar).allocated) == {key("stages", "sidecar")}
        pipe = Path(f"/proc/{pids_in(prepare)[0]}/root/end")
        await until(pipe.is_fifo)
        await asyncio.to_thread(pipe.write_text, "\n")
        pod = await pods.until("stages", is_running)
        assert gpus_in(container_id(pod)) == [uuid]
        event = await pipeline.until(lambda event: key("stages") in booked(event, uuid).used)
        assert set(booked(event, of_sidecar).used) == {key("stages", "sidecar")}
        assert booked(event, uuid).pod_uids == {pod["metadata"]["uid"]}


@pytest.mark.parametrize("how", ["completed", "deleted", "deleted by force"])
async def test_an_allocation_lasts_while_the_container_runs_and_ends_with_the_pods_cgroup(
    how: str, node: KubeletNode, pods: Pods
) -> None:
    name = f"ending-{how.replace(' ', '-')}"
    async with running_on(node) as pipeline:
        pods.create(name, restartPolicy="Never")
        pod = await pods.until(name, is_running)
        (uuid,) = gpus_in(container_id(pod))
        await pipeline.until(lambda event: key(name) in booked(event, uuid).used)
        first = len(pipeline.events)
        if how == "completed":
            kill(container_id(pod))
        else:
            pods.delete(name, grace_seconds=0 if how == "deleted by force" else 1)
        ran_ns, gone_ns = await until_gone(pod)
        await pipeline.next_event()
    for event in pipeline.events[first:]:
        found = booked(event, uuid)
        if event.time_ns <= ran_ns:
            assert set(found.allocated) == {key(name)}
        if event.time_ns - event.interval_ns >= gone_ns:
            assert set(found.allocated) == {""}
            assert not found.used


@asynccontextmanager
async def unchanged(node: KubeletNode, pods: Pods, name: str) -> AsyncIterator[NodePipeline]:
    """Check that all events of the block book a GPU on one pod."""
    async with running_on(node, refresh_seconds=1) as pipeline:
        pods.create(name)
        pod = await pods.until(name, is_running)
        (uuid,) = gpus_in(container_id(pod))
        await pipeline.until(lambda event: set(booked(event, uuid).used) == {key(name)})
        first = len(pipeline.events)
        yield pipeline
    assert container_id(pods.read(name)) == container_id(pod)
    assert_always_allocated(pipeline.events[first:], uuid, key(name))
    assert all(set(booked(event, uuid).used) <= {key(name)} for event in pipeline.events[first:])


@pytest.mark.parametrize("parts", [["kubelet"], ["device_plugin"], ["device_plugin", "kubelet"]])
async def test_a_restart_of_the_kubelet_or_of_its_device_plugin_changes_no_allocation(
    parts: list[str], node: KubeletNode, pods: Pods
) -> None:
    restarted = [getattr(node, part) for part in parts]
    async with unchanged(node, pods, "-".join(parts).replace("_", "-")) as pipeline:
        for part in restarted:
            part.kill()
        await pipeline.until_time(time.time_ns() + DOWN_NS)
        # The kubelet first, which then has no plugin for a while.
        for part in reversed(restarted):
            await asyncio.to_thread(part.start)
            await pipeline.until_time(time.time_ns() + DOWN_NS)
        await asyncio.to_thread(node.wait_until_ready)


async def test_a_kubelet_that_cannot_read_its_pods_changes_no_allocation(
    node: KubeletNode, pods: Pods
) -> None:
    async with unchanged(node, pods, "no-api-server") as pipeline:
        await asyncio.to_thread(node.kube_api.stop_server)
        node.kubelet.kill()
        await asyncio.to_thread(node.kubelet.start)
        await pipeline.until_time(time.time_ns() + 2 * DOWN_NS)
        kubelet = SocketKubelet(node.kubelet.socket, timeout_seconds=5)
        assert parse_answer(await kubelet.list_pods()) == []
        await asyncio.to_thread(node.kube_api.start)
        await asyncio.to_thread(node.wait_until_ready)


async def test_an_agent_that_starts_with_its_kubelet_does_not_report_an_allocated_gpu_as_free(
    node: KubeletNode, pods: Pods
) -> None:
    pods.create("early")
    pod = await pods.until("early", is_running)
    (uuid,) = gpus_in(container_id(pod))
    await asyncio.to_thread(node.kube_api.stop_server)
    node.kubelet.kill()
    await asyncio.to_thread(node.kubelet.start)
    async with running_on(node) as pipeline:
        await pipeline.until_time(time.time_ns() + DOWN_NS)
        await asyncio.to_thread(node.kube_api.start)
        await pipeline.until(lambda event: set(booked(event, uuid).allocated) == {key("early")})
        await asyncio.to_thread(node.wait_until_ready)
    assert {name for event in pipeline.events for name in booked(event, uuid).allocated} == {
        "?",
        key("early"),
    }


async def test_a_pod_that_reuses_a_name_has_only_its_own_gpus(
    node: KubeletNode, pods: Pods
) -> None:
    async with running_on(node) as pipeline:
        pods.create("again")
        former = await pods.until("again", is_running)
        (uuid,) = gpus_in(container_id(former))
        await pipeline.until(lambda event: key("again") in booked(event, uuid).used)
        pods.delete("again", grace_seconds=0)
        pods.create("again", gpus=2)
        pod = await pods.until("again", is_running)
        assert pod["metadata"]["uid"] != former["metadata"]["uid"]
        await until_gone(former)
        event = await pipeline.next_event()
    own = gpus_in(container_id(pod))
    assert allocated(event) == {uuid: {key("again") if uuid in own else ""} for uuid in UUIDS}
    for uuid in own:
        assert booked(event, uuid).pod_uids == {pod["metadata"]["uid"]}


async def test_a_claims_gpu_is_allocated_to_its_container(
    node: KubeletNode,
    # Before `pods`, so that its teardown is later: the kubelet needs the driver to end the pods.
    starter: Starter,
    pods: Pods,
    node_programs: Mapping[str, Path],
) -> None:
    minor = UUIDS.index(CLAIMED)
    device = f"gpu-{minor}"
    starter.start(
        DraDriver(
            binary=node_programs["dra-driver"],
            folder=starter.new_folder("dra-driver"),
            root=node.kubelet.root,
            device=device,
        )
    )
    for made in claimed_objects(device):
        node.kube_api.apply(made)
    starter.start(
        Scheduler(
            binary=node_programs["kube-scheduler"],
            folder=starter.new_folder("kube-scheduler"),
            kube_api=node.kube_api,
        )
    )
    resources = {"claims": [{"name": "gpu"}]}
    environment = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": CLAIMED}]
    async with running_on(node) as pipeline:
        pods.create(
            "claiming",
            nodeName="",
            tolerations=[{"operator": "Exists"}],
            resourceClaims=[{"name": "gpu", "resourceClaimName": "one-gpu"}],
            containers=[container("main", env=environment, resources=resources)],
        )
        await pods.until("claiming", is_running)
        event = await pipeline.until(lambda event: key("claiming") in booked(event, CLAIMED).used)
    assert booked(event, CLAIMED).allocated == {key("claiming"): event.interval_ns}
    (allocation,) = event.allocations
    assert (allocation.resources, allocation.claims) == ([DRIVER], [f"{NAMESPACE}/one-gpu"])


def claimed_objects(device: str) -> Iterator[dict[str, Any]]:
    """Yield a ResourceSlice, a DeviceClass and a ResourceClaim."""
    expression = f"device.driver == '{DRIVER}'"
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
    pool = {"name": NODE, "generation": 1, "resourceSliceCount": 1}
    slice_ = {"driver": DRIVER, "nodeName": NODE, "pool": pool, "devices": [{"name": device}]}
    for kind, metadata, spec in (
        ("ResourceSlice", {"name": NODE}, slice_),
        ("DeviceClass", {"name": DRIVER}, {"selectors": [{"cel": {"expression": expression}}]}),
        (
            "ResourceClaim",
            {"name": "one-gpu", "namespace": NAMESPACE},
            {"devices": {"requests": [request]}},
        ),
    ):
        yield {
            "apiVersion": "resource.k8s.io/v1",
            "kind": kind,
            "metadata": metadata,
            "spec": spec,
        }


async def test_the_kubelets_list_has_all_pods_of_the_node_with_their_labels(
    node: KubeletNode, pods: Pods, tmp_path: Path
) -> None:
    rule = {"apiGroups": [""], "resources": ["nodes/pods"], "verbs": ["get"]}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "pods"}
    subject = {"kind": "ServiceAccount", "name": "agent", "namespace": NAMESPACE}
    node.kube_api.service_account_kubeconfig(namespace=NAMESPACE, name="agent")
    rights: dict[str, Any] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "metadata": {"name": "pods"},
    }
    token = tmp_path / "token"
    token.write_text(node.kube_api.token_of(namespace=NAMESPACE, name="agent"))
    listing = KubeletPodList(
        KubeletApiSettings(
            host="127.0.0.1",
            port=node.kubelet.port,
            server_name=NODE,
            ca_file=node.kubelet.certificate,
            token_file=token,
        ),
        node=NODE,
    )
    with pytest.raises(PodListError, match="grant the agent's service account"):
        await listing.fetch()
    node.kube_api.apply({**rights, "kind": "ClusterRole", "rules": [rule]})
    rights["kind"] = "ClusterRoleBinding"
    node.kube_api.apply({**rights, "roleRef": role, "subjects": [subject]})
    pods.create("listed")
    pod = await pods.until("listed", is_running)
    (found,) = parse_pods(await until_granted(listing), node=NODE)
    assert found.metadata.uid == pod["metadata"]["uid"]
    assert found.metadata.labels == pod["metadata"]["labels"]
    assert [one.resources.limits for one in found.spec.containers or ()] == [{RESOURCE: "1"}]


async def until_granted(listing: KubeletPodList) -> bytes:
    """Return the list once the kubelet no longer caches the denial."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                return await listing.fetch()
            except PodListError:
                await asyncio.sleep(POLL_SECONDS)


def assert_always_allocated(events: list[GpuEvent], uuid: str, name: str) -> None:
    assert events
    for event in events:
        assert booked(event, uuid).allocated == {name: event.interval_ns}


def kill(container_id: str) -> None:
    for pid in pids_in(container_id):
        os.kill(pid, signal.SIGKILL)


def is_init_running(pod: dict[str, Any], name: str) -> bool:
    statuses = pod["status"].get("initContainerStatuses", [])
    return any(one["name"] == name and "running" in one["state"] for one in statuses)


async def until_gone(pod: dict[str, Any]) -> tuple[int, int]:
    """Return when a pod's container was last seen running, and when its cgroup was missing."""
    ran_ns = 0
    async with asyncio.timeout(DEADLINE_SECONDS):
        while find_cgroups(f"pod{pod['metadata']['uid']}"):
            now_ns = time.time_ns()
            if pids_in(container_id(pod)):
                ran_ns = now_ns
            await asyncio.sleep(POLL_SECONDS)
    return ran_ns, time.time_ns()
