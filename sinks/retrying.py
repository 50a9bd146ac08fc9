"""Try until the receiver answers: the one retry loop of all sinks.

Here lives waiting and trying again. What an attempt is, and what counts as an answer, is the
caller's business: `ReceiverUnavailableError` means later, everything else ends the loop.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from gpuledger.clock import Clock
from gpuledger.service import Backoff, Check
from sinks.errors import ReceiverUnavailableError
from sinks.metrics import RETRIES_TOTAL

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
    on_answer = on_answer or partial(check.ok, receiver)
    backoff = Backoff()
    for number in count():
        try:
            answer = await attempt(number)
        except ReceiverUnavailableError as error:
            pause_seconds = max(error.retry_after_seconds, backoff.next_seconds())
            RETRIES_TOTAL.labels(sink=sink).inc()
            check.failed(str(error))
            await clock.sleep(pause_seconds)
        else:
            on_answer()
            return answer
    raise AssertionError  # count() never ends


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
