"""How busy a GPU and its processes are, in whole percents of the driver's windows."""

from typing import Any, Final

import pynvml

from simulator.nvml.session import Handle, Session
from simulator.plan import PlannedProcess

# ruff: noqa: N802, N803  # NVML's own names


class Utilization(Session):
    """The functions that tell of the driver's sampling windows."""

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return whole percents of the newest completed window."""
        windows = self._windows_of(handle)
        window = windows.latest(self._since_epoch_ns())
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = windows.gpu_percent(window)
        rates.memory = windows.memory_percent(window)
        return rates

    def nvmlDeviceGetSamples(
        self, device: Handle, sampling_type: int, timeStamp: int
    ) -> tuple[int, list[Any]]:
        """Return the ring buffer's samples newer than `timeStamp`; NotFound when there are none."""
        windows = self._windows_of(device)
        values = {
            pynvml.NVML_TOTAL_POWER_SAMPLES: windows.milliwatts,
            pynvml.NVML_GPU_UTILIZATION_SAMPLES: windows.gpu_percent,
            pynvml.NVML_MEMORY_UTILIZATION_SAMPLES: windows.memory_percent,
        }
        if sampling_type not in values:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        value = values[sampling_type]
        newer = windows.newer_than(timeStamp, now_ns=self._since_epoch_ns())
        if not newer:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        samples = [_sample(window.timestamp_us, value(window)) for window in newer]
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Return each buffered sample newer than `timeStamp`; NotFound when there are none."""
        windows = self._windows_of(handle)
        found = []
        for window in windows.newer_than(timeStamp, now_ns=self._since_epoch_ns()):
            for sample in windows.process_samples(window):
                struct = pynvml.c_nvmlProcessUtilizationSample_t()
                struct.pid = sample.pid
                struct.timeStamp = sample.timestamp_us
                struct.smUtil = sample.sm_percent
                struct.memUtil = sample.memory_percent
                found.append(struct)
        if not found:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found


def _sample(timestamp_us: int, value: int) -> Any:  # noqa: ANN401  # a ctypes struct
    sample = pynvml.c_nvmlSample_t()
    sample.timeStamp = timestamp_us
    sample.sampleValue.uiVal = value
    return sample


# The driver's accounts of processes, kept over their ends.

# ruff: noqa: N802  # NVML's own names


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
