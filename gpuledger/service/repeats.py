"""What comes again and again is written now and then, with how often it came."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

_QUIET_SECONDS: Final = 60.0
_MOST_KEYS: Final = 1000


class Repeats:
    """At most one line a minute for each key; the next one counts those that were left out."""

    def __init__(
        self,
        *,
        quiet_seconds: float = _QUIET_SECONDS,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._seconds = seconds or time.monotonic
        self._written: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def count(self, key: Hashable, *, more: int = 1) -> int:
        """Return how many there were since the last line, `more` included; 0 means be quiet."""
        now_seconds = self._seconds()
        written = self._written.get(key)
        if written and now_seconds - written[0] < self._quiet_seconds:
            self._written[key] = (written[0], written[1] + more)
            return 0
        self._written[key] = (now_seconds, 0)
        self._written.move_to_end(key)
        if len(self._written) > _MOST_KEYS:
            self._written.popitem(last=False)
        return written[1] + more if written else more
