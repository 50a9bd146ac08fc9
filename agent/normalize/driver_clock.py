"""The driver's own time: the stretch of it that a tick covers, and the windows that lie in it.

Pure. The driver samples on a grid of its own, and a window is told of once it has closed. So ticks
cover the driver's time some windows late, each from exactly where the one before ended: a start or
an end of load is then in one tick or the other, or in parts in both, never in none and never twice.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

import msgspec

from agent.core.raw import UtilizationSample

LAG_WINDOWS: Final = 1.5
"""How far behind the driver's clock a tick's cover ends. Between one and two windows are closed
then, wherever in a window the tick falls: there is nothing to wait for, and nothing to make up."""
USUAL_WINDOW_US: Final = 166_667
"""The window of most drivers; taken for the driver's own until that has shown."""
_MAX_LAG_WINDOWS: Final = 2
# A longer gap between two stamps is one in which the driver did not sample.
_LONGEST_WINDOW: Final = 1.5
_GAPS_TO_LEARN: Final = 3
# Two clocks of one machine drift apart by less than this.
_DRIFT_RATIO: Final = 0.0005
# Bounds that contradict one another by more than this part of a window are of another clock.
_MAX_CONTRADICTION: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A stretch of the driver's time, without its start and with its end."""

    start_us: float
    """Where it begins."""
    end_us: float
    """Where it ends."""

    @property
    def length_us(self) -> float:
        """How long it is; 0 where nothing new was sampled."""
        return self.end_us - self.start_us

    def overlap_us(self, start_us: float, end_us: float) -> float:
        """Return how much of another stretch lies in this one."""
        # Asked hundreds of times a tick: comparisons cost a third of min and max.
        start = start_us if start_us > self.start_us else self.start_us  # noqa: FURB136  # see above
        end = end_us if end_us < self.end_us else self.end_us  # noqa: FURB136  # as above
        return end - start if end > start else 0.0


@dataclass(frozen=True, kw_only=True)
class DriverClock:
    """What is known of the driver's clock at a tick."""

    earliest_us: float
    """It shows no less: a window with this end has closed."""
    latest_us: float
    """It shows no more: the next window has not closed."""
    covered_us: float
    """Where the tick's cover ended."""


class SampledWindow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampling window of the driver."""

    start_us: int
    """Where it begins; not part of it."""
    end_us: int
    """Where it ends: its sample's stamp."""
    percent: int
    """Its sample's value."""


def advance(
    before: DriverClock | None, *, newest_us: int, window_us: float, interval_us: float
) -> tuple[DriverClock, Interval]:
    """Move on by an interval that ended with the newest window at `newest_us`.

    Both clocks are synchronised by the stamps alone. Where the driver's leaps, the cover follows.
    """
    earliest_us, latest_us = _bounds(before, newest_us, window_us, interval_us)
    wanted_us = (earliest_us + latest_us) / 2 - LAG_WINDOWS * window_us
    end_us = min(max(wanted_us, newest_us - _MAX_LAG_WINDOWS * window_us), newest_us)
    if before:
        end_us = max(end_us, before.covered_us)
    now = DriverClock(earliest_us=earliest_us, latest_us=latest_us, covered_us=end_us)
    start_us = before.covered_us if before else end_us - interval_us
    return now, Interval(start_us=start_us, end_us=end_us)


def _bounds(
    before: DriverClock | None, newest_us: int, window_us: float, interval_us: float
) -> tuple[float, float]:
    """Return the earliest and latest time that the driver's clock can show."""
    fresh = float(newest_us), newest_us + window_us
    if before is None:
        return fresh
    drift_us = interval_us * _DRIFT_RATIO
    earliest_us = max(fresh[0], before.earliest_us + interval_us - drift_us)
    latest_us = min(fresh[1], before.latest_us + interval_us + drift_us)
    if earliest_us - latest_us > _MAX_CONTRADICTION * window_us:
        return fresh
    return min(earliest_us, latest_us), max(earliest_us, latest_us)


def learn_window_us(
    samples: Sequence[UtilizationSample], *, before_us: int, known_us: float | None
) -> float | None:
    """Return the usual length of a window; `before_us` is the stamp before the first, or 0."""
    gaps = [later - earlier for earlier, later in pairwise(_stamps(samples, before_us))]
    if gaps and (known_us is None or len(gaps) >= _GAPS_TO_LEARN):
        return median(gaps)
    return known_us


def cut_windows(
    samples: Sequence[UtilizationSample], *, before_us: int, window_us: float | None
) -> list[SampledWindow]:
    """Return the window of each sample, oldest first; `before_us` is the stamp before, or 0."""
    percents = {sample.timestamp_us: sample.percent for sample in samples}
    stamps = _stamps(samples, before_us)
    usual_us = round(window_us) if window_us else 0
    firsts = [] if before_us else [(stamps[0] - usual_us, stamps[0])] if stamps else []
    return [
        SampledWindow(
            start_us=start if end - start <= _LONGEST_WINDOW * usual_us else end - usual_us,
            end_us=end,
            percent=percents[end],
        )
        for start, end in [*firsts, *pairwise(stamps)]
    ]


def _stamps(samples: Sequence[UtilizationSample], before_us: int) -> list[int]:
    stamps = {sample.timestamp_us for sample in samples if sample.timestamp_us > before_us}
    return sorted(stamps | {before_us} if before_us else stamps)


def known_us(windows: Sequence[SampledWindow], stretch: Interval) -> float:
    """Return how much of the stretch the windows tell of."""
    return sum(stretch.overlap_us(window.start_us, window.end_us) for window in windows)


def mean_percent(windows: Sequence[SampledWindow], stretch: Interval) -> float | None:
    """Return the mean over what the windows tell of the stretch; `None` where that is nothing."""
    told_us = used = 0.0
    for window in windows:
        overlap_us = stretch.overlap_us(window.start_us, window.end_us)
        told_us += overlap_us
        used += window.percent * overlap_us
    return used / told_us if told_us else None


def window_at(windows: Sequence[SampledWindow], time_us: int) -> SampledWindow | None:
    """Return the window in which an instant lies, or the nearest one to it."""
    place = bisect_left(windows, time_us, key=lambda window: window.end_us)
    return windows[min(place, len(windows) - 1)] if windows else None
