"""A thread for the disk, so that a slow one keeps nothing else waiting, with a limit to patience.

What it is asked to do is done in order, one thing after the other. What is done is not known here.
"""

import asyncio
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")
HUNG_AFTER_SECONDS: Final = 30.0


class DiskHungError(OSError):
    """The disk gives no answer; a disk that answers with ETIMEDOUT is none of these."""


class IoThread:
    """One thread, made with the first work."""

    def __init__(self, *, hung_after_seconds: float = HUNG_AFTER_SECONDS) -> None:
        self._hung_after_seconds = hung_after_seconds
        self._thread: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Do blocking work; raises what it raises, and `DiskHungError` where it hangs.

        Work that was given up, or whose waiting was cancelled, goes on; what comes next waits.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")
        done = asyncio.get_running_loop().run_in_executor(self._thread, work)
        patience = asyncio.timeout(self._hung_after_seconds)
        try:
            async with patience:
                return await done
        except TimeoutError as error:
            # What the work itself raises may be one as well: its errno is ETIMEDOUT.
            if not patience.expired():
                raise
            reason = f"no answer within {self._hung_after_seconds:g} s"
            raise DiskHungError(errno.ETIMEDOUT, reason) from error

    def close(self) -> None:
        """Take no more work."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
