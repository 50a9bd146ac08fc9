"""The tables `entries`, `gaps` and `pods`: their columns with types and Parquet encodings.

The columns of `entries` are those of the flat row (`gpuledger.ledger.rows`). The store sink
converts events to rows and writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

from arro3.core import Array, DataType, Field, Schema, Table

from gpuledger.ledger.rows import STORE_COLUMNS, ColumnType

PARTITION_COLUMN: Final = "event_date"
_MICROSECONDS_UTC: Final = DataType.timestamp("us", tz="UTC")


@dataclass(frozen=True, kw_only=True)
class StoreColumn:
    """One column of the table."""

    name: str
    kind: DataType
    """The Arrow type."""
    made_as: DataType | None = None
    """Arrow type of the Python values, if they must be cast to `kind`."""
    nullable: bool = False
    encoding: Literal["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"] | None = None
    """The Parquet encoding; absent if a dictionary is best."""

    def array(self, values: Any) -> Array:  # noqa: ANN401  # any sequence of the column's values
        """Return the values as an Arrow array.

        Raises `TypeError` or `ValueError` for values of another type.
        """
        if "Decimal128" in str(self.kind):
            # Arrow does not make decimals from Python integers, but parses them from text.
            texts = [None if value is None else str(value) for value in values]
            return Array(texts, type=DataType.utf8()).cast(self.kind)
        if self.made_as is None:
            return Array(values, type=self.kind)
        return Array(values, type=self.made_as).cast(self.kind)


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """The schema of one table: its columns and layout."""

    name: str
    """Name of the table and of its directory in the store."""
    description: str
    columns: Sequence[StoreColumn]
    partition_by: Sequence[str] = ()
    configuration: Mapping[str, str] = field(default_factory=dict)
    """Additional table properties, by Delta's names."""
    statistics_columns: int
    """Number of leading columns with statistics, by which readers skip files; more columns would
    only enlarge the log."""

    @cached_property
    def arrow(self) -> Schema:
        """Return the schema in Arrow's form."""
        fields = [
            Field(column.name, column.kind, nullable=column.nullable) for column in self.columns
        ]
        return Schema(fields)

    def table_of(self, rows: Sequence[tuple[Any, ...]]) -> Table:
        """Return the Arrow table of rows whose values are in the columns' order.

        Raises `TypeError` or `ValueError` if a value does not have its column's type.
        """
        # Rows come one by one, but Arrow stores columns.
        by_column = zip(*rows, strict=True)
        arrays = [
            column.array(list(values))
            for column, values in zip(self.columns, by_column, strict=True)
        ]
        return Table.from_arrays(arrays, schema=self.arrow)

    def conform(self, found: Table) -> Table:
        """Return a query's result as a table of this schema, with columns cast to its types."""
        arrays = [found[column.name].cast(column.kind) for column in self.columns]
        return Table.from_arrays(arrays, schema=self.arrow)


_DELTA: Final = "DELTA_BINARY_PACKED"
_TYPES: Final[Mapping[ColumnType, Mapping[str, Any]]] = {
    ColumnType.TEXT: {"kind": DataType.utf8()},
    ColumnType.CODE: {"kind": DataType.utf8()},
    ColumnType.LABELS: {"kind": DataType.utf8()},
    ColumnType.POSITION: {"kind": DataType.int32()},
    ColumnType.SEQUENCE: {"kind": DataType.int64(), "encoding": _DELTA},
    ColumnType.QUANTITY: {"kind": DataType.int64(), "encoding": _DELTA},
    ColumnType.FLAG: {"kind": DataType.bool()},
    ColumnType.DAY: {"kind": DataType.date32(), "made_as": DataType.int32()},
    ColumnType.TIME: {"kind": _MICROSECONDS_UTC, "made_as": DataType.int64(), "encoding": _DELTA},
}
"""Arrow type and Parquet encoding for each type of a row's columns."""
ENTRIES: Final = TableSchema(
    name="entries",
    description="One row for each entry of each GPU and tick.",
    columns=[
        StoreColumn(name=column.name, nullable=column.optional, **_TYPES[column.type])
        for column in STORE_COLUMNS
    ],
    partition_by=(PARTITION_COLUMN,),
    statistics_columns=6,
)
GAPS: Final = TableSchema(
    name="gaps",
    description="One row for each stretch of events that were gone before they could be stored.",
    columns=(
        StoreColumn(name="topic", kind=DataType.utf8()),
        StoreColumn(name="kafka_partition", kind=DataType.int32()),
        StoreColumn(name="reason", kind=DataType.utf8()),
        StoreColumn(name="first_offset", kind=DataType.int64()),
        StoreColumn(name="next_offset", kind=DataType.int64(), nullable=True),
        StoreColumn(name="missed_offsets", kind=DataType.int64(), nullable=True),
        StoreColumn(
            name="time_before", kind=_MICROSECONDS_UTC, made_as=DataType.int64(), nullable=True
        ),
        StoreColumn(
            name="time_after", kind=_MICROSECONDS_UTC, made_as=DataType.int64(), nullable=True
        ),
        StoreColumn(name="detected_at", kind=_MICROSECONDS_UTC, made_as=DataType.int64()),
        StoreColumn(name="topic_id", kind=DataType.utf8(), nullable=True),
    ),
    statistics_columns=10,
)

PODS: Final = TableSchema(
    name="pods",
    description="One row for each container id of each version of a pod's record.",
    columns=(
        StoreColumn(name="cluster", kind=DataType.utf8()),
        StoreColumn(name="node", kind=DataType.utf8()),
        StoreColumn(name="pod_uid", kind=DataType.utf8()),
        StoreColumn(
            name="in_force_from", kind=_MICROSECONDS_UTC, made_as=DataType.int64(), encoding=_DELTA
        ),
        StoreColumn(name="namespace", kind=DataType.utf8()),
        StoreColumn(name="pod", kind=DataType.utf8()),
        StoreColumn(name="owner_kind", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="owner_name", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="labels", kind=DataType.utf8()),
        StoreColumn(
            name="created_time", kind=_MICROSECONDS_UTC, made_as=DataType.int64(), encoding=_DELTA
        ),
        StoreColumn(
            name="deleted_time", kind=_MICROSECONDS_UTC, made_as=DataType.int64(), nullable=True
        ),
        StoreColumn(name="resource_version", kind=DataType.utf8()),
        StoreColumn(name="config_hash", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="container_id", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="container", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="kafka_partition", kind=DataType.int32()),
        StoreColumn(name="kafka_offset", kind=DataType.int64(), encoding=_DELTA),
        StoreColumn(name="requested", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="annotations", kind=DataType.utf8(), nullable=True),
        *(
            StoreColumn(name=name, kind=_MICROSECONDS_UTC, made_as=DataType.int64(), nullable=True)
            for name in ("scheduled_time", "started_time", "ended_time")
        ),
        StoreColumn(name="priority", kind=DataType.int64(), nullable=True),
        StoreColumn(name="priority_class", kind=DataType.utf8(), nullable=True),
        StoreColumn(name="requested_cpu_millicores", kind=DataType.int64(), nullable=True),
        StoreColumn(name="requested_memory_bytes", kind=DataType.int64(), nullable=True),
    ),
    statistics_columns=4,
)

_SHORT_LIVED: Final[Mapping[str, str]] = {
    # There are many small commits, but only the newest version is ever read.
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
}
SEEN_TICKS: Final = TableSchema(
    name="seen_samples",
    description="The sink's own: the last tick of each node, by how far its partition is stored.",
    columns=(
        StoreColumn(name="stream", kind=DataType.utf8()),
        StoreColumn(name="last_offset", kind=DataType.int64()),
        StoreColumn(name="seen", kind=DataType.utf8()),
        StoreColumn(name="written_time", kind=_MICROSECONDS_UTC, made_as=DataType.int64()),
    ),
    configuration=_SHORT_LIVED,
    statistics_columns=2,
)


def table_uri(store_uri: str, name: str = ENTRIES.name) -> str:
    """Return the URI of a store's table, by default of `entries`."""
    return f"{store_uri.rstrip('/')}/{name}"
