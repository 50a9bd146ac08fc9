"""Try until the receiver answers: the one retry loop of all sinks.

Here lives waiting and trying again. What an attempt is, and what counts as an answer, is the
caller's business: `ReceiverUnavailableError` means later, everything else ends the loop.
"""

from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

from gpuledger.clock import Clock
from gpuledger.service import Backoff, Check
from sinks.errors import ReceiverUnavailableError
from sinks.metrics import RETRIES_TOTAL

T = TypeVar("T")


async def until_answered(
    attempt: Callable[[int], Awaitable[T]], *, sink: str, check: Check, clock: Clock
) -> T:
    """Call `attempt(0)`, `attempt(1)`, … with growing pauses until one does not ask for another."""
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
            check.ok()
            return answer
    raise AssertionError  # count() never ends
