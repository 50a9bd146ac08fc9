"""The alerts sink over the bus in memory and Alertmanagers that answer as told."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.records import Account, AttributedIncident, GpuEvent, Incident, Severity
from gpuledger.service import Readiness
from gpuledger.topics import ATTRIBUTED_INCIDENTS
from sinks.alerts.service import GROUP, run_alerts
from sinks.alerts.settings import AlertsSettings, BusyWithoutPodSettings
from tests.unit.sinks.given import (
    GPU,
    NODE,
    START_NS,
    HandClock,
    bus,
    committed,
    dead_letters,
    entry,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Receiver, receiving

AT = place_of(NODE)
AT_INCIDENTS = place_of(NODE, ATTRIBUTED_INCIDENTS.name)


def sink(
    on: MemoryBus, *receivers: Receiver, readiness: Readiness | None = None
) -> asyncio.Future[None]:
    settings = AlertsSettings(
        urls=[receiver.url for receiver in receivers],
        busy_without_pod=BusyWithoutPodSettings(for_seconds=1.0),
    )
    return asyncio.ensure_future(
        run_alerts(
            bus=on,
            settings=settings,
            readiness=readiness or Readiness(),
            clock=HandClock(START_NS + 10**9),
        )
    )


def busy(tick: int) -> GpuEvent:
    return event(tick, entries=[entry(Account.HOST), entry(Account.IDLE)])


def quiet(tick: int) -> GpuEvent:
    return event(tick, entries=[entry(), entry(Account.IDLE)])


def is_committed(on: MemoryBus, offset: int) -> Callable[[], bool]:
    return lambda: committed(on, GROUP, AT) == offset


def alerts(receiver: Receiver) -> list[dict[str, Any]]:
    return [alert for request in receiver.received for alert in orjson.loads(request.body)]


async def test_a_firing_alert_and_its_end_reach_every_alertmanager() -> None:
    on = bus()
    async with receiving() as one, receiving() as other, running(sink(on, one, other)):
        await publish(on, busy(0), busy(1))
        await eventually(is_committed(on, 2))
        await publish(on, quiet(2))
        await eventually(is_committed(on, 3))

    for receiver in (one, other):
        first, last = alerts(receiver)
        assert first["labels"]["alertname"] == "GpuBusyWithoutPod"
        assert first["labels"] == last["labels"]
        assert first["endsAt"] > last["endsAt"]
        assert {request.path for request in receiver.received} == {"/api/v2/alerts"}
        assert receiver.received[0].headers["Content-Type"] == "application/json"


async def test_nothing_is_sent_while_nothing_is_wrong() -> None:
    on = bus()
    async with receiving() as receiver, running(sink(on, receiver)):
        await publish(on, quiet(0), busy(1), quiet(2))
        await eventually(is_committed(on, 3))

    assert receiver.received == []


async def test_one_alertmanager_that_is_away_holds_nothing_up_and_is_told_later() -> None:
    on, readiness = bus(), Readiness()
    async with (
        receiving() as one,
        receiving(Answer(503, "away")) as other,
        running(sink(on, one, other, readiness=readiness)),
    ):
        await publish(on, busy(0), busy(1))
        await eventually(is_committed(on, 2))
        assert len(alerts(one)) == 1
        assert readiness.is_ready()
        assert readiness.check(f"alerts.alertmanager {one.url}").is_ok
        assert "away" in readiness.check(f"alerts.alertmanager {other.url}").detail


async def test_offsets_wait_until_an_alertmanager_has_the_alert() -> None:
    on, readiness = bus(), Readiness()
    answers = [Answer(500, "no"), Answer(429, "slower"), Answer(200)]
    async with receiving(*answers) as receiver, running(sink(on, receiver, readiness=readiness)):
        await publish(on, busy(0), busy(1))
        await eventually(is_committed(on, 2))

        assert len(receiver.received) == 3
        assert readiness.is_ready()


async def test_a_refusal_is_not_repeated_and_the_stream_goes_on() -> None:
    on = bus()
    async with receiving(Answer(400, "bad label")) as receiver, running(sink(on, receiver)):
        await publish(on, busy(0), busy(1), busy(2))
        await eventually(is_committed(on, 3))

    assert len(receiver.received) == 1


def incident(time_ns: int) -> AttributedIncident:
    return AttributedIncident(
        incident=Incident(
            node=NODE,
            boot_id="boot-1",
            gpu_uuid=GPU,
            time_ns=time_ns,
            kind="xid",
            source="nvml",
            severity=Severity.CRITICAL,
            xid=79,
            message="GPU has fallen off the bus",
            processes=[],
        ),
        pods=[],
    )


DAY = 86_400


@pytest.mark.parametrize(
    ("age_seconds", "sent"),
    [
        (0, 1),
        (3599, 1),
        (3700, 0),
        (6 * DAY, 0),
        # Older than its topic keeps records, as of a clock in 1970: when it was is not known.
        (8 * DAY, 1),
        (START_NS // 10**9, 1),
        (-365 * DAY, 1),
    ],
)
async def test_an_incident_is_sent_unless_it_is_long_past(age_seconds: int, sent: int) -> None:
    on = bus()
    value = encode(incident(START_NS - age_seconds * 10**9))
    async with receiving() as receiver, running(sink(on, receiver)), on.producer() as producer:
        message = Message(key=b"k", value=value, timestamp_ms=0)
        bad = Message(key=b"k", value=b"[]", timestamp_ms=0)
        await producer.publish(AT_INCIDENTS.topic, AT_INCIDENTS.partition, [bad, message])
        await eventually(lambda: committed(on, GROUP, AT_INCIDENTS) == 2)

    assert [alert["labels"]["xid"] for alert in alerts(receiver)] == ["79"] * sent
    assert [letter.offset for letter in await dead_letters(on)] == [0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"urls": []}, "urls: name at least one Alertmanager"),
        ({"urls": ["am:9093"]}, "'am:9093' must begin with http"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, AlertsSettings)
