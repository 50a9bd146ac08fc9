"""The readings of an instant: memory, power, energy, temperature, clocks, engines."""

from functools import reduce
from operator import or_
from typing import Any, Final

import pynvml

from simulator.nvml.session import Handle, Session

# ruff: noqa: N802, A002  # NVML's own names


_NS: Final = 1_000_000_000
_IDLE_SM_MEGAHERTZ: Final = 345
_COOL_CELSIUS: Final = 31
_WARMING_CELSIUS: Final = 42
_WARMING_NS: Final = 20 * _NS
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
"""By the scenario's name; the hardware's slowdowns set a bit in common."""


class Readings(Session):
    """The functions that read a device's gauges and counters."""

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the memory at this instant; only version 2 tells the driver's reserve apart."""
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
        """Return the draw in milliwatts, averaged over the last second."""
        now_ns = self._since_epoch_ns()
        return round(self._gpu(handle).joules(now_ns - _NS, now_ns) * 1000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle) -> int:
        """Return the energy since the driver was loaded, in millijoules."""
        gpu = self._gpu(handle)
        return int(gpu.joules(self._driver_loaded_ns, self._since_epoch_ns()) * 1000)

    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int) -> int:
        """Return the die's temperature in degrees Celsius, which follows the last 20 s of work."""
        if sensor != pynvml.NVML_TEMPERATURE_GPU:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        now_ns = self._since_epoch_ns()
        busy_ns = self._gpu(handle).device_busy_ns(now_ns - _WARMING_NS, now_ns)
        return round(_COOL_CELSIUS + _WARMING_CELSIUS * busy_ns / _WARMING_NS)

    def nvmlDeviceGetClockInfo(self, handle: Handle, type: int) -> int:
        """Return a clock in megahertz; the multiprocessors' falls while no process is there."""
        gpu = self._gpu(handle)
        if type == pynvml.NVML_CLOCK_MEM:
            return gpu.facts.model.memory_clock_megahertz
        if type not in (pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_GRAPHICS):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        working = gpu.alive(self._since_epoch_ns())
        return gpu.facts.model.sm_clock_megahertz if working else _IDLE_SM_MEGAHERTZ

    def nvmlDeviceGetPerformanceState(self, handle: Handle) -> int:
        """Return 0 while a process is there, else 8."""
        return 0 if self._gpu(handle).alive(self._since_epoch_ns()) else _IDLE_PERFORMANCE_STATE

    def nvmlDeviceGetEncoderUtilization(self, handle: Handle) -> list[int]:
        """Return whole percents of the last window, and its length in microseconds."""
        return self._engine(handle, "encoder_ratio")

    def nvmlDeviceGetDecoderUtilization(self, handle: Handle) -> list[int]:
        """Return whole percents of the last window, and its length in microseconds."""
        return self._engine(handle, "decoder_ratio")

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle) -> int:
        """Return why the clocks are not higher, as bits."""
        gpu, now_ns = self._gpu(handle), self._since_epoch_ns()
        idle = 0 if gpu.alive(now_ns) else _IDLE_REASON
        throttles = gpu.facts.ailments.throttles(now_ns)
        return reduce(or_, (_REASONS.get(one, 0) for one in throttles), idle)

    def _engine(self, handle: Handle, what: str) -> list[int]:
        now_ns = self._since_epoch_ns()
        worked_ns = self._gpu(handle).mixed_ns(what, now_ns - _ENGINE_NS, now_ns)
        return [round(100 * worked_ns / _ENGINE_NS), _ENGINE_NS // 1000]


# Which GPUs there are and what never changes of them.

# ruff: noqa: N802  # NVML's own names


class Identity(Session):
    """The functions that say which device is which."""

    def nvmlSystemGetDriverVersion(self) -> str:
        """Return the driver's version."""
        self._check_open()
        return "580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        self._check_open()
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        """Return the handle of a GPU."""
        self._check_open()
        if not 0 <= index < len(self._gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(index, self._session)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        """Return the GPU's UUID."""
        return self._gpu(handle).facts.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        """Return the product's name."""
        return self._gpu(handle).facts.name
