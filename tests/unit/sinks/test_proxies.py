"""Receivers behind a proxy: the path of a request, and the error if it fails."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.settings import Secret
from gpuledger_sinks.errors import ReceiverUnavailableError
from tests.fakes.http_proxy import HttpProxy, proxying
from tests.real.services.certificates import Authority
from tests.unit.sinks.posting import KINDS, posting, serving, settings_of
from tests.unit.sinks.receiver import Receiver, receiving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "receiver.test"
"""A host that only the proxy can resolve."""
SECRET = "hunter2-of-the-proxy"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(folder=tmp_path_factory.mktemp("authority"))


@asynccontextmanager
async def behind_proxy(
    scheme: str, authority: Authority, *, login: str = "", proxy_scheme: str = "http"
) -> AsyncIterator[tuple[Receiver, HttpProxy, dict[str, Any]]]:
    """Serve a receiver and its proxy; yield both and the settings for them."""
    context = serving(authority, HOST) if scheme == "https" else None
    at_proxy = serving(authority) if proxy_scheme == "https" else None
    async with (
        receiving(context=context) as receiver,
        proxying(receiver.url, login=login, context=at_proxy) as proxy,
    ):
        settings = {"proxy_url": proxy.url, "ca_file": str(authority.certificate)}
        yield receiver, proxy, settings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("proxy_scheme", ["http", "https"])
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_receiver_is_reached_through_the_proxy_which_resolves_its_name(
    kind: str, scheme: str, proxy_scheme: str, authority: Authority
) -> None:
    async with (
        behind_proxy(scheme, authority, proxy_scheme=proxy_scheme) as (receiver, proxy, settings),
        posting(kind, f"{scheme}://{HOST}:9999/api", **settings) as client,
    ):
        await client.send()
        await client.send()
    assert len(receiver.received) == 2
    assert f"{HOST}:9999" in proxy.requests[0]
    assert proxy.requests[0].startswith("CONNECT") == (scheme == "https")
    assert len(proxy.requests) == 1 or scheme == "http", "the tunnel is kept"
    assert proxy.logins[0] == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_login_at_the_proxy_is_the_current_one_of_its_file_and_goes_only_to_the_proxy(
    kind: str, scheme: str, authority: Authority, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{SECRET}-wrong\n")
    login: dict[str, Any] = {
        "proxy_username": "sündik",
        "proxy_password": Secret.load(file, name="proxy_password"),
    }
    async with (
        behind_proxy(scheme, authority, login=f"sündik:{SECRET}") as (receiver, _, settings),
        posting(kind, f"{scheme}://{HOST}/api", **settings, **login) as client,
    ):
        with pytest.raises(ReceiverUnavailableError, match=r"407.*; check .*proxy_username") as no:
            await client.send()
        file.write_text(f"{SECRET}\n")
        client.clock.advance(1.0)
        await client.send()
        shown = f"{no.value} {client.credentials.current()}"
    assert f"{kind}.proxy_username and .proxy_password" in shown
    assert SECRET not in shown
    (received,) = receiver.received
    # A proxy removes it from a plain request; this one does not.
    assert scheme == "http" or "Proxy-Authorization" not in received.headers


REFUSALS = {
    "502": (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", "502"),
    "403 that quotes the login": (
        f"HTTP/1.1 403 Not {SECRET}\r\nContent-Length: 0\r\n\r\n".encode(),
        "403",
    ),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no valid HTTP"),
    "nothing": (b"", "isconnected"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_proxy_that_rejects_requests_is_named_by_its_setting_and_shows_no_secret(
    kind: str, refusal: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    raw, message = REFUSALS[refusal]
    login: dict[str, Any] = {"proxy_username": "me", "proxy_password": Secret(SECRET)}
    async with (
        behind_proxy("https", authority) as (_, proxy, settings),
        posting(kind, f"https://{HOST}", **settings, **login) as client,
    ):
        proxy.raw = raw
        with pytest.raises(ReceiverUnavailableError, match=message) as caught:
            await client.send()
        proxy.raw = None
        await client.send()
    assert f"{kind}.proxy_url {proxy.url}" in str(caught.value)
    assert SECRET not in f"{caught.value} {caplog.text}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "proxy_url", ["http://127.0.0.1:1", "http://no-such-host.invalid:3128", "https://127.0.0.1:1"]
)
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_an_unavailable_proxy_is_named_by_its_setting(
    kind: str, proxy_url: str, scheme: str
) -> None:
    async with posting(kind, f"{scheme}://{HOST}/api", proxy_url=proxy_url) as client:
        with pytest.raises(ReceiverUnavailableError, match="check ") as caught:
            await client.send()
    assert f"check {kind}.proxy_url {proxy_url}" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_proxy_that_hangs_ends_the_request_within_the_timeout(
    kind: str, authority: Authority
) -> None:
    async with (
        behind_proxy("https", authority) as (_, proxy, settings),
        posting(kind, f"https://{HOST}", timeout_seconds=0.5, **settings) as client,
    ):
        proxy.hangs = True
        async with asyncio.timeout(120):
            with pytest.raises(ReceiverUnavailableError, match=r"not done in time.*proxy_url"):
                await client.send()


@pytest.mark.parametrize("kind", KINDS)
async def test_hosts_without_a_proxy_and_this_machine_are_reached_directly(
    kind: str, authority: Authority
) -> None:
    async with behind_proxy("http", authority) as (receiver, proxy, settings):
        async with posting(kind, receiver.url, **settings) as client:
            await client.send()
        by_name = receiver.url.replace("127.0.0.1", "localhost")
        async with posting(kind, by_name, no_proxy=["localhost"], **settings) as client:
            await client.send()
    assert not proxy.requests
    assert len(receiver.received) == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_proxy_variables_of_the_environment_are_ignored(
    kind: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with behind_proxy("http", authority) as (_, proxy, _settings):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        async with posting(kind, "http://receiver.invalid") as client:
            with pytest.raises(ReceiverUnavailableError, match=r"receiver\.invalid"):
                await client.send()
    assert not proxy.requests


PROXY = {"proxy_url": "http://proxy:3128"}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "login": ({"proxy_url": f"http://me:{SECRET}@proxy"}, "proxy_url: .*proxy_password_file"),
    "user": ({"proxy_url": "http://me@proxy"}, "proxy_url: .*proxy_username"),
    "scheme": ({"proxy_url": "proxy:3128"}, "proxy_url: .*must begin with http"),
    "socks": ({"proxy_url": "socks5://proxy"}, "proxy_url: .*must begin with http"),
    "path": ({"proxy_url": "http://proxy/path"}, "proxy_url: .*give scheme, host and port"),
    "port": ({"proxy_url": "http://proxy:x"}, "proxy_url: .*port"),
    "only a user": ({**PROXY, "proxy_username": "me"}, "proxy_username and proxy_password belong"),
    "only a password": ({**PROXY, "proxy_password": Secret(SECRET)}, "proxy_username and proxy_p"),
    "colon": (
        {**PROXY, "proxy_username": "a:b", "proxy_password": Secret(SECRET)},
        "proxy_username: must not contain a colon",
    ),
    "no proxy": ({"no_proxy": ["a"]}, "no_proxy: requires proxy_url"),
    "no entry": ({**PROXY, "no_proxy": ["a", "http://b/"]}, "network: 'http://b/'; expected"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_proxy_is_rejected_by_its_field(kind: str, mistake: str) -> None:
    given, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as caught:
        settings_of(kind, "http://receiver", **given)
    assert SECRET not in str(caught.value)
