"""Processes that make bills: deadlines, turns, and their ends."""

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer
from gpuledger_reports.api.metrics import PROCESSES_ENDED_TOTAL
from gpuledger_reports.api.processes import (
    BillProcesses,
    BusyError,
    LateError,
    ProcessEndedError,
    kill_processes,
)
from gpuledger_reports.api.questions import BillQuestion, Question, StoreStateQuestion
from tests.metric_values import value_of
from tests.unit.reports.api.report_requests import settings_for, small_store

BILL = BillQuestion(window=None, by=("pod",))
ANSWER = ReportAnswer(body=b"{}")


def wait_to_be_let(_: Question, settings: AnswerSettings) -> ReportAnswer:
    """Write the process's id to a file, and answer once the file `let` exists."""
    folder = Path(settings.store_uri)
    (folder / "begun").write_text(str(os.getpid()))
    while not (folder / "let").exists():
        time.sleep(0.001)
    return ANSWER


def die_once(_: Question, settings: AnswerSettings) -> ReportAnswer:
    """Die of a signal the first time, like a process that the system kills."""
    folder = Path(settings.store_uri)
    if not (folder / "let").exists():
        (folder / "let").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return ANSWER


def fail(_: Question, __: AnswerSettings) -> ReportAnswer:
    raise ZeroDivisionError


def processes(
    folder: Path,
    answer: Callable[[Question, AnswerSettings], ReportAnswer] = wait_to_be_let,
    *,
    timeout_seconds: float = 60.0,
) -> BillProcesses:
    return BillProcesses(
        settings_for(str(folder)),
        count=1,
        max_waiting=1,
        timeout_seconds=timeout_seconds,
        answer=answer,
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # the condition depends on another process
        await asyncio.sleep(0.001)


def ended(reason: str) -> float:
    return value_of(PROCESSES_ENDED_TOTAL.labels(reason=reason))


async def test_a_request_beyond_the_queue_is_rejected_immediately_and_the_others_are_answered(
    tmp_path: Path,
) -> None:
    bills = processes(tmp_path)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(bills.ask(BILL))
        await until((tmp_path / "begun").exists)
        second = group.create_task(bills.ask(BILL))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await bills.ask(BILL)
        (tmp_path / "let").touch()
    assert first.result() == second.result() == await bills.ask(BILL) == ANSWER


async def test_a_cancelled_request_has_its_process_killed_and_frees_its_turn(
    tmp_path: Path,
) -> None:
    late = ended("late")
    bills = processes(tmp_path)
    requested = asyncio.create_task(bills.ask(BILL))
    await until(lambda: (tmp_path / "begun").exists() and _pid(tmp_path) > 0)
    requested.cancel()
    with pytest.raises(asyncio.CancelledError):
        await requested
    pid = _pid(tmp_path)
    await until(lambda: not Path(f"/proc/{pid}").exists())
    assert ended("late") == late + 1
    (tmp_path / "let").touch()
    assert await bills.ask(BILL) == ANSWER


def _pid(folder: Path) -> int:
    return int((folder / "begun").read_text() or 0)


async def test_waiting_for_a_turn_counts_towards_the_deadline(tmp_path: Path) -> None:
    bills = processes(tmp_path, timeout_seconds=0.05)
    found = await asyncio.gather(bills.ask(BILL), bills.ask(BILL), return_exceptions=True)
    assert [type(one) for one in found] == [LateError, LateError]


async def test_the_store_is_read_in_a_process(tmp_path: Path) -> None:
    settings = small_store(tmp_path)
    bills = BillProcesses(settings, count=1, max_waiting=0, timeout_seconds=60.0)
    check_store = json.loads((await bills.ask(StoreStateQuestion())).body)
    bill = json.loads((await bills.ask(BILL)).body)
    wrong = await bills.ask(BillQuestion(window=None, by=("nonsense",)))
    assert check_store["tables"]["usage_hourly"] == 0
    assert bill["prices"]["sha256"] == check_store["prices"]
    assert (wrong.status, json.loads(wrong.body)["parameter"]) == (400, "by")


async def test_a_process_that_dies_fails_only_its_own_request(tmp_path: Path) -> None:
    died = ended("died")
    bills = processes(tmp_path, die_once)
    with pytest.raises(ProcessEndedError):
        await bills.ask(BILL)
    assert ended("died") == died + 1
    assert await bills.ask(BILL) == ANSWER


async def test_an_internal_error_is_a_response_too(tmp_path: Path) -> None:
    answer = await processes(tmp_path, fail).ask(BILL)
    assert (answer.status, json.loads(answer.body)["status"]) == (500, "error")


async def test_the_end_of_the_service_kills_all_processes(tmp_path: Path) -> None:
    requested = asyncio.create_task(processes(tmp_path).ask(BILL))
    await until((tmp_path / "begun").exists)
    kill_processes()
    with pytest.raises(ProcessEndedError):
        await requested
    assert not [one for one in multiprocessing.active_children() if one.name == "bill"]
