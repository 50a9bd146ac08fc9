"""An API server without credentials is queried without the Kubernetes client library."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping

import pytest

from gpuledger_enricher.podwatch.api import Api, KubernetesError, SilentError
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import encoded, pod
from tests.unit.enricher.podwatch.misbehaving import (
    MisbehavingServer,
    event,
    events,
    page,
    silence,
    status,
)

WATCH = {"watch": "true"}


@pytest.fixture
async def api(server: MisbehavingServer) -> AsyncIterator[Api]:
    # People often end this setting with a slash.
    async with open_api(KubernetesSettings(url=f"{server.url}/")) as api:
        yield api


async def read(
    api: Api, query: Mapping[str, str] | None = None, *, idle_timeout_seconds: float = 60.0
) -> bytes:
    async with (
        asyncio.timeout(HANG_SECONDS),
        api.get(
            "/api/v1/pods",
            query=query or {},
            idle_timeout_seconds=idle_timeout_seconds,
            total_seconds=60.0,
        ) as answer,
    ):
        return b"".join([chunk async for chunk in answer.chunks()])


async def test_response_bodies_are_returned_unchanged(server: MisbehavingServer, api: Api) -> None:
    line = event("ADDED", pod())
    server.watches += [events(line)]
    assert await read(api, WATCH) == encoded(line) + b"\n"
    assert server.tokens == [""]


@pytest.mark.parametrize("code", [400, 403, 410, 500])
async def test_a_refusal_is_an_error_with_its_status(
    server: MisbehavingServer, api: Api, code: int
) -> None:
    server.lists += [status(code, reason="Because")]
    with pytest.raises(KubernetesError) as caught:
        await read(api)
    assert (caught.value.status, caught.value.reason) == (code, "Because")


async def test_a_timeout_is_an_error(server: MisbehavingServer, api: Api) -> None:
    server.watches += [silence()]
    with pytest.raises(SilentError):
        await read(api, WATCH, idle_timeout_seconds=0.02)


async def test_a_cut_connection_is_an_error(server: MisbehavingServer, api: Api) -> None:
    server.watches += [events(tail=b"half a line", cut=True)]
    with pytest.raises(KubernetesError):
        await read(api, WATCH)


async def test_the_next_request_is_unaffected(server: MisbehavingServer, api: Api) -> None:
    server.lists += [status(500), page(pod())]
    with pytest.raises(KubernetesError):
        await read(api)
    assert b"u1" in await read(api)


def test_an_anonymous_client_does_not_load_the_client_library() -> None:
    program = (
        "import sys, gpuledger_enricher.podwatch.pod_watch, gpuledger_enricher.podwatch.api;"
        "sys.exit('kubernetes_asyncio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
