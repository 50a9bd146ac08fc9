"""The alerts sink over the bus in memory and Alertmanagers that answer as told."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import orjson
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.records import Account, AttributedIncident, GpuBooks, GpuEvent, Incident, Severity
from gpuledger.service import Readiness
from gpuledger.topics import ATTRIBUTED_INCIDENTS
from sinks.alerts.service import GROUP, run_alerts
from sinks.alerts.settings import AlertsSettings, BusyWithoutPodSettings
from tests.unit.sinks.given import (
    GPU,
    NODE,
    SECOND_NS,
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
    reading,
    running,
)
from tests.unit.sinks.receiver import Answer, Receiver, receiving

AT = place_of(NODE)
AT_INCIDENTS = place_of(NODE, ATTRIBUTED_INCIDENTS.name)


def sink(
    on: MemoryBus,
    *receivers: Receiver,
    readiness: Readiness | None = None,
    clock: HandClock | None = None,
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
            clock=clock or HandClock(START_NS + SECOND_NS),
        )
    )


def busy(tick: int) -> GpuEvent:
    return event(tick, entries=[entry(Account.HOST), entry(Account.IDLE)])


def quiet(tick: int) -> GpuEvent:
    return event(tick, entries=[entry(), entry(Account.IDLE)])


def books_of(uuid: str) -> GpuBooks:
    return GpuBooks(reading=reading(uuid=uuid), entries=[entry(Account.HOST)])


def rejected() -> float:
    labels = {"sink": "alerts", "reason": "rejected"}
    return REGISTRY.get_sample_value("gpuledger_sink_dropped_total", labels) or 0.0


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


NOT_OF_THE_ALERTS = [
    Answer(401, "who are you"),
    Answer(403, "not you"),
    Answer(404, "404 page not found"),
    Answer(405, "GET"),
    Answer(415, '{"code":415}', {"Content-Type": "application/json"}),
    Answer(400, "The plain HTTP request was sent to HTTPS port"),
    Answer(302, "", {"Location": "/login"}),
]
"""What a wrong address, a wrong password or a proxy answers."""
INVALID = {"Content-Type": "application/json"}
REFUSED = Answer(400, '"invalid label set"\n', INVALID)
TOO_LARGE = Answer(413, "<html>too large</html>")


@pytest.mark.parametrize("answer", NOT_OF_THE_ALERTS, ids=lambda answer: answer.text)
async def test_an_answer_that_says_nothing_of_the_alerts_is_waited_for_and_said(
    answer: Answer,
) -> None:
    on, readiness = bus(), Readiness()
    with capture_logs() as logs:
        async with (
            receiving(answer, answer) as receiver,
            running(sink(on, receiver, readiness=readiness)),
        ):
            await publish(on, busy(0), busy(1))
            await eventually(is_committed(on, 2))

    assert len(alerts(receiver)) == 3
    assert readiness.check("alerts.receiver").is_ok
    failed = {line["check"]: line["detail"] for line in logs if line["event"] == "check_failed"}
    assert failed.keys() == {"alerts.receiver", f"alerts.alertmanager {receiver.url}"}
    assert all(detail.startswith(str(answer.status)) for detail in failed.values())


async def test_an_alertmanager_that_is_not_there_takes_nothing_in_place_of_another() -> None:
    on = bus()
    nowhere, away = [Answer(404, "no such page")] * 20, [Answer(503)] * 3
    async with (
        receiving(*nowhere) as one,
        receiving(*away) as other,
        running(sink(on, one, other)),
    ):
        await publish(on, busy(0), busy(1))
        await eventually(is_committed(on, 2))
        assert len(other.received) == 4


@pytest.mark.parametrize(
    "answer",
    [
        REFUSED,
        Answer(400, '{"code":400,"message":"parsing alerts body"}', INVALID),
        Answer(422, '{"code":601,"message":"0.generatorURL in body"}', INVALID),
        TOO_LARGE,
    ],
    ids=lambda answer: answer.text,
)
async def test_an_alert_that_is_refused_holds_up_nothing_and_is_said_for_ten_minutes(
    answer: Answer,
) -> None:
    on, readiness = bus(), Readiness()
    clock = HandClock(START_NS + SECOND_NS)
    async with (
        receiving(answer) as receiver,
        running(sink(on, receiver, readiness=readiness, clock=clock)),
    ):
        check = readiness.check("alerts.receiver")
        its_own = readiness.check(f"alerts.alertmanager {receiver.url}")
        await publish(on, busy(0), busy(1), busy(2))
        await eventually(is_committed(on, 3))
        assert (check.is_ok, its_own.is_ok) == (False, False)
        assert check.detail == f"rejected: {receiver.url}: {answer.status} {answer.text.strip()}"

        await publish(on, quiet(3))
        await eventually(is_committed(on, 4))
        assert (check.is_ok, its_own.is_ok) == (False, False)
        clock.advance(600)
        await publish(on, quiet(4))
        await eventually(is_committed(on, 5))
        assert (check.is_ok, its_own.is_ok) == (True, True)


@pytest.mark.parametrize("answer", [REFUSED, TOO_LARGE], ids=["invalid", "too large"])
async def test_of_alerts_that_are_refused_together_each_good_one_is_told(answer: Answer) -> None:
    on, dropped = bus(), rejected()
    gpus = [books_of(f"GPU-{number}") for number in range(4)]
    bad = b"GPU-2"

    def answered(body: bytes) -> Answer:
        return answer if bad in body else Answer(200)

    async with receiving(by_body=answered) as receiver, running(sink(on, receiver)):
        await publish(on, event(0, gpus=gpus), event(1, gpus=gpus))
        await eventually(is_committed(on, 2))

    taken = [request.body for request in receiver.received if bad not in request.body]
    told = [alert["labels"]["gpu_uuid"] for body in taken for alert in orjson.loads(body)]
    assert sorted(told) == ["GPU-0", "GPU-1", "GPU-3"]
    assert rejected() - dropped == 1


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
