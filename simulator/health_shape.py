"""What a scenario says of a GPU's health and of what its kernels do to the chip.

The shape alone, each field with its unit.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0)]

Throttle = Literal[
    "power", "sync_boost", "software_thermal", "hardware_thermal", "power_brake", "board_limit",
    "low_utilization", "reliability",
]  # fmt: skip


class HealthFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that befalls a GPU; counts stay, the rest ends with it."""

    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """From when on, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """Until when; absent: for ever."""
    throttle: Throttle | None = None
    """Why the clocks are held down."""
    recovery: Literal["none", "reset", "reboot", "drain_p2p", "drain_and_reset"] = "none"
    """What the driver asks for."""
    ecc_corrected: Count = 0
    """Corrected memory errors."""
    ecc_uncorrected: Count = 0
    """Uncorrected memory errors."""
    sram_corrected: Count = 0
    """Corrected errors of the chip's own memory."""
    sram_uncorrected: Count = 0
    """Double-bit errors of the chip's own memory; more than 3 are more than its maker allows."""
    rows_remapped: Count = 0
    """Rows replaced for uncorrected errors."""
    remap_pending: bool = False
    """Whether a row waits for the next reset to be replaced."""
    remap_failed: bool = False
    """Whether a row could not be replaced."""
    pcie_replays: Count = 0
    """PCIe packets sent again."""
    nvlink_replays: Count = 0
    """NVLink packets sent again."""


class KernelMix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process's kernels do to the chip while they run."""

    sm_ratio: Ratio = 0.9
    """Share of the multiprocessors that have a warp."""
    occupancy_ratio: Ratio = 0.45
    """Resident warps over the most that fit."""
    tensor_ratio: Ratio = 0.3
    """Share of cycles in which a tensor pipe is active, with half-precision work."""
    fp64_ratio: Ratio = 0.0
    """Share of cycles in which the double-precision pipe is active."""
    fp32_ratio: Ratio = 0.15
    """The same of single precision."""
    fp16_ratio: Ratio = 0.05
    """The same of half precision."""
    integer_ratio: Ratio = 0.1
    """The same of integers."""
    pcie_bytes_per_second: Rate = 2e8
    """What goes over PCIe, each way."""
    nvlink_bytes_per_second: Rate = 0.0
    """What goes over the NVLinks, each way."""
    decoder_ratio: Ratio = 0.0
    """Share of time in which a video decoder is busy."""
    encoder_ratio: Ratio = 0.0
    """Share of time in which a video encoder is busy."""
