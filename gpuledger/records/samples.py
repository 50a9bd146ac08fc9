"""What a node says of one tick: the GPUs' readings, the processes on them, their containers.

Here live the records of `gpuledger.samples.v1`, and of `gpuledger.readings.v1`, which has what
nothing is booked from. Nothing here knows pods by name: a node knows a pod by the UID in a cgroup
path, names are the join's business.
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
    Id,
    IntervalNs,
    JobId,
    Label,
    MemoryBytes,
    Pid,
    QualifiedName,
    Ratio,
    Subdomain,
    at_most,
)
from gpuledger.records.processes import ProcessExit
from gpuledger.records.readings import GpuDetails, GpuReading


class ProcessKind(OpenEnum):
    """The list of the driver in which a process was found."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


class ContainerRef(ArrayRecord, frozen=True, kw_only=True):
    """A container or a job as a cgroup path shows it; processes of the tick point to it."""

    container_id: Id | None = None
    """The runtime's id, 64 hexadecimal digits; absent where the path shows only a pod."""
    pod_uid: Id | None = None
    """The pod's UID; absent where the path shows none, as in a private cgroup namespace."""
    job_id: JobId | None = None
    """The job of a scheduler such as Slurm, as its own cgroup names it; absent outside of jobs. A
    container of no pod in a job is the job's; where there is a pod, it is the pod's."""


class GpuProcess(ArrayRecord, frozen=True, kw_only=True):
    """One process on one GPU in a tick."""

    gpu: Natural
    """Position of the GPU, or of the MIG instance, in the tick's `gpus`."""
    pid: Pid
    """Process id in the node's own pid namespace."""
    kind: ProcessKind
    """The driver's list in which it was found; `compute` where it is in more than one."""
    started_boottime_ns: BoottimeNs | None = None
    """Start of the process since the node's boot; with node, boot id and pid its identity."""
    container: Natural | None = None
    """Position of its container, or of its job, in the tick's `containers`; absent for a process
    of the host."""
    memory_used_bytes: MemoryBytes | None = None
    """Device memory it holds at the tick."""
    sm_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which its kernels ran, 0 to 1, by all samples in it."""
    ended: bool | None = None
    """True where it was there at one of the ticks before and is gone: its last kernels may have run
    in the covered interval, and it ran for a part of that at most."""
    encoder_utilization_ratio: Ratio | None = None
    """Share of the covered interval in which the video encoders worked for it, 0 to 1; absent where
    they did not."""
    decoder_utilization_ratio: Ratio | None = None
    """The same of the video decoders."""


class DeviceAllocation(BaseRecord, frozen=True, kw_only=True):
    """A device, or a part of one, that the kubelet has given to a container."""

    # As the kubelet returns it; `ledger.allocated_parts` finds the row of the sample.
    gpu_uuid: Id
    """The GPU on which the device is."""
    device_id: Id
    """The id under which the device plugin knows it, such as a UUID, a MIG id or `UUID::2`."""
    resource_name: QualifiedName
    """The resource under which the pod asked for it, such as `nvidia.com/gpu`."""
    namespace: Label
    """Namespace of the pod."""
    pod: Subdomain
    """Name of the pod: the kubelet's pod-resources interface gives no UID."""
    container: Label
    """Name of the container in the pod."""
    gpu_instance: SmallNatural | None = None
    """Where the device is a MIG instance: the driver's id of the GPU instance."""
    replica: Id | None = None
    """Where the device is one of several shares of a GPU or an instance: the share's name."""
    claim: QualifiedName | None = None
    """Where it was given by a resource claim: the claim, as `namespace/name`."""
    device_replicas: SmallNatural | None = None
    """Where the device is one of several shares: how many of them the kubelet has to give under
    this resource, given or not; absent where it does not say."""
    admin_access: bool | None = None
    """True where it was given by a claim for admin access, which takes it from nobody: it holds
    nothing of the device."""


class JobAllocation(ArrayRecord, frozen=True, kw_only=True):
    """A GPU, or an instance of one, that a scheduler such as Slurm has given to a job."""

    gpu_uuid: Id
    """The GPU on which the device is."""
    job_id: JobId
    """The job, as the scheduler's prolog has written it. Several jobs of one device hold equal
    parts of it."""
    gpu_instance: SmallNatural | None = None
    """Where the device is a MIG instance: the driver's id of the GPU instance."""


class NodeSample(BaseRecord, frozen=True, kw_only=True):
    """One tick of one node: all that the node knew of its GPUs at that instant."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot (`/proc/sys/kernel/random/boot_id`)."""
    seq: Seq
    """Milliseconds since boot at the tick: rises with each tick, restarts of the agent included."""
    # A wall clock, which may be set to anything; order and age come from `seq`.
    time_ns: Natural
    """End of the covered interval, nanoseconds since the epoch: the tick's event time."""
    interval_ns: IntervalNs
    """Length of the covered interval by the monotonic clock: what the shares are shares of."""
    late: bool | None = None
    """True where the tick began more than half a tick after its time."""
    gpus: Annotated[list[GpuReading], at_most(MAX_GPUS)]
    """The readings, one for each GPU of the node; behind a GPU its MIG instances."""
    # Once each, and pointed to: their ids would be most of a tick, repeated by process.
    containers: Annotated[list[ContainerRef], at_most(MAX_CONTAINERS)]
    """The containers and jobs of the tick's processes, of those that have ended too, each once."""
    processes: Annotated[list[GpuProcess], at_most(MAX_PROCESSES)]
    """The processes on the GPUs, one entry for each GPU that a process uses; empty where the agent
    sees another pid namespace than the driver's, as its pids would name other processes."""
    allocations: Annotated[list[DeviceAllocation], at_most(MAX_ALLOCATIONS)]
    """What the kubelet has given to whom; empty where the kubelet does not answer."""
    ended_processes: Annotated[list[ProcessExit], at_most(MAX_ENDED_PROCESSES)] | None = None
    """The processes that are done with a GPU by this tick, where the driver's accounting is on."""
    job_allocations: Annotated[list[JobAllocation], at_most(MAX_JOB_ALLOCATIONS)] | None = None
    """What a scheduler has given to which job, by the directory that its prolog writes; absent
    where it has given nothing, or nobody says."""


class NodeReadings(BaseRecord, frozen=True, kw_only=True):
    """What else a node read in a tick, under the tick's `(cluster, node, boot_id, seq)`."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    seq: Seq
    """Milliseconds since boot at the tick."""
    time_ns: Natural
    """End of the interval that the tick covers, nanoseconds since the epoch."""
    interval_ns: IntervalNs
    """Length of the covered interval by the monotonic clock."""
    gpus: Annotated[list[GpuDetails], at_most(MAX_GPUS)]
    """One for each GPU, and each MIG instance, of which there is something to say."""
