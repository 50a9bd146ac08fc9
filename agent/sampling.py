"""One tick of one node: the GPUs' answers in, the node's sample and its process records out.

Here the parts of a tick are put together. It waits for nothing: who asks the GPUs, and when, is
decided in `loop`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from agent.core.normalize.driver_clock import LAG_WINDOWS, SetBack
from agent.core.normalize.gpu import GpuState, GpuTick, read_gpu
from agent.core.processes.table import TableUpdate
from agent.core.processes.tracker import ProcessTracker
from agent.core.raw import RawGpuSample, SampleCursor
from agent.core.tick import (
    ClockReading,
    NodeTick,
    TickInterval,
    by_board,
    find_relayouted,
    find_vanished,
    flatten,
    gpu_instances_of,
    layout_of,
    read_details,
    silence,
)
from agent.host.procfs import ProcessReader, Procfs, read_boot_id
from agent.metrics import (
    ACCOUNTS_LATE,
    EXITS_UNREPORTED,
    PROCESS_SAMPLES_DROPPED,
    PROCESSES_UNREADABLE,
    READINGS_DROPPED,
    TICKS,
)
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, NS_PER_US
from gpuledger.keys import NodeId
from gpuledger.records import DeviceAllocation, GpuReading, IncidentProcess, NodeSample
from gpuledger.records.bounds import MAX_INTERVAL_NS

_log = structlog.get_logger(__name__)


class Sampler:
    """Makes the ticks of one node, one after the other."""

    def __init__(self, *, node: NodeId, procfs: Procfs, reads_processes: bool = True) -> None:
        """With `reads_processes` off, ticks name no process and no container."""
        self._node = node
        self.boot_id = read_boot_id(procfs)
        """The kernel's id of this boot."""
        self._tracker = ProcessTracker(
            node=node,
            boot_id=self.boot_id,
            processes=ProcessReader(procfs),
            reads_processes=reads_processes,
        )
        self._states: Mapping[str, GpuState] = {}
        self._rows: Mapping[str, Sequence[GpuReading]] = {}
        """By GPU, the last rows of those that answered or are known."""
        self._layout: Mapping[str, frozenset[str]] = {}
        self._gpu_instances: Mapping[str, int] = {}
        self._relayouted: list[str] = []
        self._before: ClockReading | None = None
        self._health_before: Mapping[str, Mapping[str, Any]] = {}
        self._seq = 0
        self._lag_ns: int | None = None
        self._set_back = SetBack()

    @property
    def reads_processes(self) -> bool:
        """Whether ticks name processes."""
        return self._tracker.reads_processes

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
        return self._tracker.processes_on(hit or {gpu_uuid, *instances})

    def record_seen(self, pids: Iterable[int], *, seen_boottime_ns: int) -> None:
        """Look up who is new on the GPUs between two ticks: at the next one it may be gone."""
        self._tracker.record_seen(pids, seen_boottime_ns=seen_boottime_ns)

    def sample(
        self,
        raw: Sequence[RawGpuSample],
        *,
        at: ClockReading,
        allocations: Sequence[DeviceAllocation] = (),
        known: Collection[str] = (),
        late: bool = False,
    ) -> NodeTick | None:
        """Make the tick that ends `at`; the first call only opens the first interval.

        So does one behind an interval that is too long to be reported. `late` says that it began
        more than half a tick after its time. Of the `known` GPUs, by UUID, those that did not
        answer stand in the tick as silent, as they were when they answered last. `at` is when the
        GPUs were queried: a process that started later cannot be the one that they listed under its
        pid.
        """
        before, self._before = self._interval_start(at), at
        raw = self._with_health(raw, is_reported=before is not None)
        interval_ns = max(1, at.monotonic_ns - before.monotonic_ns) if before else 1
        self._set_back.follow(time_ns=at.time_ns, boottime_ns=at.boottime_ns)
        set_back_now_us = at.time_ns // NS_PER_US if self._set_back.is_recent else None
        ticks = [
            read_gpu(
                gpu,
                self._states.get(gpu.uuid),
                interval_ns=interval_ns,
                now_ns=at.monotonic_ns,
                set_back_now_us=set_back_now_us,
            )
            for gpu in flatten(raw)
        ]
        # Before the layout is replaced: both compare what was with what is.
        vanished = find_vanished(self._layout, raw)
        self._relayouted += find_relayouted(self._layout, raw)
        self._layout = {**self._layout, **layout_of(raw)}
        self._gpu_instances = gpu_instances_of(raw)
        self._remember(ticks, vanished)
        table_update = self._tracker.refresh(
            ticks,
            vanished,
            time_ns=at.time_ns,
            boottime_ns=at.boottime_ns,
        )
        answered = by_board(tick.reading for tick in ticks)
        silent = [
            silence(row)
            for uuid, rows in self._rows.items()
            if uuid in known and uuid not in answered
            for row in rows
        ]
        self._rows = {
            **{uuid: rows for uuid, rows in self._rows.items() if uuid in known},
            **answered,
        }
        # The table of processes was brought up to date in any case: the next tick needs it.
        tick = None
        if before:
            tick = self._tick(
                ticks,
                table_update,
                at,
                interval_ns,
                silent=silent,
                allocations=allocations,
                late=late,
            )
            TICKS.inc()
        self._count(ticks)
        return tick

    def _interval_start(self, at: ClockReading) -> ClockReading | None:
        """Return where the interval begins that ends now; `None` where a first one opens.

        One that is longer than a record may say is given up, and what the GPUs did in it with it.
        """
        before = self._before
        if before is None or at.monotonic_ns - before.monotonic_ns <= MAX_INTERVAL_NS:
            return before
        _log.warning(
            "interval_dropped",
            interval_seconds=(at.monotonic_ns - before.monotonic_ns) / NS_PER_SECOND,
        )
        self.forget()
        return None

    def _with_health(
        self, raw: Sequence[RawGpuSample], *, is_reported: bool
    ) -> Sequence[RawGpuSample]:
        """Bring the health of answers that make no tick into the next tick: it is asked rarely."""
        kept, self._health_before = self._health_before, {}
        if not is_reported:
            self._health_before = {gpu.uuid: gpu.health for gpu in raw}
        if not kept:
            return raw
        return [replace(gpu, health=gpu.health or kept.get(gpu.uuid, {})) for gpu in raw]

    def _remember(self, ticks: Sequence[GpuTick], vanished: Collection[str]) -> None:
        """Remember what the next tick must know.

        Of a GPU that did not answer only the counters are kept, so that their falls are seen, and
        its idle draw: what it says next covers more than one interval.
        """
        silent = {
            uuid: state.forget()
            for uuid, state in self._states.items()
            if (state.totals or state.energy) and uuid not in vanished
        }
        self._states = silent | {tick.reading.uuid: tick.state for tick in ticks}
        windows_us = [tick.state.gpu_window_us for tick in ticks if tick.state.gpu_window_us]
        if self._lag_ns is None and windows_us:
            # Found once and kept, so that each tick begins where the one before ended.
            self._lag_ns = round(LAG_WINDOWS * max(windows_us) * NS_PER_US)

    def _tick(
        self,
        ticks: Sequence[GpuTick],
        table_update: TableUpdate,
        at: ClockReading,
        interval_ns: int,
        *,
        silent: Sequence[GpuReading],
        allocations: Sequence[DeviceAllocation],
        late: bool,
    ) -> NodeTick:
        # Milliseconds since boot, but never the same twice, whatever a clock does.
        self._seq = max(at.boottime_ns // NS_PER_MS, self._seq + 1)
        lag_ns = self._lag_ns or 0
        covered = TickInterval(
            seq=self._seq,
            begin_ns=at.boottime_ns - lag_ns - interval_ns,
            end_ns=at.boottime_ns - lag_ns,
            time_ns=at.time_ns - lag_ns,
        )
        found = self._tracker.describe(ticks, table_update, covered)
        sample = NodeSample(
            cluster=self._node.cluster,
            node=self._node.node,
            boot_id=self.boot_id,
            seq=self._seq,
            time_ns=covered.time_ns,
            interval_ns=interval_ns,
            late=True if late else None,
            # Last, as the processes go by the positions of the GPUs that answered.
            gpus=[*(tick.reading for tick in ticks), *silent],
            containers=found.containers,
            processes=found.processes,
            allocations=list(allocations),
            ended_processes=found.ended_processes,
        )
        relayouted, self._relayouted = self._relayouted, []
        return NodeTick(
            sample=sample,
            readings=read_details(sample, ticks),
            processes=self._tracker.drain(),
            relayouted=relayouted,
        )

    def _count(self, ticks: Sequence[GpuTick]) -> None:
        """Count what was left out: the core only returns it."""
        for tick in ticks:
            for (reading, reason), count in tick.dropped_readings.items():
                READINGS_DROPPED.labels(reading=reading, reason=reason).inc(count)
            for reason, count in tick.dropped_samples.items():
                PROCESS_SAMPLES_DROPPED.labels(reason=reason).inc(count)
        counts = self._tracker.drain_counts()
        PROCESSES_UNREADABLE.inc(counts.unreadable)
        ACCOUNTS_LATE.inc(counts.accounts_late)
        for reason, count in counts.exits_unreported.items():
            EXITS_UNREPORTED.labels(reason=reason).inc(count)
