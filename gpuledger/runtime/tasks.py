"""Tasks and threads: how they are ended, and calls that block without holding up the end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from gpuledger.errors import FreshStartError


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


# Calls that block, in threads for which the end of the process does not wait.
#
# A storage that is slow or away may keep a call for minutes, an import on a busy node for seconds,
# and neither can be cancelled. For asyncio's own threads the end of the loop waits, so a deployable
# that was told to end would be killed. What is called must be done as a whole or not at all, as the
# process may end in the midst of it.

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


# Ends a process whose work has stopped going round, as one that is started afresh may go on.

STALL_SECONDS: Final = 600.0
_LOOKS: Final = 60


async def end_where_stalled(
    rounds: Callable[[], int],
    *,
    what: str,
    stall_seconds: float = STALL_SECONDS,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> NoReturn:
    """Raise `FreshStartError` once `rounds()` has given the same number for so long.

    The time is counted in looks of this very loop: a process that was stopped, or a machine that
    slept, has not stalled.
    """
    last, looks = rounds(), 0
    while looks < _LOOKS:
        await sleep(stall_seconds / _LOOKS)
        now = rounds()
        last, looks = now, looks + 1 if now == last else 0
    raise FreshStartError(f"{what} has not gone round for {stall_seconds:.0f} s")
