"""Cuts what a poll brought into steps of bounded work, between which others get their turn.

A poll may bring records of megabytes, and all that comes of them is made on the event loop, which
serves the health pages and the group's heartbeats as well. Bytes are what work is in proportion to:
nothing that is made of a record costs more than in proportion to its length.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from gpuledger.bus.protocol import Record

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
