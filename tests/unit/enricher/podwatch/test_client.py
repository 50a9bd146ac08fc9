"""Configuration of the API server as kubernetes_asyncio reads it."""

import asyncio
import shutil
import ssl
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from gpuledger.errors import UserError
from gpuledger.runtime.readiness import Check, CheckSeverity, Readiness
from gpuledger_enricher.podwatch.api import (
    Api,
    KubernetesError,
    SilentError,
    answered,
    limits,
    open_api,
)
from gpuledger_enricher.podwatch.client import Client
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.errors import has_words
from tests.fakes.seconds import Seconds
from tests.hanging import HANG_SECONDS
from tests.real.services.certificates import Authority, KeyPair
from tests.real.services.kubeconfig import Cluster, Login
from tests.real.services.kubeconfig import write_kubeconfig as write_tls_kubeconfig
from tests.unit.enricher.podwatch.builders import write_kubeconfig
from tests.unit.enricher.podwatch.misbehaving import (
    MisbehavingServer,
    bookmark,
    events,
    halves,
    page,
    refused,
    serving,
    status,
)

NO_CURRENT_CONTEXT = "apiVersion: v1\nkind: Config\nclusters: []\ncontexts: []\nusers: []\n"


@pytest.mark.parametrize("content", [None, "", "[", "just text", NO_CURRENT_CONTEXT])
async def test_a_kubeconfig_that_cannot_be_used_is_its_users_business(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, check=has_words("kubernetes.kubeconfig")):
        async with open_api(KubernetesSettings(kubeconfig=str(file))):
            pass


@pytest.mark.parametrize(("passed_seconds", "token"), [(59.0, "first"), (60.0, "second")])
async def test_a_token_in_a_file_that_a_kubeconfig_names_is_read_again_after_a_minute(
    server: MisbehavingServer, tmp_path: Path, passed_seconds: float, token: str
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="")
    token_file = tmp_path / "token"
    token_file.write_text("first")
    file.write_text(file.read_text().replace("token: ''", f"tokenFile: {token_file}"))
    settings = KubernetesSettings(kubeconfig=str(file))
    clock = Seconds()
    client = await Client.open(settings, check=Check(), monotonic=clock)
    token_file.write_text("second")
    clock.advance(passed_seconds)
    await _list(client)
    await client.close()
    assert server.tokens == [f"Bearer {token}"]


async def test_a_changed_kubeconfig_counts_from_the_next_request_on(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file, clock = (
        write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first"),
        Seconds(),
    )
    client = await Client.open(_named(file), check=Check(), monotonic=clock)
    await _list(client)
    write_kubeconfig(file, url=server.url, token="second")
    clock.advance(1.0)
    await _list(client)
    await client.close()
    assert server.tokens == ["Bearer first", "Bearer second"]


async def test_a_kubeconfig_that_breaks_later_leaves_the_former_in_force_and_is_told_once(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file, clock = (
        write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first"),
        Seconds(),
    )
    check = Readiness().check("credentials", severity=CheckSeverity.WARNING)
    client = await Client.open(_named(file), check=check, monotonic=clock)
    with capture_logs() as lines:
        for broken in ("[", NO_CURRENT_CONTEXT, "["):
            file.write_text(broken)
            clock.advance(1.0)
            await _list(client)
            assert not check.is_ok
        assert "the former credentials stay in force" in check.detail
        write_kubeconfig(file, url=server.url, token="second")
        await _list(client)
    await client.close()
    assert check.is_ok
    assert server.tokens == [*["Bearer first"] * 3, "Bearer second"]
    assert [line["event"] for line in lines] == ["check_failed", "check_recovered"]


async def test_a_refused_token_is_read_again_until_it_can_be(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    server.lists += [status(401), status(401)]
    async with open_api(_named(file)) as api:
        with refused(401):
            await _list(api)
        file.write_text("[")
        with refused(401):
            await _list(api)
        write_kubeconfig(file, url=server.url, token="second")
        await _list(api)
    assert server.tokens == ["Bearer first", "Bearer first", "Bearer second"]


async def test_the_authority_and_the_certificate_of_their_files_are_those_of_the_next_connection(
    tmp_path: Path,
) -> None:
    """Nothing is refused by a 401 where the server's certificate is not trusted."""
    clock, mounted, file = Seconds(), tmp_path / "mounted", tmp_path / "kubeconfig"
    mounted.mkdir()
    client: Client | None = None
    for name in ("first", "second"):
        authority = Authority(folder=tmp_path / name)
        app = web.Application()
        app.router.add_get("/api/v1/pods", page())
        _mount(authority, mounted)
        async with serving(app, context=_asking_for_certificates(authority)) as url:
            _name_files(file, mounted, url=url)
            if client is None:
                client = await Client.open(_named(file), check=Check(), monotonic=clock)
            clock.advance(1.0)
            await _list(client)
    assert client is not None
    await client.close()


@pytest.mark.parametrize("damaged", ["ca.pem", "client.pem", "client-key.pem"])
async def test_damaged_certificates_are_its_users_business_at_the_start_and_a_check_later(
    tmp_path: Path, damaged: str
) -> None:
    authority, clock, mounted = Authority(folder=tmp_path / "ca"), Seconds(), tmp_path / "mounted"
    mounted.mkdir()
    _mount(authority, mounted)
    app = web.Application()
    app.router.add_get("/api/v1/pods", page())
    async with serving(app, context=_asking_for_certificates(authority)) as url:
        file = _name_files(tmp_path / "kubeconfig", mounted, url=url)
        check = Check()
        client = await Client.open(_named(file), check=check, monotonic=clock)
        (mounted / damaged).write_text("damaged")
        clock.advance(1.0)
        await _list(client)
        assert check.has_failed
        with pytest.raises(UserError, check=has_words("certificate", "kubernetes.kubeconfig")):
            async with open_api(_named(file)):
                pass
        _mount(authority, mounted)
        await _list(client)
        assert check.is_ok
        await client.close()


async def test_a_refused_request_leaves_a_watch_that_is_open_its_connection(
    server: MisbehavingServer, tmp_path: Path
) -> None:
    file = write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="first")
    go_on = asyncio.Event()
    server.watches.append(halves(bookmark("1"), bookmark("2"), go_on=go_on))
    server.lists += [status(401), page(), page()]
    async with (
        asyncio.timeout(HANG_SECONDS),
        open_api(KubernetesSettings(kubeconfig=str(file))) as api,
        api.get(
            "/api/v1/pods", query={"watch": "true"}, idle_timeout_seconds=60.0, total_seconds=60.0
        ) as watch,
        aclosing(watch.chunks()) as chunks,
    ):
        assert b'"1"' in await anext(chunks)
        with refused(401):
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
        asyncio.timeout(HANG_SECONDS),
        open_api(KubernetesSettings(kubeconfig=str(file))) as api,
    ):
        slow = asyncio.ensure_future(_list(api))
        await asked.wait()
        with refused(401):
            await _list(api)
        write_kubeconfig(file, url=server.url, token="second")
        await _list(api)
        refuse.set()
        with refused(401):
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
    timeout = limits(connect_seconds=5.0, idle_timeout_seconds=0.2, total_seconds=60.0)
    async with asyncio.timeout(HANG_SECONDS), aiohttp.ClientSession() as session:
        request = session.get(f"{server.url}/api/v1/pods?watch=true", timeout=timeout)
        async with answered(request, server=server.url, time_limits=timeout) as watch:
            chunks = watch.chunks()
            await anext(chunks)
            waiting = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0)
            await session.close()
            with pytest.raises(SilentError):
                await waiting
            with pytest.raises(KubernetesError):
                await anext(watch.chunks())


def _named(file: Path) -> KubernetesSettings:
    return KubernetesSettings(kubeconfig=str(file))


def _mount(authority: Authority, folder: Path) -> None:
    """Put an authority and a client's certificate of it where the kubeconfig has them."""
    pair = authority.issue("client")
    shutil.copy(authority.certificate, folder / "ca.pem")
    shutil.copy(pair.certificate, folder / "client.pem")
    shutil.copy(pair.key, folder / "client-key.pem")


def _asking_for_certificates(authority: Authority) -> ssl.SSLContext:
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
