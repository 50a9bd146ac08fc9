"""Tries again until the bus answers: the one retry loop of the join.

Here lives waiting and trying again. What is tried is the caller's business.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from enricher.join import metrics
from gpuledger.errors import BusError
from gpuledger.service import Backoff, Check

T = TypeVar("T")


class Insistence:
    """Calls again, with growing waits, until the bus answers; the trouble shows as a check."""

    def __init__(self, *, check: Check, backoff: Backoff, passes_check: bool = True) -> None:
        """Take the check that fails; where it is not passed here, more must succeed for that."""
        self.attempts = 0
        """How many calls have ended, well or not: it grows for as long as the join goes round."""
        self._check = check
        self._backoff = backoff
        self._passes_check = passes_check

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what the call returns, once it succeeds; every `BusError` is waited out."""
        while True:
            try:
                given = await call()
            except BusError as error:
                self._check.failed(str(error))
                metrics.RETRIES_TOTAL.inc()
                await asyncio.sleep(self._backoff.next_seconds())
            else:
                self._backoff.reset()
                if self._passes_check:
                    self._check.ok()
                return given
            finally:
                self.attempts += 1
