"""Plays NVML for one node: the functions of `pynvml` that the agent calls, with NVML's limits.

Here live NVML's forms: its names, structs, units and errors. What is true of the devices comes
from `device`, how the driver samples it from `windows`. Parameters are named as in nvidia-ml-py.
"""
# ruff: noqa: N802, N803, A002  # NVML's own names

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from gpuledger.clock import Clock
from simulator.device import SimulatedGpu
from simulator.plan import PlannedProcess
from simulator.windows import SamplingWindows

_NS: Final = 1_000_000_000
_IDLE_SM_MEGAHERTZ: Final = 345
_COOL_CELSIUS: Final = 31
_WARMING_CELSIUS: Final = 42
_WARMING_NS: Final = 20 * _NS
_NO_INSTANCE: Final = 0xFFFFFFFF


@dataclass(frozen=True)
class Handle:
    """A device handle, good until the library is shut down."""

    index: int
    session: int


class SimulatedNvml:
    """The NVML library of one node. A function raises the `pynvml.NVMLError` that NVML would."""

    def __init__(
        self, gpus: Sequence[SimulatedGpu], *, clock: Clock, epoch_ns: int, uptime_ns: int,
        sample_period_ns: int,
    ) -> None:  # fmt: skip
        self._gpus = gpus
        self._clock = clock
        self._epoch_ns = epoch_ns
        self._driver_loaded_ns = -uptime_ns
        self._windows = [
            SamplingWindows(gpu, period_ns=sample_period_ns, epoch_ns=epoch_ns) for gpu in gpus
        ]
        self._users = 0
        self._session = 0

    def nvmlInit(self) -> None:
        """Open the library; each call needs a shutdown of its own."""
        self._users += 1

    def nvmlShutdown(self) -> None:
        """Close the library; the last call makes all handles invalid."""
        self._check_open()
        self._users -= 1
        if not self._users:
            self._session += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        """Give the driver's version."""
        self._check_open()
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        """Give the number of GPUs."""
        self._check_open()
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        """Give the handle of a GPU."""
        self._check_open()
        if not 0 <= index < len(self._gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(index, self._session)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        """Give the GPU's UUID."""
        return self._gpu(handle).facts.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        """Give the product's name."""
        return self._gpu(handle).facts.name

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Give whole percents of the newest completed window."""
        windows = self._windows_of(handle)
        window = windows.latest(self._since_epoch_ns())
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu = windows.gpu_percent(window)
        rates.memory = windows.memory_percent(window)
        return rates

    def nvmlDeviceGetSamples(
        self, device: Handle, sampling_type: int, timeStamp: int
    ) -> tuple[int, list[Any]]:
        """Give the ring buffer's samples newer than `timeStamp`; NotFound when there are none."""
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

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:  # noqa: ANN401  # a ctypes struct
        """Give the memory at this instant; only version 2 tells the driver's reserve apart."""
        gpu = self._gpu(handle)
        used = gpu.used_bytes(self._since_epoch_ns())
        reserved = gpu.facts.model.reserved_bytes
        memory = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        memory.total = gpu.facts.memory_bytes
        memory.free = gpu.facts.memory_bytes - reserved - used
        memory.used = used if version else used + reserved
        if version:
            memory.version = version
            memory.reserved = reserved
        return memory

    def nvmlDeviceGetPowerUsage(self, handle: Handle) -> int:
        """Give the draw in milliwatts, averaged over the last second."""
        now_ns = self._since_epoch_ns()
        return round(self._gpu(handle).joules(now_ns - _NS, now_ns) * 1000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        """Give the energy since the driver was loaded, in millijoules."""
        gpu = self._gpu(handle)
        return int(gpu.joules(self._driver_loaded_ns, self._since_epoch_ns()) * 1000)

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        """Give the die's temperature in degrees Celsius, which follows the last 20 s of work."""
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        now_ns = self._since_epoch_ns()
        busy_ns = self._gpu(handle).device_busy_ns(now_ns - _WARMING_NS, now_ns)
        return round(_COOL_CELSIUS + _WARMING_CELSIUS * busy_ns / _WARMING_NS)

    def nvmlDeviceGetClockInfo(self, handle: Handle, type: int) -> int:
        """Give a clock in megahertz; the multiprocessors' falls while no process is there."""
        gpu = self._gpu(handle)
        if type == pynvml.NVML_CLOCK_MEM:
            return gpu.facts.model.memory_clock_megahertz
        if type not in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_GRAPHICS):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        working = gpu.alive(self._since_epoch_ns())
        return gpu.facts.model.sm_clock_megahertz if working else _IDLE_SM_MEGAHERTZ

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Give the processes with a compute context."""
        return self._running(handle, "compute")

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Give the processes with a graphics context."""
        return self._running(handle, "graphics")

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Handle) -> list[Any]:
        """Give the processes that compute through the multi-process service."""
        return self._running(handle, "mps")

    def nvmlDeviceGetProcessUtilization(self, handle: Handle, timeStamp: int) -> list[Any]:
        """Give each buffered sample newer than `timeStamp`; NotFound when there are none."""
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

    def _running(self, handle: Handle, kind: str) -> list[Any]:
        alive = self._gpu(handle).alive(self._since_epoch_ns())
        return [_process_info(process) for process in alive if process.spec.kind == kind]

    def _gpu(self, handle: Handle) -> SimulatedGpu:
        self._check_open()
        if handle.session != self._session:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._gpus[handle.index]

    def _windows_of(self, handle: Handle) -> SamplingWindows:
        return self._windows[self._gpu(handle).facts.index]

    def _check_open(self) -> None:
        if not self._users:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)

    def _since_epoch_ns(self) -> int:
        return self._clock.time_ns() - self._epoch_ns


def _sample(timestamp_us: int, value: int) -> Any:  # noqa: ANN401  # a ctypes struct
    sample = pynvml.c_nvmlSample_t()
    sample.timeStamp = timestamp_us
    sample.sampleValue.uiVal = value
    return sample


def _process_info(process: PlannedProcess) -> Any:  # noqa: ANN401  # nvidia-ml-py's friendly object
    return pynvml.nvmlFriendlyObject(
        {
            "pid": process.pid,
            "usedGpuMemory": process.spec.memory_bytes if process.spec.memory_visible else None,
            "gpuInstanceId": _NO_INSTANCE,
            "computeInstanceId": _NO_INSTANCE,
        }
    )
