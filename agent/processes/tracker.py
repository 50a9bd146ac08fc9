"""Who is on a node's GPUs, tick after tick: the roll, the ends, and what a tick says of both.

Here the parts of this room are put together for one node. What the GPUs read is not known here but
for what was nobody's.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from agent.normalize.gpu import GpuTick
from agent.processes.container_table import Containers, describe_all
from agent.processes.exit_matcher import ExitMatcher
from agent.processes.exit_reporter import ExitReporter
from agent.processes.history import TickInterval
from agent.processes.procfs import ProcessReader, Procfs
from agent.processes.table import ProcessTable, TableUpdate
from gpuledger.records import (
    ContainerRef,
    GpuProcess,
    IncidentProcess,
    ProcessExit,
    ProcessRecord,
)


class Counted(NamedTuple):
    """What a tick says of processes, by the fields of `NodeSample`."""

    containers: list[ContainerRef]
    processes: list[GpuProcess]
    ended_processes: list[ProcessExit] | None


class ProcessTracker:
    """The processes of one node."""

    def __init__(self, *, node: str, boot_id: str, procfs: Procfs, reads_processes: bool) -> None:
        """With `reads_processes` off, nobody is ever there."""
        self.reads_processes = reads_processes
        processes = ProcessReader(procfs)
        self._table = ProcessTable(processes=processes, node=node, boot_id=boot_id)
        self._endings = ExitMatcher(processes=processes, node=node, boot_id=boot_id)
        self._closing = ExitReporter()
        self._accounted: Collection[str] = ()
        self._untold: list[ProcessRecord] = []

    def see(self, pids: Iterable[int], *, seen_boottime_ns: int) -> None:
        """Look up who is new on the GPUs between two ticks: at the next one it may be gone."""
        if self.reads_processes:
            self._endings.sightings.see(pids, seen_boottime_ns=seen_boottime_ns)

    def on(self, gpus: Collection[str]) -> list[IncidentProcess]:
        """Return the processes that the last roll found on any of these GPUs."""
        return self._table.on(gpus)

    def call(
        self,
        ticks: Sequence[GpuTick],
        vanished: Collection[str],
        *,
        asked_boottime_ns: int,
        time_ns: int,
        boottime_ns: int,
    ) -> TableUpdate:
        """Find out whose processes they are, and who has ended; without attribution, nobody's."""
        read = ticks if self.reads_processes else []
        listed = {tick.reading.uuid: tick.state.processes.keys() for tick in read}
        roll = self._table.call(
            {**dict.fromkeys(vanished, ()), **listed},
            lingering={pid for tick in read for pid in tick.state.gone},
            listed_boottime_ns=asked_boottime_ns,
            time_ns=time_ns,
        )
        accounts = {tick.reading.uuid: tick.accounts for tick in read}
        self._untold += self._endings.settle(
            roll, accounts, time_ns=time_ns, boottime_ns=boottime_ns
        )
        self._accounted = {uuid for uuid, given in accounts.items() if given is not None}
        self._closing.take(self._endings.drain())
        return roll

    def describe(
        self, ticks: Sequence[GpuTick], roll: TableUpdate, covered: TickInterval
    ) -> Counted:
        """Return what a tick says of the processes."""
        containers = Containers()
        usages = [tick.usages for tick in ticks] if self.reads_processes else []
        processes = describe_all(usages, roll, containers)
        ended = self._closing.tell(
            covered,
            gpus=[tick.reading for tick in ticks],
            processes=processes,
            accounted=self._accounted,
            containers=containers,
        )
        return Counted(containers.refs(), processes, ended)

    def drain(self) -> list[ProcessRecord]:
        """Return what happened to the processes since the last call."""
        records, self._untold = self._untold, []
        return records
