"""Work that may take long, and what goes on beside it.

While a sink works on what was polled, the loop keeps the membership of its group (`work_beside`).
And one partition at a time works on what is large (`LargeTurns`), the others go side by side: an
event of a message's size may come to a hundred times as much in labels, and take seconds to be made
so. With one of them in each partition, a sink would hold all of that at once, and answer no probe
until the last of them is made.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Final

from gpuledger.runtime.tasks import end_tasks
from sinks.protocol import Batch

_GRACE_SECONDS: Final = 1.5
"""How long work may go on when whoever waits for it is cancelled."""
LARGE_BYTES: Final = 131_072
"""An event of 16 GPUs and a hundred pods has 50 kB."""


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


class LargeTurns:
    """The turn of the partition that works on what is large."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    def enter(self, batch: Batch) -> AbstractAsyncContextManager[None]:
        """Return what waits, where there is something large in a batch, for its turn."""
        is_large = any(len(record.value or b"") > LARGE_BYTES for record, _ in batch.items)
        return self._turn if is_large else nullcontext()
