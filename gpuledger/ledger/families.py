"""The table of the series that are made from events and incidents: names, help, labels.

Each name is in one family, and all series of a family describe the same kind of thing, so a sum
over a name never counts anything twice. GPUs, their MIG instances and the categories on which they
are booked therefore have different names. The nodes' metrics use other names again
(`gpuledger_node_gpu_…`), because one Prometheus may scrape these too. Containers and categories
have a series for each booked quantity, averaged over the tick. Allocations have separate series,
because they are independent of use.

A series' labels do not change while the thing exists. The method of a value and the owner and
labels of a pod are on info series with value 1, which queries join.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gpuledger.ledger.quantities import ALLOCATED_NS, APPORTIONED, BOOKED


class OverInterval(Enum):
    """How the values of several ticks are combined into one value for an interval."""

    MEAN = "mean"
    """The mean, and the maximum as a separate metric."""
    SUM = "sum"
    """The sum, for values that measure only the tick."""
    LAST = "last"
    """The last value."""


class SharedOfDevice(Enum):
    """Whether the series groups of a device divide its use or its allocation among them.

    Families with the same value have the same quantities.
    """

    USE = "use"
    """Time, memory and energy, divided among containers and categories other than `pod`."""
    ALLOCATIONS = "allocations"
    """Allocated time, divided among the containers and jobs to which the device is allocated."""


@dataclass(frozen=True, kw_only=True)
class FamilyMetric:
    """One metric of a family."""

    name: str
    """Name with the base unit at the end."""
    help: str
    """Help text of one sentence."""
    kind: str = "gauge"
    """Prometheus type."""
    over_interval: OverInterval = OverInterval.MEAN
    """How values combine over an interval."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Metrics with the same labels."""

    labels: tuple[str, ...]
    """Names of the labels after `node`, in the order of the label values."""
    metrics: tuple[FamilyMetric, ...]
    """Metrics, in the order of the values."""
    shares: SharedOfDevice | None = None
    """Set if the family's groups divide the use or the allocation of a device among them. The first
    label is then the device's UUID. The means of these groups must add up to the device's mean.
    Therefore, if a group has no value in a tick, but another group of the device has one, even in
    another family, the tick counts as 0. Families with the same `shares` have the same quantities
    in the same order."""
    identity: tuple[str, ...] | None = None
    """For families that describe a thing, such as a pod: the labels that identify the thing. Its
    other labels may change. In an interval, a thing is described once, with its last labels."""


BOOKED_OF_USERS: Final = tuple(quantity for quantity in BOOKED if not quantity.is_of_allocations)
QUANTITIES_OF_USERS: Final = (*BOOKED_OF_USERS, *APPORTIONED)
"""The quantities of containers and categories, in the order of a group's values."""


class DeviceLabels(NamedTuple):
    """The labels of a device's readings."""

    gpu_uuid: str
    gpu_index: str
    """For display only: another GPU may have the index after the driver is reloaded. Booked series,
    which continue over a reload, therefore lack this label."""
    model: str


class InstanceLabels(NamedTuple):
    """Additional labels of a MIG instance; empty if not applicable or unknown."""

    parent_uuid: str
    gpu_instance: str
    compute_instance: str
    mig_profile: str


class ContainerLabels(NamedTuple):
    """The labels of a container; empty if unknown."""

    namespace: str
    pod: str
    pod_uid: str
    container: str


class AllocationLabels(NamedTuple):
    """The labels of the container or job to which a device, or a part of a device, is allocated.

    All labels are empty if the device or part is not allocated.
    """

    allocated_namespace: str = ""
    allocated_pod: str = ""
    allocated_pod_uid: str = ""
    allocated_container: str = ""
    allocated_pod_state: str = ""
    """The pod's state; empty if the pod is known, to save a label, because its names show that.
    `unknown` if the allocation is unknown."""
    allocated_job_id: str = ""
    """The job, if it is not a pod's."""


class PodInfoLabels(NamedTuple):
    """The labels that describe a pod; the pod's own labels that the settings select follow them."""

    namespace: str
    pod: str
    pod_uid: str
    owner_kind: str
    owner_name: str


class NodeInfoLabels(NamedTuple):
    """The labels that describe a node; its own labels that the settings select follow them."""

    # Prefixed, because installations use `region` and `zone` as external labels.
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
            help="Whether the GPU responds (1 = yes, 0 = no, but it is known).",
            over_interval=OverInterval.LAST,
        ),
        FamilyMetric(
            name="gpuledger_gpu_utilization_ratio",
            help="Fraction of the sampling interval in which at least one kernel ran.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_utilization_ratio",
            help="Fraction of the sampling interval in which the memory controller was busy.",
        ),
        FamilyMetric(
            name="gpuledger_gpu_memory_used_bytes",
            help="Device memory in use, without memory reserved by the driver.",
        ),
        FamilyMetric(name="gpuledger_gpu_memory_total_bytes", help="Size of the device memory."),
        FamilyMetric(
            name="gpuledger_gpu_memory_reserved_bytes",
            help="Device memory reserved by the driver and the firmware.",
        ),
        FamilyMetric(name="gpuledger_gpu_power_watts", help="Power draw."),
        FamilyMetric(
            # Not `…_energy_joules_total`, which is the attributed energy.
            name="gpuledger_gpu_energy_counter_joules_total",
            help="Energy used according to the driver's counter; restarts when the driver is"
            " loaded.",
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
            help="Length of an interval in which the GPU did not respond, so that nothing is known"
            " about it. Only such intervals have a sample.",
            over_interval=OverInterval.SUM,
        ),
    ),
)
INSTANCE: Final = Family(
    labels=(*DeviceLabels._fields, *InstanceLabels._fields),
    metrics=(
        FamilyMetric(
            name="gpuledger_mig_instance_utilization_ratio",
            help="Fraction of the sampling interval in which the MIG instance's engine was busy,"
            " from the chip's counters.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_used_bytes",
            help="Instance memory in use, without the driver's reserved memory. Compute instances"
            " that share a memory report it once.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_total_bytes",
            help="Size of the instance's memory, a part of the GPU's memory.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_memory_reserved_bytes",
            help="Instance memory reserved by the driver and the firmware.",
        ),
        FamilyMetric(
            name="gpuledger_mig_instance_gap_seconds",
            help="Length of an interval in which the instance did not respond. Only such intervals"
            " have a sample.",
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
            help="Description of each GPU and MIG instance, also of unresponsive ones, for joins"
            " with booked series. Always 1.",
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
            help="Method by which the quantity (`busy`, `memory`, `energy`, `allocated`) was split"
            " among the device's entries. Always 1.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
NODE: Final = Family(
    labels=(),
    metrics=(
        FamilyMetric(
            name="gpuledger_node_last_sample_timestamp_seconds",
            help="Event time of the node's last sample: end of its interval, since the epoch.",
            over_interval=OverInterval.LAST,
        ),
        FamilyMetric(
            name="gpuledger_node_gap_seconds",
            help="Time before the sampling interval that no sample of the node covers. Only the"
            " first sample after a gap has one.",
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
            help="Amount of a resource that the container requests, in the resource's unit (GPUs,"
            " instances, shares), while it uses GPUs or has them allocated.",
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
            help="Description of each pod that uses GPUs or has them allocated: its workload and,"
            " as `label_…`, its labels that `remote_write.pod_labels` lists. Always 1.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
POD_DELETED: Final = Family(
    labels=("namespace", "pod", "pod_uid"),
    identity=("pod_uid",),
    metrics=(
        FamilyMetric(
            name="gpuledger_pod_deleted_timestamp_seconds",
            help="Time at which the API server deleted the pod, since the epoch. Only for deleted"
            " pods that still use GPUs or have them allocated.",
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
            help="Description of each namespace of these pods: as `label_…`, its labels that"
            " `remote_write.namespace_labels` lists; sent only if that is set. Always 1.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
NODE_INFO: Final = Family(
    labels=NodeInfoLabels._fields,
    identity=(),
    metrics=(
        FamilyMetric(
            # `gpuledger_node_info` is one of the agent's own metrics.
            name="gpuledger_node_description_info",
            help="Description of the node: its properties in the cluster and, as `label_…`, its"
            " labels that `remote_write.node_labels` lists. Always 1.",
            over_interval=OverInterval.LAST,
        ),
    ),
)
INCIDENTS: Final = Family(
    labels=("gpu_uuid", "kind"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_incidents_total",
            help="Total number of incidents of the GPU by kind; `other` for unknown kinds.",
            kind="counter",
        ),
    ),
)
XID_ERRORS: Final = Family(
    labels=("gpu_uuid", "xid"),
    metrics=(
        FamilyMetric(
            name="gpuledger_gpu_xid_errors_total",
            help="Total number of XIDs of the GPU by code; `other` for codes not in NVIDIA's"
            " catalogue. Starts with the first XID, which an increase includes.",
            kind="counter",
        ),
    ),
)
INCIDENT_FAMILIES: Final = (INCIDENTS, XID_ERRORS)
"""The families of GPU incidents; only remote-write has them, from the incidents' topic."""
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
    POD_DELETED,
    NAMESPACE_INFO,
    NODE_INFO,
)
