"""Tasks and threads: how they are run and ended, and calls that block without holding up the end.

`run_tasks` is for what goes on beside something else and has no end of its own, `end_tasks` for
tasks that somebody keeps, `wait_event` for an event that may not come in time. For tasks that end
by themselves, and that must all be done, `asyncio.TaskGroup` is there.

A call that blocks goes into a thread for which the end of the process does not wait
(`in_daemon_thread`). A storage that is slow or away may keep a call for minutes, an import on a
busy node for seconds, and neither can be cancelled. For asyncio's own threads the end of the loop
waits, so a deployable that was told to end would be killed. What is called must be done as a whole
or not at all, as the process may end in the midst of it.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar, cast

from gpuledger.errors import FreshStartError

T = TypeVar("T")
STALL_SECONDS: Final = 600.0
_CHECKS: Final = 60


async def end_tasks(
    *tasks: "asyncio.Task[Any] | None", seconds: float | None = None, grace_seconds: float = 0.0
) -> None:
    """Cancel tasks and wait until they have ended, for at most so many seconds.

    For `grace_seconds` before that they may end by themselves; whoever is cancelled in that time
    cancels them too, and goes on.

    What they failed with is for whoever started them; it is looked at, as asyncio would log it as
    never retrieved otherwise. They are not awaited themselves: their cancellation could not be told
    from our own, which must go on. `None` is a task that was never started.
    """
    ending = {task for task in tasks if task is not None}
    try:
        if ending and grace_seconds:
            await asyncio.wait(ending, timeout=grace_seconds)
    finally:
        for task in ending:
            task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=seconds)
    for task in ending:
        if task.done() and not task.cancelled():
            task.exception()


async def wait_event(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until an event is set, for at most so many seconds; return whether it is set.

    `None` waits without an end. Unlike `asyncio.wait_for` it raises nothing where time is over.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


@asynccontextmanager
async def run_tasks(
    *works: Coroutine[Any, Any, T], end_seconds: float | None = None
) -> AsyncIterator[tuple[asyncio.Task[T], ...]]:
    """Run works as tasks while the context is open, then end them as `end_tasks` does.

    An `asyncio.TaskGroup` would wait for their own end, without a deadline, and cancel the context
    where one fails. Here the context has the tasks, and it alone decides what their end means.
    """
    tasks = tuple(asyncio.create_task(work) for work in works)
    try:
        yield tasks
    finally:
        await end_tasks(*tasks, seconds=end_seconds)


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Return what `call` returns, or raise what it raises; where cancelled, it goes on unseen."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        # In the event loop, where nobody can stop waiting in between.
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(cast("T", result))

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # who waits for the outcome gets it
            failure = error
        # The loop may have been closed meanwhile: then nobody waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(resolve, result, failure)

    threading.Thread(target=run, name="call", daemon=True).start()
    return await outcome


async def end_where_stalled(
    attempts: Callable[[], int],
    *,
    what: str,
    stall_seconds: float = STALL_SECONDS,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> NoReturn:
    """Raise `FreshStartError` once `attempts()` has not changed for `stall_seconds`.

    The time is counted in looks of this very loop: a process that was stopped, or a machine that
    slept, has not stalled. `gpuledger_agent.gpu.watchdog` counts by itself: it checks more than a
    number, reports what it found before it ends, and its thread detects a blocked event loop.
    """
    last, checks = attempts(), 0
    while checks < _CHECKS:
        await sleep(stall_seconds / _CHECKS)
        now = attempts()
        last, checks = now, checks + 1 if now == last else 0
    raise FreshStartError(
        f"{what} has stalled: none of its calls has ended for {stall_seconds:.0f} s"
    )
