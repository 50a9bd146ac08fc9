"""What a scenario says of a driver that fails. The shape alone, each field with its unit."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Kind = Literal[
    "lost", "reset_required", "hang", "garbage", "not_supported", "growing_list",
    "driver_reload", "version_mismatch", "unbind",
]  # fmt: skip


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a node's driver does wrong for a while."""

    node: str
    """The node's name."""
    kind: Kind
    """`lost` and `reset_required`: the GPUs answer with that error, and handles that were taken
    before the end do so after it. `hang`: calls do not return. `garbage`: values that cannot be
    true. `not_supported`: calls that the driver does not know any more. `growing_list`: lists that
    grew between the two calls that it takes to read them. `driver_reload`: there is no driver, and
    afterwards all counters begin anew and no handle is good. `version_mismatch`: the library is
    not the driver's. `unbind`: the driver tells that it will be unbound, and is so as soon as
    nobody holds the library open; then as `driver_reload`."""
    gpus: list[Annotated[int, Meta(ge=0)]] = []
    """The driver's indices of the GPUs; all of them where there is none."""
    calls: list[Annotated[str, Meta(pattern="^nvml")]] = []
    """NVML's names of the functions; where there is none, all that take a GPU, and of `garbage`
    those that give a plain reading."""
    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """When it begins, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """When it ends, since the scenario's start; absent: never."""
    failures: Annotated[int, Meta(ge=1)] = 1
    """Of `growing_list`: how often a call fails before it succeeds once."""


# What a scenario says of a GPU's health and of what its kernels do to the chip.
#
# The shape alone, each field with its unit.

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


# What a scenario says of things that go wrong with a GPU. The shape alone, each field's unit.

Natural = Annotated[int, Meta(ge=0)]


class EventSupport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node's driver tells through NVML's event sets."""

    version: Literal["v3", "v2", "none"] = "v3"
    """The newest form of waiting that it has; version 2 tells no time; `none` has no events."""
    types: Natural = 0xFFFF
    """NVML's bits of the events that its GPUs support."""


class GpuIncident(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to a GPU at an instant."""

    node: str
    """The node's name."""
    gpu: Natural
    """The driver's index of the GPU."""
    at_seconds: Annotated[float, Meta(ge=0)]
    """When it happens, since the scenario's start."""
    xid: Natural | None = None
    """The XID; without one it is `event`."""
    event: Literal[
        "xid", "double_bit_error", "single_bit_storm", "memory_retirement",
        "memory_retirement_failure", "nonfatal_poison", "fatal_poison", "unavailable",
        "recovery_action", "mig_change",
    ] = "xid"  # fmt: skip
    """What NVML's event says."""
    gpu_instance: Natural | None = None
    """The GPU instance to which it happens, under MIG."""
    compute_instance: Natural | None = None
    """The compute instance to which it happens, under MIG."""
    pid: Natural | None = None
    """The process that the kernel's log names."""
    text: str = ""
    """What the kernel's log says behind the XID's number."""
    times: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """How often it happens, a millisecond after the other."""
    told_by: Literal["both", "nvml", "kmsg"] = "both"
    """Who tells of it; the kernel's log has XIDs only."""
