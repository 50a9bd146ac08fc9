"""The alerts sink over the bus in memory and Alertmanagers that answer as told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from msgspec.structs import replace
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Subscription
from gpuledger.codec import encode
from gpuledger.records import Account, AttributedIncident, GpuBooks, GpuEvent, Incident, Severity
from gpuledger.runtime import Readiness
from gpuledger.topics import ATTRIBUTED_INCIDENTS, EVENTS
from sinks.alerts.active_alerts import rfc3339
from sinks.loop import run_sink
from sinks.registry import ALERTS
from sinks.settings import AlertsSettings, BusyWithoutPodSettings
from tests.unit.sinks.builders import (
    GPU,
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
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
from tests.unit.sinks.receiver import Answer, Received, Receiver, receiving

AT = place_of(NODE)
AT_INCIDENTS = place_of(NODE, ATTRIBUTED_INCIDENTS.name)


class PatientClock(ManualClock):
    """A clock that the test alone moves: who waits before another attempt moves no time."""

    @override
    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0.005)


class GatedClock(PatientClock):
    """A clock by which who waits before another attempt goes on when the test says so."""

    def __init__(self) -> None:
        super().__init__(START_NS + SECOND_NS)
        self.gate = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        await self.gate.wait()


def sink(
    on: MemoryBus,
    *receivers: Receiver,
    readiness: Readiness | None = None,
    clock: ManualClock | None = None,
    **changes: Any,  # noqa: ANN401  # as AlertsSettings takes them
) -> asyncio.Future[None]:
    settings = AlertsSettings(
        urls=[receiver.url for receiver in receivers],
        busy_without_pod=BusyWithoutPodSettings(for_seconds=1.0),
        **changes,
    )
    return asyncio.ensure_future(
        run_sink(
            ALERTS,
            bus=on,
            settings=settings,
            readiness=readiness or Readiness(),
            clock=clock or PatientClock(START_NS + SECOND_NS),
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
    return lambda: committed(on, ALERTS.group, AT) == offset


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


async def test_no_alert_is_sent_while_nothing_is_wrong() -> None:
    on = bus()
    async with receiving() as receiver, running(sink(on, receiver)):
        await publish(on, quiet(0), busy(1), quiet(2))
        await eventually(is_committed(on, 3))

    assert alerts(receiver) == []


@pytest.mark.parametrize("status", [401, 404])
async def test_an_address_or_a_login_that_is_wrong_is_known_before_the_first_alert(
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
        assert all(f"{receiver.url}: {status} no: look at" in check.detail for check in checks)
        is_wrong.clear()
        await eventually(lambda: all(check.is_ok for check in checks))

    assert alerts(receiver) == []


async def test_an_address_that_becomes_wrong_while_nothing_is_due_is_known_within_a_minute() -> (
    None
):
    on, readiness, is_wrong = bus(), Readiness(), set[str]()
    clock = PatientClock(START_NS + SECOND_NS)
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


async def test_one_alertmanager_that_is_away_holds_nothing_up_and_is_told_later() -> None:
    on, readiness, is_away = bus(), Readiness(), {True}
    async with (
        receiving() as one,
        receiving(by_body=lambda _: Answer(503, "away") if is_away else Answer(200)) as other,
        running(sink(on, one, other, readiness=readiness)),
    ):
        await publish(on, busy(0), busy(1))
        await eventually(is_committed(on, 2))
        assert len(alerts(one)) == 1
        assert readiness.is_ready()
        assert readiness.check(f"alerts.alertmanager {one.url}").is_ok
        assert "away" in readiness.check(f"alerts.alertmanager {other.url}").detail
        is_away.clear()
        await eventually(lambda: readiness.check(f"alerts.alertmanager {other.url}").is_ok)
        assert alerts(other)[-1]["labels"] == alerts(one)[0]["labels"]


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
    Answer(200, "<html>Please log in</html>", {"Content-Type": "text/html; charset=utf-8"}),
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
    assert all(f"{receiver.url}: {answer.status}" in detail for detail in failed.values())


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
    clock = PatientClock(START_NS + SECOND_NS)
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
        seen = len(receiver.received)
        for offset in (5, 6):
            await publish(on, quiet(offset - 1))
            await eventually(is_committed(on, offset))
        assert len(receiver.received) == seen
        clock.advance(600)
        await eventually(lambda: (check.is_ok, its_own.is_ok) == (True, True))
        assert receiver.received[-1].body == b"[]"


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
        await eventually(lambda: committed(on, ALERTS.group, AT_INCIDENTS) == 2)

    assert [alert["labels"]["xid"] for alert in alerts(receiver)] == ["79"] * sent
    assert [letter.offset for letter in await dead_letters(on)] == [0]


async def publish_incidents(on: MemoryBus, *xids: int, node: str = NODE) -> None:
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    async with on.producer() as producer:
        for xid in xids:
            one = incident(START_NS)
            value = encode(replace(one, incident=replace(one.incident, node=node, xid=xid)))
            await producer.publish(*at, [Message(key=b"k", value=value, timestamp_ms=0)])


@asynccontextmanager
async def another_member(on: MemoryBus) -> AsyncIterator[None]:
    """Let another member join the group, take its share, and use none of it."""

    async def polls() -> None:
        topics = (EVENTS.name, ATTRIBUTED_INCIDENTS.name)
        async with on.consumer(Subscription(group=ALERTS.group, topics=topics)) as consumer:
            while True:
                await consumer.poll(timeout_seconds=0.01, max_records=1)
                if consumer.assignment():
                    joined.set()

    joined = asyncio.Event()
    async with running(polls()):
        await joined.wait()
        yield


def xids(receiver: Receiver, *, since: int = 0) -> set[str]:
    requests = receiver.received[since:]
    return {alert["labels"]["xid"] for each in requests for alert in orjson.loads(each.body)}


def is_told(receiver: Receiver, xid: int, *, since: int = 0) -> Callable[[], bool]:
    return lambda: str(xid) in xids(receiver, since=since)


NODES = [next(f"n{n}" for n in range(99) if place_of(f"n{n}").partition == at) for at in (0, 1)]
"""A node of each partition: of the first, which stays, and of the other, which goes."""
STAYS, GOES = NODES


def assignments(logged: Sequence[Mapping[str, Any]]) -> int:
    return [line["event"] for line in logged].count("partitions_assigned")


@pytest.mark.parametrize("node", NODES)
async def test_what_no_alertmanager_took_is_told_after_any_rebalance(node: str) -> None:
    on, clock, is_away = bus(), GatedClock(), {True}
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    await publish_incidents(on, 79, node=node)
    async with receiving(by_body=lambda _: Answer(503 if is_away else 200)) as receiver:
        with capture_logs() as logged:
            async with running(sink(on, receiver, clock=clock)):
                await eventually(lambda: clock.slept)
                async with another_member(on):
                    await eventually(lambda: assignments(logged) == 2)
                    seen = len(receiver.received)
                    clock.gate.set()
                    await eventually(lambda: len(receiver.received) > seen + 5)
                    assert committed(on, ALERTS.group, at) is None
        is_away.clear()
        seen = len(receiver.received)
        async with running(sink(on, receiver)):
            await eventually(lambda: xids(receiver, since=seen) == {"79"})


async def test_incidents_of_a_topic_made_anew_while_no_alertmanager_answers_are_all_told() -> None:
    on, clock, is_away = bus(), GatedClock(), {True}
    at = place_of(NODE, ATTRIBUTED_INCIDENTS.name)
    await publish_incidents(on, 1, 2, 3, 4, 5)
    async with receiving(by_body=lambda _: Answer(503 if is_away else 200)) as receiver:
        with capture_logs() as logged:
            async with running(sink(on, receiver, clock=clock)):
                await eventually(lambda: clock.slept)
                on.recreate(ATTRIBUTED_INCIDENTS.name)
                await publish_incidents(on, 11, 12)
                await eventually(lambda: assignments(logged) == 2)
                is_away.clear()
                clock.gate.set()
                await eventually(lambda: committed(on, ALERTS.group, at))
                await eventually(lambda: "12" in xids(receiver))
        await publish_incidents(on, 21, 22, 23)
        async with running(sink(on, receiver)):
            await eventually(lambda: committed(on, ALERTS.group, at) == 5)

    assert xids(receiver) >= {"11", "12", "21", "22", "23"}


async def test_alerts_of_a_partition_that_is_anothers_are_not_sent_again() -> None:
    on, clock = bus(), PatientClock(START_NS + SECOND_NS)
    await publish_incidents(on, 48, node=STAYS)
    await publish_incidents(on, 79, node=GOES)
    async with receiving() as receiver, running(sink(on, receiver, clock=clock)):
        await eventually(lambda: xids(receiver) == {"48", "79"})
        async with another_member(on):
            seen = len(receiver.received)
            await publish_incidents(on, 49, node=STAYS)
            await eventually(lambda: len(receiver.received) > seen)
            clock.advance(61)
            await eventually(lambda: len(receiver.received) > seen + 1)

    assert xids(receiver, since=seen) == {"49"}


@asynccontextmanager
async def hanging() -> AsyncIterator[Receiver]:
    """Run an Alertmanager that takes requests and answers none."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.received.append(Received("", {}, await reader.readline()))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    asked = Receiver(url=f"http://{host}:{port}")
    async with server:
        yield asked


async def test_a_new_incident_is_told_next_however_slowly_those_that_stand_are_told_again() -> None:
    """With every answer more of them are due again, as they began one after another."""
    on, clock, seconds = bus(), PatientClock(START_NS + SECOND_NS), [0.0]

    def slowly(_: bytes) -> Answer:
        clock.advance(seconds[0])
        return Answer(200)

    async with receiving(by_body=slowly) as receiver, running(sink(on, receiver, clock=clock)):
        for xid in range(1, 101):
            await publish_incidents(on, xid)
            await eventually(is_told(receiver, xid))
            clock.advance(1.0)
        seconds[0] = 1.0
        for xid in range(1001, 1011):
            seen = len(receiver.received)
            await publish_incidents(on, xid)
            await eventually(is_told(receiver, xid, since=seen))


async def test_a_good_incident_is_told_while_hundreds_are_refused() -> None:
    on, clock = bus(), PatientClock(START_NS + SECOND_NS)
    bad = range(1, 401)

    def refuses(body: bytes) -> Answer:
        clock.advance(0.5)  # more than all of them together can be asked in before they are due
        some_are = any(int(alert["labels"]["xid"]) in bad for alert in orjson.loads(body))
        return REFUSED if some_are else Answer(200)

    async with receiving(by_body=refuses) as receiver, running(sink(on, receiver, clock=clock)):
        await publish_incidents(on, *bad)
        await eventually(lambda: len(receiver.received) > 2)
        for xid in range(1001, 1006):
            seen = len(receiver.received)
            await publish_incidents(on, xid)
            await eventually(is_told(receiver, xid, since=seen))


async def test_a_slow_alertmanager_holds_up_no_poll_and_nothing_untold_is_committed() -> None:
    on, clock, may_answer = bus(), PatientClock(START_NS + SECOND_NS), asyncio.Event()
    at = place_of(NODE, ATTRIBUTED_INCIDENTS.name)
    async with slow(may_answer) as receiver, running(sink(on, receiver, clock=clock)):
        await publish_incidents(on, 1)
        await eventually(lambda: receiver.received)
        await publish(on, *(quiet(tick) for tick in range(5)))
        await eventually(is_committed(on, 5))
        clock.advance(100)
        assert committed(on, ALERTS.group, at) is None
        assert REGISTRY.get_sample_value("gpuledger_sink_lag_seconds", {"sink": "alerts"})
        may_answer.set()
        await eventually(lambda: committed(on, ALERTS.group, at) == 1)


async def test_an_alertmanager_that_is_told_late_fails_its_check_until_it_is_not() -> None:
    on, clock, readiness = bus(), PatientClock(START_NS + SECOND_NS), Readiness()
    seconds = [100.0]

    def slowly(_: bytes) -> Answer:
        clock.advance(seconds[0])
        return Answer(200)

    async with receiving(by_body=slowly) as receiver:
        await publish_incidents(on, *range(1, 301))
        async with running(sink(on, receiver, clock=clock, readiness=readiness)):
            check = readiness.check(f"alerts.alertmanager {receiver.url}")
            with capture_logs() as logged:
                await eventually(lambda: check.has_failed)
                seconds[0] = 0.0
                await eventually(lambda: check.is_ok)
    details = [line["detail"] for line in logged if line["event"] == "check_failed"]
    assert details == ["slow: it answers, but what it is due waits 100 s"]


@asynccontextmanager
async def slow(may_answer: asyncio.Event) -> AsyncIterator[Receiver]:
    """Run an Alertmanager that answers once it may."""
    receiver = Receiver()

    async def answer(request: web.Request) -> web.Response:
        receiver.received.append(Received(request.path, {}, await request.read()))
        await may_answer.wait()
        return web.Response(status=200)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def test_an_alertmanager_that_hangs_holds_up_no_other() -> None:
    on = bus()
    at = place_of(NODE, ATTRIBUTED_INCIDENTS.name)

    def is_done(offset: int) -> bool:
        return committed(on, ALERTS.group, at) == offset

    async with (
        hanging() as hung,
        receiving() as well,
        running(sink(on, hung, well, timeout_seconds=3600.0)),
    ):
        for count in range(1, 6):
            await publish_incidents(on, count)
            await eventually(partial(is_done, count))

        assert xids(well) == {"1", "2", "3", "4", "5"}
        assert len(hung.received) == 1


async def test_an_alertmanager_that_is_away_is_left_alone_longer_from_attempt_to_attempt() -> None:
    on, clock = bus(), PatientClock(START_NS + SECOND_NS)
    await publish_incidents(on, 1)
    async with (
        receiving() as well,
        receiving(by_body=lambda _: Answer(503)) as away,
        running(sink(on, well, away, clock=clock)),
    ):
        await eventually(lambda: len(clock.slept) >= 5)
        assert clock.slept == sorted(clock.slept)
        assert len(away.received) <= len(clock.slept) + 1


async def test_the_check_of_an_alertmanager_passes_with_an_answer_and_with_nothing_else() -> None:
    on, readiness, is_away = bus(), Readiness(), {True}
    clock = PatientClock(START_NS + SECOND_NS)
    await publish_incidents(on, 1)
    async with (
        receiving() as well,
        receiving(by_body=lambda _: Answer(503, "away") if is_away else Answer(200)) as away,
        running(sink(on, well, away, readiness=readiness, clock=clock)),
    ):
        check = readiness.check(f"alerts.alertmanager {away.url}")
        await eventually(lambda: check.has_failed)
        clock.advance(3600)  # by now nothing stands that it could be told
        await eventually(lambda: away.received[-1].body == b"[]")
        seen = len(away.received)
        await eventually(lambda: len(away.received) > seen + 5)
        assert "away" in check.detail
        is_away.clear()
        await eventually(lambda: check.is_ok)

        assert check.detail == away.url
        assert readiness.check("alerts.receiver").detail == f"{well.url}, {away.url}"


async def test_the_receiver_is_away_where_every_alertmanager_is() -> None:
    on, readiness, away = bus(), Readiness(), {"one", "other"}
    clock = PatientClock(START_NS + SECOND_NS)
    check = readiness.check("alerts.receiver")
    await publish_incidents(on, 1)

    def answer(name: str) -> Callable[[bytes], Answer]:
        return lambda _: Answer(503 if name in away else 200)

    async with (
        receiving(by_body=answer("one")) as one,
        receiving(by_body=answer("other")) as other,
        running(sink(on, one, other, readiness=readiness, clock=clock)),
    ):
        checks = [readiness.check(f"alerts.alertmanager {each.url}") for each in (one, other)]
        await eventually(lambda: check.has_failed)
        away.clear()
        await eventually(lambda: all(each.is_ok for each in (check, *checks)))
        for name, its_own in zip(("one", "other"), checks, strict=True):
            away.add(name)
            clock.advance(61)
            await eventually(partial(getattr, its_own, "has_failed"))
            assert check.is_ok
            away.clear()
            await eventually(partial(getattr, its_own, "is_ok"))


async def test_at_its_end_nothing_is_on_its_way_to_an_alertmanager() -> None:
    on = bus()
    await publish_incidents(on, 1)
    async with hanging() as hung:
        before = asyncio.all_tasks()
        async with running(sink(on, hung)):
            await eventually(lambda: hung.received)
            during = asyncio.all_tasks() - before
        assert all(task.done() for task in during if "never" not in repr(task.get_coro()))


async def test_an_incident_that_nobody_took_for_hours_is_held_from_when_it_is_taken() -> None:
    on, is_away = bus(), {True}
    clock = PatientClock(START_NS + SECOND_NS)
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
        ({"urls": []}, "urls: name at least one Alertmanager"),
        ({"urls": ["am:9093"]}, "'am:9093' must begin with http"),
    ],
)
def test_settings_that_cannot_work_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(values, AlertsSettings)
