"""Limits how much consumers unpack before the event loop runs other tasks.

All records are unpacked on the event loop, which also serves health pages and heartbeats. A turn is
the time between two iterations of the loop. In one turn, all consumers together process batches
until `MAX_TURN_BYTES` have been fetched and unpacked; the batch that exceeds the limit is the last.
The rest of a broker's response stays in the fetcher. The limit also bounds one poll.

Theory of operation. aiokafka's fetcher distinguishes two cases: it has records, or it waits for a
broker to send some. A used-up turn is a third case: there may be fetched records for which no
broker will send another response. So a poll first waits for its turn (`Turn.wait`) and takes the
available records. The poll waits for a broker only if the turn is not used up, because then no
fetched records are left. If a broker wakes a poll in a used-up turn, the poll also waits for the
next turn.

Turns are granted in order of arrival: a consumer with a backlog that polls in every turn queues
behind those that already wait. The end of a turn admits only the first waiting poll, because the
room left in the new turn is known only after that poll has taken its records.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka.consumer.fetcher import Fetcher

from gpuledger.bus.limits import MAX_TURN_BYTES
from gpuledger.bus.protocol import Record


class Turn(threading.local):
    """The budget for unpacking until the event loop's next iteration; one for each thread.

    The next `begin` resets bytes that were counted while no event loop was running.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = False
        """Whether the end of this turn is scheduled."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.used_bytes = 0
        """Number of bytes in this turn that were fetched, unpacked, or rejected because a batch is
        too large. The code that fetches, unpacks or rejects bytes increases this number."""

    @property
    def is_used_up(self) -> bool:
        """Return whether no further batch may be processed in this turn."""
        return self.used_bytes > MAX_TURN_BYTES

    def begin(self) -> None:
        """Schedule the turn's end for the next iteration of the running loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # A turn of an earlier loop of this thread never ends, and its polls no longer wait.
            self._loop, self._ends, self.used_bytes, self._waiting = loop, False, 0, deque()
        if not self._ends:
            self._ends = True
            loop.call_soon(self._end)

    async def wait(self) -> None:
        """Wait until the caller may process batches: now, or after the polls that already wait."""
        self.begin()
        waiting = self._waiting
        if not waiting and not self.is_used_up:
            return
        admitted = asyncio.get_running_loop().create_future()
        waiting.append(admitted)
        try:
            await admitted
        finally:
            # The future stays in the queue until here, so that no other poll can take its turn.
            waiting.remove(admitted)

    def _end(self) -> None:
        self._ends, self.used_bytes = False, 0
        if self._waiting:
            # If the first poll was cancelled, it leaves the queue during the new turn, and the end
            # of that turn admits the next poll.
            if not self._waiting[0].done():
                self._waiting[0].set_result(None)
            self.begin()


turn: Final = Turn()

_take_what_is_there: Final = Fetcher.fetched_records


def install_turns() -> None:
    """Make all consumers of this process poll in turns.

    Remove once aiokafka unpacks batches outside of the event loop, or limits how much it unpacks at
    once.
    """
    Fetcher.fetched_records = fetched_records


async def fetched_records(
    fetcher: Any,  # noqa: ANN401  # aiokafka is untyped
    partitions: Sequence[Any],
    timeout: float = 0,  # noqa: ASYNC109  # as aiokafka names it, in seconds
    max_records: int | None = None,
) -> Mapping[Any, Sequence[Record]]:
    """Return records of the partitions that are available or arrive within `timeout`.

    Replaces the method of aiokafka's fetcher.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        await turn.wait()
        found: Mapping[Any, Sequence[Record]]
        found = await _take_what_is_there(fetcher, partitions, 0, max_records)
        left_seconds = deadline - loop.time()
        if found or left_seconds <= 0:
            return found
        if turn.is_used_up:
            continue  # used up by other polls, or by batches without records
        # No other task has run since the check above, so no response can be missed.
        waiter = fetcher._create_fetch_waiter()
        try:
            await asyncio.wait([waiter], timeout=left_seconds)
            if not waiter.done() or fetcher._closed:
                return {}
            waiter.result()  # raises the group's errors
        finally:
            waiter.cancel()  # otherwise the fetcher would keep it until the next response
