"""Ends the start of a run that is told to stop: nothing was booked yet that could be told."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from gpuledger.runtime.tasks import end_tasks

T = TypeVar("T")

INTERRUPTED: Final = 130
"""The exit code of a start that was ended."""
_CLEANING_UP_SECONDS: Final = 0.5


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return what the work returns; `None` where `stop` was set first.

    The work is cancelled then, and left to itself where it does not end in half a second: it may
    wait for somebody who does not answer.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks(stopped, working, seconds=_CLEANING_UP_SECONDS)
