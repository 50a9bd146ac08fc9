"""Rows appended in a thread, by one write at a time, whoever stops waiting for it.

Here lives how a write outlives its waiting; what is written, and when, is `sinks.store.service`'s.
"""

import asyncio
from functools import partial

from gpuledger.clock import Clock
from gpuledger.runtime.tasks import in_daemon_thread
from sinks.store.buffer import RowBuffer
from sinks.store.stored import Stored
from sinks.store.table import EntriesTable


class Appending:
    """The write that is under way, if any."""

    def __init__(self, *, table: EntriesTable, stored: Stored, clock: Clock) -> None:
        self._table, self._stored, self._clock = table, stored, clock
        self._writing: asyncio.Task[None] | None = None

    async def append(self, pending: RowBuffer) -> None:
        """Write in a thread; where the waiting is cancelled, the next call waits for the same."""
        if self._writing is None:
            offsets = {
                self._stored.streams.of(at): last for at, last in pending.last_offsets.items()
            }
            time_ms = self._clock.time_ns() // 1_000_000
            self._writing = asyncio.create_task(
                in_daemon_thread(
                    partial(
                        self._table.append,
                        pending.rows,
                        offsets,
                        time_ms=time_ms,
                        facts=self._stored.new_identities(pending.last_offsets),
                    )
                )
            )
            self._writing.add_done_callback(_look_at)
        writing = self._writing
        # Cancelled or not, the outcome stays where it is until somebody has seen it.
        await asyncio.wait({writing})
        self._writing = None
        writing.result()
        self._stored.advance(pending.last_offsets)

    async def end(self) -> None:
        """Wait until nothing is being written; how that ended, the table tells."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing = None


def _look_at(writing: asyncio.Task[None]) -> None:
    """Look at the outcome, so that asyncio does not complain where nobody waits any more."""
    if not writing.cancelled():
        writing.exception()
