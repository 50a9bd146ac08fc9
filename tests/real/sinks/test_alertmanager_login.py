"""Password, authority and certificate are replaced while alerts go to a real Alertmanager."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import AttributedIncident, Incident, Severity
from gpuledger.runtime import CheckSeverity, Readiness
from gpuledger.settings import Secret
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.real.services.alertmanager import SecuredAlertmanager
from tests.real.services.certificates import Authority
from tests.real.services.web import await_some
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import GPU, bus, eventually, place_of

if TYPE_CHECKING:
    from pathlib import Path

    from gpuledger.bus.memory import MemoryBus
    from tests.real.services.starter import Starter

WITHIN_SECONDS = 120


class Mounted:
    """The files that the sink reads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.ca_file, self.password = folder / "ca.crt", folder / "password"
        self.cert_file, self.key_file = folder / "tls.crt", folder / "tls.key"

    def write(self, authority: Authority, *, password: str) -> None:
        pair = authority.issue("sink")
        shutil.copy(authority.certificate, self.ca_file)
        shutil.copy(pair.certificate, self.cert_file)
        shutil.copy(pair.key, self.key_file)
        self.password.write_text(f"{password}\n")

    def settings(self, receiver: SecuredAlertmanager, **others: Any) -> AlertsSettings:  # noqa: ANN401  # any setting
        given: dict[str, Any] = {
            "urls": [receiver.url],
            "username": receiver.username,
            "password": Secret.load(self.password, name="alerts.password"),
            "ca_file": str(self.ca_file),
            "cert_file": str(self.cert_file),
            "key_file": str(self.key_file),
        }
        return AlertsSettings(**(given | others))


async def publish_incident(on: MemoryBus, node: str) -> None:
    incident = Incident(
        cluster="default",
        node=node,
        boot_id="boot-1",
        gpu_uuid=GPU,
        time_ns=time.time_ns(),
        kind="xid",
        source="nvml",
        severity=Severity.CRITICAL,
        xid=79,
        message="GPU has fallen off the bus",
        processes=[],
    )
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    value = encode(AttributedIncident(incident=incident, pods=[]))
    async with on.producer() as producer:
        message = Message(
            key=key_in("default", node).encode(),
            value=value,
            timestamp_ms=time.time_ns() // 1_000_000,
        )
        await producer.publish(at.topic, at.partition, [message])


@pytest.fixture
def first(tmp_path: Path) -> Authority:
    return Authority(folder=tmp_path / "first")


@pytest.fixture
def receiver(alertmanager_binary: Path, starter: Starter, first: Authority) -> SecuredAlertmanager:
    return starter.start(
        SecuredAlertmanager(
            binary=alertmanager_binary,
            folder=starter.new_folder("alertmanager"),
            authority=first,
            password="first",
        )
    )


async def wait_for_alert(receiver: SecuredAlertmanager, node: str) -> None:
    def alerts() -> list[Any]:
        return [alert for alert in receiver.alerts() if alert["labels"]["node"] == node]

    await asyncio.to_thread(lambda: await_some(alerts, what=node, deadline_seconds=WITHIN_SECONDS))


async def test_alerts_are_still_accepted_while_all_credentials_are_replaced(
    receiver: SecuredAlertmanager, first: Authority, tmp_path: Path
) -> None:
    second = Authority(folder=tmp_path / "second")
    mounted, readiness, on = Mounted(tmp_path / "mounted"), Readiness(), bus()
    mounted.write(first, password="first")
    credentials, answered = (
        readiness.check(f"alerts.{name}", severity=CheckSeverity.WARNING)
        for name in ("credentials", "receiver")
    )
    settings = mounted.settings(receiver)
    async with sending(on, settings, readiness=readiness):
        await publish_incident(on, "before")
        await wait_for_alert(receiver, "before")

        looking = asyncio.create_task(readiness.run_periodic())
        mounted.key_file.write_text("damaged")
        await eventually(lambda: credentials.has_failed, within_seconds=WITHIN_SECONDS)
        looking.cancel()
        assert credentials.detail.startswith("alerts.key_file: ")
        await publish_incident(on, "while-damaged")
        await wait_for_alert(receiver, "while-damaged")

        receiver.exchange(second, password="second")
        await publish_incident(on, "refused")
        await eventually(lambda: answered.has_failed, within_seconds=WITHIN_SECONDS)
        mounted.write(second, password="second")
        await wait_for_alert(receiver, "refused")
        assert credentials.is_ok
        await eventually(lambda: answered.is_ok, within_seconds=WITHIN_SECONDS)


WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "a password": ({"username": "", "password": None}, "401"),
    "the authority": ({"ca_file": ""}, "CERTIFICATE_VERIFY_FAILED"),
    "a certificate": ({"cert_file": "", "key_file": ""}, "certificate"),
}


@pytest.mark.parametrize("missing", WITHOUT)
async def test_missing_credentials_are_named_by_the_check(
    receiver: SecuredAlertmanager, first: Authority, tmp_path: Path, missing: str
) -> None:
    others, reason = WITHOUT[missing]
    mounted, readiness, on = Mounted(tmp_path / "mounted"), Readiness(), bus()
    mounted.write(first, password="first")
    answered = readiness.check("alerts.receiver", severity=CheckSeverity.WARNING)
    settings = mounted.settings(receiver, **others)
    async with sending(on, settings, readiness=readiness):
        await publish_incident(on, "refused")
        await eventually(lambda: answered.has_failed, within_seconds=WITHIN_SECONDS)
        assert reason in answered.detail
