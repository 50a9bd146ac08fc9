"""The agent's only queue: ticks between sampling, which does not wait, and the broker, which may.

Bounded: when it is full the oldest tick goes, counted. No clock, no broker here.
"""

import asyncio
from collections import deque
from typing import Final, NamedTuple

from agent.metrics import QUEUE_TICKS, TICKS_DROPPED
from agent.sampling import Tick
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode

_NS_PER_MS: Final = 1_000_000


class Parcel(NamedTuple):
    """A tick as messages; as bytes it takes a fraction of the memory that its records do."""

    sample: Message
    processes: tuple[Message, ...]


def pack(tick: Tick) -> Parcel:
    """Encode a tick, keyed by its node and stamped with its own time."""
    key = tick.sample.node.encode()
    return Parcel(
        sample=Message(
            key=key, value=encode(tick.sample), timestamp_ms=tick.sample.time_ns // _NS_PER_MS
        ),
        processes=tuple(
            Message(key=key, value=encode(record), timestamp_ms=record.time_ns // _NS_PER_MS)
            for record in tick.processes
        ),
    )


class TickQueue:
    """Ticks in their order, at most `most_ticks` of them."""

    def __init__(self, *, most_ticks: int) -> None:
        self._most_ticks = most_ticks
        self._parcels: deque[Parcel] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: Parcel) -> None:
        """Add the newest tick; where there is no room the oldest one is dropped and counted."""
        if len(self._parcels) >= self._most_ticks:
            self._parcels.popleft()
            TICKS_DROPPED.inc()
        else:
            QUEUE_TICKS.inc()
        self._parcels.append(parcel)
        self._filled.set()

    async def take(self, *, at_most: int) -> list[Parcel]:
        """Wait for a tick, then take the oldest ones, in their order."""
        await self._filled.wait()
        count = min(at_most, len(self._parcels))
        taken = [self._parcels.popleft() for _ in range(count)]
        QUEUE_TICKS.dec(count)
        if not self._parcels:
            self._filled.clear()
        return taken
