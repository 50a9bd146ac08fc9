"""Estimates the time of the driver's clock, and the interval of that clock that a tick covers.

The driver divides time into sampling windows and returns a window's sample after the window has
closed. The time that a tick covers therefore ends up to a few windows before the tick, and begins
exactly where the previous tick's covered time ended. Load that starts or ends is then counted in
one tick, or split between two, but never lost or counted twice.

Only timestamps of samples reveal the driver's clock. The clock is at least at the newest timestamp.
If this timestamp belongs to the latest window, the clock is at most one window later. From answer
to answer (`sync`) and from tick to tick, both bounds advance with our clock and converge. If they
contradict each other, the driver's clock has jumped, and the estimate starts over.

Some drivers return no samples for idle windows. `freshness` decides once per answer whether the
newest sample belongs to the latest window. If the utilization rates have shown that a driver omits
idle windows, time without samples counts as idle. Otherwise the tick has a gap, and its utilization
is unknown.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuledger.clock import NS_PER_US
from gpuledger_agent.core.normalize.windows import (
    LONGEST_WINDOW_US,
    Interval,
    SampledWindow,
    WindowLength,
    cut_windows,
    fill_idle,
    mean_percent,
)
from gpuledger_agent.core.raw import AnswerTime, SampleCursor, UtilizationSample

LAG_WINDOWS: Final = 1.5
"""Time between the end of a tick's covered time and the driver's clock at the tick, in windows. At
this distance, all covered windows have closed by the time of the tick."""
_MAX_LAG_WINDOWS: Final = 2
BEHIND_WINDOWS: Final = 1.1
"""If the newest sample is older than this, the driver has omitted later ones. The excess over 1
allows for a window that is about to close, and for timestamps that jitter by 1 % of a window.
"""
DRIFT_RATIO: Final = 0.0005
"""Maximum drift between two clocks of one machine."""
# Bounds that contradict each other by more than this part of a window belong to different clocks.
_MAX_CONTRADICTION: Final = 0.5
# Maximum part of the covered time without samples that does not count as a gap, because timestamps
# jitter.
_MAX_GAP_WINDOWS: Final = 0.5
# Up to this ratio, a longer estimate of the window's length is the same length, measured again.
_LONGER: Final = 1.2


class DriverClock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The minimum and maximum possible time of the driver's clock at a tick."""

    earliest_us: float
    """The clock's minimum."""
    latest_us: float
    """The clock's maximum."""
    covered_us: float
    """End of the time that the tick covers, by the driver's clock."""

    def closed_us(self, elapsed_us: float) -> float:
        """Return the clock's minimum at `elapsed_us` after the tick.

        Windows that end at or before this time have certainly closed by then.
        """
        return self.earliest_us + elapsed_us * (1 - DRIFT_RATIO)

    def latest_before_us(self, elapsed_us: float) -> float:
        """Return the clock's maximum at `elapsed_us` before the tick."""
        return self.latest_us - elapsed_us * (1 - DRIFT_RATIO)

    def widen(self, more_us: float) -> "DriverClock":
        """Return the clock with a later maximum, because its window length was too short."""
        return replace(self, latest_us=self.latest_us + more_us)


class Freshness(Enum):
    """Whether an answer's newest sample belongs to the driver's latest window."""

    LATEST = "latest"
    """The latest window that has closed."""
    BEHIND = "behind"
    """An earlier window: the driver returned no samples for the idle windows after it."""
    LEAPT = "leapt"
    """The latest window, although later ones should have closed by our clock: the driver's clock
    has jumped."""
    UNKNOWN = "unknown"
    """The window cannot be determined."""


OF_LATEST: Final = (Freshness.LATEST, Freshness.LEAPT)
"""The two values for which the newest sample belongs to the latest window."""


def freshness(
    newest_us: int,
    newest_percent: int | None,
    *,
    rate_percent: int | None,
    closed_us: float | None,
    window_us: float | None,
    skips_idle: bool,
    late_us: float = 0.0,
    loses_windows: bool = False,
) -> Freshness:
    """Return whether the sample with the timestamp `newest_us` belongs to the latest window.

    `newest_percent` is the sample's value; `None` if no stored answer contains the sample.
    `rate_percent` is the utilization in the latest window, queried before the samples; `None` if
    the driver does not report it. By our clock, all windows up to `closed_us` have closed.
    `window_us` is the length of a window; if it is `None`, the maximum length is assumed.
    `skips_idle` is whether the driver is known to omit samples of idle windows, `late_us` how late
    its samples have arrived, and `loses_windows` whether it loses samples of used windows.
    """
    behind_us = closed_us - newest_us if closed_us else 0.0
    window_us = window_us or LONGEST_WINDOW_US
    is_behind = behind_us > BEHIND_WINDOWS * window_us
    if is_behind and late_us:
        loses_windows |= bool(rate_percent) or behind_us <= late_us + _MAX_LAG_WINDOWS * window_us
    if is_behind and loses_windows:
        return Freshness.UNKNOWN
    if is_behind and rate_percent:
        # Even drivers that omit windows return samples for those with use.
        return Freshness.LEAPT
    if is_behind and (rate_percent == 0 or skips_idle):
        return Freshness.BEHIND
    if rate_percent != 0:
        return Freshness.LATEST
    # The rate is 0: if the driver omits idle windows, the sample may be of an earlier used window.
    return Freshness.UNKNOWN if newest_percent or skips_idle else Freshness.LATEST


class ClockSync(NamedTuple):
    """Bounds of the driver's clock, from answers whose newest samples were of the latest window."""

    at_ns: int
    """The time of the bounds, by the monotonic clock."""
    closed_us: float
    """The clock's minimum; windows that end at or before it have closed."""
    opened_us: float
    """The clock's maximum, less one window."""

    def at(self, now_ns: int) -> "ClockSync":
        """Return the bounds at another time."""
        since_us = (now_ns - self.at_ns) / NS_PER_US
        drift_us = abs(since_us) * DRIFT_RATIO
        return ClockSync(
            now_ns, self.closed_us + since_us - drift_us, self.opened_us + since_us + drift_us
        )

    def bounds(self, window_us: float) -> tuple[float, float]:
        """Return the clock's minimum and maximum, given the length of a window."""
        return self.closed_us, self.opened_us + window_us


def sync(
    before: ClockSync | None, newest_us: int, *, given: AnswerTime, window_us: float
) -> ClockSync:
    """Return the bounds after an answer whose newest sample, `newest_us`, is of the latest window.

    An answer shortly after the end of a window gives the best minimum; shortly before the end, it
    gives the best maximum. If the answer contradicts the earlier bounds `before`, only it counts.
    """
    waited_us = (given.answered_ns - given.requested_ns) / NS_PER_US
    fresh = ClockSync(given.answered_ns, newest_us, newest_us + waited_us * (1 + DRIFT_RATIO))
    if before is None:
        return fresh
    was = before.at(given.answered_ns)
    both = ClockSync(
        given.answered_ns,
        max(was.closed_us, fresh.closed_us),
        min(was.opened_us, fresh.opened_us),
    )
    earliest_us, latest_us = both.bounds(window_us)
    return both if earliest_us <= latest_us else fresh


def advance(
    before: DriverClock | None,
    *,
    newest_us: int,
    window_us: float,
    interval_us: float,
    is_latest: bool = True,
    shown: tuple[float, float] | None = None,
    wait_us: float = 0.0,
) -> tuple[DriverClock, Interval]:
    """Return the driver's clock at a tick, and the interval of that clock that the tick covers.

    `before` is the clock at the previous tick, `newest_us` the newest timestamp, and `interval_us`
    the time between the two ticks. If the driver's clock jumps, the covered interval jumps too. If
    `is_latest` is false, the driver has omitted windows that closed after `newest_us`. `shown` is
    the minimum and maximum of the driver's clock now, derived from earlier timestamps; `None` if no
    earlier timestamp shows them. `wait_us` is how late samples arrive.
    """
    fresh = shown or (float(newest_us), newest_us + window_us)
    earliest_us, latest_us = _bounds(
        before, fresh, window_us, interval_us, is_known=is_latest or shown is not None
    )
    end_us = (earliest_us + latest_us) / 2 - LAG_WINDOWS * window_us - wait_us
    if is_latest:
        # If the answer came late, its newest window closed after the interval.
        closed_us = min(newest_us, latest_us)
        end_us = min(max(end_us, closed_us - _MAX_LAG_WINDOWS * window_us - wait_us), closed_us)
    if before:
        # Covered time stays covered, even if the driver's clock jumped back.
        end_us = max(end_us, before.covered_us)
    now = DriverClock(earliest_us=earliest_us, latest_us=latest_us, covered_us=end_us)
    start_us = before.covered_us if before else end_us - interval_us
    return now, Interval(start_us=start_us, end_us=end_us)


def _bounds(
    before: DriverClock | None,
    fresh: tuple[float, float],
    window_us: float,
    interval_us: float,
    *,
    is_known: bool,
) -> tuple[float, float]:
    """Return the minimum and maximum of the driver's clock at a tick.

    `fresh` are the bounds that the tick's timestamps show. They are combined with the bounds of the
    previous tick, advanced by `interval_us`. If the two contradict each other, the result is
    `fresh`. If `is_known` is false, the timestamps do not limit the maximum.
    """
    if before is None:
        return fresh
    drift_us = interval_us * DRIFT_RATIO
    earliest_us = max(fresh[0], before.earliest_us + interval_us - drift_us)
    latest_us = before.latest_us + interval_us + drift_us
    if is_known:
        latest_us = min(fresh[1], latest_us)
    if earliest_us - latest_us > _MAX_CONTRADICTION * window_us:
        return fresh
    # A small contradiction comes from a slightly late timestamp: swap the bounds.
    return min(earliest_us, latest_us), max(earliest_us, latest_us)


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """The time that a tick covers, by the driver's clock, and the sampling windows in it."""

    interval: Interval | None
    """The covered time; `None` if there are no samples."""
    gpu: list[SampledWindow]
    """Windows of the GPU's utilization that no earlier tick has fully covered, oldest first."""
    memory: list[SampledWindow]
    """Windows of the memory controller's utilization that no earlier tick has fully covered."""
    known_us: float
    """Length of the part of the covered time that has windows in `gpu`."""
    gpu_percent: float | None
    """Mean GPU utilization in the covered time, or in the newest window if no window of `gpu` is in
    the covered time."""
    memory_percent: float | None
    """Mean utilization of the memory controller, computed in the same way from `memory`."""
    has_gap: bool
    """Whether the use is unknown in a part of the covered time."""
    is_estimate: bool
    """Whether the windows describe only a part of the covered time, or also another time, because
    the driver's clock was set."""


def find_cover(
    gpu: Sequence[UtilizationSample],
    memory: Sequence[UtilizationSample],
    *,
    before: DriverClock | None,
    since: SampleCursor,
    window: WindowLength,
    known_window_us: float,
    newest: Freshness,
    skips_idle: bool,
    synced: ClockSync | None,
    interval_ns: int,
    now_ns: int,
    is_one_timeline: bool,
    late_us: float = 0.0,
    loses_windows: bool = False,
) -> tuple[DriverClock | None, Cover]:
    """Return the driver's clock at a tick, and the time that the tick covers with its windows.

    `gpu` and `memory` are the samples since `since`, and `before` is the clock at the previous
    tick. `window` is the present estimate of the window length, and `known_window_us` the length
    assumed in the previous tick. `newest` is whether the newest sample belongs to the latest
    window. `synced` are the clock's bounds from all answers; `None` if no answer has shown it. If
    `is_one_timeline` is false, some timestamps may precede a backward step of the clock. `late_us`
    is how late samples arrive. If `loses_windows` is true, the driver loses samples at random, so
    the mean of the others applies to the whole time.
    """
    clock, interval, has_leapt = before, None, False
    window_us, interval_us = window.usual_us, interval_ns / NS_PER_US
    if before and window_us > _LONGER * known_window_us:
        # The maximum was computed with windows that were assumed too short.
        before = before.widen(window_us - known_window_us)
    goes_on = before is not None and skips_idle and newest is Freshness.BEHIND
    if gpu or memory or goes_on:
        clock, interval = advance(
            before,
            newest_us=max((sample.timestamp_us for sample in gpu or memory), default=0),
            window_us=window_us,
            interval_us=interval_us,
            is_latest=newest in OF_LATEST,
            shown=synced.at(now_ns).bounds(window_us) if synced and is_one_timeline else None,
            wait_us=late_us,
        )
        has_leapt = _has_leapt(before, clock, window_us, interval_us)
        if has_leapt and interval.end_us - interval.start_us > interval_us + window_us:
            # The time that the driver's clock skipped cannot be covered.
            interval = Interval(start_us=interval.end_us - interval_us, end_us=interval.end_us)
    of_gpu = cut_windows(gpu, before_us=since.gpu_us, window_us=window_us)
    of_memory = cut_windows(memory, before_us=since.memory_us, window_us=window_us)
    if interval and skips_idle:
        of_gpu = fill_idle(of_gpu, interval, window_us=window_us)
        of_memory = fill_idle(of_memory, interval, window_us=window_us)
    known_us, gpu_percent = mean_percent(of_gpu, interval)
    _, memory_percent = mean_percent(of_memory, interval)
    has_gap = False
    if of_gpu and interval and not has_leapt:
        # If the clock jumped, some of its time never passed.
        covered_us = interval.end_us - interval.start_us
        has_gap = covered_us - known_us > _MAX_GAP_WINDOWS * window_us and not loses_windows
        # While the wait for late samples begins, ticks cover no time.
        has_gap |= bool(late_us) and not covered_us
    # If the window's length is in doubt, it is unknown which time between the samples was idle.
    has_gap |= window.is_doubtful
    # The time covered so far was computed with windows that were assumed too short.
    has_gap |= clock is not None and window_us > _LONGER * known_window_us
    return clock, Cover(
        interval=interval,
        gpu=of_gpu,
        memory=of_memory,
        known_us=known_us,
        gpu_percent=gpu_percent,
        memory_percent=memory_percent,
        has_gap=has_gap and is_one_timeline,
        is_estimate=has_leapt or not is_one_timeline,
    )


def _has_leapt(
    before: DriverClock | None, after: DriverClock, window_us: float, interval_us: float
) -> bool:
    """Return whether the driver's clock has jumped between two ticks.

    It has jumped if its advance differs from our clock's by more than a window.
    """
    if before is None:
        return False
    went_us = after.earliest_us + after.latest_us - before.earliest_us - before.latest_us
    return abs(went_us / 2 - interval_us) > window_us
