"""Ends of processes with what they used over their lives, where the driver keeps accounts.

Pure but for looks at `/proc`. A record of an end waits some ticks for the accounts of its GPUs. An
account of a process that no list ever showed makes a record of its start and one of its end. The
driver keeps the latest account of a pid only, so one that began after its process was listed last
is another process's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from agent.metrics import ACCOUNTS_LATE
from agent.processes.cgroup import Location
from agent.processes.lifetime import SLACK_NS, Account, ExitedProcess, ProcessLifetime
from agent.processes.procfs import UNREADABLE, ProcessFacts, ProcessReader
from agent.processes.seen_pids import SeenPids
from agent.processes.table import TableUpdate
from gpuledger.records import GpuTotals, ProcessChange, ProcessRecord

_PATIENCE_TICKS: Final = 5
# For longer than any answer repeats an account.
_TOLD_TICKS: Final = 10
_RECENT_ENDS: Final = 256
_EARLIER_CLOCKS: Final = 8

Accounts = Mapping[str, Sequence[Account] | None]
"""By GPU; `None` where its driver keeps none."""


@dataclass(kw_only=True)
class _UnmatchedExit:
    """An end that waits for its accounts."""

    record: ProcessRecord
    life: ProcessLifetime
    missing: set[str]
    totals: list[GpuTotals]
    ticks_left: int = _PATIENCE_TICKS


@dataclass(kw_only=True)
class ExitMatcher:
    """The ends of one node's processes."""

    processes: ProcessReader
    """Where a process that was never listed is looked up."""
    node: str
    """The node's name, for the records."""
    boot_id: str
    """The kernel's id of this boot, for the records."""
    _waiting: list[_UnmatchedExit] = field(default_factory=list)
    _recent: list[ProcessLifetime] = field(default_factory=list)
    _parts: dict[ProcessLifetime, list[GpuTotals]] = field(default_factory=dict)
    _told: dict[tuple[str, int, int | None], int] = field(default_factory=dict)
    _boots: list[int] = field(default_factory=list)
    _closed: list[ExitedProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sightings = SeenPids(processes=self.processes)
        """Who was seen between the ticks."""

    def drain(self) -> list[ExitedProcess]:
        """Return who is done with a GPU since the last call, as far as there are accounts of it."""
        closed, self._closed = self._closed, []
        return closed

    def settle(
        self, roll: TableUpdate, accounts: Accounts, *, time_ns: int, boottime_ns: int
    ) -> list[ProcessRecord]:
        """Return the records that are whole by now, those of `roll` and earlier ones."""
        self._note_boot(time_ns - boottime_ns)
        kept = {uuid for uuid, given in accounts.items() if given is not None}
        if not kept and not self._waiting:
            return roll.records
        records = []
        for record in roll.records:
            known = roll.before.get(record.pid)
            if record.change is ProcessChange.ENDED and known and kept & set(record.gpu_uuids):
                self._wait(record, ProcessLifetime.of(known), kept)
            else:
                records.append(record)
        unknown = self._place_all(accounts, roll)
        records += self._release()
        return records + self._tell_unknown(unknown, time_ns)

    def _note_boot(self, boot_ns: int) -> None:
        """Note when the node booted by the wall clock; what is far from it is by an earlier one."""
        earlier = [one for one in self._boots if abs(boot_ns - one) >= SLACK_NS // 10]
        self._boots = [*earlier[-_EARLIER_CLOCKS:], boot_ns]

    def _wait(self, record: ProcessRecord, life: ProcessLifetime, kept: set[str]) -> None:
        missing = kept & set(record.gpu_uuids)
        parts = [
            one
            for other in list(self._parts)
            if other.pid == life.pid
            for one in self._parts.pop(other)
            if life.fits((life.pid, one), self._boots)
        ]
        self._waiting.append(
            _UnmatchedExit(record=record, life=life, missing=missing, totals=parts)
        )

    def _place_all(self, accounts: Accounts, roll: TableUpdate) -> dict[int, list[GpuTotals]]:
        """Put each new account to its process; return those of processes that nobody has seen."""
        unknown: dict[int, list[GpuTotals]] = {}
        for account in self._new(accounts):
            pid, totals = account
            now = roll.now.get(pid)
            if self._place(account):
                continue
            if now and (life := ProcessLifetime.of(now)).fits(account, self._boots):
                # Done with this GPU, still at work on another one.
                self._parts.setdefault(replace(life, until_ns=0), []).append(totals)
                self._close(account, now.certain_facts, life)
            elif any(life.fits(account, self._boots) for life in self._recent):
                ACCOUNTS_LATE.inc()
            else:
                unknown.setdefault(pid, []).append(totals)
        self._parts = {life: parts for life, parts in self._parts.items() if life.pid in roll.now}
        return unknown

    def _new(self, accounts: Accounts) -> Iterable[Account]:
        self._told = {key: left - 1 for key, left in self._told.items() if left > 1}
        for uuid, given in accounts.items():
            for pid, totals in given or ():
                key = (uuid, pid, totals.started_time_ns)
                is_new = key not in self._told
                self._told[key] = _TOLD_TICKS
                if is_new:
                    yield pid, totals

    def _place(self, account: Account) -> bool:
        totals = account[1]
        for waiting in self._waiting:
            if totals.gpu_uuid in waiting.missing and waiting.life.fits(account, self._boots):
                waiting.missing.discard(totals.gpu_uuid)
                waiting.totals.append(totals)
                self._close(account, _facts_of(waiting.record), waiting.life)
                return True
        return False

    def _release(self) -> list[ProcessRecord]:
        """Return the ends whose accounts are there, or have been waited for long enough."""
        whole = [one for one in self._waiting if not one.missing or not one.ticks_left]
        self._waiting = [one for one in self._waiting if one.missing and one.ticks_left]
        for waiting in self._waiting:
            waiting.ticks_left -= 1
        self._recent = [*self._recent, *(one.life for one in whole)][-_RECENT_ENDS:]
        return [with_totals(one.record, one.totals) for one in whole]

    def _tell_unknown(
        self, unknown: Mapping[int, list[GpuTotals]], time_ns: int
    ) -> list[ProcessRecord]:
        records = []
        for pid, totals in unknown.items():
            facts = self._whose(pid, totals)
            for one in totals:
                self._close((pid, one), facts, None)
            seen = self._record(pid, facts, totals, time_ns)
            ended = msgspec.structs.replace(seen, change=ProcessChange.ENDED)
            records += [seen, with_totals(ended, totals)]
        return records

    def _whose(self, pid: int, totals: Sequence[GpuTotals]) -> ProcessFacts:
        """Return whose it was: who was seen in time, else who has the pid now and had it then."""
        for one in totals:
            if facts := self.sightings.find((pid, one), self._boots):
                return facts
        starts = [one.started_time_ns for one in totals if one.started_time_ns is not None]
        return self._look(pid, min(starts, default=0) - self._boots[-1])

    def _close(self, account: Account, facts: ProcessFacts, life: ProcessLifetime | None) -> None:
        if facts.started_boottime_ns is None:
            facts = self.sightings.find(account, self._boots) or facts
        pid, totals = account
        opened_ns = life.opened_boottime_ns(account, self._boots) if life else None
        if opened_ns is None and totals.started_time_ns is not None:
            opened_ns = totals.started_time_ns - self._boots[-1]
        self._closed.append(ExitedProcess(pid, facts, totals, opened_ns))

    def _look(self, pid: int, opened_boottime_ns: int) -> ProcessFacts:
        """Look the process up, which may live on; one that started later has only its pid."""
        facts = self.processes.read(pid)
        started_ns = facts.started_boottime_ns
        return facts if started_ns is not None and started_ns <= opened_boottime_ns else UNREADABLE

    def _record(
        self, pid: int, facts: ProcessFacts, totals: Sequence[GpuTotals], time_ns: int
    ) -> ProcessRecord:
        return ProcessRecord(
            node=self.node,
            boot_id=self.boot_id,
            pid=pid,
            started_boottime_ns=facts.started_boottime_ns,
            time_ns=time_ns,
            change=ProcessChange.SEEN,
            gpu_uuids=sorted({one.gpu_uuid for one in totals}),
            command=facts.command,
            cgroup_path=facts.location.line,
            container_id=facts.location.container_id,
            pod_uid=facts.location.pod_uid,
        )


def with_totals(record: ProcessRecord, totals: Sequence[GpuTotals]) -> ProcessRecord:
    """Return the record of an end with what the process used, of each GPU and in sum."""
    if not totals:
        return record
    busy = [one.busy_seconds for one in totals if one.busy_seconds is not None]
    held = [one.max_memory_bytes for one in totals if one.max_memory_bytes is not None]
    return msgspec.structs.replace(
        record,
        totals=sorted(totals, key=lambda one: one.gpu_uuid),
        busy_seconds=sum(busy) if busy else None,
        max_memory_bytes=max(held, default=None),
    )


def _facts_of(record: ProcessRecord) -> ProcessFacts:
    where = Location(container_id=record.container_id, pod_uid=record.pod_uid)
    return ProcessFacts(started_boottime_ns=record.started_boottime_ns, location=where)
