"""The driver's clock: what it shows by now, and the interval of its time that a tick covers.

The driver samples on a grid of its own, and a window is reported once it has closed. So ticks cover
the driver's time some windows late, each from exactly where the one before ended: a start or an end
of load is then in one tick or the other, or in parts in both, never in none and never twice.

What is known of the driver's clock comes from the stamps alone: it shows no less than the newest
stamp, and, where that is of the latest window, no more than that and a window. From tick to tick
both bounds move on by what passed on our clock, and close in on each other. Where they contradict
one another, the driver's clock has jumped, and begins anew.

Some drivers give no sample of windows in which nothing was used. Whether the newest sample is of
the latest window is decided once for each answer, by `freshness`. Where the rates have shown that
the driver leaves something out, what has no sample was idle; else the tick has a gap, and its use
is unknown.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

import msgspec

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
"""How far behind the driver's clock a tick's cover ends. Between one and two windows are closed
then, wherever in a window the tick falls: there is nothing to wait for, and nothing to make up."""
_MAX_LAG_WINDOWS: Final = 2
# A newest sample that is older has others behind it, which the driver did not give: one window may
# be about to close, and stamps jitter by a hundredth.
_BEHIND_WINDOWS: Final = 1.1
# Two clocks of one machine drift apart by less than this.
_DRIFT_RATIO: Final = 0.0005
# Bounds that contradict one another by more than this part of a window are of another clock.
_MAX_CONTRADICTION: Final = 0.5
# Less of the cover than this may be without a sample, as stamps jitter.
_MAX_GAP_WINDOWS: Final = 0.5
# A window that is longer by less is the same one, measured again.
_LONGER: Final = 1.2


class DriverClock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known of the driver's clock at a tick."""

    earliest_us: float
    """It shows no less: a window with this end has closed."""
    latest_us: float
    """It shows no more: the next window has not closed."""
    covered_us: float
    """Where the tick's cover ended."""

    def closed_us(self, elapsed_us: float) -> float:
        """Return up to where windows have closed for certain, so long after the tick."""
        return self.earliest_us + elapsed_us * (1 - _DRIFT_RATIO)

    def latest_before_us(self, elapsed_us: float) -> float:
        """Return what it showed at most, so long before the tick."""
        return self.latest_us - elapsed_us * (1 - _DRIFT_RATIO)


class Freshness(Enum):
    """Of which window an answer's newest sample is."""

    LATEST = "latest"
    """Of the latest one that has closed."""
    BEHIND = "behind"
    """Windows have closed since, of which the driver gave no sample: nothing was used in them."""
    LEAPT = "leapt"
    """Of the latest one, though by the clock others had closed: that clock has leapt."""
    UNKNOWN = "unknown"
    """Nobody can tell."""


OF_LATEST: Final = (Freshness.LATEST, Freshness.LEAPT)
"""The newest sample is of the latest window."""


def freshness(
    newest_us: int,
    newest_percent: int | None,
    *,
    rate_percent: int | None,
    closed_us: float | None,
    window_us: float | None,
    skips_idle: bool,
) -> Freshness:
    """Return how new the newest sample is, by the clock and by what the driver says beside it.

    `newest_percent` is its value, `None` where no answer had it. `rate_percent` is of the latest
    window of all, and was asked before the samples; `None` where the driver does not say it. The
    windows up to `closed_us` have closed for certain. Where the length of a window has not shown it
    may be the longest.
    """
    is_behind = bool(closed_us) and (
        (closed_us or 0) - newest_us > _BEHIND_WINDOWS * (window_us or LONGEST_WINDOW_US)
    )
    if is_behind and rate_percent:
        # A window in which something was used has its sample, whatever the driver leaves out.
        return Freshness.LEAPT
    if is_behind and (rate_percent == 0 or skips_idle):
        return Freshness.BEHIND
    if rate_percent != 0:
        return Freshness.LATEST
    # Nothing beside nothing may be a window of a while ago, in which little was used.
    return Freshness.UNKNOWN if newest_percent or skips_idle else Freshness.LATEST


class ClockSync(NamedTuple):
    """What the driver's newest sample showed of its clock."""

    given: AnswerTime
    """When it was of the latest window."""
    newest_us: int
    """Its stamp."""


def advance(
    before: DriverClock | None,
    *,
    newest_us: int,
    window_us: float,
    interval_us: float,
    is_latest: bool = True,
    shown: tuple[float, float] | None = None,
) -> tuple[DriverClock, Interval]:
    """Return the clock and the cover of an interval that ended with the window at `newest_us`.

    Both clocks are synchronised by the stamps alone. Where the driver's jumps, the cover follows.
    With `is_latest` off windows have closed since of which the driver gives no sample; `shown` is
    then what stamps before showed of the clock now, if any did: no less and no more than this.
    """
    fresh = shown or (float(newest_us), newest_us + window_us)
    earliest_us, latest_us = _bounds(
        before, fresh, window_us, interval_us, is_known=is_latest or shown is not None
    )
    end_us = (earliest_us + latest_us) / 2 - LAG_WINDOWS * window_us
    if is_latest:
        # Of an answer that came late the newest window closed after the interval.
        closed_us = min(newest_us, latest_us)
        end_us = min(max(end_us, closed_us - _MAX_LAG_WINDOWS * window_us), closed_us)
    if before:
        # What is covered stays covered, also where the driver's clock jumped back.
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
    """Return the earliest and latest time that the driver's clock can show."""
    if before is None:
        return fresh
    drift_us = interval_us * _DRIFT_RATIO
    earliest_us = max(fresh[0], before.earliest_us + interval_us - drift_us)
    latest_us = before.latest_us + interval_us + drift_us
    if is_known:
        latest_us = min(fresh[1], latest_us)
    if earliest_us - latest_us > _MAX_CONTRADICTION * window_us:
        return fresh
    # A small contradiction is a stamp that was a little late: between the two is as good.
    return min(earliest_us, latest_us), max(earliest_us, latest_us)


class Cover(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the driver's time that a tick covers, and the windows in it."""

    interval: Interval | None
    """The covered time; `None` if there is no sample."""
    gpu: list[SampledWindow]
    """The GPU's windows since those seen before, oldest first."""
    memory: list[SampledWindow]
    """The memory controller's."""
    known_us: float
    """How much of the covered time the GPU's windows are of."""
    gpu_percent: float | None
    """The mean of the GPU's windows, or the newest of them if nothing new is covered."""
    memory_percent: float | None
    """The same of the memory controller's."""
    has_gap: bool
    """Whether it is unknown what was used in a part of the covered time."""


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
) -> tuple[DriverClock | None, Cover]:
    """Return the driver's clock after a tick, and what the tick covers.

    `window` is the usual length of a window by now, `known_window_us` what it was taken to be in
    the tick before. `synced` is what stamps showed of the clock last; `None` if none did. With
    `is_one_timeline` off, stamps may be of the clock before it was set back, too.
    """
    clock, interval, has_leapt = before, None, False
    window_us, interval_us = window.usual_us, interval_ns / 1000
    goes_on = before is not None and skips_idle and newest is Freshness.BEHIND
    if gpu or memory or goes_on:
        clock, interval = advance(
            before,
            newest_us=max((sample.timestamp_us for sample in gpu or memory), default=0),
            window_us=window_us,
            interval_us=interval_us,
            is_latest=newest in OF_LATEST,
            shown=_shown_by(synced, window_us, now_ns) if synced and is_one_timeline else None,
        )
        has_leapt = _has_leapt(before, clock, window_us, interval_us)
        if has_leapt and interval.end_us - interval.start_us > interval_us + window_us:
            # Over a leap of the driver's clock there is nothing to cover.
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
        # Over a leap of the clock there are stamps without a time.
        covered_us = interval.end_us - interval.start_us
        has_gap = covered_us - known_us > _MAX_GAP_WINDOWS * window_us
    # It is unknown then of how long a time samples are, and which time was idle.
    has_gap |= window.is_doubtful
    # What was covered was told by windows that were taken to be shorter.
    has_gap |= clock is not None and window_us > _LONGER * known_window_us
    return clock, Cover(
        interval=interval,
        gpu=of_gpu,
        memory=of_memory,
        known_us=known_us,
        gpu_percent=gpu_percent,
        memory_percent=memory_percent,
        has_gap=has_gap and is_one_timeline,
    )


def _shown_by(synced: ClockSync, window_us: float, now_ns: int) -> tuple[float, float]:
    """Return between which times the driver's clock is now, by a stamp of some time ago."""
    # A GPU may answer long after the tick began: stamps are of some time in between.
    since_answered_us = (now_ns - synced.given.answered_ns) / 1000
    since_request_us = (now_ns - synced.given.requested_ns) / 1000
    earliest_us = synced.newest_us + since_answered_us - abs(since_answered_us) * _DRIFT_RATIO
    latest_us = (
        synced.newest_us + window_us + since_request_us + abs(since_request_us) * _DRIFT_RATIO
    )
    return earliest_us, latest_us


def _has_leapt(
    before: DriverClock | None, after: DriverClock, window_us: float, interval_us: float
) -> bool:
    """Return whether the driver's clock has moved differently from ours."""
    if before is None:
        return False
    went_us = after.earliest_us + after.latest_us - before.earliest_us - before.latest_us
    return abs(went_us / 2 - interval_us) > window_us
