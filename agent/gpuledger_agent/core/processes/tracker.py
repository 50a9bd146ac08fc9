"""Tracks the processes on a node's GPUs from tick to tick, and reports them in each tick.

For one node, this module combines the process table with the driver's accounting of ended
processes, and builds each tick's table of containers. It uses GPU readings only to determine how
much of a GPU's busy time belongs to no process.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuledger.keys import NodeId
from gpuledger.records import (
    ContainerRef,
    GpuProcess,
    IncidentProcess,
    ProcessExit,
    ProcessRecord,
)
from gpuledger_agent.core.gpu_sampler import GpuTick
from gpuledger_agent.core.normalize.shares import ProcessUsage, share_server
from gpuledger_agent.core.processes.accounting.exit_matcher import ExitMatcher
from gpuledger_agent.core.processes.accounting.exit_reporter import ExitReporter
from gpuledger_agent.core.processes.table import (
    UNREADABLE,
    KnownProcess,
    Location,
    ProcessLookup,
    ProcessTable,
    TableUpdate,
)
from gpuledger_agent.core.raw import ClockReading, FastPoll, read_at
from gpuledger_agent.core.tick_clock import TickInterval


class TickProcesses(NamedTuple):
    """A tick's processes; fields with the same name as in `NodeSample` have the same meaning."""

    containers: list[ContainerRef]
    processes: list[GpuProcess]
    ended_processes: list[ProcessExit] | None
    mps_served_gpus: frozenset[int]
    """Positions of the GPUs on which the MPS server's use was divided among the MPS clients, or
    whose clients are unknown."""
    reused_pid_gpus: frozenset[int]
    """Positions of the GPUs with samples of a pid that belonged to several processes."""
    records: list[ProcessRecord]
    """Records of the processes that started, changed or ended since the last tick."""


class ProcessCounts(NamedTuple):
    """Numbers of processes that could not be read or reported since the counts were last read."""

    unreadable: int
    """Number of processes that the driver listed but `/proc` did not show."""
    accounts_late: int
    """Number of the driver's accounting entries that arrived after the end of their process had
    been published."""
    exits_unreported: Counter[str]
    """Number of ended processes whose accounting entry no tick reports, by reason."""


@dataclass
class ContainerTable:
    """A tick's containers and jobs, each once, in order of first mention."""

    _indices: dict[tuple[str | None, str | None, str | None], int] = field(default_factory=dict)

    def index_of(self, location: Location) -> int | None:
        """Return the position of a container or job, adding it if new; `None` for the host."""
        if location.is_of_host:
            return None
        identity = (location.container_id, location.pod_uid, location.job_id)
        return self._indices.setdefault(identity, len(self._indices))

    def refs(self) -> list[ContainerRef]:
        """Return the containers and jobs in the order of their positions."""
        return [
            ContainerRef(container_id=id_, pod_uid=uid, job_id=job)
            for id_, uid, job in self._indices
        ]


class ProcessTracker:
    """Tracks the processes on one node's GPUs, and reports them in each tick."""

    def __init__(
        self, *, node: NodeId, boot_id: str, processes: ProcessLookup, reads_processes: bool
    ) -> None:
        """Create the tracker; if `reads_processes` is false, it reports no processes."""
        self.reads_processes = reads_processes
        self._table = ProcessTable(processes=processes, node=node, boot_id=boot_id)
        self._matcher = ExitMatcher(processes=processes, node=node, boot_id=boot_id)
        self._reporter = ExitReporter()
        self._accounting_gpus: Collection[str] = ()
        """UUIDs of the GPUs for which the driver keeps accounting entries of processes."""
        self._records: list[ProcessRecord] = []
        self._former: dict[int, KnownProcess] = {}
        """The earlier process of each reused pid, until ticks cover the start of the present one.
        """
        self._reused_until_ns: dict[int, int] = {}
        """Reused pids whose processes have all ended, each with the time since boot of the first
        lists without the pid."""
        self._unreadable = 0

    def observe(self, polls: Iterable[FastPoll]) -> None:
        """Add new processes that fast polls have listed, because they may end before the next tick.

        `polls` must contain all GPUs that were queried together.
        """
        if not self.reads_processes:
            return
        listed: dict[int, dict[str, ClockReading]] = {}
        polled = set()
        for poll in polls:
            if poll.processes is not None:
                polled.add(poll.uuid)
            at = read_at(poll.at, poll.listed.answered_ns) if poll.listed else poll.at
            for process in poll.processes or ():
                listed.setdefault(process.pid, {})[poll.uuid] = at
        self._records += self._table.observe(listed, polled=polled)

    @property
    def shows_no_cgroups(self) -> bool:
        """Whether there are readable processes on GPUs, and all of them are in the root cgroup."""
        return self._table.shows_no_cgroups

    def processes_on(self, gpus: Collection[str]) -> list[IncidentProcess]:
        """Return the known processes on any of these GPUs, ordered by pid."""
        return self._table.processes_on(gpus)

    def refresh(
        self,
        ticks: Sequence[GpuTick],
        vanished: Collection[str],
        *,
        time_ns: int,
        boottime_ns: int,
        listed_boottime_ns: int,
    ) -> TableUpdate:
        """Update the table of processes from a tick's lists; return the table with its changes.

        Also match the driver's accounting entries to ended processes. `vanished` are the UUIDs of
        MIG instances that no longer exist, so that no process uses them. If `reads_processes` is
        false, the result is empty.
        """
        read = ticks if self.reads_processes else []
        # While the driver refuses a GPU's lists, it is unknown whether the GPU's processes ended.
        listed = {
            tick.reading.uuid: tick.last.processes.keys()
            for tick in read
            if not tick.last.is_list_refused
        }
        table_update = self._table.refresh(
            {**dict.fromkeys(vanished, ()), **listed},
            lingering={pid for tick in read for pid in tick.last.gone},
            listed_boottime_ns=listed_boottime_ns,
            time_ns=time_ns,
        )
        self._former |= {
            pid: known
            for pid, known in table_update.before.items()
            if table_update.was_recycled(pid)
        }
        ended = (table_update.reused_pids | self._former.keys()) - table_update.now.keys()
        self._reused_until_ns |= dict.fromkeys(ended, listed_boottime_ns)
        self._unreadable += table_update.unreadable
        accounts = {tick.reading.uuid: tick.accounts for tick in read}
        self._accounting_gpus = {uuid for uuid, given in accounts.items() if given is not None}
        self._records += self._matcher.match(
            table_update, accounts, time_ns=time_ns, boottime_ns=boottime_ns
        )
        self._reporter.add(self._matcher.exited)
        self._matcher.exited = []
        return table_update

    def describe(
        self, ticks: Sequence[GpuTick], table_update: TableUpdate, covered: TickInterval
    ) -> TickProcesses:
        """Return the tick's processes and containers, and the ended processes to report in it.

        An ended process with an accounting entry is reported once ticks cover the time of its end.
        """
        now, containers = table_update.now, ContainerTable()
        self._forget_reused(now, covered)
        usages: list[Sequence[ProcessUsage]] = []
        if self.reads_processes:
            usages = [tick.usages for tick in ticks]
        servers = {pid for pid, known in now.items() if known.is_mps_server}
        shared = [share_server(of_gpu, servers) if servers else None for of_gpu in usages]
        usages = [of or own for of, own in zip(shared, usages, strict=True)]
        processes = [
            process
            for gpu, usages_of_gpu in enumerate(usages)
            for usage in usages_of_gpu
            for process in rows_of(
                gpu, usage, table_update, containers, covered, former=self._former
            )
        ]
        exits = self._reporter.report(
            covered,
            gpus=[tick.reading for tick in ticks],
            processes=processes,
            accounting_gpus=self._accounting_gpus,
            container_index=containers.index_of,
        )
        served = frozenset(
            place
            for place, of_gpu in enumerate(shared)
            if of_gpu and _is_divided([one for one in processes if one.gpu == place], servers)
        )
        reused = table_update.reused_pids | self._former.keys() | self._reused_until_ns.keys()
        reused_pid_gpus = frozenset(one.gpu for one in processes if one.pid in reused)
        records, self._records = self._records, []
        return TickProcesses(containers.refs(), processes, exits, served, reused_pid_gpus, records)

    def _forget_reused(self, now: Mapping[int, KnownProcess], covered: TickInterval) -> None:
        """Forget reused pids whose former process ended before this tick."""
        self._former = {
            pid: former
            for pid, former in self._former.items()
            if pid in now and (now[pid].facts.started_boottime_ns or 0) > covered.begin_ns
        }
        self._reused_until_ns = {
            pid: until_ns
            for pid, until_ns in self._reused_until_ns.items()
            if until_ns > covered.begin_ns
        }

    def pop_counts(self) -> ProcessCounts:
        """Return the counts since the last call, and reset them."""
        matcher, reporter = self._matcher, self._reporter
        counts = ProcessCounts(self._unreadable, matcher.late, reporter.unreported)
        self._unreadable, matcher.late, reporter.unreported = 0, 0, Counter()
        return counts


def _is_divided(on_gpu: Sequence[GpuProcess], servers: Collection[int]) -> bool:
    """Return whether an MPS server's use may belong to another container or job than booked.

    This is so if the clients are in several, or if the driver lists only servers.
    """
    is_shared = len({process.container for process in on_gpu}) > 1
    return is_shared or all(process.pid in servers for process in on_gpu)


def rows_of(
    gpu: int,
    usage: ProcessUsage,
    table_update: TableUpdate,
    containers: ContainerTable,
    covered: TickInterval,
    *,
    former: Mapping[int, KnownProcess],
) -> Iterator[GpuProcess]:
    """Yield the tick's rows of a pid on the GPU at position `gpu`.

    If the pid was reused, yield two rows, for the present and the `former` process. The driver's
    samples of a reused pid may belong to either process, so they are divided by time.
    """
    pid = usage.process.pid
    parts: Sequence[tuple[bool, float]] = [(usage.ended, 1.0)]
    if not usage.ended and pid in former:
        started_ns = table_update.now[pid].facts.started_boottime_ns or covered.begin_ns
        later = min(1.0, max(0.0, (covered.end_ns - started_ns) / covered.length_ns))
        parts = [(False, later), (True, 1.0 - later)]
    ended_processes = {**table_update.before, **former}
    for gone, part in parts:
        known = (ended_processes if gone else table_update.now).get(pid)
        ended = gone or (known is not None and known.has_ended)
        facts = known.certain_facts if known else UNREADABLE
        yield GpuProcess(
            gpu=gpu,
            pid=pid,
            started_boottime_ns=facts.started_boottime_ns,
            container=containers.index_of(facts.location),
            kind=usage.process.kind,
            memory_used_bytes=None if ended else usage.process.memory_bytes,
            sm_utilization_ratio=_part(usage.sm_ratio, part),
            ended=True if ended else None,
            encoder_utilization_ratio=_part(usage.encoder_ratio, part),
            decoder_utilization_ratio=_part(usage.decoder_ratio, part),
        )


def _part(ratio: float | None, part: float) -> float | None:
    return None if ratio is None else ratio * part
