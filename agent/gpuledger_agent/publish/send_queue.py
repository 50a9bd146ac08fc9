"""Keeps messages until they are sent, oldest first: in flight, in the spool on disk, in memory.

Bundles that the publisher has taken are in flight until acknowledged. If bundles wait in memory for
too long, or too many wait, they are moved to the spool. Bundles in the spool are sent before those
in memory. While the broker keeps up, the spool is not used. If the disk fails, the failure is
counted, and the queue continues in memory. If older ticks wait in a spool that cannot be read,
newer ticks are not sent, because the join would then ignore the older ticks as already processed.

A lost inventory would be missing until the node's hardware changes. The newest inventory is
therefore also kept apart. If the queue or the spool has dropped it before it was acknowledged, it
is sent with the next bundles from memory. Later, `repeat_inventory` queues it again.
"""

import asyncio
import math
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
# Maximum number of bundles in a frame of the spool. A minute of ticks compresses well; a larger
# frame would lose more if one byte is damaged.
_FRAME_TICKS: Final = 60
_READ_WITHIN_SECONDS: Final = 10.0  # short, because newer ticks wait meanwhile
_WRITE_WITHIN_SECONDS: Final = 60.0
_MIN_WAIT_SECONDS: Final = 0.1
_CHECKED_EVERY_SECONDS: Final = 60.0


class SendQueue:
    """Keeps bundles in memory and in the spool until the publisher has sent them, oldest first.

    Use it only in the event loop's thread.
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
        self._newest_inventory: MessageBundle | None = None
        self._inventory: MessageBundle | None = None
        """The newest inventory, until it is acknowledged."""
        self._position: int | None = None
        """The spool's position up to which its bundles are in flight; `None` if the bundles in
        flight are only in memory."""
        self._is_open = False
        self._is_spill_due = False
        """Whether `_overdue` requests that bundles are written, and not only a check of the free
        space."""
        self._was_overtaken = False
        """Whether newer ticks were sent while the spool could not be opened."""
        self._bundles_on_disk = 0
        self._space_checked_seconds = -math.inf
        # Only one task at a time may use the disk or change which bundles are in flight.
        self._lock = asyncio.Lock()
        self._filled = asyncio.Event()
        self._overdue = asyncio.Event()
        self._emptied = asyncio.Event()
        # Without a spool there is no series; a metric without labels would show 0.
        self._usable = SPOOL_USABLE.labels(directory=str(spool.path)) if spool else None
        if spool is None:
            self._check.ok("off")

    @property
    def bundles_in_memory(self) -> int:
        """Number of bundles that are only in memory."""
        return len(self._queue) + (len(self._in_flight) if self._position is None else 0)

    @property
    def bundles_on_disk(self) -> int:
        """Number of bundles in the spool after its last use."""
        return self._bundles_on_disk

    @property
    def is_on_disk(self) -> bool:
        """Whether bundles wait in the spool and the spool could be opened."""
        return self._is_open and self._spool is not None and not self._spool.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether all bundles have been sent and acknowledged."""
        return not (self._in_flight or self._queue or self._waits_on_disk)

    def put(self, bundle: MessageBundle) -> None:
        """Add the newest bundle; request that bundles are spooled if they wait for too long."""
        now_seconds = self._now_seconds()
        self._queue.put(QueuedBundle(now_seconds, bundle))
        self._filled.set()
        oldest_seconds = self._queue.oldest_since_seconds
        if self._in_flight and self._position is None:
            # Unacknowledged bundles in flight wait too, and are older than the queue.
            oldest_seconds = self._in_flight[0].since_seconds
        waits_long = (
            oldest_seconds is not None and oldest_seconds <= now_seconds - self._spill_after_seconds
        )
        # Write again when that is due, because only a write shows that a failed disk works again.
        if self._queue.is_half_full or waits_long or (self._is_open and self._writing.is_due):
            self._is_spill_due = True
            self._overdue.set()
        elif self._is_space_check_due:
            self._overdue.set()

    def put_inventory(self, bundle: MessageBundle) -> None:
        """Add the newest inventory; it is sent even if its bundle is dropped meanwhile."""
        self._newest_inventory = self._inventory = bundle
        self.put(bundle)

    def repeat_inventory(self) -> None:
        """Add the newest inventory again; do nothing if there is none or it still waits."""
        if self._newest_inventory and not self._inventory:
            self.put_inventory(self._newest_inventory)

    async def take(self, *, max_bundles: int) -> list[MessageBundle]:
        """Wait until there are bundles; return at most `max_bundles`, oldest first.

        The returned bundles are in flight until `ack` is called.
        """
        while True:
            async with self._lock:
                if await self._take(max_bundles):
                    return [waiting.bundle for waiting in self._in_flight]
                self._filled.clear()
            # Wake up when a bundle is added, or when the spool is due to be opened or read again.
            seconds = (self._reading if self._is_open else self._opening).wait_seconds
            left_seconds = max(seconds, _MIN_WAIT_SECONDS) if self._waits_on_disk else None
            await wait_event(self._filled, left_seconds)

    async def ack(self) -> None:
        """Delete the bundles in flight from memory and from the spool, because they were sent."""
        async with self._lock:
            # Equal, not the same: bundles that were read from the spool are copies.
            waiting = self._inventory
            if waiting and any(queued.bundle == waiting for queued in self._in_flight):
                self._inventory = None
            self._in_flight, position, self._position = [], self._position, None
            if position and self._spool:
                await self._on_disk(partial(self._spool.ack, position), self._reading)
        self._emptied.set()

    async def wait_drained(self) -> None:
        """Wait until all bundles have been sent and acknowledged."""
        while not self.is_empty:
            self._emptied.clear()
            await self._emptied.wait()

    async def run(self) -> None:
        """Move bundles that wait in memory for too long to the spool, until cancelled.

        Once a minute, check that the disk has enough free space, so that a full disk is reported
        before the spool is needed.
        """
        async with self._lock:
            await self._open_spool()
        while True:
            async with self._lock:
                if self._is_spill_due:
                    self._is_spill_due = False
                    await self._spill()
                elif self._spool is not None and self._is_space_check_due:
                    self._space_checked_seconds = self._now_seconds()
                    await self._on_disk(self._spool.require_free_space, self._writing)
            await self._overdue.wait()
            self._overdue.clear()

    async def spill_all(self) -> None:
        """Write all bundles in memory to the spool; call it after publishing has ended.

        If writing fails, the bundles stay in memory.
        """
        async with self._lock:
            if self._position is None:
                self._queue.put_back(self._in_flight)
                self._in_flight = []
            # This is the last attempt, so do not wait after earlier failures.
            self._opening.skip_wait()
            self._writing.skip_wait()
            await self._spill()

    async def close(self) -> None:
        """Close the spool; the next process sends the bundles that are left in the spool.

        The spool is closed in the thread that uses the disk, because SQLite crashes if a database
        is closed while another thread uses it.
        """
        try:
            if self._spool is not None:
                await self._on_disk(self._spool.close, self._writing)
        finally:
            self._disk.close()

    @property
    def _waits_on_disk(self) -> bool:
        """Whether bundles wait in the spool, even if the spool cannot be read now."""
        return self._spool is not None and not self._spool.is_empty

    @property
    def _is_space_check_due(self) -> bool:
        """Whether to check the disk's free space, because the last check was a minute ago.

        False while the spool is closed or a failed write must be repeated, because the write shows
        whether the disk has space.
        """
        since_seconds = self._now_seconds() - self._space_checked_seconds
        is_usable = self._is_open and self._writing.error is None
        return is_usable and since_seconds >= _CHECKED_EVERY_SECONDS

    async def _take(self, max_bundles: int) -> bool:
        await self._open_spool()
        if self._waits_on_disk:
            await self._take_from_disk(max_bundles)
            # Check again, because reading drops damaged or missing frames. If no frame is left,
            # continue with the bundles in memory.
            if self._in_flight or self._waits_on_disk:
                return bool(self._in_flight)
        # No older inventory waits: the spool is empty, and a full queue drops the oldest bundles.
        lost = self._inventory
        if lost and lost in self._queue:
            lost = None
        dropped = [QueuedBundle(self._now_seconds(), lost)] if lost else []
        taken = self._queue.take(max_bundles=max_bundles - len(dropped))
        self._in_flight, self._position = [*dropped, *taken], None
        # If the spool is opened later, its bundles are older than these, and thus too late.
        if self._in_flight and not self._is_open:
            self._was_overtaken = True
        return bool(self._in_flight)

    async def _take_from_disk(self, max_bundles: int) -> None:
        """If the spool can be read now, put its oldest bundles in flight."""
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
        # If the spool still contains bundles, they are older than those in flight. The bundles in
        # flight then stay in memory: deleting them from the spool would delete the older ones too.
        if self._in_flight and self._position is None and spool.is_empty:
            self._position = await self._append(spool, self._in_flight)
            if self._position is None:
                return
            spool.set_in_flight(self._position)
        while taken := self._queue.take(max_bundles=_FRAME_TICKS):
            kept = False
            try:
                kept = await self._append(spool, taken) is not None
            # Put them back even if the task is cancelled, so that `spill_all` spools them.
            finally:
                if not kept:
                    self._queue.put_back(taken)
            if not kept:
                return

    async def _append(self, spool: Spool, waiting: Sequence[QueuedBundle]) -> int | None:
        bundles = [queued.bundle for queued in waiting]
        return await self._on_disk(partial(spool.append, bundles), self._writing)

    async def _open_spool(self) -> Spool | None:
        """Return the spool if it may be written now, else `None`.

        If the spool is not open, first try to open it, unless the delay after a failure is not
        over.
        """
        spool = self._spool
        if spool is None:
            return None
        if not self._is_open and not self._opening.wait_seconds:
            was_overtaken = self._was_overtaken

            def open_spool() -> bool:
                spool.open()
                if was_overtaken and spool.bundles:
                    # Newer ticks were sent, so the join would regard these as already processed.
                    spool.drop_late()
                return True

            self._is_open = await self._on_disk(open_spool, self._opening) or False
        return spool if self._is_open and not self._writing.wait_seconds else None

    async def _on_disk(self, work: Callable[[], T], attempts: Attempts) -> T | None:
        """Run disk work in the disk's thread and return the result.

        If it fails, count the error, record it in `attempts`, and return `None`. If the disk hangs,
        the spool is not used any more.
        """
        done = None
        try:
            done = await self._disk.run(work)
            attempts.worked()
        except DiskHungError as error:
            # Continue without the disk until the next start, because its thread may never return.
            # Do not access the spool here, because that thread may be using it.
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
            self._check.failed(f"samples can wait in memory only: {memory_only}")
        elif error := waits or self._reading.error:
            self._check.failed(f"cannot read samples on disk, newer ones wait: {error}")
        else:
            self._check.ok(lambda: f"{self._bundles_on_disk} samples on disk")
