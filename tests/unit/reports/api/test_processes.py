"""Processes that make bills: deadlines, turns, and what their end costs."""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuledger_reports.api.answering import ReportAnswer
from gpuledger_reports.api.processes import (
    AnswererPool,
    BillProcess,
    BusyError,
    LateError,
    ProcessEndedError,
)
from gpuledger_reports.api.questions import BillQuestion, LookQuestion, Question
from gpuledger_reports.metrics import PROCESSES_ENDED_TOTAL
from tests.metric_values import value_of
from tests.unit.reports.api.questions_asked import settings_for, small_store

BILL = BillQuestion(window=None, by=("pod",))


@dataclass
class HeldAnswerer:
    """Answers once it is let, and counts how many of its questions were given up."""

    let: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    given_up: int = 0

    async def ask(self, _: Question) -> ReportAnswer:
        self.begun.set()
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return ReportAnswer(body=b"{}")

    async def close(self) -> None:
        pass


def pool_of(
    answerer: HeldAnswerer, *, max_waiting: int = 1, timeout_seconds: float = 60.0
) -> AnswererPool:
    return AnswererPool(
        lambda: answerer, count=1, max_waiting=max_waiting, timeout_seconds=timeout_seconds
    )


async def test_one_more_than_may_wait_is_refused_at_once_and_the_others_are_answered() -> None:
    answerer = HeldAnswerer()
    pool = pool_of(answerer, max_waiting=1)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(pool.ask(BILL))
        await answerer.begun.wait()
        second = group.create_task(pool.ask(BILL))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await pool.ask(BILL)
        answerer.let.set()
    assert first.result() == second.result() == ReportAnswer(body=b"{}")
    assert await pool.ask(BILL) == ReportAnswer(body=b"{}")


async def test_at_the_deadline_the_work_is_given_up_and_the_next_question_has_its_turn() -> None:
    answerer = HeldAnswerer()
    pool = pool_of(answerer, timeout_seconds=0.01)
    with pytest.raises(LateError):
        await pool.ask(BILL)
    assert answerer.given_up == 1
    answerer.let.set()
    assert await pool.ask(BILL) == ReportAnswer(body=b"{}")


async def test_waiting_for_a_turn_counts_towards_the_deadline() -> None:
    answerer = HeldAnswerer()
    pool = pool_of(answerer, timeout_seconds=0.05)
    found = await asyncio.gather(pool.ask(BILL), pool.ask(BILL), return_exceptions=True)
    assert [type(one) for one in found] == [LateError, LateError]


async def test_a_process_answers_one_question_after_the_other(tmp_path: Path) -> None:
    process = BillProcess(small_store(tmp_path))
    try:
        look = json.loads((await process.ask(LookQuestion())).body)
        bill = json.loads((await process.ask(BILL)).body)
        wrong = await process.ask(BillQuestion(window=None, by=("nonsense",)))
    finally:
        await process.close()
    assert look["tables"]["usage_hourly"] == 0
    assert bill["prices"]["sha256"] == look["prices"]
    assert (wrong.status, json.loads(wrong.body)["parameter"]) == (400, "by")


async def test_a_process_that_is_late_is_killed_and_another_one_started(tmp_path: Path) -> None:
    process = BillProcess(small_store(tmp_path))
    # Nothing starts within a microsecond: the deadline comes while the process is at work.
    pool = AnswererPool(lambda: process, count=1, max_waiting=0, timeout_seconds=1e-6)
    with pytest.raises(LateError):
        await pool.ask(BILL)
    try:
        assert (await process.ask(BILL)).status == 200
    finally:
        await process.close()


async def test_a_process_that_ends_by_itself_costs_its_question_alone(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    lines = (
        "import runpy, sys",
        "from pathlib import Path",
        f"begun = Path({str(begun)!r})",
        "begun.exists() or (begun.touch(), sys.exit(1))",
        "runpy.run_module('gpuledger_reports.api.bill_worker', run_name='__main__')",
    )
    command = (sys.executable, "-c", "\n".join(lines))
    process = BillProcess(small_store(tmp_path), command=command)
    died = value_of(PROCESSES_ENDED_TOTAL.labels(reason="died"))
    with pytest.raises(ProcessEndedError):
        await process.ask(LookQuestion())
    assert value_of(PROCESSES_ENDED_TOTAL.labels(reason="died")) == died + 1
    try:
        assert (await process.ask(LookQuestion())).status == 200
    finally:
        await process.close()


async def test_a_process_that_ended_between_two_questions_costs_no_answer(tmp_path: Path) -> None:
    """Killed as the system does it, and asked before the event loop was told of that."""
    process = BillProcess(small_store(tmp_path))
    died = value_of(PROCESSES_ENDED_TOTAL.labels(reason="died"))
    try:
        first = await process.ask(LookQuestion())
        _kill_unnoticed(process)
        assert await process.ask(LookQuestion()) == first
    finally:
        await process.close()
    assert value_of(PROCESSES_ENDED_TOTAL.labels(reason="died")) == died


def _kill_unnoticed(process: BillProcess) -> None:
    """Kill the process and wait until it has ended, without a step of the event loop."""
    worker = process._process  # noqa: SLF001  # what the system would kill
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    # A thread of asyncio's waits for it as well, and may be the one that is told.
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert worker.returncode is None


async def test_a_mistake_of_the_services_own_is_an_answer_too(tmp_path: Path) -> None:
    process = BillProcess(settings_for(str(tmp_path)))
    try:
        # No question, as far as the other side can read it.
        answer = await process.ask("nonsense")  # type: ignore[arg-type]  # what nothing of ours asks
    finally:
        await process.close()
    assert (answer.status, json.loads(answer.body)["status"]) == (500, "error")


async def test_what_is_asked_when_the_service_ends_is_given_up_and_no_failure(
    tmp_path: Path,
) -> None:
    """A process that never answers: it is asked, and killed by who ends the service."""
    began = tmp_path / "began"
    lines = ("import pathlib, time", f"pathlib.Path({str(began)!r}).touch()", "time.sleep(600)")
    process = BillProcess(small_store(tmp_path), command=(sys.executable, "-c", "\n".join(lines)))
    died = value_of(PROCESSES_ENDED_TOTAL.labels(reason="died"))
    asked = asyncio.create_task(process.ask(BILL))
    while not began.exists():  # noqa: ASYNC110  # another process makes it
        await asyncio.sleep(0)
    await process.close()
    with pytest.raises(ProcessEndedError):
        await asked
    assert value_of(PROCESSES_ENDED_TOTAL.labels(reason="died")) == died
