"""Retries: the only loop that repeats a call until it succeeds, and its waits.

- `RetryingCaller` is that loop, for all calls to one receiver. It waits between the attempts, lets
  a check fail while the attempts fail, and counts the failures.
- `Backoff` only calculates the waits. It is for loops that do other work between the attempts, and
  for code without asyncio. A comment at each such `Backoff` explains why it is not a
  `RetryingCaller`.
- `RetryTimer` records when a wait of a `Backoff` ends, for code that receives the time as an
  argument and checks each time whether it may try.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, Generic, Protocol, TypeVar

from gpuledger.clock import NS_PER_SECOND, Sleeper, SystemClock
from gpuledger.runtime.readiness import Check

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=Exception)

SLOW_SECONDS: Final = 30.0
"""How long a call without its own timeout may take before its check fails. A storage that accepts
connections but never answers can block a call for minutes."""
_NO_CHECKS: Final[Mapping[Any, Check]] = MappingProxyType({})


class Backoff:
    """Calculates random waits between half and all of a maximum, which doubles with each attempt.

    Because the waits are random, clients that failed together do not retry together. The class does
    not sleep.
    """

    def __init__(
        self,
        *,
        first_seconds: float = 0.5,
        max_seconds: float = 30.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if not 0 < first_seconds <= max_seconds:
            raise ValueError(
                f"expected 0 < first_seconds ({first_seconds}) <= max_seconds ({max_seconds})"
            )
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._jitter = jitter
        self._ceiling_seconds = first_seconds

    def next_seconds(self) -> float:
        """Return the seconds to wait before the next attempt, and double the next wait."""
        ceiling = self._ceiling_seconds
        self._ceiling_seconds = min(2 * ceiling, self._max_seconds)
        return ceiling / 2 * (1 + self._jitter())

    def reset(self) -> None:
        """Start again with the first wait, after a successful attempt."""
        self._ceiling_seconds = self._first_seconds


class RetryTimer:
    """Records when the next attempt is due, for a caller that calls `is_due` regularly.

    All times are arguments in nanoseconds; the caller must always use the same clock.
    """

    def __init__(self, backoff: Backoff, *, calm_seconds: float = 0.0) -> None:
        """Take the waits from `backoff`.

        `record_success` resets the waits if the last attempt is at least `calm_seconds` ago.
        """
        self._backoff = backoff
        self._calm_ns = round(calm_seconds * NS_PER_SECOND)
        self._tried_ns: int | None = None
        self._due_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether a wait was started since the last reset; it may be over."""
        return self._tried_ns is not None

    def wait_ns(self, now_ns: int) -> int:
        """Return the time in nanoseconds until the next attempt is due; 0 if it is due now."""
        return max(0, self._due_ns - now_ns) if self.is_running else 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether the next attempt is due."""
        return not self.wait_ns(now_ns)

    def record_attempt(self, now_ns: int) -> None:
        """Start the wait before the next attempt; it is longer than the previous wait."""
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(self._backoff.next_seconds() * NS_PER_SECOND)

    def record_success(self, now_ns: int) -> None:
        """Reset the waits, unless the last attempt was less than `calm_seconds` ago."""
        if self._tried_ns is not None and now_ns - self._tried_ns >= self._calm_ns:
            self.reset()

    def wait(self, now_ns: int, *, seconds: float) -> None:
        """Make the next attempt due in `seconds`, and start again with the first wait after it."""
        self._backoff.reset()
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(seconds * NS_PER_SECOND)

    def skip_wait(self) -> None:
        """End the current wait without changing the length of the next one."""
        self._due_ns = 0

    def reset(self) -> None:
        """Allow an attempt now, and start again with the first wait."""
        self._backoff.reset()
        self._tried_ns = None


class FailureCounter(Protocol):
    """The part of a counter metric that `RetryingCaller` uses."""

    def inc(self) -> None:
        """Add one."""


class RetryingCaller(Generic[ErrorT]):
    """Repeats a call with growing waits while it raises one kind of error.

    Several calls may run concurrently; each has its own waits.
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
        checks_by_error: Mapping[type[ErrorT], Check] = _NO_CHECKS,
    ) -> None:
        """Configure the handling of `on` errors; all other errors are raised to the caller.

        After an error, `check` fails with the text of `describe`. After a success it passes, with
        `receiver` as its detail. If `passes_check` is false, a success leaves the check unchanged,
        because more than the call must succeed. `counter` counts the failures. `min_seconds`
        returns the minimum wait that the receiver requested. Each check of `checks_by_error` fails
        only after errors of its class, and passes after any other result.
        """
        self.attempts = 0
        """Number of attempts that have ended, successful or not; shows that the caller is alive."""
        self._on, self._check, self._receiver = on, check, receiver
        self._passes_check, self._counter = passes_check, counter
        self._clock, self._backoff = clock or SystemClock(), backoff
        self._min_seconds, self._describe = min_seconds, describe
        self._checks_by_error = checks_by_error

    async def __call__(
        self, call: Callable[[], Awaitable[T]], *, deadline_seconds: float = math.inf
    ) -> T:
        """Return the call's result once it succeeds.

        Raises the call's last error if no attempt has succeeded by `deadline_seconds`, a time of
        the event loop.
        """
        backoff: Backoff | None = None
        while True:
            try:
                done = await call()
            except self._on as error:
                if self._counter is not None:
                    self._counter.inc()
                self._check.failed(self._describe(error))
                for kind, check in self._checks_by_error.items():
                    if isinstance(error, kind):
                        check.failed(self._describe(error))
                    else:
                        check.ok()
                failure = error
                min_wait_seconds = self._min_seconds(error) if self._min_seconds else 0.0
            else:
                if self._passes_check:
                    self._check.ok(self._receiver)
                for check in self._checks_by_error.values():
                    check.ok()
                return done
            finally:
                self.attempts += 1
            # Created here, because most calls succeed at once and need no back-off. Outside of
            # `except`, so that a cancellation of the wait is not chained to the failure.
            backoff = backoff or self._backoff()
            wait_seconds = max(min_wait_seconds, backoff.next_seconds())
            left_seconds = deadline_seconds - asyncio.get_running_loop().time()
            await self._clock.sleep(max(0.0, min(wait_seconds, left_seconds)))
            if wait_seconds >= left_seconds:
                raise failure

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Fail the check if the context is still open after `SLOW_SECONDS`."""
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
