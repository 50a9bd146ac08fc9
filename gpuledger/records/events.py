"""What a tick comes to once it is booked: each GPU's readings and the entries that sum to it.

Here live the records of `gpuledger.events.v1`. How a quantity is split is the join's business. What
follows from an entry and its reading is not written again: who worked how much of the chip is
`gpuledger.ledger.quantities`'s.
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
    """To whom a quantity is debited."""

    POD = "pod"
    HOST = "host"
    UNATTRIBUTED = "unattributed"
    IDLE = "idle"
    JOB = "job"


class MemoryMethod(OpenEnum):
    """How the memory of a device's entries was found."""

    MEASURED = "measured"
    SCALED = "scaled"
    APPORTIONED = "apportioned"
    UNIFIED = "unified"


class IdleDrawSource(OpenEnum):
    """Where the idle draw comes from by which energy was split."""

    MEASURED = "measured"
    TABLE = "table"


class PodState(OpenEnum):
    """Whether a pod on which something is booked, or that holds something, was known.

    All names stand beside `known`, namespace and name alone beside `named`: they are the kubelet's
    word, by what it has allocated to whom. None of this changes what is booked.
    """

    KNOWN = "known"
    NAMED = "named"
    PENDING = "pending"
    FOREIGN = "foreign"


class Entry(ArrayRecord, frozen=True, kw_only=True):
    """What one category used of one GPU in one tick, in whole numbers."""

    category: Category
    """Whose it is: a pod's, a job's, the host's, nobody's or idle."""
    container: Natural | None = None
    """On a pod's category: position in the event's `containers` of the one it ran in."""
    busy_ns: Integer | None = None
    """Time in which its kernels ran; on `idle`: in which none ran; absent without a reading. Below
    zero on `unattributed` in a late adjustment alone."""
    memory_bytes: Natural | None = None
    """Memory in use over the tick; on `idle`: free memory; absent without a reading."""
    energy_millijoules: Natural | None = None
    """Energy; absent on a GPU that gives neither energy nor power."""
    allocation: Natural | None = None
    """On `idle`: position in the event's `allocations` of the container to which this unused part
    is allocated; absent if it is not allocated to a container."""
    allocated_ns: Natural | None = None
    """On `idle`: how much of the device is allocated so, used or not, as time: of a half of it,
    half of the interval. Over a device they sum to that, also where it does not answer."""
    job_id: JobId | None = None
    """On `job`: the job of a scheduler such as Slurm; on `idle`: the job to which this
    unused part is allocated, if the scheduler's own directory says so."""


class PodDescription(BaseRecord, frozen=True, kw_only=True):
    """Who a pod is, by the version of it in force at that time, as far as the join had read."""

    uid: Id | None = None
    """The pod's UID; absent where the node said only a container id, or a name."""
    state: PodState
    """`known` where a pod record that names this node has come, `foreign` where one has come that
    names another node; where none has, `named` if the tick's allocations tell whose it is, and
    `pending` if they do not."""
    namespace: Label | None = None
    """Its namespace, once known or named."""
    name: Subdomain | None = None
    """Its name, once known or named."""
    owner_kind: Word | None = None
    """Kind of its workload, such as `Deployment`."""
    owner_name: Subdomain | None = None
    """Name of its workload."""
    labels: Labels | None = None
    """The labels that the pod watch was asked to keep."""
    requested: Annotated[dict[Label, ContainerRequest], at_most(MAX_POD_CONTAINERS)] | None = None
    """What those of its containers ask for that are on this event, by the container's name, as the
    pod's spec says it: what they hold is what the kubelet gave them."""
    # Processes may outlive their pod by the grace of the kubelet, and longer on a node that hangs.
    deleted_time_ns: Natural | None = None
    """Since when the pod is gone from the API server, where its processes outlive it."""


class NodeDescription(BaseRecord, frozen=True, kw_only=True):
    """What a node is, by the version of its object in force at that time, as far as it was read."""

    pool: Label | None = None
    """The node pool or node group that it belongs to."""
    instance_type: Label | None = None
    """The provider's name of the kind of machine, such as `p5.48xlarge`."""
    zone: Label | None = None
    """The provider's zone."""
    region: Label | None = None
    """The provider's region."""
    capacity_type: Label | None = None
    """How its capacity was bought: `spot`, `on_demand`, `reserved`, or what else a label says."""
    labels: Labels | None = None
    """The labels that podwatch was asked to keep; absent where it has none of them."""


class NamespaceDescription(BaseRecord, frozen=True, kw_only=True):
    """What is said of a namespace by the version in force at that time, as far as it was read."""

    name: Label
    """The namespace's name."""
    labels: Labels | None = None
    """The labels that podwatch was asked to keep; absent where it has none of them."""
    annotations: Annotations | None = None
    """The annotations that podwatch was asked to keep; absent where it has none of them."""


class EventContainer(ArrayRecord, frozen=True, kw_only=True):
    """A container on which an entry is booked."""

    container_id: Id | None = None
    """The runtime's id, as the cgroup path has it; absent where that shows only a pod."""
    pod: Natural | None = None
    """Position of its pod in the event's `pods`; absent where the path shows neither."""
    name: Label | None = None
    """The container's name, where the pod's record has it."""


class EventAllocation(ArrayRecord, frozen=True, kw_only=True):
    """A container to which the kubelet has given devices, or parts of them."""

    pod: Natural
    """Position of its pod in the event's `pods`."""
    container: Label
    """The container's name, as the kubelet has it."""
    resources: Annotated[list[QualifiedName], at_most(MAX_RESOURCES)]
    """The resources under which they were given, such as `nvidia.com/gpu`, sorted."""
    claims: Annotated[list[QualifiedName], at_most(MAX_CLAIMS)] | None = None
    """The resource claims by which they were given, as `namespace/name`, sorted."""


class GpuBooks(BaseRecord, frozen=True, kw_only=True):
    """One GPU in one tick: what it read, and on whom that is booked."""

    # Carried along, so that an event can be checked without the tick.
    reading: GpuReading
    """The readings, as the node gave them."""
    entries: Annotated[list[Entry], at_most(MAX_ENTRIES)]
    """The entries; for each quantity they sum to the device, to the last unit."""
    busy_method: BusyMethod | None = None
    """How the busy time of the entries was found: `exclusive` (one category had all that was busy),
    `process_utilization` (samples of each process), `equal_turns` and `mps_server` (what was made
    of such samples), `memory_share` (by the memory that each used) or `equal_share`; absent without
    a reading of use."""
    memory_method: MemoryMethod | None = None
    """How their memory was found: `measured` (of each process), `scaled` (processes claimed more
    than is in use) or `apportioned` (the only ones on the device have what is in use); absent
    without a reading of memory."""
    energy_method: EnergyMethod | None = None
    """On a MIG instance, whose reading does not say it: how the energy was found that its entries
    have of the physical GPU's, as its reading says; absent without energy."""
    idle_draw_milliwatts: Natural | None = None
    """What the physical GPU draws idle by the table, if energy was split by that; absent if the
    reading has the GPU's own idle draw."""
    idle_draw_source: IdleDrawSource | None = None
    """By which idle draw energy was split: the one `measured` on the GPU, which the reading has,
    or the `table`'s for its product; absent where none is known, and on a MIG instance, whose
    energy is divided from the physical GPU's."""
    gap_ns: Natural | None = None
    """Where the GPU did not answer: the interval, of which only the allocations are known."""
    compute_slices: SmallNatural | None = None
    """Compute slices of this row alone: of an instance its own, of a GPU in MIG mode those that no
    instance has. Those of a physical GPU's rows sum to `gpu_compute_slices`. Absent, as the
    next three are, on a GPU that is not cut: there the reading's are its own and the physical
    GPU's."""
    memory_slices: SmallNatural | None = None
    """Memory slices of this row alone, in the same way; those that compute instances share stand
    with the first of them."""
    gpu_compute_slices: SmallNatural | None = None
    """Compute slices of the physical GPU; absent if that is not in the tick."""
    gpu_memory_slices: SmallNatural | None = None
    """Memory slices of the physical GPU."""


class LateAdjustment(BaseRecord, frozen=True, kw_only=True):
    """What a process used of a GPU while ticks saw nobody there, booked on it after its end."""

    gpu: Natural
    """Position of the GPU in the event's `gpus`."""
    pid: Natural
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs
    """Start of the process since the node's boot."""
    from_seq: Seq
    """The first of the ticks in which it was used."""
    from_time_ns: Natural
    """Where that tick's interval begins, nanoseconds since the epoch."""
    until_seq: Seq
    """The last of these ticks."""
    until_time_ns: Natural
    """Where that tick's interval ends, nanoseconds since the epoch."""
    entries: Annotated[list[Entry], at_most(MAX_ENTRIES)]
    """What is booked on it, and as much less on `unattributed`: busy time that sums to zero."""
    busy_method: BusyMethod
    """How it was found: `accounting`, by the driver's account of the process."""


class GpuEvent(BaseRecord, frozen=True, kw_only=True):
    """One tick of one node, booked. `(cluster, node, boot_id, seq)` is its identity."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of the boot."""
    seq: Seq
    """The tick's number within the boot, as the agent gave it."""
    time_ns: Natural
    """End of the covered interval, nanoseconds since the epoch."""
    interval_ns: IntervalNs
    """Length of the covered interval."""
    late: bool | None = None
    """True where the node began the tick late, or it came more than 30 s behind what its partition
    had reached."""
    gap_ns: Natural | None = None
    """Time right before the interval, and after the tick booked before, that no tick covers."""
    gpus: Annotated[list[GpuBooks], at_most(MAX_GPUS)]
    """The books of each GPU of the node, those that did not answer included."""
    pods: Annotated[list[PodDescription], at_most(MAX_EVENT_PODS)]
    """Who the pods are on whom entries are booked, and those that hold GPUs; each once."""
    containers: Annotated[list[EventContainer], at_most(MAX_CONTAINERS)]
    """The containers on which entries are booked, in the tick's order."""
    allocations: Annotated[list[EventAllocation], at_most(MAX_ALLOCATIONS)]
    """The containers that hold GPUs, also where they run nothing there, by namespace, pod and
    container as the kubelet names them."""
    namespaces: Annotated[list[NamespaceDescription], at_most(MAX_EVENT_PODS)] | None = None
    """The namespaces of these pods of which something is known, by name; absent where of none."""
    node_description: NodeDescription | None = None
    """What the node is; absent where nothing is known of it."""
    late_adjustments: Annotated[list[LateAdjustment], at_most(MAX_ENDED_PROCESSES)] | None = None
    """What is booked of the ticks before, and of this one, on processes that ended."""
