"""Turns the answers of one node's GPUs into ticks; it never waits for a GPU or a network.

This module combines the state machines of each GPU and MIG instance
(`gpuledger_agent.core.gpu_sampler`), of the clocks (`gpuledger_agent.core.tick_clock`) and of the
processes (`gpuledger_agent.core.processes`):

    begin_tick ──▶ query all GPUs (`gpuledger_agent.loop`) ──▶ sample ──▶ fast polls ──▶ begin_tick
                   late fast polls: their energy                (`take_fast_polls`)

The first call of `sample` only starts an interval and makes no tick. So does a call after an
interval that was too long to report.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog
from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND, NS_PER_US
from gpuledger.keys import NodeId
from gpuledger.records import (
    BusyMethod,
    DeviceAllocation,
    GpuProcess,
    GpuReading,
    IncidentProcess,
    JobAllocation,
    NodeSample,
)
from gpuledger.records.bounds import MAX_INTERVAL_NS
from gpuledger_agent.core.fast_polls import OthersScope
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick
from gpuledger_agent.core.normalize.windows import USUAL_WINDOW_US
from gpuledger_agent.core.processes.table import TableUpdate
from gpuledger_agent.core.processes.tracker import ProcessTracker
from gpuledger_agent.core.raw import (
    ClockReading,
    FastPoll,
    RawGpuSample,
    SampleCursor,
    read_at,
)
from gpuledger_agent.core.tick import NodeTick, flatten, read_details, without_measurements
from gpuledger_agent.core.tick_clock import TickClock, TickInterval
from gpuledger_agent.host.procfs import ProcessReader, Procfs, read_boot_id, read_memory_bytes
from gpuledger_agent.metrics import (
    ACCOUNTS_LATE,
    EXITS_UNREPORTED,
    PROCESS_SAMPLES_DROPPED,
    PROCESSES_UNREADABLE,
    READINGS_DROPPED,
    TICKS,
)

_log = structlog.get_logger(__name__)


class Sampler:
    """Makes one node's ticks from the answers of its GPUs, one tick after the other."""

    def __init__(self, *, node: NodeId, procfs: Procfs, reads_processes: bool = True) -> None:
        """Create the sampler; without `reads_processes`, ticks have no processes or containers.

        Raise `OSError` if the boot id cannot be read.
        """
        self._node = node
        self.boot_id = read_boot_id(procfs)
        """The kernel's id of this boot."""
        self.reads_processes = reads_processes
        """Whether ticks contain processes."""
        self._tracker = ProcessTracker(
            node=node,
            boot_id=self.boot_id,
            processes=ProcessReader(procfs),
            reads_processes=reads_processes,
        )
        self._gpus: dict[str, GpuSampler] = {}
        """The GPUs and MIG instances, by UUID."""
        self._clock = TickClock()
        self._is_querying = False
        """Whether a tick's query has begun and its answers have not arrived yet."""
        self._relayouted: list[str] = []
        self._procfs = procfs
        self._memory_bytes: int | None = None
        """The size of the machine's memory; read when a GPU first needs it."""

    @property
    def unlisted_gpus(self) -> Sequence[str]:
        """UUIDs of the GPUs and instances whose processes the driver refuses to list."""
        return sorted(uuid for uuid, gpu in self._gpus.items() if gpu.last.is_list_refused)

    @property
    def shows_no_cgroups(self) -> bool:
        """Whether there are readable processes on GPUs, and all of them are in the root cgroup."""
        return self._tracker.shows_no_cgroups

    @property
    def lag_ns(self) -> int:
        """Time between the end of a tick's interval and the tick's query, in nanoseconds."""
        return self._clock.lag_ns

    def processes_on(self, gpu_uuid: str, gpu_instance: int | None) -> list[IncidentProcess]:
        """Return the processes on a GPU, or on one of its instances, at the last tick.

        If the instance is unknown, return all processes on the GPU.
        """
        gpu = self._gpus.get(gpu_uuid)
        instances = (gpu and gpu.instances) or ()
        rows = [row for uuid in instances if (row := self._gpus[uuid].reading)]
        meant = {row.uuid for row in rows if gpu_instance in {row.gpu_instance} - {None}}
        return self._tracker.processes_on(meant or {gpu_uuid, *instances})

    # Between two ticks.

    def watched_closely(self, now_ns: int) -> frozenset[str]:
        """Return the UUIDs of the GPUs that need frequent fast polls."""
        return frozenset(uuid for uuid, gpu in self._gpus.items() if gpu.is_watched_closely(now_ns))

    def fast_poll_cursors(
        self, others: OthersScope, *, now_ns: int, accounting_gpus: frozenset[str] = frozenset()
    ) -> Mapping[str, SampleCursor | None]:
        """Return the GPUs to poll now, by UUID, each with its position in the driver's samples.

        `None` instead of a position means that only energy is read. `others` is the scope for GPUs
        that are not watched closely. `accounting_gpus` are GPUs for which the driver keeps process
        accounting. They are watched closely, because an accounting entry can be attributed only if
        a poll has listed its process.
        """
        boards = {uuid: gpu for uuid, gpu in self._gpus.items() if gpu.instances is not None}
        if self._clock.is_set_back:
            # Until ticks have found out which clock the driver's stamps use, poll only the energy,
            # which has no stamp.
            return {} if others is OthersScope.NOTHING else dict.fromkeys(boards)
        closely = self.watched_closely(now_ns) | accounting_gpus
        cursors: dict[str, SampleCursor | None] = {}
        for uuid, gpu in boards.items():
            if others is OthersScope.ALL or uuid in closely:
                cursors[uuid] = gpu.cursor(is_set_back=False)
            elif others is OthersScope.ENERGY:
                cursors[uuid] = None
        return cursors

    def take_fast_polls(self, polls: Sequence[FastPoll]) -> None:
        """Store answers to fast polls, including late ones that arrive during a tick's query."""
        in_time = []
        for poll in polls:
            gpu = self._gpus.get(poll.uuid)
            if gpu is None:
                continue
            if poll.failed:
                gpu.drop_polled()
            elif gpu.take(poll, is_querying=self._is_querying):
                in_time.append(poll)
        # The process lists of polls in time show which processes run now.
        self._tracker.observe(in_time)

    def drop_fast_polls(self) -> None:
        """Drop the data of all fast polls after a failure; the next tick queries the data again."""
        self._is_querying = False
        for gpu in self._gpus.values():
            gpu.drop_polled()

    # A tick.

    def begin_tick(self) -> Mapping[str, SampleCursor]:
        """Begin a tick; return the position from which to query each GPU's samples, by UUID.

        GPUs that have not answered before have no position.
        """
        self._is_querying = True
        is_set_back = self._clock.is_set_back
        return {uuid: gpu.request_tick(is_set_back=is_set_back) for uuid, gpu in self._gpus.items()}

    def forget(self) -> None:
        """Forget the GPUs' state except their counters.

        Call it after a failed tick, or after an interval that was too long to report.
        """
        self._is_querying = False
        for gpu in self._gpus.values():
            gpu.forget()

    def sample(
        self,
        raw: Sequence[RawGpuSample],
        *,
        at: ClockReading,
        allocations: Sequence[DeviceAllocation] = (),
        allocations_unknown: bool = False,
        job_allocations: Sequence[JobAllocation] = (),
        known: Collection[str] = (),
        late: bool = False,
    ) -> NodeTick | None:
        """Return the tick that ends at `at`; `None` if the call only starts an interval.

        The first call only starts an interval, and so does a call after an interval that was too
        long to report. `raw` are the answers of the GPUs that answered, and `at` is the time of the
        query. A process that started after the GPUs listed their processes cannot be the process
        that they listed under its pid. `known` contains the UUIDs of the node's GPUs. Known GPUs
        that did not answer are in the tick as unresponsive, with the MIG instances of their last
        answer. `late` is whether the tick began late by more than half an interval.
        """
        self._is_querying = False
        length_ns = self._clock.follow(at)
        if length_ns and length_ns > MAX_INTERVAL_NS:
            # Longer than a record allows: the GPUs' use in this interval is lost.
            _log.warning("interval_dropped", interval_seconds=length_ns / NS_PER_SECOND)
            self.forget()
            length_ns = None
        rows = flatten(raw)
        ticks = [self._tick_gpu(row, at, length_ns) for row in rows]
        vanished = self._take_layout(raw)
        unresponsive = self._silence({row.uuid for row in rows}, known)
        gpus = [self._gpus[tick.reading.uuid] for tick in ticks if tick.last.clock]
        self._clock.learn_lag(
            [(gpu.window.is_confirmed and gpu.window.length_us) or USUAL_WINDOW_US for gpu in gpus]
        )
        # A slow driver lists the processes long after the query began.
        listed_ns = (row.listed.answered_ns for row in rows if row.listed)
        listed_at = read_at(at, min(listed_ns, default=at.monotonic_ns))
        table_update = self._tracker.refresh(
            ticks,
            vanished,
            time_ns=at.time_ns,
            boottime_ns=at.boottime_ns,
            listed_boottime_ns=listed_at.boottime_ns,
        )
        # All state is updated even without a tick, because the next tick needs it.
        tick = None
        if length_ns:
            tick = self._make_tick(
                ticks,
                table_update,
                self._clock.interval(at, length_ns),
                unresponsive=unresponsive,
                allocations=allocations,
                allocations_unknown=allocations_unknown,
                job_allocations=job_allocations,
                late=late,
            )
            TICKS.inc()
        self._count(ticks)
        return tick

    def _tick_gpu(self, row: RawGpuSample, at: ClockReading, length_ns: int | None) -> GpuTick:
        if row.memory_unified:
            # A GPU without memory of its own uses the machine's memory.
            if self._memory_bytes is None:
                self._memory_bytes = read_memory_bytes(self._procfs)
            row = replace(row, memory_total_bytes=self._memory_bytes)
        gpu = self._gpus.setdefault(row.uuid, GpuSampler())
        return gpu.tick(
            row,
            at=at,
            interval_ns=length_ns or 1,
            set_back_now_us=at.time_ns // NS_PER_US if self._clock.is_set_back else None,
            is_reported=length_ns is not None,
        )

    def _take_layout(self, raw: Iterable[RawGpuSample]) -> Collection[str]:
        """Update the instances of the GPUs that answered; return the instances that are gone.

        A GPU that did not answer keeps its instances, because its new layout is unknown.
        """
        vanished: set[str] = set()
        for board in raw:
            gpu = self._gpus[board.uuid]
            found = tuple(instance.uuid for instance in board.instances)
            before, gpu.instances = gpu.instances, found
            if before is not None and set(before) != set(found):
                self._relayouted.append(board.uuid)
                vanished.update(set(before) - set(found))
        for uuid in vanished:
            del self._gpus[uuid]
        return vanished

    def _silence(self, answered: Collection[str], known: Collection[str]) -> list[GpuReading]:
        """Reset the GPUs that did not answer; return a row for each of them that is in `known`.

        The rows have no measurements and only show which devices exist. A GPU's counters are kept,
        so that their reset is detected. A GPU that has no counters and is not in `known` is
        forgotten.
        """
        for uuid, gpu in list(self._gpus.items()):
            if uuid in answered:
                continue
            gpu.forget()
            board = (gpu.reading and gpu.reading.parent_uuid) or uuid
            is_kept = gpu.totals or gpu.energy or board in known
            if not is_kept and (board == uuid or board not in self._gpus):
                del self._gpus[uuid]
        unresponsive = [
            uuid
            for uuid, gpu in self._gpus.items()
            if gpu.instances is not None and uuid in known and uuid not in answered
        ]
        return [
            without_measurements(reading)
            for board in unresponsive
            for uuid in (board, *(self._gpus[board].instances or ()))
            if (reading := self._gpus[uuid].reading)
        ]

    def _make_tick(
        self,
        ticks: Sequence[GpuTick],
        table_update: TableUpdate,
        covered: TickInterval,
        *,
        unresponsive: Sequence[GpuReading],
        allocations: Sequence[DeviceAllocation],
        allocations_unknown: bool,
        job_allocations: Sequence[JobAllocation],
        late: bool,
    ) -> NodeTick:
        found = self._tracker.describe(ticks, table_update, covered)
        self._follow_sharing(ticks, found.processes)
        readings = [tick.reading for tick in ticks]
        for place in found.reused_pid_gpus:
            if readings[place].busy_method is None:
                readings[place] = replace(readings[place], busy_method=BusyMethod.PARTIAL_SAMPLES)
        for place in found.mps_served_gpus:
            readings[place] = replace(readings[place], busy_method=BusyMethod.MPS_SERVER)
        sample = NodeSample(
            cluster=self._node.cluster,
            node=self._node.node,
            boot_id=self.boot_id,
            seq=covered.seq,
            time_ns=covered.time_ns,
            interval_ns=covered.length_ns,
            late=True if late else None,
            # Unresponsive GPUs come last, because processes refer to GPUs by position.
            gpus=[*readings, *unresponsive],
            containers=found.containers,
            processes=found.processes,
            allocations=list(allocations),
            allocations_unknown=allocations_unknown or None,
            ended_processes=found.ended_processes,
            job_allocations=list(job_allocations) or None,
        )
        relayouted, self._relayouted = self._relayouted, []
        return NodeTick(
            sample=sample,
            readings=read_details(sample, ticks),
            processes=found.records,
            relayouted=relayouted,
            boot_time_ns=covered.time_ns - covered.end_ns,
        )

    def _follow_sharing(self, ticks: Sequence[GpuTick], processes: Iterable[GpuProcess]) -> None:
        """Record which GPUs are shared: by several containers, or by containers and the host."""
        on: defaultdict[int, set[int | None]] = defaultdict(set)
        for process in processes:
            on[process.gpu].add(process.container)
        for place, tick in enumerate(ticks):
            self._gpus[tick.reading.uuid].is_shared = len(on.get(place, ())) > 1

    def _count(self, ticks: Sequence[GpuTick]) -> None:
        """Add the numbers of dropped values, which the core only returns, to the metrics."""
        for tick in ticks:
            for (reading, reason), count in tick.dropped_readings.items():
                READINGS_DROPPED.labels(reading=reading, reason=reason).inc(count)
            for reason, count in tick.dropped_samples.items():
                PROCESS_SAMPLES_DROPPED.labels(reason=reason).inc(count)
        counts = self._tracker.pop_counts()
        PROCESSES_UNREADABLE.inc(counts.unreadable)
        ACCOUNTS_LATE.inc(counts.accounts_late)
        for reason, count in counts.exits_unreported.items():
            EXITS_UNREPORTED.labels(reason=reason).inc(count)
