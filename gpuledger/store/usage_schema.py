"""The tables for bills: usage by minute, hour and day, and the tables that usage is joined with.

`usage` has sums per minute: one row, or several that add up, for each device, category, and pod or
allocation. `usage_hourly` and `usage_daily` have such sums by hour and by day. `last_offset` is the
offset of the last event that a row includes. All amounts are whole numbers, so sums over rows equal
the sums over the events exactly.

`pending_pods`, `nodes`, `namespaces` and `inventory` have a row for each version; the version in
force at a time is the last version whose `in_force_from` is at or before that time. Versions are
joined to usage when it is read, so that versions that arrive late also count. `incidents` has one
row per incident, because incidents never change.
"""

from collections.abc import Iterable
from typing import Final

from arro3.core import DataType

from gpuledger.store.distributions import BITMAPS, DISTRIBUTIONS, MEMORY_MAX
from gpuledger.store.schema import PARTITION_COLUMN, StoreColumn, TableSchema

_TEXT: Final = DataType.utf8()
_COUNT: Final = DataType.int64()
_BYTE_TIME: Final = DataType.decimal128(38, 0)
"""80 GiB for one second are 8.6e19 byte-nanoseconds, which exceeds 64 bits."""
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


def _flag(name: str) -> StoreColumn:
    return StoreColumn(name=name, kind=DataType.bool(), nullable=True)


def _usage(
    name: str, *, period: str, description: str, added: Iterable[StoreColumn] = ()
) -> TableSchema:
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
            # `container_id` is set only if the container's name was not known yet.
            *_text("pod_uid", "pod_state", "namespace", "pod", "container", "container_id"),
            *_text("job_id"),
            *_text(
                "allocated_pod_state", "allocated_pod_uid", "allocated_namespace", "allocated_pod"
            ),
            *_text("allocated_container", "allocated_job_id"),
            # `measured_…` is the measured part of a sum; the rest was apportioned or computed.
            *_number("busy_ns", "measured_busy_ns"),
            *_number("memory_byte_ns", "measured_memory_byte_ns", kind=_BYTE_TIME),
            *_number("energy_millijoules", "measured_energy_millijoules"),
            # `unresponsive_ns` is the part of `allocated_ns` in which the device did not answer,
            # `scaled_allocated_ns` the part in which more than the device was allocated.
            *_number("allocated_ns", "unresponsive_ns", "scaled_allocated_ns"),
            *_number("sm_active_ns", "tensor_active_ns", "dram_active_ns"),
            *_number("sample_count", nullable=False),
            *_number("kafka_partition", kind=DataType.int32(), nullable=False),
            *_number("first_offset", "last_offset", "ingested_time_ns", nullable=False),
            *added,
        ),
        partition_by=(PARTITION_COLUMN,),
        statistics_columns=5,
    )


USAGE: Final = _usage(
    "usage",
    period="minute",
    description="Sums per minute by device, category, and pod or allocation; rows of one add up.",
)
_OF_MINUTES: Final = (
    *_number(*(name for each in DISTRIBUTIONS for name in each.columns), kind=DataType.int32()),
    *_number(MEMORY_MAX),
)
"""Summaries of the minutes; null in rows of earlier versions of gpuledger."""
USAGE_HOURLY: Final = _usage(
    "usage_hourly",
    period="hour",
    description="Sums per hour; rows of one add up.",
    # Most bitmaps are equal, so a dictionary is best.
    added=(*_OF_MINUTES, *(StoreColumn(name=name, kind=_COUNT, nullable=True) for name in BITMAPS)),
)
USAGE_DAILY: Final = _usage(
    "usage_daily",
    period="day",
    description="Sums per day in UTC; rows of one add up.",
    added=_OF_MINUTES,
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
        *_number("allocatable_cpu_millicores", "allocatable_memory_bytes"),
        *_text("allocatable_resources"),
        _flag("unschedulable"),
    ),
    statistics_columns=3,
)
PENDING_PODS: Final = TableSchema(
    name="pending_pods",
    description="One row for each version of a pod that requests GPUs and waits for a node.",
    columns=(
        *_text("cluster", "pod_uid", nullable=False),
        _time("in_force_from"),
        *_text("namespace", "pod", nullable=False),
        *_text("owner_kind", "owner_name", "labels", "requested"),
        *_number("priority"),
        *_text("priority_class", "queue", "scheduling_gates", "reason", "message"),
        _time("created_time"),
        _time("left_time", nullable=True),
        *_text("resource_version"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
        *_number("requested_cpu_millicores", "requested_memory_bytes"),
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
        # Null if the node has no GPU, or no longer exists.
        *_text("gpu_uuid", "model", "serial"),
        *_number("gpu_index", kind=DataType.int32()),
        *_number("memory_total_bytes"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
        *_number("power_limit_milliwatts"),
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
        _flag("present_at_start"),
        *_text("pods"),
        *_number("kafka_partition", kind=DataType.int32(), nullable=False),
        *_number("kafka_offset", nullable=False),
    ),
    statistics_columns=5,
)
