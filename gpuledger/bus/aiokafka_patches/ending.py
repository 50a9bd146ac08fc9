"""Ends of clients that do not wait for brokers that are away.

Can go once `stop()` of aiokafka's clients takes a deadline (aio-libs/aiokafka#1101).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from gpuledger.runtime.tasks import end_tasks

STOP_SECONDS: Final = 1.5
CANCEL_SECONDS: Final = 0.5


async def ends_well(work: Coroutine[Any, Any, object], *, seconds: float = STOP_SECONDS) -> bool:
    """Run something to its end, its failure or the deadline, and say whether it ended well."""
    task = asyncio.create_task(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        await end(task)
        return False
    return not task.cancelled() and task.exception() is None


async def end(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task until it ends: once lets it finish what is on its way, twice does not."""
    for _ in range(2):
        await end_tasks(task, seconds=CANCEL_SECONDS)
