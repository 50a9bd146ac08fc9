"""What the last ticks said of each GPU: whose its busy time was, and what was nobody's.

It follows what a tick's readers can make of it, so that what a process is said to have used and
what was left without a user are never the same seconds. Memory is bounded by the processes on the
GPUs and by two minutes of ticks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from gpuledger.records import GpuProcess, GpuReading

WINDOW_SECONDS: Final = 120
"""For how long it is known what of a GPU's busy time was nobody's."""
_NS: Final = 1_000_000_000
# Longer than an account is waited for after the process was listed last.
_MAX_TICKS_ABSENT: Final = 16


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
    def seconds(self) -> float:
        """How long it is."""
        return (self.end_ns - self.begin_ns) / _NS


class ProcessInterval(NamedTuple):
    """A process's time on a GPU, and what it used in it that no tick has said yet."""

    begin_ns: int
    """Where it begins, since boot."""
    end_ns: int
    """Where it ends, since boot."""
    missing_seconds: float
    """Busy time that is looked for."""

    def overlap_seconds(self, covered: TickInterval) -> float:
        """Return how much of it a tick covers."""
        overlap_ns = min(self.end_ns, covered.end_ns) - max(self.begin_ns, covered.begin_ns)
        return max(0, overlap_ns) / _NS


ProcessKey = tuple[int, int]
"""Pid and start since boot."""


class _SampledTime(msgspec.Struct):
    """What ticks said of one process."""

    seconds: float
    first: TickInterval
    ticks_absent: int = 0


class _UnclaimedTime(msgspec.Struct):
    """What a tick left to nobody."""

    covered: TickInterval
    left_seconds: float


@dataclass
class GpuHistory:
    """What the last ticks said of one GPU."""

    _sampled: dict[ProcessKey, _SampledTime] = field(default_factory=dict)
    _unclaimed: deque[_UnclaimedTime] = field(default_factory=deque)

    def record(
        self, covered: TickInterval, reading: GpuReading | None, processes: Sequence[GpuProcess]
    ) -> None:
        """Record what a tick says; `reading` is `None` where the GPU is not in it."""
        for sampled in self._sampled.values():
            sampled.ticks_absent += 1
        if reading is not None:
            ratio = reading.utilization_ratio
            if ratio is None:
                # The device gives none (MIG): its processes' samples are all that is known.
                ratio = sum(process.sm_utilization_ratio or 0.0 for process in processes)
            busy_seconds = min(ratio, 1.0) * covered.seconds
            for process, seconds in split_busy_seconds(busy_seconds, processes, covered.seconds):
                if process.started_boottime_ns is None:
                    continue
                key = (process.pid, process.started_boottime_ns)
                sampled = self._sampled.setdefault(key, _SampledTime(0.0, covered))
                sampled.seconds += seconds
                sampled.ticks_absent = 0
            # Whoever is named, the reader of the tick gives them all of it.
            is_named = any(process.started_boottime_ns is not None for process in processes)
            self._unclaimed.append(_UnclaimedTime(covered, 0.0 if is_named else busy_seconds))
        self._forget_older(covered)

    def pop_sampled(self, key: ProcessKey) -> tuple[float, TickInterval | None]:
        """Return what ticks said of a process, and the first that named it; both are forgotten."""
        found = self._sampled.pop(key, None)
        return (found.seconds, found.first) if found else (0.0, None)

    def ticks_of(self, interval: ProcessInterval) -> list[TickInterval]:
        """Return the ticks that cover some of an interval, as far as they are remembered."""
        ticks = (unclaimed.covered for unclaimed in self._unclaimed)
        return [tick for tick in ticks if interval.overlap_seconds(tick)]

    def reserve(self, intervals: Sequence[ProcessInterval]) -> list[float]:
        """Reserve unclaimed time for each interval; what one is given, no other ever is.

        Nobody gets more than was looked for, nor more of a tick than it was there. Where several
        look for more than there is, each gets a part in proportion.
        """
        reserved = [0.0] * len(intervals)
        for tick in self._unclaimed:
            wanted = [
                min(interval.missing_seconds - got, interval.overlap_seconds(tick.covered))
                for interval, got in zip(intervals, reserved, strict=True)
            ]
            total = sum(wanted)
            if total <= 0.0 or tick.left_seconds <= 0.0:
                continue
            scale = min(1.0, tick.left_seconds / total)
            reserved = [got + want * scale for got, want in zip(reserved, wanted, strict=True)]
            tick.left_seconds = max(0.0, tick.left_seconds - total * scale)
        return reserved

    def _forget_older(self, covered: TickInterval) -> None:
        oldest_ns = covered.end_ns - WINDOW_SECONDS * _NS
        while self._unclaimed and self._unclaimed[0].covered.end_ns < oldest_ns:
            self._unclaimed.popleft()
        self._sampled = {
            key: sampled
            for key, sampled in self._sampled.items()
            if sampled.ticks_absent <= _MAX_TICKS_ABSENT
        }


def split_busy_seconds(
    busy_seconds: float, processes: Sequence[GpuProcess], seconds: float
) -> Iterator[tuple[GpuProcess, float]]:
    """Yield each process its part of what a reader of the tick books on its container.

    A container that is alone on a GPU has all of the device's busy time, whatever its processes'
    samples say; it is split among them by these, or equally where there are none. Of several
    containers each process has what its own samples say.
    """
    ratios = [process.sm_utilization_ratio or 0.0 for process in processes]
    total = sum(ratios)
    # One that could not be read is no part of the host, which has no container either.
    owners = {(process.container, process.started_boottime_ns is None) for process in processes}
    for process, ratio in zip(processes, ratios, strict=True):
        if len(owners) > 1:
            yield process, ratio * seconds
        elif total > 0.0:
            yield process, busy_seconds * ratio / total
        else:
            yield process, busy_seconds / len(processes)
