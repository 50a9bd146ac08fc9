"""Real receivers that only a proxy can resolve, over TLS 1.3 with a server name."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger.settings import Secret
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings
from tests.fakes.http_proxy import HttpProxy, proxying
from tests.real.services.alertmanager import SecuredAlertmanager
from tests.real.services.certificates import Authority
from tests.real.services.prometheus import SecuredPrometheus
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import bus, event, eventually, publish

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.services.starter import Starter

READING = "gpuledger_gpu_memory_total_bytes"
PASSWORD, WITHIN_SECONDS = "of-the-receiver", 30
AT_PROXY = "of-the-proxy"


def by(proxy: HttpProxy, authority: Authority) -> dict[str, Any]:
    """Return the settings for a receiver behind a proxy with a login."""
    return {
        "proxy_url": proxy.url,
        "proxy_username": "sink",
        "proxy_password": Secret(AT_PROXY),
        "no_proxy": [".svc"],
        "ca_file": str(authority.certificate),
        "server_name": "localhost",
        "min_tls_version": "1.3",
        "password": Secret(PASSWORD),
    }


async def test_prometheus_has_all_samples_even_after_an_outage_of_the_proxy(
    prometheus_binary: Path, starter: Starter, tmp_path: Path
) -> None:
    authority, readiness, on = Authority(folder=tmp_path), Readiness(), bus()
    receiver = starter.start(
        SecuredPrometheus(
            binary=prometheus_binary,
            folder=starter.new_folder("prometheus"),
            authority=authority,
            password=PASSWORD,
        )
    )
    check = readiness.check("remote_write.receiver", severity=CheckSeverity.WARNING)

    async def is_stored(node: str) -> None:
        query = f'{READING}{{node="{node}"}}'
        await asyncio.to_thread(
            lambda: receiver.await_query(query, deadline_seconds=WITHIN_SECONDS)
        )

    async with proxying(receiver.url, login=f"sink:{AT_PROXY}") as proxy:
        settings = RemoteWriteSettings(
            url="https://prometheus.test:9090/api/v1/write",
            interval_seconds=0,
            username=receiver.username,
            **by(proxy, authority),
        )
        async with sending(on, settings, readiness=readiness):
            await publish(on, event(node="before", time_ns=time.time_ns()))
            await is_stored("before")
            proxy.raw = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
            proxy.end_connections()
            await publish(on, event(node="meanwhile", time_ns=time.time_ns()))
            await eventually(
                lambda: "the proxy answers 502" in check.detail, within_seconds=WITHIN_SECONDS
            )
            proxy.raw = None
            await is_stored("meanwhile")
    assert {line.split()[1] for line in proxy.requests} == {"prometheus.test:9090"}


async def test_alertmanager_answers_through_the_proxy(
    alertmanager_binary: Path, starter: Starter, tmp_path: Path
) -> None:
    authority, readiness, on = Authority(folder=tmp_path), Readiness(), bus()
    receiver = starter.start(
        SecuredAlertmanager(
            binary=alertmanager_binary,
            folder=starter.new_folder("alertmanager"),
            authority=authority,
            password=PASSWORD,
        )
    )
    own = authority.issue("sink")
    check = readiness.check("alerts.receiver", severity=CheckSeverity.WARNING)
    async with proxying(receiver.url, login=f"sink:{AT_PROXY}") as proxy:
        settings = AlertsSettings(
            urls=["https://alertmanager.test"],
            username=receiver.username,
            cert_file=str(own.certificate),
            key_file=str(own.key),
            **by(proxy, authority),
        )
        async with sending(on, settings, readiness=readiness):
            await eventually(lambda: check.is_ok, within_seconds=WITHIN_SECONDS)
    assert proxy.requests[0] == "CONNECT alertmanager.test:443 HTTP/1.1"
