"""What is remembered of nodes, for as long as anything more may come of them.

Here lives the one rule by which it is forgotten. Names of nodes come and go for as long as a
process lives, as in a cluster that is scaled up and down: nothing that is kept by such a name may
stay for ever.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

from gpuledger.clock import NS_PER_DAY

K = TypeVar("K")
V = TypeVar("V")

FORGOTTEN_AFTER_NS: Final = NS_PER_DAY
"""As long as events are kept: nothing of a node that was unresponsive for so long comes again."""


MAX_A_DAY: Final = 100_000
"""More than a partition has of nodes, or of GPUs by rule; names that somebody makes up are more."""


class Budget:
    """The bytes that several mappings may hold together."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Recent(Generic[K, V]):
    """A mapping that forgets what was neither asked for nor set for a day, within another day.

    Where more than `max_a_day` are used in a day, or the budget is spent, another day begins there
    so that twice as many are remembered at most: what is used again and again stays, and names that
    come once go. `size_bytes` says what a value counts against the budget; where that changes while
    it is remembered, `grow` counts by how much.

    It costs a lookup nothing: what was used since the day began is in one mapping, what was last
    used the day before in another, and that one is dropped when the next day begins.
    """

    __slots__ = (
        "_began_ns",
        "_budget",
        "_max_a_day",
        "_size_bytes",
        "_today",
        "_today_bytes",
        "_yesterday",
        "_yesterday_bytes",
        "forgotten",
    )

    def __init__(
        self,
        *,
        max_a_day: int = MAX_A_DAY,
        budget: Budget | None = None,
        size_bytes: Callable[[V], int] | None = None,
    ) -> None:
        self._max_a_day, self._budget, self._size_bytes = max_a_day, budget, size_bytes
        self._today: dict[K, V] = {}
        self._yesterday: dict[K, V] = {}
        self._today_bytes = self._yesterday_bytes = 0
        self._began_ns: int | None = None
        self.forgotten = 0
        """How many values went before their time, as there was no room."""

    def go_on(self, now_ns: int) -> None:
        """Forget what has its time behind it; `now_ns` is of a clock that is never set."""
        if self._began_ns is None:
            self._began_ns = now_ns
        elif now_ns - self._began_ns >= FORGOTTEN_AFTER_NS:
            self._began_ns = now_ns
            self._turn()

    def get(self, key: K) -> V | None:
        """Return what is remembered under a key, which counts as its use."""
        if (value := self._today.get(key)) is None and key in self._yesterday:
            value = self._yesterday.pop(key)
            self._yesterday_bytes -= self._count(value, -1)
            self._remember(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        """Remember a value."""
        self.pop(key)
        self._remember(key, value)

    def grow(self, key: K, more_bytes: int) -> None:
        """Count that the value of a key has grown by so many bytes, or shrunk."""
        if key in self._today:
            self._today_bytes += more_bytes
        elif key in self._yesterday:
            self._yesterday_bytes += more_bytes
        else:
            return  # forgotten meanwhile, with its bytes
        if self._budget is not None:
            self._budget.held_bytes += more_bytes
            if self._budget.held_bytes > self._budget.max_bytes:
                self._turn_early()

    def clear(self) -> None:
        """Forget all, and return its bytes back to the budget."""
        self._turn()
        self._turn()

    def _remember(self, key: K, value: V) -> None:
        if len(self._today) >= self._max_a_day:
            self._turn_early()
        self._today[key] = value
        if self._budget is not None:
            self._today_bytes += self._count(value)
            if self._budget.held_bytes > self._budget.max_bytes:
                self._turn_early()

    def _count(self, value: V, sign: int = 1) -> int:
        """Count a value against the budget, or off it; return its size."""
        if self._budget is None or self._size_bytes is None:
            return 0
        size = self._size_bytes(value)
        self._budget.held_bytes += sign * size
        return size

    def _turn_early(self) -> None:
        """Begin another day for want of room: what was not used in this one goes early."""
        self.forgotten += len(self._yesterday)
        self._turn()

    def _turn(self) -> None:
        if self._budget is not None:
            self._budget.held_bytes -= self._yesterday_bytes
        self._yesterday, self._today = self._today, {}
        self._yesterday_bytes, self._today_bytes = self._today_bytes, 0

    def __delitem__(self, key: K) -> None:
        """Forget a key that is known; raises KeyError."""
        if key not in self._today and key not in self._yesterday:
            raise KeyError(key)
        self.pop(key)

    def pop(self, key: K, _: None = None) -> V | None:
        """Forget a key; return what was remembered under it, or `None`."""
        if key in self._today:
            value = self._today.pop(key)
            self._today_bytes -= self._count(value, -1)
            return value
        if key in self._yesterday:
            value = self._yesterday.pop(key)
            self._yesterday_bytes -= self._count(value, -1)
            return value
        return None

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield what is remembered; that uses none of it."""
        return chain(self._today.items(), self._yesterday.items())

    def values(self) -> Iterator[V]:
        """Yield what is remembered, likewise."""
        return chain(self._today.values(), self._yesterday.values())

    def __len__(self) -> int:
        """Return how much is remembered."""
        return len(self._today) + len(self._yesterday)
