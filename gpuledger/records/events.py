"""An attributed tick: each GPU's readings, and the entries that add up to them.

This module holds the records of `gpuledger.events.v1`. The join decides how quantities are split.
Values that can be computed from an entry and its reading are not stored here; for example,
`gpuledger.ledger.quantities` apportions the chip's counters.
"""

from typing import Annotated

from gpuledger.records.base import (
    ArrayRecord,
    BaseRecord,
    BootId,
    ClusterName,
    Integer,
    Natural,
    NodeName,
    OpenEnum,
    Seq,
    SmallNatural,
)
from gpuledger.records.bounds import (
    MAX_ALLOCATIONS,
    MAX_CLAIMS,
    MAX_CONTAINERS,
    MAX_ENDED_PROCESSES,
    MAX_ENTRIES,
    MAX_EVENT_PODS,
    MAX_GPUS,
    MAX_POD_CONTAINERS,
    MAX_RESOURCES,
    Annotations,
    BoottimeNs,
    Id,
    IntervalNs,
    JobId,
    Label,
    Labels,
    QualifiedName,
    Subdomain,
    Word,
    at_most,
)
from gpuledger.records.cluster import ContainerRequest
from gpuledger.records.readings import BusyMethod, EnergyMethod, GpuReading


class Category(OpenEnum):
    """Kind of an entry's user."""

    POD = "pod"
    HOST = "host"
    UNATTRIBUTED = "unattributed"
    IDLE = "idle"
    JOB = "job"


class MemoryMethod(OpenEnum):
    """How the memory of a device's entries was determined."""

    MEASURED = "measured"
    SCALED = "scaled"
    APPORTIONED = "apportioned"
    UNIFIED = "unified"


class AllocatedMethod(OpenEnum):
    """How the allocated time of a device's entries was determined."""

    SCALED = "scaled"


class IdleDrawSource(OpenEnum):
    """Source of the GPU's idle draw, its power without work, by which the energy was split."""

    MEASURED = "measured"
    TABLE = "table"


class PodState(OpenEnum):
    """How much the join knows about a pod that has entries or allocations.

    If a pod's record has been read, the pod is `known`, or `foreign` if the record names another
    node. Otherwise, the pod is `named` if the kubelet's allocations contain its namespace and name,
    or `pending` if only its UID or a container id is known. The state does not affect the amounts.
    In flat rows and series, an allocation is `unknown` if its entry has `allocation_unknown`.
    """

    KNOWN = "known"
    NAMED = "named"
    PENDING = "pending"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


class Entry(ArrayRecord, frozen=True, kw_only=True):
    """One category's use of one GPU in one sample, in whole numbers."""

    category: Category
    """Category of the use: `pod`, `job`, `host`, `unattributed` or `idle`."""
    container: Natural | None = None
    """For category `pod`: position of its container in the event's `containers`."""
    busy_ns: Integer | None = None
    """Time in which its kernels ran; for `idle`: in which no kernel ran; absent without a reading.
    Negative only for `unattributed` in a late adjustment."""
    memory_bytes: Natural | None = None
    """Device memory in use over the sample; for `idle`: free memory; absent without a reading."""
    energy_millijoules: Natural | None = None
    """Energy used; absent if the GPU reports neither energy nor power."""
    allocation: Natural | None = None
    """For `idle`: position in the event's `allocations` of the container to which this unused part
    is allocated; absent if there is none."""
    allocated_ns: Natural | None = None
    """For `idle`: how much of the device is allocated this way, used or not, as time: half of the
    device is half of the interval. Adds up to the interval for each device, also an unresponsive
    one."""
    job_id: JobId | None = None
    """For `job`: the job of a scheduler such as Slurm. For `idle`: the job to which this unused
    part is allocated, according to the scheduler's directory."""
    allocation_unknown: bool | None = None
    """For `idle`: true if it is unknown whether and to whom this part is allocated
    (`allocations_unknown` in the sample)."""


class PodDescription(BaseRecord, frozen=True, kw_only=True):
    """Identity of a pod at the time of a sample or incident, from the pod records read by then."""

    uid: Id | None = None
    """UID of the pod; absent if the node reported only a container id or a name."""
    state: PodState
    """`known` if a pod record names this node, `foreign` if it names another node. Without a
    record, `named` if the sample's allocations identify the pod, otherwise `pending`."""
    namespace: Label | None = None
    """Its namespace, if known or named."""
    name: Subdomain | None = None
    """Its name, if known or named."""
    owner_kind: Word | None = None
    """Kind of its workload, such as `Deployment`."""
    owner_name: Subdomain | None = None
    """Name of its workload."""
    labels: Labels | None = None
    """The labels that podwatch is configured to keep."""
    requested: Annotated[dict[Label, ContainerRequest], at_most(MAX_POD_CONTAINERS)] | None = None
    """Requests of its containers that are in this event, by container name, from the pod's spec;
    allocations come from the kubelet instead."""
    # Processes may outlive their pod by the kubelet's grace period, longer if the node hangs.
    deleted_time_ns: Natural | None = None
    """When the pod disappeared from the API server, if its processes outlive it."""


class NodeDescription(BaseRecord, frozen=True, kw_only=True):
    """Properties of a node at the time of a sample, from the node records read by then."""

    pool: Label | None = None
    """Its node pool or node group."""
    instance_type: Label | None = None
    """The provider's machine type, such as `p5.48xlarge`."""
    zone: Label | None = None
    """The provider's zone."""
    region: Label | None = None
    """The provider's region."""
    capacity_type: Label | None = None
    """How the capacity was bought: `spot`, `on_demand`, `reserved`, or another label value."""
    labels: Labels | None = None
    """The labels that podwatch is configured to keep; absent if the node has none of them."""


class NamespaceDescription(BaseRecord, frozen=True, kw_only=True):
    """Properties of a namespace at the time of a sample, from the records read by then."""

    name: Label
    """The namespace's name."""
    labels: Labels | None = None
    """The labels that podwatch is configured to keep; absent if the namespace has none of them."""
    annotations: Annotations | None = None
    """The annotations that podwatch is configured to keep; absent if there are none of them."""


class EventContainer(ArrayRecord, frozen=True, kw_only=True):
    """A container that has entries."""

    container_id: Id | None = None
    """The runtime's id, from the cgroup path; absent if the path names only a pod."""
    pod: Natural | None = None
    """Position of its pod in the event's `pods`; absent if the cgroup path names neither container
    nor pod."""
    name: Label | None = None
    """Name of the container, if the pod's record has it."""


class EventAllocation(ArrayRecord, frozen=True, kw_only=True):
    """A container to which the kubelet has allocated devices or parts of devices."""

    pod: Natural
    """Position of its pod in the event's `pods`."""
    container: Label
    """Name of the container, from the kubelet."""
    resources: Annotated[list[QualifiedName], at_most(MAX_RESOURCES)]
    """Resource names of the allocated devices, such as `nvidia.com/gpu`, sorted."""
    claims: Annotated[list[QualifiedName], at_most(MAX_CLAIMS)] | None = None
    """Resource claims by which they were allocated, as `namespace/name`, sorted."""


class GpuBooks(BaseRecord, frozen=True, kw_only=True):
    """One GPU in one sample: its readings, and the entries among which they are divided."""

    # Included so that an event can be checked without the tick.
    reading: GpuReading
    """The unchanged readings from the node."""
    entries: Annotated[list[Entry], at_most(MAX_ENTRIES)]
    """The entries; for each quantity they add up exactly to the device's total."""
    busy_method: BusyMethod | None = None
    """How the entries' busy time was determined. Measured: `exclusive`, because one category had
    everything; `process_utilization`, from samples of each process; `accounting`, in late
    adjustments. Modelled from such samples: `equal_turns`. Estimated: `partial_samples`, from
    samples that show only a part of the use; `sampled`, from a part of the interval. Apportioned:
    `mps_server`, by its clients; `memory_share`, by each one's memory; `equal_share`, in equal
    parts. Absent without a reading of use."""
    memory_method: MemoryMethod | None = None
    """How the entries' memory was determined. `measured`: per process. `scaled`: processes reported
    more than is in use. `apportioned`: all memory in use belongs to the only category on the
    device. `unified`: the memory belongs to the machine. Absent without a reading of memory."""
    energy_method: EnergyMethod | None = None
    """For a MIG instance, whose own reading lacks it: how the energy of its GPU was determined. Its
    entries have a part of that energy. Absent without energy."""
    allocated_method: AllocatedMethod | None = None
    """`scaled` if more than the device is allocated, such as the whole GPU to two containers: each
    part is divided by the sum of the parts. Otherwise absent."""
    idle_draw_milliwatts: Natural | None = None
    """The GPU's idle draw from the table, if the split of energy used it; absent if the reading has
    the GPU's own idle draw."""
    idle_draw_source: IdleDrawSource | None = None
    """The idle draw that the split of energy used: `measured` on the GPU and in its reading, or
    from the `table` of products. Absent if neither is known, and for MIG instances, whose energy is
    a part of their GPU's."""
    gap_ns: Natural | None = None
    """If the GPU did not answer: the interval, for which only allocations are known."""
    compute_slices: SmallNatural | None = None
    """Compute slices of this row: an instance's own, or for a GPU in MIG mode those without an
    instance. The rows of a GPU add up to `gpu_compute_slices`. Like the next three, absent for a
    GPU that is not partitioned, for which the reading's slices apply."""
    memory_slices: SmallNatural | None = None
    """Memory slices of this row, in the same way; slices that compute instances share are on the
    first one's row."""
    gpu_compute_slices: SmallNatural | None = None
    """Compute slices of the physical GPU; absent if that is not in the sample."""
    gpu_memory_slices: SmallNatural | None = None
    """Memory slices of the physical GPU."""


class LateAdjustment(BaseRecord, frozen=True, kw_only=True):
    """Busy time of a process that earlier samples missed, attributed to it after it ended."""

    gpu: Natural
    """Position of the GPU in the event's `gpus`."""
    pid: Natural
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs
    """Start of the process since the node's boot."""
    from_seq: Seq
    """The first of the samples in which it used the GPU."""
    from_time_ns: Natural
    """Start of that sample's interval, nanoseconds since the epoch."""
    until_seq: Seq
    """The last of these samples."""
    until_time_ns: Natural
    """End of that sample's interval, nanoseconds since the epoch."""
    entries: Annotated[list[Entry], at_most(MAX_ENTRIES)]
    """Busy time added to the process's category, and the same amount subtracted from
    `unattributed`; adds up to zero."""
    busy_method: BusyMethod
    """How it was determined: `accounting`, from the driver's accounting of the process."""


class GpuEvent(BaseRecord, frozen=True, kw_only=True):
    """One attributed sample of one node. `(cluster, node, boot_id, seq)` is its identity."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """The sample's number within the boot, from the agent."""
    time_ns: Natural
    """End of the covered interval, nanoseconds since the epoch."""
    interval_ns: IntervalNs
    """Length of the covered interval."""
    late: bool | None = None
    """True if the node began the sample late, or if the sample came more than 30 s after its
    partition had passed it."""
    gap_ns: Natural | None = None
    """Time between this interval and the previous sample that no sample covers."""
    gpus: Annotated[list[GpuBooks], at_most(MAX_GPUS)]
    """Readings and entries of each GPU of the node, including GPUs that did not answer."""
    pods: Annotated[list[PodDescription], at_most(MAX_EVENT_PODS)]
    """The pods that have entries or allocations, each once."""
    containers: Annotated[list[EventContainer], at_most(MAX_CONTAINERS)]
    """The containers that have entries, in the sample's order."""
    allocations: Annotated[list[EventAllocation], at_most(MAX_ALLOCATIONS)]
    """The containers to which GPUs are allocated, including those that run nothing there, by the
    kubelet's names: namespace, pod, container."""
    namespaces: Annotated[list[NamespaceDescription], at_most(MAX_EVENT_PODS)] | None = None
    """Known namespaces of these pods, by name; absent if none is known."""
    node_description: NodeDescription | None = None
    """Properties of the node; absent if nothing is known about it."""
    late_adjustments: Annotated[list[LateAdjustment], at_most(MAX_ENDED_PROCESSES)] | None = None
    """Adjustments to this sample and earlier ones, for processes that have ended."""
