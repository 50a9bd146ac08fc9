"""Processes that are done with a GPU, as the tick tells it that covers their end.

Here the driver's account of a process is held against what ticks said of it. Pure but for metrics.
What is booked for it is decided elsewhere. An end waits until ticks cover it, as these run behind
the driver's clock; what cannot be told rightly is left out and counted.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from agent.metrics import ENDS_UNTOLD
from agent.processes.container_table import Containers
from agent.processes.history import (
    WINDOW_SECONDS,
    GpuHistory,
    ProcessInterval,
    TickInterval,
    by_gpu,
)
from agent.processes.lifetime import ExitedProcess
from gpuledger.records import GpuProcess, GpuReading, ProcessExit
from gpuledger.records.bounds import MAX_ENDED_PROCESSES

_NS: Final = 1_000_000_000
# The driver tells of whole sampling windows, so a process shows in ticks up to a window around it.
_WINDOW_NS: Final = 166_667_000
_MAX_WAITING: Final = MAX_ENDED_PROCESSES


@dataclass(kw_only=True)
class ExitReporter:
    """The ends of one node's processes, and what its last ticks said of each GPU."""

    _pasts: dict[str, GpuHistory] = field(default_factory=dict)
    _waiting: list[tuple[ExitedProcess, ProcessInterval]] = field(default_factory=list)
    _begin_ns: int | None = None

    def take(self, closed: Iterable[ExitedProcess]) -> None:
        """Take who is done with a GPU; those who cannot be told of are counted."""
        for one in closed:
            stay = _stay_of(one)
            reason = self._reason_to_drop(one, stay)
            if reason is None and stay is not None:
                self._waiting.append((one, stay))
            else:
                ENDS_UNTOLD.labels(reason=reason).inc()

    def tell(
        self,
        covered: TickInterval,
        *,
        gpus: Sequence[GpuReading],
        processes: Sequence[GpuProcess],
        accounted: Collection[str],
        containers: Containers,
    ) -> list[ProcessExit] | None:
        """Return the ends that ticks cover by now, if any; `accounted` are the GPUs with accounts.

        Notes what this tick says. `containers` gets what the ends name.
        """
        if not accounted and not self._pasts:
            return None
        self._begin_ns = covered.begin_ns if self._begin_ns is None else self._begin_ns
        places = {one.uuid: place for place, one in enumerate(gpus)}
        self._note(covered, gpus, places, processes, accounted)
        due = self._take_due(covered, places)
        ends = [
            end
            for uuid, place in places.items()
            if uuid in due
            for end in self._end(place, self._pasts[uuid], due[uuid], covered, containers)
        ]
        return ends or None

    def _note(
        self,
        covered: TickInterval,
        gpus: Sequence[GpuReading],
        places: Mapping[str, int],
        processes: Sequence[GpuProcess],
        accounted: Collection[str],
    ) -> None:
        on = by_gpu(processes)
        for uuid in {*self._pasts, *(accounted & places.keys())}:
            past, place = self._pasts.setdefault(uuid, GpuHistory()), places.get(uuid)
            if place is None:
                past.note(covered, None, [])
            else:
                reading = None if gpus[place].mig_enabled else gpus[place]
                past.note(covered, reading, on.get(place, []))

    def _take_due(
        self, covered: TickInterval, places: Mapping[str, int]
    ) -> Mapping[str, list[tuple[ExitedProcess, ProcessInterval]]]:
        """Return, by GPU, the ends that ticks cover; one waits for its GPU, but not for ever."""
        due: dict[str, list[tuple[ExitedProcess, ProcessInterval]]] = {}
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            uuid, age_ns = one[0].totals.gpu_uuid, covered.end_ns - one[1].end_ns
            if age_ns >= 0 and uuid in places:
                due.setdefault(uuid, []).append(one)
            elif age_ns <= WINDOW_SECONDS * _NS:
                self._waiting.append(one)
            else:
                ENDS_UNTOLD.labels(reason="gpu_gone").inc()
        return due

    def _reason_to_drop(self, one: ExitedProcess, stay: ProcessInterval | None) -> str | None:
        if one.facts.started_boottime_ns is None:
            return "unidentified"
        if stay is None:
            return "undated"
        if self._begin_ns is None or stay.begin_ns + _WINDOW_NS < self._begin_ns:
            return "older"
        return "too_many" if len(self._waiting) >= _MAX_WAITING else None

    def _end(
        self,
        place: int,
        past: GpuHistory,
        here: Sequence[tuple[ExitedProcess, ProcessInterval]],
        covered: TickInterval,
        containers: Containers,
    ) -> list[ProcessExit]:
        """Return the ends on one GPU; they share what is nobody's there."""
        told = [past.pop_ticked(_key(one)) for one, _ in here]
        stays = [
            stay._replace(untold_seconds=max(0.0, stay.untold_seconds - seconds))
            for (_, stay), (seconds, _) in zip(here, told, strict=True)
        ]
        parts = zip(here, told, stays, past.set_aside(stays), strict=True)
        return [
            _process_end(
                one,
                gpu=place,
                container=containers.place(one.facts.location),
                ticked_seconds=seconds,
                unclaimed_seconds=unclaimed,
                met=_in_order(first, *past.met(stay)) or [covered],
            )
            for (one, _), (seconds, first), stay, unclaimed in parts
        ]


def _stay_of(closed: ExitedProcess) -> ProcessInterval | None:
    """Return the time on the GPU, a sampling window around it included."""
    totals, opened_ns = closed.totals, closed.opened_boottime_ns
    if opened_ns is None or totals.lifetime_seconds is None or totals.busy_seconds is None:
        return None
    closed_ns = opened_ns + round(totals.lifetime_seconds * _NS)
    return ProcessInterval(opened_ns - _WINDOW_NS, closed_ns + _WINDOW_NS, totals.busy_seconds)


def _in_order(*ticks: TickInterval | None) -> list[TickInterval]:
    return sorted([one for one in ticks if one], key=attrgetter("seq"))


def _key(closed: ExitedProcess) -> tuple[int, int]:
    return closed.pid, closed.facts.started_boottime_ns or 0


def _process_end(
    closed: ExitedProcess,
    *,
    gpu: int,
    container: int | None,
    ticked_seconds: float,
    unclaimed_seconds: float,
    met: Sequence[TickInterval],
) -> ProcessExit:
    return ProcessExit(
        gpu=gpu,
        pid=closed.pid,
        started_boottime_ns=closed.facts.started_boottime_ns or 0,
        container=container,
        lifetime_seconds=closed.totals.lifetime_seconds or 0.0,
        busy_seconds=closed.totals.busy_seconds or 0.0,
        # Sums and differences of shares of time may be a hair below zero, in floating point.
        sampled_busy_seconds=max(0.0, ticked_seconds),
        reserved_busy_seconds=max(0.0, unclaimed_seconds),
        from_seq=met[0].seq,
        from_time_ns=met[0].from_time_ns,
        until_seq=met[-1].seq,
        until_time_ns=met[-1].time_ns,
    )
