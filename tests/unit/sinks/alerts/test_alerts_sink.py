"""The alerts sink over the bus in memory, with Alertmanagers that answer as configured."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.runtime import Readiness
from gpuledger_sinks.alerts.active_alerts import rfc3339
from gpuledger_sinks.registry import ALERTS
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.sinks.alerts.alerting import (
    AT,
    AT_INCIDENTS,
    WaitingClock,
    alerts,
    answers,
    incident,
    is_committed,
    publish_incidents,
    quiet,
    sink,
)
from tests.unit.sinks.builders import (
    KEY,
    NODE,
    SECOND_NS,
    START_NS,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    place_of,
    publish,
    reading,
    running,
)
from tests.unit.sinks.receiver import Answer, receiving


async def test_a_firing_alert_and_its_end_reach_every_alertmanager() -> None:
    on, clock = bus(), WaitingClock(START_NS + SECOND_NS)
    async with receiving() as one, receiving() as other, running(sink(on, one, other, clock=clock)):
        await publish_lost(on)
        await eventually(lambda: alerts(one) and alerts(other))
        clock.advance(300)
        await publish(on, quiet(1), quiet(2))
        await eventually(is_committed(on, 2, at=AT))

    for receiver in (one, other):
        first, last = alerts(receiver)[0], alerts(receiver)[-1]
        assert first["labels"]["alertname"] == "GpuIncident"
        assert first["labels"] == last["labels"]
        assert first["endsAt"] > last["endsAt"]
        assert {request.path for request in receiver.received} == {"/api/v2/alerts"}
        assert receiver.received[0].headers["Content-Type"] == "application/json"


async def test_no_alert_is_sent_without_an_incident() -> None:
    on = bus()
    async with receiving() as receiver, running(sink(on, receiver)):
        await publish(on, quiet(0), quiet(1), quiet(2))
        await eventually(is_committed(on, 3, at=AT))

    assert alerts(receiver) == []


async def publish_lost(on: MemoryBus) -> None:
    lost = incident(START_NS)
    lost = replace(lost, incident=replace(lost.incident, kind="gpu_lost", xid=None))
    async with on.producer() as producer:
        message = Message(key=KEY, value=encode(lost), timestamp_ms=0)
        await producer.publish(AT_INCIDENTS.topic, AT_INCIDENTS.partition, [message])


async def test_an_unavailable_alertmanager_delays_nothing_and_gets_the_alerts_later() -> None:
    on, readiness, is_away = bus(), Readiness(), {True}
    async with (
        receiving() as one,
        receiving(by_body=lambda _: Answer(503, "away") if is_away else Answer(200)) as other,
        running(sink(on, one, other, readiness=readiness)),
    ):
        await publish_incidents(on, 79)
        await eventually(is_committed(on, 1))
        assert len(alerts(one)) == 1
        assert readiness.is_ready()
        assert readiness.check(f"alerts.alertmanager {one.url}").is_ok
        assert "away" in readiness.check(f"alerts.alertmanager {other.url}").detail
        is_away.clear()
        await eventually(lambda: readiness.check(f"alerts.alertmanager {other.url}").is_ok)
        assert alerts(other)[-1]["labels"] == alerts(one)[0]["labels"]


async def test_offsets_are_committed_only_after_an_alertmanager_has_the_alert() -> None:
    on, readiness = bus(), Readiness()
    answers = [Answer(500, "no"), Answer(429, "slower"), Answer(200)]
    async with receiving(*answers) as receiver, running(sink(on, receiver, readiness=readiness)):
        await publish_incidents(on, 79)
        await eventually(is_committed(on, 1))

        assert len(receiver.received) == 3
        assert readiness.is_ready()


DAY = 86_400


@pytest.mark.parametrize(
    ("age_seconds", "sent"),
    [
        (0, 1),
        (3599, 1),
        (3700, 0),
        (6 * DAY, 0),
        # Older than its topic keeps records, by a clock in 1970: the real time is unknown.
        (8 * DAY, 1),
        (START_NS // 10**9, 1),
        (-365 * DAY, 1),
    ],
)
async def test_an_incident_is_sent_unless_it_is_long_past(age_seconds: int, sent: int) -> None:
    on = bus()
    value = encode(incident(START_NS - age_seconds * 10**9))
    async with receiving() as receiver, running(sink(on, receiver)), on.producer() as producer:
        message = Message(key=KEY, value=value, timestamp_ms=0)
        bad = Message(key=KEY, value=b"[]", timestamp_ms=0)
        await producer.publish(AT_INCIDENTS.topic, AT_INCIDENTS.partition, [bad, message])
        await eventually(lambda: committed(on, ALERTS.group, AT_INCIDENTS) == 2)

    assert [alert["labels"]["xid"] for alert in alerts(receiver)] == ["79"] * sent
    assert [dead_letter.offset for dead_letter in await dead_letters(on)] == [0]


async def test_the_hold_of_an_incident_rejected_for_hours_starts_when_it_is_accepted() -> None:
    on, is_away = bus(), {True}
    clock = WaitingClock(START_NS + SECOND_NS)
    await publish_incidents(on, 79)
    async with (
        receiving(by_body=lambda _: Answer(503 if is_away else 200)) as receiver,
        running(sink(on, receiver, clock=clock)),
    ):
        await eventually(lambda: receiver.received)
        clock.advance(3 * 3600)
        is_away.clear()
        await eventually(
            lambda: committed(on, ALERTS.group, place_of(NODE, ATTRIBUTED_INCIDENTS.name))
        )

    assert alerts(receiver)[-1]["endsAt"] == rfc3339(clock.now_ns + 300 * SECOND_NS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"urls": []}, "urls: empty list; give at least one Alertmanager"),
        ({"urls": ["am:9093"]}, "'am:9093' must begin with http"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, AlertsSettings)


async def test_a_restarted_sink_sends_a_lost_gpu_as_the_same_alert() -> None:
    on, clock = bus(), WaitingClock(START_NS + SECOND_NS)
    async with receiving() as before, running(sink(on, before, clock=clock)):
        await publish_lost(on)
        await eventually(is_committed(on, 1))

    clock.advance(7200)
    async with receiving() as after, running(sink(on, after, clock=clock)):
        await publish(on, event(7200, of=reading(unresponsive=True), entries=[]))
        await eventually(lambda: alerts(after))
        await publish(on, quiet(7201), quiet(7202))
        await eventually(lambda: alerts(after)[-1]["endsAt"] <= rfc3339(clock.now_ns))

    assert alerts(after)[0]["labels"] == alerts(after)[-1]["labels"] == alerts(before)[0]["labels"]


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_an_alertmanager_at_a_wrong_address_is_named_and_its_answers_are_not_deliveries(
    status: int,
) -> None:
    on, readiness = bus(), Readiness()
    async with (
        receiving(by_body=lambda _: Answer(status, "no")) as wrong,
        running(sink(on, wrong, readiness=readiness, headers={"X-Scope-OrgID": "gpus"})),
    ):
        await publish_incidents(on, 79)
        await eventually(lambda: alerts(wrong))
        await eventually(lambda: readiness.check(f"alerts.alertmanager {wrong.url}").has_failed)

        assert f"{status} no" in readiness.check(f"alerts.alertmanager {wrong.url}").detail
        assert committed(on, ALERTS.group, AT_INCIDENTS) is None
        assert answers(wrong, "4xx") > 0
        assert answers(wrong, "2xx") == answers(wrong, "none") == 0
        assert wrong.received[0].headers["X-Scope-OrgID"] == "gpus"
