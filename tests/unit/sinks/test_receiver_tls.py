"""How a receiver's certificate and TLS version are checked against the settings."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger_sinks.errors import ReceiverUnavailableError
from tests.real.services.certificates import Authority
from tests.unit.sinks.posting import KINDS, posting, serving, settings_of
from tests.unit.sinks.receiver import receiving

if TYPE_CHECKING:
    from pathlib import Path

NAME = "receiver.internal"


@pytest.mark.parametrize("kind", KINDS)
async def test_the_certificate_must_have_the_configured_server_name_which_is_sent_as_sni(
    kind: str, tmp_path: Path
) -> None:
    authority, requested = Authority(folder=tmp_path), list[str | None]()
    context = serving(authority, NAME)
    context.sni_callback = lambda _socket, name, _context: requested.append(name)
    trusted = str(authority.certificate)
    async with receiving(context=context) as receiver:
        async with posting(kind, receiver.url, ca_file=trusted, server_name=NAME) as client:
            await client.send()
        assert requested == [NAME]
        others: list[dict[str, Any]] = [{}, {"server_name": "other.internal"}]
        for other in others:
            async with posting(kind, receiver.url, ca_file=trusted, **other) as client:
                with pytest.raises(ReceiverUnavailableError, match=r"certificate"):
                    await client.send()
    assert len(receiver.received) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("spoken", "least", "is_taken"),
    [
        (ssl.TLSVersion.TLSv1_3, "1.3", True),
        (ssl.TLSVersion.TLSv1_3, "1.2", True),
        (ssl.TLSVersion.TLSv1_2, "1.2", True),
        (ssl.TLSVersion.TLSv1_2, "1.3", False),
        (ssl.TLSVersion.TLSv1_1, "1.2", False),
    ],
)
async def test_no_tls_version_below_the_minimum_is_used(
    kind: str, spoken: ssl.TLSVersion, least: str, *, is_taken: bool, tmp_path: Path
) -> None:
    authority = Authority(folder=tmp_path)
    context = serving(authority)
    if spoken < ssl.TLSVersion.TLSv1_2:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # otherwise OpenSSL itself would not offer it
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = spoken
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = spoken
    else:
        context.minimum_version = context.maximum_version = spoken
    trust: dict[str, Any] = {
        "ca_file": str(authority.certificate),
        "min_tls_version": least,
    }
    async with (
        receiving(context=context) as receiver,
        posting(kind, receiver.url, **trust) as client,
    ):
        if is_taken:
            await client.send()
        else:
            with pytest.raises(ReceiverUnavailableError, match=rf"min_tls_version {least}"):
                await client.send()
    assert len(receiver.received) == is_taken


ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
"""The alert `protocol_version`, which servers send that do not just close the connection."""


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_requires_another_tls_version_is_reported_with_the_setting(
    kind: str,
) -> None:
    async def alert(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(ALERT)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(alert, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with posting(kind, f"https://127.0.0.1:{port}", min_tls_version="1.3") as client:
            with pytest.raises(
                ReceiverUnavailableError, match=r"no TLS version in common; check .*min_tls_version"
            ):
                await client.send()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("url", "name", "message"),
    [
        ("http://receiver", NAME, r"server_name: urls? is not https://"),
        ("https://receiver", "https://receiver", "server_name: .*without a scheme"),
        ("https://receiver", "receiver:443", "server_name: invalid host name"),
        ("https://receiver", "two words", "server_name: invalid host name"),
        ("https://receiver", "ü", "server_name: invalid host name"),
    ],
)
def test_a_server_name_that_no_certificate_can_have_is_rejected_by_its_field(
    kind: str, url: str, name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(kind, url, server_name=name)
