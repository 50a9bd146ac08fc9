"""Tries again until the bus answers, for all that the join asks of it.

Here lives who is told of a failure. What is tried is the caller's business.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from enricher.join import metrics
from gpuledger.errors import BusError
from gpuledger.runtime import Backoff, Check, until_done

T = TypeVar("T")


class UntilDone:
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
        given = await until_done(
            partial(self._attempt, call),
            error=BusError,
            failed=self._failed,
            backoff=self._backoff,
            sleep=asyncio.sleep,
        )
        if self._passes_check:
            self._check.ok()
        return given

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        finally:
            self.attempts += 1

    def _failed(self, error: BusError) -> None:
        self._check.failed(str(error))
        metrics.RETRIES_TOTAL.inc()
