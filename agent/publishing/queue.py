"""The agent's queue in memory: parcels between sampling, which does not wait, and what may.

Bounded: when it is full the oldest parcel goes, counted. No broker and no disk here.
"""

import asyncio
from collections import deque

from agent.metrics import QUEUE_TICKS, TICKS_DROPPED
from agent.publishing.parcels import Parcel


class TickQueue:
    """Parcels in their order, at most `most_ticks` of them."""

    def __init__(self, *, most_ticks: int) -> None:
        self._most_ticks = most_ticks
        self._parcels: deque[Parcel] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: Parcel) -> None:
        """Add the newest parcel; where there is no room the oldest one is dropped and counted."""
        if len(self._parcels) >= self._most_ticks:
            self._parcels.popleft()
            TICKS_DROPPED.inc()
        else:
            QUEUE_TICKS.inc()
        self._parcels.append(parcel)
        self._filled.set()

    async def take(self, *, at_most: int) -> list[Parcel]:
        """Wait for a parcel, then take the oldest ones, in their order."""
        await self._filled.wait()
        count = min(at_most, len(self._parcels))
        taken = [self._parcels.popleft() for _ in range(count)]
        QUEUE_TICKS.dec(count)
        if not self._parcels:
            self._filled.clear()
        return taken
