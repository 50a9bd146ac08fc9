"""The processes on a node's GPUs, from tick to tick, and what each tick reports of them.

Here the table of processes and the accounting of ended ones are put together for one node, and the
table of a tick's containers is made. Of what the GPUs read only the time that was nobody's is used.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
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
    Location,
    ProcessLookup,
    ProcessTable,
    TableUpdate,
)
from gpuledger_agent.core.raw import ClockReading, FastPoll
from gpuledger_agent.core.tick_clock import TickInterval


class TickProcesses(NamedTuple):
    """What a tick reports of processes, by the fields of `NodeSample`."""

    containers: list[ContainerRef]
    processes: list[GpuProcess]
    ended_processes: list[ProcessExit] | None
    mps_served_gpus: frozenset[int]
    """Positions of the GPUs on which clients of MPS have what was sampled of their server."""
    records: list[ProcessRecord]
    """What happened to the processes since the last tick."""


class ProcessCounts(NamedTuple):
    """How many processes could not be read or reported since the last count."""

    unreadable: int
    """Processes that the driver listed and `/proc` did not show."""
    accounts_late: int
    """Accounts of the driver that came after the end of their process was published."""
    exits_unreported: Counter[str]
    """Ends that no tick reports, by reason."""


@dataclass
class ContainerTable:
    """The tick's containers and jobs: each once, in the order of first mention."""

    _indices: dict[tuple[str | None, str | None, str | None], int] = field(default_factory=dict)

    def index_of(self, location: Location) -> int | None:
        """Return the position of a container or a job; `None` for the host."""
        if location.is_of_host:
            return None
        identity = (location.container_id, location.pod_uid, location.job_id)
        return self._indices.setdefault(identity, len(self._indices))

    def refs(self) -> list[ContainerRef]:
        """Return the table."""
        return [
            ContainerRef(container_id=id_, pod_uid=uid, job_id=job)
            for id_, uid, job in self._indices
        ]


class ProcessTracker:
    """The processes of one node."""

    def __init__(
        self, *, node: NodeId, boot_id: str, processes: ProcessLookup, reads_processes: bool
    ) -> None:
        """Track no process where `reads_processes` is off."""
        self.reads_processes = reads_processes
        self._table = ProcessTable(processes=processes, node=node, boot_id=boot_id)
        self._matcher = ExitMatcher(processes=processes, node=node, boot_id=boot_id)
        self._reporter = ExitReporter()
        self._accounting_gpus: Collection[str] = ()
        """The GPUs whose driver keeps accounts."""
        self._records: list[ProcessRecord] = []
        self._unreadable = 0

    def observe(self, polls: Iterable[FastPoll]) -> None:
        """Take in who is new on GPUs between two ticks: they may be gone at the next.

        `polls` are those of all GPUs that were asked together.
        """
        if not self.reads_processes:
            return
        listed: dict[int, dict[str, ClockReading]] = {}
        for poll in polls:
            for process in poll.processes or ():
                listed.setdefault(process.pid, {})[poll.uuid] = poll.at
        self._records += self._table.observe(listed)

    def processes_on(self, gpus: Collection[str]) -> list[IncidentProcess]:
        """Return the processes that the last update found on any of these GPUs."""
        return self._table.processes_on(gpus)

    def refresh(
        self,
        ticks: Sequence[GpuTick],
        vanished: Collection[str],
        *,
        time_ns: int,
        boottime_ns: int,
    ) -> TableUpdate:
        """Update which processes there are, in which containers, and which have ended.

        There are none where processes are not read.
        """
        read = ticks if self.reads_processes else []
        # Of a GPU whose lists the driver refuses nobody knows who has ended.
        listed = {
            tick.reading.uuid: tick.last.processes.keys()
            for tick in read
            if not tick.last.is_list_refused
        }
        table_update = self._table.refresh(
            {**dict.fromkeys(vanished, ()), **listed},
            lingering={pid for tick in read for pid in tick.last.gone},
            listed_boottime_ns=boottime_ns,
            time_ns=time_ns,
        )
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
        """Return what a tick reports of the processes."""
        containers = ContainerTable()
        usages: list[Sequence[ProcessUsage]] = []
        if self.reads_processes:
            usages = [tick.usages for tick in ticks]
        servers = {pid for pid, known in table_update.now.items() if known.is_mps_server}
        shared = [share_server(of_gpu, servers) if servers else None for of_gpu in usages]
        usages = [of or own for of, own in zip(shared, usages, strict=True)]
        processes = [
            process
            for gpu, usages_of_gpu in enumerate(usages)
            for usage in usages_of_gpu
            for process in describe(gpu, usage, table_update, containers)
        ]
        exits = self._reporter.report(
            covered,
            gpus=[tick.reading for tick in ticks],
            processes=processes,
            accounting_gpus=self._accounting_gpus,
            container_index=containers.index_of,
        )
        served = frozenset(place for place, of_gpu in enumerate(shared) if of_gpu)
        records, self._records = self._records, []
        return TickProcesses(containers.refs(), processes, exits, served, records)

    def pop_counts(self) -> ProcessCounts:
        """Return what is to be counted since the last call."""
        matcher, reporter = self._matcher, self._reporter
        counts = ProcessCounts(self._unreadable, matcher.late, reporter.unreported)
        self._unreadable, matcher.late, reporter.unreported = 0, 0, Counter()
        return counts


def describe(
    gpu: int, usage: ProcessUsage, table_update: TableUpdate, containers: ContainerTable
) -> Iterator[GpuProcess]:
    """Yield the process's entry; two entries where its pid passed from one process to another.

    The driver's samples of such a pid may be of either, so none of the two gets them.
    """
    pid = usage.process.pid
    was_recycled = not usage.ended and table_update.was_recycled(pid)
    for gone in (False, True) if was_recycled else (usage.ended,):
        known = (table_update.before if gone else table_update.now).get(pid)
        ended = gone or (known is not None and known.has_ended)
        facts = known.certain_facts if known else UNREADABLE
        yield GpuProcess(
            gpu=gpu,
            pid=pid,
            started_boottime_ns=facts.started_boottime_ns,
            container=containers.index_of(facts.location),
            kind=usage.process.kind,
            memory_used_bytes=None if ended else usage.process.memory_bytes,
            sm_utilization_ratio=None if was_recycled else usage.sm_ratio,
            ended=True if ended else None,
            encoder_utilization_ratio=None if was_recycled else usage.encoder_ratio,
            decoder_utilization_ratio=None if was_recycled else usage.decoder_ratio,
        )
