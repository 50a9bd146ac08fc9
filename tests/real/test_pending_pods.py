"""podwatch publishes the pods that a real scheduler cannot place, until it places them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.kinds import PENDING_POD
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from tests.podwatch_cluster import DEADLINE_SECONDS, MERGE, running
from tests.real.services.kubelet_node import Scheduler
from tests.real.test_podwatch import RealCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from gpuledger.records import PendingPodRecord
    from tests.real.services.kubernetes import KubeApi
    from tests.real.services.starter import Starter

pytestmark = pytest.mark.extended
NODE = "gpu-0"


async def offer(cluster: RealCluster, *, gpus: int) -> None:
    """Write the node's capacity, as its kubelet would, without the taint of a new node."""
    amounts = {"cpu": "8", "memory": "64Gi", "pods": "10", "nvidia.com/gpu": str(gpus)}
    ready = {"type": "Ready", "status": "True"}
    status: dict[str, Any] = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    path = f"/api/v1/nodes/{NODE}"
    await cluster.send("PATCH", f"{path}/status", {"status": status}, content_type=MERGE)
    await cluster.send("PATCH", path, {"spec": {"taints": None}}, content_type=MERGE)


def last_versions(bus: MemoryBus) -> dict[str, PendingPodRecord]:
    """Return the last version of each pod that waits or has waited, by its name."""
    decode = PENDING_POD.decoder(bus.topics).decode
    records = bus.kept(bus.topics.pending_pods.name)
    found = [decode(each.value) for each in records if each.value is not None]
    return {pod.name: pod for pod in found}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  # the topic has no event
            await asyncio.sleep(0.05)


async def test_a_pod_that_a_scheduler_refuses_waits_until_a_node_has_room(
    start_kube_api: Callable[..., KubeApi], starter: Starter, node_programs: Mapping[str, Path]
) -> None:
    server = start_kube_api()
    cluster = await RealCluster.prepared(server)
    node = {"metadata": {"name": NODE}}
    await cluster.send("POST", "/api/v1/nodes", node, content_type="application/json")
    await offer(cluster, gpus=4)
    starter.start(
        Scheduler(
            binary=node_programs["kube-scheduler"],
            folder=starter.new_folder("kube-scheduler"),
            kube_api=server,
        )
    )
    settings = PodwatchSettings(kubernetes=KubernetesSettings(kubeconfig=str(cluster.kubeconfig)))
    gates = {"schedulingGates": [{"name": "example.com/quota"}]}
    bus = MemoryBus()
    async with running(bus, settings, Readiness()):
        await cluster.create_pod("large", node=None, gpus=8)
        await cluster.create_pod("gated", node=None, spec=gates)
        await cluster.create_pod("without-gpus", node=None, gpus=0)
        expected = {"large": "Unschedulable", "gated": "SchedulingGated"}
        await until(
            lambda: {name: pod.reason for name, pod in last_versions(bus).items()} == expected
        )
        message = last_versions(bus)["large"].message
        assert message
        assert "1 Insufficient nvidia.com/gpu" in message
        await offer(cluster, gpus=16)
        await until(lambda: last_versions(bus)["large"].left_time_ns is not None)
        assert last_versions(bus)["gated"].left_time_ns is None
        await until(lambda: len(bus.kept(bus.topics.pods.name)) > 1)
