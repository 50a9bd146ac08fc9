"""Calls that block, in threads for which the end of the process does not wait.

A storage that is slow or away may keep a call for minutes, an import on a busy node for seconds,
and neither can be cancelled. For asyncio's own threads the end of the loop waits, so a deployable
that was told to end would be killed. What is called must be done as a whole or not at all, as the
process may end in the midst of it.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises; where cancelled, it goes on unseen."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # whoever waits is told
            _tell(loop, outcome, partial(outcome.set_exception, error))
        else:
            _tell(loop, outcome, partial(outcome.set_result, result))

    threading.Thread(target=run, name="call", daemon=True).start()
    return await outcome


def _tell(
    loop: asyncio.AbstractEventLoop, outcome: "asyncio.Future[T]", settle: Callable[[], None]
) -> None:
    def settle_if_awaited() -> None:
        if not outcome.done():
            settle()

    # The loop may have been closed meanwhile: then nobody waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle_if_awaited)
