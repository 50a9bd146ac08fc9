"""What a scenario says of things that go wrong with a GPU. The shape alone, each field's unit."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

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
