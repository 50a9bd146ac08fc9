"""The readings of one GPU or MIG instance in a tick.

`GpuReading` has the values that are attributed; `GpuDetails` has everything else: measurements of
work, and the data that shows an operator how a GPU is throttled, wears and fails (throttling,
health, limits). A part is absent if the driver does not provide it, and in ticks in which it was
not queried. Traffic, throttling and most of profiling are queried every few seconds, in a different
tick for each GPU; health and limits less often. Values are never repeated: every value in a tick
was queried for that tick. Totals count since the driver was loaded unless noted otherwise; a total
that fell is named in `resets`.

Amounts are whole numbers and ratios have six digits, so that attributed amounts add up exactly.
"""

from typing import Annotated

from gpuledger.records.base import ArrayRecord, BaseRecord, Natural, OpenEnum, SmallNatural
from gpuledger.records.bounds import (
    MAX_COUNTERS,
    MAX_FEC_ERRORS,
    MAX_LINKS,
    BytesPerSecond,
    Celsius,
    DurationNs,
    FanRatio,
    Hertz,
    Id,
    MarginCelsius,
    MemoryBytes,
    Millijoules,
    Milliwatts,
    PerformanceState,
    Ratio,
    TickMillijoules,
    Word,
    at_most,
)


class GpuThrottling(BaseRecord, frozen=True, kw_only=True):
    """Reasons for which the GPU's clocks are reduced, and the time for which they were reduced."""

    # Bits, not names: a driver may set bits that this version does not know.
    reasons: Natural | None = None
    """Sum of NVML's bits for the reasons at the sample: 1 idle, 2 applications' clocks, 4 power
    cap, 8 hardware slowdown, 0x10 sync boost, 0x20 software thermal, 0x40 hardware thermal, 0x80
    power brake, 0x100 display clocks. Newer drivers may set others."""
    power_ns_total: DurationNs | None = None
    """Time with reduced clocks because of the power limit."""
    thermal_ns_total: DurationNs | None = None
    """Time with reduced clocks because of the temperature."""
    sync_boost_ns_total: DurationNs | None = None
    """Time with reduced clocks to stay in step with other GPUs."""
    board_limit_ns_total: DurationNs | None = None
    """Time with reduced clocks because of the board's limits."""
    low_utilization_ns_total: DurationNs | None = None
    """Time with reduced clocks because there was little work."""
    reliability_ns_total: DurationNs | None = None
    """Time with reduced clocks for the chip's reliability."""
    software_thermal_ns_total: DurationNs | None = None
    """Time in the driver's thermal slowdown."""
    hardware_thermal_ns_total: DurationNs | None = None
    """Time in the hardware's thermal slowdown."""
    power_brake_ns_total: DurationNs | None = None
    """Time in which the machine's power supply requested a lower draw."""


class GpuHealth(BaseRecord, frozen=True, kw_only=True):
    """Errors and wear; absent in samples in which they were not queried."""

    # Free text instead of an enumeration: newer drivers add values.
    recovery_action: Word | None = None
    """Action that the driver recommends: `none`, `reset`, `reboot`, `drain_p2p`,
    `drain_and_reset`; newer drivers: `recover_imex_domain`, `bus_reset`, `system_reboot`."""
    ecc_corrected_volatile_total: Natural | None = None
    """Corrected memory errors since the driver was loaded."""
    ecc_uncorrected_volatile_total: Natural | None = None
    """Uncorrected memory errors since the driver was loaded."""
    ecc_corrected_aggregate_total: Natural | None = None
    """Corrected memory errors in the GPU's lifetime."""
    ecc_uncorrected_aggregate_total: Natural | None = None
    """Uncorrected memory errors in the GPU's lifetime."""
    sram_corrected_total: Natural | None = None
    """Corrected errors of the on-chip memory (SRAM) in the GPU's lifetime."""
    sram_uncorrected_parity_total: Natural | None = None
    """Parity errors of the on-chip memory (SRAM) in the GPU's lifetime."""
    sram_uncorrected_secded_total: Natural | None = None
    """Double-bit errors of the on-chip memory (SRAM) in the GPU's lifetime."""
    sram_threshold_exceeded: bool | None = None
    """Whether the on-chip memory (SRAM) has more errors than the manufacturer allows."""
    retired_pages_single_bit: Natural | None = None
    """Pages retired because of repeated single-bit errors (before Ampere)."""
    retired_pages_double_bit: Natural | None = None
    """Pages retired because of a double-bit error (before Ampere)."""
    retired_pages_pending: bool | None = None
    """Whether a page will be retired at the next start."""
    remapped_rows_correctable: Natural | None = None
    """Rows remapped because of corrected errors (Ampere and newer)."""
    remapped_rows_uncorrectable: Natural | None = None
    """Rows remapped because of uncorrected errors."""
    remapped_rows_pending: bool | None = None
    """Whether a row will be remapped at the next reset."""
    remapped_rows_failed: bool | None = None
    """Whether remapping a row failed."""
    remap_banks_max: Natural | None = None
    """Memory banks with all their spare rows available."""
    remap_banks_high: Natural | None = None
    """Memory banks with most of their spare rows available."""
    remap_banks_partial: Natural | None = None
    """Memory banks with some of their spare rows available."""
    remap_banks_low: Natural | None = None
    """Memory banks with few spare rows left."""
    remap_banks_none: Natural | None = None
    """Memory banks without spare rows."""
    pcie_replays_total: Natural | None = None
    """PCIe packets that were sent again."""
    pcie_correctable_errors_total: Natural | None = None
    """Corrected PCIe errors."""
    pcie_naks_received_total: Natural | None = None
    """PCIe packets that the other side rejected."""
    pcie_receiver_errors_total: Natural | None = None
    """PCIe symbols that could not be received."""
    pcie_bad_tlps_total: Natural | None = None
    """Damaged PCIe transaction packets."""
    pcie_naks_sent_total: Natural | None = None
    """PCIe packets that the GPU rejected."""
    pcie_bad_dllps_total: Natural | None = None
    """Damaged PCIe data link packets."""
    pcie_non_fatal_errors_total: Natural | None = None
    """Uncorrected PCIe errors after which the link still works."""
    pcie_fatal_errors_total: Natural | None = None
    """PCIe errors after which the link no longer works."""
    pcie_unsupported_requests_total: Natural | None = None
    """Unsupported PCIe requests."""
    pcie_lcrc_errors_total: Natural | None = None
    """PCIe link checksum errors."""
    pcie_lane_errors_total: Natural | None = None
    """Errors on single PCIe lanes."""
    nvlink_crc_flit_errors_total: Natural | None = None
    """NVLink flow-control checksum errors."""
    nvlink_crc_data_errors_total: Natural | None = None
    """NVLink data checksum errors."""
    nvlink_replays_total: Natural | None = None
    """NVLink packets that were sent again."""
    nvlink_recoveries_total: Natural | None = None
    """NVLink recoveries."""
    nvlink_link_sent_bytes_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Bytes that the GPU sent over each NVLink, without headers, by link number, counted from 0 as
    by the driver. Links that the driver does not report are absent."""
    nvlink_link_received_bytes_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = (
        None
    )
    """Bytes that the GPU received over each NVLink, without headers, by link number."""
    nvlink_link_states: Annotated[dict[Word, Word], at_most(MAX_LINKS)] | None = None
    """`inactive`, `active`, `sleep` or `traffic_disabled`, by link number (Hopper and newer)."""
    nvlink_link_replays_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """NVLink packets that were sent again, by link number (Hopper)."""
    nvlink_link_recoveries_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Recoveries of each NVLink, by link number (Hopper)."""
    nvlink_link_crc_errors_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Checksum errors of each NVLink, by link number (Hopper)."""
    nvlink_link_malformed_packets_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Malformed packets that each NVLink received. This and the following: Blackwell and newer."""
    nvlink_link_buffer_overruns_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Packets that each NVLink dropped because its buffer was full."""
    nvlink_link_receive_errors_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = (
        None
    )
    """Packets that each NVLink received with an error."""
    nvlink_link_receive_remote_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Packets that each NVLink received marked as bad."""
    nvlink_link_receive_general_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Other receive errors of each NVLink."""
    nvlink_link_integrity_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """How often the bit errors of each NVLink exceeded the local threshold."""
    nvlink_link_discards_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Packets that each NVLink did not send because it was down or congested."""
    nvlink_link_successful_recoveries_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Recoveries of each NVLink that succeeded."""
    nvlink_link_failed_recoveries_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Recoveries of each NVLink that failed."""
    nvlink_link_effective_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Errors of each NVLink that remain after error correction."""
    nvlink_link_symbol_errors_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = (
        None
    )
    """Symbols that each NVLink received with an error."""
    nvlink_link_effective_bit_error_ratios: (
        Annotated[dict[Word, Ratio], at_most(MAX_LINKS)] | None
    ) = None
    """Ratio of wrong bits to all bits of each NVLink, after error correction."""
    nvlink_link_symbol_bit_error_ratios: Annotated[dict[Word, Ratio], at_most(MAX_LINKS)] | None = (
        None
    )
    """Ratio of wrong symbols to all symbols of each NVLink."""
    nvlink_link_fec_history_totals: (
        Annotated[dict[Word, Annotated[list[Natural], at_most(MAX_FEC_ERRORS)]], at_most(MAX_LINKS)]
        | None
    ) = None
    """Blocks that each NVLink received, by the number of errors corrected in them, from 0 on."""
    nvlink_link_sent_bytes_per_second: (
        Annotated[dict[Word, BytesPerSecond], at_most(MAX_LINKS)] | None
    ) = None
    """Rate at which the GPU sent over each NVLink, by link number: the mean since health was last
    queried, from the chip's own counters (Hopper and newer)."""
    nvlink_link_received_bytes_per_second: (
        Annotated[dict[Word, BytesPerSecond], at_most(MAX_LINKS)] | None
    ) = None
    """Rate at which the GPU received over each NVLink: a mean, as above."""
    fabric_state: Word | None = None
    """`not_supported`, `not_started`, `in_progress` or `completed`."""
    fabric_status: Natural | None = None
    """NVML's return code of the registration with the fabric, once that is completed."""
    fabric_health_mask: Natural | None = None
    """NVML's bits for the fabric's degraded functions."""
    fabric_bandwidth_degraded: bool | None = None
    """Whether the fabric has less bandwidth than it should. Like the next three, derived from
    `fabric_health_mask`."""
    fabric_route_recovery: bool | None = None
    """Whether the fabric's routes are being recovered."""
    fabric_route_unhealthy: bool | None = None
    """Whether a route of the fabric is unhealthy: work over NVLink fails."""
    fabric_access_timeout: bool | None = None
    """Whether an access over the fabric timed out and is being recovered."""
    pcie_link_generation: Natural | None = None
    """Current generation of the PCIe link."""
    pcie_link_width: Natural | None = None
    """Current number of lanes of the PCIe link."""
    pcie_max_link_generation: Natural | None = None
    """The highest generation that both GPU and machine support."""
    pcie_max_link_width: Natural | None = None
    """The most lanes that both GPU and machine support."""
    bar1_used_bytes: MemoryBytes | None = None
    """Used part of the window through which the CPU and other devices access the memory."""
    fan_speed_ratio: FanRatio | None = None
    """Speed of the fans relative to their intended maximum, which they may exceed."""
    vgpu_license_status: Natural | None = None
    """1 if a licensed feature has a license."""
    c2c_links: Natural | None = None
    """Number of links to the CPU that the GPU is built with."""


class GpuLimits(BaseRecord, frozen=True, kw_only=True):
    """Limits of power, temperature and clocks; absent in samples without `GpuHealth`."""

    power_limit_enforced_milliwatts: Milliwatts | None = None
    """The limit in force: the lowest of all that are set."""
    power_limit_requested_milliwatts: Milliwatts | None = None
    """The limit that the owner configured."""
    power_limit_default_milliwatts: Milliwatts | None = None
    """The limit if none is configured."""
    power_limit_min_milliwatts: Milliwatts | None = None
    """The lowest limit that can be configured."""
    power_limit_max_milliwatts: Milliwatts | None = None
    """The highest limit that can be configured."""
    temperature_slowdown_celsius: Celsius | None = None
    """Temperature at which the hardware slows down."""
    temperature_shutdown_celsius: Celsius | None = None
    """Temperature at which the hardware shuts down."""
    # NVML's T.Limit, which replaces the temperatures above on newer GPUs.
    temperature_margin_max_celsius: MarginCelsius | None = None
    """The margin (`GpuDetails.temperature_margin_celsius`) at which the die is too hot for the GPU
    to operate. This and the next three: Ada and newer."""
    temperature_margin_memory_max_celsius: MarginCelsius | None = None
    """The margin at which the memory is too hot for the GPU to operate."""
    temperature_margin_slowdown_celsius: MarginCelsius | None = None
    """The margin at which the hardware slows down; negative if that is beyond the limit."""
    temperature_margin_shutdown_celsius: MarginCelsius | None = None
    """The margin at which the hardware shuts down."""
    sm_clock_max_hertz: Hertz | None = None
    """The highest clock of the streaming multiprocessors."""
    memory_clock_max_hertz: Hertz | None = None
    """The highest clock of the device memory."""


class GpuProfiling(BaseRecord, frozen=True, kw_only=True):
    """Measurements by the chip's own counters (GPM: Hopper and newer).

    The ratios of the graphics engine, the multiprocessors, any tensor pipe and the memory interface
    are means over the sample's interval. All other values are means over `interval_ns`, and absent
    in samples in which they were not queried.
    """

    interval_ns: DurationNs | None = None
    """Length of the time before the sample over which the other values are means. It begins when
    they were last queried."""
    graphics_engine_active_ratio: Ratio | None = None
    """Share of time in which the graphics or compute engine was busy."""
    sm_active_ratio: Ratio | None = None
    """Share of cycles in which a multiprocessor had at least one warp, averaged over all."""
    sm_occupancy_ratio: Ratio | None = None
    """Resident warps relative to the maximum."""
    tensor_active_ratio: Ratio | None = None
    """Share of cycles in which any tensor pipe was active."""
    tensor_dfma_active_ratio: Ratio | None = None
    """Share of cycles in which the tensor pipes did double-precision work."""
    tensor_hmma_active_ratio: Ratio | None = None
    """Share of cycles in which the tensor pipes did half-precision work."""
    tensor_imma_active_ratio: Ratio | None = None
    """Share of cycles in which the tensor pipes did integer work."""
    dram_active_ratio: Ratio | None = None
    """Share of cycles in which the memory interface sent or received data."""
    fp64_active_ratio: Ratio | None = None
    """Share of cycles in which the double-precision pipe was active."""
    fp32_active_ratio: Ratio | None = None
    """Share of cycles in which the single-precision pipe was active."""
    fp16_active_ratio: Ratio | None = None
    """Share of cycles in which the half-precision pipe was active."""
    integer_active_ratio: Ratio | None = None
    """Share of cycles in which the integer pipe was active."""
    pcie_sent_bytes_per_second: BytesPerSecond | None = None
    """Rate at which the GPU sent over PCIe, including headers."""
    pcie_received_bytes_per_second: BytesPerSecond | None = None
    """Rate at which the GPU received over PCIe, including headers."""
    nvlink_sent_bytes_per_second: BytesPerSecond | None = None
    """Rate at which the GPU sent over all NVLinks."""
    nvlink_received_bytes_per_second: BytesPerSecond | None = None
    """Rate at which the GPU received over all NVLinks."""
    c2c_sent_bytes_per_second: BytesPerSecond | None = None
    """Rate at which the GPU sent to the CPU that it is built with."""
    c2c_received_bytes_per_second: BytesPerSecond | None = None
    """Rate at which the GPU received from the CPU that it is built with."""
    nvdec_active_ratios: Annotated[list[Ratio], at_most(MAX_LINKS)] | None = None
    """Share of time in which each video decoder was busy, by decoder number."""
    nvjpg_active_ratios: Annotated[list[Ratio], at_most(MAX_LINKS)] | None = None
    """Share of time in which each JPEG decoder was busy, by decoder number."""
    nvofa_active_ratios: Annotated[list[Ratio], at_most(MAX_LINKS)] | None = None
    """Share of time in which each optical flow engine was busy, by engine number."""


class GpuTraffic(BaseRecord, frozen=True, kw_only=True):
    """Counters of the bytes that the GPU sent and received."""

    pcie_sent_bytes_total: Natural | None = None
    """Bytes that the GPU sent over PCIe."""
    pcie_received_bytes_total: Natural | None = None
    """Bytes that the GPU received over PCIe."""
    nvlink_sent_bytes_total: Natural | None = None
    """Bytes that the GPU sent over all NVLinks, without headers."""
    nvlink_received_bytes_total: Natural | None = None
    """Bytes that the GPU received over all NVLinks, without headers."""


class EnergyMethod(OpenEnum):
    """How the energy of a sample was determined."""

    COUNTER = "counter"
    """From the driver's counter, read at both ends of the covered interval."""
    INTERPOLATED = "interpolated"
    """From power draw times time between two steps of the driver's counter. At the next step, the
    total is adjusted to the counter."""
    POWER = "power"
    """From power draw times time: the driver has no energy counter, or the counter restarted."""


class BusyMethod(OpenEnum):
    """How the busy time of a device's entries was determined."""

    EXCLUSIVE = "exclusive"
    PROCESS_UTILIZATION = "process_utilization"
    ACCOUNTING = "accounting"
    MEMORY_SHARE = "memory_share"
    EQUAL_SHARE = "equal_share"
    EQUAL_TURNS = "equal_turns"
    """The driver's samples of all processes added up to more than the device's busy time, because
    they include waiting. They were scaled to shares as if the processes took equal turns."""
    MPS_SERVER = "mps_server"
    """The driver sampled only the MPS server. Its use was split into equal parts, one per client.
    If the driver lists no clients, the server has all use."""
    PARTIAL_SAMPLES = "partial_samples"
    """The driver's samples show only a part of the processes' use, now or often before, and were
    fitted to the device's busy time. They add up to far less than that time, or each sampling
    window has a sample of only one process. Or a sample describes an unknown part of several
    windows, or a pid was reused."""
    SAMPLED = "sampled"
    """The driver's answers describe only a part of the interval, from which the rest was estimated.
    Or they come so late that busy time may belong to an earlier interval."""


class GpuReading(ArrayRecord, frozen=True, kw_only=True):
    """Readings of one GPU or MIG instance in a sample; values that the driver lacks are absent."""

    uuid: Id
    """The driver's UUID, `GPU-…` or `MIG-…`: the device's identity."""
    index: SmallNatural
    """The driver's index of the GPU at this sample: for display only, never a key."""
    model: Word | None = None
    """The product name, such as `NVIDIA H100 80GB HBM3`."""
    parent_uuid: Id | None = None
    """On a MIG instance: UUID of the GPU."""
    gpu_instance: SmallNatural | None = None
    """On a MIG instance: the driver's id of its GPU instance."""
    compute_instance: SmallNatural | None = None
    """On a MIG instance: the driver's id of its compute instance."""
    mig_profile: Word | None = None
    """On a MIG instance: its profile, such as `1g.10gb`."""
    mig_enabled: bool | None = None
    """On a GPU: true if it is partitioned into instances, whose rows follow it in the sample."""
    utilization_ratio: Ratio | None = None
    """Share of the covered interval in which at least one kernel ran, 0 to 1."""
    memory_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which the memory controller was busy, 0 to 1."""
    memory_total_bytes: MemoryBytes | None = None
    """Size of the device memory, including the driver's reserved part."""
    memory_used_bytes: MemoryBytes | None = None
    """Memory in use at the sample, without the driver's reserved part. Drivers before 510 do not
    report that part separately: then it is included and `memory_reserved_bytes` is absent."""
    memory_reserved_bytes: MemoryBytes | None = None
    """Memory that the driver and the firmware keep for themselves."""
    power_milliwatts: Milliwatts | None = None
    """Power draw; averaged by the driver over one second on most GPUs since Ampere."""
    energy_millijoules: TickMillijoules | None = None
    """Energy drawn in the covered interval, determined by `energy_method`. It is the difference of
    two running totals, so that consecutive samples add up to the driver's counter."""
    energy_total_millijoules: Millijoules | None = None
    """The driver's energy counter; it restarts when the driver is loaded."""
    energy_method: EnergyMethod | None = None
    """How `energy_millijoules` was determined; absent if that is absent."""
    idle_draw_milliwatts: Milliwatts | None = None
    """The lowest power that the GPU drew over a sample without processes since the agent started;
    absent until there was such a sample, and on MIG instances."""
    temperature_celsius: Celsius | None = None
    """Temperature of the GPU's die."""
    sm_clock_hertz: Hertz | None = None
    """Clock of the streaming multiprocessors."""
    memory_clock_hertz: Hertz | None = None
    """Clock of the device memory."""
    sm_active_ratio: Ratio | None = None
    """Share of cycles since the sample before in which a multiprocessor had at least one warp,
    averaged over all. This and the next two: from the chip's counters (Hopper and newer)."""
    tensor_active_ratio: Ratio | None = None
    """Share of cycles in which any tensor pipe was active."""
    dram_active_ratio: Ratio | None = None
    """Share of cycles in which the memory interface sent or received data."""
    compute_slices: SmallNatural | None = None
    """Compute slices: for a MIG instance its own; for a GPU all into which it can be partitioned,
    those of its instances included; 1 for a GPU that cannot be partitioned."""
    memory_slices: SmallNatural | None = None
    """Memory slices, in the same way; compute instances of one GPU instance share its slices."""
    unresponsive: bool | None = None
    """True for a GPU or instance of the last inventory that did not answer in this sample: the row
    has its identity and slices, but no measurements."""
    memory_unified: bool | None = None
    """True for a GPU without its own memory: `memory_total_bytes` is the machine's memory, and
    memory in use is known only for processes on the GPU."""
    busy_method: BusyMethod | None = None
    """How busy time was derived, if the driver's samples did not contain each process's own share,
    or did not cover the interval (`sampled`); absent if they did."""


class GpuDetails(BaseRecord, frozen=True, kw_only=True):
    """Readings of one GPU or MIG instance that the join does not attribute to pods."""

    uuid: Id
    """The driver's UUID, `GPU-…` or `MIG-…`, as in the sample's `GpuReading`."""
    encoder_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the video encoders were busy."""
    decoder_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the video decoders were busy."""
    jpeg_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the JPEG engines were busy."""
    optical_flow_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the optical flow engines were busy."""
    power_instant_milliwatts: Milliwatts | None = None
    """Instantaneous power draw."""
    memory_temperature_celsius: Celsius | None = None
    """Temperature of the memory."""
    temperature_margin_celsius: MarginCelsius | None = None
    """How much hotter the GPU may become before it must slow down (Ada and newer); negative if it
    is already hotter."""
    performance_state: PerformanceState | None = None
    """Performance state: 0 is the fastest, 15 the slowest."""
    profiling: GpuProfiling | None = None
    """Measurements by the chip's own counters."""
    traffic: GpuTraffic | None = None
    """Bytes sent and received."""
    throttling: GpuThrottling | None = None
    """Why the clocks were reduced, and for how long."""
    health: GpuHealth | None = None
    """Errors and wear, in samples in which they were queried."""
    limits: GpuLimits | None = None
    """Limits, in samples in which they were queried."""
    resets: Annotated[list[Word], at_most(MAX_COUNTERS)] | None = None
    """Field names of the counters that fell since the sample before, which means they restarted. A
    single link's counter has the link number appended: `nvlink_link_sent_bytes_totals.3`."""
