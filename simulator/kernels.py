"""The truth of one GPU: which process's kernels run when.

Here lives the model of a time-slicing device. Each process alternates between work that it submits
at once and a gap; one kernel runs at a time, and processes with work take turns in slices. Times
are nanoseconds since the scenario's start. What NVML says of all this is derived elsewhere.
"""

import heapq
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

NEVER_NS: Final = 1 << 62


class Stream:
    """One process's stream of kernels on one GPU."""

    def __init__(
        self, *, start_ns: int, end_ns: int, kernel_ns: int, busy_ratio: float, seed: str
    ) -> None:
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.busy = BusyTime()
        self.remaining_ns = 0
        self._kernel_ns = kernel_ns
        self._gap_ns = kernel_ns * (1 - busy_ratio) / busy_ratio
        self._random = Random(seed)  # noqa: S311  # jitter, no secret
        self.submit()

    def submit(self) -> None:
        """Submit the next work, of a length around the mean."""
        self.remaining_ns = max(1, int(self._kernel_ns * (0.5 + self._random.random())))

    def gap_ns(self) -> int:
        """Draw the time until the next submission, around the mean."""
        return int(self._gap_ns * (0.5 + self._random.random()))


class Kernels:
    """The device: runs its streams' kernels one at a time, as far as it was asked to."""

    def __init__(self, streams: Sequence[Stream], *, time_slice_ns: int) -> None:
        self._time_slice_ns = time_slice_ns
        self._now_ns = 0
        self._ready: deque[Stream] = deque()
        self._waiting = [(stream.start_ns, order, stream) for order, stream in enumerate(streams)]
        self._order = {id(stream): order for order, stream in enumerate(streams)}
        heapq.heapify(self._waiting)

    def run_until(self, until_ns: int) -> None:
        """Run every kernel that starts before `until_ns`, whatever was asked for before."""
        while True:
            self._wake()
            if not self._ready:
                if not self._waiting or self._waiting[0][0] >= until_ns:
                    return
                self._now_ns = self._waiting[0][0]
            elif self._now_ns >= until_ns:
                return
            else:
                self._run(self._ready.popleft())

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._now_ns:
            self._ready.append(heapq.heappop(self._waiting)[2])

    def _run(self, stream: Stream) -> None:
        start_ns = self._now_ns
        end_ns = min(start_ns + self._turn_ns(stream), stream.end_ns)
        if end_ns <= start_ns:
            return
        stream.busy.add(start_ns, end_ns)
        stream.remaining_ns -= end_ns - start_ns
        self._now_ns = end_ns
        self._put_back(stream)

    def _turn_ns(self, stream: Stream) -> int:
        """Length of its turn: all of its work while nobody else has any."""
        if self._ready:
            return min(stream.remaining_ns, self._time_slice_ns)
        if not self._waiting:
            return stream.remaining_ns
        alone_ns = self._waiting[0][0] - self._now_ns
        return min(stream.remaining_ns, max(alone_ns, self._time_slice_ns))

    def _put_back(self, stream: Stream) -> None:
        if self._now_ns >= stream.end_ns:
            return
        if stream.remaining_ns > 0:
            self._wake()
            self._ready.append(stream)
            return
        stream.submit()
        wake_ns = self._now_ns + stream.gap_ns()
        heapq.heappush(self._waiting, (wake_ns, self._order[id(stream)], stream))


# The time in which one process's kernels ran on one GPU: intervals and their running sum.
#
# Here lives the history of what happened. What runs when is `kernels`' business.

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
