"""The doctor's checks over HTTP: components by their own checks, and the receivers of sinks.

A receiver gets a request without samples or alerts from the sink's own client, with the sink's
settings. The request tests the address and the credentials, and stores nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final

import msgspec

from gpuledger.errors import UnavailableError
from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import HttpClient, open_http
from gpuledger.settings.secret import shown_url
from gpuledger.texts import counted
from gpuledger_cli.doctor.verdicts import Verdict, ok, problem, skipped, unknown
from gpuledger_sinks.alerts.receivers import HEADERS, NAME, AlertmanagerClient
from gpuledger_sinks.credentials import watch_credentials
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError
from gpuledger_sinks.remote_write.wire import Version, encode_request
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings

_MAX_BYTES: Final = 1024 * 1024
_RECEIVER_ACTION: Final = (
    "Correct the setting that the finding names. If it names none, check the address, and the"
    " receiver's log and limits."
)


class ReportedCheck(msgspec.Struct, frozen=True):
    """One check in a component's answer."""

    ok: bool
    detail: str = ""
    severity: str = ""


class Report(msgspec.Struct, frozen=True):
    """A component's answer on `/readyz`."""

    ready: bool
    checks: dict[str, ReportedCheck]


async def check_components(http: HttpClient, urls: Sequence[str]) -> list[Verdict]:
    """Read the checks of each component."""
    if not urls:
        return [
            skipped(
                "no component is named",
                "Add the address of each component, such as http://HOST:9822.",
            )
        ]
    results = await asyncio.gather(*(_check_component(http, url) for url in urls))
    return [verdict for verdicts in results for verdict in verdicts]


async def _check_component(http: HttpClient, url: str) -> list[Verdict]:
    shown = shown_url(url)
    try:
        status, body = await http.get(f"{url.rstrip('/')}/readyz", max_bytes=_MAX_BYTES)
    except UnavailableError as error:
        return [problem(str(error), "Start the component, or correct the address.")]
    try:
        report = msgspec.json.decode(body, type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [unknown(f"{shown}: status {status}, without the checks of a gpuledger component")]
    failed = [
        problem(
            f"{shown}: check {name} ({check.severity}): {check.detail or 'failed'}",
            f"Follow the action of `{name}` in docs/reference/checks.md.",
        )
        for name, check in report.checks.items()
        if not check.ok
    ]
    if not failed and status != HTTPStatus.OK:
        return [unknown(f"{shown}: status {status} without a failed check")]
    return failed or [ok(f"{shown}: {counted(len(report.checks), 'check')} passed")]


class _NoSamples:
    """A write request without samples, which every receiver accepts."""

    samples = 0

    def encode(self, version: Version) -> bytes:
        return encode_request(version, ())


async def check_remote_write(settings: RemoteWriteSettings, *, seconds: float) -> list[Verdict]:
    """Send a write request without samples, with the sink's client."""
    async with open_client(settings) as client:
        send = partial(client.write, _NoSamples(), attempt=0)
        return [await _judge_receiver(settings.url, send, seconds=seconds)]


async def check_alertmanagers(settings: AlertsSettings, *, seconds: float) -> list[Verdict]:
    """Post an empty list of alerts to each Alertmanager, with the sink's client."""
    credentials = watch_credentials(settings, section=NAME, readiness=Readiness())
    async with open_http(
        headers={**settings.headers, **HEADERS}, timeout_seconds=settings.timeout_seconds
    ) as http:
        clients = [
            AlertmanagerClient(http=http, url=url, credentials=credentials) for url in settings.urls
        ]
        return await asyncio.gather(
            *(
                _judge_receiver(client.url, partial(client.post, ()), seconds=seconds)
                for client in clients
            )
        )


async def _judge_receiver(
    url: str, send: Callable[[], Awaitable[object]], *, seconds: float
) -> Verdict:
    try:
        async with asyncio.timeout(seconds):
            await send()
    except TimeoutError:
        return problem(f"{shown_url(url)}: no answer within {seconds:g} s", _RECEIVER_ACTION)
    except (ReceiverUnavailableError, RejectedError) as error:
        return problem(str(error), _RECEIVER_ACTION)
    return ok(f"{shown_url(url)} accepts requests")
