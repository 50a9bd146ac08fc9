"""What a source of incidents saw, before it is known who was on the GPU and whether it is news."""

from dataclasses import dataclass

from gpuledger.records import Severity


@dataclass(frozen=True, kw_only=True, slots=True)
class Detection:
    """One thing that one source saw once."""

    kind: str
    """The incident's kind."""
    gpu_uuid: str
    """The GPU, or `PCI:<bus>` or `INDEX:<index>` where its UUID is not known."""
    time_ns: int
    """When it happened, nanoseconds since the epoch."""
    source: str
    """`nvml`, `kmsg` or `agent`."""
    xid: int | None = None
    """The XID, where it is one."""
    gpu_instance: int | None = None
    """The MIG GPU instance, where the source says."""
    compute_instance: int | None = None
    """The MIG compute instance, where the source says."""
    action: str | None = None
    """The action that the driver itself asks for."""
    severity: Severity | None = None
    """How loud it is, where the source says more than the kind does."""
    detail: str | None = None
    """The source's own words."""
    pid: int | None = None
    """The process that the source names."""
    command: str | None = None
    """The name of that process."""
