"""Every reading with the calls that it comes from.

What a reading is (its unit, and what can be true of it) stands in `gpuledger_agent.core.readings`; a line
there and one here, and it is queried, validated and published. The readings that are booked are
queried in `core` and stand here for the documentation.
`nvmlDeviceGetPcieThroughput` is no source of any: it sleeps 20 ms for each direction, and the
counters (fields 197 and 198) and the chip's own metrics say the same without.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import pynvml as nvml
from msgspec.structs import replace
from typing_extensions import override

from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.core.readings import READINGS, Unit

ALL_LINKS: Final = 0xFFFFFFFF
"""In the place of a link's number: all of them together."""
EACH_LINK: Final = -1
"""In the place of a link's number: each of those that the GPU has, by itself."""
_OF_EACH_LINK: Final = "each_link"


class DriverVersion(NamedTuple):
    """The two parts of a driver's version that decide what it supports: 580.95 of 580.95.05."""

    branch: int
    release: int

    @classmethod
    def parse(cls, text: str | None) -> "DriverVersion | None":
        """Return a driver's version; `None` where it does not say, or is none as we know them."""
        found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(?![0-9])", text or "")
        return cls(int(found[1]), int(found[2])) if found else None

    @override
    def __str__(self) -> str:
        return f"{self.branch}.{self.release}"


class DriverRange(NamedTuple):
    """The drivers in which the number of a field or metric has the meaning given here."""

    first: DriverVersion
    last: DriverVersion | None = None
    """`None` is all later ones, as far as is known."""

    def has(self, driver: DriverVersion | None) -> bool:
        """Return whether a driver is among them; one that is not known is not."""
        if driver is None or driver < self.first:
            return False
        return self.last is None or driver <= self.last

    @override
    def __str__(self) -> str:
        return f"{self.first} to {self.last}" if self.last else f"from {self.first} on"


class FunctionCall(msgspec.Struct, frozen=True):
    """A function with the arguments behind the handle."""

    name: str
    """The function."""
    arguments: tuple[int, ...] = ()
    """What comes behind the handle."""
    part: str | int | None = None
    """The member, or the position, of the answer that is meant; `None` is all of it."""
    fills: str | None = None
    """The struct to pass behind the arguments, where the answer is written into one."""

    @property
    def key(self) -> tuple[object, ...]:
        """What distinguishes it from other sources."""
        return (self.name, *self.arguments)


class FieldValue(msgspec.Struct, frozen=True):
    """One of the numbered fields of `nvmlDeviceGetFieldValues`."""

    number: int
    """Its id."""
    link: int | None = None
    """Of a field of NVLinks: the link's number, all of them together, or each one by itself, which
    makes a mapping by their numbers."""
    count: int | None = None
    """Of several in a row that make a list for each link: how many."""
    drivers: DriverRange | None = None
    """The drivers in which the number means this, where it means something else in others."""
    member: str | None = None
    """The member of the union that has the value, where that is not left to the driver's word."""

    @property
    def scope(self) -> int:
        """What is passed to the driver for the link."""
        return self.link or 0

    @property
    def key(self) -> tuple[object, ...]:
        """What distinguishes it from other sources."""
        known = ("nvmlDeviceGetFieldValues", self.number)
        if self.link in (None, ALL_LINKS):
            return known
        return (*known, _OF_EACH_LINK if self.link == EACH_LINK else self.link)

    @property
    def answered_key(self) -> tuple[object, ...]:
        """What an answer is remembered by: of single links one for all, as there are hundreds."""
        return self.key if self.link in (None, ALL_LINKS) else self.of(EACH_LINK).key

    def of(self, link: int, *, position: int = 0) -> "FieldValue":
        """Return the same field of one link; of several in a row the one at a position."""
        return replace(self, number=self.number + position, link=link, count=None)


class GpmMetric(msgspec.Struct, frozen=True):
    """One of the metrics of `nvmlGpmMetricsGet`, or several that make a list or a mapping."""

    number: int
    """Its id, or the first one's."""
    count: int | None = None
    """Of a list or a mapping: how many there may be."""
    step: int = 1
    """How far the ids of two in a row lie apart."""
    is_by_link: bool = False
    """Whether they are one of each NVLink, which makes a mapping by the links' numbers."""

    @property
    def numbers(self) -> range:
        """All ids, in the order of engines or links."""
        return range(self.number, self.number + (self.count or 1) * self.step, self.step)

    @property
    def key(self) -> tuple[object, ...]:
        """What distinguishes it from other sources."""
        return ("nvmlGpmMetricsGet", self.number)


Source = FunctionCall | FieldValue | GpmMetric


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One of our readings and where it comes from."""

    name: str
    """The field of `GpuReading`, dotted where it lies in a part."""
    unit: Unit
    """What the driver counts in."""
    sources: tuple[Source, ...]
    """Where it comes from: the first of these that the driver supports."""
    architectures: str = ""
    """The first architecture that has it, or `until` the last one; empty where all have it."""


# Not by the group: a name stands in one group alone.
_UNITS: Final = {name: spec.unit for group in READINGS.values() for name, spec in group.items()}


def _row(name: str, *sources: Source, architectures: str = "") -> MetricSpec:
    return MetricSpec(name=name, unit=_UNITS[name], sources=sources, architectures=architectures)


# The first version counts the driver's own memory as used; drivers before 510 have no other.
_V1: Final = ("nvmlDeviceGetMemoryInfo", ())
_V2: Final = ("nvmlDeviceGetMemoryInfo", (nvml.nvmlMemory_v2,))
_BOOKS: Final = (
    # All samples of the ring buffer first: the rates are of one sample period of at most a second.
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
    _row("power_milliwatts", FunctionCall("nvmlDeviceGetPowerUsage")),
    _row(
        "energy_total_millijoules",
        FunctionCall("nvmlDeviceGetTotalEnergyConsumption"),
        architectures="Volta",
    ),
)

# What stands in the tick itself, and goes with each event.
_SENSORS: Final = (
    # Newer drivers have a versioned call as well.
    _row(
        "temperature_celsius",
        FunctionCall("nvmlDeviceGetTemperature", (nvml.NVML_TEMPERATURE_GPU,)),
        FunctionCall("nvmlDeviceGetTemperatureV", (nvml.NVML_TEMPERATURE_GPU,)),
    ),
    _row("sm_clock_hertz", FunctionCall("nvmlDeviceGetClockInfo", (nvml.NVML_CLOCK_SM,))),
    _row("memory_clock_hertz", FunctionCall("nvmlDeviceGetClockInfo", (nvml.NVML_CLOCK_MEM,))),
)
_INSTANT: Final = (
    _row("memory_temperature_celsius", FieldValue(82), architectures="HBM"),
    # `nvmlDeviceGetPowerUsage` is the mean of a second on most GPUs since Ampere; this is not.
    _row("power_instant_milliwatts", FieldValue(186), architectures="Ampere"),
    # Position 1 of these answers is the sampling period.
    _row(
        "encoder_utilization_ratio",
        FunctionCall("nvmlDeviceGetEncoderUtilization", (), 0),
    ),
    _row(
        "decoder_utilization_ratio",
        FunctionCall("nvmlDeviceGetDecoderUtilization", (), 0),
    ),
    _row("jpeg_utilization_ratio", FunctionCall("nvmlDeviceGetJpgUtilization", (), 0)),
    _row("optical_flow_utilization_ratio", FunctionCall("nvmlDeviceGetOfaUtilization", (), 0)),
    _row(
        "temperature_margin_celsius",
        FunctionCall("nvmlDeviceGetMarginTemperature"),
        architectures="Ada",
    ),
    _row("performance_state", FunctionCall("nvmlDeviceGetPerformanceState")),
)

# NVIDIA has moved these fields among those of power smoothing: a number that is asked of the wrong
# driver gives watts or percents for seconds. Where between the two ranges it did is not known.
_BEFORE_RENUMBERED: Final = DriverRange(DriverVersion(575, 51), DriverVersion(580, 65))
_RENUMBERED: Final = DriverRange(DriverVersion(580, 82))

_THROTTLING: Final = (
    # NVIDIA renamed the function; older drivers have the second name alone.
    _row(
        "throttling.reasons",
        FunctionCall("nvmlDeviceGetCurrentClocksEventReasons"),
        FunctionCall("nvmlDeviceGetCurrentClocksThrottleReasons"),
    ),
    *(
        _row(f"throttling.{name}_ns_total", FieldValue(number))
        for name, number in {
            "power": 74,
            "thermal": 75,
            "sync_boost": 76,
            "board_limit": 77,
            "low_utilization": 78,
            "reliability": 79,
        }.items()
    ),
    *(
        _row(
            f"throttling.{name}_ns_total",
            FieldValue(number, drivers=_RENUMBERED),
            FieldValue(before, drivers=_BEFORE_RENUMBERED),
        )
        for name, number, before in (
            ("software_thermal", 269, 251),
            ("hardware_thermal", 270, 252),
            ("power_brake", 271, 253),
        )
    ),
)

_TRAFFIC: Final = (
    _row("traffic.pcie_sent_bytes_total", FieldValue(197), architectures="Hopper"),
    _row("traffic.pcie_received_bytes_total", FieldValue(198), architectures="Hopper"),
    _row("traffic.nvlink_sent_bytes_total", FieldValue(138, ALL_LINKS), architectures="Ampere"),
    _row("traffic.nvlink_received_bytes_total", FieldValue(139, ALL_LINKS), architectures="Ampere"),
)

_ACTIVITY: Final = tuple(
    _row(f"profiling.{name}", GpmMetric(number), architectures="Hopper")
    for name, number in (
        ("graphics_engine_active_ratio", nvml.NVML_GPM_METRIC_GRAPHICS_UTIL),
        ("sm_active_ratio", nvml.NVML_GPM_METRIC_SM_UTIL),
        ("tensor_active_ratio", nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL),
        ("dram_active_ratio", nvml.NVML_GPM_METRIC_DRAM_BW_UTIL),
    )
)
_PROFILING: Final = tuple(
    _row(f"profiling.{name}", metric, architectures="Hopper")
    for name, metric in {
        "sm_occupancy_ratio": GpmMetric(nvml.NVML_GPM_METRIC_SM_OCCUPANCY),
        "tensor_dfma_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL),
        "tensor_hmma_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL),
        "tensor_imma_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL),
        "fp64_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_FP64_UTIL),
        "fp32_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_FP32_UTIL),
        "fp16_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_FP16_UTIL),
        "integer_active_ratio": GpmMetric(nvml.NVML_GPM_METRIC_INTEGER_UTIL),
        "pcie_sent_bytes_per_second": GpmMetric(nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC),
        "pcie_received_bytes_per_second": GpmMetric(nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC),
        "nvlink_sent_bytes_per_second": GpmMetric(nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC),
        "nvlink_received_bytes_per_second": GpmMetric(nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC),
        "c2c_sent_bytes_per_second": GpmMetric(nvml.NVML_GPM_METRIC_C2C_TOTAL_TX_PER_SEC),
        "c2c_received_bytes_per_second": GpmMetric(nvml.NVML_GPM_METRIC_C2C_TOTAL_RX_PER_SEC),
        # The engines of a kind have ids in a row, the first one's being 0.
        "nvdec_active_ratios": GpmMetric(nvml.NVML_GPM_METRIC_NVDEC_0_UTIL, 8),
        "nvjpg_active_ratios": GpmMetric(nvml.NVML_GPM_METRIC_NVJPG_0_UTIL, 8),
        "nvofa_active_ratios": GpmMetric(nvml.NVML_GPM_METRIC_NVOFA_0_UTIL, 2),
    }.items()
)

_CORRECTED: Final = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
_UNCORRECTED: Final = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_SRAM: Final = ("nvmlDeviceGetSramEccErrorStatus", ())
_SRAM_STRUCT: Final = "c_nvmlEccSramErrorStatus_v1_t"
_FABRIC_STRUCT: Final = "c_nvmlGpuFabricInfo_v2_t"

_HEALTH: Final = (
    _row("health.recovery_action", FieldValue(230)),
    # Volatile counts begin anew at each load of the driver; aggregate ones are of the board's life.
    *(
        _row(f"health.ecc_{name}_total", FunctionCall("nvmlDeviceGetTotalEccErrors", kinds))
        for name, kinds in {
            "corrected_volatile": (_CORRECTED, nvml.NVML_VOLATILE_ECC),
            "uncorrected_volatile": (_UNCORRECTED, nvml.NVML_VOLATILE_ECC),
            "corrected_aggregate": (_CORRECTED, nvml.NVML_AGGREGATE_ECC),
            "uncorrected_aggregate": (_UNCORRECTED, nvml.NVML_AGGREGATE_ECC),
        }.items()
    ),
    *(
        _row(
            f"health.sram_{name}", FunctionCall(*_SRAM, part, _SRAM_STRUCT), architectures="Ampere"
        )
        for name, part in {
            "corrected_total": "aggregateCor",
            "uncorrected_parity_total": "aggregateUncParity",
            "uncorrected_secded_total": "aggregateUncSecDed",
            "threshold_exceeded": "bThresholdExceeded",
        }.items()
    ),
    # Ampere replaced the retirement of pages by the remapping of rows.
    _row("health.retired_pages_single_bit", FieldValue(29), architectures="until Volta"),
    _row("health.retired_pages_double_bit", FieldValue(30), architectures="until Volta"),
    _row("health.retired_pages_pending", FieldValue(31), architectures="until Volta"),
    *(
        _row(
            f"health.remapped_rows_{name}",
            FunctionCall("nvmlDeviceGetRemappedRows", (), position),
            architectures="Ampere",
        )
        for position, name in enumerate(("correctable", "uncorrectable", "pending", "failed"))
    ),
    *(
        _row(
            f"health.remap_banks_{part}",
            FunctionCall("nvmlDeviceGetRowRemapperHistogram", (), part),
            architectures="Ampere",
        )
        for part in ("max", "high", "partial", "low", "none")
    ),
    _row("health.pcie_replays_total", FunctionCall("nvmlDeviceGetPcieReplayCounter")),
    # Fields in a row.
    *(
        _row(f"health.pcie_{name}_total", FieldValue(number), architectures="Hopper")
        for number, name in enumerate(
            (
                "correctable_errors",
                "naks_received",
                "receiver_errors",
                "bad_tlps",
                "naks_sent",
                "bad_dllps",
                "non_fatal_errors",
                "fatal_errors",
                "unsupported_requests",
                "lcrc_errors",
                "lane_errors",
            ),
            start=173,
        )
    ),
    # Newer GPUs refuse these: they count a link's errors by other fields.
    _row("health.nvlink_crc_flit_errors_total", FieldValue(38), architectures="until Ampere"),
    _row("health.nvlink_crc_data_errors_total", FieldValue(45), architectures="until Ampere"),
    _row("health.nvlink_replays_total", FieldValue(52), architectures="until Ampere"),
    _row("health.nvlink_recoveries_total", FieldValue(59), architectures="until Ampere"),
    # With the health, and not at each tick: it is a field for each link.
    _row(
        "health.nvlink_link_sent_bytes_totals", FieldValue(138, EACH_LINK), architectures="Ampere"
    ),
    _row(
        "health.nvlink_link_received_bytes_totals",
        FieldValue(139, EACH_LINK),
        architectures="Ampere",
    ),
    _row("health.nvlink_link_states", FieldValue(165, EACH_LINK), architectures="Hopper"),
    *(
        _row(
            f"health.nvlink_link_{name}_totals",
            FieldValue(number, EACH_LINK),
            architectures="Hopper",
        )
        for name, number in (("replays", 161), ("recoveries", 162), ("crc_errors", 163))
    ),
    # NVLink 5 counts otherwise.
    *(
        _row(
            f"health.nvlink_link_{name}",
            FieldValue(number, EACH_LINK, count),
            architectures="Blackwell",
        )
        for name, number, count in (
            ("malformed_packets_totals", 206, None),
            ("buffer_overruns_totals", 207, None),
            ("receive_errors_totals", 208, None),
            ("receive_remote_errors_totals", 209, None),
            ("receive_general_errors_totals", 210, None),
            ("integrity_errors_totals", 211, None),
            ("discards_totals", 212, None),
            ("successful_recoveries_totals", 213, None),
            ("failed_recoveries_totals", 214, None),
            ("effective_errors_totals", 219, None),
            ("symbol_errors_totals", 221, None),
            ("effective_bit_error_ratios", 220, None),
            ("symbol_bit_error_ratios", 222, None),
            ("fec_history_totals", 235, 16),
        )
    ),
    # Behind what a link received stands what it sent, and then the next link.
    *(
        _row(
            f"health.nvlink_link_{direction}_bytes_per_second",
            GpmMetric(first, 18, step=2, is_by_link=True),
            architectures="Hopper",
        )
        for direction, first in {
            "sent": nvml.NVML_GPM_METRIC_NVLINK_L0_TX_PER_SEC,
            "received": nvml.NVML_GPM_METRIC_NVLINK_L0_RX_PER_SEC,
        }.items()
    ),
    *(
        _row(
            f"health.fabric_{name}",
            FunctionCall("nvmlDeviceGetGpuFabricInfoV", (), part, _FABRIC_STRUCT),
            architectures="Hopper",
        )
        for name, part in {
            "state": "state",
            "status": "status",
            "health_mask": "healthMask",
            "bandwidth_degraded": "healthMask",
            "route_recovery": "healthMask",
            "route_unhealthy": "healthMask",
            "access_timeout": "healthMask",
        }.items()
    ),
    _row("health.pcie_link_generation", FunctionCall("nvmlDeviceGetCurrPcieLinkGeneration")),
    _row("health.pcie_link_width", FunctionCall("nvmlDeviceGetCurrPcieLinkWidth")),
    # With the health, and not once: it is what GPU and machine can do together.
    _row("health.pcie_max_link_generation", FunctionCall("nvmlDeviceGetMaxPcieLinkGeneration")),
    _row("health.pcie_max_link_width", FunctionCall("nvmlDeviceGetMaxPcieLinkWidth")),
    _row("health.bar1_used_bytes", FunctionCall("nvmlDeviceGetBAR1MemoryInfo", (), "bar1Used")),
    _row("health.fan_speed_ratio", FunctionCall("nvmlDeviceGetFanSpeed")),
    _row(
        "health.vgpu_license_status",
        FunctionCall("nvmlDeviceGetGridLicensableFeatures_v4"),
    ),
    _row("health.c2c_links", FieldValue(170), architectures="Hopper"),
)

_LIMITS: Final = (
    *(
        _row(
            f"limits.power_limit_{name}_milliwatts", FunctionCall(f"nvmlDeviceGet{call}", (), part)
        )
        for name, call, part in (
            ("enforced", "EnforcedPowerLimit", None),
            ("requested", "PowerManagementLimit", None),
            ("default", "PowerManagementDefaultLimit", None),
            ("min", "PowerManagementLimitConstraints", 0),
            ("max", "PowerManagementLimitConstraints", 1),
        )
    ),
    *(
        _row(
            f"limits.temperature_{name}_celsius",
            FunctionCall("nvmlDeviceGetTemperatureThreshold", (threshold,)),
            architectures="until Hopper",
        )
        for name, threshold in {
            "slowdown": nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
            "shutdown": nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
        }.items()
    ),
    # Below 0 where they lie behind the limit, so never to be read as an unsigned number.
    *(
        _row(
            f"limits.temperature_margin_{name}_celsius",
            FieldValue(number, member="siVal"),
            architectures="Ada",
        )
        for name, number in {
            "max": 196,
            "memory_max": 195,
            "slowdown": 194,
            "shutdown": 193,
        }.items()
    ),
    *(
        _row(f"limits.{name}_clock_max_hertz", FunctionCall("nvmlDeviceGetMaxClockInfo", (clock,)))
        for name, clock in {"sm": nvml.NVML_CLOCK_SM, "memory": nvml.NVML_CLOCK_MEM}.items()
    ),
)

CATALOGUE: Final[Mapping[CallGroup, Sequence[MetricSpec]]] = {
    CallGroup.BOOKS: _BOOKS,
    CallGroup.SENSORS: (*_SENSORS, *_ACTIVITY),
    CallGroup.READINGS: (*_INSTANT, *_THROTTLING, *_TRAFFIC),
    CallGroup.PROFILING: _PROFILING,
    CallGroup.HEALTH: (*_HEALTH, *_LIMITS),
}
"""The readings by the group in which they are queried."""


def specs_for(group: CallGroup, driver: DriverVersion | None) -> Sequence[MetricSpec]:
    """Return the readings of a group that a driver's numbers give; `None` is an unknown driver."""
    possible = (
        replace(spec, sources=tuple(source for source in spec.sources if _means_it(source, driver)))
        for spec in CATALOGUE[group]
    )
    return [spec for spec in possible if spec.sources]


def _means_it(source: Source, driver: DriverVersion | None) -> bool:
    drivers = source.drivers if isinstance(source, FieldValue) else None
    return drivers is None or drivers.has(driver)
