"""One node, from what its GPUs answered to its ticks; it waits for nothing.

This module combines the state machines of each GPU and MIG instance
(`gpuledger_agent.core.gpu_sampler`), of the clocks (`gpuledger_agent.core.tick_clock`) and of the
processes (`gpuledger_agent.core.processes`):

    begin_tick ──▶ query all GPUs (`gpuledger_agent.loop`) ──▶ sample ──▶ fast polls ──▶ begin_tick
                   late fast polls: their energy                (`take_fast_polls`)

`sample` opens the first interval without a tick; so it does behind one that is too long to report.
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
from gpuledger_agent.core.raw import ClockReading, FastPoll, RawGpuSample, SampleCursor
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
    """Makes the ticks of one node, one after the other."""

    def __init__(self, *, node: NodeId, procfs: Procfs, reads_processes: bool = True) -> None:
        """With `reads_processes` off, ticks name no process and no container."""
        self._node = node
        self.boot_id = read_boot_id(procfs)
        """The kernel's id of this boot."""
        self.reads_processes = reads_processes
        """Whether ticks name processes."""
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
        """Whether a tick's query has begun, and its answers are not there yet."""
        self._relayouted: list[str] = []
        self._procfs = procfs
        self._memory_bytes: int | None = None
        """The size of the machine's memory, once a GPU needed it."""

    @property
    def unlisted_gpus(self) -> Sequence[str]:
        """The GPUs and instances whose lists of processes the driver refuses, by UUID."""
        return sorted(uuid for uuid, gpu in self._gpus.items() if gpu.last.is_list_refused)

    @property
    def lag_ns(self) -> int:
        """How far behind the time of its answers a tick's interval ends."""
        return self._clock.lag_ns

    def processes_on(self, gpu_uuid: str, gpu_instance: int | None) -> list[IncidentProcess]:
        """Return the processes on a GPU, or on one GPU instance of it, at the last tick."""
        gpu = self._gpus.get(gpu_uuid)
        instances = (gpu and gpu.instances) or ()
        rows = [row for uuid in instances if (row := self._gpus[uuid].reading)]
        meant = {row.uuid for row in rows if gpu_instance in {row.gpu_instance} - {None}}
        # All of them if the instance is not known.
        return self._tracker.processes_on(meant or {gpu_uuid, *instances})

    # Between two ticks.

    def watched_closely(self, now_ns: int) -> frozenset[str]:
        """Return the GPUs on which processes come and go, or that are shared and need it."""
        return frozenset(uuid for uuid, gpu in self._gpus.items() if gpu.is_watched_closely(now_ns))

    def fast_poll_cursors(
        self, others: OthersScope, *, now_ns: int, accounting_gpus: frozenset[str] = frozenset()
    ) -> Mapping[str, SampleCursor | None]:
        """Return what to poll now, by UUID, each with its cursor; `None` for its energy alone.

        `accounting_gpus` are those whose driver keeps accounts of processes: the account of one has
        no owner unless the process was seen.
        """
        boards = {uuid: gpu for uuid, gpu in self._gpus.items() if gpu.instances is not None}
        if self._clock.is_set_back:
            # It is unknown of which of its clocks the driver's stamps are: the ticks find that out.
            # Energy bears no stamp.
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
        """Take in what GPUs answered between two ticks, or while a tick asked them itself."""
        in_time = []
        for poll in polls:
            gpu = self._gpus.get(poll.uuid)
            if gpu is None:
                continue
            if poll.failed:
                gpu.drop_polled()
            elif gpu.take(poll, is_querying=self._is_querying):
                in_time.append(poll)
        # Their lists show who is there now.
        self._tracker.observe(in_time)

    def drop_fast_polls(self) -> None:
        """Drop what fast polls told, after some that could not be used: ticks ask for it again."""
        self._is_querying = False
        for gpu in self._gpus.values():
            gpu.drop_polled()

    # A tick.

    def begin_tick(self) -> Mapping[str, SampleCursor]:
        """Return, by UUID, after which samples the next query begins; others have no cursor."""
        self._is_querying = True
        is_set_back = self._clock.is_set_back
        return {uuid: gpu.request_tick(is_set_back=is_set_back) for uuid, gpu in self._gpus.items()}

    def forget(self) -> None:
        """Forget all but the counters, after answers of which no tick could be made."""
        self._is_querying = False
        for gpu in self._gpus.values():
            gpu.forget()

    def sample(
        self,
        raw: Sequence[RawGpuSample],
        *,
        at: ClockReading,
        allocations: Sequence[DeviceAllocation] = (),
        job_allocations: Sequence[JobAllocation] = (),
        known: Collection[str] = (),
        late: bool = False,
    ) -> NodeTick | None:
        """Make the tick that ends `at`; `None` if that only opens the first interval.

        That is so at the first call, and after an interval that is too long to be reported. `at` is
        when the GPUs were queried: a process that started later cannot be the one that they listed
        under its pid. GPUs that are `known`, by UUID, and did not answer are in the tick as
        unresponsive, with the instances that they had when they answered last. `late` is whether
        the tick began more than half a tick after its time.
        """
        self._is_querying = False
        length_ns = self._clock.follow(at)
        if length_ns and length_ns > MAX_INTERVAL_NS:
            # Longer than a record may be: what the GPUs did in it is given up with it.
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
        table_update = self._tracker.refresh(
            ticks, vanished, time_ns=at.time_ns, boottime_ns=at.boottime_ns
        )
        # All state is brought up to date in any case: the next tick needs it.
        tick = None
        if length_ns:
            tick = self._make_tick(
                ticks,
                table_update,
                self._clock.interval(at, length_ns),
                unresponsive=unresponsive,
                allocations=allocations,
                job_allocations=job_allocations,
                late=late,
            )
            TICKS.inc()
        self._count(ticks)
        return tick

    def _tick_gpu(self, row: RawGpuSample, at: ClockReading, length_ns: int | None) -> GpuTick:
        if row.memory_unified:
            # One without memory of its own has the machine's.
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
        """Take over the instances of the GPUs that answered; return those that are gone.

        Of a GPU that did not answer its instances stay: whether it was cut anew is unknown.
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
        """Silence the GPUs that did not answer; return the rows of the known ones.

        Nothing is measured in these: they show which devices there are. One that is not known, and
        has no counter in which a reset could be seen, is forgotten.
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
        job_allocations: Sequence[JobAllocation],
        late: bool,
    ) -> NodeTick:
        found = self._tracker.describe(ticks, table_update, covered)
        self._follow_sharing(ticks, found.processes)
        readings = [tick.reading for tick in ticks]
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
            # Unresponsive ones last, as processes go by the positions of the GPUs that answered.
            gpus=[*readings, *unresponsive],
            containers=found.containers,
            processes=found.processes,
            allocations=list(allocations),
            ended_processes=found.ended_processes,
            job_allocations=list(job_allocations) or None,
        )
        relayouted, self._relayouted = self._relayouted, []
        return NodeTick(
            sample=sample,
            readings=read_details(sample, ticks),
            processes=found.records,
            relayouted=relayouted,
        )

    def _follow_sharing(self, ticks: Sequence[GpuTick], processes: Iterable[GpuProcess]) -> None:
        """Take over on which GPUs several are: containers, or one and the host."""
        on: defaultdict[int, set[int | None]] = defaultdict(set)
        for process in processes:
            on[process.gpu].add(process.container)
        for place, tick in enumerate(ticks):
            self._gpus[tick.reading.uuid].is_shared = len(on.get(place, ())) > 1

    def _count(self, ticks: Sequence[GpuTick]) -> None:
        """Count what was left out: the core only returns it."""
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
