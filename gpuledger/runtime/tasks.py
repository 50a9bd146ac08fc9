"""Runs and ends tasks, and runs blocking calls in threads that do not delay the process's exit.

- `run_tasks`: background tasks that run while a context is open.
- `end_tasks`: ends tasks that an object keeps.
- `wait_event`: waits for an event with a timeout.
- `asyncio.TaskGroup`: for tasks that all end without being cancelled.
- `in_daemon_thread`: for blocking calls. A slow or unavailable storage may block a call for
  minutes, and an import on a busy node may block for seconds; neither can be cancelled. When an
  event loop ends, it waits for asyncio's own threads, so a component would not stop in time. The
  call must be atomic, because the process may exit before the call ends.
- `end_where_stalled`: ends a component that makes no progress.
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
    """Cancel tasks and wait for at most `seconds` until they have ended.

    Before the cancellation, the tasks have `grace_seconds` to end. If the caller is cancelled in
    that time, the tasks are cancelled immediately. `None` is a task that was never started.

    The tasks' exceptions are not raised, only retrieved, so that asyncio does not log them as never
    retrieved. The tasks are not awaited directly, because a task's cancellation could not be
    distinguished from the caller's own cancellation, which must be raised.
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
    """Wait at most `seconds` until an event is set; return whether it is set.

    `None` means no limit. Unlike `asyncio.wait_for`, it does not raise an error at the timeout.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


@asynccontextmanager
async def run_tasks(
    *works: Coroutine[Any, Any, T], end_seconds: float | None = None
) -> AsyncIterator[tuple[asyncio.Task[T], ...]]:
    """Run coroutines as tasks while the context is open, then end them with `end_tasks`.

    An `asyncio.TaskGroup` would wait for the tasks without a deadline, and cancel the context if
    one fails. Here the context receives the tasks and decides what to do when one ends.
    """
    tasks = tuple(asyncio.create_task(work) for work in works)
    try:
        yield tasks
    finally:
        await end_tasks(*tasks, seconds=end_seconds)


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Run the call in a daemon thread; return its result or raise its error.

    If the caller is cancelled, the call continues and its outcome is ignored.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def resolve(result: T | None, error: BaseException | None) -> None:
        # Runs in the event loop, so that the future cannot be cancelled after the check.
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
        except BaseException as error:  # noqa: BLE001  # the caller that awaits it receives it
            failure = error
        # The loop may have been closed in the meantime, so that no caller waits any more.
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
    """Raise `FreshStartError` if the number of `attempts()` does not change for `stall_seconds`.

    The time is measured in iterations of this loop, so a stopped process or a suspended machine
    does not count as stalled. `gpuledger_agent.gpu.watchdog` does not use this function: it checks
    more than a number, reports its findings before it exits, and detects a blocked event loop,
    because it runs in a thread.
    """
    last, checks = attempts(), 0
    while checks < _CHECKS:
        await sleep(stall_seconds / _CHECKS)
        now = attempts()
        last, checks = now, checks + 1 if now == last else 0
    raise FreshStartError(
        f"{what} has stalled: none of its calls has ended for {stall_seconds:.0f} s"
    )
