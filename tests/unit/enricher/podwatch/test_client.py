"""Configuration of the API server as kubernetes_asyncio reads it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from enricher.podwatch.api import Api, KubernetesError, open_api
from enricher.podwatch.client import Client, _load
from enricher.podwatch.settings import KubernetesSettings
from gpuledger.errors import UserError
from tests.unit.enricher.podwatch.given import write_kubeconfig
from tests.unit.enricher.podwatch.misbehaving import MisbehavingServer, misbehaving_server, status

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


async def _list(api: Api) -> bytes:
    async with api.get("/api/v1/pods", query={}, silence_seconds=5.0, total_seconds=5.0) as answer:
        return await answer.read()
