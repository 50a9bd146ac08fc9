"""Processes that are done with a GPU, as the tick reports it that covers their end.

Here the driver's account of a process is held against what ticks said of it. What is booked for it
is decided in the join. An exit waits until ticks cover it, as these run behind the driver's clock;
what cannot be reported rightly is left out and counted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from agent.core.processes.accounting.exit_matcher import ExitedProcess
from agent.core.processes.accounting.history import (
    WINDOW_SECONDS,
    GpuHistory,
    ProcessInterval,
    ProcessKey,
    TickInterval,
)
from agent.core.processes.table import Location
from gpuledger.records import GpuProcess, GpuReading, ProcessExit
from gpuledger.records.bounds import MAX_ENDED_PROCESSES

_NS: Final = 1_000_000_000
# The driver reports whole sampling windows, so a process shows in ticks up to a window around it.
_WINDOW_NS: Final = 166_667_000


class _PendingExit(NamedTuple):
    """An exit that waits for the ticks that cover it."""

    process: ExitedProcess
    interval: ProcessInterval

    @property
    def key(self) -> ProcessKey:
        """What tells the process from others."""
        return self.process.pid, self.process.facts.started_boottime_ns or 0


@dataclass(kw_only=True)
class ExitReporter:
    """The exits of one node's processes, and what its last ticks said of each GPU."""

    _histories: dict[str, GpuHistory] = field(default_factory=dict)
    _waiting: list[_PendingExit] = field(default_factory=list)
    _begin_ns: int | None = None
    _unreported: Counter[str] = field(default_factory=Counter)

    def add(self, exited: Iterable[ExitedProcess]) -> None:
        """Add who is done with a GPU; those that cannot be reported are counted."""
        for process in exited:
            interval = _interval_of(process)
            reason = self._reason_to_drop(process, interval)
            if reason is None and interval is not None:
                self._waiting.append(_PendingExit(process, interval))
            elif reason:
                self._unreported[reason] += 1

    def drain_unreported(self) -> Counter[str]:
        """Return how many exits were left out since the last call, by reason."""
        unreported, self._unreported = self._unreported, Counter()
        return unreported

    def report(
        self,
        covered: TickInterval,
        *,
        gpus: Sequence[GpuReading],
        processes: Sequence[GpuProcess],
        accounted: Collection[str],
        container_index: Callable[[Location], int | None],
    ) -> list[ProcessExit] | None:
        """Return the exits that ticks cover by now, if any; record what this tick says.

        `accounted` are the GPUs whose driver keeps accounts; `container_index` puts a container
        into the tick's table.
        """
        if not accounted and not self._histories:
            return None
        self._begin_ns = covered.begin_ns if self._begin_ns is None else self._begin_ns
        indices = {reading.uuid: index for index, reading in enumerate(gpus)}
        self._record(covered, gpus, indices, processes, accounted)
        due = self._pop_due(covered, indices)
        exits = [
            process_exit
            for uuid, index in indices.items()
            if uuid in due
            for process_exit in _exits_on(
                index, self._histories[uuid], due[uuid], covered, container_index
            )
        ]
        return exits or None

    def _record(
        self,
        covered: TickInterval,
        gpus: Sequence[GpuReading],
        indices: Mapping[str, int],
        processes: Sequence[GpuProcess],
        accounted: Collection[str],
    ) -> None:
        by_gpu: dict[int, list[GpuProcess]] = {}
        for process in processes:
            by_gpu.setdefault(process.gpu, []).append(process)
        for uuid in {*self._histories, *(accounted & indices.keys())}:
            history, index = self._histories.setdefault(uuid, GpuHistory()), indices.get(uuid)
            if index is None:
                history.record(covered, None, [])
            else:
                # Of a GPU that is cut, the instances' rows say who used what.
                reading = None if gpus[index].mig_enabled else gpus[index]
                history.record(covered, reading, by_gpu.get(index, []))

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
            elif age_ns <= WINDOW_SECONDS * _NS:
                self._waiting.append(pending)
            else:
                self._unreported["gpu_gone"] += 1
        return due

    def _reason_to_drop(
        self, process: ExitedProcess, interval: ProcessInterval | None
    ) -> str | None:
        if process.facts.started_boottime_ns is None:
            return "unidentified"
        if interval is None:
            return "undated"
        if self._begin_ns is None or interval.begin_ns + _WINDOW_NS < self._begin_ns:
            return "older"
        return "too_many" if len(self._waiting) >= MAX_ENDED_PROCESSES else None


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
        interval._replace(missing_seconds=max(0.0, interval.missing_seconds - seconds))
        for (_, interval), (seconds, _) in zip(due, sampled, strict=True)
    ]
    parts = zip(due, sampled, intervals, history.reserve(intervals), strict=True)
    for (process, _), (sampled_seconds, first), interval, reserved_seconds in parts:
        ticks = [tick for tick in (first, *history.ticks_of(interval)) if tick]
        ticks = sorted(ticks, key=attrgetter("seq")) or [covered]
        yield ProcessExit(
            gpu=gpu,
            pid=process.pid,
            started_boottime_ns=process.facts.started_boottime_ns or 0,
            container=container_index(process.facts.location),
            lifetime_seconds=process.totals.lifetime_seconds or 0.0,
            busy_seconds=process.totals.busy_seconds or 0.0,
            # Sums and differences of shares of time may be a hair below zero, in floating point.
            sampled_busy_seconds=max(0.0, sampled_seconds),
            reserved_busy_seconds=max(0.0, reserved_seconds),
            from_seq=ticks[0].seq,
            from_time_ns=ticks[0].from_time_ns,
            until_seq=ticks[-1].seq,
            until_time_ns=ticks[-1].time_ns,
        )


def _interval_of(process: ExitedProcess) -> ProcessInterval | None:
    """Return the time on the GPU, a sampling window around it included."""
    totals, opened_ns = process.totals, process.opened_boottime_ns
    if opened_ns is None or totals.lifetime_seconds is None or totals.busy_seconds is None:
        return None
    closed_ns = opened_ns + round(totals.lifetime_seconds * _NS)
    return ProcessInterval(opened_ns - _WINDOW_NS, closed_ns + _WINDOW_NS, totals.busy_seconds)
