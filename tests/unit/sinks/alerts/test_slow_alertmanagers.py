"""Alertmanagers that are slow, hang or are unavailable delay neither others nor polls."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.runtime import Readiness
from gpuledger_sinks.registry import ALERTS
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.sinks.alerts.alerting import (
    AT,
    WaitingClock,
    hanging,
    is_committed,
    is_reported,
    publish_incidents,
    quiet,
    sink,
    xids,
)
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    START_NS,
    bus,
    committed,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Received, Receiver, receiving


async def test_a_new_incident_is_sent_next_however_slow_the_resending_of_active_ones() -> None:
    """With every answer more of them are due again, because they began one after another."""
    on, clock, seconds = bus(), WaitingClock(START_NS + SECOND_NS), [0.0]

    def slowly(_: bytes) -> Answer:
        clock.advance(seconds[0])
        return Answer(200)

    async with receiving(by_body=slowly) as receiver, running(sink(on, receiver, clock=clock)):
        for xid in range(1, 101):
            await publish_incidents(on, xid)
            await eventually(is_reported(receiver, xid))
            clock.advance(1.0)
        seconds[0] = 1.0
        for xid in range(1001, 1011):
            seen = len(receiver.received)
            await publish_incidents(on, xid)
            await eventually(is_reported(receiver, xid, since=seen))


async def test_a_slow_alertmanager_delays_no_poll_and_no_unsent_alert_is_committed() -> None:
    on, clock, may_answer = bus(), WaitingClock(START_NS + SECOND_NS), asyncio.Event()
    at = place_of(NODE, ATTRIBUTED_INCIDENTS.name)
    async with slow(may_answer) as receiver, running(sink(on, receiver, clock=clock)):
        await publish_incidents(on, 1)
        await eventually(lambda: receiver.received)
        await publish(on, *(quiet(tick) for tick in range(5)))
        await eventually(is_committed(on, 5, at=AT))
        clock.advance(100)
        assert committed(on, ALERTS.group, at) is None
        assert REGISTRY.get_sample_value("gpuledger_sink_lag_seconds", {"sink": "alerts"})
        may_answer.set()
        await eventually(lambda: committed(on, ALERTS.group, at) == 1)


async def test_the_check_of_an_alertmanager_fails_while_it_gets_alerts_late() -> None:
    on, clock, readiness = bus(), WaitingClock(START_NS + SECOND_NS), Readiness()
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
    assert details == ["slow: it answers, but due alerts wait 100 s"]


@asynccontextmanager
async def slow(may_answer: asyncio.Event) -> AsyncIterator[Receiver]:
    """Run an Alertmanager that answers once the test allows it."""
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


async def test_an_alertmanager_that_hangs_delays_no_other() -> None:
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


async def test_attempts_at_an_unavailable_alertmanager_become_less_frequent() -> None:
    on, clock = bus(), WaitingClock(START_NS + SECOND_NS)
    await publish_incidents(on, 1)
    async with (
        receiving() as well,
        receiving(by_body=lambda _: Answer(503)) as away,
        running(sink(on, well, away, clock=clock)),
    ):
        await eventually(lambda: len(clock.slept) >= 5)
        assert clock.slept == sorted(clock.slept)
        assert len(away.received) <= len(clock.slept) + 1


async def test_the_check_of_an_alertmanager_passes_only_after_an_answer() -> None:
    on, readiness, is_away = bus(), Readiness(), {True}
    clock = WaitingClock(START_NS + SECOND_NS)
    await publish_incidents(on, 1)
    async with (
        receiving() as well,
        receiving(by_body=lambda _: Answer(503, "away") if is_away else Answer(200)) as away,
        running(sink(on, well, away, readiness=readiness, clock=clock)),
    ):
        check = readiness.check(f"alerts.alertmanager {away.url}")
        await eventually(lambda: check.has_failed)
        clock.advance(3600)  # by now no alert is active that could be sent
        await eventually(lambda: away.received[-1].body == b"[]")
        seen = len(away.received)
        await eventually(lambda: len(away.received) > seen + 5)
        assert "away" in check.detail
        is_away.clear()
        await eventually(lambda: check.is_ok)

        assert check.detail == away.url
        assert readiness.check("alerts.receiver").detail == f"{well.url}, {away.url}"


async def test_the_receiver_is_unavailable_if_every_alertmanager_is() -> None:
    on, readiness, away = bus(), Readiness(), {"one", "other"}
    clock = WaitingClock(START_NS + SECOND_NS)
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


async def test_no_request_to_an_alertmanager_is_pending_when_the_sink_has_ended() -> None:
    on = bus()
    await publish_incidents(on, 1)
    async with hanging() as hung:
        before = asyncio.all_tasks()
        async with running(sink(on, hung)):
            await eventually(lambda: hung.received)
            during = asyncio.all_tasks() - before
        assert all(task.done() for task in during if "never" not in repr(task.get_coro()))
