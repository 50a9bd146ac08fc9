"""Errors, wear and limits of a GPU, and numbered fields.

Each numbered field is one row of `_FIELDS`: its type, and a function of the GPU, the time at which
the driver was loaded, and the current time. The driver's counters restart when the driver is
loaded; the device's counters do not.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import pynvml

from gpuledger.clock import NS_PER_SECOND
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.nvml.session import Handle, Subject

# ruff: noqa: N802, N803  # NVML's own names


_BANKS: Final = 640
_REMAPPED_BANKS_PER_ROW: Final = 1
_MAX_SRAM_ERRORS: Final = 3
_SLOWDOWN_CELSIUS: Final = {
    pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN: 92,
    pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN: 89,
}
_MIN_LIMIT_RATIO: Final = 2 / 7
_LANES: Final = 16
_BAR1_USED_BYTES: Final = 6 << 20
_IDLE_PCIE_GENERATION: Final = 1
_TRUE: Final = 1
_FALSE: Final = 2
_FABRIC_CONDITIONS: Final = (
    "bandwidth_degraded",
    "route_recovery",
    "route_unhealthy",
    "access_timeout",
)
"""Conditions of the NVLink fabric, in the order of their bit pairs in NVML's health mask."""


class Health(Subject):
    """The functions that report errors and limits."""

    def nvmlDeviceGetTotalEccErrors(self, handle: Handle, errorType: int, counterType: int) -> int:
        """Return the number of memory errors, in total or since the driver was loaded."""
        gpu = self._session.gpu(handle)
        if counterType not in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        corrected = errorType == pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
        name = "ecc_corrected" if corrected else "ecc_uncorrected"
        if counterType == pynvml.NVML_AGGREGATE_ECC:
            return self._count(gpu, name)
        loaded_ns, ailments = self._session.driver_loaded_ns, gpu.facts.ailments
        return ailments.count(name, self._session.since_epoch_ns(), since_ns=loaded_ns)

    def nvmlDeviceGetSramEccErrorStatus(self, device: Handle, status: Any) -> int:  # noqa: ANN401  # a reference to a struct
        """Fill in the SRAM errors."""
        gpu = self._newer(device)
        # nvidia-ml-py passes a reference to a struct, which the library fills in.
        struct = status._obj  # noqa: SLF001  # what ctypes.byref refers to
        struct.aggregateCor = struct.volatileCor = self._count(gpu, "sram_corrected")
        struct.aggregateUncSecDed = self._count(gpu, "sram_uncorrected")
        struct.volatileUncSecDed = struct.aggregateUncSecDed
        struct.bThresholdExceeded = int(struct.aggregateUncSecDed > _MAX_SRAM_ERRORS)
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetRemappedRows(self, device: Handle) -> tuple[int, int, int, int]:
        """Return the number of remapped rows, and whether remapping is pending or has failed.

        The four numbers are: rows remapped because of corrected errors, rows remapped because of
        uncorrected errors, 1 if a row is waiting for a reset, and 1 if a row could not be remapped.
        Raise NotSupported for generations that retire pages.
        """
        gpu = self._newer(device)
        now_ns, ailments = self._session.since_epoch_ns(), gpu.facts.ailments
        pending = ailments.has("remap_pending", now_ns)
        failed = ailments.has("remap_failed", now_ns)
        return 0, self._count(gpu, "rows_remapped"), int(pending), int(failed)

    def nvmlDeviceGetRowRemapperHistogram(self, device: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the number of memory banks by their remaining spare rows."""
        banks = pynvml.c_nvmlRowRemapperHistogramValues()
        used = self._count(self._newer(device), "rows_remapped") * _REMAPPED_BANKS_PER_ROW
        banks.high = min(_BANKS, used)
        banks.max = _BANKS - banks.high
        return banks

    def nvmlDeviceGetPcieReplayCounter(self, handle: Handle) -> int:
        """Return the number of PCIe packets that were sent again."""
        return self._count(self._session.gpu(handle), "pcie_replays")

    def nvmlDeviceGetGpuFabricInfoV(self, device: Handle, gpuFabricInfo: Any) -> int:  # noqa: ANN401  # a reference to a struct
        """Fill in the state of the NVLink fabric; raise NotSupported before Hopper."""
        gpu = self._session.gpu(device)
        if not gpu.facts.architecture.has_profiling:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        struct = gpuFabricInfo._obj  # noqa: SLF001  # what ctypes.byref refers to
        struct.state = (
            pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
            if gpu.facts.model.nvlinks
            else pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
        )
        faults = gpu.facts.ailments.lasting(self._session.since_epoch_ns())
        conditions = {condition for fault in faults for condition in fault.fabric}
        struct.healthMask = sum(
            (_TRUE if condition in conditions else _FALSE) << 2 * position
            for position, condition in enumerate(_FABRIC_CONDITIONS)
        )
        if gpu.facts.rack:
            struct.clusterUuid[:] = list(gpu.facts.rack.cluster_uuid.bytes)
            struct.cliqueId = gpu.facts.rack.clique
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Handle) -> int:
        """Return the PCIe generation of the link, which is 1 while no process has the GPU open."""
        gpu, now_ns = self._session.gpu(handle), self._session.since_epoch_ns()
        trained = [fault.pcie_generation for fault in gpu.facts.ailments.lasting(now_ns)]
        own = gpu.facts.model.pcie_generation if gpu.users(now_ns) else _IDLE_PCIE_GENERATION
        return min([own, *(generation for generation in trained if generation)])

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Handle) -> int:
        """Return the number of lanes of the PCIe link."""
        faults = self._session.gpu(handle).facts.ailments.lasting(self._session.since_epoch_ns())
        return min([_LANES, *(fault.pcie_width for fault in faults if fault.pcie_width)])

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the size and use of BAR1, through which other devices access the memory."""
        gpu = self._session.gpu(handle)
        memory = pynvml.c_nvmlBAR1Memory_t()
        memory.bar1Total = 1 << (gpu.facts.memory_bytes - 1).bit_length()
        memory.bar1Used = _BAR1_USED_BYTES
        memory.bar1Free = memory.bar1Total - memory.bar1Used
        return memory

    def nvmlDeviceGetFanSpeed(self, handle: Handle) -> int:
        """Raise NotSupported, because data center GPUs have no fans."""
        self._session.gpu(handle)
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetGridLicensableFeatures_v4(self, handle: Handle) -> Any:  # noqa: ANN401  # a ctypes struct
        """Return the licensable features: none, because the GPUs are not virtual."""
        self._session.gpu(handle)
        return pynvml.c_nvmlGridLicensableFeatures_v4_t()

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle) -> int:
        """Return the enforced power limit in milliwatts."""
        return round(self._session.gpu(handle).facts.max_watts * 1000)

    def nvmlDeviceGetPowerManagementLimit(self, handle: Handle) -> int:
        """Return the configured power limit in milliwatts."""
        return self.nvmlDeviceGetEnforcedPowerLimit(handle)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle) -> int:
        """Return the default power limit in milliwatts."""
        return self.nvmlDeviceGetEnforcedPowerLimit(handle)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Handle) -> list[int]:
        """Return the lowest and the highest power limit that can be configured, in milliwatts."""
        maximum = self.nvmlDeviceGetEnforcedPowerLimit(handle)
        return [round(maximum * _MIN_LIMIT_RATIO), maximum]

    def nvmlDeviceGetTemperatureThreshold(self, handle: Handle, threshold: int) -> int:
        """Return a temperature threshold; raise NotSupported if the generation reports margins."""
        has_thresholds = self._session.gpu(handle).facts.architecture.has_thresholds
        if not has_thresholds or threshold not in _SLOWDOWN_CELSIUS:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return _SLOWDOWN_CELSIUS[threshold]

    def _newer(self, handle: Handle) -> SimulatedGpu:
        gpu = self._session.gpu(handle)
        if not gpu.facts.architecture.remaps_rows:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu

    def _count(self, gpu: SimulatedGpu, name: str) -> int:
        return gpu.facts.ailments.count(name, self._session.since_epoch_ns())


_KIB: Final = 1024
_ALL_LINKS: Final = 0xFFFFFFFF
_UINT: Final = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
_INT: Final = pynvml.NVML_VALUE_TYPE_SIGNED_INT
_ULONG_LONG: Final = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_COOL_CELSIUS: Final = 34
_WARMING_CELSIUS: Final = 45
_WARMING_NS: Final = 30 * NS_PER_SECOND
_INSTANT_NS: Final = 20_000_000
_RECOVERIES: Final = ("none", "reset", "reboot", "drain_p2p", "drain_and_reset")
_Taken = Callable[[SimulatedGpu, int, int], int | None]
"""Returns a field from the GPU, the time at which the driver was loaded, and the current time."""


class FieldValues(Subject):
    """The function that returns numbered fields."""

    def nvmlDeviceGetFieldValues(self, handle: Handle, fieldIds: Sequence[Any]) -> Any:  # noqa: ANN401  # ctypes structs
        """Return the values of the fields; a field that the GPU does not have has an error code."""
        gpu, now_ns = self._session.gpu(handle), self._session.since_epoch_ns()
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, field in zip(values, fieldIds, strict=True):
            number, scope = field if isinstance(field, tuple) else (field, 0)
            value.fieldId, value.scopeId = number, scope
            # An unsupported field gets an error code; the other fields still have values.
            self._fill_field(value, gpu, now_ns)
        return values

    def _fill_field(self, value: Any, gpu: SimulatedGpu, now_ns: int) -> None:  # noqa: ANN401  # a ctypes struct
        value.timestamp = self._session.stamp_us(now_ns)
        if (of_link := _LINK_FIELDS.get(value.fieldId)) is not None:
            self._fill_link_field(value, gpu, of_link, now_ns)
            return
        known, links = _FIELDS.get(value.fieldId), gpu.facts.model.nvlinks
        is_of_one_link = value.fieldId in _PER_LINK and value.scopeId != _ALL_LINKS
        if known is None or (is_of_one_link and value.scopeId >= links):
            value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
            return
        value.valueType, take = known
        taken = take(gpu, self._session.driver_loaded_ns, now_ns)
        if taken is None:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            return
        if is_of_one_link:
            # All links have the same traffic, and their parts add up to the total.
            taken = taken // links + (value.scopeId < taken % links)
        self._put(value, taken)

    def _fill_link_field(
        self,
        value: Any,  # noqa: ANN401  # a ctypes struct
        gpu: SimulatedGpu,
        known: "tuple[int, frozenset[int], _TakenOfLink]",
        now_ns: int,
    ) -> None:
        value.valueType, generations, take = known
        if gpu.facts.architecture.nvlink_generation not in generations:
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        elif value.scopeId >= gpu.facts.model.nvlinks:
            value.nvmlReturn = pynvml.NVML_ERROR_INVALID_ARGUMENT
        else:
            self._put(value, take(gpu, value.scopeId, self._session.driver_loaded_ns, now_ns))

    @staticmethod
    def _put(value: Any, taken: int) -> None:  # noqa: ANN401  # a ctypes struct
        if value.valueType == _UINT:
            value.value.uiVal = taken
        elif value.valueType == _INT:
            value.value.siVal = taken
        else:
            value.value.ullVal = taken


def _memory_celsius(gpu: SimulatedGpu, _loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.model.has_hbm:
        return None
    busy_ns = gpu.device_busy_ns(now_ns - _WARMING_NS, now_ns)
    return round(_COOL_CELSIUS + _WARMING_CELSIUS * busy_ns / _WARMING_NS)


def _instant_milliwatts(gpu: SimulatedGpu, _loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.architecture.has_instant_power:
        return None
    return round(gpu.joules(now_ns - _INSTANT_NS, now_ns) * 1000 * NS_PER_SECOND / _INSTANT_NS)


def _throttled(*throttles: str) -> _Taken:
    def take(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int:
        ailments = gpu.facts.ailments
        until_now = ailments.throttled_ns(throttles, now_ns)
        return until_now - ailments.throttled_ns(throttles, loaded_ns)

    return take


def _pcie_bytes(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.architecture.has_profiling:
        return None
    return int(gpu.mixed_ns("pcie_bytes_per_second", loaded_ns, now_ns) / NS_PER_SECOND)


def _nvlink_kibibytes(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
    if not gpu.facts.model.nvlinks:
        return None
    return int(gpu.mixed_ns("nvlink_bytes_per_second", loaded_ns, now_ns) / NS_PER_SECOND / _KIB)


_TakenOfLink = Callable[[SimulatedGpu, int, int, int], int]
"""Returns a field of one NVLink, from the GPU, the link's number, the time at which the driver was
loaded, and the current time."""
_NO_BIT_ERRORS: Final = 0xFFF
"""Packed form of 15e-255, which NVIDIA's tools show for a link without errors."""


def _of_link(name: str) -> _TakenOfLink:
    def take(gpu: SimulatedGpu, link: int, loaded_ns: int, now_ns: int) -> int:
        return gpu.facts.ailments.count(name, now_ns, since_ns=loaded_ns, nvlink=link)

    return take


def _never(*_: object) -> int:
    return 0


_INACTIVE: Final = 0
_ACTIVE: Final = 1


def _link_state(gpu: SimulatedGpu, link: int, _loaded_ns: int, now_ns: int) -> int:
    faults = gpu.facts.ailments.lasting(now_ns)
    is_down = any(fault.nvlink_inactive and fault.nvlink == link for fault in faults)
    return _INACTIVE if is_down else _ACTIVE


def _symbol_error_ratio(gpu: SimulatedGpu, link: int, loaded_ns: int, now_ns: int) -> int:
    """Return a link's symbol error ratio, the number of errors times 1e-12, in packed form."""
    errors = gpu.facts.ailments.count(
        "nvlink_symbol_errors", now_ns, since_ns=loaded_ns, nvlink=link
    )
    return min(errors, 15) << 8 | 12 if errors else _NO_BIT_ERRORS


def _blocks_with(errors: int) -> _TakenOfLink:
    """Return a function that counts a link's blocks that have `errors` errors.

    A simulated block never has more than one error.
    """

    def take(gpu: SimulatedGpu, link: int, loaded_ns: int, now_ns: int) -> int:
        count = gpu.facts.ailments.count
        wrong = count("nvlink_symbol_errors", now_ns, since_ns=loaded_ns, nvlink=link)
        if errors:
            return wrong if errors == 1 else 0
        return (now_ns - loaded_ns) // _NS_PER_BLOCK - wrong

    return take


_NS_PER_BLOCK: Final = 1_000_000
_HOPPER: Final = frozenset({4})
_BLACKWELL: Final = frozenset({5})
_LINK_FIELDS: Final[dict[int, tuple[int, frozenset[int], _TakenOfLink]]] = {
    161: (_ULONG_LONG, _HOPPER, _of_link("nvlink_replays")),
    162: (_ULONG_LONG, _HOPPER, _of_link("nvlink_recoveries")),
    163: (_ULONG_LONG, _HOPPER, _never),
    165: (_UINT, _HOPPER | _BLACKWELL, _link_state),
    # Malformed packets, overruns, three receive errors, integrity errors, discards.
    **dict.fromkeys(range(206, 213), (_ULONG_LONG, _BLACKWELL, _never)),
    213: (_ULONG_LONG, _BLACKWELL, _of_link("nvlink_recoveries")),
    214: (_ULONG_LONG, _BLACKWELL, _of_link("nvlink_failed_recoveries")),
    219: (_ULONG_LONG, _BLACKWELL, _never),
    220: (_ULONG_LONG, _BLACKWELL, lambda *_: _NO_BIT_ERRORS),
    221: (_ULONG_LONG, _BLACKWELL, _of_link("nvlink_symbol_errors")),
    222: (_ULONG_LONG, _BLACKWELL, _symbol_error_ratio),
    **{235 + errors: (_ULONG_LONG, _BLACKWELL, _blocks_with(errors)) for errors in range(16)},
}
"""Fields of one NVLink by number: type, NVLink generations with the field, and function."""


def _of_old_links(name: str | None = None) -> _Taken:
    """Return a function that counts the errors `name` of all NVLinks of a GPU together.

    Without a name, the function returns 0. NVLink generations after the third lack these fields,
    because they count each link separately.
    """

    def take(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
        if not gpu.facts.model.nvlinks or gpu.facts.architecture.nvlink_generation > _LAST_SUMMED:
            return None
        return gpu.facts.ailments.count(name, now_ns, since_ns=loaded_ns) if name else 0

    return take


_LAST_SUMMED: Final = 3


def _of_pcie(name: str | None = None) -> _Taken:
    def take(gpu: SimulatedGpu, loaded_ns: int, now_ns: int) -> int | None:
        if not gpu.facts.architecture.has_profiling:
            return None
        return gpu.facts.ailments.count(name, now_ns, since_ns=loaded_ns) if name else 0

    return take


def _margin(celsius: int, *, of_memory: bool = False) -> _Taken:
    def take(gpu: SimulatedGpu, _loaded_ns: int, _now_ns: int) -> int | None:
        is_reported = gpu.facts.model.has_hbm or not of_memory
        return celsius if gpu.facts.architecture.has_margins and is_reported else None

    return take


_PER_LINK: Final = frozenset({138, 139})
_FIELDS: Final[dict[int, tuple[int, _Taken]]] = {
    # Retired pages: single-bit, double-bit, pending. Ampere and newer chips remap rows instead.
    29: (_UINT, lambda gpu, _, __: None if gpu.facts.architecture.remaps_rows else 0),
    30: (_UINT, lambda gpu, _, __: None if gpu.facts.architecture.remaps_rows else 0),
    31: (
        _UINT,
        lambda gpu, _, now_ns: (
            None
            if gpu.facts.architecture.remaps_rows
            else int(gpu.facts.ailments.has("retired_pages_pending", now_ns))
        ),
    ),
    # NVLink errors and replays of all links together.
    38: (_ULONG_LONG, _of_old_links()),
    45: (_ULONG_LONG, _of_old_links()),
    52: (_ULONG_LONG, _of_old_links("nvlink_replays")),
    59: (_ULONG_LONG, _of_old_links("nvlink_recoveries")),
    # Nanoseconds for which the clocks were throttled, by reason.
    74: (_ULONG_LONG, _throttled("power")),
    75: (_ULONG_LONG, _throttled("software_thermal", "hardware_thermal")),
    76: (_ULONG_LONG, _throttled("sync_boost")),
    77: (_ULONG_LONG, _throttled("board_limit")),
    78: (_ULONG_LONG, _throttled("low_utilization")),
    79: (_ULONG_LONG, _throttled("reliability")),
    82: (_UINT, _memory_celsius),
    91: (_UINT, lambda gpu, _, __: gpu.facts.model.nvlinks or None),
    # KiB over NVLink, sent and received.
    138: (_ULONG_LONG, _nvlink_kibibytes),
    139: (_ULONG_LONG, _nvlink_kibibytes),
    # The total energy of a module, which no simulated GPU reports.
    170: (_UINT, lambda *_: None),
    # PCIe errors by type; the first field counts corrected errors.
    **{number: (_UINT, _of_pcie()) for number in range(174, 184)},
    173: (_UINT, _of_pcie("pcie_corrected")),
    180: (_UINT, _of_pcie("pcie_fatal")),
    186: (_UINT, _instant_milliwatts),
    # Margins: hardware shutdown, hardware slowdown, maximum of the memory, maximum of the GPU.
    193: (_INT, _margin(-8)),
    194: (_INT, _margin(-2)),
    195: (_INT, _margin(0, of_memory=True)),
    196: (_INT, _margin(0)),
    # Bytes over PCIe, sent and received.
    197: (_ULONG_LONG, _pcie_bytes),
    198: (_ULONG_LONG, _pcie_bytes),
    230: (
        _UINT,
        lambda gpu, _, now_ns: _RECOVERIES.index(gpu.facts.ailments.recovery(now_ns)),
    ),
    # Fields 269 and 270 divide field 75 into software and hardware slowdown.
    269: (_ULONG_LONG, _throttled("software_thermal")),
    270: (_ULONG_LONG, _throttled("hardware_thermal")),
    271: (_ULONG_LONG, _throttled("power_brake")),
}
