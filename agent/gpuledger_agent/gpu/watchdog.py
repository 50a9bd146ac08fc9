"""Ends the process when nothing works any more, and only then; the reason is published first.

Some states of the driver cannot be left by a process that has been in them. A sick GPU beside one
that works is no such state.
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
"""Looks within the time that the process has."""
_LONGEST_PAUSE: Final = 0.25
"""Between two looks, as a part of that time; where it is longer the process was stopped."""


class NothingWorksError(FreshStartError):
    """Nothing has worked for so long that only a fresh start can help."""


class Watched(Protocol):
    """What is looked at."""

    @property
    def idle_seconds(self) -> float:
        """For how long nothing has worked."""

    @property
    def detail(self) -> str:
        """What is known of it now, for people."""

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that answered once."""


class Watchdog:
    """Looks at the driver from the event loop, and at the event loop from a thread."""

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
        """Look for ever; raise NothingWorksError when it is time to end."""
        self._loop_watch.begin()
        try:
            while True:
                self._loop_watch.beat()
                self.check()
                await asyncio.sleep(self._seconds / _CHECKS / 2)
        finally:
            self._loop_watch.end()

    def check(self) -> None:
        """Look once; report the end and raise NothingWorksError when it is time."""
        before, self._checked_seconds = self._checked_seconds, self._now_seconds()
        # A process that was stopped, or a machine that slept, could not have worked meanwhile.
        if self._checked_seconds - before > _LONGEST_PAUSE * self._seconds:
            self._awake_since_seconds = self._checked_seconds
        awake_seconds = self._checked_seconds - self._awake_since_seconds
        idle_seconds = min(self._driver.idle_seconds, awake_seconds)
        if idle_seconds < self._seconds:
            return
        reason = f"no GPU answered for {idle_seconds:.0f} s: {self._driver.detail}"
        for uuid in self._driver.known:
            self._report("agent_ended", uuid, reason)
        raise NothingWorksError(f"{reason}; the agent ends to be started afresh")


class LoopWatch:
    """Ends the process when the event loop stands still.

    Looks are counted, not seconds: a process that was stopped for an hour has not looked.
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
        """Look no more."""
        self._ended.set()

    def beat(self) -> None:
        """Report that the event loop goes on."""
        self._missed = 0

    def check(self) -> bool:
        """Look once, from the thread; return whether the loop has stood still for too long."""
        self._missed += 1
        return self._missed > self._max_missed

    def run(self) -> None:
        """Look until it is ended, or has ended the process."""
        while not self._ended.wait(self._seconds / self._max_missed):
            if self.check():
                _log.critical("event_loop_stalled", stalled_seconds=self._seconds)
                self._end_process()
                return


def _end_process() -> None:
    # Not by an exception: the event loop stands still, so nobody would handle it.
    sys.stderr.flush()
    os._exit(STALLED_EXIT_CODE)
