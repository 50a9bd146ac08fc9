"""Who the processes on the GPUs are, from the first sight to the end.

Here lives the table of the processes that the driver lists, with the records of their lives. A
process is (pid, start time): a pid that now belongs to another process is another process.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from agent.metrics import PROCESSES_UNREADABLE
from agent.processes.procfs import UNREADABLE, ProcessFacts, ProcessReader
from gpuledger.records import IncidentProcess, ProcessChange, ProcessRecord


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

    @property
    def certain_facts(self) -> ProcessFacts:
        """Return what is certain of the process that was listed."""
        return self.facts if self.is_confirmed else UNREADABLE


@dataclass(frozen=True, kw_only=True)
class TableUpdate:
    """The processes of one tick."""

    now: Mapping[int, KnownProcess]
    """Those that are there, by pid."""
    before: Mapping[int, KnownProcess]
    """Those of the tick before, and those that ended earlier and are still listed as ended."""
    records: list[ProcessRecord]
    """What happened since the tick before."""

    def was_recycled(self, pid: int) -> bool:
        """Return whether the pid was another process before."""
        return _is_another(self.now.get(pid), self.before.get(pid))


@dataclass(kw_only=True)
class ProcessTable:
    """The processes on a node's GPUs."""

    processes: ProcessReader
    """Where they are looked up."""
    node: str
    """The node's name, for the records."""
    boot_id: str
    """The kernel's id of this boot, for the records."""
    _known: dict[int, KnownProcess] = field(default_factory=dict)
    _gone: dict[int, KnownProcess] = field(default_factory=dict)

    def call(
        self,
        listed: Mapping[str, Collection[int]],
        *,
        lingering: Collection[int] = (),
        listed_boottime_ns: int,
        time_ns: int,
    ) -> TableUpdate:
        """Call the roll: `listed` holds the pids on each GPU that answered.

        On a GPU that did not answer, processes are where they were: nobody can tell whether one
        that `/proc` no longer shows still holds it, and it ends with the first answer that does not
        list it. It usually died with its GPU, so only what was listed now is counted as unreadable.
        `listed_boottime_ns` is when
        the lists were read: a process that started later took the pid of one that was listed.
        Of the ended ones, the next roll still knows those whose pids are `lingering`.
        """
        before = self._known
        listed_pids = {pid for pids in listed.values() for pid in pids}
        self._known = {
            pid: self._know(pid, gpus, listed_boottime_ns, is_listed=pid in listed_pids)
            for pid, gpus in _gpus_by_pid(listed, before).items()
        }
        records = [
            record
            for pid in sorted({*before, *self._known})
            for record in self._tell(self._known.get(pid), before.get(pid), time_ns)
        ]
        roll = TableUpdate(now=self._known, before={**self._gone, **before}, records=records)
        self._gone = {pid: roll.before[pid] for pid in lingering if pid in roll.before}
        return roll

    def on(self, gpus: Collection[str]) -> list[IncidentProcess]:
        """Return the processes that the last roll found on any of these GPUs, by pid."""
        return [
            _involved(known)
            for _, known in sorted(self._known.items())
            if not known.gpus.isdisjoint(gpus)
        ]

    def _know(
        self, pid: int, gpus: frozenset[str], listed_boottime_ns: int, *, is_listed: bool
    ) -> KnownProcess:
        cached = self._known.get(pid)
        facts = self.processes.read(pid)
        started_ns = facts.started_boottime_ns
        is_confirmed = started_ns is not None and started_ns <= listed_boottime_ns
        if not is_confirmed:
            if is_listed:
                PROCESSES_UNREADABLE.inc()
            facts = cached.facts if cached else UNREADABLE
        return KnownProcess(
            pid=pid,
            facts=facts,
            gpus=gpus,
            listed_boottime_ns=listed_boottime_ns,
            certain_boottime_ns=cached.certain_boottime_ns
            if cached and not is_confirmed
            else listed_boottime_ns,
            is_confirmed=is_confirmed,
        )

    def _tell(
        self, now: KnownProcess | None, before: KnownProcess | None, time_ns: int
    ) -> list[ProcessRecord]:
        told: list[tuple[ProcessChange, KnownProcess]] = []
        is_another = _is_another(now, before)
        if before and (now is None or is_another):
            told.append((ProcessChange.ENDED, before))
        if now and (before is None or is_another):
            told.append((ProcessChange.SEEN, now))
        elif now and now != before:
            told.append((ProcessChange.CHANGED, now))
        return [self._record(change, known, time_ns) for change, known in told]

    def _record(self, change: ProcessChange, known: KnownProcess, time_ns: int) -> ProcessRecord:
        return ProcessRecord(
            node=self.node,
            boot_id=self.boot_id,
            pid=known.pid,
            started_boottime_ns=known.facts.started_boottime_ns,
            time_ns=time_ns,
            change=change,
            gpu_uuids=sorted(known.gpus),
            command=known.facts.command,
            cgroup_path=known.facts.location.line,
            container_id=known.facts.location.container_id,
            pod_uid=known.facts.location.pod_uid,
        )


def _involved(known: KnownProcess) -> IncidentProcess:
    facts = known.certain_facts
    return IncidentProcess(
        pid=known.pid,
        started_boottime_ns=facts.started_boottime_ns,
        command=facts.command,
        container_id=facts.location.container_id,
        pod_uid=facts.location.pod_uid,
    )


def _is_another(now: KnownProcess | None, before: KnownProcess | None) -> bool:
    """Return whether one pid has passed from one process to another."""
    if now is None or before is None or now.facts.started_boottime_ns is None:
        return False
    if before.facts.started_boottime_ns is None:
        return now.facts.started_boottime_ns > before.listed_boottime_ns
    return now.facts.started_boottime_ns != before.facts.started_boottime_ns


def _gpus_by_pid(
    listed: Mapping[str, Collection[int]], before: Mapping[int, KnownProcess]
) -> dict[int, frozenset[str]]:
    found: dict[int, set[str]] = {}
    for uuid, pids in listed.items():
        for pid in pids:
            found.setdefault(pid, set()).add(uuid)
    for pid, known in before.items():
        if silent := known.gpus - listed.keys():
            found.setdefault(pid, set()).update(silent)
    return {pid: frozenset(gpus) for pid, gpus in found.items()}
