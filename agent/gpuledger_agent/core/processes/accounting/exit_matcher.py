"""Matches the driver's accounts to processes, and adds them to the processes' `ended` records.

An account is the driver's accounting entry for a process that has closed a GPU. The record that
reports a process's end waits up to five ticks for the accounts from the process's GPUs. If an
account belongs to a process that no list contained, a `seen` and an `ended` record are made for the
process. The driver only keeps a pid's latest account, so an account that began after a process's
last listing belongs to another process.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from gpuledger.clock import NS_PER_SECOND
from gpuledger.keys import NodeId
from gpuledger.records import GpuTotals, ProcessChange, ProcessRecord
from gpuledger_agent.core.processes.table import (
    UNREADABLE,
    KnownProcess,
    Location,
    ProcessFacts,
    ProcessLookup,
    TableUpdate,
    make_record,
)

_SLACK_NS: Final = NS_PER_SECOND
"""Tolerance when an account's start is compared with a process's start: the kernel counts starts in
hundredths of a second, and the wall clock may have been set."""
_MAX_WAIT_TICKS: Final = 5
# No driver repeats an account for longer than this.
_REPEATED_TICKS: Final = 10
_RECENT_EXITS: Final = 256
_EARLIER_CLOCKS: Final = 8

DriverAccount = tuple[int, GpuTotals]
"""A pid, and its process's use of one GPU according to the driver's accounting entry."""
DriverAccounts = Mapping[str, Sequence[DriverAccount] | None]
"""The accounts of each GPU, by UUID; `None` if the driver keeps no accounts for the GPU."""


class ExitedProcess(NamedTuple):
    """A process that has closed a GPU, with the driver's account of its use of that GPU."""

    pid: int
    """The process's pid."""
    facts: ProcessFacts
    """The process's facts from `/proc`; `UNREADABLE` if it could not be identified."""
    totals: GpuTotals
    """The process's use of the GPU, from the account."""
    opened_boottime_ns: int | None
    """When the process opened the GPU, since boot; `None` if the driver does not report it."""


@dataclass(frozen=True, kw_only=True)
class ProcessLifetime:
    """The known part of a process's lifetime, in nanoseconds since boot."""

    pid: int
    """The process's pid."""
    from_ns: int
    """Earliest possible start of the process."""
    until_ns: int
    """Last time at which the process was certainly listed."""

    @classmethod
    def of(cls, known: KnownProcess) -> "ProcessLifetime":
        """Return the lifetime of a process in the table."""
        return cls(
            pid=known.pid,
            from_ns=known.facts.started_boottime_ns or 0,
            until_ns=known.certain_boottime_ns,
        )

    def fits(self, account: DriverAccount, boots: Iterable[int]) -> bool:
        """Return whether an account can belong to this process.

        If the account has no start, only the pid is compared. An account's start is a time of the
        wall clock. `boots` are the node's possible boot times by the wall clock: several if the
        clock was set.
        """
        pid, totals = account
        if pid != self.pid or totals.started_time_ns is None:
            return pid == self.pid
        return self.opened_boottime_ns(account, boots) is not None

    def opened_boottime_ns(self, account: DriverAccount, boots: Iterable[int]) -> int | None:
        """Return when the process opened the GPU, in nanoseconds since boot.

        Return `None` if the time is unknown or not in this lifetime. `boots` are the node's
        possible boot times by the wall clock.
        """
        started_ns = account[1].started_time_ns
        if started_ns is None:
            return None
        earliest_ns, latest_ns = self.from_ns - _SLACK_NS, self.until_ns + _SLACK_NS // 10
        opened = (started_ns - boot_ns for boot_ns in boots)
        return next((ns for ns in opened if earliest_ns <= ns <= latest_ns), None)


@dataclass(kw_only=True)
class _UnmatchedExit:
    """An `ended` record that waits for the accounts of the GPUs in `missing`."""

    record: ProcessRecord
    lifetime: ProcessLifetime
    missing: set[str]
    totals: list[GpuTotals]
    ticks_left: int = _MAX_WAIT_TICKS


@dataclass(kw_only=True)
class ExitMatcher:
    """Matches the driver's accounts to the processes of one node."""

    processes: ProcessLookup
    """Reads facts about processes that have an account but were in no list."""
    node: NodeId
    """The node, for the records."""
    boot_id: str
    """The kernel's id of this boot, for the records."""
    _waiting: list[_UnmatchedExit] = field(default_factory=list)
    _recent: list[ProcessLifetime] = field(default_factory=list)
    """Lifetimes of processes whose end was published recently, to detect accounts that arrive too
    late."""
    _partial: dict[ProcessLifetime, list[GpuTotals]] = field(default_factory=dict)
    """Accounts of processes that have closed one GPU but still use another, by lifetime."""
    _repeats: dict[tuple[str, int, int | None], int] = field(default_factory=dict)
    """Number of ticks for which the driver may still repeat an account, by GPU, pid and start."""
    _boots: list[int] = field(default_factory=list)
    """Possible boot times of the node: those that result from earlier settings of the wall clock
    and, last, the one by the present setting."""
    exited: list[ExitedProcess] = field(default_factory=list)
    """Processes with an account that have closed a GPU. The caller takes them and empties the
    list."""
    late: int = 0
    """Number of accounts that arrived after the end of their process had been published. The caller
    reads the number and sets it to 0."""

    def match(
        self, table_update: TableUpdate, accounts: DriverAccounts, *, time_ns: int, boottime_ns: int
    ) -> list[ProcessRecord]:
        """Return the process records to publish now; keep `ended` records that lack accounts.

        The result contains the update's other records, and earlier `ended` records that have all
        their accounts or have waited long enough. `accounts` are the tick's accounts by GPU;
        `time_ns` and `boottime_ns` are the tick's time.
        """
        boot_ns = time_ns - boottime_ns
        # A boot time that differs clearly from the current one is from before the clock was set.
        earlier = [ns for ns in self._boots if abs(boot_ns - ns) >= _SLACK_NS // 10]
        self._boots = [*earlier[-_EARLIER_CLOCKS:], boot_ns]
        accounting_gpus = {uuid for uuid, given in accounts.items() if given is not None}
        if not accounting_gpus and not self._waiting:
            return table_update.records
        records = []
        for record in table_update.records:
            known = table_update.before.get(record.pid)
            missing = accounting_gpus & set(record.gpu_uuids)
            if record.change is ProcessChange.ENDED and known and missing:
                self._wait(record, ProcessLifetime.of(known), missing)
            else:
                records.append(record)
        unknown = self._assign_all(accounts, table_update)
        # An `ended` record is complete if it has all accounts or has waited long enough.
        whole = [exit_ for exit_ in self._waiting if not exit_.missing or not exit_.ticks_left]
        self._waiting = [exit_ for exit_ in self._waiting if exit_.missing and exit_.ticks_left]
        for waiting in self._waiting:
            waiting.ticks_left -= 1
        self._recent = [*self._recent, *(exit_.lifetime for exit_ in whole)][-_RECENT_EXITS:]
        records += [with_totals(exit_.record, exit_.totals) for exit_ in whole]
        return records + self._report_unknown(unknown, time_ns)

    def _wait(self, record: ProcessRecord, lifetime: ProcessLifetime, missing: set[str]) -> None:
        """Keep an `ended` record until the accounts of the GPUs in `missing` arrive.

        Accounts that arrived while the process was still running are added to the record at once.
        """
        totals = [
            part
            for other in list(self._partial)
            if other.pid == lifetime.pid
            for part in self._partial.pop(other)
            if lifetime.fits((lifetime.pid, part), self._boots)
        ]
        self._waiting.append(
            _UnmatchedExit(record=record, lifetime=lifetime, missing=missing, totals=totals)
        )

    def _assign_all(
        self, accounts: DriverAccounts, table_update: TableUpdate
    ) -> dict[int, list[GpuTotals]]:
        """Assign new accounts to their processes.

        Return the accounts of processes that no list contained, by pid.
        """
        unknown: dict[int, list[GpuTotals]] = {}
        for account in self._new(accounts):
            pid, totals = account
            now = table_update.now.get(pid)
            if self._assign(account):
                continue
            if now and (lifetime := ProcessLifetime.of(now)).fits(account, self._boots):
                # The process has closed this GPU but still uses another one.
                self._partial.setdefault(replace(lifetime, until_ns=0), []).append(totals)
                self._exit(account, now.certain_facts, lifetime)
            elif any(lifetime.fits(account, self._boots) for lifetime in self._recent):
                self.late += 1
            else:
                unknown.setdefault(pid, []).append(totals)
        # Drop accounts that no `ended` record took although their pid is gone: it was reused.
        self._partial = {
            lifetime: parts
            for lifetime, parts in self._partial.items()
            if lifetime.pid in table_update.now
        }
        return unknown

    def _new(self, accounts: DriverAccounts) -> Iterator[DriverAccount]:
        """Yield only the new accounts, because the driver repeats each account for a few ticks."""
        self._repeats = {key: left - 1 for key, left in self._repeats.items() if left > 1}
        for uuid, given in accounts.items():
            for pid, totals in given or ():
                key = (uuid, pid, totals.started_time_ns)
                is_new = key not in self._repeats
                # Each repetition may be followed by another.
                self._repeats[key] = _REPEATED_TICKS
                if is_new:
                    yield pid, totals

    def _assign(self, account: DriverAccount) -> bool:
        """Add an account to the `ended` record that waits for it.

        Return whether such a record was found.
        """
        totals = account[1]
        for waiting in self._waiting:
            if totals.gpu_uuid in waiting.missing and waiting.lifetime.fits(account, self._boots):
                waiting.missing.discard(totals.gpu_uuid)
                waiting.totals.append(totals)
                record = waiting.record
                location = Location(
                    container_id=record.container_id,
                    pod_uid=record.pod_uid,
                    job_id=record.job_id,
                )
                facts = ProcessFacts(
                    started_boottime_ns=record.started_boottime_ns, location=location
                )
                self._exit(account, facts, waiting.lifetime)
                return True
        return False

    def _report_unknown(
        self, unknown: Mapping[int, list[GpuTotals]], time_ns: int
    ) -> list[ProcessRecord]:
        """Return a `seen` and an `ended` record for each process in `unknown`.

        `unknown` are the accounts, by pid, of processes that were never in a GPU's process list.
        """
        records = []
        for pid, totals in unknown.items():
            facts = self._owner_of(pid, totals)
            for part in totals:
                self._exit((pid, part), facts, None)
            seen = make_record(
                facts,
                node=self.node,
                boot_id=self.boot_id,
                pid=pid,
                time_ns=time_ns,
                change=ProcessChange.SEEN,
                gpu_uuids={part.gpu_uuid for part in totals},
            )
            ended = msgspec.structs.replace(seen, change=ProcessChange.ENDED)
            records += [seen, with_totals(ended, totals)]
        return records

    def _owner_of(self, pid: int, totals: Sequence[GpuTotals]) -> ProcessFacts:
        """Return the facts about the pid's process if it started before the accounts in `totals`.

        Otherwise return `UNREADABLE`, because the pid now belongs to another process or to none.
        """
        starts = [part.started_time_ns for part in totals if part.started_time_ns is not None]
        opened_ns = min(starts, default=0) - self._boots[-1]
        facts = self.processes.read(pid)
        started_ns = facts.started_boottime_ns
        # The process may still run without using the GPU. A process that started later has reused
        # the pid.
        return facts if started_ns is not None and started_ns <= opened_ns else UNREADABLE

    def _exit(
        self, account: DriverAccount, facts: ProcessFacts, lifetime: ProcessLifetime | None
    ) -> None:
        """Add to `exited` that a process has closed a GPU.

        `lifetime` is the process's known lifetime; `None` if no list contained the process.
        """
        pid, totals = account
        opened_ns = lifetime.opened_boottime_ns(account, self._boots) if lifetime else None
        if opened_ns is None and totals.started_time_ns is not None:
            opened_ns = totals.started_time_ns - self._boots[-1]
        self.exited.append(ExitedProcess(pid, facts, totals, opened_ns))


def with_totals(record: ProcessRecord, totals: Sequence[GpuTotals]) -> ProcessRecord:
    """Return an `ended` record with the process's use added, per GPU and in total."""
    if not totals:
        return record
    busy = [part.busy_ns for part in totals if part.busy_ns is not None]
    peaks = [part.max_memory_bytes for part in totals if part.max_memory_bytes is not None]
    return msgspec.structs.replace(
        record,
        totals=sorted(totals, key=lambda part: part.gpu_uuid),
        busy_ns=sum(busy) if busy else None,
        max_memory_bytes=max(peaks, default=None),
    )
