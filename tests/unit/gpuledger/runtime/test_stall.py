"""A process whose work stalls exits, so that it is restarted."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat
from typing import TYPE_CHECKING

import pytest

from gpuledger.errors import FreshStartError
from gpuledger.runtime import end_where_stalled
from tests.errors import has_words

if TYPE_CHECKING:
    from collections.abc import Iterable


class Sleeper:
    """Counts the time slept, and ends the wait after a given amount."""

    def __init__(self, *, max_seconds: float = 1e6) -> None:
        self.slept_seconds = 0.0
        self._max_seconds = max_seconds

    async def __call__(self, seconds: float) -> None:
        self.slept_seconds += seconds
        if self.slept_seconds > self._max_seconds:
            raise asyncio.CancelledError


async def watch(attempts: Iterable[int], sleep: Sleeper) -> None:
    counted = iter(attempts)
    await end_where_stalled(lambda: next(counted), what="it", stall_seconds=600.0, sleep=sleep)


async def test_work_that_stalls_for_the_whole_timeout_ends_the_process() -> None:
    sleep = Sleeper()
    with pytest.raises(FreshStartError, check=has_words("600 s")):
        await watch(repeat(7), sleep)
    assert sleep.slept_seconds == pytest.approx(600)


async def test_the_timeout_restarts_with_each_iteration() -> None:
    sleep = Sleeper()
    with pytest.raises(FreshStartError):
        await watch(chain(repeat(1, 50), repeat(2)), sleep)
    assert sleep.slept_seconds == pytest.approx(600 + 500, abs=10)


async def test_work_that_progresses_continues() -> None:
    with pytest.raises(asyncio.CancelledError):
        await watch(range(10**6), Sleeper(max_seconds=100_000))
