"""What each process had of a GPU in an interval, from the driver's process samples.

Pure. The driver gives whole percents of its own sampling windows, nothing for a window in which a
process did not run, and nothing for the window in which it ended. On some drivers there is one
sample for each window, on others one for the whole time since the last question.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from agent import plausibility
from agent.answers import ListedProcess, ProcessSample, Sample
from agent.plausibility import Sieve
from gpuledger.records import ProcessKind

_LEAST_WINDOW_US: Final = 10_000
# A stamp further ahead of the GPU's newest would hide every later sample, were it believed.
_AHEAD_US: Final = 60_000_000
# Two periods that differ by less than this are the same one, measured twice.
_SAME_PERIOD_RATIO: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class ProcessUsage:
    """One process on one GPU over the interval."""

    process: ListedProcess
    """The process as it is listed, or was at the tick before."""
    sm_ratio: float | None
    """Share of the interval in which its kernels ran; `None` where the driver does not say."""
    memory_ratio: float | None
    """The same of the memory controller."""
    ended: bool
    """Whether it was there at the tick before and is gone."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The GPU's own sampling windows that closed within the interval."""

    count: int
    """How many; 0 also where the driver does not show them."""
    newest_us: int
    """The end of the newest by the driver's clock, 0 where there is none."""
    covered_us: float
    """The time they cover together, or the interval where there are none."""

    @classmethod
    def measure(
        cls, samples: Sequence[Sample], *, newest_before_us: int, interval_ns: int
    ) -> "Windows":
        """Measure by the driver's clock, whose grid the interval's ends do not meet."""
        stamps = sorted({sample.timestamp_us for sample in samples})
        first_us = newest_before_us or (2 * stamps[0] - stamps[1] if len(stamps) > 1 else 0)
        covered_us = stamps[-1] - first_us if stamps and first_us else interval_ns / 1000
        newest_us = stamps[-1] if stamps else 0
        return cls(count=len(stamps), newest_us=newest_us, covered_us=max(covered_us, 1.0))


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
    sieve: Sieve,
) -> Mapping[int, ListedProcess]:
    """Merge the driver's lists by pid: a process in two of them holds its memory once.

    Where a list failed, the processes of the tick before are taken to be there still.
    """
    if listed is None:
        return before
    limits = (0, memory_bytes or plausibility.MEMORY_BYTES[1])
    merged: dict[int, ListedProcess] = {}
    for process in listed:
        if process.pid == 0:
            sieve.dropped["pid"] += 1
            continue
        held = sieve.keep(process.memory_bytes, limits, reading="process_memory")
        sane = replace(process, memory_bytes=held)
        other = merged.get(process.pid)
        merged[process.pid] = _merge(other, sane) if other else sane
    return merged


def _merge(one: ListedProcess, other: ListedProcess) -> ListedProcess:
    held = [process.memory_bytes for process in (one, other) if process.memory_bytes is not None]
    kind = one.kind if one.kind == other.kind else ProcessKind.COMPUTE
    return ListedProcess(pid=one.pid, kind=kind, memory_bytes=max(held, default=None))


def share_out(
    samples: Sequence[ProcessSample] | None,
    *,
    since_us: int,
    running: Mapping[int, ListedProcess],
    before: Mapping[int, ListedProcess],
    windows: Windows,
    window_us: int | None,
    gpu_ratio: float | None,
) -> Shares:
    """Share out the interval; a process without samples had nothing of it, if samples are given."""
    everyone = {**before, **running}
    kept, dropped = _sift(samples or (), everyone, windows)
    learnt_us = _shortest(window_us, _spacing(kept))
    measure = _Measure(windows=windows, window_us=learnt_us, gpu_ratio=gpu_ratio)
    is_known = samples is not None and bool(windows.count or kept)
    usages = [
        measure.usage(
            process,
            [sample for sample in kept.get(pid, ()) if sample.timestamp_us > since_us],
            is_known=is_known,
            ended=pid not in running,
        )
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
    """Turns a process's samples into its share of the interval."""

    windows: Windows
    window_us: int | None
    gpu_ratio: float | None

    def usage(
        self,
        process: ListedProcess,
        samples: Sequence[ProcessSample],
        *,
        is_known: bool,
        ended: bool,
    ) -> ProcessUsage:
        return ProcessUsage(
            process=process,
            sm_ratio=self._sm_ratio(samples) if is_known else None,
            memory_ratio=self._memory_ratio(samples) if is_known else None,
            ended=ended,
        )

    def _sm_ratio(self, samples: Sequence[ProcessSample]) -> float:
        ratio = self._ratio([sample.sm_percent for sample in samples])
        if self.window_us is None and self.gpu_ratio is not None:
            # One sample, of a window whose length has not shown yet: it may be short.
            return min(ratio, self.gpu_ratio)
        return ratio

    def _memory_ratio(self, samples: Sequence[ProcessSample]) -> float:
        return self._ratio([sample.memory_percent for sample in samples])

    def _ratio(self, percents: Sequence[int]) -> float:
        return min(1.0, sum(percents) / 100 * self._window_share())

    def _window_share(self) -> float:
        """Give one window's part of the covered time."""
        if self.window_us is None:
            return 1.0
        share = min(1.0, self.window_us / self.windows.covered_us)
        if self.windows.count and abs(share * self.windows.count - 1) < _SAME_PERIOD_RATIO:
            return 1 / self.windows.count
        return share


def _sift(
    samples: Iterable[ProcessSample], everyone: Mapping[int, ListedProcess], windows: Windows
) -> tuple[dict[int, list[ProcessSample]], Counter[str]]:
    """Keep the samples of processes that are or were there; drivers do invent others."""
    kept: dict[int, list[ProcessSample]] = {}
    dropped: Counter[str] = Counter()
    latest_us = windows.newest_us + _AHEAD_US if windows.newest_us else plausibility.TIMESTAMP_US[1]
    for sample in samples:
        reason = _reason_to_drop(sample, everyone, latest_us)
        if reason:
            dropped[reason] += 1
        else:
            kept.setdefault(sample.pid, []).append(sample)
    return kept, dropped


def _reason_to_drop(
    sample: ProcessSample, everyone: Mapping[int, ListedProcess], latest_us: int
) -> str | None:
    if sample.pid == 0:
        return "pid_zero"
    if sample.pid not in everyone:
        return "not_listed"
    lowest, highest = plausibility.PERCENT
    if not (lowest <= sample.sm_percent <= highest and lowest <= sample.memory_percent <= highest):
        return "implausible"
    return None if 0 < sample.timestamp_us <= latest_us else "implausible"


def _spacing(kept: Mapping[int, Sequence[ProcessSample]]) -> int | None:
    """Give the shortest time between two samples of one process in one answer."""
    gaps = [
        later - earlier
        for own in kept.values()
        for earlier, later in pairwise(sorted(sample.timestamp_us for sample in own))
        if later - earlier >= _LEAST_WINDOW_US
    ]
    return min(gaps, default=None)


def _shortest(one_us: int | None, other_us: int | None) -> int | None:
    known = [period for period in (one_us, other_us) if period is not None]
    return min(known, default=None)
