"""How much consumers unpack while the event loop waits.

All records are unpacked on the event loop, on which health pages and heartbeats wait. So between
two turns of it all consumers together take up batches until `MAX_TURN_BYTES` have been fetched and
unpacked, of whichever partitions; the batch that goes beyond is the last. What is left of a
broker's answer stays where it is. So that is also what one poll brings at most.

Theory of operation. aiokafka's fetcher knows two cases: there are records, or it waits for a broker
to send some. A turn that is used up is a third one: there may be records, and nobody will send any.
So a poll first waits for its turn (`Turn.wait`), takes what is there, and waits for a broker only
if the turn had room to the last: then nothing is there. A poll that waits for a broker and wakes in
a turn that others have used up waits for the next one likewise.

Turns are given out first come, first served: who has a backlog and polls in every turn stands
behind those that already wait. Of these each end of a turn lets in the first one alone, as how much
is left of the new turn shows only once that one has taken what it wants.
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
    """What may be unpacked until the event loop has gone round once more; each thread has its own.

    Outside of a loop nobody waits: what is counted there is forgotten by the next `begin`.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = False
        """Whether the end of this turn is on its way."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.used_bytes = 0
        """What was fetched, unpacked, or given up as too much: added to by whoever does it."""

    @property
    def is_used_up(self) -> bool:
        """Return whether no further batch is to be taken up."""
        return self.used_bytes > MAX_TURN_BYTES

    def begin(self) -> None:
        """Have the turn end when the running loop has gone round once more."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What another loop of this thread left has no end, and nobody waits there any more.
            self._loop, self._ends, self.used_bytes, self._waiting = loop, False, 0, deque()
        if not self._ends:
            self._ends = True
            loop.call_soon(self._end)

    async def wait(self) -> None:
        """Return where something may be taken up: at once, or behind those that came before."""
        self.begin()
        waiting = self._waiting
        if not waiting and not self.is_used_up:
            return
        admitted = asyncio.get_running_loop().create_future()
        waiting.append(admitted)
        try:
            await admitted
        finally:
            # It stood in the queue until now, so that nobody came between it and its turn.
            waiting.remove(admitted)

    def _end(self) -> None:
        self._ends, self.used_bytes = False, 0
        if self._waiting:
            # One that was cancelled leaves the queue in this turn, which has an end as well.
            if not self._waiting[0].done():
                self._waiting[0].set_result(None)
            self.begin()


turn: Final = Turn()

_take_what_is_there: Final = Fetcher.fetched_records


def install_turns() -> None:
    """Have every consumer of this process poll as this module says.

    Can go once aiokafka unpacks batches off the event loop, or bounds how much it unpacks at once.
    """
    Fetcher.fetched_records = fetched_records


async def fetched_records(
    fetcher: Any,  # noqa: ANN401  # aiokafka is untyped
    partitions: Sequence[Any],
    timeout: float = 0,  # noqa: ASYNC109  # as aiokafka names it, in seconds
    max_records: int | None = None,
) -> Mapping[Any, Sequence[Record]]:
    """Return what is there of the partitions, or comes in time; nothing after that.

    Stands in for the method of aiokafka's fetcher.
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
            continue  # by others meanwhile, or by batches without a record for anybody
        # Not one instruction of another task lies between the look and this: no answer is missed.
        waiter = fetcher._create_fetch_waiter()
        try:
            await asyncio.wait([waiter], timeout=left_seconds)
            if not waiter.done() or fetcher._closed:
                return {}
            waiter.result()  # raises what has gone wrong in the group
        finally:
            waiter.cancel()  # else the fetcher would keep it until the next answer
