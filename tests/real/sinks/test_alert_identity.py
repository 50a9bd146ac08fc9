"""One fault is one notification of a real Alertmanager, and a lost GPU fires until it is back."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import AttributedIncident, PodDescription, PodState
from gpuledger.runtime import Readiness
from gpuledger.xids import find_xid
from gpuledger_sinks.registry import ALERTS
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.real.sinks.running_sinks import sending
from tests.unit.sinks.alerts.alerting import incident
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    bus,
    committed,
    event,
    eventually,
    place_of,
    pod,
    publish,
    reading,
)
from tests.unit.sinks.receiver import Answer, Receiver, receiving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gpuledger.bus.memory import MemoryBus
    from tests.real.services.alertmanager import Alertmanager

AT = place_of(NODE, ATTRIBUTED_INCIDENTS.name)
CONFIG = """
route:
  receiver: pager
  group_by: ["..."]
  group_wait: {wait}s
  group_interval: 1s
receivers:
  - name: pager
    webhook_configs:
      - url: {url}
"""


def happened(kind: str, *pods: PodDescription, **changes: Any) -> AttributedIncident:  # noqa: ANN401  # an incident's fields
    one = incident(time.time_ns())
    values = {"kind": kind, "xid": None} | changes
    return AttributedIncident(incident=replace(one.incident, **values), pods=list(pods))


def xid(code: int, *pods: PodDescription) -> AttributedIncident:
    known = find_xid(code)
    return happened("xid", *pods, xid=code, category=known.category, severity=known.severity)


async def publish_incidents(on: MemoryBus, *incidents: AttributedIncident) -> None:
    """Publish incidents, and wait until their alerts are answered."""
    before = committed(on, ALERTS.group, AT) or 0
    async with on.producer() as producer:
        for one in incidents:
            message = Message(
                key=key_in("default", NODE).encode(),
                value=encode(one),
                timestamp_ms=time.time_ns() // 1_000_000,
            )
            await producer.publish(*AT, [message])
    await eventually(lambda: committed(on, ALERTS.group, AT) == before + len(incidents))


def notified(pager: Receiver) -> list[tuple[str, str]]:
    """Return the notifications to the pager: the status and the incident's kind or XID."""
    calls = [json.loads(call.body) for call in pager.received]
    return [
        (call["status"], alert["labels"].get("xid") or alert["labels"]["kind"])
        for call in calls
        for alert in call["alerts"]
    ]


@asynccontextmanager
async def paging(
    start: Callable[..., Alertmanager], *, wait_seconds: int = 0
) -> AsyncIterator[tuple[Alertmanager, Receiver]]:
    async with receiving(by_body=lambda _: Answer(200)) as pager:
        config = CONFIG.format(url=f"{pager.url}/page", wait=wait_seconds)
        yield await asyncio.to_thread(partial(start, config=config)), pager


async def test_a_lost_gpu_fires_at_both_alertmanagers_for_longer_than_the_hold_until_it_is_back(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    on = bus()
    async with paging(start_alertmanager) as (one, pager), paging(start_alertmanager) as (other, _):
        settings = AlertsSettings(
            urls=[one.url, other.url], incident_hold_seconds=2.0, resend_seconds=1.0
        )
        async with sending(on, settings):
            await publish_incidents(on, happened("gpu_lost", pod()))
            await asyncio.sleep(8)  # longer than the hold and Alertmanager's own
            for alertmanager in (one, other):
                (held,) = await asyncio.to_thread(alertmanager.alerts)
                assert held["status"]["state"] == "active"
            assert notified(pager) == [("firing", "gpu_lost")]

            await publish_incidents(on, happened("gpu_recovered"))
            await eventually(lambda: notified(pager)[-1] == ("resolved", "gpu_lost"))
            for alertmanager in (one, other):
                assert await asyncio.to_thread(alertmanager.alerts) == []


async def test_ticks_in_which_a_lost_gpu_answers_resolve_the_alert(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    on, now_ns = bus(), time.time_ns()
    async with paging(start_alertmanager) as (one, pager):
        settings = AlertsSettings(urls=[one.url], incident_hold_seconds=1.0, resend_seconds=1.0)
        async with sending(on, settings):
            await publish_incidents(on, happened("gpu_lost"))
            for number in range(1, 6):
                at_ns = now_ns + (number + 10) * SECOND_NS
                unresponsive = reading(unresponsive=True) if number < 4 else reading()
                await publish(on, event(number, of=unresponsive, entries=[], time_ns=at_ns))
            await eventually(lambda: ("resolved", "gpu_lost") in notified(pager))
    assert notified(pager)[0] == ("firing", "gpu_lost")


async def test_a_burst_is_one_notification_and_a_worse_xid_is_another(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    on = bus()
    async with paging(start_alertmanager, wait_seconds=1) as (one, pager):
        settings = AlertsSettings(urls=[one.url])
        async with sending(on, settings):
            await publish_incidents(on, xid(45), xid(62), xid(154))
            await eventually(lambda: notified(pager))
            (held,) = await asyncio.to_thread(one.alerts)
            assert held["annotations"]["other_xids"] == "45, 154"
            await publish_incidents(on, xid(79))
            await eventually(lambda: ("firing", "79") in notified(pager))
    assert [call for call in notified(pager) if call[0] == "firing"] == [
        ("firing", "62"),
        ("firing", "79"),
    ]


async def test_a_name_that_arrives_later_does_not_create_another_alert(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    on = bus()
    unnamed = PodDescription(uid="uid-train", state=PodState.PENDING)
    async with paging(start_alertmanager) as (one, pager):
        settings = AlertsSettings(urls=[one.url])
        async with sending(on, settings):
            await publish_incidents(on, xid(79, unnamed))
            await publish_incidents(on, xid(79, pod()))
            (held,) = await asyncio.to_thread(one.alerts)
    assert "pod" not in held["labels"]
    assert held["annotations"]["pods"] == "research/train-0"
    assert notified(pager).count(("firing", "79")) <= 1


async def test_an_alert_that_one_of_two_rejects_with_404_reaches_the_other_and_the_check_names_it(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    on, readiness = bus(), Readiness()
    async with paging(start_alertmanager) as (one, _):
        wrong = f"{one.url}/wrong"
        async with sending(on, AlertsSettings(urls=[wrong, one.url]), readiness=readiness):
            await publish_incidents(on, xid(79))
            check = readiness.check(f"alerts.alertmanager {wrong}")
            await eventually(lambda: check.has_failed)
            assert ": 404 " in check.detail
            assert readiness.check(f"alerts.alertmanager {one.url}").is_ok
            assert len(await asyncio.to_thread(one.alerts)) == 1


async def test_labels_for_routing_and_addresses_are_accepted_by_an_alertmanager(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    on = bus()
    async with paging(start_alertmanager) as (one, _):
        settings = AlertsSettings(
            urls=[one.url],
            external_labels={"region": "eu"},
            pod_labels=["team"],
            runbook_url="https://wiki.example/{kind}/{xid}",
            generator_url="https://grafana.example/d/gpu?var-node={node}",
        )
        async with sending(on, settings):
            await publish_incidents(on, xid(79, pod()))
            (held,) = await asyncio.to_thread(one.alerts)
    named = {"region": "eu", "label_team": "vision", "owner_name": "train"}
    assert held["labels"] == held["labels"] | named
    assert held["annotations"]["runbook_url"] == "https://wiki.example/xid/79"
    assert held["generatorURL"] == f"https://grafana.example/d/gpu?var-node={NODE}"
