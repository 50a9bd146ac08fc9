"""The columns of the tables `entries` and `gaps`: names, types, and how Parquet keeps each.

Here live the schemas of the store. How an event becomes rows is `sinks.store.rows`' business,
writing them is `sinks.store.table`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from arro3.core import Array, DataType, Field, Schema, Table

PARTITION_COLUMN: Final = "event_date"
_MICROSECONDS_UTC: Final = DataType.timestamp("us", tz="UTC")


@dataclass(frozen=True, kw_only=True)
class StoreColumn:
    """One column of the table."""

    name: str
    kind: DataType
    """The Arrow type."""
    made_as: DataType | None = None
    """The type of the Python values, where Arrow arrays of `kind` are made by a cast."""
    nullable: bool = False
    encoding: Literal["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"] | None = None
    """The Parquet encoding; absent where a dictionary is best."""

    def array(self, values: Any) -> Array:  # noqa: ANN401  # any sequence of the column's values
        """Make the Arrow array; raises TypeError or ValueError for values of another type."""
        if self.made_as is None:
            return Array(values, type=self.kind)
        return Array(values, type=self.made_as).cast(self.kind)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One table: its columns and how it is laid out."""

    name: str
    """The table's name, and its folder in the store."""
    description: str
    columns: Sequence[StoreColumn]
    partition_by: Sequence[str] = ()
    statistics_columns: int
    """How many leading columns carry the statistics by which readers skip files; more only make
    the log large."""

    @cached_property
    def schema(self) -> Schema:
        """The Arrow schema."""
        fields = [Field(one.name, one.kind, nullable=one.nullable) for one in self.columns]
        return Schema(fields)

    def table_of(self, rows: Sequence[tuple[Any, ...]]) -> Table:
        """Return the Arrow table of rows whose values stand in the columns' order.

        Raises TypeError or ValueError for a value that is not of its column's type: nothing is
        cast in silence.
        """
        by_column = zip(*rows, strict=True)
        arrays = [
            column.array(list(values))
            for column, values in zip(self.columns, by_column, strict=True)
        ]
        return Table.from_arrays(arrays, schema=self.schema)


def _text(name: str, *, nullable: bool = False) -> StoreColumn:
    return StoreColumn(name=name, kind=DataType.utf8(), nullable=nullable)


def _rising(name: str) -> StoreColumn:
    return StoreColumn(name=name, kind=DataType.int64(), encoding="DELTA_BINARY_PACKED")


def _time(name: str, *, nullable: bool = False) -> StoreColumn:
    return StoreColumn(
        name=name, kind=_MICROSECONDS_UTC, made_as=DataType.int64(), nullable=nullable
    )


def _quantity(name: str, *, nullable: bool = True) -> StoreColumn:
    return StoreColumn(
        name=name, kind=DataType.float64(), nullable=nullable, encoding="BYTE_STREAM_SPLIT"
    )


# The first columns carry the statistics by which readers skip files. What
# comes after `kafka_offset` was added later, so it may be null: older tables get it at their end.
COLUMNS: Final = (
    StoreColumn(name=PARTITION_COLUMN, kind=DataType.date32(), made_as=DataType.int32()),
    _text("node"),
    _text("boot_id"),
    _rising("seq"),
    StoreColumn(
        name="time",
        kind=_MICROSECONDS_UTC,
        made_as=DataType.int64(),
        encoding="DELTA_BINARY_PACKED",
    ),
    _quantity("interval_seconds", nullable=False),
    _text("gpu_uuid"),
    StoreColumn(name="gpu_index", kind=DataType.int32()),
    _text("model", nullable=True),
    _text("account"),
    _text("method"),
    _text("pod_uid", nullable=True),
    _text("container_id", nullable=True),
    _text("container", nullable=True),
    _text("namespace", nullable=True),
    _text("pod", nullable=True),
    _text("owner_kind", nullable=True),
    _text("owner_name", nullable=True),
    _text("labels", nullable=True),
    _quantity("busy_seconds"),
    _quantity("memory_byte_seconds"),
    _quantity("joules"),
    StoreColumn(name="kafka_partition", kind=DataType.int32()),
    _rising("kafka_offset"),
    _text("holder_namespace", nullable=True),
    _text("holder_pod", nullable=True),
    _text("holder_container", nullable=True),
    _quantity("sm_active_seconds"),
    _quantity("tensor_active_seconds"),
    _quantity("dram_active_seconds"),
    StoreColumn(name="late", kind=DataType.bool(), nullable=True),
    _quantity("uncovered_seconds"),
    _text("pod_state", nullable=True),
    _text("holder_state", nullable=True),
    _text("holder_uid", nullable=True),
)
ENTRIES: Final = Shape(
    name="entries",
    description="One row for each account entry of each GPU and tick.",
    columns=COLUMNS,
    partition_by=(PARTITION_COLUMN,),
    statistics_columns=5,
)
SCHEMA: Final = ENTRIES.schema
GAPS: Final = Shape(
    name="gaps",
    description="One row for each stretch of events that were gone before they could be stored.",
    columns=(
        _text("topic"),
        StoreColumn(name="kafka_partition", kind=DataType.int32()),
        _text("reason"),
        StoreColumn(name="first_offset", kind=DataType.int64()),
        StoreColumn(name="next_offset", kind=DataType.int64(), nullable=True),
        StoreColumn(name="missed_offsets", kind=DataType.int64(), nullable=True),
        _time("time_before", nullable=True),
        _time("time_after", nullable=True),
        _time("detected_at"),
        _text("topic_id", nullable=True),
    ),
    statistics_columns=10,
)


def table_of(rows: Sequence[tuple[Any, ...]]) -> Table:
    """Return the Arrow table of rows of `entries`."""
    return ENTRIES.table_of(rows)
