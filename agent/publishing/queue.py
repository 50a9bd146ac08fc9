"""The agent's queue in memory: parcels between sampling, which does not wait, and what may.

Bounded: when it is full the oldest parcel goes, counted. No broker, no disk and no waiting here.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from agent.metrics import QUEUE_TICKS, TICKS_DROPPED
from agent.publishing.message_bundle import Parcel


class QueuedMessage(NamedTuple):
    """A parcel, and since when it waits."""

    since_seconds: float
    """On the caller's own clock."""
    parcel: Parcel


class TickQueue:
    """Parcels in their order, at most `max_ticks` of them."""

    def __init__(self, *, max_ticks: int) -> None:
        self._max_ticks = max_ticks
        self._waiting: deque[QueuedMessage] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to take parcels elsewhere, before any is dropped."""
        return len(self._waiting) > self._max_ticks // 2

    @property
    def oldest_since_seconds(self) -> float | None:
        """Since when the oldest parcel waits; `None` where none does."""
        return self._waiting[0].since_seconds if self._waiting else None

    def put(self, waiting: QueuedMessage) -> None:
        """Add the newest parcel; where there is no room the oldest one is dropped and counted."""
        self._waiting.append(waiting)
        QUEUE_TICKS.inc()
        self._keep_within_bounds()

    def take(self, *, at_most: int) -> list[QueuedMessage]:
        """Take the oldest parcels, in their order."""
        count = min(at_most, len(self._waiting))
        taken = [self._waiting.popleft() for _ in range(count)]
        QUEUE_TICKS.dec(count)
        return taken

    def put_back(self, taken: Iterable[QueuedMessage]) -> None:
        """Put what was taken in front of all others again."""
        before = len(self._waiting)
        self._waiting.extendleft(reversed(list(taken)))
        QUEUE_TICKS.inc(len(self._waiting) - before)
        self._keep_within_bounds()

    def _keep_within_bounds(self) -> None:
        dropped = max(0, len(self._waiting) - self._max_ticks)
        for _ in range(dropped):
            self._waiting.popleft()
        TICKS_DROPPED.inc(dropped)
        QUEUE_TICKS.dec(dropped)
