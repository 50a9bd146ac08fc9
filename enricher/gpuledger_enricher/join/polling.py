"""Polls until the bus answers, and works through what came in steps of bounded work.

Here live the three things that the join does between the bus and its stage, whatever it reads:

- `bus_retry` calls again, with growing waits, until the bus answers, and shows the trouble as a
  check; what is called is the caller's business.
- `poll` waits for records that way, for a bounded time.
- `step_through` cuts what a poll brought into steps. A poll may bring records of megabytes, and all
  that comes of them is made on the event loop, which serves the health pages and the group's
  heartbeats as well. Bytes are what work is in proportion to: nothing that is made of a record
  costs more than in proportion to its length.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

from gpuledger.bus.protocol import Consumer, Polled, Record
from gpuledger.errors import BusError
from gpuledger.runtime import Backoff, Check, RetryingCaller
from gpuledger_enricher.join import join_metrics as metrics
from gpuledger_enricher.join.join_settings import JoinTuning

T = TypeVar("T")


def bus_retry(
    *, check: Check, backoff: Callable[[], Backoff] = Backoff
) -> RetryingCaller[BusError]:
    """Return how the join tries again whatever it asks of the bus; `check` shows the trouble."""
    return RetryingCaller(on=BusError, check=check, counter=metrics.RETRIES_TOTAL, backoff=backoff)


async def poll(
    consumer: Consumer, *, retry: RetryingCaller[BusError], tuning: JoinTuning, max_seconds: float
) -> Polled:
    """Poll until the bus answers, for at most so many seconds; nothing where it has not by then.

    One attempt waits no longer than the settings say.
    """
    loop = asyncio.get_running_loop()
    deadline_seconds = loop.time() + max_seconds

    def attempt() -> Awaitable[Polled]:
        left_seconds = max(0.0, deadline_seconds - loop.time())
        return consumer.poll(
            timeout_seconds=min(left_seconds, tuning.poll_timeout_seconds),
            max_records=tuning.max_poll_records,
        )

    try:
        return await retry(attempt, deadline_seconds=deadline_seconds)
    except BusError:
        return {}  # the check tells of it, and the caller has something else to do now


STEP_BYTES: Final = 262_144
"""Bytes of the values in one step, where it has more than one record: some 20 ms of ticks."""


def steps_of(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Yield the records in their order, in steps of one record or of at most `STEP_BYTES`."""
    begin, size_bytes = 0, 0
    for index, record in enumerate(records):
        size_bytes += len(record.value or b"")
        # A record that is larger than a step makes one alone: it cannot be cut.
        if size_bytes > STEP_BYTES and index > begin:
            yield records[begin:index]
            begin, size_bytes = index, len(record.value or b"")
    if begin < len(records):
        yield records[begin:]


async def step_through(records: Sequence[Record]) -> AsyncIterator[Sequence[Record]]:
    """Yield the steps of `steps_of`; after each of them everything else on the loop runs once."""
    for step in steps_of(records):
        yield step
        # Not a wait: whatever is ready runs once, the heartbeat and the health pages among it.
        await asyncio.sleep(0)
