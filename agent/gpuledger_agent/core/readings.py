"""What a source may give of a GPU, by name: the vocabulary of the seam between source and reading.

A source gives numbers in these units, under these names; others are not published.
`gpuledger_agent.gpu.nvidia.catalogue` has the NVML call of each. A name is a field of `GpuReading`
or `GpuDetails`, dotted if it lies in a part.

A unit says which values can be true, and how one becomes a number in ours. The bounds are those of
the records (`gpuledger.records.bounds`), so that what is kept can be sent. Drivers do answer with
utilization 4294967295 or memory 2^64-1; no such number may reach the books: what cannot be true is
left out, counted and named.
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
    """What the driver counts in; ours is `value * times`, as a whole number, or `value / over`."""

    name: str
    """The driver's unit, for people."""
    low: float = 0
    """The least that can be true, in the driver's unit."""
    high: float = _MAX
    """The most that can be true, in the driver's unit."""
    times: int = 1
    """What one of the driver's is in ours."""
    over: int | None = None
    """Of a ratio: how many of the driver's make one of ours."""
    cap: float | None = None
    """The most that ours can be, where the driver's is beyond it by rounding."""
    is_total: bool = False
    """Whether it only rises, until it begins again."""
    max_per_second: int | None = None
    """Of a total: by how much it can rise."""
    wraps: bool = False
    """Of a total: whether a fall may also be the counter's end."""
    choices: Mapping[int, Any] = field(default_factory=dict)
    """Where it is no quantity: what each number means."""
    decode: Callable[[int], Any] | None = None
    """Where the driver packs it into a number: what makes ours of that, `None` where it says
    nothing."""


def _flag_at(shift: int) -> Callable[[int], bool | None]:
    """Return what reads one of NVML's pairs of bits: 1 is true, 2 is false, else it is not told."""
    states = {1: True, 2: False}
    return lambda mask: states.get(mask >> shift & 3)


def _bit_error_ratio(packed: int) -> float | None:
    """Return a ratio that is packed as NVML does: 4 bits of a mantissa above 8 of an exponent."""
    ratio = float(f"{packed >> 8}e-{packed & 0xFF}")
    return ratio if ratio <= 1 else None


RATIO: Final = Unit(name="%", high=100, over=100)
# Of the speed that the fans are meant to run at most; they may run faster.
FAN_SPEED: Final = Unit(name="%", high=bounds.MAX_FAN_RATIO * 100, over=100)
ACTIVITY: Final = Unit(name="%", high=100.5, over=100, cap=1.0)
CELSIUS: Final = Unit(name="°C", low=bounds.MIN_CELSIUS, high=bounds.MAX_CELSIUS)
# A distance between two temperatures, below 0 behind the limit.
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
# What an incident is made of: a number, or a leap, that no hardware makes is no error of it.
GRAVE_ERRORS: Final = Unit(
    name="count", high=1_000_000_000, is_total=True, max_per_second=1_000_000
)
BIT_ERROR_RATIO: Final = Unit(name="mantissa and exponent", high=0xFFF, decode=_bit_error_ratio)
NANOSECONDS: Final = Unit(
    # Counters of all the GPU's units may be read an instant apart, so a second more than time.
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
    """Keeps what can be true and counts, by reading and reason, what cannot."""

    def __init__(self) -> None:
        self.dropped: Counter[tuple[str, str]] = Counter()

    def drop(self, reading: str, reason: str, *, count: int = 1) -> None:
        """Count values that are left out."""
        if count:
            self.dropped[reading, reason] += count

    def keep(self, value: int | None, limits: tuple[int, int], *, reading: str) -> int | None:
        """Return the value, or `None` where it was absent or lies outside the limits."""
        if value is None or limits[0] <= value <= limits[1]:
            return value
        self.drop(reading, "out_of_range")
        return None

    def is_plausible(self, value: Any, unit: Unit, *, reading: str) -> bool:  # noqa: ANN401  # whatever the driver says
        """Return whether a value can be true by its unit alone; an absent one is not counted."""
        if value is None:
            return False
        if not isinstance(value, int | float) or not math.isfinite(value):
            self.drop(reading, "not_a_number")
            return False
        if unit.choices:
            # A newer driver may have a number for something that nobody here knows.
            reason, is_true = "unknown", value in unit.choices
        else:
            reason, is_true = "out_of_range", unit.low <= value <= unit.high
        if not is_true:
            self.drop(reading, reason)
        return is_true


def converter(unit: Unit) -> Callable[[Any], Any]:
    """Return what brings values that can be true into our unit, and the type of their field."""
    times, over, cap = unit.times, unit.over, unit.cap
    # One function for each kind of unit: each is called for some hundred values a tick.
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
    """Return a ratio with six digits: a millionth is less than any driver measures."""
    # A fifth of what round() costs, for some hundred ratios a tick.
    return int(percent * _PARTS_PER_PERCENT + 0.5) / _MILLION


@dataclass(frozen=True, slots=True)
class ReadingSpec:
    """What a source's value is."""

    unit: Unit
    """What it counts in, and which values can be true."""
    is_list: bool = False
    """Whether it is a list of values, as one for each engine in the order of their numbers."""
    is_by_link: bool = False
    """Whether it is a mapping of values, or of such lists, by the numbers of links."""


READINGS: Final[Mapping[CallGroup, Mapping[str, ReadingSpec]]] = {
    CallGroup.BOOKS: {
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
        # A cut GPU's instances are as busy as the first says.
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
"""The readings by the group in which they are queried. Those of the first group have fields of
their own in `RawGpuSample` and stand here for what can be true of them."""
