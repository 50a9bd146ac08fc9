"""The least and the most of what was seen of late, in constant memory."""

import math
from typing import Final

_WINDOW_NS: Final = 300 * 10**9


class WindowedMin:
    """The least of what was seen in this window of five minutes and in the one before."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._now = self._before = math.inf

    def add(self, value: float, *, now_ns: int) -> bool:
        """Take a value; say whether the least may be another than before."""
        since_ns = now_ns - self._begun_ns
        is_over = not 0 <= since_ns < _WINDOW_NS
        if is_over:
            self._before = self._now if since_ns < 2 * _WINDOW_NS else math.inf
            self._now, self._begun_ns = math.inf, now_ns
        if value < self._now:
            self._now = value
            return True
        return is_over

    @property
    def least(self) -> float:
        """The least value; infinite where there was none."""
        return min(self._now, self._before)


class WindowedMax:
    """The same for the most."""

    def __init__(self) -> None:
        self._negated = WindowedMin()

    def add(self, value: float, *, now_ns: int) -> bool:
        """Take a value; say whether the most may be another than before."""
        return self._negated.add(-value, now_ns=now_ns)

    @property
    def most(self) -> float:
        """The greatest value; minus infinity where there was none."""
        return -self._negated.least
