"""A receiver that echoes its login puts it neither on /readyz nor into the log."""

import asyncio
import base64
import json
from collections.abc import Callable

import pytest
from structlog.testing import capture_logs

from gpuledger.runtime import Readiness
from gpuledger.settings import Secret
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import ALERTS, REMOTE_WRITE
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings
from tests.unit.sinks.alerts.alerting import publish_incidents
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Receiver, receiving

PASSWORD = "pa-hunter2"
BASIC = base64.b64encode(f"bob:{PASSWORD}".encode()).decode()
LOGINS: dict[str, tuple[dict[str, object], str]] = {
    "a token": ({"bearer_token": Secret(PASSWORD)}, f"Bearer {PASSWORD}"),
    "a password": ({"username": "bob", "password": Secret(PASSWORD)}, f"Basic {BASIC}"),
    "a password, decoded": ({"username": "bob", "password": Secret(PASSWORD)}, f"bob:{PASSWORD}"),
}


async def shown(work: asyncio.Future[None], readiness: Readiness, check: str) -> str:
    """Return the check's detail and the log after the receiver has answered."""
    with capture_logs() as logs:
        async with running(work):
            await eventually(lambda: "invalid credentials" in readiness.check(check).detail)
            return json.dumps([readiness.report(), logs], default=str)


def refusing(quoted: str) -> Answer:
    return Answer(401, f"invalid credentials: {quoted}")


def leading_to(quoted: str) -> Answer:
    return Answer(307, "invalid credentials", {"Location": f"https://sso/{quoted}"})


@pytest.mark.parametrize("answer", [refusing, leading_to])
@pytest.mark.parametrize("login", LOGINS)
async def test_remote_write_shows_no_login_that_its_receiver_echoes(
    login: str, answer: Callable[[str], Answer]
) -> None:
    given, quoted = LOGINS[login]
    on, readiness = bus(), Readiness()
    await publish(on, event(0))
    async with receiving(by_body=lambda _: answer(quoted)) as receiver:
        settings = RemoteWriteSettings(url=f"{receiver.url}/write", interval_seconds=0, **given)  # type: ignore[arg-type]  # settings' own names
        work = run_sink(
            REMOTE_WRITE, bus=on, settings=settings, readiness=readiness, clock=ManualClock()
        )
        message = await shown(asyncio.ensure_future(work), readiness, "remote_write.receiver")
    assert "hunter2" not in message
    assert BASIC not in message


@pytest.mark.parametrize("quoted", [f"Basic {BASIC}", f"bob:{PASSWORD}", PASSWORD])
async def test_alerts_show_no_login_that_an_alertmanager_echoes(quoted: str) -> None:
    on, readiness = bus(), Readiness()
    async with receiving(by_body=lambda _: refusing(quoted)) as receiver:
        url = with_login(receiver)
        settings = AlertsSettings(urls=[url])
        await publish_incidents(on, 79)
        clock = ManualClock(START_NS + SECOND_NS)
        work = run_sink(ALERTS, bus=on, settings=settings, readiness=readiness, clock=clock)
        message = await shown(asyncio.ensure_future(work), readiness, "alerts.receiver")
    assert "hunter2" not in message
    assert BASIC not in message


def with_login(receiver: Receiver) -> str:
    return receiver.url.replace("//", f"//bob:{PASSWORD}@")
