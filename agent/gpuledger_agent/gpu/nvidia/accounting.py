"""Reads NVML's process accounting: the past use of a GPU by processes that no longer use it.

In accounting mode, the driver keeps an accounting entry (account) of each process in a ring buffer,
which contains the latest account of each pid. An account remains after its process has ended, so it
shows the use of processes that ran for less than a tick. Each account is queried once, after the
process has stopped using the GPU: when its pid is new in the ring buffer or no longer listed. The
accounts of a few recently reported pids are queried again, because a process that is still running
may have used the GPU again.
`gpuledger_agent.core.processes.accounting` assigns an account to a process by its start time.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import pynvml

from gpuledger_agent.core.raw import ListedProcess, ProcessAccounting
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient, call_nvml, list_nvml
from gpuledger_agent.gpu.nvidia.library import AccountingStats, NvmlLibrary
from gpuledger_agent.gpu.protocol import FailedError, UnsupportedError
from gpuledger_agent.metrics import NVML_ERRORS

_STATS: Final = "nvmlDeviceGetAccountingStats"
# Late answers are discarded, so each account is repeated in this many answers.
_ANSWERS_EACH: Final = 3
_MAX_AT_ONCE: Final = 64
_MAX_AGAIN: Final = 8
"""Maximum number of recently reported pids whose accounts are queried again; each requires a call
per tick."""
_NO_PERCENT: Final = 0xFFFFFFFF
_NO_BYTES: Final = (1 << 64) - 1
_PER_PERCENT: Final = 100


@dataclass(kw_only=True)
class AccountingReader:
    """Reads the driver's accounts of the processes that have used one GPU."""

    client: DeviceClient
    """The client for the GPU."""
    _known: set[int] | None = None
    _listed: set[int] = field(default_factory=set)
    _pending: set[int] = field(default_factory=set)
    _reported: dict[int, int] = field(default_factory=dict)
    """The start times of the latest reported accounts, by pid, newest last."""
    _latest: deque[list[ProcessAccounting]] = field(
        default_factory=lambda: deque(maxlen=_ANSWERS_EACH)
    )

    @property
    def is_kept(self) -> bool:
        """Whether the driver kept accounts at the last query; can be read from any thread."""
        return self._known is not None

    def query(self, listed: Iterable[ListedProcess] | None) -> tuple[ProcessAccounting, ...] | None:
        """Return new accounts and those of the last few queries; `None` if accounting is off.

        `listed` contains the processes that use the GPU now; `None` if they are unknown. Processes
        that ended before the first query are not reported. Raises `SourceLostError`.
        """
        try:
            buffered = self._query_buffered_pids()
        except FailedError:
            # Return the accounts of the previous queries again.
            if self._known is None:
                return None
        else:
            if buffered is None:
                # Accounting is off or not supported. When it is turned on, its buffer is empty.
                self._known = None
                self._latest.clear()
                self._pending.clear()
                self._reported.clear()
                return None
            self._find_candidates(buffered, listed)
            # `_query_again` first, so that it does not repeat what `_query_pending` reports.
            self._latest.append([*self._query_again(), *self._query_pending()])
        return tuple(account for accounts in self._latest for account in accounts)

    def _query_buffered_pids(self) -> set[int] | None:
        """Return the pids in the ring buffer; `None` if accounting is off.

        Raises `FailedError`.
        """
        client, get_mode = self.client, NvmlLibrary.nvmlDeviceGetAccountingMode
        mode = client.query(get_mode)
        if mode is None and not client.is_unsupported((get_mode.__name__,)):
            raise FailedError(f"{get_mode.__name__}: no answer")
        if mode != pynvml.NVML_FEATURE_ENABLED:
            return None
        try:
            # Not through the client, which would remember a refusal: the driver refuses the call
            # while accounting is off, but accounting may be turned on later.
            function = NvmlLibrary.nvmlDeviceGetAccountingPids
            return set(list_nvml(client.library, (), function, client.handle))
        except UnsupportedError:
            return None

    def _find_candidates(self, buffered: set[int], listed: Iterable[ListedProcess] | None) -> None:
        """Record the pids whose processes may have ended.

        They are no longer listed, or new in the ring buffer (`buffered`) without being listed.
        """
        now = self._listed if listed is None else {process.pid for process in listed}
        if self._known is not None:
            self._pending |= self._listed - now
            self._pending |= buffered - self._known
        # Listed processes are still running, and pids that left the buffer have no account.
        self._pending = (self._pending - now) & buffered
        self._known, self._listed = buffered, now

    def _query_pending(self) -> list[ProcessAccounting]:
        """Query the accounts of up to `_MAX_AT_ONCE` processes that may have ended; return them.

        Raises `SourceLostError`.
        """
        found = []
        for pid in sorted(self._pending)[:_MAX_AT_ONCE]:
            stats = self._query_stats(pid)
            if stats is not None and stats.isRunning:
                continue  # no longer listed but not closed yet: query it again in the next tick
            self._pending.discard(pid)
            if stats is not None:
                found.append(self._report(pid, stats))
        return found

    def _query_again(self) -> list[ProcessAccounting]:
        """Query the accounts of recently reported pids again; return those that are new.

        If a process used the GPU again between two ticks, only a new account shows this: no list
        contains the process, and its pid has been in the ring buffer since the first use. Raises
        `SourceLostError`.
        """
        known = self._known or set()
        candidates = [pid for pid in self._reported if pid in known - self._listed - self._pending]
        found = []
        for pid in candidates:
            stats = self._query_stats(pid)
            if stats is not None and not stats.isRunning and stats.startTime != self._reported[pid]:
                found.append(self._report(pid, stats))
        return found

    def _report(self, pid: int, stats: AccountingStats) -> ProcessAccounting:
        self._reported.pop(pid, None)
        self._reported[pid] = stats.startTime
        if len(self._reported) > _MAX_AGAIN:
            del self._reported[next(iter(self._reported))]
        return _account(pid, stats)

    def _query_stats(self, pid: int) -> AccountingStats | None:
        """Return the account of a pid; `None` if there is none. Raises `SourceLostError`."""
        client, newer = self.client, NvmlLibrary.nvmlDeviceGetAccountingStats_v2
        stats = client.query_varying(newer, pid)
        # Older drivers have only the first version.
        if stats is not None or not client.is_unsupported((newer.__name__,)):
            return stats
        try:
            function = NvmlLibrary.nvmlDeviceGetAccountingStats
            return call_nvml(client.library, function, client.handle, pid)
        except (FailedError, UnsupportedError):
            return None
        except TypeError:
            # If the driver does not know the memory, nvidia-ml-py assigns None to a number.
            NVML_ERRORS.labels(call=_STATS, error="TypeError").inc()
            return None


def _account(pid: int, stats: AccountingStats) -> ProcessAccounting:
    # The second version has sums in hundredths of a percent, which give the exact mean; the first
    # has only whole percents.
    count = getattr(stats, "sampleCount", 0)
    gpu_percent: float | None
    memory_percent: float | None
    if count:
        gpu_percent = stats.sumGpuUtil / count / _PER_PERCENT
        memory_percent = stats.sumFbUtil / count / _PER_PERCENT
    else:
        gpu_percent, memory_percent = (
            None if percent == _NO_PERCENT else float(percent)
            for percent in (stats.gpuUtilization, stats.memoryUtilization)
        )
    return ProcessAccounting(
        pid=pid,
        started_us=stats.startTime,
        lived_ms=stats.time,
        gpu_percent=gpu_percent,
        memory_percent=memory_percent,
        max_memory_bytes=None if stats.maxMemoryUsage == _NO_BYTES else stats.maxMemoryUsage,
    )
