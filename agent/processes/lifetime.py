"""Which process an account of the driver is of: pids are given again, lives are not. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.processes.procfs import ProcessFacts
from agent.processes.table import KnownProcess
from gpuledger.records import GpuTotals

SLACK_NS: Final = 1_000_000_000
"""The kernel counts starts in hundredths of a second, and the wall clock may be set in between."""

Account = tuple[int, GpuTotals]
"""A pid, and what it used of one GPU."""


class ExitedProcess(NamedTuple):
    """A process that is done with a GPU, and what the driver's account says of it."""

    pid: int
    """Its pid."""
    facts: ProcessFacts
    """Whose it is; unreadable where nobody saw that."""
    totals: GpuTotals
    """What it used of the GPU."""
    opened_boottime_ns: int | None
    """When it opened the GPU, since boot; `None` where the driver does not say."""


@dataclass(frozen=True, kw_only=True)
class ProcessLifetime:
    """Between which instants a process was on GPUs, since boot."""

    pid: int
    """Its pid."""
    from_ns: int
    """It did not start earlier."""
    until_ns: int
    """It was listed until then."""

    @classmethod
    def of(cls, known: KnownProcess) -> "ProcessLifetime":
        """Return the life of a process in the table."""
        return cls(
            pid=known.pid,
            from_ns=known.facts.started_boottime_ns or 0,
            until_ns=known.certain_boottime_ns,
        )

    def fits(self, account: Account, boots: Iterable[int]) -> bool:
        """Whether an account can be this process's; `boots` is when the node booted.

        That has several answers where the wall clock was set: an account's start is by the clock
        as it was then.
        """
        pid, totals = account
        if pid != self.pid or totals.started_time_ns is None:
            return pid == self.pid
        return self.opened_boottime_ns(account, boots) is not None

    def opened_boottime_ns(self, account: Account, boots: Iterable[int]) -> int | None:
        """Return when the account began, since boot; `None` where that was not in this life."""
        started_ns = account[1].started_time_ns
        if started_ns is None:
            return None
        earliest_ns, latest_ns = self.from_ns - SLACK_NS, self.until_ns + SLACK_NS // 10
        opened = (started_ns - boot_ns for boot_ns in boots)
        return next((one for one in opened if earliest_ns <= one <= latest_ns), None)
