"""Runs the spool's disk work in a thread, and delays the next attempt after a failure.

All disk work runs in one thread with a time limit, so that a slow disk does not delay other work.
"""

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from gpuledger.clock import NS_PER_SECOND
from gpuledger.runtime import Backoff, RetryTimer


class Attempts:
    """The last error of one kind of disk work, such as reads, and the delay after the error."""

    def __init__(self, *, backoff: Backoff, now_seconds: Callable[[], float]) -> None:
        self._timer = RetryTimer(backoff)
        self._now_seconds = now_seconds
        self.error: OSError | None = None
        """The last error; `None` if there was none, or if the work has succeeded since."""

    @property
    def wait_seconds(self) -> float:
        """Seconds until the next attempt; 0 if it may be made now."""
        return self._timer.wait_ns(self._now_ns()) / NS_PER_SECOND

    @property
    def is_due(self) -> bool:
        """Whether the last attempt failed and the work may be tried again now."""
        return self.error is not None and not self.wait_seconds

    def failed(self, error: OSError) -> None:
        """Record a failure, and start the delay before the next attempt."""
        self.error = error
        self._timer.record_attempt(self._now_ns())

    def worked(self) -> None:
        """Record a success; the next attempt may be made at once."""
        self.error = None
        self._timer.reset()

    def skip_wait(self) -> None:
        """End the delay, so that the next attempt may be made at once."""
        self._timer.skip_wait()

    def _now_ns(self) -> int:
        return round(self._now_seconds() * NS_PER_SECOND)


T = TypeVar("T")
HUNG_AFTER_SECONDS: Final = 30.0


class DiskHungError(OSError):
    """Disk work took longer than the time limit of `IoThread`.

    If the disk itself reports ETIMEDOUT, its error is raised unchanged.
    """


class IoThread:
    """Runs disk work in one thread, which starts with the first work."""

    def __init__(self, *, hung_after_seconds: float = HUNG_AFTER_SECONDS) -> None:
        self._hung_after_seconds = hung_after_seconds
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Run blocking work in the thread and return its result.

        Raise `DiskHungError` after the time limit. Errors of the work are raised unchanged. Work
        that timed out or was cancelled continues in the thread, and later work waits for it.
        """
        # Most agents never spool, so they never need the thread.
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        deadline = asyncio.timeout(self._hung_after_seconds)
        try:
            async with deadline:
                return await done
        except TimeoutError as error:
            # The work itself can raise `TimeoutError` too, for errno ETIMEDOUT.
            if not deadline.expired():
                raise
            reason = f"no answer within {self._hung_after_seconds:g} s"
            raise DiskHungError(errno.ETIMEDOUT, reason) from error

    def close(self) -> None:
        """Accept no more work, and do not wait for work in progress."""
        if self._thread is not None:
            # At its exit, Python would wait for a hanging disk; `end_process` prevents this.
            self._thread.shutdown(wait=False)
