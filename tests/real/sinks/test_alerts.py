"""What the alerts sink sends is held, and resolved, by a real Alertmanager."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.records import Account, AttributedIncident, GpuEvent, Incident, Severity
from gpuledger.service import Readiness
from gpuledger.topics import ATTRIBUTED_INCIDENTS
from sinks.alerts.service import GROUP, run_alerts
from sinks.alerts.settings import AlertsSettings, BusyWithoutPodSettings
from tests.unit.sinks.given import (
    GPU,
    SECOND_NS,
    bus,
    committed,
    entry,
    event,
    eventually,
    place_of,
    pod,
    publish,
    running,
)

if TYPE_CHECKING:
    from tests.real.parts.alertmanager import AlertmanagerApi


def on_node(alertmanager: AlertmanagerApi, node: str) -> list[dict[str, Any]]:
    return [alert for alert in alertmanager.alerts() if alert["labels"].get("node") == node]


async def test_a_gpu_that_works_for_no_pod_is_an_alert_until_it_does_not(
    alertmanager: AlertmanagerApi,
) -> None:
    on, node, now_ns = bus(), "node-without-pod", time.time_ns()

    def tick(number: int, account: Account) -> GpuEvent:
        at_ns = now_ns + (number - 4) * SECOND_NS
        return event(number, node=node, time_ns=at_ns, entries=[entry(account)])

    settings = AlertsSettings(
        urls=[alertmanager.url], busy_without_pod=BusyWithoutPodSettings(for_seconds=2.0)
    )
    at = place_of(node)
    async with running(run_alerts(bus=on, settings=settings, readiness=Readiness())):
        await publish(on, *(tick(number, Account.HOST) for number in range(4)))
        await eventually(lambda: committed(on, GROUP, at) == 4, within_seconds=10)

        (held,) = await asyncio.to_thread(on_node, alertmanager, node)
        assert held["status"]["state"] == "active"
        assert held["labels"]["alertname"] == "GpuBusyWithoutPod"
        assert held["labels"]["gpu_uuid"] == GPU

        await publish(on, tick(4, Account.POD))
        await eventually(lambda: committed(on, GROUP, at) == 5, within_seconds=10)
        # Only alerts that have not ended are listed.
        assert await asyncio.to_thread(on_node, alertmanager, node) == []


async def test_an_incident_stands_with_its_xid_and_its_pod(alertmanager: AlertmanagerApi) -> None:
    on, node = bus(), "node-with-xid"
    incident = Incident(
        node=node,
        boot_id="boot-1",
        gpu_uuid=GPU,
        time_ns=time.time_ns() - 400 * SECOND_NS,
        kind="xid",
        source="nvml",
        severity=Severity.CRITICAL,
        xid=79,
        message="GPU has fallen off the bus",
        processes=[],
    )
    value = encode(AttributedIncident(incident=incident, pods=[pod()]))
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    settings = AlertsSettings(urls=[alertmanager.url])
    async with running(run_alerts(bus=on, settings=settings, readiness=Readiness())):
        async with on.producer() as producer:
            message = Message(key=node.encode(), value=value, timestamp_ms=0)
            await producer.publish(at.topic, at.partition, [message])
        await eventually(lambda: committed(on, GROUP, at) == 1, within_seconds=10)

    (held,) = await asyncio.to_thread(on_node, alertmanager, node)
    assert (held["labels"]["xid"], held["labels"]["pod"]) == ("79", "train-0")
    assert held["annotations"]["summary"] == "XID 79 on node-with-xid"
