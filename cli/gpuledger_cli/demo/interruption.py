"""Ends the start of a run if it is interrupted."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from gpuledger.runtime.tasks import end_tasks

T = TypeVar("T")

INTERRUPTED: Final = 130
"""The exit code if the start is interrupted."""
_CLEANING_UP_SECONDS: Final = 0.5


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """Return the result of the work; `None` if `stop` was set first.

    In that case the work is cancelled, and left running if it does not end within half a second,
    because it may wait for a server that does not respond.
    """
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks(stopped, working, seconds=_CLEANING_UP_SECONDS)
