"""How a component ends, tested with real processes because they own signals and exit codes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from gpuledger.errors import FreshStartError, SettingsError, UserError
from gpuledger.runtime import explain_user_errors, run_until_signalled
from tests.hanging import HANG_SECONDS

CHILD = Path(__file__).with_name("lifecycle_child.py")


@contextmanager
def running(case: str) -> Iterator[subprocess.Popen[str]]:
    """Start the child and wait until it reports that it works."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("GPULEDGER_")}
    with subprocess.Popen(
        [sys.executable, str(CHILD), case],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "working\n"
            yield child
        finally:
            child.kill()


def logged(stderr: str) -> list[str]:
    return [json.loads(line)["event"] for line in stderr.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("case", ["slow", "service"])
def test_a_signal_cancels_the_work_and_waits_for_its_cleanup(
    case: str, number: signal.Signals
) -> None:
    with running(case) as child:
        child.send_signal(number)
        stdout, stderr = child.communicate(timeout=HANG_SECONDS)

    assert (child.returncode, stdout) == (0, "cleaned up\n")
    assert "signal_received" in logged(stderr)


def test_the_first_line_names_the_program_and_where_it_runs() -> None:
    with running("service") as child:
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=HANG_SECONDS)

    lines = [json.loads(line) for line in stderr.splitlines()]
    assert (lines[0]["event"], lines[0]["node"]) == ("service_started", "node-1")
    assert lines[0]["http"].startswith("127.0.0.1:")
    assert lines[-1]["event"] == "service_ended"


def test_a_signal_during_an_outage_does_not_log_a_recovery() -> None:
    with running("service-in-outage") as child:
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=HANG_SECONDS)

    message = [event for event in logged(stderr) if event.startswith("check_")]
    assert message == ["check_failed"]


@pytest.mark.parametrize(
    "case", ["hanging", "blocking", "reading-a-fifo", "left-task", "left-thread"]
)
def test_work_that_does_not_end_in_time_is_ended_with_a_log_line_and_exit_code_one(
    case: str,
) -> None:
    with running(case) as child:
        before = time.monotonic()
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=HANG_SECONDS)

    assert child.returncode == 1
    assert logged(stderr)[-1] == "stop_deadline_missed"
    assert 0.3 <= time.monotonic() - before < HANG_SECONDS


@pytest.mark.parametrize("case", ["logging-to-nobody", "logging-to-nobody-at-once"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_log_that_nobody_reads_does_not_keep_a_process_from_ending(
    case: str, number: signal.Signals
) -> None:
    with running(case) as child:
        child.send_signal(number)
        assert child.wait(timeout=HANG_SECONDS) == 1


def test_a_second_signal_does_not_interrupt_the_cleanup() -> None:
    with running("slow") as child:
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        stdout, _ = child.communicate(timeout=HANG_SECONDS)

    assert (child.returncode, stdout) == (0, "cleaned up\n")


@pytest.mark.parametrize("case", ["signalled-twice-at-once", "signalled-within-the-handler"])
def test_two_signals_at_the_same_instant_count_as_one(case: str) -> None:
    with running(case) as child:
        stdout, stderr = child.communicate(timeout=HANG_SECONDS)

    assert (child.returncode, stdout) == (0, "cleaned up\n")
    assert logged(stderr) == ["signal_received"]


def test_a_second_signal_at_interpreter_shutdown_does_not_become_the_exit_code() -> None:
    with running("signalled-late") as child:
        child.send_signal(signal.SIGTERM)
        stdout, _ = child.communicate(timeout=HANG_SECONDS)

    assert (child.returncode, stdout) == (0, "cleaned up\n")


def test_a_failure_in_the_cleanup_is_logged_and_gives_exit_code_one() -> None:
    with running("failing-cleanup") as child:
        child.send_signal(signal.SIGTERM)
        _, stderr = child.communicate(timeout=HANG_SECONDS)

    assert child.returncode == 1
    assert "could not clean up" in json.loads(stderr.splitlines()[-1])["exception"]


async def succeed() -> None:
    await asyncio.sleep(0)


async def fail() -> None:
    raise RuntimeError("broken")


async def err() -> None:
    raise SettingsError("kafka.client_id:\nwrong")


async def err_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(err())


async def err_and_fail() -> None:
    raise BaseExceptionGroup("both", [SettingsError("a"), RuntimeError("b")])


async def request_restart() -> None:
    raise FreshStartError("the driver is stuck")


async def request_restart_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(request_restart())


async def cancel_itself() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("work", "code"),
    [
        (succeed, 0),
        (fail, 1),
        (err_and_fail, 1),
        (cancel_itself, 1),
        (request_restart, 1),
        (err, 2),
        (err_in_a_group, 2),
    ],
)
def test_the_exit_code_shows_how_the_work_ended(work: object, code: int) -> None:
    assert run_until_signalled(work) == code  # type: ignore[arg-type]  # a row of the table above


@pytest.mark.parametrize("work", [err, err_in_a_group])
@pytest.mark.parametrize("started", ["gpuledger agent", "/x/gpuledger agent/__main__.py"])
def test_a_user_error_is_one_line_with_the_programs_name(
    work: object,
    started: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    run_until_signalled(work)  # type: ignore[arg-type]  # a row of the table above

    assert capsys.readouterr().err == "gpuledger agent: kafka.client_id: wrong\n"


@pytest.mark.parametrize("work", [request_restart, request_restart_in_a_group])
def test_a_requested_restart_is_one_log_line_without_a_traceback(work: object) -> None:
    with structlog.testing.capture_logs() as logged:
        assert run_until_signalled(work) == 1  # type: ignore[arg-type]  # a row of the table above
    message = {"log_level": "critical", "error": "the driver is stuck"}
    assert logged == [{"event": "service_failed", **message}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_at_the_end_a_signal_gets_its_previous_handler_back(number: signal.Signals) -> None:
    """Not the default: a SIGTERM at interpreter shutdown would then be the exit code."""
    before = signal.getsignal(number)
    run_until_signalled(succeed)

    assert signal.getsignal(number) is before


def test_a_user_error_in_main_gives_exit_code_two_and_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @explain_user_errors
    def main() -> int:
        raise UserError("do it otherwise")

    assert main() == 2
    assert capsys.readouterr().err.endswith(": do it otherwise\n")


def test_a_user_error_does_not_show_the_password_of_an_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @explain_user_errors
    def main() -> int:
        raise UserError("urls: 'ftp://ada:hunter2@receiver' must begin with http://")

    main()
    assert capsys.readouterr().err.endswith(": urls: 'ftp://receiver' must begin with http://\n")


def test_a_main_without_an_error_returns_its_own_exit_code() -> None:
    assert explain_user_errors(lambda: 7)() == 7
