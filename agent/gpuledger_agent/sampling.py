"""One tick of one node: what the GPUs answered in, the node's sample and process records out.

Here the parts of a tick are put together, without waiting for anything: when which GPU is queried
is decided in `loop`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import structlog
from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND, NS_PER_US
from gpuledger.keys import NodeId
from gpuledger.records import (
    BusyMethod,
    DeviceAllocation,
    GpuReading,
    IncidentProcess,
    JobAllocation,
    NodeSample,
)
from gpuledger.records.bounds import MAX_INTERVAL_NS
from gpuledger_agent.core.looks import Looked
from gpuledger_agent.core.node_looks import NodeLooks
from gpuledger_agent.core.normalize.gpu import GpuState, GpuTick, read_gpu
from gpuledger_agent.core.normalize.set_back import SetBack
from gpuledger_agent.core.normalize.windows import USUAL_WINDOW_US
from gpuledger_agent.core.processes.table import TableUpdate
from gpuledger_agent.core.processes.tracker import ProcessTracker
from gpuledger_agent.core.raw import ClockReading, GpuLook, RawGpuSample, SampleCursor
from gpuledger_agent.core.tick import (
    LastRows,
    NodeLayout,
    NodeTick,
    TickClock,
    TickInterval,
    flatten,
    read_details,
)
from gpuledger_agent.core.unreported import UnreportedReadings
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
        self._tracker = ProcessTracker(
            node=node,
            boot_id=self.boot_id,
            processes=ProcessReader(procfs),
            reads_processes=reads_processes,
        )
        self._states: Mapping[str, GpuState] = {}
        """By UUID, what the next tick must know of each GPU and MIG instance."""
        self._rows = LastRows()
        self._layout = NodeLayout()
        self._clock = TickClock()
        self._unreported = UnreportedReadings()
        self._set_back = SetBack()
        self.looks = NodeLooks(state_of=self._state_of, set_back=self._set_back)
        """What is asked between ticks."""
        self._procfs = procfs
        self._memory_bytes: int | None = None
        """The size of the machine's memory, once a GPU needed it."""

    @property
    def reads_processes(self) -> bool:
        """Whether ticks name processes."""
        return self._tracker.reads_processes

    def last_seen(self) -> Mapping[str, SampleCursor]:
        """Return, by UUID, after which samples the next query begins; others begin anew."""
        return self.looks.begin_tick(self._states)

    @property
    def unlisted_gpus(self) -> Sequence[str]:
        """The GPUs and instances whose lists of processes the driver refuses, by UUID."""
        return sorted(uuid for uuid, one in self._states.items() if one.are_processes_unknown)

    @property
    def lag_ns(self) -> int:
        """How far behind the time of its answers a tick's interval ends."""
        return self._clock.lag_ns

    def _state_of(self, uuid: str) -> GpuState | None:
        return self._states.get(uuid)

    def record_looks(self, looks: Sequence[GpuLook]) -> None:
        """Take in what GPUs answered between two ticks."""
        self._tracker.observe(self.looks.record(looks))

    def forget(self) -> None:
        """Forget all but the counters, after answers of which no tick could be made."""
        self._states = {uuid: state.forget() for uuid, state in self._states.items()}

    def processes_on(self, gpu_uuid: str, gpu_instance: int | None) -> list[IncidentProcess]:
        """Return the processes on a GPU, or on one GPU instance of it, at the last tick."""
        return self._tracker.processes_on(self._layout.devices_of(gpu_uuid, gpu_instance))

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
        """Make the tick that ends `at`; `None` where that only opens the first interval.

        That is so at the first call, and after an interval that is too long to be reported. `at` is
        when the GPUs were queried: a process that started later cannot be the one that they listed
        under its pid. GPUs that are `known`, by UUID, and did not answer are in the tick as silent,
        with the instances that they had when they answered last. `late` says that the tick began
        more than half a tick after its time.
        """
        length_ns = self._clock.follow(at)
        if length_ns and length_ns > MAX_INTERVAL_NS:
            # Longer than a record may say: what the GPUs did in it is given up with it.
            _log.warning("interval_dropped", interval_seconds=length_ns / NS_PER_SECOND)
            self.forget()
            length_ns = None
        raw = [self._with_memory(gpu) for gpu in raw]
        raw = self._unreported.add_to(raw, is_reported=length_ns is not None)
        self._set_back.follow(time_ns=at.time_ns, boottime_ns=at.boottime_ns)
        ticks = self._read_gpus(raw, self.looks.join(raw, at), at, length_ns or 1)
        vanished = self._layout.update(raw)
        self._remember(ticks, vanished)
        self.looks.drop_covered(ticks)
        table_update = self._tracker.refresh(
            ticks,
            vanished,
            time_ns=at.time_ns,
            boottime_ns=at.boottime_ns,
        )
        silent = self._rows.update((tick.reading for tick in ticks), known=known)
        # All state is brought up to date in any case: the next tick needs it.
        tick = None
        if length_ns:
            tick = self._make_tick(
                ticks,
                table_update,
                self._clock.interval(at, length_ns),
                silent=silent,
                allocations=allocations,
                job_allocations=job_allocations,
                late=late,
            )
            TICKS.inc()
        self._count(ticks)
        return tick

    def _read_gpus(
        self,
        raw: Sequence[RawGpuSample],
        looked: Mapping[str, Looked],
        at: ClockReading,
        interval_ns: int,
    ) -> list[GpuTick]:
        """Read each GPU and MIG instance that answered, in the order of the tick's rows."""
        set_back_now_us = at.time_ns // NS_PER_US if self._set_back.is_recent else None
        return [
            read_gpu(
                gpu,
                self._states.get(gpu.uuid),
                looked=looked.get(gpu.uuid),
                interval_ns=interval_ns,
                now_ns=at.monotonic_ns,
                set_back_now_us=set_back_now_us,
            )
            for gpu in flatten(raw)
        ]

    def _with_memory(self, gpu: RawGpuSample) -> RawGpuSample:
        """Return the answers of a GPU; one without memory of its own has the machine's."""
        if not gpu.memory_unified:
            return gpu
        if self._memory_bytes is None:
            self._memory_bytes = read_memory_bytes(self._procfs)
        return replace(gpu, memory_total_bytes=self._memory_bytes)

    def _remember(self, ticks: Sequence[GpuTick], vanished: Collection[str]) -> None:
        """Keep the state of the GPUs for the next tick.

        Of a GPU that did not answer only the counters are kept, so that a reset of them is seen,
        and the idle draw: its next samples cover more than one interval.
        """
        silent = {
            uuid: state.forget()
            for uuid, state in self._states.items()
            if (state.totals or state.energy) and uuid not in vanished
        }
        self._states = silent | {tick.reading.uuid: tick.state for tick in ticks}
        self._clock.learn_lag(
            [
                tick.state.gpu_window.confirmed_us or USUAL_WINDOW_US
                for tick in ticks
                if tick.state.clock
            ]
        )

    def _make_tick(
        self,
        ticks: Sequence[GpuTick],
        table_update: TableUpdate,
        covered: TickInterval,
        *,
        silent: Sequence[GpuReading],
        allocations: Sequence[DeviceAllocation],
        job_allocations: Sequence[JobAllocation],
        late: bool,
    ) -> NodeTick:
        found = self._tracker.describe(ticks, table_update, covered)
        self.looks.follow_sharing(ticks, found.processes)
        sample = NodeSample(
            cluster=self._node.cluster,
            node=self._node.node,
            boot_id=self.boot_id,
            seq=covered.seq,
            time_ns=covered.time_ns,
            interval_ns=covered.length_ns,
            late=True if late else None,
            # Last, as the processes go by the positions of the GPUs that answered.
            gpus=[*_readings(ticks, found.mps_served_gpus), *silent],
            containers=found.containers,
            processes=found.processes,
            allocations=list(allocations),
            ended_processes=found.ended_processes,
            job_allocations=list(job_allocations) or None,
        )
        return NodeTick(
            sample=sample,
            readings=read_details(sample, ticks),
            processes=self._tracker.drain(),
            relayouted=self._layout.drain_relayouted(),
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


def _readings(ticks: Sequence[GpuTick], mps_served_gpus: Collection[int]) -> Iterator[GpuReading]:
    """Yield the rows of the GPUs that answered, each with how its processes' shares were found."""
    for position, tick in enumerate(ticks):
        if position in mps_served_gpus:
            yield replace(tick.reading, busy_method=BusyMethod.MPS_SERVER)
        elif tick.takes_turns:
            yield replace(tick.reading, busy_method=BusyMethod.EQUAL_TURNS)
        else:
            yield tick.reading
