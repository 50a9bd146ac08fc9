"""Stops clients without waiting for unavailable brokers.

Remove once `stop()` of aiokafka's clients takes a deadline (aio-libs/aiokafka#1101).
"""

import asyncio
from collections.abc import Coroutine
from functools import cache
from typing import Any, Final

from aiokafka.conn import AIOKafkaConnection

from gpuledger.runtime.tasks import end_tasks

STOP_SECONDS: Final = 1.5
CANCEL_SECONDS: Final = 0.5


async def ends_well(work: Coroutine[Any, Any, object], *, seconds: float = STOP_SECONDS) -> bool:
    """Run a coroutine until it ends or the deadline passes; return whether it succeeded."""
    task = asyncio.create_task(work)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        await end(task)
        return False
    return not task.cancelled() and task.exception() is None


async def end(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task, and cancel it once more if it continues after the first cancellation."""
    for _ in range(2):
        await end_tasks(task, seconds=CANCEL_SECONDS)


@cache
def close_left_connections() -> None:
    """Make garbage-collected connections close silently, instead of logging an error.

    A client that is cancelled while it connects to a slow broker leaves its first connection open.
    Remove once `AIOKafkaClient.bootstrap` closes it.
    """

    def close(connection: Any) -> None:  # noqa: ANN401  # aiokafka publishes no types
        if connection.connected() and not connection._loop.is_closed():
            connection._on_close_cb = None
            connection.close()

    AIOKafkaConnection.__del__ = close
