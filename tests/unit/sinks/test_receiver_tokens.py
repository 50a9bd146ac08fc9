"""Receivers that require a token of a token endpoint: when it is requested, and what is shown."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from typing_extensions import override

from gpuledger.errors import SettingsError
from gpuledger.settings import Secret
from gpuledger.settings.groups import ClientCredentialsSettings
from gpuledger_sinks.errors import ReceiverUnavailableError
from tests.fakes.http_proxy import proxying
from tests.fakes.token_issuer import CLIENT_SECRET, TokenIssuer, TokenKeys
from tests.real.services.certificates import Authority
from tests.unit.sinks.posting import KINDS, posting, settings_of
from tests.unit.sinks.receiver import Answer, Receiver, receiving

if TYPE_CHECKING:
    from pathlib import Path

FOR_SECONDS = 100.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(folder=tmp_path_factory.mktemp("authority"))


class Opaque(TokenIssuer):
    """Issues tokens without an expiry, each one different."""

    def __init__(self) -> None:
        super().__init__(TokenKeys(), for_seconds=FOR_SECONDS)
        self.number = 0

    @override
    def next_token(self) -> str:
        self.number += 1
        return f"opaque-{self.number}"


def oauth(url: str, authority: Authority, secret: Secret | None = None) -> dict[str, Any]:
    found = ClientCredentialsSettings(
        token_url=url,
        ca_file=authority.certificate,
        client_id="gpuledger",
        client_secret=secret or Secret(CLIENT_SECRET),
        scope="metrics:write",
    )
    return {"oauth": found}


def logins(receiver: Receiver) -> list[str]:
    return [received.headers["Authorization"] for received in receiver.received]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_is_requested_once_and_again_before_it_expires(
    kind: str, authority: Authority
) -> None:
    issuer = Opaque()
    async with (
        issuer.serve(authority) as url,
        receiving() as receiver,
        posting(kind, receiver.url, **oauth(url, authority)) as client,
    ):
        await asyncio.gather(*(client.send() for _ in range(5)))
        client.clock.advance(FOR_SECONDS * 0.7)
        await client.send()
        client.clock.advance(FOR_SECONDS * 0.2)
        await client.send()
    assert logins(receiver) == ["Bearer opaque-1"] * 6 + ["Bearer opaque-2"]
    assert client.token_check.is_ok
    for _, form in issuer.requests:
        assert form == "grant_type=client_credentials&scope=metrics%3Awrite"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_that_is_answered_with_401_is_renewed_once(
    kind: str, authority: Authority
) -> None:
    issuer = Opaque()
    async with (
        issuer.serve(authority) as url,
        receiving() as receiver,
        posting(kind, receiver.url, **oauth(url, authority)) as client,
    ):
        await client.send()
        receiver.login = "Bearer opaque-2"
        await client.send()
        assert client.token_check.is_ok
        receiver.login = "Bearer of-somebody-else"
        for _ in range(20):
            with pytest.raises(ReceiverUnavailableError, match=r"401.*\.oauth"):
                await client.send()
        assert "rejected the credentials: 401" in client.token_check.detail
    assert len(issuer.requests) == 2, "no token is asked for without a pause"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_changed_secret_is_used_for_the_next_token(
    kind: str, authority: Authority, tmp_path: Path
) -> None:
    file, issuer = tmp_path / "secret", Opaque()
    file.write_text("first\n")
    secret = Secret.load(file, name="client_secret")
    async with (
        issuer.serve(authority) as url,
        receiving() as receiver,
        posting(kind, receiver.url, **oauth(url, authority, secret)) as client,
    ):
        await client.send()
        file.write_text("second\n")
        client.clock.advance(FOR_SECONDS)
        await client.send()
        file.write_text("")
        client.clock.advance(FOR_SECONDS)
        await client.send()
        assert f"{kind}.oauth.client_secret: " in client.check.detail
    first, second, third = (headers["authorization"] for headers, _ in issuer.requests)
    assert first != second
    assert second == third, "one that cannot be read leaves the former in force"


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "slow": ({"hangs": True}, "no answer within 0.5 s"),
    "no HTTP": ({"raw": b"\x00\xff no HTTP at all\r\n\r\n"}, "no valid HTTP"),
    "nothing": ({"raw": b""}, "isconnected"),
    "no object": ({"answer": ["no object"]}, 'with a string "access_token"'),
    "no token": ({"answer": {"access_token": "two words"}}, "spaces or other invalid characters"),
    "ended": ({"answer": {"access_token": "x", "expires_in": -1}}, "it expired on"),
    "another kind": ({"answer": {"access_token": "x", "token_type": "mac"}}, "is not Bearer"),
    "refusal": ({"status": 401, "answer": {"error": CLIENT_SECRET}}, r"401: .*oauth\.client_id"),
    "error": ({"status": 500, "answer": {"quoted": CLIENT_SECRET}}, r"500: .*oauth\.token_url"),
    "redirect": ({"status": 302, "answer": {}}, r"302: .*oauth\.token_url"),
    "endless": (
        {"raw": b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 200_000},
        "more than 64 KiB",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("odd", ODD)
async def test_an_endpoint_without_a_token_in_its_response_is_named_and_shows_no_secret(
    kind: str, odd: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    issuer, (set_up, message) = Opaque(), ODD[odd]
    for name, value in set_up.items():
        setattr(issuer, name, value)
    async with (
        issuer.serve(authority) as url,
        receiving() as receiver,
        posting(kind, receiver.url, timeout_seconds=1.0, **oauth(url, authority)) as client,
    ):
        with pytest.raises(ReceiverUnavailableError, match=message) as caught:
            await client.send()
        shown = str(caught.value)
        for _ in range(3):
            with pytest.raises(ReceiverUnavailableError, match=message):
                await client.send()
        assert client.token_check.detail == shown
        issuer.hangs, issuer.raw, issuer.status, issuer.answer = False, None, 200, None
        client.clock.advance(60.0)
        await client.send()
        assert client.token_check.is_ok
    assert f"{kind}.oauth.token_url {url}: " in shown
    assert CLIENT_SECRET not in f"{shown} {caplog.text} {client.credentials.current()}"
    assert len(issuer.requests) == 2, "nobody asks again within the pause"
    assert len(receiver.received) == 1, "nothing is sent without a token"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unavailable_or_untrusted_endpoint_is_named(
    kind: str, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(folder=tmp_path)
    async with receiving() as receiver:
        away = oauth("https://127.0.0.1:1/token", authority)
        async with posting(kind, receiver.url, **away) as client:
            with pytest.raises(ReceiverUnavailableError, match=rf"{kind}\.oauth\.token_url .*:1/"):
                await client.send()
        async with (
            Opaque().serve(other) as url,
            posting(kind, receiver.url, **oauth(url, authority)) as client,
        ):
            with pytest.raises(ReceiverUnavailableError, match=rf"check {kind}\.oauth\.ca_file"):
                await client.send()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_endpoint_is_reached_through_the_proxy_too(
    kind: str, authority: Authority
) -> None:
    issuer, host = Opaque(), "issuer.test"
    async with (
        issuer.serve(authority, host=host) as url,
        proxying(url) as proxy,
        receiving() as receiver,
    ):
        given = {**oauth(f"https://{host}/token", authority), "proxy_url": proxy.url}
        async with posting(kind, receiver.url, **given) as client:
            proxy.raw = b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n"
            with pytest.raises(ReceiverUnavailableError, match=r"407 No; check .*\.proxy_url"):
                await client.send()
            proxy.raw = None
            client.clock.advance(60.0)
            await client.send()
        async with posting(kind, receiver.url, no_proxy=[host], **given) as client:
            with pytest.raises(ReceiverUnavailableError, match=r"issuer\.test"):
                await client.send()
    assert proxy.requests == [f"CONNECT {host}:443 HTTP/1.1"] * 2
    assert logins(receiver) == ["Bearer opaque-1"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [403, 500])
async def test_only_a_401_causes_a_new_token(kind: str, status: int, authority: Authority) -> None:
    issuer = Opaque()
    async with (
        issuer.serve(authority) as url,
        receiving(Answer(status)) as receiver,
        posting(kind, receiver.url, **oauth(url, authority)) as client,
    ):
        with pytest.raises(ReceiverUnavailableError):
            await client.send()
        await client.send()
    assert logins(receiver) == ["Bearer opaque-1"] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "other", [{"username": "u", "password": Secret("p")}, {"bearer_token": Secret("t")}]
)
def test_a_token_endpoint_excludes_another_login(
    kind: str, other: dict[str, Any], authority: Authority
) -> None:
    tokens = oauth("https://issuer.test/token", authority)
    with pytest.raises(ValueError, match=r"oauth and .* mutually exclusive"):
        settings_of(kind, "https://receiver", **other, **tokens)
    with pytest.raises(
        ValueError, match=r"urls?: credentials in the address and oauth are mutually exclusive"
    ):
        settings_of(kind, "https://u:p@receiver", **tokens)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unreadable_authority_of_the_endpoint_is_rejected(
    kind: str, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "ca.pem").write_text("no PEM")
    settings = ClientCredentialsSettings(
        token_url="https://issuer.test/token",
        ca_file=tmp_path / "ca.pem",
        client_id="gpuledger",
        client_secret=Secret(CLIENT_SECRET),
    )
    with pytest.raises(SettingsError, match=rf"{kind}\.oauth\.ca_file: .*is not a PEM file"):
        async with posting(kind, "https://receiver", oauth=settings):
            pass
