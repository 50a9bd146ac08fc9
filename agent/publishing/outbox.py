"""The one line in which everything leaves the node: what is in hand, then the disk, then memory.

Here lives the order. What is taken is in hand until it is sent; what memory has kept waiting for
too long, or too much of, goes to the disk; the disk is emptied before memory is asked again. While
the broker keeps up, the disk is not touched. The disk's troubles end here: they are counted, and
the line goes on in memory.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from agent.metrics import SPOOL_DROPPED, SPOOL_USABLE
from agent.publishing.disk import DiskThread
from agent.publishing.parcels import Parcel
from agent.publishing.queue import TickQueue, Waiting
from agent.publishing.spool import Mark, Spool, count_failure
from gpuledger.service import Backoff, Check

T = TypeVar("T")
_FRAME_TICKS: Final = 60


class Outbox:
    """Takes parcels from whoever has some, and gives them to the publisher, oldest first.

    Not for other threads than the event loop's.
    """

    def __init__(
        self,
        *,
        queue: TickQueue,
        spool: Spool | None,
        check: Check,
        after_seconds: float,
        disk: DiskThread | None = None,
        backoff: Backoff | None = None,
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._spool = spool
        self._check = check
        self._after_seconds = after_seconds
        self._disk = disk or DiskThread()
        self._backoff = backoff or Backoff(first_seconds=1.0, most_seconds=60.0)
        self._now_seconds = now_seconds
        self._hand: list[Waiting] = []
        self._mark: Mark | None = None
        self._is_open = False
        self._told = 0
        self._shut_until_seconds = 0.0
        self._turn = asyncio.Lock()
        self._filled = asyncio.Event()
        self._overdue = asyncio.Event()
        self._emptied = asyncio.Event()
        if spool is None:
            self._check.ok("off")

    @property
    def in_memory(self) -> int:
        """How many parcels are nowhere but in memory."""
        return len(self._queue) + (len(self._hand) if self._mark is None else 0)

    @property
    def on_disk(self) -> int:
        """How many parcels were on the disk when it was last looked."""
        return self._told

    @property
    def is_on_disk(self) -> bool:
        """Whether something waits on the disk."""
        return self._is_open and self._spool is not None and not self._spool.is_empty

    def put(self, parcel: Parcel) -> None:
        """Add the newest parcel."""
        now_seconds = self._now_seconds()
        self._queue.put(Waiting(now_seconds, parcel))
        self._filled.set()
        if self._queue.is_half_full or self._waits_since(now_seconds - self._after_seconds):
            self._overdue.set()

    async def take(self, *, at_most: int) -> list[Parcel]:
        """Wait for parcels, and take the oldest ones into hand, in their order."""
        while True:
            async with self._turn:
                if await self._take(at_most):
                    return [waiting.parcel for waiting in self._hand]
                if not self._queue:
                    self._filled.clear()
            await self._filled.wait()

    async def sent(self) -> None:
        """Forget what was in hand: it is acknowledged."""
        async with self._turn:
            self._hand, mark, self._mark = [], self._mark, None
            if mark and self._spool:
                await self._ask(partial(self._spool.forget, mark))
                self._tell()
        self._emptied.set()

    async def drained(self) -> None:
        """Wait until everything is sent."""
        while self._hand or self._queue or self.is_on_disk:
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Bring to the disk, for ever, what waits in memory for too long."""
        async with self._turn:
            await self._opened()
        while True:
            await self._overdue.wait()
            self._overdue.clear()
            async with self._turn:
                await self._spill()

    async def keep(self) -> None:
        """At the end, when nobody sends any more: bring everything to the disk, or leave it."""
        async with self._turn:
            if self._mark is None:
                self._queue.put_back(self._hand)
                self._hand = []
            self._shut_until_seconds = 0.0
            await self._spill()

    def close(self) -> None:
        """Let go of the disk."""
        if self._spool is not None:
            self._spool.close()
        self._disk.close()

    def _waits_since(self, seconds: float) -> bool:
        """Tell whether something in memory waits since then or longer."""
        oldest_seconds = self._queue.oldest_since_seconds
        if self._hand and self._mark is None:
            oldest_seconds = self._hand[0].since_seconds
        return oldest_seconds is not None and oldest_seconds <= seconds

    async def _take(self, at_most: int) -> bool:
        spool = self._spool if self._is_open else await self._opened()
        if spool is not None and not spool.is_empty:
            found = await self._ask(partial(spool.read, at_most=at_most))
            if found:
                parcels, self._mark = found
                spool.lend(self._mark)
                self._hand = [Waiting(self._now_seconds(), parcel) for parcel in parcels]
                return True
        self._hand, self._mark = self._queue.take(at_most=at_most), None
        return bool(self._hand)

    async def _spill(self) -> None:
        spool = await self._opened()
        if spool is None:
            return
        # What was found on the disk later than it should is older than the hand: then the hand
        # waits in memory, as forgetting it would forget what stands before it.
        if self._hand and self._mark is None and spool.is_empty:
            self._mark = await self._append(spool, self._hand)
            if self._mark is None:
                return
            spool.lend(self._mark)
        while taken := self._queue.take(at_most=_FRAME_TICKS):
            kept = False
            try:
                kept = await self._append(spool, taken) is not None
            finally:
                if not kept:
                    self._queue.put_back(taken)
            if not kept:
                return
        self._works()

    async def _append(self, spool: Spool, waiting: Sequence[Waiting]) -> Mark | None:
        return await self._ask(partial(spool.append, [one.parcel for one in waiting]))

    async def _opened(self) -> Spool | None:
        """Give the spool where there is one that can be used now."""
        spool = self._spool
        if spool is None or self._now_seconds() < self._shut_until_seconds:
            return None
        if not self._is_open:
            self._is_open = await self._ask(partial(_open, spool)) or False
            if not self._is_open:
                return None
            self._works()
        return spool

    async def _ask(self, work: Callable[[], T]) -> T | None:
        """Have the disk do something; `None` where it failed, which is counted."""
        try:
            return await self._disk.run(work)
        except TimeoutError as error:
            self._give_up(error)
        except OSError as error:
            self._fails(error)
        return None

    def _works(self) -> None:
        self._backoff.reset()
        SPOOL_USABLE.set(1)
        self._tell()

    def _tell(self) -> None:
        if self._spool is not None:
            self._told = self._spool.parcels
            self._check.ok(lambda: f"{self._told} ticks on the disk")

    def _fails(self, error: OSError) -> None:
        count_failure(error)
        SPOOL_USABLE.set(0)
        wait_seconds = self._backoff.next_seconds()
        self._shut_until_seconds = self._now_seconds() + wait_seconds
        self._check.failed(f"in memory only: {error}")

    def _give_up(self, error: OSError) -> None:
        """Go on without a disk that hangs, until the next start: its thread never comes back."""
        # What the spool says now may not be asked: its thread may be at work on it.
        SPOOL_DROPPED.labels(reason="hung").inc(self._told)
        self._fails(error)
        self._spool, self._mark = None, None


def _open(spool: Spool) -> bool:
    spool.open()
    return True
