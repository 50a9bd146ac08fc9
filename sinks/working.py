"""Work that may take long, and what has to go on beside it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from gpuledger.runtime.tasks import end_tasks

_GRACE_SECONDS: Final = 1.5
"""How long work may go on when whoever waits for it is cancelled."""


async def work_beside(
    work: Coroutine[Any, Any, None],
    *,
    meanwhile: Callable[[], Awaitable[None]],
    after_seconds: float,
) -> None:
    """Wait for the work; where it takes longer than `after_seconds`, go on with the other.

    Where this is cancelled, or `meanwhile` fails, the work has a moment, so that what is on its way
    is answered, and is ended. Raises what either raises.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=after_seconds)
        while not task.done():
            await meanwhile()
        await task
    finally:
        await asyncio.wait({task}, timeout=_GRACE_SECONDS)
        await end_tasks(task)
