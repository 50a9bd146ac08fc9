"""Records about the whole time of a process on GPUs, as its node reports it, and its total use.

`ProcessRecord` is the record of `gpuledger.processes.v1`, by which ticks can be audited. In a tick,
`ProcessExit` reports that a process has finished with a GPU, its total use of the GPU, and the use
that ticks have reported. The join attributes the difference.
"""

from typing import Annotated

from gpuledger.records.base import (
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    OpenEnum,
    Seq,
)
from gpuledger.records.bounds import (
    MAX_GPUS,
    BoottimeNs,
    DurationNs,
    Id,
    JobId,
    MemoryBytes,
    Path,
    Pid,
    Word,
    at_most,
)


class ProcessExit(BaseRecord, frozen=True, kw_only=True):
    """The end of a process on a GPU, with the driver's accounting of its use.

    The record is in the first sample of the GPU whose interval covers this end.
    """

    gpu: Natural
    """Position of the GPU in the sample's `gpus`."""
    pid: Pid
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs
    """Start of the process since the node's boot."""
    container: Natural | None = None
    """Position of its container or job in the sample's `containers`; absent for processes of the
    host."""
    lifetime_ns: DurationNs
    """How long it had the GPU open, according to the driver's accounting."""
    busy_ns: DurationNs
    """Time in which its kernels ran, from the driver's accounting: a percentage of its lifetime."""
    sampled_busy_ns: DurationNs
    """Busy time that samples have reported for the process. While only its container was on the
    GPU, this is its part of the device's busy time, otherwise the busy time in its own samples."""
    reserved_busy_ns: DurationNs
    """Busy time of the device that is reserved for this process and for no other. It comes from
    samples in which no process was seen on the GPU."""
    # Each tick is given by its number, which identifies it, and by its time, which dates the late
    # adjustment.
    from_seq: Seq
    """The first sample that covers part of its time on the GPU, as far as the agent remembers."""
    from_time_ns: Natural
    """Start of that sample's interval, nanoseconds since the epoch."""
    until_seq: Seq
    """The last sample that covers part of that time."""
    until_time_ns: Natural
    """End of that sample's interval, nanoseconds since the epoch."""


class ProcessChange(OpenEnum):
    """Why a process record was written."""

    SEEN = "seen"
    CHANGED = "changed"
    ENDED = "ended"


class GpuTotals(BaseRecord, frozen=True, kw_only=True):
    """A process's total use of one GPU, from the driver's accounting."""

    gpu_uuid: Id
    """The GPU."""
    busy_ns: DurationNs | None = None
    """Time in which its kernels ran."""
    memory_busy_ns: DurationNs | None = None
    """Time in which it kept the memory controller busy."""
    max_memory_bytes: MemoryBytes | None = None
    """Maximum device memory that it used."""
    started_time_ns: Natural | None = None
    """When it opened the GPU, nanoseconds since the epoch."""
    lifetime_ns: DurationNs | None = None
    """How long it had the GPU open."""


class ProcessRecord(BaseRecord, frozen=True, kw_only=True):
    """A change of a process: it was first seen on a GPU, changed its cgroup or GPUs, or ended."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    pid: Natural
    """Process id in the node's own pid namespace."""
    # Identifies the process together with node, boot and pid: a busy node reuses pids within
    # minutes.
    started_boottime_ns: BoottimeNs | None = None
    """Start of the process since boot; absent if it ended before this could be read."""
    time_ns: Natural
    """When the agent saw the change, nanoseconds since the epoch."""
    change: ProcessChange
    """Whether the process was first seen, changed, or ended."""
    gpu_uuids: Annotated[list[Id], at_most(MAX_GPUS)]
    """The GPUs that it uses, or used last."""
    command: Word | None = None
    """The kernel's name of the program (`/proc/<pid>/comm`, at most 15 characters)."""
    cgroup_path: Path | None = None
    """The line of `/proc/<pid>/cgroup` that names the container, or the first line."""
    container_id: Id | None = None
    """The container's id from the path."""
    pod_uid: Id | None = None
    """The pod's UID from the path."""
    job_id: JobId | None = None
    """The job of a scheduler such as Slurm, from the path; only outside pods."""
    totals: Annotated[list[GpuTotals], at_most(MAX_GPUS)] | None = None
    """At the end: its use of each GPU, if the driver's accounting is on."""
    busy_ns: Natural | None = None
    """At the end: total GPU time over its lifetime on all its GPUs, if the driver's accounting is
    on."""
    max_memory_bytes: MemoryBytes | None = None
    """At the end: maximum device memory that it used on one GPU, if the driver's accounting is
    on."""
