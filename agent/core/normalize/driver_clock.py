"""The driver's own time: the interval of it that a tick covers, and the windows that lie in it.

The driver samples on a grid of its own, and a window is reported once it has closed. So ticks cover
the driver's time some windows late, each from exactly where the one before ended: a start or an end
of load is then in one tick or the other, or in parts in both, never in none and never twice.

What is known of the driver's clock comes from the stamps alone: it shows no less than the newest
stamp, and, where that is of the latest window, no more than that and a window. From tick to tick
both bounds move on by what passed on our clock, and close in on each other. Where they contradict
one another, the driver's clock has jumped, and begins anew.

Some drivers give no sample of windows in which nothing was used. Where their rates have shown it
(`agent.core.looks`), what has no sample was idle; else the tick has a gap, and its use is unknown.

Most drivers stamp their samples by the wall clock. After that was set back, samples from before are
stamped later than those that follow, until they have left the driver's buffers: `SetBack` tells so
by the clock that nobody can set.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import Final, TypeVar

import msgspec

from agent.core.looks import BEHIND_WINDOWS, shows_latest
from agent.core.raw import (
    ClockSync,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from agent.core.readings import PERCENT, TIMESTAMP_US, Validator, ratio_of

LAG_WINDOWS: Final = 1.5
"""How far behind the driver's clock a tick's cover ends. Between one and two windows are closed
then, wherever in a window the tick falls: there is nothing to wait for, and nothing to make up."""
USUAL_WINDOW_US: Final = 166_667
"""The window of most drivers; taken for the driver's own until that has shown."""
_MAX_LAG_WINDOWS: Final = 2
# A longer gap between two stamps is one in which the driver did not sample.
_MAX_WINDOW: Final = 1.5
_GAPS_TO_LEARN: Final = 3
_ALIKE_TO_LEARN: Final = 6
_MIN_GAP_RATIO: Final = 0.05
# Two clocks of one machine drift apart by less than this.
_DRIFT_RATIO: Final = 0.0005
# Bounds that contradict one another by more than this part of a window are of another clock.
_MAX_CONTRADICTION: Final = 0.5
# Less of the cover than this may be without a sample, as stamps jitter.
_MAX_GAP_WINDOWS: Final = 0.5
# More than a clock that is slewed loses in the longest tick, and less than a driver's window.
_MIN_SET_BACK_NS: Final = 50_000_000
# Longer than any driver keeps samples.
_BUFFERED_NS: Final = 150_000_000_000
# Longer than a tick's cover lags behind.
_MARGIN_NS: Final = 2_000_000_000
# The query takes as long at most, after the clock was read.
_AHEAD_US: Final = 1_000_000

_Stamped = TypeVar("_Stamped", UtilizationSample, ProcessUtilizationSample)


@dataclass(frozen=True, kw_only=True)
class Interval:
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
        end_us = min(max(end_us, newest_us - _MAX_LAG_WINDOWS * window_us), newest_us)
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


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The part of the driver's time that the tick covers, and the windows that are of it."""

    clock: DriverClock | None
    """The driver's clock; `None` where no sample has shown it."""
    interval: Interval | None
    """What is covered; `None` where there is no sample."""
    gpu: list[SampledWindow]
    """The GPU's windows since those seen before, oldest first."""
    memory: list[SampledWindow]
    """The memory controller's."""
    window_us: float | None
    """The usual length of the GPU's windows, as far as it has shown."""
    has_gap: bool = False
    """Whether nobody knows what was used in a part of the covered time."""

    @classmethod
    def find(
        cls,
        raw: RawGpuSample,
        *,
        clock: DriverClock | None,
        cursor: SampleCursor,
        known_us: float | None,
        interval_ns: int,
        now_ns: int,
        validator: Validator,
        is_one_timeline: bool = True,
    ) -> "Coverage":
        """Return it; clock, newest samples and length of a window are those of the tick before.

        With `is_one_timeline` off stamps may be of the clock before it was set back, too.
        """
        gpu = _plausible(raw.samples, "utilization_ratio", validator)
        memory = _plausible(raw.memory_samples, "memory_utilization_ratio", validator)
        window_us = learn_window_us(gpu, before_us=cursor.gpu_us, known_us=known_us)
        skips_idle = raw.skips_idle
        usual_us, interval_us = window_us or USUAL_WINDOW_US, interval_ns / 1000
        newest_us = max((sample.timestamp_us for sample in gpu or memory), default=0)
        is_behind = _is_behind(clock, newest_us, usual_us, interval_us)
        before, interval, has_leapt = clock, None, False
        if gpu or memory or (clock and is_behind and skips_idle):
            is_latest = shows_latest(gpu, raw.percent) if gpu else True
            is_latest = is_latest and not (is_behind and skips_idle)
            clock, interval = advance(
                clock,
                newest_us=newest_us,
                window_us=usual_us,
                interval_us=interval_us,
                is_latest=is_latest,
                shown=_shown_by(raw.synced, usual_us, now_ns) if is_one_timeline else None,
            )
            has_leapt = _has_leapt(before, clock, usual_us, interval_us)
            if has_leapt and interval.length_us > interval_us + usual_us:
                # Over a leap of the driver's clock there is nothing to cover.
                interval = Interval(start_us=interval.end_us - interval_us, end_us=interval.end_us)
        of_gpu = cut_windows(gpu, before_us=cursor.gpu_us, window_us=window_us)
        of_memory = cut_windows(memory, before_us=cursor.memory_us, window_us=window_us)
        if interval and skips_idle:
            of_gpu = fill_idle(of_gpu, interval, window_us=usual_us)
            of_memory = fill_idle(of_memory, interval, window_us=usual_us)
        return cls(
            clock=clock,
            interval=interval,
            gpu=of_gpu,
            memory=of_memory,
            window_us=window_us,
            # Over a leap of the clock there are stamps without a time.
            has_gap=is_one_timeline and not has_leapt and _has_gap(of_gpu, interval, usual_us),
        )

    @property
    def lag_ns(self) -> int:
        """How long ago the cover ended; 0 where nothing says what was sampled when."""
        if self.clock is None or self.interval is None:
            return 0
        now_us = (self.clock.earliest_us + self.clock.latest_us) / 2
        return round((now_us - self.clock.covered_us) * 1000)

    def mean(
        self,
        windows: Sequence[SampledWindow],
        latest_percent: int | None,
        reading: str,
        validator: Validator,
    ) -> float | None:
        """Return the mean over the cover, or the latest window where nothing new is covered.

        `None` where a part of the cover is known of nobody.
        """
        if self.has_gap:
            return None
        percent = mean_percent(windows, self.interval) if self.interval else None
        if percent is None and windows:
            percent = windows[-1].percent
        if percent is None:
            # A driver without samples gives its latest window alone.
            percent = validator.keep(latest_percent, PERCENT, reading=reading)
        # The mean of hundreds may be a hair more, in floating point.
        return None if percent is None else min(1.0, ratio_of(percent))


def _shown_by(
    synced: ClockSync | None, window_us: float, now_ns: int
) -> tuple[float, float] | None:
    """Return between which times the driver's clock is now, by a stamp of some time ago."""
    if synced is None:
        return None
    since_us = (now_ns - synced.at_ns) / 1000
    drift_us = since_us * _DRIFT_RATIO
    earliest_us = synced.newest_us + since_us
    return earliest_us - drift_us, earliest_us + window_us + drift_us


def _is_behind(
    clock: DriverClock | None, newest_us: int, window_us: float, interval_us: float
) -> bool:
    """Return whether a window has closed for certain that is newer than the newest sample."""
    if clock is None:
        return False
    earliest_us = clock.earliest_us + interval_us * (1 - _DRIFT_RATIO)
    return earliest_us - newest_us > BEHIND_WINDOWS * window_us


def _has_leapt(
    before: DriverClock | None, after: DriverClock, window_us: float, interval_us: float
) -> bool:
    """Return whether the driver's clock has gone another way than ours."""
    if before is None:
        return False
    went_us = after.earliest_us + after.latest_us - before.earliest_us - before.latest_us
    return abs(went_us / 2 - interval_us) > window_us


def _has_gap(windows: Sequence[SampledWindow], covered: Interval | None, window_us: float) -> bool:
    if not windows or covered is None:
        return False
    return covered.length_us - known_us(windows, covered) > _MAX_GAP_WINDOWS * window_us


def _plausible(
    samples: Sequence[UtilizationSample] | None, reading: str, validator: Validator
) -> list[UtilizationSample]:
    return [
        sample
        for sample in samples or ()
        if validator.keep(sample.percent, PERCENT, reading=reading) is not None
        and validator.keep(sample.timestamp_us, TIMESTAMP_US, reading=reading) is not None
    ]


class SetBack:
    """Follows the wall clock from tick to tick."""

    def __init__(self) -> None:
        self._time_ns = 0
        self._offset_ns: int | None = None
        self._until_time_ns = 0
        self._until_boottime_ns = 0
        self.is_recent = False
        """Whether samples from before the clock was set back may be among the others now."""

    def follow(self, *, time_ns: int, boottime_ns: int) -> None:
        """Go on to the next tick's clocks."""
        offset_ns = time_ns - boottime_ns
        if self._offset_ns is not None and offset_ns < self._offset_ns - _MIN_SET_BACK_NS:
            # Set back twice, it has to pass the latest of all stamps.
            passed = max(self._time_ns, self._until_time_ns if self.is_recent else 0)
            self._until_time_ns = passed + _MARGIN_NS
            self._until_boottime_ns = boottime_ns + _BUFFERED_NS
            self.is_recent = True
        self._time_ns, self._offset_ns = time_ns, offset_ns
        if time_ns > self._until_time_ns or boottime_ns > self._until_boottime_ns:
            self.is_recent = False


def without_former(raw: RawGpuSample, *, now_us: int) -> RawGpuSample:
    """Return the answers without samples that are stamped later than the wall clock shows."""
    latest_us = now_us + _AHEAD_US

    def until(samples: Sequence[_Stamped] | None) -> tuple[_Stamped, ...] | None:
        if samples is None:
            return None
        return tuple(sample for sample in samples if sample.timestamp_us <= latest_us)

    return replace(
        raw,
        samples=until(raw.samples),
        memory_samples=until(raw.memory_samples),
        process_samples=until(raw.process_samples),
    )
