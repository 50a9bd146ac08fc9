"""Reports each process that has closed a GPU, in the tick that covers the time of its end.

This module compares the driver's account of a process (its accounting entry) with the use that
ticks reported for the process; the join decides how much of the difference to attribute. The time
that a tick covers ends before the tick. An exit therefore waits for a tick whose covered time
includes the process's end. Exits that cannot be reported correctly are left out and counted.

`GpuHistory` keeps, for each GPU, the busy time of its processes in the last ticks, and the busy
time that belongs to no process (the unclaimed time). As in the join, a tick with an identified
process has no unclaimed time, so a process's reported use and the unclaimed time never contain the
same seconds. Memory is bounded by the processes on the GPUs and by two minutes of ticks.
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
"""How long a GPU's busy time that belongs to no process is remembered."""
_HISTORY_NS: Final = WINDOW_SECONDS * 1_000_000_000
_PARTS: Final = 1_000_000
# The driver reports whole sampling windows, so ticks may show a process up to a window before its
# start and after its end.
_WINDOW_NS: Final = USUAL_WINDOW_US * NS_PER_US
# More ticks than can pass from a process's last listing until its account arrives.
_MAX_TICKS_ABSENT: Final = 16


class ProcessInterval(NamedTuple):
    """The time for which a process had a GPU open, and its busy time that no tick has reported."""

    begin_ns: int
    """The interval's begin, in nanoseconds since boot."""
    end_ns: int
    """The interval's end, in nanoseconds since boot."""
    missing_ns: int
    """The process's busy time in the interval that no tick has reported."""

    @classmethod
    def of(cls, process: ExitedProcess) -> "ProcessInterval | None":
        """Return the time for which a process had a GPU open, from the driver's account.

        The interval is extended by a sampling window on both sides, because the driver reports
        whole windows. `missing_ns` is the account's whole use. Return `None` if the account has no
        start, length or use.
        """
        totals, opened_ns = process.totals, process.opened_boottime_ns
        if opened_ns is None or totals.lifetime_ns is None or totals.busy_ns is None:
            return None
        closed_ns = opened_ns + totals.lifetime_ns
        return cls(opened_ns - _WINDOW_NS, closed_ns + _WINDOW_NS, totals.busy_ns)

    def overlap_ns(self, covered: TickInterval) -> int:
        """Return how many nanoseconds of the interval a tick covers."""
        return max(0, min(self.end_ns, covered.end_ns) - max(self.begin_ns, covered.begin_ns))


ProcessKey = tuple[int, int]
"""A process's pid, and its start in nanoseconds since boot."""


class _SampledTime(msgspec.Struct):
    """A process's busy time in past ticks, the first of these ticks, and ticks since the last."""

    busy_ns: int
    first: TickInterval
    ticks_absent: int = 0


class _UnclaimedTime(msgspec.Struct):
    """A tick's busy time that is attributed to no process and not reserved for an exit yet."""

    covered: TickInterval
    left_ns: int


@dataclass
class GpuHistory:
    """One GPU's busy time in the last ticks, by process, and the part that belongs to no process.

    The time that belongs to no process is called unclaimed time.
    """

    accounting_until_ns: int = 0
    """End of the last tick in which the driver kept accounts for the GPU, since boot."""
    _sampled: dict[ProcessKey, _SampledTime] = field(default_factory=dict)
    _unclaimed: deque[_UnclaimedTime] = field(default_factory=deque)

    def record(
        self, covered: TickInterval, reading: GpuReading | None, processes: Sequence[GpuProcess]
    ) -> None:
        """Add a tick's use of the GPU; `reading` is `None` if the tick has no use of the GPU.

        `covered` is the time that the tick covers, and `processes` are the GPU's processes in it.
        """
        for sampled in self._sampled.values():
            sampled.ticks_absent += 1
        if reading is not None:
            ratio = reading.utilization_ratio
            if ratio is None:
                # MIG instances may have no utilization: use the sum of their processes' samples.
                ratio = sum(process.sm_utilization_ratio or 0.0 for process in processes)
            busy_ns = covered.length_ns * min(_parts(ratio), _PARTS) // _PARTS
            for process, own_ns in split_busy_ns(busy_ns, processes, covered.length_ns):
                if process.started_boottime_ns is None:
                    continue
                key = (process.pid, process.started_boottime_ns)
                sampled = self._sampled.setdefault(key, _SampledTime(0, covered))
                sampled.busy_ns += own_ns
                sampled.ticks_absent = 0
            # If any process is identified, consumers of the tick attribute all busy time to the
            # identified processes.
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
        """Remove and return a process's busy time in past ticks, and the first of these ticks.

        Return 0 and `None` if no tick contained the process.
        """
        found = self._sampled.pop(key, None)
        return (found.busy_ns, found.first) if found else (0, None)

    def ticks_of(self, interval: ProcessInterval) -> list[TickInterval]:
        """Return the remembered ticks whose covered time overlaps the interval."""
        ticks = (unclaimed.covered for unclaimed in self._unclaimed)
        return [tick for tick in ticks if interval.overlap_ns(tick)]

    def reserve(self, intervals: Sequence[ProcessInterval]) -> list[int]:
        """Reserve busy time that belongs to no process; return the nanoseconds for each interval.

        Reserved time is not reserved again. An interval gets at most its missing time, and from
        each tick at most the time for which the tick overlaps the interval. If several intervals
        need more time than a tick has left, each gets a proportional part.
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
    """Divide a whole number in proportion to the weights; return the parts as whole numbers.

    The parts sum to the whole. If the whole is at most the sum of the weights, no part exceeds its
    weight. If all weights are 0, all parts are 0.
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
    """Yield each process with the busy time that the tick shows for it.

    If all processes on the GPU belong to one container or to the host, they get all of the GPU's
    busy time (`busy_ns`), split in proportion to their samples, or equally without samples. If
    several containers share the GPU, each process gets the use that its own samples show. The join
    also fits these shares to the GPU's busy time.
    """
    parts = [_parts(process.sm_utilization_ratio) for process in processes]
    # Both the host and an unreadable process have no container, but they are different owners.
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
    """A process that has closed a GPU and is not reported yet.

    It is reported once the time covered by ticks includes the end of `interval`.
    """

    process: ExitedProcess
    interval: ProcessInterval

    @property
    def key(self) -> ProcessKey:
        """The process's pid and its start in nanoseconds since boot."""
        return self.process.pid, self.process.facts.started_boottime_ns or 0


@dataclass(kw_only=True)
class ExitReporter:
    """Reports the exits of one node's processes: processes that have closed a GPU."""

    _histories: dict[str, GpuHistory] = field(default_factory=dict)
    _waiting: list[_PendingExit] = field(default_factory=list)
    _begin_ns: int | None = None
    unreported: Counter[str] = field(default_factory=Counter)
    """Number of exits that were left out, by reason. The caller reads the numbers and resets
    them."""

    def add(self, exited: Iterable[ExitedProcess]) -> None:
        """Add processes that have closed a GPU, to be reported in a later tick.

        Processes that cannot be reported correctly are only counted.
        """
        for process in exited:
            interval = ProcessInterval.of(process)
            if process.facts.started_boottime_ns is None:
                self.unreported["unidentified"] += 1
            elif interval is None:
                self.unreported["undated"] += 1
            elif self._begin_ns is None or interval.begin_ns + _WINDOW_NS < self._begin_ns:
                # It is unknown how much use an earlier agent's ticks reported for this process.
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
        """Return the exits to report in this tick, or `None` if there are none.

        Also record the tick's use of each GPU. `covered` is the time that the tick covers.
        `accounting_gpus` are the UUIDs of the GPUs for which the driver keeps accounts.
        `container_index` adds a container to the tick's table and returns its position.
        """
        if not accounting_gpus and not self._histories and not self._waiting:
            # If accounts are switched on later, earlier processes count as `older`.
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
                # On a partitioned GPU, the instances' rows show the use.
                reading = None if gpus[index].mig_enabled else gpus[index]
                history.record(covered, reading, by_gpu.get(index, []))
        # Forget GPUs that have not kept accounts for so long that no account can come any more.
        self._histories = {
            uuid: history
            for uuid, history in self._histories.items()
            if covered.end_ns - history.accounting_until_ns <= _HISTORY_NS
        }

    def _pop_due(
        self, covered: TickInterval, indices: Mapping[str, int]
    ) -> Mapping[str, list[_PendingExit]]:
        """Remove and return the exits whose end ticks have covered, by UUID of the GPU.

        Exits whose GPU has been missing from ticks for two minutes are dropped and counted.
        """
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
    """Yield the exits on one GPU, each with its part of the busy time that no process used.

    `gpu` is the GPU's position in the tick, and `due` are the exits to report.
    """
    sampled = [history.pop_sampled(pending.key) for pending in due]
    # The use that ticks reported for a process is not missing.
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
