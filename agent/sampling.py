"""One tick of one node: what the GPUs answered in, the node's sample and process records out.

Here the parts of a tick are put together, without waiting for anything: when which GPU is queried
is decided in `loop`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import structlog
from msgspec.structs import replace as replace_struct

from agent.core.looks import GpuLooks, LookScope
from agent.core.normalize.driver_clock import LAG_WINDOWS, SetBack
from agent.core.normalize.gpu import GpuState, GpuTick, read_gpu
from agent.core.processes.table import TableUpdate
from agent.core.processes.tracker import ProcessTracker
from agent.core.raw import ClockReading, GpuLook, RawGpuSample, SampleCursor
from agent.core.tick import LastRows, NodeLayout, NodeTick, TickInterval, flatten, read_details
from agent.host.procfs import ProcessReader, Procfs, read_boot_id, read_memory_bytes
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

_log = structlog.get_logger(__name__)
# Two clocks of one machine drift apart by less.
_SLOWEST_CLOCK: Final = 0.999
_RARE: Final = ("readings", "health")
"""Fields of `RawGpuSample` that are not queried for each tick, and are of the instant. `profiling`
is as rare, and a mean over the time before: of that no tick tells where none was made."""


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
        self._before: ClockReading | None = None
        """The end of the last interval, where the next one begins."""
        self._rare_before: Mapping[str, Mapping[str, Any]] = {}
        """What is queried rarely, of answers that made no tick, for the next one."""
        self._seq = 0
        self._lag_ns: int | None = None
        """How far a tick's interval lies back, so that the driver has sampled all of it."""
        self._set_back = SetBack()
        self._looks: dict[str, GpuLooks] = {}
        """By UUID, what a GPU told since the time that ticks have covered."""
        self._cursors: Mapping[str, SampleCursor] = {}
        """By UUID, after which samples the last query began."""
        self._shared: frozenset[str] = frozenset()
        """The GPUs on which processes of several containers, or of one and the host, are."""
        self._procfs = procfs
        self._memory_bytes: int | None = None
        """The size of the machine's memory, once a GPU needed it."""

    @property
    def reads_processes(self) -> bool:
        """Whether ticks name processes."""
        return self._tracker.reads_processes

    def last_seen(self) -> Mapping[str, SampleCursor]:
        """Return, by UUID, after which samples the next query begins; others begin anew."""
        self._cursors = {uuid: self._cursor(uuid) for uuid in self._states}
        return self._cursors

    @property
    def lag_ns(self) -> int:
        """How far behind the time of its answers a tick's interval ends."""
        return self._lag_ns or 0

    def watched_closely(self, now_ns: int) -> frozenset[str]:
        """Return the GPUs on which processes come and go, or that are shared and need it."""
        return frozenset(
            uuid
            for uuid, looks in self._looks.items()
            if looks.is_lively(now_ns) or (looks.one_sample_each and uuid in self._shared)
        )

    def look_cursors(
        self, scope: LookScope, *, now_ns: int, accounting_gpus: frozenset[str] = frozenset()
    ) -> Mapping[str, SampleCursor | None]:
        """Return what to look at now, by UUID, each with its cursor; `None` for its energy alone.

        `accounting_gpus` are the GPUs whose driver keeps accounts: what these say of a process has
        no owner unless the process was seen.
        """
        if self._set_back.is_recent:
            # Nobody knows of which of its clocks the driver's stamps are: the ticks find that out.
            return {}
        closely = self.watched_closely(now_ns) | accounting_gpus
        known = self._looks.keys() & self._states.keys()
        asked = known if scope is LookScope.ALL else known & closely
        cursors: dict[str, SampleCursor | None] = {uuid: self._cursor(uuid) for uuid in asked}
        if scope is LookScope.ENERGY:
            cursors |= dict.fromkeys(known - asked)
        return cursors

    def record_looks(self, looks: Sequence[GpuLook]) -> None:
        """Take in what GPUs answered between two ticks."""
        known = [look for look in looks if look.uuid in self._looks.keys() & self._states.keys()]
        for look in known:
            state = self._states[look.uuid]
            self._looks[look.uuid].add(
                look, window_us=state.gpu_window_us, closed_us=self._closed_us(state, look.at)
            )
        self._tracker.observe(known)

    def forget_looks(self) -> None:
        """Forget what looks told, after answers that could not be used: ticks ask for it again."""
        for looks in self._looks.values():
            looks.forget()

    def _cursor(self, uuid: str) -> SampleCursor:
        of_tick = self._states[uuid].last_seen
        if self._set_back.is_recent or uuid not in self._looks:
            return of_tick
        return self._looks[uuid].cursor(of_tick)

    def _closed_us(self, state: GpuState, at: ClockReading) -> float | None:
        """Return up to where the driver's windows have closed for certain, by its own clock."""
        if state.clock is None:
            return None
        since_us = (at.monotonic_ns - state.read_ns) / NS_PER_US
        return state.clock.earliest_us + since_us * _SLOWEST_CLOCK

    def _join_looks(self, raw: Sequence[RawGpuSample], at: ClockReading) -> Sequence[RawGpuSample]:
        """Put together what was told between the ticks with what is told now."""
        joined, answered = [], {gpu.uuid for gpu in raw}
        # What a silent GPU told is of a time of which its state is forgotten.
        for uuid in self._looks.keys() - answered:
            if uuid in self._states:
                self._looks[uuid].forget()
            else:
                del self._looks[uuid]
        for gpu in raw:
            state = self._states.get(gpu.uuid)
            if state is None:
                # What it was asked before is of a time that no tick covers.
                self._looks[gpu.uuid] = GpuLooks()
            looks = self._looks.setdefault(gpu.uuid, GpuLooks())
            asked = self._cursors.get(gpu.uuid, SampleCursor())
            joined.append(
                looks.join(
                    gpu,
                    GpuLook(
                        uuid=gpu.uuid,
                        at=at,
                        since_us=asked.process_us,
                        samples=gpu.samples,
                        memory_samples=gpu.memory_samples,
                        process_samples=gpu.process_samples,
                        # Of a GPU that is cut they are those of its instances.
                        processes=None if gpu.mig_enabled else gpu.processes,
                        percent=gpu.percent,
                        energy_millijoules=gpu.energy_millijoules,
                        power_milliwatts=gpu.power_milliwatts,
                    ),
                    window_us=state.gpu_window_us if state else None,
                    closed_us=self._closed_us(state, at) if state else None,
                )
            )
        return joined

    def _drop_covered(self, ticks: Sequence[GpuTick]) -> None:
        """Forget the samples that no later tick needs, and who shares which GPU."""
        for tick in ticks:
            looks, clock = self._looks.get(tick.reading.uuid), tick.state.clock
            if looks is None:
                continue
            if tick.has_gap:
                # Closely watched, the driver shows whether it leaves out what was idle.
                looks.changed_ns = tick.state.read_ns
            if clock is None:
                looks.forget()
            else:
                looks.drop_covered(tick.state.last_seen, covered_us=clock.covered_us)

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
        before, self._before = self._interval_start(at), at
        raw = self._with_rare(raw, is_reported=before is not None)
        raw = [self._with_memory(gpu) for gpu in raw]
        self._set_back.follow(time_ns=at.time_ns, boottime_ns=at.boottime_ns)
        raw = self._join_looks(raw, at)
        interval_ns = max(1, at.monotonic_ns - before.monotonic_ns) if before else 1
        ticks = self._read_gpus(raw, at, interval_ns)
        vanished = self._layout.update(raw)
        self._remember(ticks, vanished)
        self._drop_covered(ticks)
        table_update = self._tracker.refresh(
            ticks,
            vanished,
            time_ns=at.time_ns,
            boottime_ns=at.boottime_ns,
        )
        silent = self._rows.update((tick.reading for tick in ticks), known=known)
        # All state is brought up to date in any case: the next tick needs it.
        tick = None
        if before:
            tick = self._make_tick(
                ticks,
                table_update,
                self._next_interval(at, interval_ns),
                silent=silent,
                allocations=allocations,
                job_allocations=job_allocations,
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

    def _read_gpus(
        self, raw: Sequence[RawGpuSample], at: ClockReading, interval_ns: int
    ) -> list[GpuTick]:
        """Read each GPU and MIG instance that answered, in the order of the tick's rows."""
        set_back_now_us = at.time_ns // NS_PER_US if self._set_back.is_recent else None
        return [
            read_gpu(
                gpu,
                self._states.get(gpu.uuid),
                interval_ns=interval_ns,
                now_ns=at.monotonic_ns,
                set_back_now_us=set_back_now_us,
            )
            for gpu in flatten(raw)
        ]

    def _with_rare(
        self, raw: Sequence[RawGpuSample], *, is_reported: bool
    ) -> Sequence[RawGpuSample]:
        """Add what answers that made no tick had of rare groups, as it would be lost."""
        kept, self._rare_before = self._rare_before, {}
        if not is_reported:
            self._rare_before = {
                gpu.uuid: {name: values for name in _RARE if (values := getattr(gpu, name))}
                for gpu in raw
            }
        if not kept:
            return raw
        return [
            replace(
                gpu,
                **{
                    name: values
                    for name, values in kept.get(gpu.uuid, {}).items()
                    if not getattr(gpu, name)
                },
            )
            for gpu in raw
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
        windows_us = [tick.state.gpu_window_us for tick in ticks if tick.state.gpu_window_us]
        if self._lag_ns is None and windows_us:
            # Never changed, so that each tick begins where the one before ended.
            self._lag_ns = round(LAG_WINDOWS * max(windows_us) * NS_PER_US)

    def _next_interval(self, at: ClockReading, interval_ns: int) -> TickInterval:
        # Milliseconds since boot, but never the same twice, whatever a clock does.
        self._seq = max(at.boottime_ns // NS_PER_MS, self._seq + 1)
        lag_ns = self._lag_ns or 0
        return TickInterval(
            seq=self._seq,
            begin_ns=at.boottime_ns - lag_ns - interval_ns,
            end_ns=at.boottime_ns - lag_ns,
            time_ns=at.time_ns - lag_ns,
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
        self._shared = _shared(ticks, found.processes)
        sample = NodeSample(
            cluster=self._node.cluster,
            node=self._node.node,
            boot_id=self.boot_id,
            seq=covered.seq,
            time_ns=covered.time_ns,
            interval_ns=covered.length_ns,
            late=True if late else None,
            # Last, as the processes go by the positions of the GPUs that answered.
            gpus=[*_readings(ticks, found.served), *silent],
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


def _readings(ticks: Sequence[GpuTick], served: Collection[int]) -> Iterator[GpuReading]:
    """Yield the rows of the GPUs that answered."""
    for place, tick in enumerate(ticks):
        reading = tick.reading
        if place in served:
            reading = replace_struct(reading, busy_method=BusyMethod.MPS_SERVER)
        yield reading


def _shared(ticks: Sequence[GpuTick], processes: Iterable[GpuProcess]) -> frozenset[str]:
    """Return the GPUs on which several are: containers, or one and the host."""
    on: dict[int, set[int | None]] = {}
    for process in processes:
        on.setdefault(process.gpu, set()).add(process.container)
    return frozenset(ticks[gpu].reading.uuid for gpu, whose in on.items() if len(whose) > 1)
