"""One tick of one node: the GPUs' answers in, the node's sample and its process records out.

Here the parts of a tick are put together. It waits for nothing: who asks the GPUs, and when, is
decided elsewhere.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from agent.core.raw import RawGpuSample, SampleCursor
from agent.metrics import PROCESS_SAMPLES_DROPPED, READINGS_DROPPED, TICKS
from agent.normalize.details import read_beside
from agent.normalize.driver_clock import LAG_WINDOWS
from agent.normalize.gpu import GpuState, GpuTick, read_gpu
from agent.normalize.rows import (
    find_relayouted,
    find_vanished,
    flatten,
    gpu_instances_of,
    layout_of,
)
from agent.normalize.set_back import SetBack
from agent.processes.history import TickInterval
from agent.processes.procfs import Procfs, read_boot_id
from agent.processes.table import TableUpdate
from agent.processes.tracker import ProcessTracker
from gpuledger.clock import Clock
from gpuledger.records import (
    DeviceAllocation,
    IncidentProcess,
    NodeReadings,
    NodeSample,
    ProcessRecord,
)
from gpuledger.records.bounds import MAX_INTERVAL_NS

_log = structlog.get_logger(__name__)
_NS_PER_MS: Final = 1_000_000
_NS_PER_US: Final = 1_000


@dataclass(frozen=True, kw_only=True)
class NodeTick:
    """What a node says of one tick."""

    sample: NodeSample
    """The readings from which it is booked, and what runs."""
    readings: NodeReadings
    """All other readings."""
    processes: list[ProcessRecord]
    """What happened to the processes."""
    cut_anew: Sequence[str] = ()
    """The GPUs whose MIG instances are not those of the tick before, by UUID."""


@dataclass(frozen=True, kw_only=True)
class ClockReading:
    """The clocks at one instant."""

    time_ns: int
    """Since the epoch."""
    monotonic_ns: int
    """Of the clock that is never set."""
    boottime_ns: int
    """Since boot."""

    @classmethod
    def read(cls, clock: Clock) -> "ClockReading":
        """Read all clocks."""
        return cls(
            time_ns=clock.time_ns(),
            monotonic_ns=clock.monotonic_ns(),
            boottime_ns=clock.boottime_ns(),
        )


class Sampler:
    """Makes the ticks of one node, one after the other."""

    def __init__(self, *, node: str, procfs: Procfs, reads_processes: bool = True) -> None:
        """With `reads_processes` off, ticks name no process and no container."""
        self._node = node
        self.boot_id = read_boot_id(procfs)
        """The kernel's id of this boot."""
        self._census = ProcessTracker(
            node=node, boot_id=self.boot_id, procfs=procfs, reads_processes=reads_processes
        )
        self._states: Mapping[str, GpuState] = {}
        self._layout: Mapping[str, frozenset[str]] = {}
        self._gpu_instances: Mapping[str, int] = {}
        self._cut_anew: list[str] = []
        self._before: ClockReading | None = None
        self._health_before: Mapping[str, Mapping[str, Any]] = {}
        self._seq = 0
        self._lag_ns: int | None = None
        self._set_back = SetBack()

    @property
    def reads_processes(self) -> bool:
        """Whether ticks name processes."""
        return self._census.reads_processes

    def last_seen(self) -> Mapping[str, SampleCursor]:
        """Return, by UUID, what the next question must start from; a GPU not named starts anew."""
        return {uuid: state.last_seen for uuid, state in self._states.items()}

    def forget(self) -> None:
        """Begin anew after answers of which no tick could be made; only counters are kept."""
        self._states = {uuid: state.forget() for uuid, state in self._states.items()}

    def processes_on(self, gpu_uuid: str, gpu_instance: int | None) -> list[IncidentProcess]:
        """Return who was on a GPU at the last tick, on all its instances or on that one alone."""
        instances = self._layout.get(gpu_uuid, frozenset())
        hit = {uuid for uuid in instances if self._gpu_instances.get(uuid, -1) == gpu_instance}
        # Where the instance is not known, everybody on the GPU may be meant.
        return self._census.on(hit or {gpu_uuid, *instances})

    def see(self, pids: Iterable[int], *, seen_boottime_ns: int) -> None:
        """Look up who is new on the GPUs between two ticks: at the next one it may be gone."""
        self._census.see(pids, seen_boottime_ns=seen_boottime_ns)

    def sample(
        self,
        answers: Sequence[RawGpuSample],
        *,
        asked_boottime_ns: int,
        at: ClockReading,
        allocations: Sequence[DeviceAllocation] = (),
        late: bool = False,
    ) -> NodeTick | None:
        """Make the tick that ends `at`; the first call only opens the first interval.

        So does one behind an interval that is too long to be told. `late` says that it began more
        than half a tick after its time. `asked_boottime_ns` is when the GPUs were asked: a process
        that started later cannot be the one that they listed under its pid.
        """
        before, self._before = self._follow(at), at
        answers = self._with_health(answers, is_told=before is not None)
        interval_ns = max(1, at.monotonic_ns - before.monotonic_ns) if before else 1
        self._set_back.follow(time_ns=at.time_ns, boottime_ns=at.boottime_ns)
        ticks = self._read(answers, interval_ns=interval_ns, at=at)
        vanished = self._follow_layout(answers)
        self._keep(ticks, vanished)
        roll = self._census.call(
            ticks,
            vanished,
            asked_boottime_ns=asked_boottime_ns,
            time_ns=at.time_ns,
            boottime_ns=at.boottime_ns,
        )
        if not before:
            return None
        return self._tick(ticks, roll, at, interval_ns, allocations=allocations, late=late)

    def _follow(self, at: ClockReading) -> ClockReading | None:
        """Return where the interval begins that ends now; `None` where a first one opens.

        One that is longer than a record may say is given up: what the GPUs did in it is not told.
        """
        before = self._before
        if before is None or at.monotonic_ns - before.monotonic_ns <= MAX_INTERVAL_NS:
            return before
        _log.warning(
            "interval_dropped", interval_seconds=(at.monotonic_ns - before.monotonic_ns) / 1e9
        )
        self.forget()
        return None

    def _with_health(
        self, answers: Sequence[RawGpuSample], *, is_told: bool
    ) -> Sequence[RawGpuSample]:
        """Bring the health of answers that make no tick into the next tick: it is asked rarely."""
        kept, self._health_before = self._health_before, {}
        if not is_told:
            self._health_before = {one.uuid: one.health for one in answers}
        if not kept:
            return answers
        return [replace(one, health=one.health or kept.get(one.uuid, {})) for one in answers]

    def _read(
        self, answers: Sequence[RawGpuSample], *, interval_ns: int, at: ClockReading
    ) -> Sequence[GpuTick]:
        behind_us = at.time_ns // _NS_PER_US if self._set_back.shows else None
        ticks = [
            read_gpu(
                answer,
                self._states.get(answer.uuid),
                interval_ns=interval_ns,
                now_ns=at.monotonic_ns,
                behind_us=behind_us,
            )
            for answer in flatten(answers)
        ]
        _count_dropped(ticks)
        return ticks

    def _follow_layout(self, answers: Sequence[RawGpuSample]) -> Collection[str]:
        """Take note of which instances there are; return those that are gone."""
        vanished = find_vanished(self._layout, answers)
        self._cut_anew += find_relayouted(self._layout, answers)
        self._layout = {**self._layout, **layout_of(answers)}
        self._gpu_instances = gpu_instances_of(answers)
        return vanished

    def _keep(self, ticks: Sequence[GpuTick], vanished: Collection[str]) -> None:
        """Keep what the next tick must know.

        Of a GPU that did not answer only the counters are kept, so that their falls are seen: what
        it says next covers more than one interval.
        """
        silent = {
            uuid: state.forget()
            for uuid, state in self._states.items()
            if state.totals and uuid not in vanished
        }
        self._states = silent | {tick.reading.uuid: tick.state for tick in ticks}
        if self._lag_ns is None:
            # Found once and kept, so that each tick begins where the one before ended.
            self._lag_ns = _lag_ns(ticks)

    def _tick(
        self,
        ticks: Sequence[GpuTick],
        roll: TableUpdate,
        at: ClockReading,
        interval_ns: int,
        *,
        allocations: Sequence[DeviceAllocation],
        late: bool,
    ) -> NodeTick:
        self._seq = max(at.boottime_ns // _NS_PER_MS, self._seq + 1)
        lag_ns = self._lag_ns or 0
        covered = TickInterval(
            seq=self._seq,
            begin_ns=at.boottime_ns - lag_ns - interval_ns,
            end_ns=at.boottime_ns - lag_ns,
            time_ns=at.time_ns - lag_ns,
        )
        counted = self._census.describe(ticks, roll, covered)
        TICKS.inc()
        sample = NodeSample(
            node=self._node,
            boot_id=self.boot_id,
            seq=self._seq,
            time_ns=covered.time_ns,
            interval_ns=interval_ns,
            late=True if late else None,
            gpus=[tick.reading for tick in ticks],
            containers=counted.containers,
            processes=counted.processes,
            allocations=list(allocations),
            ended_processes=counted.ended_processes,
        )
        cut_anew, self._cut_anew = self._cut_anew, []
        return NodeTick(
            sample=sample,
            readings=read_beside(sample, ticks),
            processes=self._census.drain(),
            cut_anew=cut_anew,
        )


def _lag_ns(ticks: Sequence[GpuTick]) -> int | None:
    """Return how far the covered time ends before the question, by the longest windows."""
    windows_us = [tick.state.gpu_window_us for tick in ticks if tick.state.gpu_window_us]
    return round(LAG_WINDOWS * max(windows_us) * _NS_PER_US) if windows_us else None


def _count_dropped(ticks: Sequence[GpuTick]) -> None:
    for tick in ticks:
        for (reading, reason), count in tick.dropped_readings.items():
            READINGS_DROPPED.labels(reading=reading, reason=reason).inc(count)
        for reason, count in tick.dropped_samples.items():
            PROCESS_SAMPLES_DROPPED.labels(reason=reason).inc(count)
