"""What answers depend on: the versions of the store's tables, and the prices; looked at on and on.

Looks have a process of their own, so that questions which take long neither hold them up nor count
as a failure of the store. What was found holds for some intervals, not for as long as nothing else
is known: of a store that cannot be looked at, nobody may be shown what it was long ago.
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
"""For so many intervals what a look has found is taken to be so yet."""


class StoreState:
    """The state of the store and the prices, as the last look has found it."""

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
        # A look that is slow is no failure: the one before it holds meanwhile.
        self._holds_seconds = max(HOLDS_INTERVALS * interval_seconds, timeout_seconds)
        self._found, self._found_seconds = b"", 0.0

    def current(self) -> bytes | None:
        """Return what differs where an answer would; `None` where no look has found it lately."""
        age_seconds = self._monotonic_seconds() - self._found_seconds
        return self._found if self._found and age_seconds <= self._holds_seconds else None

    async def follow(self) -> None:
        """Look until cancelled."""
        while True:
            await self.check_store()
            await asyncio.sleep(self._interval_seconds)

    async def check_store(self) -> None:
        """Look once; where that cannot be, the pages are not ready."""
        try:
            answer = await self._ask(StoreStateQuestion())
        except (LateError, ProcessEndedError) as error:
            self._check.failed(f"the store cannot be looked at: {error}")
            return
        content = msgspec.json.decode(answer.body)
        if answer.status != HTTPStatus.OK:
            self._check.failed(content["message"])
            return
        self._found, self._found_seconds = answer.body, self._monotonic_seconds()
        STORE_TIMESTAMP_SECONDS.set(time.time())
        # Nothing is wrong with a store that is new; whoever asks is told so.
        is_new = all(version is None for version in content["tables"].values())
        self._check.ok("no usage yet" if is_new else "")
