"""The driver's accounts of processes, kept over their ends."""
# ruff: noqa: N802  # NVML's own names

from typing import Any, Final

import pynvml

from simulator.nvml.session import Handle, Session
from simulator.plan import PlannedProcess

_BUFFER_PROCESSES: Final = 4000
_NS_PER_MS: Final = 1_000_000
_NS_PER_SAMPLE: Final = 20_000_000
_PERCENT: Final = 100


class AccountingCalls(Session):
    """The functions of the accounting mode."""

    def nvmlDeviceGetAccountingMode(self, handle: Handle) -> int:
        """Return whether accounts are kept."""
        return int(self._gpu(handle).facts.accounting != "off")

    def nvmlDeviceGetAccountingBufferSize(self, handle: Handle) -> int:
        """Return the most processes that are remembered."""
        self._gpu(handle)
        return _BUFFER_PROCESSES

    def nvmlDeviceGetAccountingPids(self, handle: Handle) -> list[int]:
        """Return the pids of the processes that are remembered."""
        return [process.pid for process in self._accounted(handle)[-_BUFFER_PROCESSES:]]

    def nvmlDeviceGetAccountingStats(self, handle: Handle, pid: int) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return a process's account, in whole percents of its life."""
        return self._fill(pynvml.c_nvmlAccountingStats_t(), handle, pid)

    def nvmlDeviceGetAccountingStats_v2(self, handle: Handle, pid: int) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return a process's account with the sums of its samples."""
        gpu = self._gpu(handle)
        if gpu.facts.accounting != "v2":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        stats = self._fill(pynvml.c_nvmlAccountingStats_v2_t(), handle, pid)
        process = self._find(handle, pid)
        lived_ns = max(1, self._end_ns(process) - process.start_ns)
        busy_ns = gpu.busy_ns(process, process.start_ns, self._end_ns(process))
        stats.pid = pid
        stats.sampleCount = max(1, round(lived_ns / _NS_PER_SAMPLE))
        sum_percent = _PERCENT * _PERCENT * stats.sampleCount * busy_ns / lived_ns
        stats.sumGpuUtil = round(sum_percent)
        stats.sumFbUtil = round(sum_percent * process.spec.load.memory_ratio)
        return stats

    def _fill(self, stats: Any, handle: Handle, pid: int) -> Any:  # noqa: ANN401  # a ctypes struct
        gpu, process = self._gpu(handle), self._find(handle, pid)
        end_ns, is_running = self._end_ns(process), process.alive(self._since_epoch_ns())
        lived_ns = max(1, end_ns - process.start_ns)
        percent = _PERCENT * gpu.busy_ns(process, process.start_ns, end_ns) / lived_ns
        stats.gpuUtilization = round(percent)
        stats.memoryUtilization = round(percent * process.spec.load.memory_ratio)
        stats.maxMemoryUsage = process.spec.memory_bytes
        stats.time = 0 if is_running else lived_ns // _NS_PER_MS
        stats.startTime = self._stamp_us(process.start_ns)
        stats.isRunning = int(is_running)
        return stats

    def _end_ns(self, process: PlannedProcess) -> int:
        return min(process.end_ns, self._since_epoch_ns())

    def _find(self, handle: Handle, pid: int) -> PlannedProcess:
        found = [process for process in self._accounted(handle) if process.pid == pid]
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found[0]

    def _accounted(self, handle: Handle) -> list[PlannedProcess]:
        gpu = self._gpu(handle)
        if gpu.facts.accounting == "off":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [one for one in gpu.processes if one.start_ns <= self._since_epoch_ns()]
