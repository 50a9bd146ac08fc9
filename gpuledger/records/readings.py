"""What one GPU, or one MIG instance, read in a tick.

Here live `GpuReading`, from which ticks are booked, `GpuDetails` with all else, and the parts of it
that measure work; `health` has those that measure wear. A part is absent where the driver gives
none of it, and in ticks in which it was not asked: profiling, traffic and throttling come with each
tick, health and limits every few seconds. Totals count since the driver was loaded; one that fell
is named in `resets`.
"""

from typing import Annotated

from gpuledger.records.base import ArrayRecord, BaseRecord, Natural, SmallNatural
from gpuledger.records.bounds import (
    MAX_COUNTERS,
    MAX_LINKS,
    BytesPerSecond,
    Celsius,
    Hertz,
    Id,
    Joules,
    MemoryBytes,
    PerformanceState,
    Ratio,
    TickJoules,
    Watts,
    Word,
    at_most,
)
from gpuledger.records.health import GpuHealth, GpuLimits, GpuThrottling


class GpuProfiling(BaseRecord, frozen=True, kw_only=True):
    """What the chip's own counters measured since the tick before (GPM: Hopper and newer)."""

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
    power_watts: Watts | None = None
    """Power draw; averaged by the driver over one second on most GPUs since Ampere."""
    energy_joules: TickJoules | None = None
    """Energy drawn in the covered interval: the difference of two counter readings."""
    energy_total_joules: Joules | None = None
    """The driver's energy counter; it starts again when the driver is loaded."""
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


class GpuDetails(BaseRecord, frozen=True, kw_only=True):
    """What else one GPU or MIG instance read in a tick: what nothing is booked from."""

    uuid: Id
    """The UUID as the driver gives it, `GPU-…` or `MIG-…`: that of the tick's `GpuReading`."""
    encoder_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the video encoders were busy."""
    decoder_utilization_ratio: Ratio | None = None
    """Share of the driver's last window in which the video decoders were busy."""
    power_instant_watts: Watts | None = None
    """Power draw of the instant."""
    memory_temperature_celsius: Celsius | None = None
    """Temperature of the memory."""
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
