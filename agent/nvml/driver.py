"""The driver, asked from asyncio: one thread a GPU, a deadline for all, a new start when lost.

NVML calls can block for seconds or for ever, and a blocked thread cannot be ended. So a GPU that
hangs costs its own readings, never the tick of the others, and its thread does not keep the
process alive. What to ask and what an answer means is decided elsewhere.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

import structlog

from agent.metrics import GPU_DEADLINES_MISSED, NVML_STARTS
from agent.nvml.answers import GpuAnswers, LastSeen
from agent.nvml.calls import NvmlLostError
from agent.nvml.gpu import Gpu
from agent.nvml.library import Nvml
from gpuledger.clock import Clock
from gpuledger.service import Backoff, Check

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class Worker(Generic[T]):
    """A thread that does one thing after the other; it ends with the process, hanging or not."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[[], T], Future[T]] | None] = SimpleQueue()
        self._last: Future[T] | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether the last thing is not done yet."""
        return self._last is not None and not self._last.done()

    def start(self, do: Callable[[], T]) -> Future[T]:
        """Have `do` done after what was started before."""
        self._last = Future()
        self._work.put((do, self._last))
        return self._last

    def end(self) -> None:
        """Let the thread end once it is done."""
        self._work.put(None)

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            do, future = given
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001  # whoever waits for the result is told
                future.set_exception(error)


class Driver:
    """The GPUs of a node: opened, asked, and opened again when they were lost."""

    def __init__(
        self, nvml: Nvml, *, clock: Clock, check: Check, deadline_seconds: float, backoff: Backoff
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._check = check
        self._deadline_seconds = deadline_seconds
        self._backoff = backoff
        self._library: Worker[Sequence[Gpu]] = Worker("nvml")
        self._opening: Future[Sequence[Gpu]] | None = None
        self._gpus: list[tuple[Gpu, Worker[GpuAnswers]]] = []
        self._lost: str | None = "not started yet"
        self._next_start_ns = 0

    async def ask(self, last_seen: Mapping[str, LastSeen]) -> list[GpuAnswers] | None:
        """Give the answers of the GPUs that answered in time; `None` without a working library."""
        if self._nvml.missing and self._clock.monotonic_ns() >= self._next_start_ns:
            self._lost = f"{self._nvml.missing} GPUs do not answer"
        if self._lost is not None and not await self._start_again():
            return None
        asked = [
            worker.start(partial(gpu.answer, last_seen.get(gpu.uuid, LastSeen())))
            for gpu, worker in self._gpus
            if not worker.is_busy
        ]
        await _wait(asked, self._deadline_seconds)
        answers = [answer for future in asked if (answer := self._result(future)) is not None]
        silent = {gpu.uuid for gpu, _ in self._gpus} - {answer.uuid for answer in answers}
        self._report(silent)
        return answers

    def close(self) -> None:
        """Let go of the driver, unless a call hangs in it: then only the process's end helps."""
        if not self._is_hanging():
            self._library.start(self._close_library)
        self._end_workers()
        self._library.end()

    async def _start_again(self) -> bool:
        """Start the library; tells whether it answers now. A start may outlive many calls."""
        if self._opening is None:
            if self._clock.monotonic_ns() < self._next_start_ns or self._is_hanging():
                return False
            self._end_workers()
            self._opening = self._library.start(self._open_library)
        await _wait([self._opening], self._deadline_seconds)
        if not self._opening.done():
            self._check.failed("nvmlInit does not return")
            return False
        opening, self._opening = self._opening, None
        wait_seconds = self._backoff.next_seconds()
        self._next_start_ns = self._clock.monotonic_ns() + round(wait_seconds * 1e9)
        return self._use(opening)

    def _use(self, opening: "Future[Sequence[Gpu]]") -> bool:
        try:
            found = opening.result()
        except NvmlLostError as error:
            self._lost = str(error)
            self._check.failed(self._lost)
            _log.warning("nvml_does_not_answer", detail=self._lost)
            return False
        self._gpus = [(gpu, Worker(f"gpu-{gpu.index}")) for gpu in found]
        self._lost = None
        _log.info("nvml_started", gpus=len(found))
        return True

    def _result(self, future: "Future[GpuAnswers]") -> GpuAnswers | None:
        if not future.done():
            return None
        try:
            return future.result()
        except NvmlLostError as error:
            self._lost = str(error)
            return None

    def _report(self, silent: set[str]) -> None:
        if self._lost is not None:
            _log.warning("nvml_lost", detail=self._lost)
            self._check.failed(self._lost)
        elif silent:
            GPU_DEADLINES_MISSED.inc(len(silent))
            self._check.failed(f"no answer in time from {', '.join(sorted(silent))}")
        elif self._nvml.missing:
            self._check.failed(f"{self._nvml.missing} GPUs do not answer")
        else:
            self._backoff.reset()
            self._check.ok(f"{len(self._gpus)} GPUs")

    def _is_hanging(self) -> bool:
        return any(worker.is_busy for _, worker in self._gpus)

    def _end_workers(self) -> None:
        for _, worker in self._gpus:
            worker.end()
        self._gpus = []

    def _open_library(self) -> Sequence[Gpu]:
        self._nvml.close()
        NVML_STARTS.inc()
        return self._nvml.open()

    def _close_library(self) -> Sequence[Gpu]:
        self._nvml.close()
        return []


async def _wait(futures: Sequence[Future[T]], seconds: float) -> None:
    """Wait until all are done, or for `seconds` of the machine's time; what is late goes on."""
    waiting = [asyncio.wrap_future(future) for future in futures]
    for one in waiting:
        one.add_done_callback(_look_at_error)
    if waiting:
        await asyncio.wait(waiting, timeout=seconds)


def _look_at_error(done: "asyncio.Future[T]") -> None:
    """Keep asyncio from reporting the error of a call that nobody waits for any more."""
    if not done.cancelled():
        done.exception()
