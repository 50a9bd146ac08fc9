"""Polls until the bus answers, and works through what came in steps of bounded work.

Here live the three things that the join does between the bus and its stage, whatever it reads:

- `UntilDone` calls again, with growing waits, until the bus answers, and shows the trouble as a
  check; what is called is the caller's business.
- `poll` waits for records that way, for a bounded time.
- `step_through` cuts what a poll brought into steps. A poll may bring records of megabytes, and all
  that comes of them is made on the event loop, which serves the health pages and the group's
  heartbeats as well. Bytes are what work is in proportion to: nothing that is made of a record
  costs more than in proportion to its length.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from enricher.join import join_metrics as metrics
from enricher.join.join_settings import JoinTuning
from gpuledger.bus.protocol import Consumer, Polled, Record
from gpuledger.errors import BusError
from gpuledger.runtime import Backoff, Check, until_done

T = TypeVar("T")


class UntilDone:
    """Calls again, with growing waits, until the bus answers; the trouble shows as a check."""

    def __init__(self, *, check: Check, backoff: Backoff, passes_check: bool = True) -> None:
        """Take the check that fails; where it is not passed here, more must succeed for that."""
        self.attempts = 0
        """How many calls have ended, well or not: it grows for as long as the join goes round."""
        self._check = check
        self._backoff = backoff
        self._passes_check = passes_check

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return what the call returns, once it succeeds; every `BusError` is waited out."""
        given = await until_done(
            partial(self._attempt, call),
            error=BusError,
            failed=self._failed,
            backoff=self._backoff,
            sleep=asyncio.sleep,
        )
        if self._passes_check:
            self._check.ok()
        return given

    async def _attempt(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        finally:
            self.attempts += 1

    def _failed(self, error: BusError) -> None:
        self._check.failed(str(error))
        metrics.RETRIES_TOTAL.inc()


async def poll(
    consumer: Consumer, *, insist: UntilDone, tuning: JoinTuning, maximum: float
) -> Polled:
    """Poll for at most so many seconds, however often the bus must be asked."""
    seconds = min(maximum, tuning.poll_timeout_seconds)
    return await insist(
        lambda: consumer.poll(timeout_seconds=seconds, max_records=tuning.max_poll_records)
    )


STEP_BYTES: Final = 262_144
"""Bytes of the values in one step, where it has more than one record: some 20 ms of ticks."""


def steps_of(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Yield the records in their order, in steps of one record or of at most `STEP_BYTES`."""
    begin, size_bytes = 0, 0
    for place, record in enumerate(records):
        size_bytes += len(record.value or b"")
        if size_bytes > STEP_BYTES and place > begin:
            yield records[begin:place]
            begin, size_bytes = place, len(record.value or b"")
    if begin < len(records):
        yield records[begin:]


async def step_through(records: Sequence[Record]) -> AsyncIterator[Sequence[Record]]:
    """Yield the steps of `steps_of`; after each of them everything else on the loop runs once."""
    for step in steps_of(records):
        yield step
        await asyncio.sleep(0)
