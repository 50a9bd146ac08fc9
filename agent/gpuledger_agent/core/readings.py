"""Names and units of all readings that a GPU source may return.

A source returns numbers in these units, under these names; other names are not published.
`gpuledger_agent.gpu.nvidia.catalogue` maps each name to its NVML call. A name is a field of
`GpuReading` or `GpuDetails`, with a dot if the field is in a nested record.

A unit defines which values are plausible, and how to convert them. Its bounds are the bounds of the
records (`gpuledger.records.bounds`), so that every accepted value can be published. Some drivers
return a utilization of 4294967295 or a memory of 2^64-1. Such values must not become usage:
implausible values are left out and counted, by reading and reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuledger.records import bounds
from gpuledger_agent.core.raw import CallGroup

_MAX: Final = 2**63 - 1
_MILLION: Final = 1_000_000
_PARTS_PER_PERCENT: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """The unit of a driver's value, with its plausible range and its conversion to our unit.

    The converted value is the integer `value * times` or, for a ratio, `value / over`.
    """

    name: str
    """The driver's unit, as text for people."""
    low: float = 0
    """Minimum plausible value, in the driver's unit."""
    high: float = _MAX
    """Maximum plausible value, in the driver's unit."""
    times: int = 1
    """Factor by which the driver's value is multiplied to get our unit."""
    over: int | None = None
    """For a ratio: the number by which the driver's value is divided."""
    cap: float | None = None
    """Maximum in our unit; larger values are set to it, because they result from rounding."""
    is_total: bool = False
    """Whether the value is a counter, which only rises until it restarts."""
    max_per_second: int | None = None
    """For a counter: maximum rise per second."""
    wraps: bool = False
    """For a counter: whether it can overflow. A lower value may then come from an overflow."""
    choices: Mapping[int, Any] = field(default_factory=dict)
    """For a value that is not a quantity: the meaning of each number."""
    decode: Callable[[int], Any] | None = None
    """For a packed value: the function that decodes it; it returns `None` if the value is
    undefined."""


def _flag_at(shift: int) -> Callable[[int], bool | None]:
    """Return a function that reads a 2-bit flag of NVML: 1 is true, 2 is false, else `None`."""
    states = {1: True, 2: False}
    return lambda mask: states.get(mask >> shift & 3)


def _bit_error_ratio(packed: int) -> float | None:
    """Decode NVML's bit error ratio: 4 bits of mantissa, then 8 bits of negative exponent.

    Return `None` if the ratio is above 1.
    """
    ratio = float(f"{packed >> 8}e-{packed & 0xFF}")
    return ratio if ratio <= 1 else None


RATIO: Final = Unit(name="%", high=100, over=100)
# 100 % is the fans' intended maximum speed; fans may run faster.
FAN_SPEED: Final = Unit(name="%", high=bounds.MAX_FAN_RATIO * 100, over=100)
ACTIVITY: Final = Unit(name="%", high=100.5, over=100, cap=1.0)
CELSIUS: Final = Unit(name="°C", low=bounds.MIN_CELSIUS, high=bounds.MAX_CELSIUS)
# A distance between two temperatures; negative above the limit.
MARGIN_CELSIUS: Final = Unit(
    name="°C", low=-bounds.MAX_MARGIN_CELSIUS, high=bounds.MAX_MARGIN_CELSIUS
)
MEGAHERTZ: Final = Unit(name="MHz", high=bounds.MAX_HERTZ // 1_000_000, times=1_000_000)
MILLIWATTS: Final = Unit(name="mW", high=bounds.MAX_MILLIWATTS)
MILLIJOULES: Final = Unit(
    name="mJ",
    high=bounds.MAX_MILLIJOULES,
    is_total=True,
    max_per_second=bounds.MAX_MILLIWATTS,
)
MEMORY_BYTES: Final = Unit(name="B", high=bounds.MAX_MEMORY_BYTES)
BITS: Final = Unit(name="bits")
NUMBER: Final = Unit(name="number", high=1 << 16)
COUNT: Final = Unit(name="count")
EVER: Final = Unit(name="count", is_total=True)
# Incidents are made from these, so values or jumps that hardware cannot produce are rejected.
GRAVE_ERRORS: Final = Unit(
    name="count", high=1_000_000_000, is_total=True, max_per_second=1_000_000
)
BIT_ERROR_RATIO: Final = Unit(name="mantissa and exponent", high=0xFFF, decode=_bit_error_ratio)
NANOSECONDS: Final = Unit(
    # A GPU's units may be read at slightly different times, so allow an extra second.
    name="ns",
    high=bounds.MAX_DURATION_NS,
    is_total=True,
    max_per_second=2_000_000_000,
)
PCIE_BYTES: Final = Unit(name="B", high=1 << 62, is_total=True, max_per_second=1 << 38, wraps=True)
KIBIBYTES: Final = Unit(name="KiB", high=1 << 52, times=1024, is_total=True, max_per_second=1 << 32)
KIBIBYTES_OF_A_LINK: Final = Unit(
    name="KiB", high=1 << 52, times=1024, is_total=True, max_per_second=1 << 28
)
MEBIBYTES_PER_SECOND: Final = Unit(
    name="MiB/s", high=bounds.MAX_BYTES_PER_SECOND >> 20, times=1 << 20
)
FLAG: Final = Unit(name="0 or 1", choices={0: False, 1: True})
PERFORMANCE_STATE: Final = Unit(name="P-state", high=bounds.MAX_PERFORMANCE_STATE)
RECOVERY: Final = Unit(
    name="action",
    choices={
        0: "none",
        1: "reset",
        2: "reboot",
        3: "drain_p2p",
        4: "drain_and_reset",
        5: "recover_imex_domain",
        6: "bus_reset",
        7: "system_reboot",
    },
)
FABRIC_STATE: Final = Unit(
    name="state", choices={0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
)
FABRIC_BANDWIDTH: Final = Unit(name="bits 0 and 1", decode=_flag_at(0))
FABRIC_ROUTE_RECOVERY: Final = Unit(name="bits 2 and 3", decode=_flag_at(2))
FABRIC_ROUTE_UNHEALTHY: Final = Unit(name="bits 4 and 5", decode=_flag_at(4))
FABRIC_ACCESS_TIMEOUT: Final = Unit(name="bits 6 and 7", decode=_flag_at(6))
LINK_STATE: Final = Unit(
    name="state", choices={0: "inactive", 1: "active", 2: "sleep", 3: "traffic_disabled"}
)


PERCENT: Final = (0, 100)
MEMORY_LIMITS: Final = (0, bounds.MAX_MEMORY_BYTES)
PID: Final = (1, bounds.MAX_PID)
TIMESTAMP_US: Final = (0, 1 << 62)


class Validator:
    """Checks whether values are plausible, and counts implausible ones by reading and reason."""

    def __init__(self) -> None:
        self.dropped: Counter[tuple[str, str]] = Counter()

    def drop(self, reading: str, reason: str, *, count: int = 1) -> None:
        """Add `count` to the number of values of a reading that were left out for a reason."""
        if count:
            self.dropped[reading, reason] += count

    def keep(self, value: int | None, limits: tuple[int, int], *, reading: str) -> int | None:
        """Return the value, or `None` if it is missing or outside the limits.

        Values outside the limits are counted.
        """
        if value is None or limits[0] <= value <= limits[1]:
            return value
        self.drop(reading, "out_of_range")
        return None

    def is_plausible(self, value: Any, unit: Unit, *, reading: str) -> bool:  # noqa: ANN401  # drivers return anything
        """Return whether a value is plausible for its unit; count it if it is not.

        A missing value (`None`) is not plausible, but is not counted.
        """
        if value is None:
            return False
        if not isinstance(value, int | float) or not math.isfinite(value):
            self.drop(reading, "not_a_number")
            return False
        if unit.choices:
            # A newer driver may use numbers that are not known here.
            reason, is_true = "unknown", value in unit.choices
        else:
            reason, is_true = "out_of_range", unit.low <= value <= unit.high
        if not is_true:
            self.drop(reading, reason)
        return is_true


def converter(unit: Unit) -> Callable[[Any], Any]:
    """Return a function that converts plausible values to our unit and to their field's type."""
    times, over, cap = unit.times, unit.over, unit.cap
    # One function for each kind of unit, for speed: each tick converts several hundred values.
    if unit.choices:
        return unit.choices.__getitem__
    if unit.decode is not None:
        return unit.decode
    if over is None:
        return lambda value: int(value * times)
    parts = _MILLION / over
    if cap is None:
        return lambda value: int(value * parts + 0.5) / _MILLION
    return lambda value: min(cap, int(value * parts + 0.5) / _MILLION)


def ratio_of(percent: float) -> float:
    """Return a percentage as a ratio, rounded to six digits, which is more than drivers measure."""
    # Takes a fifth of the time that round() takes; each tick computes several hundred ratios.
    return int(percent * _PARTS_PER_PERCENT + 0.5) / _MILLION


@dataclass(frozen=True, slots=True)
class ReadingSpec:
    """A reading's unit, and whether a source returns a single value, a list or a mapping."""

    unit: Unit
    """Unit and plausible values."""
    is_list: bool = False
    """Whether the value is a list, for example one value per engine in order of their numbers."""
    is_by_link: bool = False
    """Whether the value maps link numbers to values, or to lists of values."""


READINGS: Final[Mapping[CallGroup, Mapping[str, ReadingSpec]]] = {
    CallGroup.USAGE: {
        "utilization_ratio": ReadingSpec(RATIO),
        "memory_utilization_ratio": ReadingSpec(RATIO),
        "memory_total_bytes": ReadingSpec(MEMORY_BYTES),
        "memory_used_bytes": ReadingSpec(MEMORY_BYTES),
        "memory_reserved_bytes": ReadingSpec(MEMORY_BYTES),
        "power_milliwatts": ReadingSpec(MILLIWATTS),
        "energy_total_millijoules": ReadingSpec(MILLIJOULES),
    },
    CallGroup.SENSORS: {
        "temperature_celsius": ReadingSpec(CELSIUS),
        "sm_clock_hertz": ReadingSpec(MEGAHERTZ),
        "memory_clock_hertz": ReadingSpec(MEGAHERTZ),
        # On a partitioned GPU, the first of these also shows how busy each instance is.
        "profiling.graphics_engine_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.sm_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.tensor_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.dram_active_ratio": ReadingSpec(ACTIVITY),
    },
    CallGroup.READINGS: {
        "memory_temperature_celsius": ReadingSpec(CELSIUS),
        "power_instant_milliwatts": ReadingSpec(MILLIWATTS),
        "encoder_utilization_ratio": ReadingSpec(RATIO),
        "decoder_utilization_ratio": ReadingSpec(RATIO),
        "jpeg_utilization_ratio": ReadingSpec(RATIO),
        "optical_flow_utilization_ratio": ReadingSpec(RATIO),
        "temperature_margin_celsius": ReadingSpec(MARGIN_CELSIUS),
        "performance_state": ReadingSpec(PERFORMANCE_STATE),
        "throttling.reasons": ReadingSpec(BITS),
        "throttling.power_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.thermal_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.sync_boost_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.board_limit_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.low_utilization_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.reliability_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.software_thermal_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.hardware_thermal_ns_total": ReadingSpec(NANOSECONDS),
        "throttling.power_brake_ns_total": ReadingSpec(NANOSECONDS),
        "traffic.pcie_sent_bytes_total": ReadingSpec(PCIE_BYTES),
        "traffic.pcie_received_bytes_total": ReadingSpec(PCIE_BYTES),
        "traffic.nvlink_sent_bytes_total": ReadingSpec(KIBIBYTES),
        "traffic.nvlink_received_bytes_total": ReadingSpec(KIBIBYTES),
    },
    CallGroup.PROFILING: {
        "profiling.sm_occupancy_ratio": ReadingSpec(ACTIVITY),
        "profiling.tensor_dfma_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.tensor_hmma_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.tensor_imma_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.fp64_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.fp32_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.fp16_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.integer_active_ratio": ReadingSpec(ACTIVITY),
        "profiling.pcie_sent_bytes_per_second": ReadingSpec(MEBIBYTES_PER_SECOND),
        "profiling.pcie_received_bytes_per_second": ReadingSpec(MEBIBYTES_PER_SECOND),
        "profiling.nvlink_sent_bytes_per_second": ReadingSpec(MEBIBYTES_PER_SECOND),
        "profiling.nvlink_received_bytes_per_second": ReadingSpec(MEBIBYTES_PER_SECOND),
        "profiling.c2c_sent_bytes_per_second": ReadingSpec(MEBIBYTES_PER_SECOND),
        "profiling.c2c_received_bytes_per_second": ReadingSpec(MEBIBYTES_PER_SECOND),
        "profiling.nvdec_active_ratios": ReadingSpec(ACTIVITY, is_list=True),
        "profiling.nvjpg_active_ratios": ReadingSpec(ACTIVITY, is_list=True),
        "profiling.nvofa_active_ratios": ReadingSpec(ACTIVITY, is_list=True),
    },
    CallGroup.HEALTH: {
        "health.recovery_action": ReadingSpec(RECOVERY),
        "health.ecc_corrected_volatile_total": ReadingSpec(EVER),
        "health.ecc_uncorrected_volatile_total": ReadingSpec(GRAVE_ERRORS),
        "health.ecc_corrected_aggregate_total": ReadingSpec(EVER),
        "health.ecc_uncorrected_aggregate_total": ReadingSpec(EVER),
        "health.sram_corrected_total": ReadingSpec(EVER),
        "health.sram_uncorrected_parity_total": ReadingSpec(EVER),
        "health.sram_uncorrected_secded_total": ReadingSpec(EVER),
        "health.sram_threshold_exceeded": ReadingSpec(FLAG),
        "health.retired_pages_single_bit": ReadingSpec(COUNT),
        "health.retired_pages_double_bit": ReadingSpec(COUNT),
        "health.retired_pages_pending": ReadingSpec(FLAG),
        "health.remapped_rows_correctable": ReadingSpec(COUNT),
        "health.remapped_rows_uncorrectable": ReadingSpec(COUNT),
        "health.remapped_rows_pending": ReadingSpec(FLAG),
        "health.remapped_rows_failed": ReadingSpec(FLAG),
        "health.remap_banks_max": ReadingSpec(COUNT),
        "health.remap_banks_high": ReadingSpec(COUNT),
        "health.remap_banks_partial": ReadingSpec(COUNT),
        "health.remap_banks_low": ReadingSpec(COUNT),
        "health.remap_banks_none": ReadingSpec(COUNT),
        "health.pcie_replays_total": ReadingSpec(EVER),
        "health.pcie_correctable_errors_total": ReadingSpec(EVER),
        "health.pcie_naks_received_total": ReadingSpec(EVER),
        "health.pcie_receiver_errors_total": ReadingSpec(EVER),
        "health.pcie_bad_tlps_total": ReadingSpec(EVER),
        "health.pcie_naks_sent_total": ReadingSpec(EVER),
        "health.pcie_bad_dllps_total": ReadingSpec(EVER),
        "health.pcie_non_fatal_errors_total": ReadingSpec(EVER),
        "health.pcie_fatal_errors_total": ReadingSpec(EVER),
        "health.pcie_unsupported_requests_total": ReadingSpec(EVER),
        "health.pcie_lcrc_errors_total": ReadingSpec(EVER),
        "health.pcie_lane_errors_total": ReadingSpec(EVER),
        "health.nvlink_crc_flit_errors_total": ReadingSpec(EVER),
        "health.nvlink_crc_data_errors_total": ReadingSpec(EVER),
        "health.nvlink_replays_total": ReadingSpec(EVER),
        "health.nvlink_recoveries_total": ReadingSpec(EVER),
        "health.nvlink_link_sent_bytes_totals": ReadingSpec(KIBIBYTES_OF_A_LINK, is_by_link=True),
        "health.nvlink_link_received_bytes_totals": ReadingSpec(
            KIBIBYTES_OF_A_LINK, is_by_link=True
        ),
        "health.nvlink_link_states": ReadingSpec(LINK_STATE, is_by_link=True),
        "health.nvlink_link_replays_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_recoveries_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_crc_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_malformed_packets_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_buffer_overruns_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_receive_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_receive_remote_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_receive_general_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_integrity_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_discards_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_successful_recoveries_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_failed_recoveries_totals": ReadingSpec(GRAVE_ERRORS, is_by_link=True),
        "health.nvlink_link_effective_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_symbol_errors_totals": ReadingSpec(EVER, is_by_link=True),
        "health.nvlink_link_effective_bit_error_ratios": ReadingSpec(
            BIT_ERROR_RATIO, is_by_link=True
        ),
        "health.nvlink_link_symbol_bit_error_ratios": ReadingSpec(BIT_ERROR_RATIO, is_by_link=True),
        "health.nvlink_link_fec_history_totals": ReadingSpec(EVER, is_list=True, is_by_link=True),
        "health.nvlink_link_sent_bytes_per_second": ReadingSpec(
            MEBIBYTES_PER_SECOND, is_by_link=True
        ),
        "health.nvlink_link_received_bytes_per_second": ReadingSpec(
            MEBIBYTES_PER_SECOND, is_by_link=True
        ),
        "health.fabric_state": ReadingSpec(FABRIC_STATE),
        "health.fabric_status": ReadingSpec(NUMBER),
        "health.fabric_health_mask": ReadingSpec(BITS),
        "health.fabric_bandwidth_degraded": ReadingSpec(FABRIC_BANDWIDTH),
        "health.fabric_route_recovery": ReadingSpec(FABRIC_ROUTE_RECOVERY),
        "health.fabric_route_unhealthy": ReadingSpec(FABRIC_ROUTE_UNHEALTHY),
        "health.fabric_access_timeout": ReadingSpec(FABRIC_ACCESS_TIMEOUT),
        "health.pcie_link_generation": ReadingSpec(NUMBER),
        "health.pcie_link_width": ReadingSpec(NUMBER),
        "health.pcie_max_link_generation": ReadingSpec(NUMBER),
        "health.pcie_max_link_width": ReadingSpec(NUMBER),
        "health.bar1_used_bytes": ReadingSpec(MEMORY_BYTES),
        "health.fan_speed_ratio": ReadingSpec(FAN_SPEED),
        "health.vgpu_license_status": ReadingSpec(COUNT),
        "health.c2c_links": ReadingSpec(NUMBER),
        "limits.power_limit_enforced_milliwatts": ReadingSpec(MILLIWATTS),
        "limits.power_limit_requested_milliwatts": ReadingSpec(MILLIWATTS),
        "limits.power_limit_default_milliwatts": ReadingSpec(MILLIWATTS),
        "limits.power_limit_min_milliwatts": ReadingSpec(MILLIWATTS),
        "limits.power_limit_max_milliwatts": ReadingSpec(MILLIWATTS),
        "limits.temperature_slowdown_celsius": ReadingSpec(CELSIUS),
        "limits.temperature_shutdown_celsius": ReadingSpec(CELSIUS),
        "limits.temperature_margin_max_celsius": ReadingSpec(MARGIN_CELSIUS),
        "limits.temperature_margin_memory_max_celsius": ReadingSpec(MARGIN_CELSIUS),
        "limits.temperature_margin_slowdown_celsius": ReadingSpec(MARGIN_CELSIUS),
        "limits.temperature_margin_shutdown_celsius": ReadingSpec(MARGIN_CELSIUS),
        "limits.sm_clock_max_hertz": ReadingSpec(MEGAHERTZ),
        "limits.memory_clock_max_hertz": ReadingSpec(MEGAHERTZ),
    },
}
"""All readings by name, for each group of queries. Readings of the first group have their own
fields in `RawGpuSample` and are only listed here to define which values are plausible."""
