"""The life of a process on a GPU, as a node reports it, and what it used by its end.

Here live the record of `gpuledger.processes.v1`, the audit trail behind the ticks, and the one that
a tick carries of a process that is done with a GPU: all that it used, and what ticks said of it.
What is booked for it is the join's business; what a process used in a tick stands in the tick.
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
    """A process that is done with a GPU, with the driver's account of it.

    The tick that carries it is the first one of the GPU that covers the end of the process there.
    """

    gpu: Natural
    """Position of the GPU in the tick's `gpus`."""
    pid: Pid
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs
    """Start of the process since the node's boot."""
    container: Natural | None = None
    """Position of its container, or of its job, in the tick's `containers`; absent for a process
    of the host."""
    lifetime_ns: DurationNs
    """For how long it held the GPU open, by the driver's accounting."""
    busy_ns: DurationNs
    """Time in which its kernels ran, by the driver's accounting: percents of `lifetime_ns`."""
    sampled_busy_ns: DurationNs
    """What ticks have said of it: where its container was alone on the GPU, the process's part of
    the device's busy time, else what its own samples said."""
    reserved_busy_ns: DurationNs
    """What of the device's busy time is set aside for it: of ticks in which no process was seen on
    the GPU, and set aside for no other process."""
    # Ticks by number and by time: the number says which, the time where on the books.
    from_seq: Seq
    """The first tick that covers a part of its time on the GPU, as far as the agent remembers."""
    from_time_ns: Natural
    """Where that tick's interval begins, nanoseconds since the epoch."""
    until_seq: Seq
    """The last tick that covers a part of it."""
    until_time_ns: Natural
    """Where that tick's interval ends, nanoseconds since the epoch."""


class ProcessChange(OpenEnum):
    """Why a process record was written."""

    SEEN = "seen"
    CHANGED = "changed"
    ENDED = "ended"


class GpuTotals(BaseRecord, frozen=True, kw_only=True):
    """What a process used of one GPU over its whole life, by the driver's accounting."""

    gpu_uuid: Id
    """The GPU."""
    busy_ns: DurationNs | None = None
    """Time in which its kernels ran."""
    memory_busy_ns: DurationNs | None = None
    """Time in which it kept the memory controller busy."""
    max_memory_bytes: MemoryBytes | None = None
    """The most device memory it held."""
    started_time_ns: Natural | None = None
    """When it opened the GPU, nanoseconds since the epoch."""
    lifetime_ns: DurationNs | None = None
    """For how long it held the GPU open."""


class ProcessRecord(BaseRecord, frozen=True, kw_only=True):
    """A process first seen on a GPU, changed (another cgroup, another GPU) or ended."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    pid: Natural
    """Process id in the node's own pid namespace."""
    # With node, boot and pid its identity: pids come again, within minutes on a busy node.
    started_boottime_ns: BoottimeNs | None = None
    """Start of the process since boot; absent where the process ended before it could be read."""
    time_ns: Natural
    """When the agent saw the change, nanoseconds since the epoch."""
    change: ProcessChange
    """Whether the process was first seen, changed, or ended."""
    gpu_uuids: Annotated[list[Id], at_most(MAX_GPUS)]
    """The GPUs it uses, or used last."""
    command: Word | None = None
    """The kernel's name of the program (`/proc/<pid>/comm`, at most 15 characters)."""
    cgroup_path: Path | None = None
    """The line of `/proc/<pid>/cgroup` that named the container, or the first one."""
    container_id: Id | None = None
    """The container's id as the path shows it."""
    pod_uid: Id | None = None
    """The pod's UID as the path shows it."""
    job_id: JobId | None = None
    """The job of a scheduler such as Slurm as the path shows it, outside of pods."""
    totals: Annotated[list[GpuTotals], at_most(MAX_GPUS)] | None = None
    """At the end: what it used of each GPU, where the driver's accounting is on."""
    busy_ns: Natural | None = None
    """At the end: GPU time over its whole life, summed over its GPUs, by the driver's accounting,
    where that is on."""
    max_memory_bytes: MemoryBytes | None = None
    """At the end: the most device memory it held on one GPU, by the driver's accounting, where that
    is on."""
