"""Computes a node's tick intervals, and detects when the node's wall clock is set back.

Each interval begins at the end of the previous one, and ends some time before its tick, so that the
driver has sampled the whole interval by then:

    NEW ── first answers ──▶ OPEN ── each tick ──▶ OPEN

Most drivers stamp their samples by the wall clock, so the wall clock is tracked too:

    STEADY ── it falls behind the time since boot by 50 ms ──▶ SET BACK
    SET BACK ── it passes its old time, or older samples are gone ──▶ STEADY

In SET BACK, the driver's buffers may contain older samples with later stamps than newer samples.
"""

from collections.abc import Collection
from typing import Final

import msgspec

from gpuledger.clock import NS_PER_MS, NS_PER_US
from gpuledger_agent.core.normalize.driver_clock import LAG_WINDOWS
from gpuledger_agent.core.normalize.windows import LONGEST_WINDOW_US
from gpuledger_agent.core.raw import ClockReading

_SAME_LAG_RATIO: Final = 0.1
# More than a slewed clock loses in the longest tick, and less than a driver's window.
_MIN_SET_BACK_NS: Final = 50_000_000
# Longer than any driver keeps its samples.
_BUFFERED_NS: Final = 150_000_000_000
# Longer than the lag of a tick's interval.
_MARGIN_NS: Final = 2_000_000_000


class TickInterval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The time that one tick covers."""

    seq: int
    """The tick's number."""
    begin_ns: int
    """Begin of the interval, in nanoseconds since boot."""
    end_ns: int
    """End of the interval, in nanoseconds since boot."""
    time_ns: int
    """End of the interval, in nanoseconds since the epoch."""

    @property
    def from_time_ns(self) -> int:
        """Begin of the interval, in nanoseconds since the epoch."""
        return self.time_ns - (self.end_ns - self.begin_ns)

    @property
    def length_ns(self) -> int:
        """Length of the interval, in nanoseconds."""
        return self.end_ns - self.begin_ns


class TickClock:
    """Computes one node's tick intervals and detects whether its wall clock was set back."""

    def __init__(self) -> None:
        self._before: ClockReading | None = None
        self._seq = 0
        self._due_lag_ns = 0
        self.lag_ns = 0
        """Time between an interval's end and its tick. The driver needs this time to sample the
        whole interval."""
        self.is_set_back = False
        """Whether the wall clock was set back and the driver may still return older samples."""
        self._set_back_until = (0, 0)
        """`is_set_back` becomes false at the first of these two times: nanoseconds since the epoch
        and nanoseconds since boot."""

    def follow(self, at: ClockReading) -> int | None:
        """Return the nanoseconds since the previous tick; `None` at the first tick.

        Also detect whether the wall clock was set back since then.
        """
        before, self._before = self._before, at
        if before is not None:
            lost_ns = (before.time_ns - before.boottime_ns) - (at.time_ns - at.boottime_ns)
            if lost_ns > _MIN_SET_BACK_NS:
                # If the clock was set back twice, it must pass the latest time of both.
                passed_ns = max(before.time_ns, self._set_back_until[0] if self.is_set_back else 0)
                self._set_back_until = (passed_ns + _MARGIN_NS, at.boottime_ns + _BUFFERED_NS)
                self.is_set_back = True
        # The tick at `at` covers the time since `before`, which must lie after the change too.
        until_time_ns, until_boottime_ns = self._set_back_until
        if before and (before.time_ns > until_time_ns or before.boottime_ns > until_boottime_ns):
            self.is_set_back = False
        return None if before is None else max(1, at.monotonic_ns - before.monotonic_ns)

    def learn_lag(self, windows_us: Collection[float]) -> None:
        """Adapt the lag to the sampling windows of the GPUs' drivers, given their lengths."""
        if not windows_us:
            return
        due_ns = round(LAG_WINDOWS * min(max(windows_us), LONGEST_WINDOW_US) * NS_PER_US)
        # Lengths are measured, so ignore a change of less than a tenth.
        if abs(due_ns - self._due_lag_ns) > _SAME_LAG_RATIO * self._due_lag_ns:
            self._due_lag_ns = due_ns
        if not self._seq:
            self.lag_ns = self._due_lag_ns

    def interval(self, at: ClockReading, length_ns: int) -> TickInterval:
        """Return the interval that the tick at `at` covers; it ends `lag_ns` before `at`.

        `length_ns` is the time since the previous tick. While the lag changes, the interval is
        longer or shorter than that, so that it still begins at the end of the previous interval.
        """
        # Milliseconds since boot, but never the same number twice, even if a clock stands still.
        self._seq = max(at.boottime_ns // NS_PER_MS, self._seq + 1)
        step_ns = self._due_lag_ns - self.lag_ns
        step_ns = max(-(length_ns // 2), min(step_ns, length_ns // 2))
        self.lag_ns += step_ns
        length_ns -= step_ns
        end_ns = at.boottime_ns - self.lag_ns
        return TickInterval(
            seq=self._seq,
            begin_ns=end_ns - length_ns,
            end_ns=end_ns,
            time_ns=at.time_ns - self.lag_ns,
        )
