"""Two sources see one thing: which sighting is news, and which is the same thing again. Pure.

One source never tells of one thing twice. So a sighting is a repetition where another source has
one within two seconds that is not paired yet; equal XIDs in a burst are paired one by one, the
oldest first, and each real occurrence leaves exactly one incident, whoever comes first.
"""

from collections import OrderedDict, deque
from typing import Final

WINDOW_NS: Final = 2_000_000_000
_MAX_KEYS: Final = 256
_MAX_UNPAIRED: Final = 512

Key = tuple[str, int | str]
"""GPU and XID, or GPU and kind."""


class Deduplicator:
    """The sightings that no other source has had yet, a bounded number of them."""

    def __init__(self) -> None:
        self._unpaired: OrderedDict[Key, dict[str, deque[int]]] = OrderedDict()

    def is_news(self, key: Key, *, source: str, time_ns: int, window_ns: int = WINDOW_NS) -> bool:
        """Take a sighting in; tells whether no other source has had it within the window."""
        by_source = self._of(key)
        for other, times in by_source.items():
            if other != source and _pair(times, time_ns, window_ns):
                return False
        by_source.setdefault(source, deque(maxlen=_MAX_UNPAIRED)).append(time_ns)
        return True

    def _of(self, key: Key) -> dict[str, deque[int]]:
        found = self._unpaired.setdefault(key, {})
        self._unpaired.move_to_end(key)
        if len(self._unpaired) > _MAX_KEYS:
            self._unpaired.popitem(last=False)
        return found


def _pair(times: deque[int], time_ns: int, window_ns: int) -> bool:
    for place, other_ns in enumerate(times):
        if abs(other_ns - time_ns) <= window_ns:
            del times[place]
            return True
    return False
