"""Calls the bus until it answers, and processes records in steps of bounded work.

The join needs three functions between the bus and its stage, for all topics:

- `bus_retry` returns a caller that repeats a call, with growing pauses, until the bus answers. The
  caller reports failures in a check.
- `poll` waits for records, for a limited time, and repeats failed calls.
- `step_through` divides the records of a poll into steps. A poll may return megabytes, and the
  event loop that processes them also serves the health endpoints and the group's heartbeats. Steps
  are measured in bytes, because the time for a record is at most proportional to its length.
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
    """Return a caller that retries calls to the bus; `check` reports their failures."""
    return RetryingCaller(on=BusError, check=check, counter=metrics.RETRIES_TOTAL, backoff=backoff)


async def poll(
    consumer: Consumer, *, retry: RetryingCaller[BusError], tuning: JoinTuning, max_seconds: float
) -> Polled:
    """Poll for at most `max_seconds`, with retries; return nothing if the bus does not answer.

    One attempt waits for at most `tuning.poll_timeout_seconds`.
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
        return {}  # the check reports the failure, and the time is over


STEP_BYTES: Final = 262_144
"""Maximum bytes of the values in one step of several records: about 20 ms of work for ticks."""


def steps_of(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Yield the records in order, in steps of one record or of at most `STEP_BYTES`."""
    begin, size_bytes = 0, 0
    for index, record in enumerate(records):
        size_bytes += len(record.value or b"")
        # A record larger than a step is a step of its own, because it cannot be divided.
        if size_bytes > STEP_BYTES and index > begin:
            yield records[begin:index]
            begin, size_bytes = index, len(record.value or b"")
    if begin < len(records):
        yield records[begin:]


async def step_through(records: Sequence[Record]) -> AsyncIterator[Sequence[Record]]:
    """Yield the steps of `steps_of`; let the other tasks of the event loop run after each step."""
    for step in steps_of(records):
        yield step
        # Does not wait: each ready task, such as heartbeats and health requests, runs once.
        await asyncio.sleep(0)
