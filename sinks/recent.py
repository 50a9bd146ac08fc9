"""What a sink remembers of nodes, for as long as anything more may come of them.

Here lives the one rule by which it is forgotten. Names of nodes come and go for as long as a
process lives, as in a cluster that is scaled up and down: nothing that is kept by such a name may
stay for ever.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

FORGOTTEN_AFTER_NS: Final = 24 * 3_600 * 10**9
"""As long as events are kept: nothing of a node that was silent for so long comes again."""


MOST_A_DAY: Final = 100_000
"""More than a partition has of nodes, or of GPUs by rule; names that somebody makes up are more."""


class Recent(Generic[K, V]):
    """A mapping that forgets what was neither asked for nor set for a day, within another day.

    Where more than `most` are used in a day, another day begins there, so that twice as many are
    remembered at most: what is used again and again stays, and names that come once go.

    It costs a lookup nothing: what was used since the day began is in one mapping, what was last
    used the day before in another, and that one is dropped when the next day begins.
    """

    __slots__ = ("_began_ns", "_eve", "_most", "_today")

    def __init__(self, *, most: int = MOST_A_DAY) -> None:
        self._most = most
        self._today: dict[K, V] = {}
        self._eve: dict[K, V] = {}
        self._began_ns: int | None = None

    def go_on(self, now_ns: int) -> None:
        """Forget what has its time behind it; `now_ns` is of a clock that is never set."""
        if self._began_ns is None:
            self._began_ns = now_ns
        elif now_ns - self._began_ns >= FORGOTTEN_AFTER_NS:
            self._began_ns = now_ns
            self._eve, self._today = self._today, {}

    def get(self, key: K) -> V | None:
        """Return what is remembered under a key, which counts as its use."""
        if (value := self._today.get(key)) is None and key in self._eve:
            value = self._eve.pop(key)
            self._remember(key, value)
        return value

    def __setitem__(self, key: K, value: V) -> None:
        """Remember a value."""
        self._eve.pop(key, None)
        self._remember(key, value)

    def _remember(self, key: K, value: V) -> None:
        if len(self._today) >= self._most and key not in self._today:
            self._eve, self._today = self._today, {}
        self._today[key] = value

    def __delitem__(self, key: K) -> None:
        """Forget a key that is known; raises KeyError."""
        del (self._today if key in self._today else self._eve)[key]

    def pop(self, key: K, _: None = None) -> V | None:
        """Forget a key; return what was remembered under it, or `None`."""
        value = self.get(key)
        self._today.pop(key, None)
        return value

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield what is remembered; that uses none of it."""
        return chain(self._today.items(), self._eve.items())

    def values(self) -> Iterator[V]:
        """Yield what is remembered, likewise."""
        return chain(self._today.values(), self._eve.values())

    def __len__(self) -> int:
        """Return how much is remembered."""
        return len(self._today) + len(self._eve)
