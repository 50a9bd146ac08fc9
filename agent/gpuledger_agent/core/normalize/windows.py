"""The driver's sampling windows: estimates their length, locates them, and averages over them.

`gpuledger_agent.core.normalize.driver_clock` decides which windows a tick covers.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from gpuledger_agent.core.raw import UtilizationSample

# If a gap between two stamps exceeds this many windows, the driver did not sample throughout.
_MAX_WINDOW: Final = 1.5
USUAL_WINDOW_US: Final = 166_667
"""Length of the sampling windows of most drivers; assumed until the driver's own is known."""
LONGEST_WINDOW_US: Final = 1_000_000
"""Maximum length of a window, by NVML's documentation."""
MAX_GAP_US: Final = 1_100_000
"""Maximum gap between two stamps of consecutive windows: the longest window, and a margin for
jitter. Longer gaps show nothing about the length of a window."""
# Two stamps that are closer than this belong to the same window.
_SHORTEST_US: Final = 10_000
# Gaps whose ratio is below this span equally many windows.
_ALIKE: Final = 1.2
# A gap that deviates by more than this from a whole number of windows shows another window length.
_ODD_PARTS: Final = 0.15
_GAPS_TO_LEARN: Final = 3
_ALIKE_TO_LEARN: Final = 6
_ANSWERS_TO_LEARN: Final = 3
_GAPS_KEPT: Final = 12


class Interval(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An interval of the driver's time; it excludes its start and includes its end."""

    start_us: float
    """The interval's start."""
    end_us: float
    """The interval's end."""

    def overlap_us(self, start_us: float, end_us: float) -> float:
        """Return for how many microseconds another interval overlaps this one."""
        # Called hundreds of times a tick; comparisons cost a third of min and max.
        start = start_us if start_us > self.start_us else self.start_us  # noqa: FURB136  # see above
        end = end_us if end_us < self.end_us else self.end_us  # noqa: FURB136  # as above
        return end - start if end > start else 0.0


class SampledWindow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampling window of the driver, with the utilization in it."""

    start_us: int
    """The window's start, exclusive."""
    end_us: int
    """The window's end, inclusive: the time stamp of its sample."""
    percent: int
    """The utilization in the window, in percent."""


class StampGap(NamedTuple):
    """The gap between two consecutive time stamps of a driver's samples."""

    length_us: int
    """The time between the two stamps: the length of one or several windows."""
    has_idle: bool
    """Whether the driver is known to have omitted a window in the gap, so that the gap spans at
    least two windows."""

    def is_multiple(self, window_us: float) -> bool:
        """Return whether windows of this length can fill the gap."""
        windows = self.length_us / window_us
        return abs(windows - round(windows)) <= _ODD_PARTS and round(windows) > self.has_idle


class WindowLength(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An estimate of the length of a driver's sampling windows, from the stamps of its samples.

    If a driver returns no samples of idle windows, a gap between stamps may span several windows.
    Therefore the estimate is the shortest gap in all answers, and becomes longer only on further
    evidence.
    """

    length_us: float | None = None
    """The length of a window; `None` until the stamps reveal it."""
    is_confirmed: bool = False
    """Whether several gaps had this length."""
    gaps: tuple[StampGap, ...] = ()
    """The latest gaps that are short enough to be a single window."""
    newest_us: int = 0
    """The newest stamp so far."""
    answers: int = 0
    """Number of answers that added to `gaps`, up to `_ANSWERS_TO_LEARN`."""

    @property
    def usual_us(self) -> float:
        """The length of a window, or that of most drivers until the length is known."""
        return self.length_us or USUAL_WINDOW_US

    @property
    def is_doubtful(self) -> bool:
        """Whether the length is unknown and all gaps are alike, so that each may be one window."""
        lengths = [gap.length_us for gap in self.gaps if not gap.has_idle]
        are_alike = bool(lengths) and max(lengths) <= _ALIKE * min(lengths)
        return self.length_us is None and are_alike and _are_multiples(self.gaps, _median(lengths))

    def interrupt(self) -> "WindowLength":
        """Return the estimate without the newest stamp.

        Use it if later stamps may be from another clock, for example after a reload of the driver.
        """
        return replace(self, newest_us=0)

    def learn(
        self,
        samples: Sequence[UtilizationSample],
        *,
        before_us: int,
        idle_after: Collection[int] = (),
        skips_idle: bool = False,
    ) -> "WindowLength":
        """Return the estimate after an answer.

        `before_us` is the stamp before the first sample, or 0. `idle_after` contains the stamps
        after which the driver has omitted an idle window. `skips_idle` is whether the driver is
        known to omit all idle windows.
        """
        stamps = _stamps(samples, before_us)
        fresh = tuple(
            StampGap(later - earlier, earlier in idle_after)
            for earlier, later in pairwise(stamps)
            if later > self.newest_us and _SHORTEST_US <= later - earlier <= MAX_GAP_US
        )
        newest_us = max(self.newest_us, *stamps[-1:], 0)
        if not fresh:
            return replace(self, newest_us=newest_us)
        gaps = self.gaps + fresh
        known = replace(
            self,
            gaps=gaps[-_GAPS_KEPT:],
            newest_us=newest_us,
            # A sample with 0 % shows that idle windows have samples, so each gap is one window.
            answers=_ANSWERS_TO_LEARN
            if any(sample.percent == 0 for sample in samples)
            else min(self.answers + 1, _ANSWERS_TO_LEARN),
        )
        return _by_shortest(known, gaps) or _by_latest(known, skips_idle=skips_idle) or known


def _by_shortest(known: WindowLength, gaps: Sequence[StampGap]) -> WindowLength | None:
    """Return the estimate from the shortest gap; `None` if that gap may span several windows."""
    lengths = sorted(gap.length_us for gap in gaps if not gap.has_idle)
    # A single late stamp must not shorten a confirmed length.
    enough = _GAPS_TO_LEARN if known.is_confirmed else 1
    for shortest_us in lengths:
        alike = [one for one in lengths if shortest_us <= one <= _ALIKE * shortest_us]
        found_us = _median(alike)
        if found_us >= _ALIKE * known.usual_us:
            return _by_multiples(known, gaps, found_us)
        if len(alike) >= enough:
            is_confirmed = known.is_confirmed or len(alike) >= _GAPS_TO_LEARN
            return replace(known, length_us=found_us, is_confirmed=is_confirmed)
    return None


def _by_multiples(
    known: WindowLength, gaps: Sequence[StampGap], shortest_us: float
) -> WindowLength | None:
    """Return a longer estimate if all gaps are multiples of the shortest ones, `shortest_us`.

    Otherwise return `None`, because such gaps may span several windows of the known length. A few
    gaps suffice that are not multiples of the known length.
    """
    if known.is_confirmed or not _are_multiples(gaps, shortest_us):
        return None
    odd = sum(not gap.is_multiple(known.usual_us) for gap in gaps)
    is_shown = odd >= _GAPS_TO_LEARN or (
        len(gaps) >= _ALIKE_TO_LEARN and known.answers >= _ANSWERS_TO_LEARN
    )
    return replace(known, length_us=shortest_us, is_confirmed=True) if is_shown else None


def _are_multiples(gaps: Sequence[StampGap], window_us: float) -> bool:
    return all(gap.is_multiple(window_us) for gap in gaps)


def _by_latest(known: WindowLength, *, skips_idle: bool) -> WindowLength | None:
    """Return a longer estimate if the latest gaps are equally long and each is one window.

    Otherwise return `None`.
    """
    latest = known.gaps[-_ALIKE_TO_LEARN:]
    lengths = [gap.length_us for gap in latest]
    is_shown = (
        len(latest) == _ALIKE_TO_LEARN
        and known.answers >= _ANSWERS_TO_LEARN
        and max(lengths) <= _ALIKE * min(lengths)
        and not any(gap.has_idle for gap in latest)
        # Short use that repeats each second leaves such gaps too.
        and not (known.is_confirmed and skips_idle)
    )
    return replace(known, length_us=_median(lengths), is_confirmed=True) if is_shown else None


def _median(values: Sequence[int]) -> float:
    """Return the median; `statistics.median` is not used, because it loads two more modules."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def cut_windows(
    samples: Sequence[UtilizationSample], *, before_us: int, window_us: float
) -> list[SampledWindow]:
    """Return each sample's window, oldest first.

    A window ends at its sample's stamp and begins at the previous stamp; `before_us` is the stamp
    before the first sample, or 0 if it is unknown. If the previous stamp is unknown or too far away
    for one window, the window begins `window_us` before its end.
    """
    percents = {sample.timestamp_us: sample.percent for sample in samples}
    stamps = _stamps(samples, before_us)
    usual_us = round(window_us)
    # No stamp shows the first window's start, so use the usual length.
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
    """Return the windows, with additional windows of 0 % where the covered time has none.

    If a window is longer than `window_us`, the driver has omitted idle windows at its beginning.
    The window is then shortened to `window_us`, and the rest is filled with 0 % too.
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


def mean_percent(
    windows: Sequence[SampledWindow], covered: Interval | None
) -> tuple[float, float | None]:
    """Return how much of the covered interval has windows, and the mean utilization in that part.

    The first value is in microseconds. If no window overlaps the interval, the mean is the value of
    the newest window, or `None` if there are no windows.
    """
    known = used = 0.0
    if covered is None:
        return known, windows[-1].percent if windows else None
    for window in windows:
        overlap_us = covered.overlap_us(window.start_us, window.end_us)
        known += overlap_us
        used += window.percent * overlap_us
    if known:
        return known, used / known
    return known, windows[-1].percent if windows else None


def window_at(windows: Sequence[SampledWindow], time_us: int) -> SampledWindow | None:
    """Return the window that contains `time_us`; `None` if there are no windows.

    If no window contains it, return the next later window or, if there is none, the last one.
    """
    index = bisect_left(windows, time_us, key=attrgetter("end_us"))
    return windows[min(index, len(windows) - 1)] if windows else None
