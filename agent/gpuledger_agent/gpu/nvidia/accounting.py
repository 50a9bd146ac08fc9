"""The driver's accounts of processes that are done with a GPU, where its accounting mode is on.

They outlive the process: so one that is shorter than a tick is still known by what it used. Each is
queried once, when the process is done with the GPU: those of pids that are new or gone, and of some
that were told of late, as a process that lives on may have come back for a moment. The driver's
ring buffer holds the latest account of a pid; to which process an account belongs is decided by its
start, in `gpuledger_agent.core.processes.accounting`.
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
# An answer that comes too late is thrown away, so each account is in some answers.
_ANSWERS_EACH: Final = 3
_MAX_AT_ONCE: Final = 64
_MAX_AGAIN: Final = 8
"""Of how many pids without a new sign an account is asked for again: a question a tick for each."""
_NO_PERCENT: Final = 0xFFFFFFFF
_NO_BYTES: Final = (1 << 64) - 1
_PER_PERCENT: Final = 100


@dataclass(kw_only=True)
class AccountingReader:
    """The driver's accounts of the processes of one GPU."""

    client: DeviceClient
    """Queries the GPU."""
    _known: set[int] | None = None
    _listed: set[int] = field(default_factory=set)
    _pending: set[int] = field(default_factory=set)
    _reported: dict[int, int] = field(default_factory=dict)
    """When the latest accounts began, by pid, the newest last."""
    _latest: deque[list[ProcessAccounting]] = field(
        default_factory=lambda: deque(maxlen=_ANSWERS_EACH)
    )

    @property
    def is_kept(self) -> bool:
        """Whether the driver keeps accounts, by the last answer; safe to read from any thread."""
        return self._known is not None

    def query(self, listed: Iterable[ListedProcess] | None) -> tuple[ProcessAccounting, ...] | None:
        """Return the processes that are done with the GPU since some queries ago.

        `listed` are those that are on it now, `None` where that is not known. What had ended
        before the first query is not reported. Raises SourceLostError.
        """
        try:
            buffered = self._query_buffered_pids()
        except FailedError:
            # Those of the answers before come again, as in any answer.
            if self._known is None:
                return None
        else:
            if buffered is None:
                # Accounting was turned off, or is not there: its buffer begins anew.
                self._known = None
                self._latest.clear()
                self._pending.clear()
                self._reported.clear()
                return None
            self._find_candidates(buffered, listed)
            # First those that were told: whoever is told now is not asked for twice.
            self._latest.append([*self._query_again(), *self._query_pending()])
        return tuple(account for accounts in self._latest for account in accounts)

    def _query_buffered_pids(self) -> set[int] | None:
        """Return the pids in the ring buffer, `None` where there is none; raises FailedError."""
        client, get_mode = self.client, NvmlLibrary.nvmlDeviceGetAccountingMode
        mode = client.query(get_mode)
        if mode is None and not client.is_unsupported((get_mode.__name__,)):
            raise FailedError(f"{get_mode.__name__}: no answer")
        if mode != pynvml.NVML_FEATURE_ENABLED:
            return None
        try:
            # Not through the client: it is refused while the mode is off, and may be there later.
            function = NvmlLibrary.nvmlDeviceGetAccountingPids
            return set(list_nvml(client.library, (), function, client.handle))
        except UnsupportedError:
            return None

    def _find_candidates(self, buffered: set[int], listed: Iterable[ListedProcess] | None) -> None:
        """Record which may have ended: no longer listed, or there only between two queries."""
        now = self._listed if listed is None else {process.pid for process in listed}
        if self._known is not None:
            self._pending |= self._listed - now
            self._pending |= buffered - self._known
        # One that is listed again goes on, and of one that has left the buffer nothing is known.
        self._pending = (self._pending - now) & buffered
        self._known, self._listed = buffered, now

    def _query_pending(self) -> list[ProcessAccounting]:
        """Return the accounts of those that may have ended; raises SourceLostError."""
        found = []
        for pid in sorted(self._pending)[:_MAX_AT_ONCE]:
            stats = self._query_stats(pid)
            if stats is not None and stats.isRunning:
                continue  # not listed any more, and not closed yet: again at the next tick
            self._pending.discard(pid)
            if stats is not None:
                found.append(self._report(pid, stats))
        return found

    def _query_again(self) -> list[ProcessAccounting]:
        """Return new accounts of those that were told of late; raises SourceLostError.

        Nothing shows that a process came back that is neither listed now nor was a tick ago: its
        pid has been in the buffer since the first time.
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
        """Return the account of a pid, `None` where there is none; raises SourceLostError."""
        client, newer = self.client, NvmlLibrary.nvmlDeviceGetAccountingStats_v2
        stats = client.query_varying(newer, pid)
        # An older driver has the first version alone.
        if stats is not None or not client.is_unsupported((newer.__name__,)):
            return stats
        try:
            function = NvmlLibrary.nvmlDeviceGetAccountingStats
            return call_nvml(client.library, function, client.handle, pid)
        except (FailedError, UnsupportedError):
            return None
        except TypeError:
            # nvidia-ml-py writes None into a number where the driver does not know the memory.
            NVML_ERRORS.labels(call=_STATS, error="TypeError").inc()
            return None


def _account(pid: int, stats: AccountingStats) -> ProcessAccounting:
    # The second version sums hundredths of a percent, which gives the exact mean; the first one
    # has whole percents.
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
