"""The table of the series that are made of events and incidents: names, help, labels.

A name is in one family, and a family's series are of different
things: a sum over a name counts nothing twice. So a GPU, the MIG instances into which it is cut and
the accounts on which it is booked have names of their own, and none is a name of the nodes' pages
(`gpuledger_node_gpu_…`), which one Prometheus may well scrape. Containers and accounts have a
series of each quantity of the books, averaged over the tick; what is held stands apart, by holder,
as it says nothing of use.

A series is of a thing, and its labels do not change while the thing is there: how a value was
found, to whom a pod belongs and how it is labelled stand on info series, whose value is 1, and
which a query joins.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gpuledger.ledger.quantities import ALLOCATED_NS, APPORTIONED, BOOKED


class OverInterval(Enum):
    """What a metric's value is over an interval of several ticks."""

    MEAN = "mean"
    """Its mean, and its maximum in a metric of its own."""
    SUM = "sum"
    """Its sum: what it measures is of the tick alone."""
    LAST = "last"
    """The last one."""


class SharedOfDevice(Enum):
    """What of a device its groups share: the families of one kind have the same quantities."""

    USE = "use"
    """Its time, memory and energy: by containers, and by accounts that are no container's."""
    ALLOCATIONS = "allocations"
    """Who holds it."""


@dataclass(frozen=True, kw_only=True)
class FamilyMetric:
    """One metric of a family."""

    name: str
    """Its name, with the base unit at the end."""
    help: str
    """What it says, as a sentence."""
    kind: str = "gauge"
    """Its Prometheus type."""
    over_interval: OverInterval = OverInterval.MEAN
    """What it is over an interval."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Metrics with the same labels."""

    labels: tuple[str, ...]
    """Names of the labels beside `node`, in the order in which values are given."""
    metrics: tuple[FamilyMetric, ...]
    """The metrics, in the order in which values are given."""
    shares: SharedOfDevice | None = None
    """What its groups share of a device, whose UUID is their first label: a tick in which one of
    them has no value, and another one has, be it of another family, counts as 0 in its mean, so
    that means sum up, too. Families that share the same have the same quantities, in one order."""
    identity: tuple[str, ...] | None = None
    """Where it describes a thing: the labels by which that is known, as others may change. Over an
    interval a thing is described once, as it was last."""


BOOKED_OF_USERS: Final = tuple(quantity for quantity in BOOKED if not quantity.is_of_allocations)
QUANTITIES_OF_USERS: Final = (*BOOKED_OF_USERS, *APPORTIONED)
"""The quantities of containers and accounts, in the order in which a group has their values."""


class DeviceLabels(NamedTuple):
    """The labels of what is read of a device."""

    gpu_uuid: str
    gpu_index: str
    """For people, and no identity: it may be another GPU's once the driver was loaded again. So it
    is no label of what is booked, which goes on over such a load."""
    model: str


class InstanceLabels(NamedTuple):
    """The further labels of a MIG instance; empty where they do not apply, or are unknown."""

    parent_uuid: str
    gpu_instance: str
    compute_instance: str
    mig_profile: str


class ContainerLabels(NamedTuple):
    """The labels of a container; empty where they are unknown."""

    namespace: str
    pod: str
    pod_uid: str
    container: str


class AllocationLabels(NamedTuple):
    """The labels of who holds a part of a device; all empty of what nobody holds."""

    allocated_namespace: str = ""
    allocated_pod: str = ""
    allocated_pod_uid: str = ""
    allocated_container: str = ""
    allocated_pod_state: str = ""
    """Empty where the pod is known: its names say so, and it is one label less to write."""
    allocated_job_id: str = ""
    """The job where it is none of a pod's."""


class PodInfoLabels(NamedTuple):
    """The labels of what a pod is, before those of its own that are chosen."""

    namespace: str
    pod: str
    pod_uid: str
    owner_kind: str
    owner_name: str


class NodeInfoLabels(NamedTuple):
    """The labels of what the cluster says of a node, before those of its own that are chosen."""

    # `region` and `zone` are what installations give their series as external labels.
    node_pool: str
    node_instance_type: str
    node_zone: str
    node_region: str
    node_capacity_type: str


DEVICE: Final = Family(
    labels=DeviceLabels._fields,
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_up",
            help="1 while the GPU answers; 0 where it is known and does not.",
            over_interval=OverInterval.LAST,
        ),
        FamilyMetric(
            name="gpuledger_gpu_utilization_ratio",
            help="Share of the tick in which at least one kernel ran.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_utilization_ratio",
            help="Share of the tick in which the memory controller was busy.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_used_bytes",
            help="Device memory in use, without what the driver reserved.",
        ),
        FamilyMetric(name="gpuledger_gpu_memory_total_bytes", help="Size of the device memory."),
        FamilyMetric(
            name="gpuledger_gpu_memory_reserved_bytes",
            help="Device memory that the driver and the firmware keep for themselves.",
        ),
        FamilyMetric(name="gpuledger_gpu_power_watts", help="Power draw."),
        FamilyMetric(
            # Not `…_energy_joules_total`, which is what the books come to.
            name="gpuledger_gpu_energy_counter_joules_total",
            help="The driver's energy counter; it starts again when the driver is loaded.",
            kind="counter",
            over_interval=OverInterval.LAST,
        ),
        FamilyMetric(name="gpuledger_gpu_temperature_celsius", help="Temperature of the die."),
        FamilyMetric(
            name="gpuledger_gpu_sm_clock_hertz", help="Clock of the streaming multiprocessors."
        ),
        FamilyMetric(name="gpuledger_gpu_memory_clock_hertz", help="Clock of the device memory."),
        FamilyMetric(
            name="gpuledger_gpu_gap_seconds",
            help="Length of the tick where the GPU did not answer, so that nothing of it is known;"
            " there is a sample in such ticks alone.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
INSTANCE: Final = Family(
    labels=(*DeviceLabels._fields, *InstanceLabels._fields),
    metrics=(
        FamilyMetric(
            name="gpuledger_mig_instance_utilization_ratio",
            help="Share of the tick in which the MIG instance's engine was busy, by the chip's own "
            "counters.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_used_bytes",
            help="The instance's memory in use, without what the driver reserved; compute "
            "instances that share one memory report it once.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_total_bytes",
            help="Size of the instance's memory, which is a part of the GPU's.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_reserved_bytes",
            help="The instance's memory that the driver and the firmware keep for themselves.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_gap_seconds",
            help="Length of the tick where the instance did not answer; there is a sample in such"
            " ticks alone.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
GPU_INFO: Final = Family(
    labels=(*DeviceLabels._fields, *InstanceLabels._fields),
    identity=("gpu_uuid",),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_info",
            help="1 of each GPU and MIG instance, also while it does not answer: what it is, to"
            " join to what is booked of it.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
METHOD: Final = Family(
    labels=("gpu_uuid", "quantity", "method"),
    identity=("gpu_uuid", "quantity"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_method_info",
            help="1 of the method by which the parts of a quantity (`busy`, `memory`, `energy`)"
            " were found that the tick books of the device.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
NODE: Final = Family(
    labels=(),
    metrics=(
        FamilyMetric(
            name="gpuledger_node_last_sample_timestamp_seconds",
            help="Event time of the node's tick: where its interval ends, since the epoch.",
            over_interval=OverInterval.LAST,
        ),
        FamilyMetric(
            name="gpuledger_node_gap_seconds",
            help="Time right before the tick that no tick of the node covers; there is a sample "
            "at the first tick after such a gap alone.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
POD: Final = Family(
    labels=("gpu_uuid", *ContainerLabels._fields),
    metrics=tuple(
        FamilyMetric(name=f"gpuledger_pod_gpu_{quantity.average}", help=quantity.pod_help)
        for quantity in QUANTITIES_OF_USERS
    ),
    shares=SharedOfDevice.USE,
)
ACCOUNT: Final = Family(
    labels=("gpu_uuid", "category", "job_id", *AllocationLabels._fields),
    metrics=tuple(
        FamilyMetric(name=f"gpuledger_category_gpu_{quantity.average}", help=quantity.category_help)
        for quantity in QUANTITIES_OF_USERS
    ),
    shares=SharedOfDevice.USE,
)
ALLOCATION: Final = Family(
    labels=("gpu_uuid", *AllocationLabels._fields),
    metrics=(
        FamilyMetric(
            name=f"gpuledger_allocation_gpu_{ALLOCATED_NS.average}",
            help=ALLOCATED_NS.category_help,
        ),
        FamilyMetric(
            name="gpuledger_allocation_physical_gpu_ratio",
            help="The same share of the physical GPU, by compute slices. Sums to 1 over the GPU"
            " and its MIG instances.",
        ),
    ),
    shares=SharedOfDevice.ALLOCATIONS,
)
REQUESTED: Final = Family(
    labels=(*ContainerLabels._fields, "resource"),
    identity=("pod_uid", "container", "resource"),
    metrics=(
        FamilyMetric(
            name="gpuledger_pod_gpu_requested",
            help="What the container asks for of a resource by its pod's spec, in the resource's"
            " own unit (GPUs, instances, shares), while it uses or is allocated a GPU.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
POD_INFO: Final = Family(
    labels=PodInfoLabels._fields,
    identity=("pod_uid",),
    metrics=(
        FamilyMetric(
            name="gpuledger_pod_info",
            help="1 of each pod on which something is booked or that holds something: its workload"
            " and, as `label_…`, those of its labels that `remote_write.pod_labels` names.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
NAMESPACE_INFO: Final = Family(
    labels=("namespace",),
    identity=("namespace",),
    metrics=(
        FamilyMetric(
            name="gpuledger_namespace_info",
            help="1 of each namespace of these pods: as `label_…`, those of its labels that"
            " `remote_write.namespace_labels` names; there where one is named.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
NODE_INFO: Final = Family(
    labels=NodeInfoLabels._fields,
    identity=(),
    metrics=(
        FamilyMetric(
            # `gpuledger_node_info` is the node's page's.
            name="gpuledger_node_description_info",
            help="1 of the node: what the cluster says of it and, as `label_…`, those of its labels"
            " that `remote_write.node_labels` names.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
INCIDENTS: Final = Family(
    labels=("gpu_uuid", "kind"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_incidents_total",
            help="Incidents of the GPU by kind, `other` where this version does not know it.",
            kind="counter",
        ),
    ),
)
XID_ERRORS: Final = Family(
    labels=("gpu_uuid", "xid"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_xid_errors_total",
            help="XIDs of the GPU by code, `other` where NVIDIA's catalogue does not have it;"
            " there from the first one on, which an increase has.",
            kind="counter",
        ),
    ),
)
INCIDENT_FAMILIES: Final = (INCIDENTS, XID_ERRORS)
"""The families of what happens to GPUs: remote-write alone has them, from the incidents."""
FAMILIES: Final = (
    DEVICE,
    INSTANCE,
    GPU_INFO,
    METHOD,
    NODE,
    POD,
    ACCOUNT,
    ALLOCATION,
    REQUESTED,
    POD_INFO,
    NAMESPACE_INFO,
    NODE_INFO,
)
