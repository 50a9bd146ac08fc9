"""Call until it is done: the one loop that tries a call again and again.

Here live waiting and trying again. What a failure means, and who is told of it, is the caller's
business. A loop that does other things between its attempts (polls, reads on, waits for what is
due) has a `Backoff` of its own and does not belong here.
"""

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=Exception)


# How long to wait before the next attempt. Pure: it counts attempts, it does not wait.


class Backoff:
    """Waits that double from attempt to attempt, each by chance between half and the whole of it.

    The chance keeps clients that failed together from coming back together.
    """

    def __init__(
        self,
        *,
        first_seconds: float = 0.5,
        max_seconds: float = 30.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < first_seconds <= max_seconds:
            raise ValueError(f"expected 0 < first ({first_seconds}) <= most ({max_seconds})")
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._jitter = jitter
        self._ceiling_seconds = first_seconds

    def next_seconds(self) -> float:
        """Return the seconds to wait before the next attempt, and count that attempt."""
        ceiling = self._ceiling_seconds
        self._ceiling_seconds = min(2 * ceiling, self._max_seconds)
        return ceiling / 2 * (1 + self._jitter())

    def reset(self) -> None:
        """Begin again with the first wait, after an attempt that succeeded."""
        self._ceiling_seconds = self._first_seconds


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
