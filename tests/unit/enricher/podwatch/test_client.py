"""Configuration of the API server as kubernetes_asyncio reads it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from enricher.podwatch.api import Api, KubernetesError, open_api
from enricher.podwatch.client import Client, _load
from enricher.podwatch.http import answered, limits
from enricher.podwatch.settings import KubernetesSettings
from gpuledger.errors import UserError
from tests.unit.enricher.podwatch.given import DEADLINE_SECONDS, write_kubeconfig
from tests.unit.enricher.podwatch.misbehaving import (
    MisbehavingServer,
    bookmark,
    events,
    halves,
    misbehaving_server,
    page,
    status,
)

NO_CURRENT_CONTEXT = "apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n"


@pytest.fixture
async def server() -> AsyncIterator[MisbehavingServer]:
    async with misbehaving_server() as server:
        yield server


@pytest.mark.parametrize("content", [None, "", "[", "just text", NO_CURRENT_CONTEXT])
async def test_a_kubeconfig_that_cannot_be_used_is_its_users_business(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=r"check the file kubernetes\.kubeconfig names"):
        async with open_api(KubernetesSettings(kubeconfig=str(file))):
            pass


@pytest.mark.parametrize(("passed_seconds", "token"), [(59.0, "first"), (60.0, "second")])
async def test_a_token_is_read_again_after_a_minute(
    server: MisbehavingServer, tmp_path: Path, passed_seconds: float, token: str
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    settings = KubernetesSettings(kubeconfig=str(file))
    now = 1000.0
    client = Client(settings=settings, configuration=await _load(settings), monotonic=lambda: now)
    write_kubeconfig(file, url=server.url, token="second")
    now += passed_seconds
    await _list(client)
    await client.close()
    assert server.tokens == [f"Bearer {token}"]


async def test_a_kubeconfig_that_breaks_later_is_an_interruption_and_not_the_end(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    server.lists += [status(401)]
    async with open_api(KubernetesSettings(kubeconfig=str(file))) as api:
        with pytest.raises(KubernetesError, match="401"):
            await _list(api)
        file.write_text("[")
        with pytest.raises(KubernetesError, match="cannot be read"):
            await _list(api)
        write_kubeconfig(file, url=server.url, token="second")
        await _list(api)
    assert server.tokens == ["Bearer first", "Bearer second"]


async def test_a_refused_request_leaves_a_watch_that_is_open_its_connection(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    go_on = asyncio.Event()
    server.watches.append(halves(bookmark("1"), bookmark("2"), go_on=go_on))
    server.lists += [status(401), page(), page()]
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        open_api(KubernetesSettings(kubeconfig=str(file))) as api,
        api.get(
            "/api/v1/pods", query={"watch": "true"}, silence_seconds=60.0, total_seconds=60.0
        ) as watch,
        aclosing(watch.chunks()) as chunks,
    ):
        assert b'"1"' in await anext(chunks)
        with pytest.raises(KubernetesError, match="401"):
            await _list(api)
        await _list(api)
        go_on.set()
        assert b'"2"' in await anext(chunks)


async def test_a_late_refusal_of_a_replaced_token_says_nothing_of_the_new_one(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    asked, refuse = asyncio.Event(), asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        asked.set()
        await refuse.wait()
        return await status(401)(request)

    server.lists += [late, status(401)]
    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        open_api(KubernetesSettings(kubeconfig=str(file))) as api,
    ):
        slow = asyncio.ensure_future(_list(api))
        await asked.wait()
        with pytest.raises(KubernetesError, match="401"):
            await _list(api)
        write_kubeconfig(file, url=server.url, token="second")
        await _list(api)
        refuse.set()
        with pytest.raises(KubernetesError, match="401"):
            await slow
        # It would be read where the new one were taken for refused.
        write_kubeconfig(file, url=server.url, token="third")
        await _list(api)
    assert server.tokens == [f"Bearer {token}" for token in ("first", "first", "second", "second")]


async def test_a_reader_whose_session_was_closed_is_told_after_the_longest_silence(
    server: MisbehavingServer,
) -> None:
    """aiohttp forgets its own time-outs with the connection."""
    server.watches.append(events(bookmark("1"), keep=True))
    patience = limits(connect_seconds=5.0, silence_seconds=0.2, total_seconds=60.0)
    async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
        request = session.get(f"{server.url}/api/v1/pods?watch=true", timeout=patience)
        async with answered(request, server=server.url, patience=patience) as watch:
            chunks = watch.chunks()
            await anext(chunks)
            waiting = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)
            await session.close()
            with pytest.raises(KubernetesError, match="silent for too long"):
                await waiting
            with pytest.raises(KubernetesError, match="closed"):
                await anext(watch.chunks())


async def _list(api: Api) -> bytes:
    async with api.get("/api/v1/pods", query={}, silence_seconds=5.0, total_seconds=5.0) as answer:
        return await answer.read(most_bytes=10_000)
