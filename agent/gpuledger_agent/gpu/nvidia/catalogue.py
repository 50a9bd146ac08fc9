"""The catalogue of readings and the NVML calls that provide them.

`gpuledger_agent.core.readings` has each reading's unit and plausible range. A reading with a row
both there and here is queried, validated and published. Call group USAGE is queried in `core`; its
readings are listed here only for the documentation.

`nvmlDeviceGetPcieThroughput` is not used, because it sleeps 20 ms per direction. The counters
(fields 197 and 198) and the chip's own metrics provide the same data without a delay.
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
"""NVML's link number for all links together."""
EACH_LINK: Final = -1
"""Our link number that requests each of the GPU's links separately."""
_OF_EACH_LINK: Final = "each_link"


class DriverVersion(NamedTuple):
    """The two parts of a driver's version that determine its features: 580.95 for 580.95.05."""

    branch: int
    release: int

    @classmethod
    def parse(cls, text: str | None) -> "DriverVersion | None":
        """Return the parsed version; `None` if the text is missing or has another format."""
        found = re.match(r"([0-9]{1,6})\.([0-9]{1,6})(?![0-9])", text or "")
        return cls(int(found[1]), int(found[2])) if found else None

    @override
    def __str__(self) -> str:
        return f"{self.branch}.{self.release}"


class DriverRange(NamedTuple):
    """A range of driver versions, inclusive at both ends."""

    first: DriverVersion
    last: DriverVersion | None = None
    """The last version; `None` for a range without an end."""

    def has(self, driver: DriverVersion | None) -> bool:
        """Return whether the range contains a driver; an unknown driver is in no range."""
        if driver is None or driver < self.first:
            return False
        return self.last is None or driver <= self.last

    @override
    def __str__(self) -> str:
        return f"{self.first} to {self.last}" if self.last else f"{self.first} and later"


class FunctionCall(msgspec.Struct, frozen=True):
    """A source of a reading: the call of an NVML function with a device's handle."""

    name: str
    """The function's name."""
    arguments: tuple[int, ...] = ()
    """The function's arguments after the handle."""
    part: str | int | None = None
    """The member of the answer, or the position in it, that contains the value; `None` if the whole
    answer is the value."""
    fills: str | None = None
    """The name of the pynvml struct to pass as the last argument, if the function fills one."""

    @property
    def key(self) -> tuple[object, ...]:
        """The source's key in `DeviceClient.outcomes`."""
        return (self.name, *self.arguments)


class FieldValue(msgspec.Struct, frozen=True):
    """A source of a reading: one of the numbered fields of `nvmlDeviceGetFieldValues`."""

    number: int
    """The field's id."""
    link: int | None = None
    """For an NVLink field: the number of a link, `ALL_LINKS`, or `EACH_LINK`. With `EACH_LINK`, the
    reading is a mapping from link number to value."""
    count: int | None = None
    """Number of consecutive field ids that form a list for each link."""
    drivers: DriverRange | None = None
    """The drivers in which the id has this meaning; `None` for all drivers."""
    member: str | None = None
    """The member of NVML's value union to read; `None` to read the member that the driver
    reports."""

    @property
    def scope(self) -> int:
        """The link's number to pass to the driver; 0 if the field is not about NVLink."""
        return self.link or 0

    @property
    def key(self) -> tuple[object, ...]:
        """The source's key in `DeviceClient.outcomes`."""
        known = ("nvmlDeviceGetFieldValues", self.number)
        if self.link in (None, ALL_LINKS):
            return known
        return (*known, _OF_EACH_LINK if self.link == EACH_LINK else self.link)

    @property
    def answered_key(self) -> tuple[object, ...]:
        """The field's key in `DeviceClient.outcomes` if the driver answers the field.

        It is the same for all links, to save memory.
        """
        return self.key if self.link in (None, ALL_LINKS) else self.of(EACH_LINK).key

    def of(self, link: int, *, position: int = 0) -> "FieldValue":
        """Return the field of one link; for a list, the field of the element at `position`."""
        return replace(self, number=self.number + position, link=link, count=None)


class GpmMetric(msgspec.Struct, frozen=True):
    """A source of a reading: one metric of `nvmlGpmMetricsGet`, or several metrics.

    Several metrics form a list by engine or a mapping by NVLink.
    """

    number: int
    """The id of the only or first metric."""
    count: int | None = None
    """Maximum number of metrics in the list or mapping; `None` for a single metric."""
    step: int = 1
    """Difference between consecutive ids."""
    is_by_link: bool = False
    """Whether there is one metric per NVLink, so that the reading maps link numbers to values."""

    @property
    def numbers(self) -> range:
        """The ids of all metrics, in the order of engines or links."""
        return range(self.number, self.number + (self.count or 1) * self.step, self.step)

    @property
    def key(self) -> tuple[object, ...]:
        """The key that distinguishes this source from other sources."""
        return ("nvmlGpmMetricsGet", self.number)


Source = FunctionCall | FieldValue | GpmMetric


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One of our readings, with the NVML calls that provide it."""

    name: str
    """The field of `GpuReading` or `GpuDetails`, with a dot if it is in a nested struct."""
    unit: Unit
    """The driver's unit."""
    sources: tuple[Source, ...]
    """Possible sources of the reading; the first source that the driver supports is used."""
    architectures: str = ""
    """The first GPU architecture with this reading, or `until` and the last one; empty for all."""


# One mapping for all groups, because each name is in only one group.
_UNITS: Final = {name: spec.unit for group in READINGS.values() for name, spec in group.items()}


def _row(name: str, *sources: Source, architectures: str = "") -> MetricSpec:
    return MetricSpec(name=name, unit=_UNITS[name], sources=sources, architectures=architectures)


# The first version counts reserved memory as used; drivers before 510 have only the first version.
_V1: Final = ("nvmlDeviceGetMemoryInfo", ())
_V2: Final = ("nvmlDeviceGetMemoryInfo", (nvml.nvmlMemory_v2,))
_USAGE: Final = (
    # Prefer the ring buffer's samples: the rates cover only one sample period of at most 1 s.
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

# These are fields of the sample record itself, and thus part of each event.
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
    # This is the current power; `nvmlDeviceGetPowerUsage` is a mean over 1 s on most GPUs since
    # Ampere.
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

# NVIDIA renumbered these fields and the fields of power smoothing: in the wrong driver, a field
# contains watts or percents instead of a time. It is not known which release between the two ranges
# changed the numbers.
_BEFORE_RENUMBERED: Final = DriverRange(DriverVersion(575, 51), DriverVersion(580, 65))
_RENUMBERED: Final = DriverRange(DriverVersion(580, 82))

_THROTTLING: Final = (
    # NVIDIA renamed the function; older drivers have only the second name.
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
        # Engines of one kind have consecutive ids, starting with engine 0.
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
    # Volatile counts restart when the driver is loaded; aggregate ones cover the GPU's lifetime.
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
    # Ampere replaced page retirement with row remapping.
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
    # Consecutive field ids.
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
    # Newer GPUs refuse these and count link errors in other fields.
    _row("health.nvlink_crc_flit_errors_total", FieldValue(38), architectures="until Ampere"),
    _row("health.nvlink_crc_data_errors_total", FieldValue(45), architectures="until Ampere"),
    _row("health.nvlink_replays_total", FieldValue(52), architectures="until Ampere"),
    _row("health.nvlink_recoveries_total", FieldValue(59), architectures="until Ampere"),
    # There is one field per link, so these are in this group, which is queried rarely.
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
    # NVLink 5 has different counters.
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
    # The ids alternate: a link's received bytes, its sent bytes, then the next link.
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
    # The maximum of this GPU in this machine.
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
    # Margins are negative beyond the limit, so they must be read as signed numbers.
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
    CallGroup.USAGE: _USAGE,
    CallGroup.SENSORS: (*_SENSORS, *_ACTIVITY),
    CallGroup.READINGS: (*_INSTANT, *_THROTTLING, *_TRAFFIC),
    CallGroup.PROFILING: _PROFILING,
    CallGroup.HEALTH: (*_HEALTH, *_LIMITS),
}
"""The readings of each call group."""


def specs_for(group: CallGroup, driver: DriverVersion | None) -> Sequence[MetricSpec]:
    """Return a call group's readings with the sources that are valid for a driver version.

    If the version is unknown (`None`), sources that are valid only for certain versions are left
    out. Readings without a valid source are left out.
    """
    possible = (
        replace(spec, sources=tuple(source for source in spec.sources if _means_it(source, driver)))
        for spec in CATALOGUE[group]
    )
    return [spec for spec in possible if spec.sources]


def _means_it(source: Source, driver: DriverVersion | None) -> bool:
    drivers = source.drivers if isinstance(source, FieldValue) else None
    return drivers is None or drivers.has(driver)
