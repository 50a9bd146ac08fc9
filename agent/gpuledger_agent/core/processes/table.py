"""The table of processes that the driver lists, and the records of their lifetimes.

A process is identified by (pid, start time): if a pid is reused, it is a different process.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpuledger.keys import NodeId
from gpuledger.records import IncidentProcess, ProcessChange, ProcessRecord
from gpuledger_agent.core.raw import ClockReading


@dataclass(frozen=True, kw_only=True)
class Location:
    """The container, pod or job of a process, read from its cgroups."""

    container_id: str | None = None
    """The runtime's id of the container, 64 hexadecimal digits; `None` if the process is in no
    container."""
    pod_uid: str | None = None
    """The pod's UID, or a static pod's configuration hash; `None` if the process is in no pod."""
    job_id: str | None = None
    """The scheduler's id of the job; `None` if the process is in no job, or in a pod. For a cgroup
    of Slurm or the kubelet that has no known form, `unrecognized:` and the cgroup's name."""
    line: str | None = None
    """The cgroup line that identified the location, or the first line; `None` without lines."""

    @property
    def is_of_host(self) -> bool:
        """Whether the process is in no container, pod or job."""
        return self.container_id is None and self.pod_uid is None and self.job_id is None

    @property
    def is_in_root(self) -> bool:
        """Whether the process is in the root cgroup, as if there were no cgroups."""
        return self.line is not None and self.line.endswith(":/")


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """The facts about a process that `/proc` shows."""

    started_boottime_ns: int | None = None
    """Start of the process since boot, in the kernel's steps of 10 ms; `None` if `/proc` does not
    show the process."""
    command: str | None = None
    """The kernel's name of the program."""
    location: Location = Location()  # frozen, so it can be shared
    """The container, pod or job of the process."""


# The kernel keeps 15 letters of `nvidia-cuda-mps-server`; the control daemon uses no GPU.
_MPS_SERVER: Final = "nvidia-cuda-mps"
UNREADABLE: Final = ProcessFacts()


class ProcessLookup(Protocol):
    """Reads the facts about a process from `/proc`."""

    def read(self, pid: int) -> ProcessFacts:
        """Return the facts about a pid's process.

        Return `UNREADABLE` if the process has ended or is hidden, or if another process got the pid
        while it was read.
        """


@dataclass(frozen=True, kw_only=True)
class KnownProcess:
    """A process that is on a GPU now or was at the previous tick."""

    pid: int
    """Process id."""
    facts: ProcessFacts
    """The facts about the process from `/proc`."""
    gpus: frozenset[str]
    """UUIDs of the GPUs whose lists contain the process."""
    listed_boottime_ns: int = field(compare=False)
    """When the driver last listed the pid, since boot. The listed process may be another one that
    has reused the pid."""
    certain_boottime_ns: int = field(compare=False)
    """The last time, since boot, at which the driver certainly listed this process: `/proc` showed
    the process afterwards. If `/proc` never showed it, the time of its first listing."""
    is_confirmed: bool = field(compare=False)
    """Whether `/proc` showed the process after its last listing. If not, the process may have ended
    before that listing and its pid may have been reused, so it is unknown which process used the
    GPU."""
    has_ended: bool = field(default=False, compare=False)
    """Whether `/proc` no longer shows the process, but showed it after a fast poll since the
    previous tick. The process was then certainly on the GPU in this tick."""

    @property
    def is_mps_server(self) -> bool:
        """Whether the process is an MPS server, judged by its command name."""
        return (self.facts.command or "").startswith(_MPS_SERVER)

    @property
    def certain_facts(self) -> ProcessFacts:
        """The facts, or `UNREADABLE` if the driver may have listed another process with the pid."""
        return self.facts if self.is_confirmed or self.has_ended else UNREADABLE


@dataclass(frozen=True, kw_only=True)
class TableUpdate:
    """The processes on the GPUs in one tick, compared with the previous tick."""

    now: Mapping[int, KnownProcess]
    """The processes now, by pid."""
    before: Mapping[int, KnownProcess]
    """The processes of the previous tick, by pid, and ended processes whose use ticks may still
    report (`lingering` of `ProcessTable.refresh`)."""
    records: list[ProcessRecord]
    """Records of the processes that started, changed or ended since the previous tick."""
    unreadable: int
    """Number of processes that the driver lists now but `/proc` did not show."""
    reused_pids: frozenset[int] = frozenset()
    """Pids that belonged to several processes since the previous tick."""

    def was_recycled(self, pid: int) -> bool:
        """Return whether the pid belonged to another process in the previous tick."""
        return _is_another(self.now.get(pid), self.before.get(pid))


@dataclass(kw_only=True)
class ProcessTable:
    """The processes on a node's GPUs."""

    processes: ProcessLookup
    """Reads the facts about processes from `/proc`."""
    node: NodeId
    """The node, for the records."""
    boot_id: str
    """The kernel's id of this boot, for the records."""
    _known: dict[int, KnownProcess] = field(default_factory=dict)
    _lingering: dict[int, KnownProcess] = field(default_factory=dict)
    _updated_boottime_ns: int = 0
    """When the process lists of the last update were read."""
    _left: set[int] = field(default_factory=set)
    """Known pids that a fast poll since the last update did not list."""
    _reused: set[int] = field(default_factory=set)
    """Known pids that returned since the last update as other processes."""

    def refresh(
        self,
        listed: Mapping[str, Collection[int]],
        *,
        lingering: Collection[int] = (),
        listed_boottime_ns: int,
        time_ns: int,
    ) -> TableUpdate:
        """Read the facts about every process again; return the processes and their changes.

        `listed` contains the pids on each GPU that answered. `listed_boottime_ns` is when these
        lists were read: a process that started later has reused the pid of a listed process.
        `lingering` are pids of ended processes that the next update must still return in `before`.

        If a GPU did not answer, its processes are assumed to be still on it. A process that `/proc`
        no longer shows may still use its GPU, so the process only counts as ended once the GPU
        answers without listing it. Only processes that are listed now are counted as unreadable,
        because a process on a GPU that does not answer has usually ended with the GPU.
        """
        before = self._known
        self._known = {
            pid: self._look_up(pid, gpus, listed_boottime_ns)
            for pid, gpus in _gpus_by_pid(listed, before).items()
        }
        listed_pids = {pid for pids in listed.values() for pid in pids}
        # The ended processes whose pids are reused by processes that a fast poll has added already.
        former = {
            pid: ended
            for pid, ended in self._lingering.items()
            if _is_another(now := self._known.get(pid), ended)
            and not _is_another(now, before.get(pid))
        }
        update = TableUpdate(
            now=self._known,
            before={**self._lingering, **before, **former},
            records=[
                self._record(known, change, time_ns=time_ns)
                for pid in sorted({*before, *self._known})
                for change, known in _changes(self._known.get(pid), before.get(pid))
            ],
            unreadable=sum(self._known[pid].certain_facts is UNREADABLE for pid in listed_pids),
            reused_pids=frozenset(self._reused).union(
                former,
                (pid for pid, known in self._known.items() if _is_another(known, before.get(pid))),
                # The process that reused the pid may have ended too.
                (pid for pid, was in self._lingering.items() if _is_another(before.get(pid), was)),
            ),
        )
        self._left, self._reused = set(), set()
        self._lingering = {pid: update.before[pid] for pid in lingering if pid in update.before}
        self._updated_boottime_ns = listed_boottime_ns
        return update

    def observe(
        self,
        listed: Mapping[int, Mapping[str, ClockReading]],
        *,
        polled: Collection[str] = (),
    ) -> list[ProcessRecord]:
        """Add processes that a fast poll found on a GPU; return their records.

        `listed` contains, by pid, the UUIDs of the GPUs that list the process, each with the time
        of its query. It must contain all GPUs that were queried together, because a process may
        open several GPUs at once. `polled` are the GPUs that returned lists. A process that ended
        before `/proc` could be read is not added. A pid that another process has reused is only
        recorded as reused; the next update adds the process.
        """
        records = []
        self._left |= {
            pid
            for pid, known in self._known.items()
            if pid not in listed and not known.gpus.isdisjoint(polled)
        }
        for pid, times in sorted(listed.items()):
            cached = self._known.get(pid)
            if cached and times.keys() <= cached.gpus and pid not in self._left:
                continue
            self._left.discard(pid)
            known = _observed(pid, self.processes.read(pid), times, cached)
            if known is None:
                continue
            if _is_another(known, cached):
                self._reused.add(pid)
                continue
            self._known[pid] = known
            time_ns = min(at.time_ns for at in times.values())
            records += [
                self._record(known, change, time_ns=time_ns)
                for change, _ in _changes(known, cached)
            ]
        return records

    @property
    def shows_no_cgroups(self) -> bool:
        """Whether there are readable processes on GPUs, and all of them are in the root cgroup."""
        lines = [
            known.facts.location for known in self._known.values() if known.facts.location.line
        ]
        return bool(lines) and all(location.is_in_root for location in lines)

    def processes_on(self, gpus: Collection[str]) -> list[IncidentProcess]:
        """Return the known processes on any of these GPUs, ordered by pid."""
        known = [
            process
            for _, process in sorted(self._known.items())
            if not process.gpus.isdisjoint(gpus)
        ]
        return [
            IncidentProcess(
                pid=process.pid,
                started_boottime_ns=process.certain_facts.started_boottime_ns,
                command=process.certain_facts.command,
                container_id=process.certain_facts.location.container_id,
                pod_uid=process.certain_facts.location.pod_uid,
                job_id=process.certain_facts.location.job_id,
            )
            for process in known
        ]

    def _look_up(self, pid: int, gpus: frozenset[str], listed_boottime_ns: int) -> KnownProcess:
        cached = self._known.get(pid)
        facts = self.processes.read(pid)
        started_ns = facts.started_boottime_ns
        # A process that started after the list was read is not the listed process.
        if started_ns is not None and started_ns <= listed_boottime_ns:
            return KnownProcess(
                pid=pid,
                facts=facts,
                gpus=gpus,
                listed_boottime_ns=listed_boottime_ns,
                certain_boottime_ns=listed_boottime_ns,
                is_confirmed=True,
            )
        # Keep the known facts, because the process may have ended but still hold the GPU.
        certain_ns = cached.certain_boottime_ns if cached else listed_boottime_ns
        return KnownProcess(
            pid=pid,
            facts=cached.facts if cached else UNREADABLE,
            gpus=gpus,
            listed_boottime_ns=listed_boottime_ns,
            certain_boottime_ns=certain_ns,
            is_confirmed=False,
            has_ended=cached is not None
            and cached.is_confirmed
            and certain_ns > self._updated_boottime_ns,
        )

    def _record(self, known: KnownProcess, change: ProcessChange, *, time_ns: int) -> ProcessRecord:
        return make_record(
            known.facts,
            node=self.node,
            boot_id=self.boot_id,
            pid=known.pid,
            time_ns=time_ns,
            change=change,
            gpu_uuids=known.gpus,
        )


def make_record(
    facts: ProcessFacts,
    *,
    node: NodeId,
    boot_id: str,
    pid: int,
    time_ns: int,
    change: ProcessChange,
    gpu_uuids: Collection[str],
) -> ProcessRecord:
    """Return the record of a change of a process; `facts` may be `UNREADABLE`."""
    return ProcessRecord(
        cluster=node.cluster,
        node=node.node,
        boot_id=boot_id,
        pid=pid,
        started_boottime_ns=facts.started_boottime_ns,
        time_ns=time_ns,
        change=change,
        gpu_uuids=sorted(gpu_uuids),
        command=facts.command,
        cgroup_path=facts.location.line,
        container_id=facts.location.container_id,
        pod_uid=facts.location.pod_uid,
        job_id=facts.location.job_id,
    )


def _observed(
    pid: int,
    facts: ProcessFacts,
    times: Mapping[str, ClockReading],
    cached: KnownProcess | None,
) -> KnownProcess | None:
    """Return the pid's process on the GPUs that listed it at the given times.

    Return `None` if `/proc` does not show the process, or if it started after all these times.
    """
    started_ns = facts.started_boottime_ns
    # A process that started after a list was read is not the process listed there.
    gpus = {
        uuid: at.boottime_ns
        for uuid, at in times.items()
        if started_ns is not None and started_ns <= at.boottime_ns
    }
    if not gpus:
        return None
    return KnownProcess(
        pid=pid,
        facts=facts,
        gpus=frozenset(gpus) | (cached.gpus if cached else frozenset()),
        listed_boottime_ns=max(gpus.values()),
        certain_boottime_ns=max(gpus.values()),
        is_confirmed=True,
    )


def _changes(
    now: KnownProcess | None, before: KnownProcess | None
) -> list[tuple[ProcessChange, KnownProcess]]:
    """Return the changes of one pid's process, each with the process to report.

    If the pid was reused, the earlier process has ended and another one was first seen.
    """
    changes: list[tuple[ProcessChange, KnownProcess]] = []
    is_another = _is_another(now, before)
    if before and (now is None or is_another):
        changes.append((ProcessChange.ENDED, before))
    if now and (before is None or is_another):
        changes.append((ProcessChange.SEEN, now))
    elif now and now != before:
        changes.append((ProcessChange.CHANGED, now))
    return changes


def _is_another(now: KnownProcess | None, before: KnownProcess | None) -> bool:
    """Return whether the pid now belongs to another process."""
    if now is None or before is None or now.facts.started_boottime_ns is None:
        return False
    if before.facts.started_boottime_ns is None:
        # Only the time at which the earlier process was listed is known. A process that started
        # later is another one.
        return now.facts.started_boottime_ns > before.listed_boottime_ns
    return now.facts.started_boottime_ns != before.facts.started_boottime_ns


def _gpus_by_pid(
    listed: Mapping[str, Collection[int]], before: Mapping[int, KnownProcess]
) -> dict[int, frozenset[str]]:
    """Return the UUIDs of each process's GPUs, by pid.

    They are the GPUs in `listed` that list the process, and those of its previous GPUs that did not
    answer.
    """
    found: dict[int, set[str]] = {}
    for uuid, pids in listed.items():
        for pid in pids:
            found.setdefault(pid, set()).add(uuid)
    for pid, known in before.items():
        if silent := known.gpus - listed.keys():
            found.setdefault(pid, set()).update(silent)
    return {pid: frozenset(gpus) for pid, gpus in found.items()}
