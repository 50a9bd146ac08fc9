"""What a source may give of a GPU, by name: the vocabulary of the seam between source and reading.

A source gives numbers in the units that stand here, under these names; one that is not here is
not published. How NVML is asked for each stands in `agent.gpu.nvidia.catalogue`. A name is a field
of `GpuReading` or of `GpuDetails`, dotted where it lies in a part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.core import units
from agent.core.raw import CallGroup
from agent.core.units import Unit


@dataclass(frozen=True, slots=True)
class ReadingSpec:
    """What a source's value is."""

    unit: Unit
    """What it counts in, and which values can be true."""
    is_list: bool = False
    """Whether it is a list of values, one for each engine in the order of their numbers."""
    is_by_link: bool = False
    """Whether it is a mapping of values by the numbers of links."""


READINGS: Final[Mapping[CallGroup, Mapping[str, ReadingSpec]]] = {
    CallGroup.BOOKS: {
        "utilization_ratio": ReadingSpec(units.RATIO),
        "memory_utilization_ratio": ReadingSpec(units.RATIO),
        "memory_total_bytes": ReadingSpec(units.MEMORY_BYTES),
        "memory_used_bytes": ReadingSpec(units.MEMORY_BYTES),
        "memory_reserved_bytes": ReadingSpec(units.MEMORY_BYTES),
        "power_milliwatts": ReadingSpec(units.MILLIWATTS),
        "energy_total_millijoules": ReadingSpec(units.MILLIJOULES),
    },
    CallGroup.READINGS: {
        "temperature_celsius": ReadingSpec(units.CELSIUS),
        "memory_temperature_celsius": ReadingSpec(units.CELSIUS),
        "sm_clock_hertz": ReadingSpec(units.MEGAHERTZ),
        "memory_clock_hertz": ReadingSpec(units.MEGAHERTZ),
        "power_instant_milliwatts": ReadingSpec(units.MILLIWATTS),
        "encoder_utilization_ratio": ReadingSpec(units.RATIO),
        "decoder_utilization_ratio": ReadingSpec(units.RATIO),
        "performance_state": ReadingSpec(units.PERFORMANCE_STATE),
        "throttling.reasons": ReadingSpec(units.BITS),
        "throttling.power_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.thermal_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.sync_boost_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.board_limit_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.low_utilization_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.reliability_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.software_thermal_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.hardware_thermal_ns_total": ReadingSpec(units.NANOSECONDS),
        "throttling.power_brake_ns_total": ReadingSpec(units.NANOSECONDS),
        "traffic.pcie_sent_bytes_total": ReadingSpec(units.PCIE_BYTES),
        "traffic.pcie_received_bytes_total": ReadingSpec(units.PCIE_BYTES),
        "traffic.nvlink_sent_bytes_total": ReadingSpec(units.KIBIBYTES),
        "traffic.nvlink_received_bytes_total": ReadingSpec(units.KIBIBYTES),
    },
    CallGroup.PROFILING: {
        "profiling.graphics_engine_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.sm_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.sm_occupancy_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.tensor_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.tensor_dfma_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.tensor_hmma_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.tensor_imma_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.dram_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.fp64_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.fp32_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.fp16_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.integer_active_ratio": ReadingSpec(units.ACTIVITY),
        "profiling.pcie_sent_bytes_per_second": ReadingSpec(units.MEBIBYTES_PER_SECOND),
        "profiling.pcie_received_bytes_per_second": ReadingSpec(units.MEBIBYTES_PER_SECOND),
        "profiling.nvlink_sent_bytes_per_second": ReadingSpec(units.MEBIBYTES_PER_SECOND),
        "profiling.nvlink_received_bytes_per_second": ReadingSpec(units.MEBIBYTES_PER_SECOND),
        "profiling.c2c_sent_bytes_per_second": ReadingSpec(units.MEBIBYTES_PER_SECOND),
        "profiling.c2c_received_bytes_per_second": ReadingSpec(units.MEBIBYTES_PER_SECOND),
        "profiling.nvdec_active_ratios": ReadingSpec(units.ACTIVITY, is_list=True),
        "profiling.nvjpg_active_ratios": ReadingSpec(units.ACTIVITY, is_list=True),
        "profiling.nvofa_active_ratios": ReadingSpec(units.ACTIVITY, is_list=True),
    },
    CallGroup.HEALTH: {
        "health.recovery_action": ReadingSpec(units.RECOVERY),
        "health.ecc_corrected_volatile_total": ReadingSpec(units.EVER),
        "health.ecc_uncorrected_volatile_total": ReadingSpec(units.EVER),
        "health.ecc_corrected_aggregate_total": ReadingSpec(units.EVER),
        "health.ecc_uncorrected_aggregate_total": ReadingSpec(units.EVER),
        "health.sram_corrected_total": ReadingSpec(units.EVER),
        "health.sram_uncorrected_parity_total": ReadingSpec(units.EVER),
        "health.sram_uncorrected_secded_total": ReadingSpec(units.EVER),
        "health.sram_threshold_exceeded": ReadingSpec(units.FLAG),
        "health.retired_pages_single_bit": ReadingSpec(units.COUNT),
        "health.retired_pages_double_bit": ReadingSpec(units.COUNT),
        "health.retired_pages_pending": ReadingSpec(units.FLAG),
        "health.remapped_rows_correctable": ReadingSpec(units.COUNT),
        "health.remapped_rows_uncorrectable": ReadingSpec(units.COUNT),
        "health.remapped_rows_pending": ReadingSpec(units.FLAG),
        "health.remapped_rows_failed": ReadingSpec(units.FLAG),
        "health.remap_banks_max": ReadingSpec(units.COUNT),
        "health.remap_banks_high": ReadingSpec(units.COUNT),
        "health.remap_banks_partial": ReadingSpec(units.COUNT),
        "health.remap_banks_low": ReadingSpec(units.COUNT),
        "health.remap_banks_none": ReadingSpec(units.COUNT),
        "health.pcie_replays_total": ReadingSpec(units.EVER),
        "health.nvlink_crc_flit_errors_total": ReadingSpec(units.EVER),
        "health.nvlink_crc_data_errors_total": ReadingSpec(units.EVER),
        "health.nvlink_replays_total": ReadingSpec(units.EVER),
        "health.nvlink_recoveries_total": ReadingSpec(units.EVER),
        "health.nvlink_link_sent_bytes_totals": ReadingSpec(
            units.KIBIBYTES_OF_A_LINK, is_by_link=True
        ),
        "health.nvlink_link_received_bytes_totals": ReadingSpec(
            units.KIBIBYTES_OF_A_LINK, is_by_link=True
        ),
        "health.fabric_state": ReadingSpec(units.FABRIC_STATE),
        "health.fabric_status": ReadingSpec(units.NUMBER),
        "health.fabric_health_mask": ReadingSpec(units.BITS),
        "health.pcie_link_generation": ReadingSpec(units.NUMBER),
        "health.pcie_link_width": ReadingSpec(units.NUMBER),
        "health.bar1_used_bytes": ReadingSpec(units.MEMORY_BYTES),
        "health.fan_speed_ratio": ReadingSpec(units.FAN_SPEED),
        "health.vgpu_license_status": ReadingSpec(units.COUNT),
        "health.c2c_links": ReadingSpec(units.NUMBER),
        "limits.power_limit_enforced_milliwatts": ReadingSpec(units.MILLIWATTS),
        "limits.power_limit_requested_milliwatts": ReadingSpec(units.MILLIWATTS),
        "limits.power_limit_default_milliwatts": ReadingSpec(units.MILLIWATTS),
        "limits.power_limit_min_milliwatts": ReadingSpec(units.MILLIWATTS),
        "limits.power_limit_max_milliwatts": ReadingSpec(units.MILLIWATTS),
        "limits.temperature_slowdown_celsius": ReadingSpec(units.CELSIUS),
        "limits.temperature_shutdown_celsius": ReadingSpec(units.CELSIUS),
    },
}
"""The readings by the group in which they are queried. Those of the first group have fields of
their own in `RawGpuSample` and stand here for what can be true of them."""
