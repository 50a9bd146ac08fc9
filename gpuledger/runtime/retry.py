"""Call until it is done: the one loop that tries a call again and again.

Here live waiting and trying again. What a failure means, and who is told of it, is the caller's
business. A loop that does other things between its attempts (polls, reads on, waits for what is
due) has a `Backoff` of its own and does not belong here.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gpuledger.runtime.backoff import Backoff

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=Exception)


def _no_wish(_: Exception) -> float:
    return 0.0


async def until_done(
    call: Callable[[], Awaitable[T]],
    *,
    error: type[ErrorT],
    failed: Callable[[ErrorT], None],
    backoff: Backoff,
    sleep: Callable[[float], Awaitable[object]],
    min_seconds: Callable[[ErrorT], float] = _no_wish,
) -> T:
    """Return what the call returns, once it does not raise this kind of error.

    `failed` is told of each failure, before the wait; `min_seconds` says how long the one that
    was called wants to be left alone. Raises every other error.
    """
    while True:
        try:
            done = await call()
        except error as failure:
            failed(failure)
            await sleep(max(min_seconds(failure), backoff.next_seconds()))
        else:
            backoff.reset()
            return done
