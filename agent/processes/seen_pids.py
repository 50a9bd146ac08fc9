"""Whom pids belonged to that came and went between two ticks.

The driver's accounts say what a process used that no tick ever listed, but not whose it was, and
its `/proc` is gone with it. So pids are looked up as soon as they are seen. A sighting is of an
account only where the process had started before the account began and was there after that.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from agent.processes.lifetime import Account, ProcessLifetime
from agent.processes.procfs import ProcessFacts, ProcessReader

_MAX: Final = 1024


@dataclass(kw_only=True)
class SeenPids:
    """The latest processes that were seen between ticks; bounded."""

    processes: ProcessReader
    """Where they are looked up."""
    _seen: dict[int, tuple[ProcessLifetime, ProcessFacts]] = field(default_factory=dict)

    def see(self, pids: Iterable[int], *, seen_boottime_ns: int) -> None:
        """Look processes up that had a GPU open at that time, or a moment before."""
        for pid in sorted(pids):
            facts = self.processes.read(pid)
            started_ns = facts.started_boottime_ns
            # One that started later has only the pid of the one that was seen.
            if started_ns is not None and started_ns <= seen_boottime_ns:
                life = ProcessLifetime(pid=pid, from_ns=started_ns, until_ns=seen_boottime_ns)
                self._seen.pop(pid, None)
                self._seen[pid] = life, facts
        while len(self._seen) > _MAX:
            del self._seen[next(iter(self._seen))]

    def find(self, account: Account, boots: Iterable[int]) -> ProcessFacts | None:
        """Return whose account it is, where that was seen; `boots` is when the node booted."""
        life, facts = self._seen.get(account[0], (None, None))
        is_dated = account[1].started_time_ns is not None
        return facts if life and is_dated and life.fits(account, boots) else None
