"""Flat rows without nested values: each row is one entry of a device in a tick.

`COLUMNS` is the table of its columns. The record of the topic `gpuledger.rows.v1` and the columns
of the store's table `entries` are made from it, so that a column has the same name, type and
meaning everywhere. To add a column, add one row to the table and, if the event does not have the
value yet, its source in `gpuledger.ledger.entries`. The topic's fields have the order of the table.
Existing tables of the store get a new column at the end; its older rows are null.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

import msgspec

from gpuledger.codegen import FIELD_DOCSTRINGS
from gpuledger.ledger.entries import BookedEntry
from gpuledger.ledger.quantities import APPORTIONED, BOOKED, Quantity
from gpuledger.records.base import (
    BaseRecord,
    BootId,
    ClusterName,
    Natural,
    NodeName,
    Seq,
    SmallNatural,
)
from gpuledger.records.bounds import (
    MAX_RESOURCES,
    Annotations,
    Id,
    JobId,
    Label,
    Labels,
    QualifiedName,
    Subdomain,
    Word,
    at_most,
)
from gpuledger.records.events import AllocatedMethod, Category, Entry, MemoryMethod, PodState
from gpuledger.records.readings import BusyMethod, EnergyMethod


class ColumnType(Enum):
    """Type of a column's values, in all formats."""

    TEXT = "text"
    CODE = "code"
    """A value of an enumeration."""
    POSITION = "position"
    """A small whole number of 32 bits."""
    SEQUENCE = "sequence"
    """A whole number of 64 bits that increases from row to row."""
    QUANTITY = "quantity"
    """A whole number of 64 bits."""
    FLAG = "flag"
    TIME = "time"
    """Nanoseconds since the epoch; written to the microsecond."""
    DAY = "day"
    """The day of a time in UTC."""
    LABELS = "labels"
    """Texts by key."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the flat row."""

    name: str
    """Name with the unit at the end."""
    type: ColumnType
    """Type of its values."""
    source: str
    """The value, as an expression over the fields of a `BookedEntry`."""
    meaning: str = ""
    """Description, used as the docstring of the topic's field."""
    bounds: Any = None
    """Type of the topic's field, with its bounds; absent if the topic does not have it."""
    optional: bool = False
    """Whether the value may be absent."""
    in_store: bool = True
    """Whether the store's table has it."""


_OF_ENTRIES: Final = {field.name: field.type for field in msgspec.structs.fields(Entry)}


def _quantities(quantities: Iterable[Quantity], *, source: str) -> list[Column]:
    return [
        Column(
            name=quantity.name,
            type=ColumnType.QUANTITY,
            source=f"{source}.{quantity.name}",
            # Negative values are allowed if the entry's field allows them; apportioned amounts are
            # never negative.
            bounds=_OF_ENTRIES.get(quantity.name, Natural),
            optional=True,
            meaning=quantity.meaning,
        )
        for quantity in quantities
    ]


def _slices(**meanings: str) -> list[Column]:
    return [
        Column(
            name=name,
            type=ColumnType.POSITION,
            source=f"slices.{name}",
            bounds=SmallNatural,
            optional=True,
            meaning=meaning,
        )
        for name, meaning in meanings.items()
    ]


def _of_node(**meanings: str) -> list[Column]:
    return [
        Column(
            name=name,
            type=ColumnType.TEXT,
            source=f"node.{name.removeprefix('node_')}",
            bounds=Label,
            optional=True,
            meaning=meaning,
        )
        for name, meaning in meanings.items()
    ]


COLUMNS: Final = (
    # The store's readers skip files by the statistics of its first six columns.
    Column(name="event_date", type=ColumnType.DAY, source="time_ns"),
    Column(
        name="cluster",
        type=ColumnType.TEXT,
        source="event.cluster",
        bounds=ClusterName,
        meaning="The Kubernetes cluster; names of nodes, namespaces and pods are unique only within"
        " it.",
    ),
    Column(
        name="node",
        type=ColumnType.TEXT,
        source="event.node",
        bounds=NodeName,
        meaning="The node's name in Kubernetes.",
    ),
    Column(
        name="boot_id",
        type=ColumnType.TEXT,
        source="event.boot_id",
        bounds=BootId,
        meaning="The kernel's id of the boot.",
    ),
    Column(
        name="seq",
        type=ColumnType.SEQUENCE,
        source="event.seq",
        bounds=Seq,
        meaning="The sample's number within the boot, as in the event.",
    ),
    Column(
        name="row",
        type=ColumnType.SEQUENCE,
        source="row",
        bounds=Natural,
        # The store identifies rows by the offset of their event.
        in_store=False,
        meaning="The row's number within its event, from 0.",
    ),
    Column(
        name="time",
        type=ColumnType.TIME,
        source="time_ns",
        bounds=Word,
        meaning="End of the covered interval in UTC, to the microsecond:"
        " `2026-11-21T17:04:05.250000Z`.",
    ),
    Column(
        name="interval_ns",
        type=ColumnType.QUANTITY,
        source="interval_ns",
        bounds=Natural,
        meaning="Length of the covered interval; with busy method `accounting`, of all samples that"
        " the late adjustment covers.",
    ),
    Column(
        name="late",
        type=ColumnType.FLAG,
        source="event.late",
        bounds=bool,
        meaning="Whether the node was late with the sample; the same in all rows of an event.",
    ),
    Column(
        name="gap_ns",
        type=ColumnType.QUANTITY,
        source="event.gap_ns",
        bounds=Natural,
        optional=True,
        meaning="Time before the interval that no sample covers. All rows of an event have it:"
        " count it once.",
    ),
    Column(
        name="gpu_uuid",
        type=ColumnType.TEXT,
        source="gpu.uuid",
        bounds=Id,
        meaning="UUID of the GPU or MIG instance.",
    ),
    Column(
        name="gpu_index",
        type=ColumnType.POSITION,
        source="gpu.index",
        bounds=SmallNatural,
        meaning="The driver's index of the GPU at this sample: for display only, never a key.",
    ),
    Column(
        name="model",
        type=ColumnType.TEXT,
        source="gpu.model",
        bounds=Word,
        optional=True,
        meaning="The product name, such as `NVIDIA H100 80GB HBM3`.",
    ),
    Column(
        name="parent_uuid",
        type=ColumnType.TEXT,
        source="gpu.parent_uuid",
        bounds=Id,
        optional=True,
        meaning="For a MIG instance: UUID of the GPU.",
    ),
    Column(
        name="mig_profile",
        type=ColumnType.TEXT,
        source="gpu.mig_profile",
        bounds=Word,
        optional=True,
        meaning="For a MIG instance: its profile, such as `1g.10gb`.",
    ),
    *_slices(
        compute_slices="Compute slices of this row: a MIG instance's own, or for a partitioned GPU"
        " those without an instance."
        " `allocated_ns * compute_slices / gpu_compute_slices` sums to the physical GPUs' time.",
        memory_slices="Memory slices of this row, in the same way.",
        gpu_compute_slices="Compute slices of the whole physical GPU.",
        gpu_memory_slices="Memory slices of the whole physical GPU.",
    ),
    Column(
        name="gpu_gap_ns",
        type=ColumnType.QUANTITY,
        source="books.gap_ns",
        bounds=Natural,
        optional=True,
        meaning="If the GPU did not answer in this sample: the interval, in all of the GPU's rows.",
    ),
    Column(
        name="category",
        type=ColumnType.CODE,
        source="entry.category",
        bounds=Category,
        meaning="Kind of user: `pod`, `job`, `host`, `unattributed` or `idle`.",
    ),
    Column(
        name="pod_uid",
        type=ColumnType.TEXT,
        source="user.described.uid",
        bounds=Id,
        optional=True,
        meaning="For category `pod`: UID of the pod, if known.",
    ),
    Column(
        name="container_id",
        type=ColumnType.TEXT,
        source="user.container_id",
        bounds=Id,
        optional=True,
        meaning="For category `pod`: the container's id, if the cgroup path has it.",
    ),
    Column(
        name="pod_state",
        type=ColumnType.CODE,
        source="user.described.state",
        bounds=PodState,
        optional=True,
        meaning="For category `pod`: `known` if a pod record names this node, `foreign` if it names"
        " another node. Without a record, `named` if the kubelet's allocations give namespace and"
        " name, otherwise `pending`. Only `known` pods have other names.",
    ),
    Column(
        name="container",
        type=ColumnType.TEXT,
        source="user.container",
        bounds=Label,
        optional=True,
        meaning="Name of the container, if known.",
    ),
    Column(
        name="namespace",
        type=ColumnType.TEXT,
        source="user.described.namespace",
        bounds=Label,
        optional=True,
        meaning="Namespace of the pod, if known.",
    ),
    Column(
        name="pod",
        type=ColumnType.TEXT,
        source="user.described.name",
        bounds=Subdomain,
        optional=True,
        meaning="Name of the pod, if known.",
    ),
    Column(
        name="owner_kind",
        type=ColumnType.TEXT,
        source="user.described.owner_kind",
        bounds=Word,
        optional=True,
        meaning="Kind of the pod's workload, such as `Deployment`.",
    ),
    Column(
        name="owner_name",
        type=ColumnType.TEXT,
        source="user.described.owner_name",
        bounds=Subdomain,
        optional=True,
        meaning="Name of the pod's workload.",
    ),
    Column(
        name="labels",
        type=ColumnType.LABELS,
        source="user.described.labels",
        bounds=Labels,
        optional=True,
        meaning="The pod's labels that podwatch is configured to keep.",
    ),
    Column(
        name="job_id",
        type=ColumnType.TEXT,
        source="job_id",
        bounds=JobId,
        optional=True,
        meaning="For category `job`: the id from its scheduler, such as Slurm.",
    ),
    *_quantities(BOOKED, source="entry"),
    *_quantities(APPORTIONED, source="apportioned"),
    Column(
        name="busy_method",
        type=ColumnType.CODE,
        source="busy_method",
        bounds=BusyMethod,
        optional=True,
        meaning="How the busy time of the device's rows was determined; absent if its use is not"
        " known.",
    ),
    Column(
        name="memory_method",
        type=ColumnType.CODE,
        source="memory_method",
        bounds=MemoryMethod,
        optional=True,
        meaning="How the memory of the device's rows was determined; absent if it is not known.",
    ),
    Column(
        name="energy_method",
        type=ColumnType.CODE,
        source="energy_method",
        bounds=EnergyMethod,
        optional=True,
        meaning="How the energy of the device's rows was determined; absent if it is not known.",
    ),
    Column(
        name="ingested_time_ns",
        type=ColumnType.SEQUENCE,
        source="origin.ingested_time_ns",
        bounds=Natural,
        meaning="When the sink read the row's event, by its own clock, nanoseconds since the epoch."
        " The only column that does not follow from the event.",
    ),
    Column(name="kafka_partition", type=ColumnType.POSITION, source="origin.position.partition"),
    Column(name="kafka_offset", type=ColumnType.SEQUENCE, source="origin.position.offset"),
    Column(
        name="allocated_pod_state",
        type=ColumnType.CODE,
        source="allocatee.described.state",
        bounds=PodState,
        optional=True,
        meaning="For `idle`: state of the pod to which this unused part is allocated. `known` if a"
        " pod record names this node, `foreign` if the pod with this name is on another node,"
        " `named` if only the kubelet's allocations name it. `unknown` if the kubelet does not"
        " answer. Absent without an allocation.",
    ),
    Column(
        name="allocated_pod_uid",
        type=ColumnType.TEXT,
        source="allocatee.described.uid",
        bounds=Id,
        optional=True,
        meaning="For `idle`: UID of the pod to which this unused part is allocated.",
    ),
    Column(
        name="allocated_namespace",
        type=ColumnType.TEXT,
        source="allocatee.described.namespace",
        bounds=Label,
        optional=True,
        meaning="For `idle`: namespace of the pod to which this unused part is allocated.",
    ),
    Column(
        name="allocated_pod",
        type=ColumnType.TEXT,
        source="allocatee.described.name",
        bounds=Subdomain,
        optional=True,
        meaning="For `idle`: name of the pod to which this unused part is allocated.",
    ),
    Column(
        name="allocated_container",
        type=ColumnType.TEXT,
        source="allocatee.container",
        bounds=Label,
        optional=True,
        meaning="For `idle`: name of the container to which this unused part is allocated.",
    ),
    Column(
        name="allocated_job_id",
        type=ColumnType.TEXT,
        source="allocated_job_id",
        bounds=JobId,
        optional=True,
        meaning="For `idle`: the job to which this unused part is allocated, from the scheduler's"
        " directory.",
    ),
    Column(
        name="allocated_owner_kind",
        type=ColumnType.TEXT,
        source="allocatee.described.owner_kind",
        bounds=Word,
        optional=True,
        meaning="For `idle`: kind of the workload to which this unused part is allocated.",
    ),
    Column(
        name="allocated_owner_name",
        type=ColumnType.TEXT,
        source="allocatee.described.owner_name",
        bounds=Subdomain,
        optional=True,
        meaning="For `idle`: name of that workload.",
    ),
    Column(
        name="allocated_labels",
        type=ColumnType.LABELS,
        source="allocatee.described.labels",
        bounds=Labels,
        optional=True,
        meaning="For `idle`: labels of the pod to which this unused part is allocated.",
    ),
    Column(
        name="requested",
        type=ColumnType.LABELS,
        source="requested",
        bounds=Annotated[dict[QualifiedName, str], at_most(MAX_RESOURCES)],
        optional=True,
        meaning="Request of the row's container in its pod's spec, or for `idle` of the container"
        " to which the part is allocated: the amount of each resource, as text.",
    ),
    *_of_node(
        node_pool="The node's pool or group.",
        instance_type="The provider's machine type, such as `p5.48xlarge`.",
        zone="The provider's zone.",
        region="The provider's region.",
        capacity_type="How the node's capacity was bought: `spot`, `on_demand`, `reserved`, or"
        " another label value.",
    ),
    Column(
        name="node_labels",
        type=ColumnType.LABELS,
        source="node.labels",
        bounds=Labels,
        optional=True,
        meaning="The node's labels that podwatch is configured to keep.",
    ),
    Column(
        name="namespace_labels",
        type=ColumnType.LABELS,
        source="namespace.labels",
        bounds=Labels,
        optional=True,
        meaning="Labels of the pod's namespace; for `idle`, of the allocated pod's namespace.",
    ),
    Column(
        name="namespace_annotations",
        type=ColumnType.LABELS,
        source="namespace.annotations",
        bounds=Annotations,
        optional=True,
        meaning="Annotations of that namespace that podwatch is configured to keep.",
    ),
    Column(
        name="allocated_method",
        type=ColumnType.CODE,
        source="books.allocated_method",
        bounds=AllocatedMethod,
        optional=True,
        meaning="`scaled` if more than the device is allocated, such as the whole GPU to two"
        " containers, so that each part is divided by the sum of the parts.",
    ),
)
TOPIC_COLUMNS: Final = tuple(column for column in COLUMNS if column.bounds is not None)
"""The columns of `gpuledger.rows.v1`, in the order of its fields."""
STORE_COLUMNS: Final = tuple(column for column in COLUMNS if column.in_store)
"""The columns of the store's table."""


def row_maker(
    columns: Iterable[Column],
    written: Mapping[ColumnType, str],
    functions: Mapping[str, Callable[[Any], Any]],
    *,
    make: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return a function that makes a row of these columns from the fields of a `BookedEntry`.

    The function calls `make` with the values by column name, and returns its result. Without
    `make`, it returns a tuple in the columns' order. Absent values are `None`. `written` maps a
    column type to an expression that formats a value: `{}` stands for the value, and the expression
    may call `functions`.
    """
    values = {}
    for column in columns:
        form = written.get(column.type, "{}")
        present = form.format(column.source)
        # `None` needs no guard unless the value is written in another format.
        is_guarded = column.optional and form != "{}"
        values[column.name] = (
            f"None if {column.source} is None else {present}" if is_guarded else present
        )
    # A tuple is the fastest row; `make` is for callers that need names, such as a record's.
    if make is None:
        row = f"({', '.join(values.values())},)"
    else:
        row = f"make({', '.join(f'{name}={value}' for name, value in values.items())})"
    # An entry has about forty values: looking up attributes by name would take twice as long.
    made: Callable[..., Any] = eval(  # noqa: S307  # from the table above, like a namedtuple's code
        f"lambda {', '.join(BookedEntry._fields)}: {row}", {**functions, "make": make}
    )
    return made


EntryRow: Final[Any] = msgspec.defstruct(
    "EntryRow",
    [
        (column.name, column.bounds | None, None)
        if column.optional
        else (column.name, column.bounds)
        for column in TOPIC_COLUMNS
    ],
    bases=(BaseRecord,),
    module=__name__,
    namespace={
        "__doc__": "An entry with its sample, GPU, pod and allocation. Its identity is `(cluster,"
        " node, boot_id, seq, row)`.",
        FIELD_DOCSTRINGS: {column.name: column.meaning for column in TOPIC_COLUMNS},
    },
    frozen=True,
    kw_only=True,
)
"""The record of `gpuledger.rows.v1`."""
