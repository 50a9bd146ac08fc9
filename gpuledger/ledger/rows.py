"""One category's share of one device in one tick, as a flat row: nothing inside anything else.

`COLUMNS` is the one table of its columns. The record of the topic `gpuledger.rows.v1`, the columns
of the store's table `entries` are made from it, so that a column has
one name, one type and one meaning wherever it is found. To add a column is one row of the table
and, where the event does not say it already, what it is read from in `gpuledger.ledger.entries`.
Its place is that of the topic's fields. Tables of the store that are there already get it behind
their last column, where it may be null.
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
from gpuledger.records.events import Category, Entry, MemoryMethod, PodState
from gpuledger.records.readings import BusyMethod, EnergyMethod


class ColumnType(Enum):
    """What the values of a column are, wherever they are written."""

    TEXT = "text"
    CODE = "code"
    """A word of an enumeration."""
    POSITION = "position"
    """A small whole number, of 32 bits."""
    SEQUENCE = "sequence"
    """A whole number of 64 bits that grows from row to row."""
    QUANTITY = "quantity"
    """A whole number of 64 bits."""
    FLAG = "flag"
    TIME = "time"
    """Nanoseconds since the epoch; written to the microsecond."""
    DAY = "day"
    """The day of a time in UTC."""
    LABELS = "labels"
    """Texts by name."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the flat row."""

    name: str
    """Its name, with the unit at the end."""
    type: ColumnType
    """What its values are."""
    source: str
    """The value, as an expression over the fields of a `BookedEntry`."""
    meaning: str = ""
    """What it says, as the docstring of the topic's field."""
    bounds: Any = None
    """The type of the topic's field, with its bounds; absent where the topic does not have it."""
    optional: bool = False
    """Whether it may be absent."""
    in_store: bool = True
    """Whether the store's table has it."""


_OF_ENTRIES: Final = {field.name: field.type for field in msgspec.structs.fields(Entry)}


def _quantities(quantities: Iterable[Quantity], *, source: str) -> list[Column]:
    return [
        Column(
            name=quantity.name,
            type=ColumnType.QUANTITY,
            source=f"{source}.{quantity.name}",
            # Below zero where an entry may be; what is apportioned never is.
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
    # The store's readers skip files by the statistics of the first six of its columns.
    Column(name="event_date", type=ColumnType.DAY, source="time_ns"),
    Column(
        name="cluster",
        type=ColumnType.TEXT,
        source="event.cluster",
        bounds=ClusterName,
        meaning="The Kubernetes cluster: the names of nodes, namespaces and pods are unique in it"
        " alone.",
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
        meaning="The tick's number within the boot, as in the event.",
    ),
    Column(
        name="row",
        type=ColumnType.SEQUENCE,
        source="row",
        bounds=Natural,
        # The store's rows are told apart by the offset of their event.
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
        meaning="Length of the covered interval; with busy method `accounting`, of all ticks that"
        " it adjusts.",
    ),
    Column(
        name="late",
        type=ColumnType.FLAG,
        source="event.late",
        bounds=bool,
        meaning="Whether the node was late with the tick; the same in all rows of an event.",
    ),
    Column(
        name="gap_ns",
        type=ColumnType.QUANTITY,
        source="event.gap_ns",
        bounds=Natural,
        optional=True,
        meaning="Time right before the tick that no tick covers; in all rows of an event: count it"
        " once.",
    ),
    Column(
        name="gpu_uuid",
        type=ColumnType.TEXT,
        source="gpu.uuid",
        bounds=Id,
        meaning="The GPU's or MIG instance's UUID.",
    ),
    Column(
        name="gpu_index",
        type=ColumnType.POSITION,
        source="gpu.index",
        bounds=SmallNatural,
        meaning="The driver's index of the GPU at this tick: a label for people, never a key.",
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
        meaning="Of a MIG instance: the GPU's UUID.",
    ),
    Column(
        name="mig_profile",
        type=ColumnType.TEXT,
        source="gpu.mig_profile",
        bounds=Word,
        optional=True,
        meaning="Of a MIG instance: its profile, such as `1g.10gb`.",
    ),
    *_slices(
        compute_slices="Compute slices of this device alone: of a MIG instance its own, of a GPU"
        " that is cut those that no instance has."
        " `allocated_ns * compute_slices / gpu_compute_slices` sums to the physical GPUs' time.",
        memory_slices="Memory slices of this device alone.",
        gpu_compute_slices="Compute slices of the physical GPU.",
        gpu_memory_slices="Memory slices of the physical GPU.",
    ),
    Column(
        name="gpu_gap_ns",
        type=ColumnType.QUANTITY,
        source="books.gap_ns",
        bounds=Natural,
        optional=True,
        meaning="Where the GPU did not answer in this tick: the interval; in all of its rows.",
    ),
    Column(
        name="category",
        type=ColumnType.CODE,
        source="entry.category",
        bounds=Category,
        meaning="Whose it is: a pod's, a job's, the host's, nobody's or idle.",
    ),
    Column(
        name="pod_uid",
        type=ColumnType.TEXT,
        source="user.described.uid",
        bounds=Id,
        optional=True,
        meaning="On a pod's category: its UID, where it is known.",
    ),
    Column(
        name="container_id",
        type=ColumnType.TEXT,
        source="user.container_id",
        bounds=Id,
        optional=True,
        meaning="On a pod's category: the container's id, where the cgroup path names it.",
    ),
    Column(
        name="pod_state",
        type=ColumnType.CODE,
        source="user.described.state",
        bounds=PodState,
        optional=True,
        meaning="On a pod's category: `known` by a pod record that names this node, `foreign` where"
        " the record names another node; where none has come, `named` if the kubelet's allocations"
        " tell the namespace and the name, and `pending` if not. Other names stand beside `known`"
        " alone.",
    ),
    Column(
        name="container",
        type=ColumnType.TEXT,
        source="user.container",
        bounds=Label,
        optional=True,
        meaning="Name of the container, once known.",
    ),
    Column(
        name="namespace",
        type=ColumnType.TEXT,
        source="user.described.namespace",
        bounds=Label,
        optional=True,
        meaning="The pod's namespace, once known.",
    ),
    Column(
        name="pod",
        type=ColumnType.TEXT,
        source="user.described.name",
        bounds=Subdomain,
        optional=True,
        meaning="The pod's name, once known.",
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
        meaning="The pod's labels that the pod watch was asked to keep.",
    ),
    Column(
        name="job_id",
        type=ColumnType.TEXT,
        source="job_id",
        bounds=JobId,
        optional=True,
        meaning="On a job's category: the id that its scheduler, such as Slurm, has given it.",
    ),
    *_quantities(BOOKED, source="entry"),
    *_quantities(APPORTIONED, source="apportioned"),
    Column(
        name="busy_method",
        type=ColumnType.CODE,
        source="busy_method",
        bounds=BusyMethod,
        optional=True,
        meaning="How the busy time of the device's accounts was found; absent where its use is not"
        " known.",
    ),
    Column(
        name="memory_method",
        type=ColumnType.CODE,
        source="memory_method",
        bounds=MemoryMethod,
        optional=True,
        meaning="How their memory was found; absent where it is not known.",
    ),
    Column(
        name="energy_method",
        type=ColumnType.CODE,
        source="energy_method",
        bounds=EnergyMethod,
        optional=True,
        meaning="How the energy was found that they share; absent where it is not known.",
    ),
    Column(
        name="ingested_time_ns",
        type=ColumnType.SEQUENCE,
        source="origin.ingested_time_ns",
        bounds=Natural,
        meaning="When the sink read the event that the row is of, by its own clock, nanoseconds"
        " since the epoch. Of all columns the one that is no function of the event.",
    ),
    Column(name="kafka_partition", type=ColumnType.POSITION, source="origin.position.partition"),
    Column(name="kafka_offset", type=ColumnType.SEQUENCE, source="origin.position.offset"),
    Column(
        name="allocated_pod_state",
        type=ColumnType.CODE,
        source="allocatee.described.state",
        bounds=PodState,
        optional=True,
        meaning="On `idle`: what is known of the pod to which this unused part is allocated:"
        " `known` by a pod record that names this node, `foreign` where the pod of that name is on"
        " another node, and `named` by the kubelet's allocations alone; absent if it is not"
        " allocated.",
    ),
    Column(
        name="allocated_pod_uid",
        type=ColumnType.TEXT,
        source="allocatee.described.uid",
        bounds=Id,
        optional=True,
        meaning="On `idle`: UID of the pod to which this unused part is allocated.",
    ),
    Column(
        name="allocated_namespace",
        type=ColumnType.TEXT,
        source="allocatee.described.namespace",
        bounds=Label,
        optional=True,
        meaning="On `idle`: namespace of the pod to which this unused part is allocated.",
    ),
    Column(
        name="allocated_pod",
        type=ColumnType.TEXT,
        source="allocatee.described.name",
        bounds=Subdomain,
        optional=True,
        meaning="On `idle`: pod to which this unused part is allocated.",
    ),
    Column(
        name="allocated_container",
        type=ColumnType.TEXT,
        source="allocatee.container",
        bounds=Label,
        optional=True,
        meaning="On `idle`: container to which this unused part is allocated.",
    ),
    Column(
        name="allocated_job_id",
        type=ColumnType.TEXT,
        source="allocated_job_id",
        bounds=JobId,
        optional=True,
        meaning="On `idle`: job to which this unused part is allocated, by the scheduler's"
        " directory.",
    ),
    Column(
        name="allocated_owner_kind",
        type=ColumnType.TEXT,
        source="allocatee.described.owner_kind",
        bounds=Word,
        optional=True,
        meaning="On `idle`: kind of the workload to which this unused part is allocated.",
    ),
    Column(
        name="allocated_owner_name",
        type=ColumnType.TEXT,
        source="allocatee.described.owner_name",
        bounds=Subdomain,
        optional=True,
        meaning="On `idle`: name of that workload.",
    ),
    Column(
        name="allocated_labels",
        type=ColumnType.LABELS,
        source="allocatee.described.labels",
        bounds=Labels,
        optional=True,
        meaning="On `idle`: labels of the pod to which this unused part is allocated.",
    ),
    Column(
        name="requested",
        type=ColumnType.LABELS,
        source="requested",
        bounds=Annotated[dict[QualifiedName, str], at_most(MAX_RESOURCES)],
        optional=True,
        meaning="What the container that used this part, or to which it is allocated unused,"
        " requests in its pod's spec: the amount of each resource, as text.",
    ),
    *_of_node(
        node_pool="The node pool or node group that the node belongs to.",
        instance_type="The provider's name of the kind of machine, such as `p5.48xlarge`.",
        zone="The provider's zone.",
        region="The provider's region.",
        capacity_type="How the node's capacity was bought: `spot`, `on_demand`, `reserved`, or what"
        " else a label says.",
    ),
    Column(
        name="node_labels",
        type=ColumnType.LABELS,
        source="node.labels",
        bounds=Labels,
        optional=True,
        meaning="The node's labels that podwatch was asked to keep.",
    ),
    Column(
        name="namespace_labels",
        type=ColumnType.LABELS,
        source="namespace.labels",
        bounds=Labels,
        optional=True,
        meaning="Those of the pod's namespace; on `idle`, of the pod to which the part is"
        " allocated.",
    ),
    Column(
        name="namespace_annotations",
        type=ColumnType.LABELS,
        source="namespace.annotations",
        bounds=Annotations,
        optional=True,
        meaning="The annotations of that namespace that podwatch was asked to keep.",
    ),
)
TOPIC_COLUMNS: Final = tuple(column for column in COLUMNS if column.bounds is not None)
"""The columns of `gpuledger.rows.v1`, in the order of its record."""
STORE_COLUMNS: Final = tuple(column for column in COLUMNS if column.in_store)
"""The columns of the store's table."""


def row_maker(
    columns: Iterable[Column],
    written: Mapping[ColumnType, str],
    functions: Mapping[str, Callable[[Any], Any]],
    *,
    make: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return what makes a row of these columns of the fields of a `BookedEntry`.

    A row is what `make` returns for the values by their columns' names, without it a tuple in the
    columns' order. `written` says how values of a type are written, as an expression with `{}` in
    the place of the value; it may call the functions named here. What is absent is `None`.
    """
    values = {}
    for column in columns:
        form = written.get(column.type, "{}")
        present = form.format(column.source)
        # What may be absent is `None` as it is, unless it is written in another form.
        is_guarded = column.optional and form != "{}"
        values[column.name] = (
            f"None if {column.source} is None else {present}" if is_guarded else present
        )
    # A tuple is the fastest row; who needs names, as a record does, gives `make`.
    if make is None:
        row = f"({', '.join(values.values())},)"
    else:
        row = f"make({', '.join(f'{name}={value}' for name, value in values.items())})"
    # Some forty values of each entry: attributes that are looked up by name take twice as long.
    made: Callable[..., Any] = eval(  # noqa: S307  # of the table above, as a namedtuple's code is
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
        "__doc__": "An entry with its tick, GPU and pod, or the pod to which it is allocated."
        " Its identity is `(cluster, node, boot_id, seq, row)`.",
        FIELD_DOCSTRINGS: {column.name: column.meaning for column in TOPIC_COLUMNS},
    },
    frozen=True,
    kw_only=True,
)
"""The record of `gpuledger.rows.v1`."""
