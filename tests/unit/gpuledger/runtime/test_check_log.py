"""A failure is logged at its start and at its end, and a flapping check does not fill the log."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from structlog.testing import capture_logs
from structlog.typing import EventDict

from gpuledger.runtime.readiness import CALM_SECONDS, MAX_REASONS, CheckLog


class Later:
    """A clock that the test sets, and the calls that wait for it."""

    def __init__(self) -> None:
        self.now_seconds = 1000.0
        self._due: list[tuple[float, Callable[[], None], list[bool]]] = []

    def seconds(self) -> float:
        return self.now_seconds

    def later(self, seconds: float, call: Callable[[], None]) -> "Handle":
        cancelled: list[bool] = []
        self._due.append((self.now_seconds + seconds, call, cancelled))
        return Handle(cancelled)

    def wait(self, seconds: float) -> None:
        self.now_seconds += seconds
        due = [one for one in self._due if one[0] <= self.now_seconds]
        self._due = [one for one in self._due if one[0] > self.now_seconds]
        for _, call, cancelled in due:
            if not cancelled:
                call()


class Handle:
    def __init__(self, cancelled: list[bool]) -> None:
        self._cancelled = cancelled

    def cancel(self) -> None:
        self._cancelled.append(True)


@contextmanager
def logging() -> Iterator[tuple[CheckLog, Later, list[EventDict]]]:
    clock = Later()
    with capture_logs() as lines:
        log = CheckLog(check="kafka", severity="warning", seconds=clock.seconds, later=clock.later)
        yield log, clock, lines


def test_the_end_of_a_failure_is_logged_with_its_duration() -> None:
    with logging() as (log, clock, lines):
        log.failed("no broker")
        clock.wait(42.5)
        log.recovered()

    message = {"check": "kafka", "severity": "warning", "log_level": "warning"}
    assert lines == [
        {"event": "check_failed", "detail": "no broker", **message},
        {"event": "check_recovered", "failed_seconds": 42.5, "count": 1, **message},
    ]


def test_a_check_that_fails_every_second_writes_three_lines_and_one_more_once_stable() -> None:
    with logging() as (log, clock, lines):
        for _ in range(3600):
            log.failed("no broker")
            clock.wait(0.5)
            log.recovered()
            clock.wait(0.5)
        while_flapping = len(lines)
        clock.wait(CALM_SECONDS)

    assert while_flapping == 3
    assert [line["event"] for line in lines] == ["check_failed", "check_recovered"] * 2
    assert (lines[-1]["count"], lines[-1]["failed_seconds"]) == (3599, 3598.5)


def test_the_last_line_of_a_failing_check_reports_the_failure() -> None:
    with logging() as (log, clock, lines):
        for _ in range(9):
            log.failed("no broker")
            clock.wait(1)
            log.recovered()
            clock.wait(1)
        log.failed("no broker")
        clock.wait(10 * CALM_SECONDS)

    assert lines[-1]["event"] == "check_failed"


def test_failures_with_a_calm_minute_between_them_are_logged_one_by_one() -> None:
    with logging() as (log, clock, lines):
        for _ in range(3):
            log.failed("no broker")
            clock.wait(1)
            log.recovered()
            clock.wait(CALM_SECONDS)

    assert [line["event"] for line in lines] == ["check_failed", "check_recovered"] * 3


def test_without_an_event_loop_the_end_is_logged_at_once() -> None:
    log = CheckLog(check="kafka", severity="warning")
    with capture_logs() as lines:
        for _ in range(2):
            log.failed("no broker")
            log.recovered()

    assert [line["event"] for line in lines] == ["check_failed", "check_recovered"] * 2


def test_nothing_is_logged_for_a_check_that_never_failed() -> None:
    with logging() as (log, _, lines):
        log.recovered()

    assert lines == []


def test_a_check_that_waits_after_a_failure_logs_one_recovery() -> None:
    """For example at a rebalance: waiting is not a failure, and its end is not logged again."""
    with logging() as (log, clock, lines):
        _flap(log, clock)
        clock.wait(11)
        log.recovered()
        clock.wait(CALM_SECONDS)

    assert [line["event"] for line in lines] == ["check_failed", "check_recovered"] * 2
    assert (lines[-1]["failed_seconds"], lines[-1]["count"]) == (1, 1)


def test_no_recovery_is_logged_while_a_check_fails_however_often_it_was_ok_before() -> None:
    with logging() as (log, clock, lines):
        _flap(log, clock)
        clock.wait(11)
        log.recovered()
        clock.wait(5)
        log.failed("no broker for long")
        clock.wait(60 * CALM_SECONDS)

    assert [line["event"] for line in lines] == ["check_failed", "check_recovered", "check_failed"]


def test_each_new_reason_of_a_failure_is_logged_once_and_at_most_one_per_minute() -> None:
    """For example if a restarted broker no longer accepts the login."""
    reasons = ["no answer within 30 s", "SaslAuthenticationFailed", "no coordinator for 10 s"]
    with logging() as (log, clock, lines):
        log.failed(reasons[0])
        for second in range(600):
            log.still_fails(partial("{}; {} ticks wait".format, reasons[second % 3], second))
            clock.wait(1)
        log.recovered()

    events = [line["event"] for line in lines]
    assert events == ["check_failed", *["check_reason_changed"] * 3, "check_recovered"]
    assert {reason for reason in reasons for line in lines if reason in line.get("detail", "")} == {
        *reasons
    }


def test_the_number_of_logged_reasons_is_bounded() -> None:
    with logging() as (log, clock, lines):
        log.failed("reason")
        for hour in range(1000):
            clock.wait(3600)
            log.still_fails(partial("reason {}".format, "x" * hour))

    assert len(lines) == MAX_REASONS


def test_a_failure_after_a_calm_minute_logs_its_reasons_again() -> None:
    with logging() as (log, clock, lines):
        for _ in range(2):
            log.failed("no answer")
            clock.wait(CALM_SECONDS)
            log.still_fails(lambda: "SaslAuthenticationFailed")
            log.recovered()
            clock.wait(2 * CALM_SECONDS)

    assert [line["event"] for line in lines] == [
        "check_failed",
        "check_reason_changed",
        "check_recovered",
    ] * 2


def _flap(log: CheckLog, clock: Later) -> None:
    """Fail and recover twice, so that the second recovery is logged only once it is stable."""
    for _ in range(2):
        log.failed("no broker")
        clock.wait(1)
        log.recovered()
        clock.wait(1)
