"""Every kind of sink that sends HTTP requests to a receiver, as one that sends an empty request."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from gpuledger.runtime import Check
from gpuledger.runtime.http.client import open_http
from gpuledger_sinks.alerts.receivers import AlertmanagerClient
from gpuledger_sinks.credentials import ReceiverCredentials
from gpuledger_sinks.remote_write.protocol_in_force import ProtocolInForce
from gpuledger_sinks.remote_write.write_client import RemoteWriteClient
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings
from tests.fakes.seconds import Seconds
from tests.unit.sinks.remote_write.messages import RawMessage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.real.services.certificates import Authority

KINDS = ("remote_write", "alerts")


class Posting(NamedTuple):
    """A client of a kind with its parts."""

    send: Callable[[], Awaitable[None]]
    clock: Seconds
    check: Check
    token_check: Check
    credentials: ReceiverCredentials


def settings_of(kind: str, url: str, **given: Any) -> RemoteWriteSettings | AlertsSettings:  # noqa: ANN401  # any settings
    """Return a kind's settings with that address."""
    if kind == "alerts":
        return AlertsSettings(urls=[url], **given)
    return RemoteWriteSettings(url=url, **given)


@asynccontextmanager
async def posting(
    kind: str,
    url: str,
    *,
    timeout_seconds: float = 10.0,
    **given: Any,  # noqa: ANN401  # any settings
) -> AsyncIterator[Posting]:
    """Open a client of a kind that uses a clock which the test moves."""
    clock, check, token_check = Seconds(), Check(), Check()
    settings = settings_of(kind, url, **given)
    credentials = ReceiverCredentials(
        settings,
        section=kind,
        sigv4=settings.sigv4 if isinstance(settings, RemoteWriteSettings) else None,
        check=check,
        token_check=token_check,
        token_deadline_seconds=timeout_seconds / 2,
        monotonic=clock,
        time_seconds=clock,
    )
    async with open_http(headers={}, timeout_seconds=timeout_seconds) as http:
        alertmanager = AlertmanagerClient(http=http, url=url, credentials=credentials)
        receiver = RemoteWriteClient(
            http=http,
            url=url,
            credentials=credentials,
            protocol=ProtocolInForce("1.0", check=Check()),
        )

        async def send() -> None:
            if kind == "alerts":
                await alertmanager.post([])
            else:
                await receiver.write(RawMessage(), attempt=0)

        yield Posting(send, clock, check, token_check, credentials)


def serving(authority: Authority, host: str | None = None) -> ssl.SSLContext:
    """Return the context of a server with a certificate for only one host, or for this machine."""
    pair = authority.issue(host or "server", host=host)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    return context
