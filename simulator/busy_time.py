"""The time in which one process's kernels ran on one GPU: intervals and their running sum.

Here lives the history of what happened. What runs when is `kernels`' business.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

MAX_INTERVALS: Final = 1 << 17


class BusyTime:
    """Busy intervals in order of time, bounded in memory.

    When there are too many, pairs of the older half are joined: sums up to the start of a pair
    stay exact, within it the busy time counts as spent at its beginning.
    """

    def __init__(self, *, max_intervals: int = MAX_INTERVALS) -> None:
        self._max_intervals = max_intervals
        self._starts = array("q")
        self._sums = array("q")
        self._total_ns = 0
        self._end_ns = -1

    def add(self, start_ns: int, end_ns: int) -> None:
        """Append an interval that starts no earlier than the last one ended."""
        if start_ns != self._end_ns:
            self._starts.append(start_ns)
            self._sums.append(self._total_ns)
            if len(self._starts) > self._max_intervals:
                self._thin_out()
        self._total_ns += end_ns - start_ns
        self._end_ns = end_ns

    def until(self, time_ns: int) -> int:
        """Busy nanoseconds before `time_ns`."""
        at = bisect_right(self._starts, time_ns) - 1
        if at < 0:
            return 0
        most = self._sums[at + 1] if at + 1 < len(self._sums) else self._total_ns
        return min(self._sums[at] + time_ns - self._starts[at], most)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield the intervals that are kept, as (start, end) in nanoseconds."""
        ends = [*self._sums[1:], self._total_ns]
        for start_ns, before_ns, after_ns in zip(self._starts, self._sums, ends, strict=False):
            yield start_ns, start_ns + after_ns - before_ns

    def _thin_out(self) -> None:
        half = len(self._starts) // 2
        self._starts[:half] = self._starts[:half:2]
        self._sums[:half] = self._sums[:half:2]
