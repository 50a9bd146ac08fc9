"""Try until the receiver answers, for all that sinks ask of their receivers.

Here lives who is told of a failure. What an attempt is, and what counts as an answer, is the
caller's business: `ReceiverUnavailableError` means later, everything else ends the loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final, TypeVar

from gpuledger.clock import Clock
from gpuledger.runtime import Backoff, Check, until_done
from sinks.errors import ReceiverUnavailableError
from sinks.metrics import RETRIES_TOTAL

ANSWER_SECONDS: Final = 30.0
"""How long a call may take before the check says so, where it has no deadline of its own: a storage
that takes connections and never answers keeps one for minutes."""
T = TypeVar("T")


async def until_answered(
    attempt: Callable[[int], Awaitable[T]],
    *,
    sink: str,
    check: Check,
    clock: Clock,
    receiver: str = "",
    on_answer: Callable[[], None] | None = None,
) -> T:
    """Call `attempt(0)`, `attempt(1)`, … with growing pauses until one does not ask for another.

    Attempts are counted; when an outage begins and ends is the check's to log. `receiver` is what
    the check shows while all is well; where an answer alone does not make it so, `on_answer` says
    in its place what the check shows.
    """

    def failed(error: ReceiverUnavailableError) -> None:
        RETRIES_TOTAL.labels(sink=sink).inc()
        check.failed(str(error))

    numbers = count()
    answer = await until_done(
        lambda: attempt(next(numbers)),
        error=ReceiverUnavailableError,
        failed=failed,
        backoff=Backoff(),
        sleep=clock.sleep,
        min_seconds=lambda error: error.retry_after_seconds,
    )
    (on_answer or partial(check.ok, receiver))()
    return answer


@dataclass(frozen=True, kw_only=True)
class Retrying:
    """`until_answered` for all that is asked of one receiver."""

    sink: str
    check: Check
    clock: Clock
    receiver: str = ""

    async def __call__(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Return the answer to the first attempt that has one."""
        return await until_answered(
            attempt, sink=self.sink, check=self.check, clock=self.clock, receiver=self.receiver
        )

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Fail the check while what is asked of the receiver in here takes too long."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()

        def detail() -> str:
            return f"{self.receiver}: no answer for {loop.time() - asked_at:.0f} s"

        late = loop.call_later(ANSWER_SECONDS, self.check.failed, detail)
        try:
            yield
        finally:
            late.cancel()
