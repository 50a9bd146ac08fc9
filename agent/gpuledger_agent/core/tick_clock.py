"""The clocks of a node from tick to tick: the intervals of its ticks, and a wall clock set back.

Each interval begins where the one before it ended, and lies back so far that the driver has sampled
all of it:

    NEW ── first answers ──▶ OPEN ── each tick ──▶ OPEN

Beside that, the wall clock is followed, by which most drivers stamp their samples:

    STEADY ── it falls behind the time since boot by 50 ms ──▶ SET BACK
    SET BACK ── it passes where it was, or all buffers are new ──▶ STEADY

While it is set back, samples from before are stamped later than those that follow, until they have
left the driver's buffers.
"""

from collections.abc import Collection
from typing import Final

import msgspec

from gpuledger.clock import NS_PER_MS, NS_PER_US
from gpuledger_agent.core.normalize.driver_clock import LAG_WINDOWS
from gpuledger_agent.core.normalize.windows import LONGEST_WINDOW_US
from gpuledger_agent.core.raw import ClockReading

_SAME_LAG_RATIO: Final = 0.1
# More than a clock that is slewed loses in the longest tick, and less than a driver's window.
_MIN_SET_BACK_NS: Final = 50_000_000
# Longer than any driver keeps samples.
_BUFFERED_NS: Final = 150_000_000_000
# Longer than a tick's cover lags behind.
_MARGIN_NS: Final = 2_000_000_000


class TickInterval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The time that one tick covers."""

    seq: int
    """The tick's number."""
    begin_ns: int
    """Where it begins, since boot."""
    end_ns: int
    """Where it ends, since boot."""
    time_ns: int
    """Where it ends, since the epoch."""

    @property
    def from_time_ns(self) -> int:
        """Where it begins, since the epoch."""
        return self.time_ns - (self.end_ns - self.begin_ns)

    @property
    def length_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.begin_ns


class TickClock:
    """The intervals of one node's ticks, and whether its wall clock was set back."""

    def __init__(self) -> None:
        self._before: ClockReading | None = None
        self._seq = 0
        self._due_lag_ns = 0
        self.lag_ns = 0
        """How far an interval lies back, so that the driver has sampled all of it."""
        self.is_set_back = False
        """Whether samples from before the wall clock was set back may be among the others now."""
        self._set_back_until = (0, 0)
        """Until when: since the epoch, and since boot."""

    def follow(self, at: ClockReading) -> int | None:
        """Return the length of the interval that ends now; `None` if a first one opens."""
        before, self._before = self._before, at
        if before is not None:
            lost_ns = (before.time_ns - before.boottime_ns) - (at.time_ns - at.boottime_ns)
            if lost_ns > _MIN_SET_BACK_NS:
                # Set back twice, it has to pass the latest of all stamps.
                passed_ns = max(before.time_ns, self._set_back_until[0] if self.is_set_back else 0)
                self._set_back_until = (passed_ns + _MARGIN_NS, at.boottime_ns + _BUFFERED_NS)
                self.is_set_back = True
        until_time_ns, until_boottime_ns = self._set_back_until
        if at.time_ns > until_time_ns or at.boottime_ns > until_boottime_ns:
            self.is_set_back = False
        return None if before is None else max(1, at.monotonic_ns - before.monotonic_ns)

    def learn_lag(self, windows_us: Collection[float]) -> None:
        """Take over the lengths of the drivers' windows, as far as they are known."""
        if not windows_us:
            return
        due_ns = round(LAG_WINDOWS * min(max(windows_us), LONGEST_WINDOW_US) * NS_PER_US)
        # Lengths are measured: one that hardly differs is the same.
        if abs(due_ns - self._due_lag_ns) > _SAME_LAG_RATIO * self._due_lag_ns:
            self._due_lag_ns = due_ns
        if not self._seq:
            self.lag_ns = self._due_lag_ns

    def interval(self, at: ClockReading, length_ns: int) -> TickInterval:
        """Return the next tick's interval, which lies back so far that all of it is sampled.

        Intervals still meet if the lag changes: some are shorter then, or longer.
        """
        # Milliseconds since boot, but never the same twice, whatever a clock does.
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
