"""What one GPU, or one MIG instance, read in a tick.

Here live `GpuReading`, from which ticks are booked, and `GpuDetails` with all else: the parts that
measure work, and those by which an operator sees how a GPU is held down, wears and fails
(throttling, health, limits). A part is absent where the driver gives none of it, and in ticks in
which it was not asked: traffic, throttling and most of profiling come every few seconds, each GPU's
in another tick, and health and limits more rarely. A value is never repeated: what stands in a tick
was asked for it. Totals count since the driver was loaded unless they say otherwise; one that fell
is named in `resets`.

Amounts are whole numbers and ratios have six digits, so that what is booked of them adds up to the
last digit.
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
    """Why the clocks are lower than they could be, and for how long they were."""

    # Bits, not names: a driver may set some that this version does not know.
    reasons: Natural | None = None
    """The reasons at the tick, NVML's bits: 1 idle, 2 applications' clocks, 4 power cap, 8 hardware
    slowdown, 0x10 sync boost, 0x20 software thermal, 0x40 hardware thermal, 0x80 power brake,
    0x100 display clocks; newer drivers may set others."""
    power_ns_total: DurationNs | None = None
    """Time below the clocks for the power limit."""
    thermal_ns_total: DurationNs | None = None
    """Time below the clocks for the temperature."""
    sync_boost_ns_total: DurationNs | None = None
    """Time below the clocks to keep step with other GPUs."""
    board_limit_ns_total: DurationNs | None = None
    """Time below the clocks for the board's limits."""
    low_utilization_ns_total: DurationNs | None = None
    """Time below the clocks for want of work."""
    reliability_ns_total: DurationNs | None = None
    """Time below the clocks for the chip's reliability."""
    software_thermal_ns_total: DurationNs | None = None
    """Time in the driver's thermal slowdown."""
    hardware_thermal_ns_total: DurationNs | None = None
    """Time in the hardware's thermal slowdown."""
    power_brake_ns_total: DurationNs | None = None
    """Time in which the machine's power supply asked for less."""


class GpuHealth(BaseRecord, frozen=True, kw_only=True):
    """Errors and wear; absent in ticks in which it was not asked."""

    # A word and no enumeration: newer drivers add to it.
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
    pcie_correctable_errors_total: Natural | None = None
    """PCIe errors that were corrected."""
    pcie_naks_received_total: Natural | None = None
    """PCIe packets that the other side refused."""
    pcie_receiver_errors_total: Natural | None = None
    """PCIe symbols that could not be received."""
    pcie_bad_tlps_total: Natural | None = None
    """PCIe transaction packets that were damaged."""
    pcie_naks_sent_total: Natural | None = None
    """PCIe packets that were refused."""
    pcie_bad_dllps_total: Natural | None = None
    """PCIe data link packets that were damaged."""
    pcie_non_fatal_errors_total: Natural | None = None
    """PCIe errors that were not corrected and left the link working."""
    pcie_fatal_errors_total: Natural | None = None
    """PCIe errors after which the link does not work."""
    pcie_unsupported_requests_total: Natural | None = None
    """PCIe requests that are not supported."""
    pcie_lcrc_errors_total: Natural | None = None
    """PCIe link checksum errors."""
    pcie_lane_errors_total: Natural | None = None
    """Errors of single PCIe lanes."""
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
    nvlink_link_states: Annotated[dict[Word, Word], at_most(MAX_LINKS)] | None = None
    """`inactive`, `active`, `sleep` or `traffic_disabled`, by the link's number (Hopper and
    newer)."""
    nvlink_link_replays_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """NVLink packets sent again, by the link's number (Hopper)."""
    nvlink_link_recoveries_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Recoveries of each NVLink, in the same way."""
    nvlink_link_crc_errors_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Checksum errors of each NVLink, in the same way."""
    nvlink_link_malformed_packets_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Malformed packets that each NVLink received (this and what follows: Blackwell and newer)."""
    nvlink_link_buffer_overruns_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Packets that each NVLink dropped as its buffer was full."""
    nvlink_link_receive_errors_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = (
        None
    )
    """Packets that each NVLink received with an error."""
    nvlink_link_receive_remote_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Packets that each NVLink received with a mark that they are bad."""
    nvlink_link_receive_general_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Other errors of each NVLink when receiving."""
    nvlink_link_integrity_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """How often the bit errors of each NVLink passed the local threshold."""
    nvlink_link_discards_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = None
    """Packets that each NVLink did not send as it was down or congested."""
    nvlink_link_successful_recoveries_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Recoveries of each NVLink after which it works."""
    nvlink_link_failed_recoveries_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Recoveries of each NVLink that failed."""
    nvlink_link_effective_errors_totals: (
        Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None
    ) = None
    """Errors of each NVLink that error correction left."""
    nvlink_link_symbol_errors_totals: Annotated[dict[Word, Natural], at_most(MAX_LINKS)] | None = (
        None
    )
    """Symbols that each NVLink received wrong."""
    nvlink_link_effective_bit_error_ratios: (
        Annotated[dict[Word, Ratio], at_most(MAX_LINKS)] | None
    ) = None
    """Wrong bits over all bits of each NVLink, after error correction."""
    nvlink_link_symbol_bit_error_ratios: Annotated[dict[Word, Ratio], at_most(MAX_LINKS)] | None = (
        None
    )
    """Wrong symbols over all symbols of each NVLink."""
    nvlink_link_fec_history_totals: (
        Annotated[dict[Word, Annotated[list[Natural], at_most(MAX_FEC_ERRORS)]], at_most(MAX_LINKS)]
        | None
    ) = None
    """Blocks that each NVLink received, by how many errors were corrected in them, from 0 on."""
    nvlink_link_sent_bytes_per_second: (
        Annotated[dict[Word, BytesPerSecond], at_most(MAX_LINKS)] | None
    ) = None
    """From the GPU over each NVLink, in the same way: the mean since the health was asked last, by
    the chip's own counters (Hopper and newer)."""
    nvlink_link_received_bytes_per_second: (
        Annotated[dict[Word, BytesPerSecond], at_most(MAX_LINKS)] | None
    ) = None
    """To the GPU over each NVLink, in the same way."""
    fabric_state: Word | None = None
    """`not_supported`, `not_started`, `in_progress` or `completed`."""
    fabric_status: Natural | None = None
    """NVML's return code of the registration with the fabric, once it is completed."""
    fabric_health_mask: Natural | None = None
    """NVML's bits of what is degraded in the fabric."""
    fabric_bandwidth_degraded: bool | None = None
    """Whether the fabric has less bandwidth than it should; by the bits, as the next three."""
    fabric_route_recovery: bool | None = None
    """Whether the fabric's routes are being recovered."""
    fabric_route_unhealthy: bool | None = None
    """Whether a route of the fabric is unhealthy: work over NVLink fails."""
    fabric_access_timeout: bool | None = None
    """Whether an access over the fabric timed out and is being recovered from."""
    pcie_link_generation: Natural | None = None
    """The PCIe link's generation now."""
    pcie_link_width: Natural | None = None
    """The PCIe link's lanes now."""
    pcie_max_link_generation: Natural | None = None
    """The highest generation that GPU and machine can do together."""
    pcie_max_link_width: Natural | None = None
    """The most lanes that GPU and machine can use together."""
    bar1_used_bytes: MemoryBytes | None = None
    """Used part of the window through which others reach the memory."""
    fan_speed_ratio: FanRatio | None = None
    """Speed of the fans over the most that they are meant to run at, which they may exceed."""
    vgpu_license_status: Natural | None = None
    """1 where a licensed feature is licensed."""
    c2c_links: Natural | None = None
    """Links to the CPU that the GPU is built with."""


class GpuLimits(BaseRecord, frozen=True, kw_only=True):
    """What the GPU may draw, and how hot and fast it may be; absent in ticks without its health."""

    power_limit_enforced_milliwatts: Milliwatts | None = None
    """The limit in force: the least of all that are set."""
    power_limit_requested_milliwatts: Milliwatts | None = None
    """The limit that the owner has set."""
    power_limit_default_milliwatts: Milliwatts | None = None
    """The limit without a setting."""
    power_limit_min_milliwatts: Milliwatts | None = None
    """The lowest limit that can be set."""
    power_limit_max_milliwatts: Milliwatts | None = None
    """The highest limit that can be set."""
    temperature_slowdown_celsius: Celsius | None = None
    """Where the hardware slows down."""
    temperature_shutdown_celsius: Celsius | None = None
    """Where the hardware shuts down."""
    # NVML's T.Limit, by which newer GPUs replace the temperatures above.
    temperature_margin_max_celsius: MarginCelsius | None = None
    """The margin (`GpuDetails.temperature_margin_celsius`) from which on the GPU is too hot to be
    operated; that of the die, on Ada and newer as the next three."""
    temperature_margin_memory_max_celsius: MarginCelsius | None = None
    """The same of the memory."""
    temperature_margin_slowdown_celsius: MarginCelsius | None = None
    """The margin at which the hardware slows down; below 0 it lies behind the limit."""
    temperature_margin_shutdown_celsius: MarginCelsius | None = None
    """The margin at which the hardware shuts down."""
    sm_clock_max_hertz: Hertz | None = None
    """The highest clock of the streaming multiprocessors."""
    memory_clock_max_hertz: Hertz | None = None
    """The highest clock of the device memory."""


class GpuProfiling(BaseRecord, frozen=True, kw_only=True):
    """What the chip's own counters measured (GPM: Hopper and newer).

    The ratios of the graphics engine, the multiprocessors, any tensor pipe and the memory interface
    are of the tick. All others are means over `interval_ns`, and absent in ticks in which they were
    not asked.
    """

    interval_ns: DurationNs | None = None
    """The time up to the tick that the others are means over: since they were asked before."""
    graphics_engine_active_ratio: Ratio | None = None
    """Share of time in which the graphics or compute engine was busy."""
    sm_active_ratio: Ratio | None = None
    """Share of cycles in which a multiprocessor had at least one warp, mean over all of them."""
    sm_occupancy_ratio: Ratio | None = None
    """Resident warps over the most that fit."""
    tensor_active_ratio: Ratio | None = None
    """Share of cycles in which any tensor pipe was active."""
    tensor_dfma_active_ratio: Ratio | None = None
    """The same of double-precision tensor work."""
    tensor_hmma_active_ratio: Ratio | None = None
    """The same of half-precision tensor work."""
    tensor_imma_active_ratio: Ratio | None = None
    """The same of integer tensor work."""
    dram_active_ratio: Ratio | None = None
    """Share of cycles in which the memory interface sent or received."""
    fp64_active_ratio: Ratio | None = None
    """Share of cycles in which the double-precision pipe was active."""
    fp32_active_ratio: Ratio | None = None
    """The same of single precision."""
    fp16_active_ratio: Ratio | None = None
    """The same of half precision."""
    integer_active_ratio: Ratio | None = None
    """The same of integers."""
    pcie_sent_bytes_per_second: BytesPerSecond | None = None
    """From the GPU over PCIe, headers included."""
    pcie_received_bytes_per_second: BytesPerSecond | None = None
    """To the GPU over PCIe, headers included."""
    nvlink_sent_bytes_per_second: BytesPerSecond | None = None
    """From the GPU over all NVLinks."""
    nvlink_received_bytes_per_second: BytesPerSecond | None = None
    """To the GPU over all NVLinks."""
    c2c_sent_bytes_per_second: BytesPerSecond | None = None
    """From the GPU to the CPU it is built with."""
    c2c_received_bytes_per_second: BytesPerSecond | None = None
    """To the GPU from the CPU it is built with."""
    nvdec_active_ratios: Annotated[list[Ratio], at_most(MAX_LINKS)] | None = None
    """Share of time in which each video decoder was busy, by its number."""
    nvjpg_active_ratios: Annotated[list[Ratio], at_most(MAX_LINKS)] | None = None
    """The same of the JPEG decoders."""
    nvofa_active_ratios: Annotated[list[Ratio], at_most(MAX_LINKS)] | None = None
    """The same of the optical flow engines."""


class GpuTraffic(BaseRecord, frozen=True, kw_only=True):
    """Bytes that went in and out, as counters."""

    pcie_sent_bytes_total: Natural | None = None
    """From the GPU over PCIe."""
    pcie_received_bytes_total: Natural | None = None
    """To the GPU over PCIe."""
    nvlink_sent_bytes_total: Natural | None = None
    """From the GPU over all NVLinks, data without headers."""
    nvlink_received_bytes_total: Natural | None = None
    """To the GPU over all NVLinks, data without headers."""


class EnergyMethod(OpenEnum):
    """How the energy of a tick was found."""

    COUNTER = "counter"
    """By the driver's counter at the two ends of what the tick covers."""
    INTERPOLATED = "interpolated"
    """By the draw, as the driver's counter stood still between its steps, and up to the counter."""
    POWER = "power"
    """By the draw alone, times the time: the driver has no counter, or it has begun again."""


class BusyMethod(OpenEnum):
    """How the busy time of a device's entries was found."""

    EXCLUSIVE = "exclusive"
    PROCESS_UTILIZATION = "process_utilization"
    ACCOUNTING = "accounting"
    MEMORY_SHARE = "memory_share"
    EQUAL_SHARE = "equal_share"
    EQUAL_TURNS = "equal_turns"
    """The driver's samples of processes came to more than the device, as they count waiting: made
    shares by equal turns."""
    MPS_SERVER = "mps_server"
    """The driver sampled the server of MPS alone: in equal parts, a client each."""


class GpuReading(ArrayRecord, frozen=True, kw_only=True):
    """What one GPU or MIG instance read in a tick; what the driver does not give is absent."""

    uuid: Id
    """The UUID as the driver gives it, `GPU-…` or `MIG-…`: the device's identity."""
    index: SmallNatural
    """The driver's index of the GPU at this tick: a label for people, never a key."""
    model: Word | None = None
    """The product name, such as `NVIDIA H100 80GB HBM3`."""
    parent_uuid: Id | None = None
    """On a MIG instance: the GPU's UUID."""
    gpu_instance: SmallNatural | None = None
    """On a MIG instance: the driver's id of the GPU instance."""
    compute_instance: SmallNatural | None = None
    """On a MIG instance: the driver's id of the compute instance."""
    mig_profile: Word | None = None
    """On a MIG instance: its profile, such as `1g.10gb`."""
    mig_enabled: bool | None = None
    """On a GPU: true where it is cut into instances, whose rows follow it in the tick."""
    utilization_ratio: Ratio | None = None
    """Share of the covered interval in which at least one kernel ran, 0 to 1."""
    memory_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which the memory controller was busy, 0 to 1."""
    memory_total_bytes: MemoryBytes | None = None
    """Size of the device memory, what the driver reserved included."""
    memory_used_bytes: MemoryBytes | None = None
    """Memory in use at the tick, without what the driver reserved for itself; with it where the
    driver does not tell that apart (before 510), and `memory_reserved_bytes` is absent."""
    memory_reserved_bytes: MemoryBytes | None = None
    """Memory that the driver and the firmware keep for themselves."""
    power_milliwatts: Milliwatts | None = None
    """Power draw; averaged by the driver over one second on most GPUs since Ampere."""
    energy_millijoules: TickMillijoules | None = None
    """Energy drawn in the covered interval, as `energy_method` says it was found: the difference of
    what it has come to in all, so that ticks in a row add up to the driver's counter."""
    energy_total_millijoules: Millijoules | None = None
    """The driver's energy counter; it starts again when the driver is loaded."""
    energy_method: EnergyMethod | None = None
    """How `energy_millijoules` was found; absent where that is."""
    idle_draw_milliwatts: Milliwatts | None = None
    """The least that the GPU has drawn over a tick without a process, since the agent started;
    absent until such a tick was seen, and on a MIG instance."""
    temperature_celsius: Celsius | None = None
    """Temperature of the GPU's die."""
    sm_clock_hertz: Hertz | None = None
    """Clock of the streaming multiprocessors."""
    memory_clock_hertz: Hertz | None = None
    """Clock of the device memory."""
    sm_active_ratio: Ratio | None = None
    """Share of cycles in which a multiprocessor had at least one warp, mean over all of them, since
    the tick before; by the chip's own counters (Hopper and newer), as the next two."""
    tensor_active_ratio: Ratio | None = None
    """Share of cycles in which any tensor pipe was active."""
    dram_active_ratio: Ratio | None = None
    """Share of cycles in which the memory interface sent or received."""
    compute_slices: SmallNatural | None = None
    """Compute slices: of a MIG instance its own, of a GPU those into which it can be cut, all
    instances' included; 1 of a GPU that cannot be cut."""
    memory_slices: SmallNatural | None = None
    """Memory slices, in the same way; compute instances of one GPU instance share its slices."""
    unresponsive: bool | None = None
    """True of a GPU, or an instance, of the last inventory that did not answer in this tick: its
    identity and its slices stand here, and nothing that is measured."""
    memory_unified: bool | None = None
    """True of a GPU without memory of its own: `memory_total_bytes` is all of the machine's, and
    how much is in use is not told but of processes on the GPU."""
    busy_method: BusyMethod | None = None
    """How shares of busy time were made of the driver's samples, where these are not each process's
    own; absent where they are."""


class GpuDetails(BaseRecord, frozen=True, kw_only=True):
    """What else one GPU or MIG instance read in a tick: what nothing is booked from."""

    uuid: Id
    """The UUID as the driver gives it, `GPU-…` or `MIG-…`: that of the tick's `GpuReading`."""
    encoder_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the video encoders were busy."""
    decoder_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the video decoders were busy."""
    jpeg_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the JPEG engines were busy."""
    optical_flow_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the optical flow engines were busy."""
    power_instant_milliwatts: Milliwatts | None = None
    """Power draw of the instant."""
    memory_temperature_celsius: Celsius | None = None
    """Temperature of the memory."""
    temperature_margin_celsius: MarginCelsius | None = None
    """How much hotter the GPU may become before it has to slow down (Ada and newer); below 0 it is
    beyond that."""
    performance_state: PerformanceState | None = None
    """0 is the fastest, 15 the slowest."""
    profiling: GpuProfiling | None = None
    """What the chip's own counters measured."""
    traffic: GpuTraffic | None = None
    """Bytes in and out."""
    throttling: GpuThrottling | None = None
    """Why and for how long the clocks were held down."""
    health: GpuHealth | None = None
    """Errors and wear, in ticks in which they were asked."""
    limits: GpuLimits | None = None
    """Limits, in ticks in which they were asked."""
    resets: Annotated[list[Word], at_most(MAX_COUNTERS)] | None = None
    """Counters that fell since the tick before, by field name: they have begun again. That of one
    link has its number behind the name, as in `nvlink_link_sent_bytes_totals.3`."""
