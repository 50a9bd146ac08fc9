"""How tasks are ended where what they failed with is not wanted: cancelled and waited for."""

import asyncio
from typing import Any


async def end_tasks(*tasks: "asyncio.Task[Any] | None", seconds: float | None = None) -> None:
    """Cancel tasks and wait until they have ended, for at most so many seconds.

    What they failed with is for whoever started them; it is looked at, as asyncio would log it as
    never retrieved otherwise. They are not awaited themselves: their cancellation could not be told
    from our own, which must go on. `None` is a task that was never started.
    """
    ending = {task for task in tasks if task is not None}
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=seconds)
    for task in ending:
        if task.done() and not task.cancelled():
            task.exception()
