"""Writing to the API server, with and without the Kubernetes client library."""

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from aiohttp import web

from gpuledger_enricher.podwatch.api import Api, KubernetesError, Method
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.unit.enricher.podwatch.builders import write_kubeconfig
from tests.unit.enricher.podwatch.lease_shelf import LeaseShelf
from tests.unit.enricher.podwatch.misbehaving import serving, silence, status

LEASES = "/apis/coordination.k8s.io/v1/namespaces/n/leases"


@pytest.fixture
def shelf() -> LeaseShelf:
    return LeaseShelf()


@pytest.fixture(params=["plain", "client"])
async def api(
    shelf: LeaseShelf, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Api]:
    app = web.Application()
    shelf.serve(app)
    async with serving(app) as url, opened(request.param, url, tmp_path) as api:
        yield api


def opened(kind: str, url: str, folder: Path) -> AbstractAsyncContextManager[Api]:
    if kind == "plain":
        return open_api(KubernetesSettings(url=url))
    kubeconfig = write_kubeconfig(folder / "kubeconfig", url=url, token="secret")
    return open_api(KubernetesSettings(kubeconfig=str(kubeconfig)))


async def send(
    api: Api, method: Method, path: str, version: str = "", *, total_seconds: float = 5.0
) -> object:
    body = {"metadata": {"name": "x", "resourceVersion": version}}
    async with api.send(method, path, body=body, total_seconds=total_seconds) as answer:
        found: object = json.loads(await answer.read(max_bytes=10_000))["metadata"]
        return found


async def test_an_object_is_created_and_then_changed(api: Api) -> None:
    assert await send(api, "POST", LEASES) == {"name": "x", "resourceVersion": "101"}
    changed = await send(api, "PUT", f"{LEASES}/x", "101")
    assert changed == {"name": "x", "resourceVersion": "102"}


async def test_a_conflict_is_an_error_with_its_status(api: Api) -> None:
    await send(api, "POST", LEASES)
    for method, path in (("POST", LEASES), ("PUT", f"{LEASES}/x")):
        with pytest.raises(KubernetesError) as caught:
            await send(api, method, path, "7")  # type: ignore[arg-type]  # a tuple loses the literal
        assert caught.value.status == 409


async def test_a_refusal_without_a_known_remedy_is_reported_too(
    api: Api, shelf: LeaseShelf
) -> None:
    shelf.script += [status(403)]
    with pytest.raises(KubernetesError) as caught:
        await send(api, "PUT", f"{LEASES}/x")
    assert caught.value.detail == "the API server answered 403: says 403"


async def test_a_server_that_does_not_answer_times_out(api: Api, shelf: LeaseShelf) -> None:
    shelf.script += [silence()]
    with pytest.raises(KubernetesError):
        await send(api, "PUT", f"{LEASES}/x", total_seconds=0.05)
