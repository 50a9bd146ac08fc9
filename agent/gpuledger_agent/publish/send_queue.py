"""The order in which everything leaves the node: what is in flight, then the disk, then memory.

What is taken is in flight until it is acknowledged; what memory has kept waiting for too long, or
too much of, goes to the disk; the disk is emptied before memory is asked again. While the broker
keeps up, the disk is not touched. The disk's failures end here: they are counted, and the queue
goes on in memory. While older ticks wait on a disk that cannot be read nothing newer is sent: the
join takes what comes behind newer ticks for booked before.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import wait_event
from gpuledger_agent.metrics import SPOOL_DROPPED, SPOOL_USABLE
from gpuledger_agent.publish.disk import Attempts, DiskHungError, IoThread
from gpuledger_agent.publish.message_bundle import BundleQueue, MessageBundle, QueuedBundle
from gpuledger_agent.publish.spool import Spool, count_failure

T = TypeVar("T")
# A frame is what is lost together when a byte of it breaks; a minute of ticks packs well.
_FRAME_TICKS: Final = 60
_READ_WITHIN_SECONDS: Final = 10.0  # as newer ticks wait meanwhile
_WRITE_WITHIN_SECONDS: Final = 60.0
_MIN_WAIT_SECONDS: Final = 0.1


class SendQueue:
    """Holds bundles until the publisher takes them, oldest first.

    Not for other threads than the event loop's.
    """

    def __init__(
        self,
        *,
        queue: BundleQueue,
        spool: Spool | None,
        check: Check,
        spill_after_seconds: float,
        disk: IoThread | None = None,
        backoff: Callable[..., Backoff] = Backoff,
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._spool = spool
        self._check = check
        self._spill_after_seconds = spill_after_seconds
        self._disk = disk or IoThread()
        self._now_seconds = now_seconds
        self._opening, self._reading, self._writing = (
            Attempts(backoff=backoff(first_seconds=1, max_seconds=seconds), now_seconds=now_seconds)
            for seconds in (_READ_WITHIN_SECONDS, _READ_WITHIN_SECONDS, _WRITE_WITHIN_SECONDS)
        )
        self._in_flight: list[QueuedBundle] = []
        self._position: int | None = None
        """Where what is in flight ends on the disk; `None` where it is nowhere but in memory."""
        self._is_open = False
        self._was_overtaken = False
        """Whether newer ticks were sent while the disk could not be opened."""
        self._bundles_on_disk = 0
        # One at a time decides what is in flight; the disk works in its thread meanwhile.
        self._lock = asyncio.Lock()
        self._filled = asyncio.Event()
        self._overdue = asyncio.Event()
        self._emptied = asyncio.Event()
        # A series of its own, as one without labels would be 0 also where no disk is wanted.
        self._usable = SPOOL_USABLE.labels(directory=str(spool.path)) if spool else None
        if spool is None:
            self._check.ok("off")

    @property
    def bundles_in_memory(self) -> int:
        """How many bundles are nowhere but in memory."""
        return len(self._queue) + (len(self._in_flight) if self._position is None else 0)

    @property
    def bundles_on_disk(self) -> int:
        """How many bundles were on the disk when it was last looked."""
        return self._bundles_on_disk

    @property
    def is_on_disk(self) -> bool:
        """Whether something waits on the disk."""
        return self._is_open and self._spool is not None and not self._spool.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether everything that was put is sent."""
        return not (self._in_flight or self._queue or self._waits_on_disk)

    def put(self, bundle: MessageBundle) -> None:
        """Add the newest bundle."""
        now_seconds = self._now_seconds()
        self._queue.put(QueuedBundle(now_seconds, bundle))
        self._filled.set()
        oldest_seconds = self._queue.oldest_since_seconds
        if self._in_flight and self._position is None:
            # What the broker does not acknowledge waits as well.
            oldest_seconds = self._in_flight[0].since_seconds
        waits_long = (
            oldest_seconds is not None and oldest_seconds <= now_seconds - self._spill_after_seconds
        )
        # A disk that has refused is shown to work by a write alone.
        if self._queue.is_half_full or waits_long or (self._is_open and self._writing.is_due):
            self._overdue.set()

    async def take(self, *, max_bundles: int) -> list[MessageBundle]:
        """Wait for bundles, and return the oldest ones, in flight now, in their order."""
        while True:
            async with self._lock:
                if await self._take(max_bundles):
                    return [waiting.bundle for waiting in self._in_flight]
                self._filled.clear()
            # There is more once something is put, or once the disk is due to be read again.
            seconds = (self._reading if self._is_open else self._opening).wait_seconds
            left_seconds = max(seconds, _MIN_WAIT_SECONDS) if self._waits_on_disk else None
            await wait_event(self._filled, left_seconds)

    async def ack(self) -> None:
        """Forget what was in flight: it is acknowledged."""
        async with self._lock:
            self._in_flight, position, self._position = [], self._position, None
            if position and self._spool:
                await self._on_disk(partial(self._spool.ack, position), self._reading)
        self._emptied.set()

    async def wait_drained(self) -> None:
        """Wait until everything is sent."""
        while not self.is_empty:
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Bring to the disk, for ever, what waits in memory for too long."""
        async with self._lock:
            await self._open_spool()
        while True:
            await self._overdue.wait()
            self._overdue.clear()
            async with self._lock:
                await self._spill()

    async def spill_all(self) -> None:
        """At the end, when nobody sends any more: bring everything to the disk, or leave it."""
        async with self._lock:
            if self._position is None:
                self._queue.put_back(self._in_flight)
                self._in_flight = []
            # There is no later try: a wait that is not over would lose the ticks.
            self._opening.skip_wait()
            self._writing.skip_wait()
            await self._spill()

    async def close(self) -> None:
        """Let go of the disk; what is on it is the next process's.

        In the disk's thread: SQLite crashes if a database is closed while another thread uses it.
        """
        try:
            if self._spool is not None:
                await self._on_disk(self._spool.close, self._writing)
        finally:
            self._disk.close()

    @property
    def _waits_on_disk(self) -> bool:
        """Whether older ticks wait on the disk, be it that they cannot be read now."""
        return self._spool is not None and not self._spool.is_empty

    async def _take(self, max_bundles: int) -> bool:
        await self._open_spool()
        if self._waits_on_disk:
            await self._take_from_disk(max_bundles)
            # Looked at again: what was damaged or removed is dropped by the attempt to read it, and
            # where nothing is left by that it is memory's turn.
            if self._in_flight or self._waits_on_disk:
                return bool(self._in_flight)
        self._in_flight, self._position = self._queue.take(max_bundles=max_bundles), None
        # What the disk may turn out to hold is older than this, and will be too late then.
        if self._in_flight and not self._is_open:
            self._was_overtaken = True
        return bool(self._in_flight)

    async def _take_from_disk(self, max_bundles: int) -> None:
        """Put the oldest of the disk in flight, where it can be read now."""
        spool = self._spool
        if spool is None or not self._is_open or self._reading.wait_seconds:
            return
        found = await self._on_disk(partial(spool.read, max_bundles=max_bundles), self._reading)
        if found:
            bundles, self._position = found
            spool.set_in_flight(self._position)
            self._in_flight = [QueuedBundle(self._now_seconds(), bundle) for bundle in bundles]

    async def _spill(self) -> None:
        spool = await self._open_spool()
        if spool is None:
            return
        # What was found on the disk later than it should is older than what is in flight. Then that
        # waits in memory, as forgetting it would forget what stands before it.
        if self._in_flight and self._position is None and spool.is_empty:
            self._position = await self._append(spool, self._in_flight)
            if self._position is None:
                return
            spool.set_in_flight(self._position)
        while taken := self._queue.take(max_bundles=_FRAME_TICKS):
            kept = False
            try:
                kept = await self._append(spool, taken) is not None
            # Also where the task is cancelled at the end: the last chance spills them once more.
            finally:
                if not kept:
                    self._queue.put_back(taken)
            if not kept:
                return

    async def _append(self, spool: Spool, waiting: Sequence[QueuedBundle]) -> int | None:
        bundles = [queued.bundle for queued in waiting]
        return await self._on_disk(partial(spool.append, bundles), self._writing)

    async def _open_spool(self) -> Spool | None:
        """Return the spool where there is one that can be used now."""
        spool = self._spool
        if spool is None:
            return None
        if not self._is_open and not self._opening.wait_seconds:
            was_overtaken = self._was_overtaken

            def open_spool() -> bool:
                spool.open()
                if was_overtaken and spool.bundles:
                    # Behind newer ticks the join would take these for booked before.
                    spool.drop_late()
                return True

            self._is_open = await self._on_disk(open_spool, self._opening) or False
        return spool if self._is_open and not self._writing.wait_seconds else None

    async def _on_disk(self, work: Callable[[], T], attempts: Attempts) -> T | None:
        """Have the disk do something; `None` where it failed, which is counted."""
        done = None
        try:
            done = await self._disk.run(work)
            attempts.worked()
        except DiskHungError as error:
            # On without it until the next start: its thread never comes back. What the spool says
            # now may not be asked, as that thread may be at work on it.
            SPOOL_DROPPED.labels(reason="hung").inc(self._bundles_on_disk)
            count_failure(error)
            self._writing.failed(error)
            self._spool, self._position = None, None
        except OSError as error:
            count_failure(error)
            attempts.failed(error)
        self._update_check()
        return done

    def _update_check(self) -> None:
        if self._spool is not None:
            self._bundles_on_disk = self._spool.bundles
            if self._spool.is_empty:
                self._reading.worked()  # there is nothing left that could not be read
        waits = self._opening.error if self._waits_on_disk else None
        memory_only = self._opening.error or self._writing.error
        if self._usable:
            self._usable.set(not (memory_only or self._reading.error))
        if memory_only and not waits:
            self._check.failed(f"in memory only: {memory_only}")
        elif error := waits or self._reading.error:
            self._check.failed(f"the ticks on the disk cannot be read, newer ones wait: {error}")
        else:
            self._check.ok(lambda: f"{self._bundles_on_disk} ticks on the disk")
