"""One tick of a node: the readings of its GPUs, the processes on them and their containers.

This module holds the records of `gpuledger.samples.v1`, and of `gpuledger.readings.v1`, whose
values are not attributed. Processes refer to pods only by UID, because a cgroup path contains no
names; the join adds the pods' names.
"""

from typing import Annotated

from gpuledger.records.base import (
    ArrayRecord,
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    OpenEnum,
    Seq,
    SmallNatural,
)
from gpuledger.records.bounds import (
    MAX_ALLOCATIONS,
    MAX_CONTAINERS,
    MAX_ENDED_PROCESSES,
    MAX_GPUS,
    MAX_JOB_ALLOCATIONS,
    MAX_PROCESSES,
    BoottimeNs,
    Count,
    Id,
    IntervalNs,
    JobId,
    Label,
    MemoryBytes,
    Pid,
    QualifiedName,
    Ratio,
    SharePpm,
    Subdomain,
    at_most,
)
from gpuledger.records.processes import ProcessExit
from gpuledger.records.readings import GpuDetails, GpuReading


class ProcessKind(OpenEnum):
    """The driver's process list in which a process was found."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


class ContainerRef(ArrayRecord, frozen=True, kw_only=True):
    """A container or job, found in the cgroup path of one of the sample's processes."""

    container_id: Id | None = None
    """The runtime's id, 64 hexadecimal digits; absent if the path names only a pod."""
    pod_uid: Id | None = None
    """UID of the pod; absent if the path has none, as in a private cgroup namespace."""
    job_id: JobId | None = None
    """The job of a scheduler such as Slurm, named by the job's own cgroup; absent outside jobs. A
    container within a job belongs to its pod if it has one, otherwise to the job. For a cgroup of
    Slurm or the kubelet that the agent does not recognize, `unrecognized:` and its name."""


class GpuProcess(ArrayRecord, frozen=True, kw_only=True):
    """One process on one GPU in a sample."""

    gpu: Natural
    """Position of the GPU, or of the MIG instance, in the sample's `gpus`."""
    pid: Pid
    """Process id in the node's own pid namespace."""
    kind: ProcessKind
    """The driver's list in which it was found; `compute` if it is in more than one."""
    started_boottime_ns: BoottimeNs | None = None
    """Start of the process since the node's boot. Node, boot id, pid and this identify it."""
    container: Natural | None = None
    """Position of its container or job in the sample's `containers`; absent for processes of the
    host."""
    memory_used_bytes: MemoryBytes | None = None
    """Device memory it holds at the sample."""
    sm_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which its kernels ran, 0 to 1, from all samples in it."""
    ended: bool | None = None
    """True if the process was in an earlier sample and is gone: its last kernels may have run in
    the covered interval, but it ran for at most a part of the interval."""
    encoder_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which the video encoders worked for it, 0 to 1; absent if
    they did not."""
    decoder_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which the video decoders worked for it, in the same way."""


class AllocationSource(OpenEnum):
    """A product that divides GPUs and reports each container's share in annotations of the pod."""

    HAMI = "hami"
    VOLCANO = "volcano"
    GPUSHARE = "gpushare"
    KOORDINATOR = "koordinator"
    KAI = "kai"


class DeviceAllocation(BaseRecord, frozen=True, kw_only=True):
    """A device, or a part of one, that is allocated to a container."""

    # `ledger.allocated_parts` finds the row of the sample.
    gpu_uuid: Id
    """The GPU that the device is on."""
    device_id: Id
    """The device plugin's id of the device, such as a UUID, a MIG id or `UUID::2`. With a
    `source`, the UUID of the GPU or instance."""
    resource_name: QualifiedName
    """The resource that the pod requested, such as `nvidia.com/gpu`. If another pod reserves the
    GPU, the resource that that pod requested."""
    namespace: Label
    """Namespace of the pod."""
    pod: Subdomain
    """Name of the pod; the kubelet's pod-resources API does not return its UID."""
    container: Label
    """Name of the container in the pod."""
    gpu_instance: SmallNatural | None = None
    """If the device is a MIG instance: the driver's id of the GPU instance."""
    replica: Id | None = None
    """If the device is one of several shares of a GPU or instance: the share's name."""
    claim: QualifiedName | None = None
    """If it was allocated by a resource claim: the claim, as `namespace/name`."""
    device_replicas: SmallNatural | None = None
    """If the device is one of several shares: how many the kubelet has in total under this
    resource, allocated or not; absent if the kubelet does not report it."""
    admin_access: bool | None = None
    """True if it was allocated by a claim with admin access, which leaves the device to its other
    users and reserves nothing."""
    source: AllocationSource | None = None
    """The product whose annotation states the allocation; absent if the kubelet reported it."""
    share_ppm: SharePpm | None = None
    """If an annotation states a share of the device: the share, in millionths of the device."""
    count: Count | None = None
    """Number of equal shares of the device that the container has; absent for a whole device or a
    single share. `device_id` and `replica` are those of one of the shares."""


class JobAllocation(ArrayRecord, frozen=True, kw_only=True):
    """A GPU or instance that a scheduler such as Slurm has allocated to a job."""

    gpu_uuid: Id
    """The GPU that the device is on."""
    job_id: JobId
    """The job, as written by the scheduler's prolog. Several jobs on one device have equal
    parts."""
    gpu_instance: SmallNatural | None = None
    """If the device is a MIG instance: the driver's id of the GPU instance."""


class NodeSample(BaseRecord, frozen=True, kw_only=True):
    """One sample of one node: its GPUs with their readings, processes and allocations."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot (`/proc/sys/kernel/random/boot_id`)."""
    seq: Seq
    """Milliseconds from boot to the sample: rises with each sample, also when the agent
    restarts."""
    # A wall clock, which may be set to anything; `seq` gives order and age.
    time_ns: Natural
    """End of the covered interval, nanoseconds since the epoch: the sample's event time."""
    interval_ns: IntervalNs
    """Length of the covered interval by the monotonic clock; shares are relative to it."""
    late: bool | None = None
    """True if the sample began late, by more than half of the sampling interval."""
    gpus: Annotated[list[GpuReading], at_most(MAX_GPUS)]
    """Readings of the node's GPUs, one per GPU; each GPU is followed by its MIG instances."""
    # Listed once and referenced by position: if they were repeated for each process, ids would take
    # up most of a tick.
    containers: Annotated[list[ContainerRef], at_most(MAX_CONTAINERS)]
    """Containers and jobs of the sample's processes, including processes that ended; each once."""
    processes: Annotated[list[GpuProcess], at_most(MAX_PROCESSES)]
    """The processes on the GPUs, one entry for each GPU that a process uses; empty if the agent's
    pid namespace is not the driver's, because its pids would name other processes."""
    allocations: Annotated[list[DeviceAllocation], at_most(MAX_ALLOCATIONS)]
    """Devices that the kubelet has allocated; empty if the kubelet does not answer."""
    allocations_unknown: bool | None = None
    """True if `allocations` may be incomplete, so that the allocation of each device's rest is
    unknown. Possible causes: the last answer of the node's kubelet is too old, the agent has not
    read the annotations with the shares of pods, or the allocations exceed the record's limits."""
    ended_processes: Annotated[list[ProcessExit], at_most(MAX_ENDED_PROCESSES)] | None = None
    """Processes that finished with a GPU by this sample, if the driver's accounting is on."""
    job_allocations: Annotated[list[JobAllocation], at_most(MAX_JOB_ALLOCATIONS)] | None = None
    """GPUs that a scheduler has allocated to jobs, from the directory that its prolog writes;
    absent if there are none, or nothing writes the directory."""


class NodeReadings(BaseRecord, frozen=True, kw_only=True):
    """The readings of a sample that are not attributed.

    The record has the same `(cluster, node, boot_id, seq)` as the sample.
    """

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    seq: Seq
    """Milliseconds from boot to the sample."""
    time_ns: Natural
    """End of the interval that the sample covers, nanoseconds since the epoch."""
    interval_ns: IntervalNs
    """Length of the covered interval by the monotonic clock."""
    gpus: Annotated[list[GpuDetails], at_most(MAX_GPUS)]
    """One for each GPU and each MIG instance that has such readings."""
