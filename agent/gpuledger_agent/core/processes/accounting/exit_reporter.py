"""Processes that are done with a GPU, as the tick reports it that covers their end.

Here the driver's account of a process is held against what ticks said of it. What is booked for it
is decided in the join. An exit waits until ticks cover it, as these run behind the driver's clock;
what cannot be reported rightly is left out and counted.

`GpuHistory` has what the last ticks said of each GPU: whose its busy time was, and what was
nobody's. It follows what a tick's readers can make of it, so that what a process is said to have
used and what was left without a user are never the same seconds. Memory is bounded by the processes
on the GPUs and by two minutes of ticks.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from gpuledger.clock import NS_PER_US
from gpuledger.records import GpuProcess, GpuReading, ProcessExit
from gpuledger.records.bounds import MAX_ENDED_PROCESSES
from gpuledger_agent.core.normalize.windows import USUAL_WINDOW_US
from gpuledger_agent.core.processes.accounting.exit_matcher import ExitedProcess
from gpuledger_agent.core.processes.table import Location
from gpuledger_agent.core.tick_clock import TickInterval

WINDOW_SECONDS: Final = 120
"""For how long it is known what of a GPU's busy time was nobody's."""
_HISTORY_NS: Final = WINDOW_SECONDS * 1_000_000_000
_PARTS: Final = 1_000_000
# The driver reports whole sampling windows, so a process shows in ticks up to a window around it.
_WINDOW_NS: Final = USUAL_WINDOW_US * NS_PER_US
# Longer than an account is waited for after the process was listed last.
_MAX_TICKS_ABSENT: Final = 16


class ProcessInterval(NamedTuple):
    """A process's time on a GPU, and its use in that time that no tick has reported yet."""

    begin_ns: int
    """Where it begins, since boot."""
    end_ns: int
    """Where it ends, since boot."""
    missing_ns: int
    """Busy time that is looked for."""

    @classmethod
    def of(cls, process: ExitedProcess) -> "ProcessInterval | None":
        """Return the time on the GPU, a sampling window around it included; `None` if undated."""
        totals, opened_ns = process.totals, process.opened_boottime_ns
        if opened_ns is None or totals.lifetime_ns is None or totals.busy_ns is None:
            return None
        closed_ns = opened_ns + totals.lifetime_ns
        return cls(opened_ns - _WINDOW_NS, closed_ns + _WINDOW_NS, totals.busy_ns)

    def overlap_ns(self, covered: TickInterval) -> int:
        """Return how much of it a tick covers."""
        return max(0, min(self.end_ns, covered.end_ns) - max(self.begin_ns, covered.begin_ns))


ProcessKey = tuple[int, int]
"""Pid and start since boot."""


class _SampledTime(msgspec.Struct):
    """What ticks reported of one process."""

    busy_ns: int
    first: TickInterval
    ticks_absent: int = 0


class _UnclaimedTime(msgspec.Struct):
    """The busy time of a tick that is attributed to no process."""

    covered: TickInterval
    left_ns: int


@dataclass
class GpuHistory:
    """What the last ticks reported of one GPU."""

    accounting_until_ns: int = 0
    """Until when, since boot, its driver kept accounts for certain."""
    _sampled: dict[ProcessKey, _SampledTime] = field(default_factory=dict)
    _unclaimed: deque[_UnclaimedTime] = field(default_factory=deque)

    def record(
        self, covered: TickInterval, reading: GpuReading | None, processes: Sequence[GpuProcess]
    ) -> None:
        """Record what a tick reports; `reading` is `None` where the GPU is not in it."""
        for sampled in self._sampled.values():
            sampled.ticks_absent += 1
        if reading is not None:
            ratio = reading.utilization_ratio
            if ratio is None:
                # The device gives none (MIG): its processes' samples are all that is known.
                ratio = sum(process.sm_utilization_ratio or 0.0 for process in processes)
            busy_ns = covered.length_ns * min(_parts(ratio), _PARTS) // _PARTS
            for process, own_ns in split_busy_ns(busy_ns, processes, covered.length_ns):
                if process.started_boottime_ns is None:
                    continue
                key = (process.pid, process.started_boottime_ns)
                sampled = self._sampled.setdefault(key, _SampledTime(0, covered))
                sampled.busy_ns += own_ns
                sampled.ticks_absent = 0
            # Whoever is named, the reader of the tick gives them all of it.
            is_named = any(process.started_boottime_ns is not None for process in processes)
            self._unclaimed.append(_UnclaimedTime(covered, 0 if is_named else busy_ns))
        oldest_ns = covered.end_ns - _HISTORY_NS
        while self._unclaimed and self._unclaimed[0].covered.end_ns < oldest_ns:
            self._unclaimed.popleft()
        self._sampled = {
            key: sampled
            for key, sampled in self._sampled.items()
            if sampled.ticks_absent <= _MAX_TICKS_ABSENT
        }

    def pop_sampled(self, key: ProcessKey) -> tuple[int, TickInterval | None]:
        """Return what ticks reported of a process, and the first tick that named it.

        Both are forgotten.
        """
        found = self._sampled.pop(key, None)
        return (found.busy_ns, found.first) if found else (0, None)

    def ticks_of(self, interval: ProcessInterval) -> list[TickInterval]:
        """Return the ticks that cover some of an interval, as far as they are remembered."""
        ticks = (unclaimed.covered for unclaimed in self._unclaimed)
        return [tick for tick in ticks if interval.overlap_ns(tick)]

    def reserve(self, intervals: Sequence[ProcessInterval]) -> list[int]:
        """Reserve unclaimed time for each interval; what one is given, no other ever is.

        Nobody gets more than was looked for, nor more of a tick than it was there. Where several
        look for more than there is, each gets a part in proportion.
        """
        reserved = [0] * len(intervals)
        for tick in self._unclaimed:
            wanted = [
                min(interval.missing_ns - got, interval.overlap_ns(tick.covered))
                for interval, got in zip(intervals, reserved, strict=True)
            ]
            parts = split(min(tick.left_ns, sum(wanted)), wanted)
            reserved = [got + part for got, part in zip(reserved, parts, strict=True)]
            tick.left_ns -= sum(parts)
        return reserved


def split(whole: int, weights: Sequence[int]) -> list[int]:
    """Return the parts of a whole by weights, which sum to it; zeros where all of these are zero.

    No part is more than its weight where the whole is no more than their sum.
    """
    total, reached, given = sum(weights), 0, 0
    parts = []
    for weight in weights:
        reached += weight
        upto = whole * reached // total if total else 0
        parts.append(upto - given)
        given = upto
    return parts


def split_busy_ns(
    busy_ns: int, processes: Sequence[GpuProcess], interval_ns: int
) -> Iterator[tuple[GpuProcess, int]]:
    """Yield each process its part of what a reader of the tick books on its container.

    A container that is alone on a GPU has all of the device's busy time, whatever its processes'
    samples say; it is split among them by these, or equally where there are none. Of several
    containers each process has what its own samples say.
    """
    parts = [_parts(process.sm_utilization_ratio) for process in processes]
    # One that could not be read is no part of the host, which has no container either.
    owners = {(process.container, process.started_boottime_ns is None) for process in processes}
    if len(owners) > 1:
        own = [interval_ns * part // _PARTS for part in parts]
    else:
        own = split(busy_ns, parts if any(parts) else [1] * len(parts))
    yield from zip(processes, own, strict=True)


def _parts(ratio: float | None) -> int:
    """Return a ratio in millionths."""
    return round((ratio or 0.0) * _PARTS)


class _PendingExit(NamedTuple):
    """An exit that waits for the ticks that cover it."""

    process: ExitedProcess
    interval: ProcessInterval

    @property
    def key(self) -> ProcessKey:
        """What identifies the process."""
        return self.process.pid, self.process.facts.started_boottime_ns or 0


@dataclass(kw_only=True)
class ExitReporter:
    """The exits of one node's processes, and what its last ticks reported of each GPU."""

    _histories: dict[str, GpuHistory] = field(default_factory=dict)
    _waiting: list[_PendingExit] = field(default_factory=list)
    _begin_ns: int | None = None
    unreported: Counter[str] = field(default_factory=Counter)
    """Exits that were left out, by reason, until they are counted."""

    def add(self, exited: Iterable[ExitedProcess]) -> None:
        """Add a process that has left a GPU; those that cannot be reported are counted."""
        for process in exited:
            interval = ProcessInterval.of(process)
            if process.facts.started_boottime_ns is None:
                self.unreported["unidentified"] += 1
            elif interval is None:
                self.unreported["undated"] += 1
            elif self._begin_ns is None or interval.begin_ns + _WINDOW_NS < self._begin_ns:
                # What ticks of an earlier agent said of it nobody knows any more.
                self.unreported["older"] += 1
            elif len(self._waiting) >= MAX_ENDED_PROCESSES:
                self.unreported["too_many"] += 1
            else:
                self._waiting.append(_PendingExit(process, interval))

    def report(
        self,
        covered: TickInterval,
        *,
        gpus: Sequence[GpuReading],
        processes: Sequence[GpuProcess],
        accounting_gpus: Collection[str],
        container_index: Callable[[Location], int | None],
    ) -> list[ProcessExit] | None:
        """Return the exits that ticks cover by now, if any; record what this tick says.

        `accounting_gpus` are the GPUs whose driver keeps accounts; `container_index` puts a
        container into the tick's table.
        """
        if not accounting_gpus and not self._histories and not self._waiting:
            # Whoever began before accounts are kept again is unknown by then.
            self._begin_ns = None
            return None
        self._begin_ns = covered.begin_ns if self._begin_ns is None else self._begin_ns
        indices = {reading.uuid: index for index, reading in enumerate(gpus)}
        self._record(covered, gpus, indices, processes, accounting_gpus)
        due = self._pop_due(covered, indices)
        exits = [
            process_exit
            for uuid, index in indices.items()
            if uuid in due
            for process_exit in _exits_on(
                index, self._histories.get(uuid, GpuHistory()), due[uuid], covered, container_index
            )
        ]
        return exits or None

    def _record(
        self,
        covered: TickInterval,
        gpus: Sequence[GpuReading],
        indices: Mapping[str, int],
        processes: Sequence[GpuProcess],
        accounting_gpus: Collection[str],
    ) -> None:
        by_gpu: dict[int, list[GpuProcess]] = {}
        for process in processes:
            by_gpu.setdefault(process.gpu, []).append(process)
        for uuid in {*self._histories, *(accounting_gpus & indices.keys())}:
            history, index = self._histories.setdefault(uuid, GpuHistory()), indices.get(uuid)
            if uuid in accounting_gpus:
                history.accounting_until_ns = covered.end_ns
            if index is None:
                history.record(covered, None, [])
            else:
                # Of a GPU that is cut, the instances' rows say who used what.
                reading = None if gpus[index].mig_enabled else gpus[index]
                history.record(covered, reading, by_gpu.get(index, []))
        # Of a GPU that is gone, or keeps no accounts any more, no account comes after that.
        self._histories = {
            uuid: history
            for uuid, history in self._histories.items()
            if covered.end_ns - history.accounting_until_ns <= _HISTORY_NS
        }

    def _pop_due(
        self, covered: TickInterval, indices: Mapping[str, int]
    ) -> Mapping[str, list[_PendingExit]]:
        """Return, by GPU, the exits that ticks cover; one waits for its GPU, but not for ever."""
        due: dict[str, list[_PendingExit]] = {}
        waiting, self._waiting = self._waiting, []
        for pending in waiting:
            uuid = pending.process.totals.gpu_uuid
            age_ns = covered.end_ns - pending.interval.end_ns
            if age_ns >= 0 and uuid in indices:
                due.setdefault(uuid, []).append(pending)
            elif age_ns <= _HISTORY_NS:
                self._waiting.append(pending)
            else:
                self.unreported["gpu_gone"] += 1
        return due


def _exits_on(
    gpu: int,
    history: GpuHistory,
    due: Sequence[_PendingExit],
    covered: TickInterval,
    container_index: Callable[[Location], int | None],
) -> Iterable[ProcessExit]:
    """Yield the exits on one GPU; they share what is nobody's there."""
    sampled = [history.pop_sampled(pending.key) for pending in due]
    # What ticks said of a process is not looked for again.
    intervals = [
        interval._replace(missing_ns=max(0, interval.missing_ns - sampled_ns))
        for (_, interval), (sampled_ns, _) in zip(due, sampled, strict=True)
    ]
    parts = zip(due, sampled, intervals, history.reserve(intervals), strict=True)
    for (process, _), (sampled_ns, first), interval, reserved_ns in parts:
        ticks = [tick for tick in (first, *history.ticks_of(interval)) if tick]
        ticks = sorted(ticks, key=attrgetter("seq")) or [covered]
        yield ProcessExit(
            gpu=gpu,
            pid=process.pid,
            started_boottime_ns=process.facts.started_boottime_ns or 0,
            container=container_index(process.facts.location),
            lifetime_ns=process.totals.lifetime_ns or 0,
            busy_ns=process.totals.busy_ns or 0,
            sampled_busy_ns=sampled_ns,
            reserved_busy_ns=reserved_ns,
            from_seq=ticks[0].seq,
            from_time_ns=ticks[0].from_time_ns,
            until_seq=ticks[-1].seq,
            until_time_ns=ticks[-1].time_ns,
        )
