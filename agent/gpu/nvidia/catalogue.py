"""Every reading with the calls that it comes from.

What a reading is (its unit, and what can be true of it) stands in `agent.core.readings`; a line
there and one here, and it is queried, validated and published. The readings that are booked are
queried in `core` and stand here for the documentation.
`nvmlDeviceGetPcieThroughput` is not sources at all: it sleeps 20 ms for each direction, and the
counters (fields 197 and 198) and the chip's own metrics tell the same without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pynvml as nvml

from agent.core.raw import CallGroup
from agent.core.readings import READINGS
from agent.core.units import Unit

ALL_LINKS: Final = 0xFFFFFFFF
"""In the place of a link's number: all of them together."""
EACH_LINK: Final = -1
"""In the place of a link's number: each of those that the GPU has, by itself."""
_NO_SINGLE_LINK: Final = (None, ALL_LINKS, EACH_LINK)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function with the arguments behind the handle."""

    name: str
    """The function."""
    arguments: tuple[int, ...] = ()
    """What comes behind the handle."""
    part: str | int | None = None
    """The member, or the position, of the answer that is meant; `None` is all of it."""
    fills: str | None = None
    """The struct to give behind the arguments, where the answer is written into one."""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other questions."""
        return (self.name, *self.arguments)


@dataclass(frozen=True, slots=True)
class FieldValue:
    """One of the numbered fields of `nvmlDeviceGetFieldValues`."""

    number: int
    """Its id."""
    link: int | None = None
    """Of a field of NVLinks: the link's number, all of them together, or each one by itself, which
    makes a mapping by their numbers."""

    @property
    def scope(self) -> int:
        """What the driver takes for the link."""
        return self.link or 0

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other questions."""
        known = ("nvmlDeviceGetFieldValues", self.number)
        return known if self.link in _NO_SINGLE_LINK else (*known, self.link)

    def of(self, link: int) -> "FieldValue":
        """Return the same field of one link."""
        return replace(self, link=link)


@dataclass(frozen=True, slots=True)
class GpmMetric:
    """One of the metrics of `nvmlGpmMetricsGet`, or several in a row that make a list."""

    number: int
    """Its id, or the first one's."""
    count: int | None = None
    """Of a list: how many there may be."""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other questions."""
        return ("nvmlGpmMetricsGet", self.number)


Source = FunctionCall | FieldValue | GpmMetric


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """One of our readings and where it comes from."""

    name: str
    """The field of `GpuReading`, dotted where it lies in a part."""
    unit: Unit
    """What the driver counts in."""
    sources: tuple[Source, ...]
    """Where it comes from: the first of these that the driver supports."""
    since: str = ""
    """The first architecture that has it, where not all have; for people."""


# Not by the group: a name stands in one group alone.
_UNITS: Final = {name: spec.unit for group in READINGS.values() for name, spec in group.items()}


def _row(name: str, *sources: Source, since: str = "") -> MetricSpec:
    return MetricSpec(name=name, unit=_UNITS[name], sources=sources, since=since)


_V1: Final = ("nvmlDeviceGetMemoryInfo", ())
_V2: Final = ("nvmlDeviceGetMemoryInfo", (nvml.nvmlMemory_v2,))
_BOOKS: Final = (
    _row(
        "utilization_ratio",
        FunctionCall("nvmlDeviceGetSamples", (nvml.NVML_GPU_UTILIZATION_SAMPLES,)),
        FunctionCall("nvmlDeviceGetUtilizationRates", part="gpu"),
    ),
    _row(
        "memory_utilization_ratio",
        FunctionCall("nvmlDeviceGetSamples", (nvml.NVML_MEMORY_UTILIZATION_SAMPLES,)),
        FunctionCall("nvmlDeviceGetUtilizationRates", part="memory"),
    ),
    _row(
        "memory_total_bytes",
        FunctionCall(*_V2, "total"),
        FunctionCall(*_V1, "total"),
    ),
    _row(
        "memory_used_bytes",
        FunctionCall(*_V2, "used"),
        FunctionCall(*_V1, "used"),
    ),
    _row("memory_reserved_bytes", FunctionCall(*_V2, "reserved")),
    _row("power_watts", FunctionCall("nvmlDeviceGetPowerUsage")),
    _row(
        "energy_total_joules",
        FunctionCall("nvmlDeviceGetTotalEnergyConsumption"),
        since="Volta",
    ),
)


def _clock(name: str, kind: int) -> MetricSpec:
    return _row(name, FunctionCall("nvmlDeviceGetClockInfo", (kind,)))


_INSTANT: Final = (
    _row(
        "temperature_celsius",
        FunctionCall("nvmlDeviceGetTemperature", (nvml.NVML_TEMPERATURE_GPU,)),
        FunctionCall("nvmlDeviceGetTemperatureV", (nvml.NVML_TEMPERATURE_GPU,)),
    ),
    _row("memory_temperature_celsius", FieldValue(82), since="HBM"),
    _clock("sm_clock_hertz", nvml.NVML_CLOCK_SM),
    _clock("memory_clock_hertz", nvml.NVML_CLOCK_MEM),
    _row("power_instant_watts", FieldValue(186), since="Ampere"),
    _row(
        "encoder_utilization_ratio",
        FunctionCall("nvmlDeviceGetEncoderUtilization", (), 0),
    ),
    _row(
        "decoder_utilization_ratio",
        FunctionCall("nvmlDeviceGetDecoderUtilization", (), 0),
    ),
    _row("performance_state", FunctionCall("nvmlDeviceGetPerformanceState")),
)


def _throttled(name: str, field: int, since: str = "") -> MetricSpec:
    return _row(f"throttling.{name}_seconds_total", FieldValue(field), since=since)


_THROTTLING: Final = (
    _row(
        "throttling.reasons",
        FunctionCall("nvmlDeviceGetCurrentClocksEventReasons"),
        FunctionCall("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    _throttled("power", 74),
    _throttled("thermal", 75),
    _throttled("sync_boost", 76),
    _throttled("board_limit", 77),
    _throttled("low_utilization", 78),
    _throttled("reliability", 79),
    _throttled("software_thermal", 269),
    _throttled("hardware_thermal", 270),
    _throttled("power_brake", 271),
)


def _nvlinks(name: str, field: int) -> MetricSpec:
    name, row = f"traffic.nvlink_{name}_bytes_total", FieldValue(field, ALL_LINKS)
    return _row(name, row, since="Ampere")


_TRAFFIC: Final = (
    _row("traffic.pcie_sent_bytes_total", FieldValue(197), since="Hopper"),
    _row("traffic.pcie_received_bytes_total", FieldValue(198), since="Hopper"),
    _nvlinks("sent", 138),
    _nvlinks("received", 139),
)


def _active(name: str, metric: int) -> MetricSpec:
    row = GpmMetric(metric)
    return _row(f"profiling.{name}_active_ratio", row, since="Hopper")


def _engines(name: str, metric: int, count: int) -> MetricSpec:
    row = GpmMetric(metric, count)
    return _row(f"profiling.{name}_active_ratios", row, since="Hopper")


def _flow(name: str, metric: int) -> MetricSpec:
    name = f"profiling.{name}_bytes_per_second"
    return _row(name, GpmMetric(metric), since="Hopper")


_PROFILING: Final = (
    _active("graphics_engine", nvml.NVML_GPM_METRIC_GRAPHICS_UTIL),
    _active("sm", nvml.NVML_GPM_METRIC_SM_UTIL),
    _row(
        "profiling.sm_occupancy_ratio",
        GpmMetric(nvml.NVML_GPM_METRIC_SM_OCCUPANCY),
        since="Hopper",
    ),
    _active("tensor", nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL),
    _active("tensor_dfma", nvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL),
    _active("tensor_hmma", nvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL),
    _active("tensor_imma", nvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL),
    _active("dram", nvml.NVML_GPM_METRIC_DRAM_BW_UTIL),
    _active("fp64", nvml.NVML_GPM_METRIC_FP64_UTIL),
    _active("fp32", nvml.NVML_GPM_METRIC_FP32_UTIL),
    _active("fp16", nvml.NVML_GPM_METRIC_FP16_UTIL),
    _active("integer", nvml.NVML_GPM_METRIC_INTEGER_UTIL),
    _flow("pcie_sent", nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC),
    _flow("pcie_received", nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC),
    _flow("nvlink_sent", nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC),
    _flow("nvlink_received", nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC),
    _flow("c2c_sent", nvml.NVML_GPM_METRIC_C2C_TOTAL_TX_PER_SEC),
    _flow("c2c_received", nvml.NVML_GPM_METRIC_C2C_TOTAL_RX_PER_SEC),
    _engines("nvdec", nvml.NVML_GPM_METRIC_NVDEC_0_UTIL, 8),
    _engines("nvjpg", nvml.NVML_GPM_METRIC_NVJPG_0_UTIL, 8),
    _engines("nvofa", nvml.NVML_GPM_METRIC_NVOFA_0_UTIL, 2),
)


def _health(name: str, *sources: Source, since: str = "") -> MetricSpec:
    return _row(f"health.{name}", *sources, since=since)


def _ecc(kind: int, since: int) -> FunctionCall:
    return FunctionCall("nvmlDeviceGetTotalEccErrors", (kind, since))


def _sram(name: str, part: str) -> MetricSpec:
    call = FunctionCall(
        "nvmlDeviceGetSramEccErrorStatus", (), part, "c_nvmlEccSramErrorStatus_v1_t"
    )
    return _health(f"sram_{name}", call, since="Ampere")


def _rows(name: str, part: int) -> MetricSpec:
    call = FunctionCall("nvmlDeviceGetRemappedRows", (), part)
    return _health(f"remapped_rows_{name}", call, since="Ampere")


def _banks(part: str) -> MetricSpec:
    call = FunctionCall("nvmlDeviceGetRowRemapperHistogram", (), part)
    return _health(f"remap_banks_{part}", call, since="Ampere")


def _links(name: str, field: int) -> MetricSpec:
    name, row = f"nvlink_link_{name}_bytes_totals", FieldValue(field, EACH_LINK)
    return _health(name, row, since="Ampere")


def _fabric(name: str, part: str) -> MetricSpec:
    call = FunctionCall("nvmlDeviceGetGpuFabricInfoV", (), part, "c_nvmlGpuFabricInfo_v2_t")
    return _health(f"fabric_{name}", call, since="Hopper")


_HEALTH: Final = (
    _health("recovery_action", FieldValue(230)),
    _health("ecc_corrected_volatile_total", _ecc(0, nvml.NVML_VOLATILE_ECC)),
    _health("ecc_uncorrected_volatile_total", _ecc(1, nvml.NVML_VOLATILE_ECC)),
    _health("ecc_corrected_aggregate_total", _ecc(0, nvml.NVML_AGGREGATE_ECC)),
    _health("ecc_uncorrected_aggregate_total", _ecc(1, nvml.NVML_AGGREGATE_ECC)),
    _sram("corrected_total", "aggregateCor"),
    _sram("uncorrected_parity_total", "aggregateUncParity"),
    _sram("uncorrected_secded_total", "aggregateUncSecDed"),
    _sram("threshold_exceeded", "bThresholdExceeded"),
    _health("retired_pages_single_bit", FieldValue(29), since="until Volta"),
    _health("retired_pages_double_bit", FieldValue(30), since="until Volta"),
    _health("retired_pages_pending", FieldValue(31), since="until Volta"),
    _rows("correctable", 0),
    _rows("uncorrectable", 1),
    _rows("pending", 2),
    _rows("failed", 3),
    *(_banks(part) for part in ("max", "high", "partial", "low", "none")),
    _health("pcie_replays_total", FunctionCall("nvmlDeviceGetPcieReplayCounter")),
    _health("nvlink_crc_flit_errors_total", FieldValue(38)),
    _health("nvlink_crc_data_errors_total", FieldValue(45)),
    _health("nvlink_replays_total", FieldValue(52)),
    _health("nvlink_recoveries_total", FieldValue(59)),
    _links("sent", 138),
    _links("received", 139),
    _fabric("state", "state"),
    _fabric("status", "status"),
    _fabric("health_mask", "healthMask"),
    _health("pcie_link_generation", FunctionCall("nvmlDeviceGetCurrPcieLinkGeneration")),
    _health("pcie_link_width", FunctionCall("nvmlDeviceGetCurrPcieLinkWidth")),
    _health(
        "bar1_used_bytes",
        FunctionCall("nvmlDeviceGetBAR1MemoryInfo", (), "bar1Used"),
    ),
    _health("fan_speed_ratio", FunctionCall("nvmlDeviceGetFanSpeed")),
    _health("vgpu_license_status", FunctionCall("nvmlDeviceGetGridLicensableFeatures_v4")),
    _health("c2c_links", FieldValue(170), since="Hopper"),
)


def _power(name: str, call: str, part: int | None = None) -> MetricSpec:
    name = f"limits.power_limit_{name}_watts"
    return _row(name, FunctionCall(f"nvmlDeviceGet{call}", (), part))


def _heat(name: str, threshold: int) -> MetricSpec:
    call = FunctionCall("nvmlDeviceGetTemperatureThreshold", (threshold,))
    return _row(f"limits.temperature_{name}_celsius", call, since="until Hopper")


_LIMITS: Final = (
    _power("enforced", "EnforcedPowerLimit"),
    _power("requested", "PowerManagementLimit"),
    _power("default", "PowerManagementDefaultLimit"),
    _power("min", "PowerManagementLimitConstraints", 0),
    _power("max", "PowerManagementLimitConstraints", 1),
    _heat("slowdown", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    _heat("shutdown", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
)

CATALOGUE: Final[Mapping[CallGroup, Sequence[MetricSpec]]] = {
    CallGroup.BOOKS: _BOOKS,
    CallGroup.READINGS: (*_INSTANT, *_THROTTLING, *_TRAFFIC),
    CallGroup.PROFILING: _PROFILING,
    CallGroup.HEALTH: (*_HEALTH, *_LIMITS),
}
"""The readings by the group in which they are sources."""
