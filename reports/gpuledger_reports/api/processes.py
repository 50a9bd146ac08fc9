"""Answers each question in its own process, which is killed when the question is cancelled.

The processes are forked from a server process that has imported all modules, so they start within
milliseconds. A question's timeout includes its wait for a process.
"""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

import structlog
from pebble import CONSTS, ProcessFuture
from pebble.concurrent import process

from gpuledger.errors import GpuledgerError
from gpuledger.runtime.logs import Repeats
from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer, answer_to, error_body
from gpuledger_reports.api.metrics import COMPUTING, PROCESSES_ENDED_TOTAL, ProcessEnd
from gpuledger_reports.api.questions import Question

Ask = Callable[[Question], Awaitable[ReportAnswer]]

_NAME: Final = "bill"
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
# A process does not handle SIGTERM while DuckDB runs. It only reads, so SIGKILL is safe.
CONSTS.term_timeout = 0.0
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class BusyError(GpuledgerError):
    """The maximum number of questions is already waiting."""


class LateError(GpuledgerError):
    """There was no answer by the deadline."""


class ProcessEndedError(GpuledgerError):
    """The process ended before it answered."""


class BillProcesses:
    """A limited number of processes, and a limited number of questions that wait for them."""

    def __init__(
        self,
        settings: AnswerSettings,
        *,
        count: int,
        max_waiting: int,
        timeout_seconds: float,
        answer: Callable[[Question, AnswerSettings], ReportAnswer] = answer_to,
    ) -> None:
        self._settings = settings
        in_process = process(name=_NAME, context=_CONTEXT)  # type: ignore[call-overload]  # its types call `context` `mp_context`
        self._answer: Callable[[Question, AnswerSettings], ProcessFuture[ReportAnswer]]
        self._answer = in_process(answer)
        self._turn = asyncio.Semaphore(count)
        self._max_waiting, self._timeout_seconds = max_waiting, timeout_seconds
        self._waiting = 0

    async def ask(self, question: Question) -> ReportAnswer:
        """Return the answer to a question.

        Raises `BusyError` if too many questions wait, `LateError` after the timeout, and
        `ProcessEndedError` if the process ended without an answer.
        """
        if self._turn.locked() and self._waiting >= self._max_waiting:
            raise BusyError(f"{self._waiting} requests are already waiting")
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._in_turn(question)
        except TimeoutError as error:
            limit = f"{self._timeout_seconds:g} s (requests.timeout_seconds)"
            raise LateError(f"no answer within {limit}") from error

    async def _in_turn(self, question: Question) -> ReportAnswer:
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        COMPUTING.inc()
        try:
            return await self._computed(question)
        finally:
            COMPUTING.dec()
            self._turn.release()

    async def _computed(self, question: Question) -> ReportAnswer:
        try:
            # Cancelling the future kills the process.
            answer = await asyncio.wrap_future(self._answer(question, self._settings))
        except asyncio.CancelledError:
            PROCESSES_ENDED_TOTAL.labels(reason=ProcessEnd.LATE.value).inc()
            raise
        except (OSError, EOFError) as error:  # ProcessExpired is an OSError
            _log.warning("bill_process_ended", error=str(error))
            PROCESSES_ENDED_TOTAL.labels(reason=ProcessEnd.DIED.value).inc()
            raise ProcessEndedError("the process ended before it answered") from error
        except Exception:  # noqa: BLE001  # an error in one answer must not stop the service
            _log.exception("bill_failed")
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            return ReportAnswer(status=status, body=error_body(status, "internal error"))
        if answer.logged and (count := _repeats.count(answer.logged)):
            _log.warning("store_read_failed", error=answer.logged, count=count)
        return answer


def start_server() -> None:
    """Start the server from which processes are forked; block until it is ready."""
    child = _CONTEXT.Process(target=int)
    child.start()
    child.join()


def kill_processes() -> None:
    """Kill all processes of `BillProcesses` that are still running."""
    for child in multiprocessing.active_children():
        if child.name == _NAME:
            child.kill()
