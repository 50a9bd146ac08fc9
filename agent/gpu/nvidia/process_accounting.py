"""The driver's accounts of processes: asked once of each process when it is done with the GPU.

They are there where accounting mode is on, and outlive the process: so one that is shorter than a
tick is still known by what it used. Only pids that are new or gone are asked for. The ring buffer
holds the latest process of a pid; to whom an account belongs is judged elsewhere, by its start.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import pynvml

from agent.core.raw import ListedProcess, ProcessAccounting
from agent.gpu.nvidia.client import DeviceClient, call_nvml, list_nvml
from agent.gpu.nvidia.library import AccountingStats, NvmlLibrary
from agent.gpu.source import FailedError, UnsupportedError
from agent.metrics import NVML_ERRORS

_STATS: Final = "nvmlDeviceGetAccountingStats"
# An answer that comes too late is thrown away, so each account is given in some answers.
_GIVEN_TIMES: Final = 3
_MAX_AT_ONCE: Final = 64
_NO_PERCENT: Final = 0xFFFFFFFF
_NO_BYTES: Final = (1 << 64) - 1
_PER_PERCENT: Final = 100


@dataclass(kw_only=True)
class AccountingReader:
    """The accounts of one GPU."""

    client: DeviceClient
    """Asks the GPU."""
    _known: set[int] | None = None
    _listed: set[int] = field(default_factory=set)
    _pending: set[int] = field(default_factory=set)
    _given: deque[list[ProcessAccounting]] = field(
        default_factory=lambda: deque(maxlen=_GIVEN_TIMES)
    )

    @property
    def is_kept(self) -> bool:
        """Whether the driver keeps accounts, by the last answer; safe to ask from any thread."""
        return self._known is not None

    def query(self, listed: Iterable[ListedProcess] | None) -> tuple[ProcessAccounting, ...] | None:
        """Return the processes that are done with the GPU since some queries ago.

        `listed` are those that are on it now, `None` where that is not known. What had ended
        before the first query is not reported. Raises SourceLostError.
        """
        try:
            buffered = self._query_buffered_pids()
        except FailedError:
            # Those that were given before are given again, as in any answer.
            return None if self._known is None else self._all_given()
        if buffered is None:
            # Accounting was turned off, or is not there: its buffer begins anew.
            self._known = None
            self._given.clear()
            self._pending.clear()
            return None
        self._find_candidates(buffered, listed)
        self._given.append(self._query_candidates())
        return self._all_given()

    def _query_buffered_pids(self) -> set[int] | None:
        """Return the pids in the ring buffer, `None` where there is none; raises FailedError."""
        try:
            if (
                self.client.query_or_raise(NvmlLibrary.nvmlDeviceGetAccountingMode)
                != pynvml.NVML_FEATURE_ENABLED
            ):
                return None
            # Not through the client: it is refused while the mode is off, and may be given later.
            return set(
                list_nvml(
                    self.client.library,
                    (),
                    NvmlLibrary.nvmlDeviceGetAccountingPids,
                    self.client.handle,
                )
            )
        except UnsupportedError:
            return None

    def _all_given(self) -> tuple[ProcessAccounting, ...]:
        return tuple(account for accounts in self._given for account in accounts)

    def _find_candidates(self, buffered: set[int], listed: Iterable[ListedProcess] | None) -> None:
        """Record who may have ended: who was listed, and who came between two queries."""
        now = self._listed if listed is None else {process.pid for process in listed}
        if self._known is not None:
            self._pending |= self._listed - now
            self._pending |= buffered - self._known
        # One that is listed again goes on, and of one that has left the buffer nothing is known.
        self._pending = (self._pending - now) & buffered
        self._known, self._listed = buffered, now

    def _query_candidates(self) -> list[ProcessAccounting]:
        found = []
        for pid in sorted(self._pending)[:_MAX_AT_ONCE]:
            stats = self._stats(pid)
            if stats is not None and stats.isRunning:
                continue  # not listed any more, and not closed yet: again at the next tick
            self._pending.discard(pid)
            if stats is not None:
                found.append(_account(pid, stats))
        return found

    def _stats(self, pid: int) -> AccountingStats | None:
        """Return the account of a pid, `None` where there is none; raises SourceLostError."""
        try:
            return self.client.query_or_raise(NvmlLibrary.nvmlDeviceGetAccountingStats_v2, pid)
        except FailedError:
            return None
        except UnsupportedError:
            pass  # an older driver has the first version alone
        try:
            return call_nvml(
                self.client.library,
                NvmlLibrary.nvmlDeviceGetAccountingStats,
                self.client.handle,
                pid,
            )
        except (FailedError, UnsupportedError):
            return None
        except TypeError:
            # nvidia-ml-py writes None into a number where the driver does not tell the memory.
            NVML_ERRORS.labels(call=_STATS, error="TypeError").inc()
            return None


def _account(pid: int, stats: AccountingStats) -> ProcessAccounting:
    count = getattr(stats, "sampleCount", 0)
    gpu, memory = stats.gpuUtilization, stats.memoryUtilization
    return ProcessAccounting(
        pid=pid,
        started_us=stats.startTime,
        lived_ms=stats.time,
        gpu_percent=_mean(stats.sumGpuUtil, count) if count else _percent(gpu),
        memory_percent=_mean(stats.sumFbUtil, count) if count else _percent(memory),
        max_memory_bytes=None if stats.maxMemoryUsage == _NO_BYTES else stats.maxMemoryUsage,
    )


def _mean(summed: int, count: int) -> float:
    """Return the mean in percents; the driver sums hundredths of a percent."""
    return summed / count / _PER_PERCENT


def _percent(given: int) -> float | None:
    return None if given == _NO_PERCENT else float(given)
