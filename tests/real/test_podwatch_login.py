"""podwatch with a token that a real API server rejects for a while, as after a wrong rotation."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
import pytest

from gpuledger.runtime.readiness import Check
from gpuledger_enricher.podwatch.api import Api, KubernetesError
from gpuledger_enricher.podwatch.client import open_client
from gpuledger_enricher.podwatch.events import split_lines
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.podwatch_cluster import following, published
from tests.real.services.kube_client import KubeApiClient
from tests.real.services.kubernetes import KubeApi
from tests.real.test_podwatch import RealCluster, bind
from tests.real.test_podwatch_stream import role

PODS = 20
DEADLINE_SECONDS = 120.0


async def list_pods(api: Api, cluster: RealCluster) -> bytes:
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    async with api.get(path, query={}, idle_timeout_seconds=10.0, total_seconds=10.0) as answer:
        return await answer.read(max_bytes=2**20)


async def until_answered(api: Api, cluster: RealCluster, *, status: int) -> None:
    """List pods until the response has this status."""
    found = 0
    async with asyncio.timeout(DEADLINE_SECONDS):
        while found != status:
            try:
                await list_pods(api, cluster)
                found = 200
            except KubernetesError as error:
                found = error.status or 0
            await asyncio.sleep(0.05)


async def until_named(lines: AsyncGenerator[bytes], name: str) -> None:
    """Read a watch up to the event of a pod."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        async for line in lines:
            if msgspec.json.decode(line)["object"]["metadata"].get("name") == name:
                return


@pytest.mark.parametrize("refusals", [1, 3])
async def test_a_rejected_token_does_not_interrupt_an_open_watch(
    kube_api: KubeApiClient, refusals: int
) -> None:
    """The same service account renews its Lease with other requests; only those are rejected."""
    account = {"namespace": "podwatch-login", "name": f"refused-{refusals}"}
    kubeconfig = await asyncio.to_thread(lambda: kube_api.service_account_kubeconfig(**account))
    await asyncio.to_thread(bind, kube_api, role(without=""), account)
    cluster = await RealCluster.prepared(kube_api)
    good = kubeconfig.read_text()
    settings = KubernetesSettings(kubeconfig=str(kubeconfig))
    path = f"/api/v1/namespaces/{cluster.namespace}/pods"
    async with (
        open_client(settings, Check(), refresh_seconds=0.1) as client,
        client.get(
            path, query={"watch": "true"}, idle_timeout_seconds=60.0, total_seconds=60.0
        ) as watch,
        aclosing(split_lines(watch.chunks())) as lines,
    ):
        await cluster.create_pod("before")
        await until_named(lines, "before")
        kubeconfig.write_text(with_token(good, "no-token"))
        for _ in range(refusals):
            await until_answered(client, cluster, status=401)
        kubeconfig.write_text(good)
        await until_answered(client, cluster, status=200)
        for number in range(PODS):
            await cluster.create_pod(f"after-{number}")
        await until_named(lines, f"after-{PODS - 1}")


async def test_podwatch_continues_when_ca_and_certificates_are_replaced(
    start_kube_api: Callable[[], KubeApi],
) -> None:
    """There is no 401 then: a client that trusts the old authority sends no request."""
    server = await asyncio.to_thread(start_kube_api)
    cluster = await RealCluster.prepared(server)
    before = await cluster.create_pod("before")
    async with following(cluster) as found:
        await found.until(lambda: published(found.steps) == {before: "alive"})
        await asyncio.to_thread(server.exchange_certificates)
        after = await cluster.create_pod("after")
        await found.until(lambda: published(found.steps) == {before: "alive", after: "alive"})


def with_token(kubeconfig: str, token: str) -> str:
    """Return a kubeconfig with another token in it."""
    lines = kubeconfig.splitlines()
    return "\n".join(
        f"{line.split('token:')[0]}token: {token}" if "token:" in line else line for line in lines
    )
