"""Alertmanagers that reject alerts, and responses that are unrelated to alerts."""

import asyncio

import orjson
import pytest
from structlog.testing import capture_logs

from gpuledger.runtime import Readiness
from tests.unit.sinks.alerts.alerting import (
    AT,
    INVALID,
    REFUSED,
    TOO_LARGE,
    WaitingClock,
    alerts,
    is_committed,
    is_reported,
    publish_incidents,
    quiet,
    rejected,
    sink,
)
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    bus,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, receiving


@pytest.mark.parametrize("status", [401, 404])
async def test_a_wrong_address_or_login_is_detected_before_the_first_alert(
    status: int,
) -> None:
    on, readiness, is_wrong = bus(), Readiness(), {True}
    async with (
        receiving(by_body=lambda _: Answer(status, "no") if is_wrong else Answer(200)) as receiver,
        running(sink(on, receiver, readiness=readiness)),
    ):
        checks = [
            readiness.check(name)
            for name in ("alerts.receiver", f"alerts.alertmanager {receiver.url}")
        ]
        await eventually(lambda: all(check.has_failed for check in checks))
        assert all(f"{receiver.url}: {status} no; check" in check.detail for check in checks)
        is_wrong.clear()
        await eventually(lambda: all(check.is_ok for check in checks))

    assert alerts(receiver) == []


async def test_an_address_that_becomes_wrong_while_nothing_is_due_is_detected_within_a_minute() -> (
    None
):
    on, readiness, is_wrong = bus(), Readiness(), set[str]()
    clock = WaitingClock(START_NS + SECOND_NS)
    async with (
        receiving(by_body=lambda _: Answer(404) if is_wrong else Answer(200)) as receiver,
        running(sink(on, receiver, readiness=readiness, clock=clock)),
    ):
        check = readiness.check("alerts.receiver")
        await eventually(lambda: check.is_ok)
        is_wrong.add("another server")
        clock.now_ns += 59 * SECOND_NS
        await asyncio.sleep(0)
        assert len(receiver.received) == 1
        clock.now_ns += SECOND_NS
        await eventually(lambda: check.has_failed)

    assert alerts(receiver) == []


NOT_OF_THE_ALERTS = [
    Answer(401, "who are you"),
    Answer(403, "not you"),
    Answer(404, "404 page not found"),
    Answer(405, "GET"),
    Answer(415, '{"code":415}', {"Content-Type": "application/json"}),
    Answer(400, "The plain HTTP request was sent to HTTPS port"),
    Answer(302, "", {"Location": "/login"}),
    Answer(200, "<html>Please log in</html>", {"Content-Type": "text/html; charset=utf-8"}),
]
"""Responses to a wrong address or password, and those of a proxy."""


@pytest.mark.parametrize("answer", NOT_OF_THE_ALERTS, ids=lambda answer: answer.text)
async def test_an_unrelated_response_is_retried_and_reported(
    answer: Answer,
) -> None:
    on, readiness = bus(), Readiness()
    with capture_logs() as logs:
        async with (
            receiving(answer, answer) as receiver,
            running(sink(on, receiver, readiness=readiness)),
        ):
            await publish_incidents(on, 79)
            await eventually(is_committed(on, 1))

    assert len(alerts(receiver)) == 3
    assert readiness.check("alerts.receiver").is_ok
    failed = {line["check"]: line["detail"] for line in logs if line["event"] == "check_failed"}
    assert failed.keys() == {"alerts.receiver", f"alerts.alertmanager {receiver.url}"}
    assert all(f"{receiver.url}: {answer.status}" in detail for detail in failed.values())


async def test_alerts_for_a_missing_alertmanager_are_not_accepted_by_another() -> None:
    on = bus()
    nowhere, away = [Answer(404, "no such page")] * 20, [Answer(503)] * 3
    async with (
        receiving(*nowhere) as one,
        receiving(*away) as other,
        running(sink(on, one, other)),
    ):
        await publish_incidents(on, 79)
        await eventually(is_committed(on, 1))
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
async def test_a_rejected_alert_delays_no_other_and_is_reported_for_ten_minutes(
    answer: Answer,
) -> None:
    on, readiness = bus(), Readiness()
    clock = WaitingClock(START_NS + SECOND_NS)
    async with (
        receiving(answer) as receiver,
        running(sink(on, receiver, readiness=readiness, clock=clock)),
    ):
        check = readiness.check("alerts.receiver")
        its_own = readiness.check(f"alerts.alertmanager {receiver.url}")
        await publish_incidents(on, 79)
        await eventually(is_committed(on, 1))
        assert (check.is_ok, its_own.is_ok) == (False, False)
        assert check.detail == f"rejected: {receiver.url}: {answer.status} {answer.text.strip()}"

        await publish(on, quiet(0))
        await eventually(is_committed(on, 1, at=AT))
        assert (check.is_ok, its_own.is_ok) == (False, False)
        seen = len(receiver.received)
        for offset in (2, 3):
            await publish(on, quiet(offset - 1))
            await eventually(is_committed(on, offset, at=AT))
        assert len(receiver.received) == seen
        clock.advance(600)
        await eventually(lambda: (check.is_ok, its_own.is_ok) == (True, True))
        assert receiver.received[-1].body == b"[]"


@pytest.mark.parametrize("answer", [REFUSED, TOO_LARGE], ids=["invalid", "too large"])
async def test_each_good_alert_of_a_rejected_request_is_delivered(answer: Answer) -> None:
    on, dropped = bus(), rejected()
    bad = b'"13"'
    await publish_incidents(on, 11, 12, 13, 14)

    def answered(body: bytes) -> Answer:
        return answer if bad in body else Answer(200)

    async with receiving(by_body=answered) as receiver, running(sink(on, receiver)):
        await eventually(is_committed(on, 4))

    taken = [request.body for request in receiver.received if bad not in request.body]
    reported = {alert["labels"]["xid"] for body in taken for alert in orjson.loads(body)}
    assert reported == {"11", "12", "14"}
    assert rejected() - dropped == 1


async def test_a_good_incident_is_delivered_while_hundreds_are_rejected() -> None:
    on, clock = bus(), WaitingClock(START_NS + SECOND_NS)
    bad = range(1, 401)

    def refuses(body: bytes) -> Answer:
        clock.advance(0.5)  # more than all of them together can be tried in before they are due
        some_are = any(int(alert["labels"]["xid"]) in bad for alert in orjson.loads(body))
        return REFUSED if some_are else Answer(200)

    async with receiving(by_body=refuses) as receiver, running(sink(on, receiver, clock=clock)):
        await publish_incidents(on, *bad)
        await eventually(lambda: len(receiver.received) > 2)
        for xid in range(1001, 1006):
            seen = len(receiver.received)
            await publish_incidents(on, xid)
            await eventually(is_reported(receiver, xid, since=seen))
