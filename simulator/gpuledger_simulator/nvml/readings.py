"""Gauges, counters, utilization and the process accounts of NVML's accounting mode.

Gauges and counters come directly from the simulated device. Like a real driver, this module reports
utilization in whole percent, for the windows of `gpuledger_simulator.sampling_windows`.
"""

from functools import reduce
from operator import or_
from typing import Any, Final

import pynvml

from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger_simulator.nvml.session import Handle, Subject
from gpuledger_simulator.plan import PlannedProcess

# ruff: noqa: N802, N803, A002  # NVML's own names


_IDLE_SM_MEGAHERTZ: Final = 345
_COOL_CELSIUS: Final = 31
_WARMING_CELSIUS: Final = 42
_MAX_CELSIUS: Final = 87
_WARMING_NS: Final = 20 * NS_PER_SECOND
_POWER_STEP_NS: Final = 100 * NS_PER_MS
_POWER_WINDOW_NS: Final = 25 * NS_PER_MS
_ENGINE_NS: Final = 167_000_000
_IDLE_PERFORMANCE_STATE: Final = 8
_IDLE_REASON: Final = 0x1
_REASONS: Final = {
    "power": 0x4,
    "sync_boost": 0x10,
    "software_thermal": 0x20,
    "hardware_thermal": 0x48,
    "power_brake": 0x88,
}
"""Bits by the scenario's names; the two hardware slowdowns share a bit."""


class Readings(Subject):
    """The functions that read a device's gauges and counters."""

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the current memory use; only version 2 reports the driver's reserve separately.

        Raise NotSupported if the GPU shares the node's memory.
        """
        gpu = self._session.gpu(handle)
        if gpu.facts.unified_memory:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        used = gpu.used_bytes(self._session.since_epoch_ns())
        reserved = gpu.facts.model.reserved_bytes
        memory = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        memory.total = gpu.facts.memory_bytes
        memory.free = gpu.facts.room_bytes - used
        # The first version counts the driver's reserve as used.
        memory.used = used if version else used + reserved
        if version:
            memory.version = version
            memory.reserved = reserved
        return memory

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        """Return the mean power draw in milliwatts, over the window that `power_mean` selects."""
        gpu, end_ns = self._session.gpu(handle), self._session.since_epoch_ns()
        length_ns = NS_PER_SECOND
        if gpu.facts.power_mean == "quarter":
            end_ns, length_ns = end_ns - end_ns % _POWER_STEP_NS, _POWER_WINDOW_NS
        joules = gpu.joules(end_ns - length_ns, end_ns)
        return round(joules * 1000 * NS_PER_SECOND / length_ns)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        """Return the energy since the driver was loaded, in millijoules.

        Raise NotSupported if the GPU has no energy counter in the scenario.
        """
        gpu = self._session.gpu(handle)
        loaded_ns, now_ns = self._session.driver_loaded_ns, self._session.since_epoch_ns()
        if gpu.facts.energy_counter == "absent":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if gpu.facts.energy_counter == "frozen":
            now_ns = max(0, loaded_ns)
        elif gpu.facts.energy_step_ns:
            now_ns -= (now_ns - loaded_ns) % gpu.facts.energy_step_ns
        return int(gpu.joules(loaded_ns, now_ns) * 1000)

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        """Return the GPU temperature in °C, which depends on the load of the last 20 s."""
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        now_ns = self._session.since_epoch_ns()
        busy_ns = self._session.gpu(handle).device_busy_ns(now_ns - _WARMING_NS, now_ns)
        return round(_COOL_CELSIUS + _WARMING_CELSIUS * busy_ns / _WARMING_NS)

    def nvmlDeviceGetClockInfo(self, handle: Handle, type: int) -> int:
        """Return a clock in megahertz; the SM clock is lower while no process has the GPU open."""
        gpu = self._session.gpu(handle)
        if type == pynvml.NVML_CLOCK_MEM:
            return gpu.facts.model.memory_clock_megahertz
        if type not in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_GRAPHICS):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        working = gpu.users(self._session.since_epoch_ns())
        return gpu.facts.model.sm_clock_megahertz if working else _IDLE_SM_MEGAHERTZ

    def nvmlDeviceGetPerformanceState(self, handle: Handle) -> int:
        """Return performance state 0 while a process has the GPU open, else 8."""
        is_used = self._session.gpu(handle).users(self._session.since_epoch_ns())
        return 0 if is_used else _IDLE_PERFORMANCE_STATE

    def nvmlDeviceGetEncoderUtilization(self, handle: Handle) -> list[int]:
        """Return the encoder's utilization in percent, and its window in microseconds."""
        return self._engine(handle, "encoder_ratio")

    def nvmlDeviceGetDecoderUtilization(self, handle: Handle) -> list[int]:
        """Return the decoder's utilization in percent, and its window in microseconds."""
        return self._engine(handle, "decoder_ratio")

    def nvmlDeviceGetJpgUtilization(self, handle: Handle) -> list[int]:
        """Return the JPEG engine's utilization in percent, and its window in microseconds."""
        return self._engine(handle, "jpeg_ratio")

    def nvmlDeviceGetOfaUtilization(self, handle: Handle) -> list[int]:
        """Return the optical flow engine's utilization in percent, and its window in us."""
        return self._engine(handle, "optical_flow_ratio")

    def nvmlDeviceGetMarginTemperature(self, handle: Handle) -> int:
        """Return the margin to the temperature limit in degrees Celsius.

        Raise NotSupported if the generation does not report margins.
        """
        if not self._session.gpu(handle).facts.architecture.has_margins:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _MAX_CELSIUS - self.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)

    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, type: int) -> int:
        """Return the highest clock in megahertz, which is the clock under load."""
        model = self._session.gpu(handle).facts.model
        clocks = {
            pynvml.NVML_CLOCK_SM: model.sm_clock_megahertz,
            pynvml.NVML_CLOCK_GRAPHICS: model.sm_clock_megahertz,
            pynvml.NVML_CLOCK_MEM: model.memory_clock_megahertz,
        }
        if type not in clocks:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return clocks[type]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        """Return a bit mask of the reasons why the clocks are reduced."""
        gpu, now_ns = self._session.gpu(handle), self._session.since_epoch_ns()
        idle = 0 if gpu.users(now_ns) else _IDLE_REASON
        throttles = gpu.facts.ailments.throttles(now_ns)
        return reduce(or_, (_REASONS.get(one, 0) for one in throttles), idle)

    def _engine(self, handle: Handle, what: str) -> list[int]:
        now_ns = self._session.since_epoch_ns()
        worked_ns = self._session.gpu(handle).mixed_ns(what, now_ns - _ENGINE_NS, now_ns)
        return [round(100 * worked_ns / _ENGINE_NS), _ENGINE_NS // 1000]


class Utilization(Subject):
    """The functions that report the driver's sampling windows."""

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the newest completed window's utilization in percent."""
        windows = self._session.windows_of(handle)
        window = windows.latest(self._session.since_epoch_ns())
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = windows.gpu_percent(window)
        rates.memory = windows.memory_percent(window)
        return rates

    def nvmlDeviceGetSamples(
        self, device: Handle, sampling_type: int, timeStamp: int
    ) -> tuple[int, list[Any]]:
        """Return the ring buffer's samples after `timeStamp`, a time in microseconds.

        Raise NotSupported if the driver has no ring buffer, and NotFound if there are no samples,
        unless the driver model returns an empty list.
        """
        windows = self._session.windows_of(device)
        values = {
            pynvml.NVML_TOTAL_POWER_SAMPLES: windows.milliwatts,
            pynvml.NVML_GPU_UTILIZATION_SAMPLES: windows.gpu_percent,
            pynvml.NVML_MEMORY_UTILIZATION_SAMPLES: windows.memory_percent,
        }
        if sampling_type not in values or not self._session.driver.has_samples:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        value = values[sampling_type]
        newer = windows.newer_than(timeStamp, now_ns=self._session.since_epoch_ns())
        if not newer and self._empty_code:
            raise pynvml.NVMLError(self._empty_code)
        samples = []
        for window in newer:
            sample = pynvml.c_nvmlSample_t()
            sample.timeStamp = window.timestamp_us
            sample.sampleValue.uiVal = value(window)
            samples.append(sample)
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, samples

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Return the buffered process samples after `timeStamp`, a time in microseconds.

        Raise an NVMLError if there are no samples: NotFound, or code 0 (success) if the driver
        model reports an empty list as success. nvidia-ml-py also raises code 0 in that case.
        """
        found = []
        windows, now_ns = self._session.process_windows_of(handle), self._session.since_epoch_ns()
        for sample in windows.list_process_samples(timeStamp, now_ns=now_ns):
            struct = pynvml.c_nvmlProcessUtilizationSample_t()
            struct.pid = sample.pid
            struct.timeStamp = sample.timestamp_us
            struct.smUtil = sample.sm_percent
            struct.memUtil = sample.memory_percent
            found.append(struct)
        if not found:
            # If the driver's call for the size succeeds, nvidia-ml-py raises an "error" with value
            # 0.
            raise pynvml.NVMLError(self._empty_code)
        self._fill_video(found, handle)
        return found

    @property
    def _empty_code(self) -> int:
        is_error = self._session.driver.empty_answer == "not_found"
        return int(pynvml.NVML_ERROR_NOT_FOUND if is_error else pynvml.NVML_SUCCESS)

    def _fill_video(self, samples: list[Any], handle: Handle) -> None:
        """Add the video engines' utilization to samples, in proportion to kernel utilization."""
        mixes = {one.pid: one.spec.load.mix for one in self._session.gpu(handle).processes}
        for struct in samples:
            if mix := mixes.get(struct.pid):
                struct.encUtil = round(struct.smUtil * mix.encoder_ratio)
                struct.decUtil = round(struct.smUtil * mix.decoder_ratio)


_BUFFER_PROCESSES: Final = 4000
_NS_PER_SAMPLE: Final = 20_000_000
_PERCENT: Final = 100


class AccountingCalls(Subject):
    """The functions of accounting mode; reading accounts raises NotSupported if it is off."""

    def nvmlDeviceGetAccountingMode(self, handle: Handle) -> int:
        """Return whether accounting mode is on."""
        return int(self._session.gpu(handle).facts.accounting != "off")

    def nvmlDeviceGetAccountingBufferSize(self, handle: Handle) -> int:
        """Return the maximum number of accounts."""
        self._session.gpu(handle)
        return _BUFFER_PROCESSES

    def nvmlDeviceGetAccountingPids(self, handle: Handle) -> list[int]:
        """Return the pids of the processes with an account."""
        # A ring buffer: new accounts overwrite the oldest ones.
        return [process.pid for process in self._accounted(handle)[-_BUFFER_PROCESSES:]]

    def nvmlDeviceGetAccountingStats(self, handle: Handle, pid: int) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return a process's account, with its mean utilization in percent."""
        return self._fill(pynvml.c_nvmlAccountingStats_t(), handle, pid)

    def nvmlDeviceGetAccountingStats_v2(self, handle: Handle, pid: int) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return a process's account, including the sums of its samples."""
        gpu = self._session.gpu(handle)
        if gpu.facts.accounting != "v2":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        stats = self._fill(pynvml.c_nvmlAccountingStats_v2_t(), handle, pid)
        process, start_ns, end_ns = self._find(handle, pid)
        lived_ns, busy_ns = end_ns - start_ns, gpu.busy_ns(process, start_ns, end_ns)
        stats.pid = pid
        stats.sampleCount = max(1, round(lived_ns / _NS_PER_SAMPLE))
        sum_percent = _PERCENT * _PERCENT * stats.sampleCount * busy_ns / lived_ns
        stats.sumGpuUtil = round(sum_percent)
        stats.sumFbUtil = round(sum_percent * process.spec.load.memory_ratio)
        return stats

    def _fill(self, stats: Any, handle: Handle, pid: int) -> Any:  # noqa: ANN401  # a ctypes struct
        gpu, (process, start_ns, end_ns) = self._session.gpu(handle), self._find(handle, pid)
        lived_ns, is_running = end_ns - start_ns, process.is_on_gpu(self._session.since_epoch_ns())
        percent = _PERCENT * gpu.busy_ns(process, start_ns, end_ns) / lived_ns
        stats.gpuUtilization = round(percent)
        stats.memoryUtilization = round(percent * process.spec.load.memory_ratio)
        stats.maxMemoryUsage = process.spec.memory_bytes
        # The driver sets the process's time only after the process has ended.
        stats.time = 0 if is_running else lived_ns // NS_PER_MS
        stats.startTime = self._session.stamp_us(start_ns)
        stats.isRunning = int(is_running)
        return stats

    def _find(self, handle: Handle, pid: int) -> tuple[PlannedProcess, int, int]:
        """Return a process, and the start and end of its latest visit to the GPU.

        If the visit has not ended, its end is the current time. Raise NotFound if the process has
        no account.
        """
        now_ns = self._session.since_epoch_ns()
        for process in self._accounted(handle):
            visit = process.visit_at(now_ns)
            if process.pid == pid and visit:
                return process, visit[0], max(visit[0] + 1, min(visit[1], now_ns))
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def _accounted(self, handle: Handle) -> list[PlannedProcess]:
        gpu = self._session.gpu(handle)
        if gpu.facts.accounting == "off":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [one for one in gpu.processes if one.visit_at(self._session.since_epoch_ns())]
