"""What comes again and again is written now and then, with how often it came.

Keys may be anybody's, such as the names of nodes. Those beyond the bound share one line a minute,
so that whoever makes names up gets no line for each.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

_QUIET_SECONDS: Final = 60.0
_MAX_KEYS: Final = 1000


class _Line(NamedTuple):
    """When a line was written last, and how often it would have been again since."""

    written_seconds: float
    left_out: int


class Repeats:
    """At most one line a minute for each key; the next one counts those that were left out.

    Of 1,000 keys that were written within the minute; all others count as one more.
    """

    def __init__(
        self,
        *,
        quiet_seconds: float = _QUIET_SECONDS,
        seconds: Callable[[], float] | None = None,
    ) -> None:
        self._quiet_seconds = quiet_seconds
        self._seconds = seconds or time.monotonic
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()
        """The keys that have a line of their own, the one written last at the end."""
        self._others = _Line(-math.inf, 0)

    def count(self, key: Hashable, *, more: int = 1) -> int:
        """Return how many there were since the last line, `more` included; 0 means be quiet."""
        now_seconds = self._seconds()
        if key not in self._lines and not self._make_room(now_seconds):
            self._others, count = self._next(self._others, now_seconds, more=more)
            return count
        line = self._lines.get(key, _Line(-math.inf, 0))
        self._lines[key], count = self._next(line, now_seconds, more=more)
        if count:
            self._lines.move_to_end(key)
        return count

    def _next(self, line: _Line, now_seconds: float, *, more: int) -> tuple[_Line, int]:
        """Return what becomes of a line, and how many it tells of now: 0 where it is quiet."""
        if now_seconds - line.written_seconds < self._quiet_seconds:
            return _Line(line.written_seconds, line.left_out + more), 0
        return _Line(now_seconds, 0), line.left_out + more

    def _make_room(self, now_seconds: float) -> bool:
        """Return whether another key may have a line; one that has been quiet gives up its own."""
        if len(self._lines) < _MAX_KEYS:
            return True
        eldest, line = next(iter(self._lines.items()))
        if now_seconds - line.written_seconds < self._quiet_seconds:
            return False
        del self._lines[eldest]
        self._others = self._others._replace(left_out=self._others.left_out + line.left_out)
        return True
