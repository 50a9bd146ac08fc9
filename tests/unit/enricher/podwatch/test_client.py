"""The API server's configuration and credentials as kubernetes_asyncio reads them."""

import asyncio
import json
import shutil
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from gpuledger.errors import UserError
from gpuledger.runtime.readiness import Check
from gpuledger_enricher.podwatch.api import Api, KubernetesError
from gpuledger_enricher.podwatch.client import open_client
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.errors import has_words
from tests.hanging import HANG_SECONDS
from tests.real.services.certificates import Authority, KeyPair
from tests.real.services.kubeconfig import Cluster, Login
from tests.real.services.kubeconfig import write_kubeconfig as write_tls_kubeconfig
from tests.unit.enricher.podwatch.builders import soon, write_kubeconfig
from tests.unit.enricher.podwatch.misbehaving import (
    MisbehavingServer,
    bookmark,
    halves,
    page,
    refused,
    serving,
    status,
)

NO_CURRENT_CONTEXT = "apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n"
SECRET = "tok-hunter2-4711"
SOON_SECONDS = 0.01


def opened(file: Path, *, check: Check | None = None) -> AbstractAsyncContextManager[Api]:
    """Open the API server of a kubeconfig that is reread all the time."""
    return open_client(_named(file), check or Check(), refresh_seconds=SOON_SECONDS)


@pytest.mark.parametrize("content", [None, "", "[", "just text", NO_CURRENT_CONTEXT])
async def test_an_unusable_kubeconfig_is_a_user_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, check=has_words("kubernetes.kubeconfig", str(file))):
        async with open_api(_named(file)):
            pass


def plugin(file: Path, script: str) -> dict[str, object]:
    """Return a user whose token comes from a script next to the kubeconfig."""
    program = file.with_name("plugin")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return {"exec": {"apiVersion": API_VERSION, "command": str(program)}}


API_VERSION = "client.authentication.k8s.io/v1"
CREDENTIAL = {"apiVersion": API_VERSION, "kind": "ExecCredential", "status": {"token": SECRET}}
USERS: dict[str, Callable[[Path], object]] = {
    "a token": lambda _: {"token": f"{SECRET}\n"},
    "a token file": lambda _: {"tokenFile": "token"},
    "a plug-in": lambda file: plugin(file, f"echo '{json.dumps(CREDENTIAL)}'"),
}


def write_user(file: Path, user: object, *, url: str) -> Path:
    """Write a kubeconfig with this user."""
    document = yaml.safe_load(write_kubeconfig(file, url=url, token="").read_text())
    document["users"][0]["user"] = user
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
async def test_the_credentials_of_a_kubeconfig_are_sent(
    server: MisbehavingServer, tmp_path: Path, user: Callable[[Path], object]
) -> None:
    file = tmp_path / "kubeconfig"
    (tmp_path / "token").write_text(f"{SECRET}\n")
    async with open_api(write_user_settings(file, user(file), url=server.url)) as api:
        await _list(api)
    assert server.tokens == [f"Bearer {SECRET}"]


def write_user_settings(file: Path, user: object, *, url: str) -> KubernetesSettings:
    return _named(write_user(file, user, url=url))


async def test_a_changed_kubeconfig_is_used_after_a_while(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    async with asyncio.timeout(HANG_SECONDS), opened(file) as api:
        await _list(api)
        write_kubeconfig(file, url=server.url, token="second")
        while server.tokens[-1] != "Bearer second":
            await _list(api)
    assert set(server.tokens) == {"Bearer first", "Bearer second"}


@pytest.mark.parametrize(
    "broken", ["[", f"current-context: {SECRET}", f"users: [{{name: u, user: {SECRET}}}]"]
)
async def test_a_kubeconfig_that_breaks_later_leaves_the_previous_one_in_use_and_shows_no_secret(
    server: MisbehavingServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    check = Check()
    async with asyncio.timeout(HANG_SECONDS), opened(file, check=check) as api:
        file.write_text(broken)
        await soon(lambda: check.has_failed)
        await _list(api)
        assert "the previous credentials stay in use" in check.detail
        assert "hunter2" not in f"{check.detail} {caplog.text}"
        write_kubeconfig(file, url=server.url, token="second")
        await soon(lambda: check.is_ok)
        await _list(api)
    assert server.tokens == ["Bearer first", "Bearer second"]


async def test_a_plugins_standard_error_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "kubeconfig"
    user = plugin(file, f"echo 'token {SECRET} expired' >&2; exit 3")
    write_user(file, user, url="http://127.0.0.1:9")
    with pytest.raises(UserError) as caught:
        async with opened(file):
            pass
    assert "hunter2" not in f"{caught.value} {caplog.text}"


async def test_a_rejected_token_is_reread_at_once(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    """Not only after a minute."""
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    server.lists += [status(401)]
    async with asyncio.timeout(HANG_SECONDS), open_api(_named(file)) as api:
        write_kubeconfig(file, url=server.url, token="second")
        with refused(401):
            await _list(api)
        while server.tokens[-1] != "Bearer second":
            await _list(api)


async def test_new_connections_use_the_current_ca_and_client_certificates(
    tmp_path: Path,
) -> None:
    """If the server's certificate is not trusted, there is no 401 that could trigger a reload."""
    mounted, file = tmp_path / "mounted", tmp_path / "kubeconfig"
    mounted.mkdir()
    async with asyncio.timeout(HANG_SECONDS), AsyncExitStack() as stack:
        api: Api | None = None
        for name in ("first", "second"):
            authority = Authority(folder=tmp_path / name)
            app = web.Application()
            app.router.add_get("/api/v1/pods", page())
            _mount(authority, mounted)
            async with serving(app, context=_requiring_certificates(authority)) as url:
                _name_files(file, mounted, url=url)
                if api is None:
                    api = await stack.enter_async_context(opened(file))
                while not await _answers(api):  # noqa: ASYNC110  # a server has no event for it
                    await asyncio.sleep(SOON_SECONDS)


async def _answers(api: Api) -> bool:
    try:
        await _list(api)
    except KubernetesError:
        return False
    return True


@pytest.mark.parametrize("damaged", ["ca.pem", "client.pem", "client-key.pem"])
async def test_damaged_certificates_are_a_user_error(tmp_path: Path, damaged: str) -> None:
    authority, mounted = Authority(folder=tmp_path / "ca"), tmp_path / "mounted"
    mounted.mkdir()
    _mount(authority, mounted)
    (mounted / damaged).write_text("damaged")
    file = _name_files(tmp_path / "kubeconfig", mounted, url="https://127.0.0.1:9")
    with pytest.raises(UserError, check=has_words("kubernetes.kubeconfig")):
        async with open_api(_named(file)):
            pass


async def test_new_credentials_do_not_close_an_open_watch(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    go_on = asyncio.Event()
    server.watches.append(halves(bookmark("1"), bookmark("2"), go_on=go_on))
    async with (
        asyncio.timeout(HANG_SECONDS),
        opened(file) as api,
        api.get(
            "/api/v1/pods", query={"watch": "true"}, idle_timeout_seconds=60.0, total_seconds=60.0
        ) as watch,
        aclosing(watch.chunks()) as chunks,
    ):
        assert b'"1"' in await anext(chunks)
        write_kubeconfig(file, url=server.url, token="second")
        while server.tokens[-1] != "Bearer second":
            await _list(api)
        go_on.set()
        assert b'"2"' in await anext(chunks)


def _named(file: Path) -> KubernetesSettings:
    return KubernetesSettings(kubeconfig=str(file))


def _mount(authority: Authority, folder: Path) -> None:
    """Put a CA certificate and a client certificate signed by it where the kubeconfig has them."""
    pair = authority.issue("client")
    shutil.copy(authority.certificate, folder / "ca.pem")
    shutil.copy(pair.certificate, folder / "client.pem")
    shutil.copy(pair.key, folder / "client-key.pem")


def _requiring_certificates(authority: Authority) -> ssl.SSLContext:
    pair = authority.issue("server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.certificate)
    context.load_cert_chain(pair.certificate, pair.key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _name_files(file: Path, mounted: Path, *, url: str) -> Path:
    """Write a kubeconfig that names the mounted files."""
    return write_tls_kubeconfig(
        file,
        cluster=Cluster(url=url, ca_file=mounted / "ca.pem"),
        login=Login(
            pair=KeyPair(certificate=mounted / "client.pem", key=mounted / "client-key.pem")
        ),
    )


async def _list(api: Api) -> bytes:
    async with api.get(
        "/api/v1/pods", query={}, idle_timeout_seconds=5.0, total_seconds=5.0
    ) as answer:
        return await answer.read(max_bytes=10_000)
