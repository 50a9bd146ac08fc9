"""Try again: the one loop that repeats a call until it succeeds.

`RetryingCaller` is that loop, for everything that is asked of one other side: it waits between the
attempts, fails a check while they fail and counts them. `Backoff` is its waits alone, for a loop
that does other things between its attempts (polls, reads on, waits for what is due), and for code
without asyncio; such a loop says at its `Backoff` why it is no `RetryingCaller`. `RetryTimer`
remembers when the wait of a `Backoff` is over, for code that is told the time and asks each time
whether it may try.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

from gpuledger.clock import NS_PER_SECOND, Sleeper, SystemClock
from gpuledger.runtime.readiness import Check

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=Exception)

SLOW_SECONDS: Final = 30.0
"""How long a call may take before its check fails, where the call has no timeout of its own: a
storage that takes connections and never answers keeps one for minutes."""


class Backoff:
    """Waits that double from attempt to attempt, each by chance between half and the whole of it.

    The chance keeps clients that failed together from coming back together. Pure: it counts
    attempts, it does not wait.
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


class RetryTimer:
    """When something may be tried again, for a caller that comes by anyway and asks.

    Pure: the time is an argument, nanoseconds of one clock.
    """

    def __init__(self, backoff: Backoff, *, calm_seconds: float = 0.0) -> None:
        """Wait between attempts as `backoff` says.

        After `calm_seconds` without an attempt a success ends the waits.
        """
        self._backoff = backoff
        self._calm_ns = round(calm_seconds * NS_PER_SECOND)
        self._tried_ns: int | None = None
        self._due_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether a wait was begun since the last reset, be it over or not."""
        return self._tried_ns is not None

    def wait_ns(self, now_ns: int) -> int:
        """Return how long it is not to be tried; 0 where it may be tried now."""
        return max(0, self._due_ns - now_ns) if self.is_running else 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether it may be tried now."""
        return not self.wait_ns(now_ns)

    def record_attempt(self, now_ns: int) -> None:
        """Begin the wait before the next attempt, longer than the one before."""
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(self._backoff.next_seconds() * NS_PER_SECOND)

    def record_success(self, now_ns: int) -> None:
        """Reset, unless the last attempt is so fresh that it may fail again at once."""
        if self._tried_ns is not None and now_ns - self._tried_ns >= self._calm_ns:
            self.reset()

    def wait(self, now_ns: int, *, seconds: float) -> None:
        """Do not try for `seconds`; the waits after that begin anew."""
        self._backoff.reset()
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(seconds * NS_PER_SECOND)

    def skip_wait(self) -> None:
        """End the wait that runs; the one after it is as long as it would have been."""
        self._due_ns = 0

    def reset(self) -> None:
        """Allow an attempt now; the waits begin anew."""
        self._backoff.reset()
        self._tried_ns = None


class FailureCounter(Protocol):
    """A counter of the metrics, which are made elsewhere."""

    def inc(self) -> None:
        """Count one more."""


class RetryingCaller(Generic[ErrorT]):
    """Calls again, with growing waits, while a call raises one kind of error.

    Several calls may be under way at once: each has waits of its own.
    """

    def __init__(
        self,
        *,
        on: type[ErrorT],
        check: Check,
        receiver: str = "",
        passes_check: bool = True,
        counter: FailureCounter | None = None,
        clock: Sleeper | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        min_seconds: Callable[[ErrorT], float] | None = None,
        describe: Callable[[ErrorT], str] = str,
    ) -> None:
        """Take what is done about errors of the kind `on`; every other error goes on to the caller.

        `check` fails with what `describe` says of an error. A success passes it, with `receiver`
        as its detail, unless `passes_check` is false: then more must succeed for that than the
        call. `counter` counts the failures. `min_seconds` returns how long the other side wants to
        be left alone.
        """
        self.attempts = 0
        """How many calls have ended, well or not: it grows for as long as the caller goes round."""
        self._on, self._check, self._receiver = on, check, receiver
        self._passes_check, self._counter = passes_check, counter
        self._clock, self._backoff = clock or SystemClock(), backoff
        self._min_seconds, self._describe = min_seconds, describe

    async def __call__(
        self, call: Callable[[], Awaitable[T]], *, deadline_seconds: float = math.inf
    ) -> T:
        """Return what the call returns, once it succeeds.

        Raise its error where it has not succeeded by `deadline_seconds`, a time of the event loop.
        """
        backoff: Backoff | None = None
        while True:
            try:
                done = await call()
            except self._on as error:
                if self._counter is not None:
                    self._counter.inc()
                self._check.failed(self._describe(error))
                failure = error
                min_wait_seconds = self._min_seconds(error) if self._min_seconds else 0.0
            else:
                if self._passes_check:
                    self._check.ok(self._receiver)
                return done
            finally:
                self.attempts += 1
            # Most calls succeed at once, and need none. Outside of `except`, as what ends the wait,
            # such as a cancellation, is no consequence of the failure.
            backoff = backoff or self._backoff()
            wait_seconds = max(min_wait_seconds, backoff.next_seconds())
            left_seconds = deadline_seconds - asyncio.get_running_loop().time()
            await self._clock.sleep(max(0.0, min(wait_seconds, left_seconds)))
            if wait_seconds >= left_seconds:
                raise failure

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Fail the check while what is asked of the receiver in here takes too long."""
        loop = asyncio.get_running_loop()
        begun_seconds = loop.time()
        late = loop.call_later(
            SLOW_SECONDS,
            self._check.failed,
            lambda: f"{self._receiver}: no answer for {loop.time() - begun_seconds:.0f} s",
        )
        try:
            yield
        finally:
            late.cancel()
