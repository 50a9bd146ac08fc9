"""What the last ticks said of each GPU: whose its busy time was, and what was nobody's.

Pure. It follows what a tick's readers can make of it, so that what a process is said to have used
and what was left without a user are never the same seconds. Memory is bounded by the processes on
the GPUs and by two minutes of ticks.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from gpuledger.records import GpuProcess, GpuReading

WINDOW_SECONDS: Final = 120
"""For how long it is known what of a GPU's busy time was nobody's."""
_NS: Final = 1_000_000_000
# Longer than an account is waited for after the process was listed last.
_FORGOTTEN_AFTER_TICKS: Final = 16


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
    untold_seconds: float
    """Busy time that is looked for."""


ProcessKey = tuple[int, int]
"""Pid and start since boot."""


class _Ticked(msgspec.Struct):
    seconds: float
    first: TickInterval
    ticks_away: int = 0


class _Unclaimed(msgspec.Struct):
    covered: TickInterval
    left_seconds: float


@dataclass
class GpuHistory:
    """What the last ticks said of one GPU."""

    _ticked: dict[ProcessKey, _Ticked] = field(default_factory=dict)
    _ticks: deque[_Unclaimed] = field(default_factory=deque)

    def note(
        self, covered: TickInterval, reading: GpuReading | None, processes: Sequence[GpuProcess]
    ) -> None:
        """Take what a tick says; `reading` is `None` where the GPU is not in it."""
        for one in self._ticked.values():
            one.ticks_away += 1
        if reading is not None:
            busy_seconds = _busy_ratio(reading, processes) * covered.seconds
            named = [one for one in processes if one.started_boottime_ns is not None]
            for process, seconds in split(busy_seconds, processes, covered.seconds):
                self._add(process, seconds, covered)
            self._ticks.append(_Unclaimed(covered, 0.0 if named else busy_seconds))
        self._forget(covered)

    def pop_ticked(self, key: ProcessKey) -> tuple[float, TickInterval | None]:
        """Return what ticks said of a process, and the first that named it; both are forgotten."""
        found = self._ticked.pop(key, None)
        return (found.seconds, found.first) if found else (0.0, None)

    def met(self, stay: ProcessInterval) -> list[TickInterval]:
        """Return the ticks that cover some of a stay, as far as they are remembered."""
        ticks = (one.covered for one in self._ticks)
        return [one for one in ticks if _overlap_seconds(stay, one)]

    def set_aside(self, stays: Sequence[ProcessInterval]) -> list[float]:
        """Set unclaimed time aside for each stay; what one is given, no other ever is.

        Nobody gets more than was looked for, nor more of a tick than it was there. Where several
        look for more than there is, each gets a part in proportion.
        """
        given = [0.0] * len(stays)
        for tick in self._ticks:
            wanted = [
                min(stay.untold_seconds - got, _overlap_seconds(stay, tick.covered))
                for stay, got in zip(stays, given, strict=True)
            ]
            total = sum(wanted)
            if total <= 0.0 or tick.left_seconds <= 0.0:
                continue
            scale = min(1.0, tick.left_seconds / total)
            given = [got + want * scale for got, want in zip(given, wanted, strict=True)]
            tick.left_seconds = max(0.0, tick.left_seconds - total * scale)
        return given

    def _add(self, process: GpuProcess, seconds: float, covered: TickInterval) -> None:
        if process.started_boottime_ns is None:
            return
        key = (process.pid, process.started_boottime_ns)
        known = self._ticked.setdefault(key, _Ticked(0.0, covered))
        known.seconds += seconds
        known.ticks_away = 0

    def _forget(self, covered: TickInterval) -> None:
        while self._ticks and covered.end_ns - self._ticks[0].covered.end_ns > WINDOW_SECONDS * _NS:
            self._ticks.popleft()
        self._ticked = {
            key: one
            for key, one in self._ticked.items()
            if one.ticks_away <= _FORGOTTEN_AFTER_TICKS
        }


def split(
    busy_seconds: float, processes: Sequence[GpuProcess], seconds: float
) -> Iterator[tuple[GpuProcess, float]]:
    """Yield each process its part of what a reader of the tick books on its container.

    A container that is alone on a GPU has all of the device's busy time, whatever its processes'
    samples say; it is split among them by these, or equally where there are none. Of several
    containers each process has what its own samples say.
    """
    ratios = [one.sm_utilization_ratio or 0.0 for one in processes]
    total = sum(ratios)
    is_alone = len(set(map(_home, processes))) == 1
    for process, ratio in zip(processes, ratios, strict=True):
        if not is_alone:
            yield process, ratio * seconds
        elif total > 0.0:
            yield process, busy_seconds * ratio / total
        else:
            yield process, busy_seconds / len(processes)


def _busy_ratio(reading: GpuReading, processes: Sequence[GpuProcess]) -> float:
    ratio = reading.utilization_ratio
    if ratio is None:
        ratio = sum(one.sm_utilization_ratio or 0.0 for one in processes)
    return min(ratio, 1.0)


def _home(process: GpuProcess) -> tuple[int | None, bool]:
    return process.container, process.started_boottime_ns is None


def _overlap_seconds(stay: ProcessInterval, covered: TickInterval) -> float:
    overlap_ns = min(stay.end_ns, covered.end_ns) - max(stay.begin_ns, covered.begin_ns)
    return max(0, overlap_ns) / _NS


def by_gpu(processes: Iterable[GpuProcess]) -> dict[int, list[GpuProcess]]:
    """Return the processes of a tick by the position of their GPU."""
    found: dict[int, list[GpuProcess]] = {}
    for one in processes:
        found.setdefault(one.gpu, []).append(one)
    return found
