"""Ready means that checks exist and no critical one fails; a failure is logged at start and end."""

import asyncio

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.runtime import Check, CheckParts, CheckSeverity, Readiness
from gpuledger.runtime.readiness import CALM_SECONDS, CheckLog
from gpuledger.runtime.tasks import end_tasks
from tests.hanging import HANG_SECONDS


def test_nothing_is_ready_before_a_first_check() -> None:
    assert not Readiness().is_ready()


def test_a_new_check_fails_until_it_is_set_to_ok() -> None:
    readiness = Readiness()
    check = readiness.check("kafka")
    assert not readiness.is_ready()
    check.ok()
    assert readiness.is_ready()


def test_one_failed_check_is_enough_not_to_be_ready() -> None:
    readiness = Readiness()
    readiness.check("kafka").ok("3 brokers")
    readiness.check("pods").failed("no answer")

    assert readiness.report() == {
        "ready": False,
        "checks": {
            "kafka": {"ok": True, "severity": "critical", "detail": "3 brokers"},
            "pods": {"ok": False, "severity": "critical", "detail": "no answer"},
        },
    }


def test_a_failed_warning_is_shown_and_does_not_affect_readiness() -> None:
    readiness = Readiness()
    readiness.check("nvml").ok("7 GPUs")
    readiness.check("gpus", severity=CheckSeverity.WARNING).failed("1 of 8 GPUs is lost")

    assert readiness.is_ready()
    assert readiness.report()["checks"] == {
        "nvml": {"ok": True, "severity": "critical", "detail": "7 GPUs"},
        "gpus": {"ok": False, "severity": "warning", "detail": "1 of 8 GPUs is lost"},
    }


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_component_is_not_ready_before_its_own_work_was_checked(*, is_ok: bool) -> None:
    """The web configuration and credentials are read earlier."""
    readiness = Readiness()
    check = readiness.check("web_config", severity=CheckSeverity.WARNING)
    check.ok() if is_ok else check.failed("expired")
    assert not readiness.is_ready()
    readiness.check("samples").ok()
    assert readiness.is_ready()


@pytest.mark.parametrize("is_broken", [True, False])
async def test_a_periodic_check_runs_even_if_another_one_raises(*, is_broken: bool) -> None:
    readiness, looked = Readiness(), asyncio.Event()

    def look() -> None:
        if is_broken:
            raise ValueError("a mistake of ours")

    readiness.add_periodic(look, check=readiness.check("web_config"))
    readiness.add_periodic(looked.set, check=readiness.check("kafka.credentials"))
    looking = asyncio.create_task(readiness.run_periodic(every_seconds=0))
    with capture_logs() as lines:
        async with asyncio.timeout(HANG_SECONDS):
            await looked.wait()
    await end_tasks(looking)
    message = [(line["event"], line["check"]) for line in lines]
    assert message == ([("file_watch_failed", "web_config")] if is_broken else [])


def test_a_new_reason_of_a_failure_is_logged_through_the_check() -> None:
    now_seconds = 0.0
    log = CheckLog(check="kafka", severity="warning", seconds=lambda: now_seconds)
    check = Check(
        on_change=lambda check: log.failed(check.detail),
        on_still_failing=lambda check: log.still_fails(lambda: check.detail),
    )
    with capture_logs() as lines:
        for message in (
            "no answer within 30 s",
            "no answer within 31 s",
            "SaslAuthenticationFailed",
        ):
            check.failed(message)
            now_seconds += CALM_SECONDS
    assert [(line["event"], line["detail"]) for line in lines] == [
        ("check_failed", "no answer within 30 s"),
        ("check_reason_changed", "SaslAuthenticationFailed"),
    ]


def test_a_check_is_created_once_for_each_name() -> None:
    readiness = Readiness()
    readiness.check("kafka").ok()
    readiness.check("kafka").failed("gone")

    assert readiness.check("kafka").detail == "gone"


def test_a_detail_that_is_a_function_is_evaluated_when_it_is_shown() -> None:
    pods: list[str] = []
    check = Check()
    check.ok(lambda: f"{len(pods)} pods")
    pods.append("a")

    assert check.detail == "1 pods"


def test_a_waiting_check_has_not_failed_and_a_failure_after_it_is_a_new_one() -> None:
    reported: list[tuple[bool, bool]] = []
    check = Check(on_change=lambda each: reported.append((each.is_ok, each.has_failed)))
    check.failed("gone")
    check.waits("reading")
    assert (check.is_ok, check.has_failed, check.detail) == (False, False, "reading")
    check.failed("gone")
    check.ok()
    check.waits("reading again")
    check.waits("reading on")

    assert reported == [(False, True), (False, True), (True, False), (False, False)]


def test_the_password_of_an_address_is_not_shown() -> None:
    check = Check()
    check.failed("https://ada:hunter2@receiver:9093: refused")

    assert check.detail == "https://receiver:9093: refused"


def test_an_outage_writes_two_log_lines_however_often_it_is_reported() -> None:
    readiness = Readiness()
    check = readiness.check("test_outage")
    with capture_logs() as logs:
        check.ok()
        for attempt in range(23):
            check.failed(f"no broker, attempt {attempt}")
        check.ok()
        check.ok()

    assert [(line["event"], line["log_level"]) for line in logs] == [
        ("check_failed", "warning"),
        ("check_recovered", "warning"),
    ]
    assert logs[0]["detail"] == "no broker, attempt 0"


def test_waiting_is_not_a_failure() -> None:
    readiness = Readiness()
    check = readiness.check("test_waits")
    with capture_logs() as logs:
        check.waits("reading back")
        check.ok()
        check.waits("reading back")

    assert (logs, check.is_ok) == ([], False)


def test_a_failure_that_turns_into_a_wait_recovers_once_the_check_is_ok() -> None:
    readiness = Readiness()
    check = readiness.check("test_fails_then_waits")
    with capture_logs() as logs:
        check.failed("gone")
        check.waits("reading back")
        check.ok()

    assert [line["event"] for line in logs] == ["check_failed", "check_recovered"]


def test_a_check_that_fails_when_the_work_ends_is_not_logged_as_recovered() -> None:
    """At its end a component gives up undelivered messages, so that no check is left failing."""
    readiness = Readiness()
    fails, holds = readiness.check("test_fails_at_end"), readiness.check("test_holds_at_end")
    holds.ok()
    with capture_logs() as logs:
        fails.failed("no broker")
        readiness.end()
        for check in (fails, holds):
            check.waits("ending")
            check.ok()

    assert [line["event"] for line in logs] == ["check_failed"]
    assert (fails.is_ok, fails.detail, holds.is_ok) == (False, "no broker", True)


def test_a_check_is_a_metric() -> None:
    readiness = Readiness()
    check = readiness.check("test_metric", severity=CheckSeverity.WARNING)

    def shown() -> float | None:
        labels = {"check": "test_metric", "severity": "warning"}
        return REGISTRY.get_sample_value("gpuledger_check_ok", labels)

    values = [shown()]
    check.ok()
    values.append(shown())
    check.failed("gone")

    assert [*values, shown()] == [0, 1, 0]


def test_a_combined_check_fails_while_one_part_does_and_shows_each_reason_once() -> None:
    check, is_ok = Check(), []
    parts = CheckParts(check)
    parts.ok("pods")
    is_ok.append(check.is_ok)
    for name in ("pods", "nodes"):
        parts.failed(name, "no broker answers")
    parts.failed("inventory", "no right to read")
    assert check.detail == "inventory: no right to read; nodes, pods: no broker answers"
    for name in ("nodes", "pods", "inventory"):
        parts.ok(name)
        is_ok.append(check.is_ok)
    assert is_ok == [True, False, False, True]
