"""What each process had of a GPU in an interval, from the driver's process samples.

Pure. The driver gives whole percents of its own sampling windows, nothing for a window in which a
process did not run, and nothing for the window in which it ended. On some drivers there is one
sample for each window, on others one for the whole time since the last question.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

from agent.core.raw import ListedProcess, ProcessUtilizationSample
from agent.normalize import validation
from agent.normalize.driver_clock import Interval, SampledWindow, known_us, window_at
from agent.normalize.validation import Validator
from gpuledger.records import ProcessKind

_MIN_WINDOW_US: Final = 10_000
# A stamp further ahead of the GPU's newest would hide every later sample, were it believed.
_AHEAD_US: Final = 60_000_000
# Two periods that differ by less than this are the same one, measured twice.
_SAME_PERIOD_RATIO: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """One process on one GPU over the covered time."""

    process: ListedProcess
    """The process as it is listed, or was at the tick before."""
    sm_ratio: float | None
    """Share of the covered time in which its kernels ran; `None` where the driver does not say."""
    ended: bool
    """Whether it is gone, and may have run in the covered time."""


@dataclass(frozen=True, kw_only=True)
class GoneProcess:
    """A process that ended and may have run in time that no tick has covered yet."""

    process: ListedProcess
    """The process as it was listed."""
    until_us: float
    """It ended no later than this, by the driver's clock."""


@dataclass(frozen=True, kw_only=True)
class SampleCoverage:
    """What the tick covers."""

    stretch: Interval | None
    """The covered stretch of the driver's time; `None` where the GPU's samples do not show it."""
    windows: Sequence[SampledWindow]
    """The GPU's own windows, oldest first."""
    interval_us: float
    """Length of the tick's interval."""

    def share(self, sample: ProcessUtilizationSample, window_us: int | None) -> float:
        """Return which part of the covered time a sample stands for."""
        if self.stretch is None:
            return 1.0 if window_us is None else min(1.0, window_us / self.interval_us)
        if window_us is None:
            return 1.0 if sample.timestamp_us > self.stretch.start_us else 0.0
        end_us = sample.timestamp_us
        overlap_us = self.stretch.overlap_us(end_us - self._width_us(end_us, window_us), end_us)
        return overlap_us / (self._told_us or self.stretch.length_us or 1.0)

    def _width_us(self, end_us: int, window_us: int) -> int:
        """Return a window's true width: that of the GPU's window, where both are of one grid."""
        window = self._by_end.get(end_us) or window_at(self.windows, end_us)
        width_us = window.end_us - window.start_us if window else window_us
        is_same = abs(width_us - window_us) < _SAME_PERIOD_RATIO * window_us
        return width_us if is_same else window_us

    @cached_property
    def _by_end(self) -> Mapping[int, SampledWindow]:
        return {window.end_us: window for window in self.windows}

    @cached_property
    def _told_us(self) -> float:
        return known_us(self.windows, self.stretch) if self.stretch else 0.0


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The processes of one GPU in one tick."""

    usages: list[ProcessUsage]
    """Those that run, then those that ended."""
    newest_us: int
    """The newest time stamp that can be true, 0 where there was none."""
    window_us: int | None
    """The driver's window, as far as it has shown."""
    dropped: Counter[str]
    """Samples left out, by reason."""


def list_processes(
    listed: Iterable[ListedProcess] | None,
    before: Mapping[int, ListedProcess],
    *,
    memory_bytes: int | None,
    sieve: Validator,
) -> Mapping[int, ListedProcess]:
    """Merge the driver's lists by pid: a process in two of them holds its memory once.

    Where a list failed, the processes of the tick before are taken to be there still.
    """
    if listed is None:
        return before
    limits = (0, memory_bytes or validation.MEMORY_BYTES[1])
    merged: dict[int, ListedProcess] = {}
    for process in listed:
        if sieve.keep(process.pid, validation.PID, reading="process_pid") is None:
            continue
        held = sieve.keep(process.memory_bytes, limits, reading="process_memory_bytes")
        sane = process if held == process.memory_bytes else replace(process, memory_bytes=held)
        other = merged.get(process.pid)
        merged[process.pid] = _merge(other, sane) if other else sane
    return merged


def _merge(one: ListedProcess, other: ListedProcess) -> ListedProcess:
    held = [process.memory_bytes for process in (one, other) if process.memory_bytes is not None]
    kind = one.kind if one.kind == other.kind else ProcessKind.COMPUTE
    return ListedProcess(pid=one.pid, kind=kind, memory_bytes=max(held, default=None))


def share_out(
    samples: Sequence[ProcessUtilizationSample] | None,
    *,
    running: Mapping[int, ListedProcess],
    before: Mapping[int, ListedProcess],
    cover: SampleCoverage,
    window_us: int | None,
    gpu_ratio: float | None,
    learns: bool = True,
) -> Shares:
    """Share out the cover; a process without samples had nothing of it, if samples are given.

    With `learns` off the samples do not tell the driver's window: it stays as it is known.
    """
    everyone = {**before, **running}
    newest_us = cover.windows[-1].end_us if cover.windows else 0
    kept, dropped = _sift(samples or (), everyone, newest_us)
    learnt_us = _shortest(window_us, _spacing(kept)) if learns else window_us
    measure = _Measure(cover=cover, window_us=learnt_us, gpu_ratio=gpu_ratio)
    covers_any = bool(cover.stretch and cover.stretch.length_us)
    is_known = samples is not None and (covers_any or bool(kept))
    usages = [
        measure.usage(process, kept.get(pid, ()), is_known=is_known, ended=pid not in running)
        for pid, process in everyone.items()
    ]
    return Shares(
        usages=sorted(usages, key=lambda usage: usage.ended),
        newest_us=max((one.timestamp_us for own in kept.values() for one in own), default=0),
        window_us=learnt_us,
        dropped=dropped,
    )


@dataclass(frozen=True, kw_only=True)
class _Measure:
    """Turns a process's samples into its share of the covered time."""

    cover: SampleCoverage
    window_us: int | None
    gpu_ratio: float | None

    def usage(
        self,
        process: ListedProcess,
        samples: Sequence[ProcessUtilizationSample],
        *,
        is_known: bool,
        ended: bool,
    ) -> ProcessUsage:
        sm = 0.0
        for sample in samples:
            sm += sample.sm_percent * self.cover.share(sample, self.window_us)
        return ProcessUsage(
            process=process,
            sm_ratio=self._limit(sm / 100) if is_known else None,
            ended=ended,
        )

    def _limit(self, ratio: float) -> float:
        if self.window_us is None and self.gpu_ratio is not None:
            # One sample, of a window whose length has not shown yet: it may be short.
            return min(ratio, self.gpu_ratio)
        return min(1.0, ratio)


def _sift(
    samples: Iterable[ProcessUtilizationSample],
    everyone: Mapping[int, ListedProcess],
    newest_us: int,
) -> tuple[dict[int, list[ProcessUtilizationSample]], Counter[str]]:
    """Keep the samples of processes that are or were there; drivers do invent others."""
    kept: dict[int, list[ProcessUtilizationSample]] = {}
    dropped: Counter[str] = Counter()
    latest_us = newest_us + _AHEAD_US if newest_us else validation.TIMESTAMP_US[1]
    for sample in samples:
        reason = _reason_to_drop(sample, everyone, latest_us)
        if reason:
            dropped[reason] += 1
        else:
            kept.setdefault(sample.pid, []).append(sample)
    return kept, dropped


def _reason_to_drop(
    sample: ProcessUtilizationSample, everyone: Mapping[int, ListedProcess], latest_us: int
) -> str | None:
    if sample.pid == 0:
        return "pid_zero"
    if sample.pid not in everyone:
        return "not_listed"
    lowest, highest = validation.PERCENT
    if not (lowest <= sample.sm_percent <= highest and lowest <= sample.memory_percent <= highest):
        return "implausible"
    return None if 0 < sample.timestamp_us <= latest_us else "implausible"


def _spacing(kept: Mapping[int, Sequence[ProcessUtilizationSample]]) -> int | None:
    """Return the shortest time between two samples of one process in one answer."""
    gaps = [
        later - earlier
        for own in kept.values()
        for earlier, later in pairwise(sorted(sample.timestamp_us for sample in own))
        if later - earlier >= _MIN_WINDOW_US
    ]
    return min(gaps, default=None)


def _shortest(one_us: int | None, other_us: int | None) -> int | None:
    known = [period for period in (one_us, other_us) if period is not None]
    return min(known, default=None)
