"""The tables that bills are made of: usage by minute, hour and day, and what it is joined with.

`usage` has sums a minute: one row, or several that add up, for each device, category, and pod or
holder. `usage_hourly` and `usage_daily` are the same by hour and day, where the last offset of a
row says which event it ends with. All of them have whole numbers, so that a sum over rows is what
the events sum to, to the last one.

`nodes`, `namespaces` and `inventory` have a row for each version: the one in force at a time is
the last with `in_force_from` at or before it. They are joined when they are read, so that what is
learnt late is not lost. `incidents` has a row for each: nothing is ever said of one again.
"""

from typing import Final

from arro3.core import DataType

from gpuledger.store.schema import PARTITION_COLUMN, StoreColumn, TableSchema

_TEXT: Final = DataType.utf8()
_COUNT: Final = DataType.int64()
_BYTE_TIME: Final = DataType.decimal128(38, 0)
"""80 GiB for a second are 8.6e19 byte-nanoseconds, which 64 bits do not hold."""
_TIME: Final = DataType.timestamp("us", tz="UTC")


def _text(*names: str, nullable: bool = True) -> list[StoreColumn]:
    return [StoreColumn(name=name, kind=_TEXT, nullable=nullable) for name in names]


def _time(name: str, *, nullable: bool = False) -> StoreColumn:
    return StoreColumn(
        name=name,
        kind=_TIME,
        made_as=DataType.int64(),
        nullable=nullable,
        encoding="DELTA_BINARY_PACKED",
    )


def _number(*names: str, kind: DataType = _COUNT, nullable: bool = True) -> list[StoreColumn]:
    return [
        StoreColumn(
            name=name,
            kind=kind,
            nullable=nullable,
            encoding="DELTA_BINARY_PACKED" if kind is _COUNT else None,
        )
        for name in names
    ]


def _usage(name: str, *, period: str, description: str) -> TableSchema:
    return TableSchema(
        name=name,
        description=description,
        columns=(
            StoreColumn(name=PARTITION_COLUMN, kind=DataType.date32(), made_as=DataType.int32()),
            *_text("cluster", "node", nullable=False),
            _time(period),
            *_text("gpu_uuid", nullable=False),
            *_number("gpu_index", kind=DataType.int32(), nullable=False),
            *_text("model", "parent_uuid", "mig_profile"),
            *_number(
                "compute_slices",
                "memory_slices",
                "gpu_compute_slices",
                "gpu_memory_slices",
                kind=DataType.int32(),
            ),
            *_text("category", nullable=False),
            # `container_id` stands where the container's name was not known yet, and only there.
            *_text("pod_uid", "pod_state", "namespace", "pod", "container", "container_id"),
            *_text("job_id"),
            *_text(
                "allocated_pod_state", "allocated_pod_uid", "allocated_namespace", "allocated_pod"
            ),
            *_text("allocated_container", "allocated_job_id"),
            # Of each sum that part which was measured: the rest was apportioned or computed.
            *_number("busy_ns", "measured_busy_ns"),
            *_number("memory_byte_ns", "measured_memory_byte_ns", kind=_BYTE_TIME),
            *_number("energy_millijoules", "measured_energy_millijoules"),
            # `unresponsive_ns` is the part of `allocated_ns` in which the device did not answer.
            *_number("allocated_ns", "unresponsive_ns"),
            *_number("sm_active_ns", "tensor_active_ns", "dram_active_ns"),
            *_number("sample_count", nullable=False),
            *_number("kafka_partition", kind=DataType.int32(), nullable=False),
            *_number("first_offset", "last_offset", "ingested_time_ns", nullable=False),
        ),
        partition_by=(PARTITION_COLUMN,),
        statistics_columns=5,
    )


USAGE: Final = _usage(
    "usage",
    period="minute",
    description="Sums of a minute by device, category, and pod or holder; rows of one add up.",
)
USAGE_HOURLY: Final = _usage(
    "usage_hourly", period="hour", description="Sums of an hour; rows of one add up."
)
USAGE_DAILY: Final = _usage(
    "usage_daily", period="day", description="Sums of a day in UTC; rows of one add up."
)
NODES: Final = TableSchema(
    name="nodes",
    description="One row for each version of a node.",
    columns=(
        *_text("cluster", "node", nullable=False),
        _time("in_force_from"),
        _time("deleted_time", nullable=True),
        *_text("node_pool", "instance_type", "zone", "region", "capacity_type"),
        *_text("labels", "resource_version"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
    ),
    statistics_columns=3,
)
NAMESPACES: Final = TableSchema(
    name="namespaces",
    description="One row for each version of a namespace.",
    columns=(
        *_text("cluster", "namespace", nullable=False),
        _time("in_force_from"),
        _time("deleted_time", nullable=True),
        *_text("labels", "annotations", "resource_version"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
    ),
    statistics_columns=3,
)
INVENTORY: Final = TableSchema(
    name="inventory",
    description="One row for each GPU of each version of a node's inventory.",
    columns=(
        *_text("cluster", "node", nullable=False),
        _time("in_force_from"),
        # Null on the row that says that the node has no GPU, or is gone.
        *_text("gpu_uuid", "model", "serial"),
        *_number("gpu_index", kind=DataType.int32()),
        *_number("memory_total_bytes"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
    ),
    statistics_columns=3,
)
INCIDENTS: Final = TableSchema(
    name="incidents",
    description="One row for each incident, with the pods that were on the GPU.",
    columns=(
        *_text("cluster", "node", nullable=False),
        _time("time"),
        *_text("boot_id", "gpu_uuid", nullable=False),
        *_number("gpu_index", "gpu_instance", "compute_instance", kind=DataType.int32()),
        *_text("kind", "severity", "source", nullable=False),
        *_number("xid"),
        *_text("mnemonic", "category", "action", "message"),
        StoreColumn(name="present_at_start", kind=DataType.bool(), nullable=True),
        *_text("pods"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
    ),
    statistics_columns=5,
)
