"""The driver's sampling windows: how long they are, where each lies, and means over them.

Which of them a tick covers is decided in `agent.core.normalize.driver_clock`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Final

import msgspec

from agent.core.raw import UtilizationSample

# A longer gap between two stamps is one in which the driver did not sample.
_MAX_WINDOW: Final = 1.5
_GAPS_TO_LEARN: Final = 3
_ALIKE_TO_LEARN: Final = 6
_MIN_GAP_RATIO: Final = 0.05


class Interval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An interval of the driver's time, without its start and with its end."""

    start_us: float
    """Where it begins."""
    end_us: float
    """Where it ends."""

    @property
    def length_us(self) -> float:
        """How long it is; 0 where nothing new was sampled."""
        return self.end_us - self.start_us

    def overlap_us(self, start_us: float, end_us: float) -> float:
        """Return how much of another interval lies in this one."""
        # Called hundreds of times a tick: comparisons cost a third of min and max.
        start = start_us if start_us > self.start_us else self.start_us  # noqa: FURB136  # see above
        end = end_us if end_us < self.end_us else self.end_us  # noqa: FURB136  # as above
        return end - start if end > start else 0.0


class SampledWindow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampling window of the driver."""

    start_us: int
    """Where it begins; not part of it."""
    end_us: int
    """Where it ends: its sample's stamp."""
    percent: int
    """Its sample's value."""


def learn_window_us(
    samples: Sequence[UtilizationSample], *, before_us: int, known_us: float | None
) -> float | None:
    """Return the usual length of a window; `before_us` is the stamp before the first, or 0."""
    gaps = [later - earlier for earlier, later in pairwise(_stamps(samples, before_us))]
    if not gaps:
        return known_us
    # A driver that leaves out idle windows has gaps of several; a stamp may also come twice.
    shortest_of_all_us = _median(gaps) * _MIN_GAP_RATIO
    shortest_us = min(gap for gap in gaps if gap >= shortest_of_all_us)
    single = [gap for gap in gaps if shortest_of_all_us <= gap <= _MAX_WINDOW * shortest_us]
    if known_us is None:
        return _median(single)
    # Longer ones than are known may be of several windows, and are believed where all are alike.
    is_longer = shortest_us > _MAX_WINDOW * known_us
    enough = _ALIKE_TO_LEARN if is_longer and len(single) == len(gaps) else _GAPS_TO_LEARN
    is_shown = len(single) >= enough and (not is_longer or len(single) == len(gaps))
    return _median(single) if is_shown else known_us


def _median(values: Sequence[int]) -> float:
    """Return the median; `statistics` has one as well, and would load fractions and decimals."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def cut_windows(
    samples: Sequence[UtilizationSample], *, before_us: int, window_us: float | None
) -> list[SampledWindow]:
    """Return the window of each sample, oldest first; `before_us` is the stamp before, or 0."""
    percents = {sample.timestamp_us: sample.percent for sample in samples}
    stamps = _stamps(samples, before_us)
    usual_us = round(window_us) if window_us else 0
    # Where the first window began no stamp says; the usual length does.
    firsts = [] if before_us else [(stamps[0] - usual_us, stamps[0])] if stamps else []
    return [
        SampledWindow(
            start_us=start if end - start <= _MAX_WINDOW * usual_us else end - usual_us,
            end_us=end,
            percent=percents[end],
        )
        for start, end in [*firsts, *pairwise(stamps)]
    ]


def _stamps(samples: Sequence[UtilizationSample], before_us: int) -> list[int]:
    stamps = {sample.timestamp_us for sample in samples if sample.timestamp_us > before_us}
    return sorted(stamps | {before_us} if before_us else stamps)


def fill_idle(
    windows: Sequence[SampledWindow], covered: Interval, *, window_us: float
) -> list[SampledWindow]:
    """Return the windows with one of no use in each time between them that they are not of.

    None is longer than usual: what stands before it was left out.
    """
    filled: list[SampledWindow] = []
    at_us = int(covered.start_us)
    for window in windows:
        start_us = max(window.start_us, window.end_us - round(window_us))
        if start_us > at_us:
            filled.append(SampledWindow(start_us=at_us, end_us=start_us, percent=0))
        filled.append(
            SampledWindow(start_us=start_us, end_us=window.end_us, percent=window.percent)
        )
        at_us = max(at_us, window.end_us)
    if at_us < covered.end_us:
        filled.append(SampledWindow(start_us=at_us, end_us=ceil(covered.end_us), percent=0))
    return filled


def known_us(windows: Sequence[SampledWindow], covered: Interval) -> float:
    """Return how much of an interval the windows are of."""
    return sum(covered.overlap_us(window.start_us, window.end_us) for window in windows)


def mean_percent(windows: Sequence[SampledWindow], covered: Interval) -> float | None:
    """Return the mean over the part that the windows are of; `None` where that is nothing."""
    known = used = 0.0
    for window in windows:
        overlap_us = covered.overlap_us(window.start_us, window.end_us)
        known += overlap_us
        used += window.percent * overlap_us
    return used / known if known else None


def window_at(windows: Sequence[SampledWindow], time_us: int) -> SampledWindow | None:
    """Return the window in which an instant lies, or the nearest one to it."""
    index = bisect_left(windows, time_us, key=lambda window: window.end_us)
    return windows[min(index, len(windows) - 1)] if windows else None
