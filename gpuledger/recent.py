"""A mapping for data about nodes, which forgets a node when no more data can arrive from it.

Names of nodes come and go throughout a process's life, for example in a cluster that scales up and
down. Data that is stored under these names must therefore expire; this module decides when.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

from gpuledger.clock import NS_PER_DAY

K = TypeVar("K")
V = TypeVar("V")

FORGOTTEN_AFTER_NS: Final = NS_PER_DAY
"""Minimum time without use after which data is forgotten. Events are kept for as long, so no older
events of a node can arrive afterwards."""


MAX_A_DAY: Final = 100_000
"""Default maximum number of items that are used in a day, such as nodes or GPUs of a partition.
Only made-up names exceed it. At most twice as many items are kept; a sink's progress for one node
takes 1 kB."""


class Budget:
    """A limit on the number of bytes that several mappings use together."""

    __slots__ = ("held_bytes", "max_bytes")

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0


class Recent(Generic[K, V]):
    """A mapping that forgets items one to two days after their last use.

    If more than `max_a_day` items are used in a day, or the budget is spent, the next day begins
    early. At most twice `max_a_day` items are therefore kept: items that are used repeatedly stay,
    and items that are used only once are forgotten. `size_bytes` returns the size of a value for
    the budget; if the size of a stored value changes, report the change with `grow`.

    A lookup costs nothing extra: items used since the day began are in one mapping, items last used
    the day before in another, which is dropped when the next day begins.
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
        """Number of values that were forgotten early, because there was no room."""

    def go_on(self, now_ns: int) -> None:
        """Forget expired items; `now_ns` must come from a monotonic clock."""
        if self._began_ns is None:
            self._began_ns = now_ns
        elif now_ns - self._began_ns >= FORGOTTEN_AFTER_NS:
            self._began_ns = now_ns
            self._turn()

    def get(self, key: K) -> V | None:
        """Return the value of a key, or `None`; the call counts as a use of the item."""
        if (value := self._today.get(key)) is None and key in self._yesterday:
            value = self._yesterday.pop(key)
            self._yesterday_bytes -= self._count(value, -1)
            self._remember(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        """Store a value."""
        self.pop(key)
        self._remember(key, value)

    def grow(self, key: K, more_bytes: int) -> None:
        """Record that a key's value has grown by this many bytes; negative if it has shrunk."""
        if key in self._today:
            self._today_bytes += more_bytes
        elif key in self._yesterday:
            self._yesterday_bytes += more_bytes
        else:
            return  # already forgotten, and its bytes were returned to the budget
        if self._budget is not None:
            self._budget.held_bytes += more_bytes
            if self._budget.held_bytes > self._budget.max_bytes:
                self._turn_early()

    def clear(self) -> None:
        """Forget all items, and return their bytes to the budget."""
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
        """Add a value's size to the budget, or subtract it; return the size."""
        if self._budget is None or self._size_bytes is None:
            return 0
        size = self._size_bytes(value)
        self._budget.held_bytes += sign * size
        return size

    def _turn_early(self) -> None:
        """Begin the next day early to make room; forget items not used in the current day."""
        self.forgotten += len(self._yesterday)
        self._turn()

    def _turn(self) -> None:
        if self._budget is not None:
            self._budget.held_bytes -= self._yesterday_bytes
        self._yesterday, self._today = self._today, {}
        self._yesterday_bytes, self._today_bytes = self._today_bytes, 0

    def __delitem__(self, key: K) -> None:
        """Forget a known key; raise `KeyError` if it is unknown."""
        if key not in self._today and key not in self._yesterday:
            raise KeyError(key)
        self.pop(key)

    def pop(self, key: K, _: None = None) -> V | None:
        """Forget a key; return its value, or `None`."""
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
        """Yield all items; this does not count as a use of them."""
        return chain(self._today.items(), self._yesterday.items())

    def values(self) -> Iterator[V]:
        """Yield all values; this does not count as a use of them."""
        return chain(self._today.values(), self._yesterday.values())

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._today) + len(self._yesterday)
