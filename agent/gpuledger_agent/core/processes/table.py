"""Who the processes on the GPUs are, from the first listing to the end.

Here lives the table of the processes that the driver lists, with the records of their lifetimes. A
process is (pid, start time): a pid that now belongs to another process is another process.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpuledger.keys import NodeId
from gpuledger.records import IncidentProcess, ProcessChange, ProcessRecord
from gpuledger_agent.core.raw import ClockReading


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a process runs, as its cgroup shows it."""

    container_id: str | None = None
    """The runtime's id, 64 hexadecimal digits; `None` where the path names no container."""
    pod_uid: str | None = None
    """The pod's UID, or a static pod's configuration hash; `None` where the path names no pod."""
    job_id: str | None = None
    """The scheduler's job, outside of every pod; `None` where the path names none."""
    line: str | None = None
    """The line that said so, else the first line; `None` where there was none."""

    @property
    def is_of_host(self) -> bool:
        """Whether the path names neither a pod nor a container nor a job."""
        return self.container_id is None and self.pod_uid is None and self.job_id is None


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """A process as `/proc` shows it."""

    started_boottime_ns: int | None = None
    """Start since boot, in the kernel's steps of 10 ms; `None` where it could not be read."""
    command: str | None = None
    """The kernel's name of the program."""
    location: Location = Location()  # frozen, so one for all does no harm
    """Where it runs."""


# Of `nvidia-cuda-mps-server` the kernel keeps 15 letters; the control daemon is on no GPU.
_MPS_SERVER: Final = "nvidia-cuda-mps"
UNREADABLE: Final = ProcessFacts()


class ProcessLookup(Protocol):
    """Where processes are looked up by their pid."""

    def read(self, pid: int) -> ProcessFacts:
        """Return what a process shows: `UNREADABLE` if it is gone, hidden, or another one now."""


@dataclass(frozen=True, kw_only=True)
class KnownProcess:
    """A process that is, or was a tick ago, on a GPU."""

    pid: int
    """Process id."""
    facts: ProcessFacts
    """What `/proc` showed of it."""
    gpus: frozenset[str]
    """UUIDs of the GPUs that list it."""
    listed_boottime_ns: int = field(compare=False)
    """When the driver listed it last, or another process under its pid."""
    certain_boottime_ns: int = field(compare=False)
    """When the driver listed it last and `/proc` showed it after that; else when it was first."""
    is_confirmed: bool = field(compare=False)
    """Whether `/proc` showed it after that. Else it may have ended before, and its pid may have
    been another process's when it was listed: nobody can tell what was used under it."""
    has_ended: bool = field(default=False, compare=False)
    """Whether `/proc` shows it no more, and showed it after a look since the tick before: it was on
    the GPU in this tick."""

    @property
    def is_mps_server(self) -> bool:
        """Return whether it is the server of MPS, by the kernel's name of it."""
        return (self.facts.command or "").startswith(_MPS_SERVER)

    @property
    def certain_facts(self) -> ProcessFacts:
        """Return what is certain of the process that was listed."""
        return self.facts if self.is_confirmed or self.has_ended else UNREADABLE


@dataclass(frozen=True, kw_only=True)
class TableUpdate:
    """The processes of one tick."""

    now: Mapping[int, KnownProcess]
    """Those that are there, by pid."""
    before: Mapping[int, KnownProcess]
    """Those of the tick before, and those that ended earlier and are still listed as ended."""
    records: list[ProcessRecord]
    """What happened since the tick before."""
    unreadable: int
    """How many of those that were listed now `/proc` did not show."""

    def was_recycled(self, pid: int) -> bool:
        """Return whether the pid was another process before."""
        return _is_another(self.now.get(pid), self.before.get(pid))


@dataclass(kw_only=True)
class ProcessTable:
    """The processes on a node's GPUs."""

    processes: ProcessLookup
    """Where they are looked up."""
    node: NodeId
    """The node, for the records."""
    boot_id: str
    """The kernel's id of this boot, for the records."""
    _known: dict[int, KnownProcess] = field(default_factory=dict)
    _lingering: dict[int, KnownProcess] = field(default_factory=dict)
    _updated_boottime_ns: int = 0
    """When the lists of the last update were read."""

    def refresh(
        self,
        listed: Mapping[str, Collection[int]],
        *,
        lingering: Collection[int] = (),
        listed_boottime_ns: int,
        time_ns: int,
    ) -> TableUpdate:
        """Look every process up again; `listed` holds the pids on each GPU that answered.

        On a GPU that did not answer, processes are where they were: nobody can tell whether one
        that `/proc` no longer shows still holds it, and it ends with the first answer that does not
        list it. It usually died with its GPU, so only what was listed now is counted as unreadable.
        `listed_boottime_ns` is when the lists were read: a process that started later took the pid
        of one that was listed. Of the ended ones, the next update still knows those whose pids are
        `lingering`.
        """
        before = self._known
        self._known = {
            pid: self._look_up(pid, gpus, listed_boottime_ns)
            for pid, gpus in _gpus_by_pid(listed, before).items()
        }
        listed_pids = {pid for pids in listed.values() for pid in pids}
        update = TableUpdate(
            now=self._known,
            before={**self._lingering, **before},
            records=[
                self._record(known, change, time_ns=time_ns)
                for pid in sorted({*before, *self._known})
                for change, known in _changes(self._known.get(pid), before.get(pid))
            ],
            unreadable=sum(self._known[pid].certain_facts is UNREADABLE for pid in listed_pids),
        )
        self._lingering = {pid: update.before[pid] for pid in lingering if pid in update.before}
        self._updated_boottime_ns = listed_boottime_ns
        return update

    def observe(self, listed: Mapping[int, Mapping[str, ClockReading]]) -> list[ProcessRecord]:
        """Take in who is new on which GPU between two updates; return the records of it.

        `listed` holds, by pid, the GPUs that list it and when they were asked: all that were asked
        together, as a process opens several at once. Whoever has gone again before `/proc` could be
        read stays unknown, and a pid that has passed to another process is the next update's.
        """
        records = []
        for pid, times in sorted(listed.items()):
            cached = self._known.get(pid)
            if cached and times.keys() <= cached.gpus:
                continue
            known = _observed(pid, self.processes.read(pid), times, cached)
            if known is None or _is_another(known, cached):
                continue
            self._known[pid] = known
            time_ns = min(at.time_ns for at in times.values())
            records += [
                self._record(known, change, time_ns=time_ns)
                for change, _ in _changes(known, cached)
            ]
        return records

    def processes_on(self, gpus: Collection[str]) -> list[IncidentProcess]:
        """Return the processes that the last update found on any of these GPUs, by pid."""
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
        # One that started after the list was read is not the one that was listed.
        if started_ns is not None and started_ns <= listed_boottime_ns:
            return KnownProcess(
                pid=pid,
                facts=facts,
                gpus=gpus,
                listed_boottime_ns=listed_boottime_ns,
                certain_boottime_ns=listed_boottime_ns,
                is_confirmed=True,
            )
        # What was known of it stays: it may be gone and still hold the GPU.
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
    """Return the record of a change of a process."""
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
    """Return the process that GPUs listed at these times; `None` where it is not what is there."""
    started_ns = facts.started_boottime_ns
    # One that started after a list was read is not the one that was listed there.
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
    """Return what happened under one pid; a pid that changed hands is an end and a start."""
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
    """Return whether one pid has passed from one process to another."""
    if now is None or before is None or now.facts.started_boottime_ns is None:
        return False
    if before.facts.started_boottime_ns is None:
        # Nothing is known of the former but when it was listed: what started later is another.
        return now.facts.started_boottime_ns > before.listed_boottime_ns
    return now.facts.started_boottime_ns != before.facts.started_boottime_ns


def _gpus_by_pid(
    listed: Mapping[str, Collection[int]], before: Mapping[int, KnownProcess]
) -> dict[int, frozenset[str]]:
    """Return the GPUs of each process, those that did not answer included."""
    found: dict[int, set[str]] = {}
    for uuid, pids in listed.items():
        for pid in pids:
            found.setdefault(pid, set()).add(uuid)
    for pid, known in before.items():
        if silent := known.gpus - listed.keys():
            found.setdefault(pid, set()).update(silent)
    return {pid: frozenset(gpus) for pid, gpus in found.items()}
