"""GPU performance monitoring (GPM): samples of the chip's counters, and metrics of two samples."""
# ruff: noqa: N802, N803  # NVML's own names

from collections.abc import Callable, Mapping
from ctypes import addressof, c_char, c_void_p, cast
from typing import Any, Final, NamedTuple

import pynvml

from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.nvml.mig import Mig
from gpuledger_simulator.nvml.session import Handle, MigHandle, Session, Subject
from gpuledger_simulator.plan import PlannedProcess

_PERCENT: Final = 100
_MIB: Final = 1 << 20
_MIN_NS: Final = 100_000_000
_BUFFER_BYTES: Final = 64

# Fields of the kernel mix, by metric; a metric is a percentage of the time between two samples.
_ENGINE: Final = "engine"
_DRAM: Final = "dram"
_RATIOS: Final[Mapping[int, str]] = {
    pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: _ENGINE,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: _DRAM,
    pynvml.NVML_GPM_METRIC_SM_UTIL: "sm_ratio",
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: "occupancy_ratio",
    pynvml.NVML_GPM_METRIC_INTEGER_UTIL: "integer_ratio",
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_ratio",
    pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL: "tensor_ratio",
    pynvml.NVML_GPM_METRIC_FP64_UTIL: "fp64_ratio",
    pynvml.NVML_GPM_METRIC_FP32_UTIL: "fp32_ratio",
    pynvml.NVML_GPM_METRIC_FP16_UTIL: "fp16_ratio",
    pynvml.NVML_GPM_METRIC_NVDEC_0_UTIL: "decoder_ratio",
    pynvml.NVML_GPM_METRIC_NVJPG_0_UTIL: "jpeg_ratio",
    pynvml.NVML_GPM_METRIC_NVOFA_0_UTIL: "optical_flow_ratio",
}
_NEVER: Final = frozenset(
    {
        pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL,
        pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL,
        *range(pynvml.NVML_GPM_METRIC_NVDEC_1_UTIL, pynvml.NVML_GPM_METRIC_NVDEC_6_UTIL + 1),
        *range(pynvml.NVML_GPM_METRIC_NVJPG_1_UTIL, pynvml.NVML_GPM_METRIC_NVJPG_6_UTIL + 1),
    }
)
_RATES: Final[Mapping[int, str]] = {
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: "pcie_bytes_per_second",
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: "pcie_bytes_per_second",
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: "nvlink_bytes_per_second",
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: "nvlink_bytes_per_second",
}


_EACH_LINK: Final = range(
    pynvml.NVML_GPM_METRIC_NVLINK_L0_RX_PER_SEC, pynvml.NVML_GPM_METRIC_NVLINK_L17_TX_PER_SEC + 1
)


class _Taken(NamedTuple):
    """The content of a sample buffer."""

    gpu: SimulatedGpu
    weigh: Callable[[PlannedProcess], float]
    """Returns the factor by which a process's busy time counts, from 0 to 1. It is 0 for processes
    outside the sampled instance."""
    time_ns: int


class Profiling(Subject):
    """The functions of GPM. A call that fails in NVML fails here with the same error."""

    def __init__(self, session: Session, mig: Mig) -> None:
        super().__init__(session)
        self._mig = mig
        self._buffers: dict[int, tuple[Any, _Taken | None]] = {}

    def nvmlGpmQueryDeviceSupport(self, device: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return whether the chip's counters can be read."""
        support = pynvml.c_nvmlGpmSupport_t()
        support.version = pynvml.NVML_GPM_SUPPORT_VERSION
        support.isSupportedDevice = self._session.gpu(device).facts.architecture.has_profiling
        return support

    def nvmlGpmSampleAlloc(self) -> Any:  # noqa: ANN401  # a ctypes pointer
        """Return a buffer for one sample."""
        self._session.check_open()
        # The buffer is stored, because otherwise Python would use its address again for another
        # buffer.
        buffer = (c_char * _BUFFER_BYTES)()
        address = addressof(buffer)
        self._buffers[address] = (buffer, None)
        return cast(address, pynvml.c_nvmlGpmSample_t)

    def nvmlGpmSampleFree(self, gpmSample: Any) -> None:  # noqa: ANN401  # a ctypes pointer
        """Free a buffer; raise InvalidArgument if the buffer was not allocated."""
        self._session.check_open()
        if self._buffers.pop(_address(gpmSample), None) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def nvmlGpmSampleGet(self, device: Handle, gpmSample: Any) -> Any:  # noqa: ANN401  # a ctypes pointer
        """Store a sample of a GPU or a compute instance in the buffer."""
        if isinstance(device, MigHandle):
            own = self._mig.instance_of(device)
            gpu = self._session.whole_gpu(device)
            return self._sample(gpu, lambda one: float(gpu.instance_of(one) == own), gpmSample)
        return self._sample(self._session.gpu(device), self._session.gpu(device).share, gpmSample)

    def nvmlGpmMigSampleGet(self, device: Handle, gpuInstanceId: int, gpmSample: Any) -> Any:  # noqa: ANN401  # a ctypes pointer
        """Store a sample of a GPU instance in the buffer."""
        gpu = self._session.gpu(device)
        cut = gpu.cut(self._session.since_epoch_ns())
        there = {one.gpu_instance for one in cut.instances} if cut else set()
        if gpuInstanceId not in there:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

        def weigh(process: PlannedProcess) -> float:
            own = gpu.instance_of(process)
            is_in = own is not None and own.gpu_instance == gpuInstanceId
            return own.compute_slices / own.gpu_slices if own and is_in else 0.0

        return self._sample(gpu, weigh, gpmSample)

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:  # noqa: ANN401  # a ctypes struct
        """Fill in the metrics between two samples; raise InvalidArgument if they are too close."""
        older, newer = self._taken(metricsGet.sample1), self._taken(metricsGet.sample2)
        span_ns = newer.time_ns - older.time_ns
        if metricsGet.version != pynvml.NVML_GPM_METRICS_GET_VERSION or span_ns < _MIN_NS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for index in range(metricsGet.numMetrics):
            slot = metricsGet.metrics[index]
            value = _metric(slot.metricId, older, newer)
            slot.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else 0
            slot.value = value or 0.0
        return metricsGet

    def _sample(
        self,
        gpu: SimulatedGpu,
        weigh: Callable[[PlannedProcess], float],
        pointer: Any,  # noqa: ANN401  # a ctypes pointer
    ) -> Any:  # noqa: ANN401  # a ctypes pointer
        if not gpu.facts.architecture.has_profiling:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        address = _address(pointer)
        if address not in self._buffers:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        buffer, _ = self._buffers[address]
        self._buffers[address] = (buffer, _Taken(gpu, weigh, self._session.since_epoch_ns()))
        return pointer

    def _taken(self, pointer: Any) -> _Taken:  # noqa: ANN401  # a ctypes pointer
        _, taken = self._buffers.get(_address(pointer), (None, None))
        if taken is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return taken


def _address(pointer: Any) -> int:  # noqa: ANN401  # a ctypes pointer
    return cast(pointer, c_void_p).value or 0


def _metric(number: int, older: _Taken, newer: _Taken) -> float | None:
    """Return the metric with NVML's number `number`; `None` if the GPU does not have it."""
    span_ns = newer.time_ns - older.time_ns
    if what := _RATIOS.get(number):
        worked_ns = 0.0
        for process in newer.gpu.processes:
            load = process.spec.load
            whole = {_ENGINE: 1.0, _DRAM: load.memory_ratio}  # other metrics are fields of the mix
            part = whole[what] if what in whole else float(getattr(load.mix, what))
            busy_ns = newer.gpu.busy_ns(process, older.time_ns, newer.time_ns)
            worked_ns += busy_ns * newer.weigh(process) * part
        return _PERCENT * worked_ns / span_ns
    if number in _RATES:
        if "nvlink" in _RATES[number] and not newer.gpu.facts.model.nvlinks:
            return None
        moved = newer.gpu.mixed_ns(_RATES[number], older.time_ns, newer.time_ns)
        return moved / span_ns / _MIB
    if number in _EACH_LINK:
        links = newer.gpu.facts.model.nvlinks
        if (number - _EACH_LINK.start) // 2 >= links:
            return None
        # All links have the same traffic.
        moved = newer.gpu.mixed_ns("nvlink_bytes_per_second", older.time_ns, newer.time_ns)
        return moved / span_ns / _MIB / links
    # These engines exist, but no scenario can use them, so they are idle.
    return 0.0 if number in _NEVER else None
