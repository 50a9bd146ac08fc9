"""podwatch against a real Kubernetes API server."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from typing_extensions import override

from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.events import Interrupted, Phase
from gpuledger_enricher.podwatch.kinds import NAMESPACE, ObjectKind
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.podwatch_cluster import Cluster, following
from tests.podwatch_contract import PodwatchContract
from tests.real.deployment.chart import render
from tests.real.services.cluster_tools import Helm
from tests.real.services.kube_client import KubeApiClient
from tests.real.services.kubernetes import KubeApi

ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "podwatch-test"},
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
}


class RealCluster(Cluster):
    """A real API server; only one that the test owns may be disturbed."""

    def __init__(self, server: KubeApiClient, *, kubeconfig: Path | None = None) -> None:
        super().__init__(kubeconfig=kubeconfig or server.kubeconfig)
        self._server = server

    @classmethod
    async def prepared(cls, server: KubeApiClient) -> Self:
        """Return a server's cluster, with everything that its pods need."""
        cluster = cls(server)
        await cluster.prepare()
        return cluster

    @override
    async def send(self, method: str, path: str, body: object, *, content_type: str) -> Any:
        status, found = await asyncio.to_thread(
            self._server.request, method, path, body, content_type=content_type
        )
        assert status < 400, found
        return found

    @classmethod
    async def installed(cls, server: KubeApiClient) -> Self:
        """Return the cluster for a podwatch with only the permissions of the rendered manifests."""
        account = {"namespace": "gpuledger", "name": "gpuledger-podwatch"}

        def grant() -> Path:
            kubeconfig = server.service_account_kubeconfig(**account)
            (found,) = render().of_kind("ClusterRole")
            bind(server, found, account)
            return kubeconfig

        cluster = cls(server, kubeconfig=await asyncio.to_thread(grant))
        await cluster.prepare()
        return cluster

    @override
    async def delete(self, kind: ObjectKind[Any], name: str) -> None:
        """Delete an object and a namespace's content, as a controller would; none runs here."""
        await super().delete(kind, name)
        if kind is NAMESPACE:
            path = f"{kind.path}/{self.named(name)}"
            found = await self.send("GET", path, None, content_type="application/json")
            body = {**found, "spec": {"finalizers": []}}
            await self.send("PUT", f"{path}/finalize", body, content_type="application/json")

    @override
    async def force_expired(self) -> None:
        await asyncio.to_thread(self._owned().forget_history)

    @override
    async def restart(self) -> None:
        await asyncio.to_thread(self._owned().stop_server)
        await asyncio.to_thread(self._owned().start)

    def _owned(self) -> KubeApi:
        assert isinstance(self._server, KubeApi)
        return self._server


def bind(server: KubeApiClient, role: dict[str, Any], account: Mapping[str, str]) -> None:
    """Create a role, and grant it to an account."""
    name, group = role["metadata"]["name"], "rbac.authorization.k8s.io"
    server.apply(role)
    server.apply(
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", **account}],
        }
    )


class TestPodwatchAgainstARealApiServer(PodwatchContract):
    @pytest.fixture
    async def cluster(
        self, kube_api: KubeApiClient, helm: Helm
    ) -> Cluster:  # without it nothing renders
        return await RealCluster.installed(kube_api)

    @pytest.fixture
    async def own_cluster(
        self,
        start_kube_api: Callable[[], KubeApi],
        helm: Helm,  # without it nothing renders
    ) -> Cluster:
        return await RealCluster.installed(start_kube_api())

    async def test_the_server_sends_only_metadata_of_namespaces(self, cluster: Cluster) -> None:
        kind = NAMESPACE
        await cluster.create(kind, "one")
        settings = KubernetesSettings(kubeconfig=str(cluster.kubeconfig))
        seconds = {"idle_timeout_seconds": 10.0, "total_seconds": 10.0}
        async with open_api(settings) as api:
            for as_list in (True, False):
                query = {} if as_list else {"watch": "true", "timeoutSeconds": "1"}
                accept = kind.accept(as_list=as_list)
                async with api.get(kind.path, query=query, accept=accept, **seconds) as answer:
                    body = await answer.read(max_bytes=2**20)
                assert cluster.named("one").encode() in body
                assert (b"PartialObjectMetadata" in body, b'"spec"' in body) == (True, False)


async def test_without_a_role_the_server_rejects_requests_and_podwatch_continues_once_it_has_one(
    kube_api: KubeApiClient,
) -> None:
    account = {"namespace": "podwatch-account", "name": "podwatch"}
    kubeconfig = await asyncio.to_thread(lambda: kube_api.service_account_kubeconfig(**account))
    cluster = RealCluster(kube_api, kubeconfig=kubeconfig)
    async with following(cluster) as found:
        await found.until(lambda: any(isinstance(step, Interrupted) for step in found.steps))
        refused = next(step.error for step in found.steps if isinstance(step, Interrupted))
        assert refused.status == 403
        assert 'cannot list resource "pods"' in str(refused)
        assert str(refused).endswith(
            "grant its account get, list and watch on pods, nodes and namespaces in a ClusterRole"
        )
        await asyncio.to_thread(bind, kube_api, ROLE, account)
        await found.until(lambda: Phase.WATCHING in found.steps)
