"""A real Alertmanager has the alerts that the alerts sink sends, and resolves them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import AttributedIncident, Incident, Severity
from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import open_http
from gpuledger_sinks.alerts.active_alerts import rfc3339
from gpuledger_sinks.alerts.receivers import HEADERS, AlertmanagerClient
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError
from gpuledger_sinks.registry import ALERTS
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.builders import (
    GPU,
    NODE,
    SECOND_NS,
    bus,
    committed,
    event,
    eventually,
    place_of,
    pod,
    publish,
)

if TYPE_CHECKING:
    from gpuledger.bus.protocol import Bus
    from tests.real.services.alertmanager import AlertmanagerApi


def posted(node: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401  # the invalid part
    labels = {"alertname": "Posted", "node": node}
    starts, ends = (rfc3339(time.time_ns() + after * SECOND_NS) for after in (0, 300))
    return {"labels": labels, "annotations": {}, "startsAt": starts, "endsAt": ends} | changes


def on_node(alertmanager: AlertmanagerApi, node: str) -> list[dict[str, Any]]:
    return [alert for alert in alertmanager.alerts() if alert["labels"].get("node") == node]


async def publish_incident(on: Bus, node: str, **changes: Any) -> None:  # noqa: ANN401  # an incident's fields
    incident = Incident(
        cluster="default",
        node=node,
        boot_id="boot-1",
        gpu_uuid=GPU,
        gpu_index=3,
        time_ns=time.time_ns() - 400 * SECOND_NS,
        kind="xid",
        source="nvml",
        severity=Severity.CRITICAL,
        xid=79,
        message="GPU has fallen off the bus",
        processes=[],
    )
    value = encode(AttributedIncident(incident=replace(incident, **changes), pods=[pod()]))
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    async with on.producer() as producer:
        message = Message(
            key=key_in("default", node).encode(),
            value=value,
            timestamp_ms=time.time_ns() // 1_000_000,
        )
        await producer.publish(at.topic, at.partition, [message])


async def test_a_lost_gpu_is_an_alert_until_it_answers(alertmanager: AlertmanagerApi) -> None:
    on, node = bus(), "node-with-a-lost-gpu"
    settings = AlertsSettings(urls=[alertmanager.url], incident_hold_seconds=0.001)
    async with sending(on, settings):
        await publish_incident(on, node, kind="gpu_lost", xid=None)
        await eventually(
            lambda: committed(on, ALERTS.group, place_of(node, ATTRIBUTED_INCIDENTS.name)) == 1
        )
        (held,) = await asyncio.to_thread(on_node, alertmanager, node)
        assert held["status"]["state"] == "active"
        now_ns = time.time_ns()
        await publish(on, *(event(one, node=node, time_ns=now_ns + one) for one in (1, 2)))
        await eventually(lambda: committed(on, ALERTS.group, place_of(node)) == 2)
        # Only alerts that have not ended are listed.
        assert await asyncio.to_thread(on_node, alertmanager, node) == []


async def test_an_incident_is_listed_with_its_xid_and_its_pod(
    alertmanager: AlertmanagerApi,
) -> None:
    on, node = bus(), "node-with-xid"
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    settings = AlertsSettings(urls=[alertmanager.url])
    async with sending(on, settings):
        await publish_incident(on, node)
        await eventually(lambda: committed(on, ALERTS.group, at) == 1)

    (held,) = await asyncio.to_thread(on_node, alertmanager, node)
    assert (held["labels"]["xid"], held["labels"]["pod"]) == ("79", "train-0")
    assert held["labels"]["gpu_index"] == "3"
    assert held["annotations"]["summary"] == (
        "GPU 3 on node node-with-xid (pod research/train-0): XID 79, GPU has fallen off the bus"
    )


WRONG: dict[str, dict[str, Any]] = {
    "no labels": {"labels": {}},
    "an invalid label name": {"labels": {"a-b": "1"}},
    "a label that is a number": {"labels": {"alertname": 5}},
    "no label set": {"labels": None},
    "an end before the start": {"endsAt": "2020-01-01T00:00:00Z"},
    "an invalid time": {"startsAt": "yesterday"},
    "an invalid address": {"generatorURL": ":::"},
}
"""Alerts that no Alertmanager accepts, whether or not it accepts the others of the request."""


@pytest.mark.parametrize("what", WRONG)
async def test_an_invalid_alert_is_distinguished_from_a_wrong_address(
    alertmanager: AlertmanagerApi, what: str
) -> None:
    node = f"node-with-{what.replace(' ', '-')}"
    both = [posted(node), posted(node, **WRONG[what])]
    async with open_http(headers=HEADERS, timeout_seconds=10.0) as http:
        right = AlertmanagerClient(http=http, url=alertmanager.url)
        for alerts in (both, both[1:]):
            with pytest.raises(RejectedError, match=r"^4(00|22) "):
                await right.post(alerts)
        await right.post(both[:1])
        wrong = AlertmanagerClient(http=http, url=f"{alertmanager.url}/wrong")
        with pytest.raises(ReceiverUnavailableError, match=r": 404 "):
            await wrong.post(both[:1])
    assert len(await asyncio.to_thread(on_node, alertmanager, node)) == 1


async def test_a_wrong_address_loses_no_alert_and_the_check_names_it(
    alertmanager: AlertmanagerApi,
) -> None:
    on, readiness = bus(), Readiness()
    settings = AlertsSettings(urls=[f"{alertmanager.url}/wrong"])
    check = readiness.check("alerts.receiver")
    async with sending(on, settings, readiness=readiness):
        await publish_incident(on, NODE)
        await eventually(lambda: check.has_failed)
        assert "404 404 page not found; check alerts.urls" in check.detail
        assert committed(on, ALERTS.group, place_of(NODE, ATTRIBUTED_INCIDENTS.name)) is None


async def test_an_empty_list_is_accepted_and_changes_nothing(
    alertmanager: AlertmanagerApi,
) -> None:
    before = alertmanager.alerts()
    async with open_http(headers=HEADERS, timeout_seconds=10.0) as http:
        await AlertmanagerClient(http=http, url=alertmanager.url).post([])

    assert len(alertmanager.alerts()) == len(before)
