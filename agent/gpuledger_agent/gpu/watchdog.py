"""Ends the process if no GPU answers or the event loop stalls, so that the process is restarted.

From some states of the driver, only a new process can recover. If at least one GPU answers, the
driver is not in such a state and the process keeps running. If no GPU answers, the reason is
published before the process ends.
"""

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from gpuledger.errors import FreshStartError
from gpuledger_agent.gpu.pool import Report
from gpuledger_agent.gpu.threads import start_thread

_log = structlog.get_logger(__name__)

STALLED_EXIT_CODE: Final = 70
_CHECKS: Final = 20
"""Number of checks within the watchdog's timeout."""
_LONGEST_PAUSE: Final = 0.25
"""Longest pause between two checks, relative to the timeout.

A longer pause means that the process was stopped meanwhile.
"""


class NothingWorksError(FreshStartError):
    """No GPU has answered for so long that only a restart of the process can help."""


class Watched(Protocol):
    """The driver's state that the watchdog checks."""

    @property
    def idle_seconds(self) -> float:
        """Seconds for which no GPU has answered."""

    @property
    def detail(self) -> str:
        """The driver's state as text for people."""

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that have ever answered."""


class Watchdog:
    """Ends the process if no GPU answers for too long or the event loop stalls.

    The event loop checks the driver, and a thread checks the event loop.
    """

    def __init__(
        self,
        driver: Watched,
        *,
        seconds: float,
        report: Report,
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._seconds = seconds
        self._report = report
        self._now_seconds = now_seconds
        self._checked_seconds = now_seconds()
        self._awake_since_seconds = -math.inf
        self._loop_watch = LoopWatch(max_missed=_CHECKS, end_process=_end_process, seconds=seconds)

    async def run(self) -> None:
        """Check until cancelled; raise `NothingWorksError` if no GPU answers for too long."""
        self._loop_watch.begin()
        try:
            while True:
                self._loop_watch.beat()
                self.check()
                await asyncio.sleep(self._seconds / _CHECKS / 2)
        finally:
            self._loop_watch.end()

    def check(self) -> None:
        """Check the driver once.

        If no GPU has answered for too long, report this for each known GPU and raise
        `NothingWorksError`.
        """
        before, self._checked_seconds = self._checked_seconds, self._now_seconds()
        # If the process was stopped or the machine slept, GPUs could not answer meanwhile.
        if self._checked_seconds - before > _LONGEST_PAUSE * self._seconds:
            self._awake_since_seconds = self._checked_seconds
        awake_seconds = self._checked_seconds - self._awake_since_seconds
        idle_seconds = min(self._driver.idle_seconds, awake_seconds)
        if idle_seconds < self._seconds:
            return
        reason = f"no GPU answered for {idle_seconds:.0f} s: {self._driver.detail}"
        for uuid in self._driver.known:
            self._report("agent_ended", uuid, reason)
        raise NothingWorksError(f"{reason}; the agent exits so that it is restarted")


class LoopWatch:
    """Ends the process if the event loop stalls.

    A thread checks the event loop, and counts the checks, not the seconds, since the loop last ran.
    A suspended process makes no checks, so it is not mistaken for a stalled event loop.
    """

    def __init__(self, *, max_missed: int, end_process: Callable[[], None], seconds: float) -> None:
        self._max_missed = max_missed
        self._end_process = end_process
        self._seconds = seconds
        self._missed = 0
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start the thread that watches."""
        start_thread(self.run, name="watchdog")

    def end(self) -> None:
        """Stop checking."""
        self._ended.set()

    def beat(self) -> None:
        """Record that the event loop is running."""
        self._missed = 0

    def check(self) -> bool:
        """Count one check; return whether the event loop has not run for too many checks."""
        self._missed += 1
        return self._missed > self._max_missed

    def run(self) -> None:
        """Check until `end` is called; end the process if the loop has stalled for too long."""
        while not self._ended.wait(self._seconds / self._max_missed):
            if self.check():
                _log.critical("event_loop_stalled", stalled_seconds=self._seconds)
                self._end_process()
                return


def _end_process() -> None:
    # An exception would not help: the event loop is stalled and could not handle it.
    sys.stderr.flush()
    os._exit(STALLED_EXIT_CODE)
