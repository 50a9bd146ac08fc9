"""Which pods' hashes podwatch accepts, with pods on a real API server."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger_enricher.join.pods.pods import PodCache
from tests.podwatch_cluster import following
from tests.real.test_podwatch import RealCluster

if TYPE_CHECKING:
    from gpuledger.records import PodRecord
    from tests.real.services.kube_client import KubeApiClient

HASH = "0123456789abcdef0123456789abcdef"
NODE = "node-a"
CONFIG_HASH, CONFIG_MIRROR = "kubernetes.io/config.hash", "kubernetes.io/config.mirror"
OWNER = {
    "apiVersion": "v1",
    "kind": "Node",
    "name": NODE,
    "uid": "11111111-1111-4111-8111-111111111111",
    "controller": True,
}
MIRROR: dict[str, Any] = {
    "annotations": {CONFIG_HASH: HASH, CONFIG_MIRROR: HASH},
    "ownerReferences": [OWNER],
}
"""The metadata with which a kubelet creates the mirror of a static pod."""


class Scene:
    """Pods of one node on a real API server, as podwatch reads them and the join keeps them."""

    def __init__(self, server: KubeApiClient) -> None:
        self._server = server
        self.cluster = RealCluster(server)
        self.pods = PodCache()

    async def make(self, name: str, metadata: dict[str, Any]) -> PodRecord:
        """Create a pod; return its record once podwatch has read it and the join has stored it."""
        spec = {"nodeName": NODE, "containers": [{"name": "main", "image": "cuda"}]}
        path = f"/api/v1/namespaces/{self.cluster.namespace}/pods"
        body = {"metadata": {"name": name, **metadata}, "spec": spec}
        made = await self.cluster.send("POST", path, body, content_type="application/json")
        async with following(self.cluster) as found:
            record = await found.until_seen(made["metadata"]["uid"])
        self.pods.put(record, partition=0)
        return record

    def named(self) -> str | None:
        """Return the pod whose name the use of the static pod gets."""
        found = self.pods.find(HASH, "b" * 64, node=NODE)
        return found.record.name if found else None


@pytest.fixture
async def scene(kube_api: KubeApiClient) -> Scene:
    made = Scene(kube_api)
    await made.cluster.prepare()
    # The API server gives every pod except a mirror the account of its namespace.
    accounts = f"/api/v1/namespaces/{made.cluster.namespace}/serviceaccounts"
    await asyncio.to_thread(kube_api.request, "POST", accounts, {"metadata": {"name": "default"}})
    return made


async def test_no_tenants_pod_gets_the_use_of_a_static_pod(scene: Scene) -> None:
    """Neither by annotations, which anyone may write, nor as a mirror that was created later."""
    daemon = await scene.make("daemon", MIRROR)
    assert scene.named() == "daemon"
    for name, metadata in {
        "hash": {"annotations": {CONFIG_HASH: HASH}},
        "other-node": MIRROR | {"ownerReferences": [OWNER | {"name": "node-b"}]},
        "no-owner": {"annotations": MIRROR["annotations"]},
        "long": MIRROR
        | {"annotations": {CONFIG_HASH: "a" * 100_000, CONFIG_MIRROR: "a" * 100_000}},
    }.items():
        record = await scene.make(name, metadata)
        assert (name, record.config_hash) == (name, None)
    # The API server reports the age of pods in seconds, so pods of one second have equal ages.
    second_later_ns = daemon.created_time_ns + 1_100_000_000
    await asyncio.sleep(max(0, second_later_ns - time.time_ns()) / 1e9)
    # A kubelet deletes a mirror that it did not create; until then it looks like one.
    assert (await scene.make("false-mirror", MIRROR)).config_hash == HASH
    assert scene.named() == "daemon"


async def test_without_a_static_pod_no_pod_gets_its_use_by_only_the_hash(scene: Scene) -> None:
    await scene.make("hash", {"annotations": {CONFIG_HASH: HASH}})
    assert scene.named() is None
