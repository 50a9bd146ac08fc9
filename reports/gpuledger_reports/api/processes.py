"""The processes that make bills: how many, how long each may take, and who waits for one.

A question has a deadline, which waiting for a process counts towards. A process that has missed it
is killed; the next question starts another one. Who asks while too many wait is told to come later.
"""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec
import structlog

from gpuledger.errors import GpuledgerError
from gpuledger_reports.api.answering import AnswerSettings, ReportAnswer
from gpuledger_reports.api.frames import ANSWER, HEAD_BYTES, TAKEN, framed, length_of
from gpuledger_reports.api.questions import Question
from gpuledger_reports.metrics import COMPUTING, PROCESSES_ENDED_TOTAL, ProcessEnd

COMMAND: Final = (sys.executable, "-m", "gpuledger", "gpuledger_reports.api.bill_worker")
_MAX_BYTES: Final = 512 * 2**20
_log = structlog.get_logger(__name__)


class BusyError(GpuledgerError):
    """Too many wait already."""


class LateError(GpuledgerError):
    """There was no answer by the deadline."""


class ProcessEndedError(GpuledgerError):
    """The process has ended before it had answered."""


class Answerer(Protocol):
    """What answers one question at a time."""

    async def ask(self, question: Question) -> ReportAnswer:
        """Return the answer; raises `ProcessEndedError`. Cancelled, it works on nothing more."""

    async def close(self) -> None:
        """End it now."""


class BillProcess:
    """A process, started by the first question that needs it."""

    def __init__(self, settings: AnswerSettings, *, command: Sequence[str] = COMMAND) -> None:
        self._settings, self._command = settings, command
        self._process: Process | None = None
        self._is_closed = False

    async def ask(self, question: Question) -> ReportAnswer:
        """Return the answer of the process; whatever goes wrong, the process has ended then."""
        try:
            return await _receive(await self._begin(framed(question)))
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            await self._kill()
            # Closed while it worked it ended by our own will.
            if not self._is_closed:
                _log.warning("bill_process_ended", error=type(error).__name__)
                PROCESSES_ENDED_TOTAL.labels(reason=ProcessEnd.DIED.value).inc()
            raise ProcessEndedError("the process ended before it had answered") from error
        except BaseException:
            # Cancelled, by the deadline or at the end: what it would answer nobody would read.
            await self._kill()
            PROCESSES_ENDED_TOTAL.labels(reason=ProcessEnd.LATE.value).inc()
            raise

    async def close(self) -> None:
        """End for good; what it works on is not answered."""
        self._is_closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _begin(self, question: bytes) -> Process:
        """Return a process that has taken the question.

        One that ended while nothing was asked, as for another's memory, is no loss: another one
        takes the question, also where the system has not told yet that the first has ended.
        """
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(OSError, EOFError):
                await _send(process, question)
                return process
        await self._kill()
        process = await self._start()
        await _send(process, question)
        return process

    async def _start(self) -> Process:
        if self._is_closed:
            raise EOFError("closed")
        # In a session of its own: Ctrl-C is the service's to heed.
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._process = process
        await _write(process, framed(self._settings))
        return process


async def _send(process: Process, question: bytes) -> None:
    """Send a question; raises `EOFError` where the process ended before it had taken it."""
    await _write(process, question)
    await _read(process, len(TAKEN))


async def _receive(process: Process) -> ReportAnswer:
    length = length_of(await _read(process, HEAD_BYTES))
    if length > _MAX_BYTES:
        raise ValueError("an answer of that length is none")
    return ANSWER.decode(await _read(process, length))


async def _read(process: Process, count: int) -> bytes:
    if process.stdout is None:
        raise EOFError("no standard output")
    return await process.stdout.readexactly(count)


async def _write(process: Process, data: bytes) -> None:
    if process.stdin is None:
        raise EOFError("no standard input")
    process.stdin.write(data)
    await process.stdin.drain()


async def answer_in_time(
    answer: Awaitable[ReportAnswer], *, timeout_seconds: float
) -> ReportAnswer:
    """Return what is awaited; raises `LateError` where it is not there by the deadline."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await answer
    except TimeoutError as error:
        raise LateError(f"no answer within {timeout_seconds:g} s") from error


class AnswererPool:
    """Some answerers, and those who wait for one."""

    def __init__(
        self, make: Callable[[], Answerer], *, count: int, max_waiting: int, timeout_seconds: float
    ) -> None:
        self._all = [make() for _ in range(count)]
        self._free = list(self._all)
        self._turn = asyncio.Semaphore(count)
        self._max_waiting, self._timeout_seconds = max_waiting, timeout_seconds
        self._waiting = 0

    async def ask(self, question: Question) -> ReportAnswer:
        """Return the answer; raises `BusyError`, `LateError` and `ProcessEndedError`."""
        if self._turn.locked() and self._waiting >= self._max_waiting:
            raise BusyError(f"{self._waiting} requests wait already")
        in_turn = self._in_turn(lambda answerer: answerer.ask(question))
        return await answer_in_time(in_turn, timeout_seconds=self._timeout_seconds)

    async def close(self) -> None:
        """End all of them."""
        for answerer in self._all:
            await answerer.close()

    async def _in_turn(self, ask: Callable[[Answerer], Awaitable[ReportAnswer]]) -> ReportAnswer:
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        # The one that was used last is warm.
        answerer = self._free.pop()
        COMPUTING.inc()
        try:
            return await ask(answerer)
        finally:
            COMPUTING.dec()
            self._free.append(answerer)
            self._turn.release()
