"""Polls the state on which answers depend: the versions of the store's tables, and the prices.

Polling has its own process, so that slow questions neither delay it nor count as a failure of the
store. A state is valid for only a few intervals, so that clients do not get outdated answers if the
store cannot be checked.
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec

from gpuledger.runtime.readiness import Check
from gpuledger_reports.api.metrics import STORE_TIMESTAMP_SECONDS
from gpuledger_reports.api.processes import Ask, LateError, ProcessEndedError
from gpuledger_reports.api.questions import StoreStateQuestion

HOLDS_INTERVALS: Final = 3
"""The number of intervals for which a state is valid."""


class StoreState:
    """The state of the store and the prices at the last check."""

    def __init__(
        self,
        ask: Ask,
        *,
        check: Check,
        interval_seconds: float,
        timeout_seconds: float,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._check, self._interval_seconds = ask, check, interval_seconds
        self._monotonic_seconds = monotonic_seconds
        # A slow check is not a failure: the previous state stays valid meanwhile.
        self._holds_seconds = max(HOLDS_INTERVALS * interval_seconds, timeout_seconds)
        self._found, self._found_seconds = b"", 0.0
        self._tables: set[str] = set()
        """The names of tables that existed at an earlier check."""

    def current(self) -> bytes | None:
        """Return the state as bytes, or `None` if no recent check succeeded.

        The bytes change if the store's tables or the prices change, because answers may change too.
        """
        age_seconds = self._monotonic_seconds() - self._found_seconds
        return self._found if self._found and age_seconds <= self._holds_seconds else None

    async def follow(self) -> None:
        """Check the store repeatedly until cancelled."""
        while True:
            await self.check_store()
            await asyncio.sleep(self._interval_seconds)

    async def check_store(self) -> None:
        """Check the store once, and set the readiness check to the result."""
        try:
            answer = await self._ask(StoreStateQuestion())
        except (LateError, ProcessEndedError) as error:
            self._check.failed(f"cannot check the store: {error}")
            return
        content = msgspec.json.decode(answer.body)
        if answer.status != HTTPStatus.OK:
            self._check.failed(content["message"])
            return
        found = {name for name, version in content["tables"].items() if version is not None}
        if missing := self._tables - found:
            # A bill without their rows would be too low.
            self._check.failed(f"tables that existed are missing: {', '.join(sorted(missing))}")
            return
        self._tables = found
        self._found, self._found_seconds = answer.body, self._monotonic_seconds()
        STORE_TIMESTAMP_SECONDS.set(time.time())
        # A store without tables is not an error; requests report that there is no usage.
        self._check.ok("" if found else "no usage yet")
