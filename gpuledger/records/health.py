"""How a GPU is held down, wears and fails: the parts of a reading that an operator looks at.

Here live throttling, health and limits. Totals count since the driver was loaded unless they say
otherwise.
"""

from typing import Annotated

from gpuledger.records.base import BaseRecord, Natural
from gpuledger.records.bounds import (
    MAX_LINKS,
    Celsius,
    FanRatio,
    MemoryBytes,
    Seconds,
    Watts,
    Word,
    at_most,
)


class GpuThrottling(BaseRecord, frozen=True, kw_only=True):
    """Why the clocks are lower than they could be, and for how long they were."""

    reasons: Natural | None = None
    """The reasons at the tick, NVML's bits: 1 idle, 2 applications' clocks, 4 power cap, 8 hardware
    slowdown, 0x10 sync boost, 0x20 software thermal, 0x40 hardware thermal, 0x80 power brake,
    0x100 display clocks; newer drivers may set others."""
    power_seconds_total: Seconds | None = None
    """Time below the clocks for the power limit."""
    thermal_seconds_total: Seconds | None = None
    """Time below the clocks for the temperature."""
    sync_boost_seconds_total: Seconds | None = None
    """Time below the clocks to keep step with other GPUs."""
    board_limit_seconds_total: Seconds | None = None
    """Time below the clocks for the board's limits."""
    low_utilization_seconds_total: Seconds | None = None
    """Time below the clocks for want of work."""
    reliability_seconds_total: Seconds | None = None
    """Time below the clocks for the chip's reliability."""
    software_thermal_seconds_total: Seconds | None = None
    """Time in the driver's thermal slowdown."""
    hardware_thermal_seconds_total: Seconds | None = None
    """Time in the hardware's thermal slowdown."""
    power_brake_seconds_total: Seconds | None = None
    """Time in which the machine's power supply asked for less."""


class GpuHealth(BaseRecord, frozen=True, kw_only=True):
    """Errors and wear; absent in ticks in which it was not asked."""

    recovery_action: Word | None = None
    """What the driver asks for: `none`, `reset`, `reboot`, `drain_p2p`, `drain_and_reset`, and
    newer ones `recover_imex_domain`, `bus_reset`, `system_reboot`."""
    ecc_corrected_volatile_total: Natural | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected_volatile_total: Natural | None = None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_corrected_aggregate_total: Natural | None = None
    """Corrected memory errors in the GPU's life."""
    ecc_uncorrected_aggregate_total: Natural | None = None
    """Uncorrected memory errors in the GPU's life."""
    sram_corrected_total: Natural | None = None
    """Corrected errors of the chip's own memory, in the GPU's life."""
    sram_uncorrected_parity_total: Natural | None = None
    """Parity errors of the chip's own memory, in the GPU's life."""
    sram_uncorrected_secded_total: Natural | None = None
    """Double-bit errors of the chip's own memory, in the GPU's life."""
    sram_threshold_exceeded: bool | None = None
    """Whether the chip's own memory has more errors than its maker allows."""
    retired_pages_single_bit: Natural | None = None
    """Pages retired for repeated single-bit errors (before Ampere)."""
    retired_pages_double_bit: Natural | None = None
    """Pages retired for a double-bit error (before Ampere)."""
    retired_pages_pending: bool | None = None
    """Whether a page waits for the next start to be retired."""
    remapped_rows_correctable: Natural | None = None
    """Rows replaced for corrected errors (Ampere and newer)."""
    remapped_rows_uncorrectable: Natural | None = None
    """Rows replaced for uncorrected errors."""
    remapped_rows_pending: bool | None = None
    """Whether a row waits for the next reset to be replaced."""
    remapped_rows_failed: bool | None = None
    """Whether a row could not be replaced."""
    remap_banks_max: Natural | None = None
    """Memory banks with all their spare rows left."""
    remap_banks_high: Natural | None = None
    """Memory banks with most of their spare rows left."""
    remap_banks_partial: Natural | None = None
    """Memory banks with some of their spare rows left."""
    remap_banks_low: Natural | None = None
    """Memory banks with few spare rows left."""
    remap_banks_none: Natural | None = None
    """Memory banks without spare rows."""
    pcie_replays_total: Natural | None = None
    """PCIe packets sent again."""
    nvlink_crc_flit_errors_total: Natural | None = None
    """NVLink flow-control checksum errors."""
    nvlink_crc_data_errors_total: Natural | None = None
    """NVLink data checksum errors."""
    nvlink_replays_total: Natural | None = None
    """NVLink packets sent again."""
    nvlink_recoveries_total: Natural | None = None
    """NVLink recoveries."""
    nvlink_link_sent_bytes_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """From the GPU over each NVLink, by the link's number as the driver counts them from 0; data
    without headers. A link that the driver does not tell of is absent."""
    nvlink_link_received_bytes_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = (
        None
    )
    """To the GPU over each NVLink, in the same way."""
    fabric_state: Word | None = None
    """`not_supported`, `not_started`, `in_progress` or `completed`."""
    fabric_status: Natural | None = None
    """NVML's return code of the registration with the fabric, once it is completed."""
    fabric_health_mask: Natural | None = None
    """NVML's bits of what is degraded in the fabric."""
    pcie_link_generation: Natural | None = None
    """The PCIe link's generation now."""
    pcie_link_width: Natural | None = None
    """The PCIe link's lanes now."""
    bar1_used_bytes: MemoryBytes | None = None
    """Used part of the window through which others reach the memory."""
    fan_speed_ratio: FanRatio | None = None
    """Speed of the fans over the most that they are meant to run at, which they may exceed."""
    vgpu_license_status: Natural | None = None
    """1 where a licensed feature is licensed."""
    c2c_links: Natural | None = None
    """Links to the CPU that the GPU is built with."""


class GpuLimits(BaseRecord, frozen=True, kw_only=True):
    """What the GPU may draw and how hot it may be; absent in ticks in which it was not asked."""

    power_limit_enforced_watts: Watts | None = None
    """The limit in force: the least of all that are set."""
    power_limit_requested_watts: Watts | None = None
    """The limit that the owner has set."""
    power_limit_default_watts: Watts | None = None
    """The limit without a setting."""
    power_limit_min_watts: Watts | None = None
    """The lowest limit that can be set."""
    power_limit_max_watts: Watts | None = None
    """The highest limit that can be set."""
    temperature_slowdown_celsius: Celsius | None = None
    """Where the hardware slows down."""
    temperature_shutdown_celsius: Celsius | None = None
    """Where the hardware shuts down."""
