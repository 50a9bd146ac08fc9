"""Writes the tables of docs/reference/tables.md: the columns of the store's tables and views.

The schemas have the columns with their types, and the flat row has the meaning of most of them.
This module has the meaning of the others. A column without a meaning is an error.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import duckdb

from gpuledger.errors import UserError
from gpuledger.ledger.rows import COLUMNS as ROW_COLUMNS
from gpuledger.store.distributions import (
    ALLOCATED,
    BITMAPS,
    BUSY,
    DISTRIBUTIONS,
    DRAM,
    MEMORY,
    MEMORY_MAX,
    USED,
    Distribution,
)
from gpuledger.store.query import DERIVED_COLUMNS, empty_relation, no_entries_sql
from gpuledger.store.schema import StoreColumn, TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import READABLE, TABLES, usage_sql
from tests.docs_gen.markdown import code, put_between_marks, table

TYPES: Final = {
    "Utf8": "string",
    "Int32": "integer",
    "Int64": "long",
    "Date32": "date",
    "Boolean": "boolean",
    'Timestamp(µs, "UTC")': "timestamp",
}
"""Delta's types by the names of Arrow's types; decimals are added with their digits."""
_COLUMNS: Final = ("column", "type", "null", "meaning")
_ADDED: Final = ("column", "type", "SQL")
_JOINED: Final = ("column", "type", "meaning")
_LEFT_OUT: Final = (USAGE_HOURLY.name, USAGE_DAILY.name)
"""Tables with the columns of `usage`; `_of_minutes` has the columns that they add."""


def _bounds_of(distribution: Distribution) -> str:
    return ", ".join(str(bound) for bound in distribution.bounds)


MEANINGS: Final[Mapping[str, str]] = {
    **{column.name: column.meaning for column in ROW_COLUMNS},
    "event_date": "Day of the row in UTC; the table is partitioned by it.",
    "cluster": "Name of the Kubernetes cluster.",
    "node": "Name of the node.",
    "kafka_partition": "Kafka partition of the row's records.",
    "kafka_offset": "Offset of the row's record in this partition.",
    "time": "End of the sample in UTC, to the microsecond.",
    "in_force_from": "Time from which this version applies.",
    "deleted_time": "Time at which the object disappeared from the API server; null while it"
    " exists.",
    "resource_version": "Version of the Kubernetes object; it orders versions if it is a number.",
    "minute": "Start of the minute; `hour` or `day` in the sums by hour and day.",
    "measured_busy_ns": "Part of `busy_ns` with method `exclusive`, `process_utilization` or"
    " `accounting`.",
    "memory_byte_ns": "Memory multiplied by the time for which it was in use.",
    "measured_memory_byte_ns": "Part of `memory_byte_ns` with method `measured` or `unified`.",
    "measured_energy_millijoules": "Part of `energy_millijoules` with method `counter`, even if the"
    " energy of a shared device was divided by busy time.",
    "unresponsive_ns": "Part of `allocated_ns` in which the device did not respond.",
    "scaled_allocated_ns": "Part of `allocated_ns` in which more than the device was allocated.",
    "sample_count": "Number of entries of samples that ended in the period.",
    "first_offset": "First offset of the range that contains the row's events.",
    "last_offset": "Last offset of the range that contains the row's events.",
    "ingested_time_ns": "When the sink read the last of the row's events, by its own clock,"
    " nanoseconds since the epoch.",
    "priority": "The scheduler's priority of the pod; null in older rows.",
    "priority_class": "Name of the pod's priority class.",
    "requested_cpu_millicores": "CPU that the pod requests as a whole; null in older rows.",
    "requested_memory_bytes": "Memory that the pod requests as a whole; null in older rows.",
    "allocatable_cpu_millicores": "CPU that the node has for pods; null in older rows.",
    "allocatable_memory_bytes": "Memory that the node has for pods; null in older rows.",
    "allocatable_resources": "JSON object with the amount of each GPU resource that the node has"
    " for pods; null in older rows.",
    "power_limit_milliwatts": "The GPU's power limit in force; null in older rows.",
    "unschedulable": "Whether the node was cordoned; null in older rows.",
    "annotations": "JSON object with the annotations that podwatch is configured to keep.",
    "owner_kind": "Kind of the pod's workload, such as `Deployment`.",
    "labels": "JSON object with the labels that podwatch is configured to keep.",
    "requested": "JSON object with the amount of each resource that the container requests in its"
    " pod's spec; for `idle`, the container to which the part is allocated.",
    "allocated_labels": "JSON object: for `idle`, labels of the pod to which this unused part is"
    " allocated.",
    "node_labels": "JSON object with the node's labels.",
    "namespace_labels": "JSON object with the labels of the pod's namespace; for `idle`, of the"
    " allocated pod's namespace.",
    "namespace_annotations": "JSON object with the annotations of that namespace.",
    BUSY.columns[0]: "Number of minutes by the time in which kernels ran, in percent of the minute:"
    f" {_bounds_of(BUSY)}. For `idle`, kernels of anybody in the allocated part.",
    DRAM.columns[0]: "The same for `dram_active_ns`; null without the chip's counters.",
    MEMORY.columns[0]: "Number of minutes by mean memory in GiB, the sizes of GPUs and MIG"
    f" instances: {_bounds_of(MEMORY)}; `more` is above.",
    MEMORY_MAX: "Largest mean memory of a minute.",
    ALLOCATED: "Only in `usage_hourly`. Bit 0 to 59 is set if the device was allocated in this"
    " minute of the hour, and its use is known at least in part. Null for rows without"
    " `allocated_ns`.",
    USED: "Only in `usage_hourly`. Bit 0 to 59 is set if kernels ran in this minute. For `idle`,"
    " kernels of anybody in the allocated part.",
    "usage.container_id": "Id of the container, only while its name is unknown.",
    "usage.busy_ns": "Time in which kernels ran; for `idle`, time in which none ran. Negative on"
    " `unattributed` after a late adjustment.",
    "usage.allocated_ns": "For `idle`: share of the device that was allocated to the row's"
    " container or job, or to nobody, as time.",
    "usage.pod_uid": "For category `pod`: UID of the pod, if known.",
    "entries.ingested_time_ns": "When the sink read the event, by its own clock, nanoseconds since"
    " the epoch.",
    "pods.node": "Node on which the pod runs.",
    "pods.pod_uid": "UID of the pod.",
    "pods.namespace": "Namespace of the pod.",
    "pods.pod": "Name of the pod.",
    "pods.created_time": "Time at which the API server created the pod.",
    "pods.scheduled_time": "Time at which a scheduler assigned the pod to its node; null in older"
    " rows.",
    "pods.started_time": "Time at which the kubelet accepted the pod; null before, and in older"
    " rows.",
    "pods.ended_time": "Time at which the pod's last container ended; null before, and in older"
    " rows.",
    "pods.in_force_from": "Time at which podwatch wrote this version.",
    "pods.config_hash": "A static pod's hash, which its cgroup has instead of the UID.",
    "pods.container_id": "Id of one container of this version; null if none has started.",
    "pods.container": "Name of that container.",
    "pods.requested": "JSON object with the amount of each GPU resource that the container"
    " requests.",
    "pending_pods.pod_uid": "UID of the pod, which it keeps in `pods`.",
    "pending_pods.namespace": "Namespace of the pod.",
    "pending_pods.pod": "Name of the pod.",
    "pending_pods.in_force_from": "Time at which podwatch wrote this version.",
    "pending_pods.requested": "JSON object with the amount of each GPU resource that must be free"
    " on one node; empty if the pod has only claims.",
    "pending_pods.queue": "Queue of Kueue, Volcano, KAI Scheduler or slurm-bridge that the pod"
    " names.",
    "pending_pods.scheduling_gates": "JSON array with the names of the pod's scheduling gates.",
    "pending_pods.reason": "Why the pod has no node, such as `Unschedulable` or `SchedulingGated`;"
    " null until a scheduler has tried.",
    "pending_pods.message": "The scheduler's explanation when another column last changed.",
    "pending_pods.created_time": "Time at which the API server created the pod.",
    "pending_pods.left_time": "Time at which podwatch saw that the pod got a node or was deleted;"
    " null while it waits.",
    "namespaces.namespace": "Name of the namespace.",
    "inventory.gpu_uuid": "UUID of the GPU; null if the node has no GPU from then on, or was"
    " removed.",
    "inventory.serial": "Serial number of the GPU.",
    "inventory.gpu_index": "The driver's index of the GPU.",
    "inventory.memory_total_bytes": "Size of the GPU's memory.",
    "incidents.time": "Time of the incident.",
    "incidents.gpu_uuid": "UUID of the GPU.",
    "incidents.gpu_instance": "GPU instance of a MIG instance.",
    "incidents.compute_instance": "Compute instance of a MIG instance.",
    "incidents.kind": "Kind of the incident, such as `xid` or `gpu_lost`.",
    "incidents.severity": "`info`, `warning` or `critical`.",
    "incidents.source": "Source from which the agent learned of the incident.",
    "incidents.xid": "The XID code, for kind `xid`.",
    "incidents.mnemonic": "NVIDIA's name of the XID.",
    "incidents.category": "Class of the XID.",
    "incidents.action": "Recommended action.",
    "incidents.message": "Text of the driver or kernel.",
    "incidents.present_at_start": "Whether the condition already existed when the agent started.",
    "incidents.pods": 'JSON array of the pods on the GPU: `{"uid", "namespace", "pod"}`.',
    "gaps.topic": "Topic whose events are missing.",
    "gaps.kafka_partition": "Partition of the missing events.",
    "gaps.reason": "Why events are missing.",
    "gaps.first_offset": "First missing offset.",
    "gaps.next_offset": "Offset after the last missing one.",
    "gaps.missed_offsets": "Number of offsets, including transaction markers: at most this many"
    " events are missing.",
    "gaps.time_before": "Time of the partition's last stored event; null if there is none, or if a"
    " damaged data file prevents reading it.",
    "gaps.time_after": "Time of the first event after the gap; null if there is none yet.",
    "gaps.detected_at": "When the sink detected the gap, by its own clock.",
    "gaps.topic_id": "Kafka's identity of the topic.",
    "bill_lines.period_begin": "Start of the billed period.",
    "bill_lines.period_end": "End of the billed period, exclusive.",
    "bill_lines.dimensions": "JSON array with the names of the dimensions.",
    "bill_lines.revision": "Number of the revision, from 1.",
    "bill_lines.supersedes": "The revision that this one corrects.",
    "bill_lines.line": "Id of the line item.",
    "bill_lines.dimension_values": "JSON array with the value of each dimension.",
    "bill_lines.charge_class": "`correction` if the row changes a line of an earlier revision.",
    "bill_lines.idle_kind": "Kind of idle time, such as `no_data`; null for lines of tenants.",
    "bill_lines.allocated_gpu_seconds": "Allocated GPU-seconds.",
    "bill_lines.used_gpu_seconds": "Used GPU-seconds.",
    "bill_lines.used_by_others_gpu_seconds": "GPU-seconds that were allocated to one pod or job and"
    " used by another one; null in older rows.",
    "bill_lines.billed_gpu_seconds": "Billed GPU-seconds.",
    "bill_lines.memory_byte_seconds": "Memory multiplied by the time for which it was in use.",
    "bill_lines.energy_kilowatt_hours": "Energy.",
    "bill_lines.gpu_cost": "Cost of GPU time.",
    "bill_lines.energy_cost": "Cost of energy.",
    "bill_lines.shared_cost": "Cost of shared idle time.",
    "bill_lines.unused_cost": "Part of the cost for time that was allocated and not used.",
    "bill_lines.cost": "Sum of the line item.",
    "bill_lines.parts": "JSON array with quantity, unit price and cost by price; null for a"
    " correction.",
    "bill_lines.currency": "Currency of all costs.",
    "bill_lines.policy_name": "Name of the prices and policies.",
    "bill_lines.policy_sha256": "SHA-256 of their file.",
    "bill_lines.table_versions": "JSON object with the version of each table that was read.",
    "bill_lines.data_coverage_ratio": "Data coverage as a fraction, such as `719/720`.",
    "bill_lines.measured_ratio": "Measured part of the usage as a fraction.",
    "bill_lines.valid_through": "Time through which usage was complete.",
    "bill_lines.closed_time": "When the revision was closed.",
    "bill_lines.note": "Note on the revision of the row.",
    "bill_lines.approved_by": "Person or document that approved the revision.",
    "valid_to": "Time at which the next version replaces this one; null for the last version.",
}
"""Meanings by column, or by table and column if they differ."""


def tables_page(standing: str) -> str:
    """Return the page with new tables; raises `UserError` if a mark or a meaning is missing."""
    page = standing
    for schema in TABLES.values():
        if schema.name not in _LEFT_OUT:
            page = put_between_marks(page, schema.name, table(_COLUMNS, _rows_of(schema)))
    page = put_between_marks(page, USAGE_HOURLY.name, table(_COLUMNS, _of_minutes()))
    page = put_between_marks(page, "usage view", table(_ADDED, _added_to_usage()))
    page = put_between_marks(page, "joined", table(_JOINED, _joined_to_usage()))
    return put_between_marks(page, "entries view", table(_ADDED, _added_to_entries()))


def _rows_of(schema: TableSchema) -> Iterator[tuple[str, ...]]:
    for column in schema.columns:
        null = "yes" if column.nullable else ""
        yield code(column.name), type_of(column), null, meaning_of(schema.name, column.name)


def _of_minutes() -> Iterator[tuple[str, ...]]:
    """Yield one row for all columns of a distribution, then one for each other added column."""
    columns = {column.name: column for column in USAGE_HOURLY.columns}
    named = {each.columns[0]: each for each in DISTRIBUTIONS}
    for name in (*named, MEMORY_MAX, *BITMAPS):
        bounds = named[name].columns if name in named else (name,)
        shown = f"{code(name)} … {code(bounds[-1])}" if name in named else code(name)
        yield shown, type_of(columns[name]), "yes", meaning_of(USAGE_HOURLY.name, name)


def type_of(column: StoreColumn) -> str:
    """Return Delta's name of a column's type."""
    shown = str(column.kind).removeprefix("arro3.core.DataType<").rstrip(">\n")
    if shown.startswith("Decimal128"):
        return shown.replace("Decimal128", "decimal").replace(" ", "")
    return TYPES[shown]


def meaning_of(table_name: str, column: str) -> str:
    """Return the meaning of a column; raises `UserError` if it has none."""
    found = MEANINGS.get(f"{table_name}.{column}") or MEANINGS.get(column)
    if not found:
        raise UserError(f"missing meaning of {table_name}.{column}; add it to {__name__}.MEANINGS")
    return found


def _added_to_usage() -> Iterator[tuple[str, ...]]:
    types = types_of(usage_sql(USAGE.name, {USAGE.name: empty_relation(USAGE)}))
    return ((code(name), types[name], code(sql)) for name, sql in READABLE.items())


def _joined_to_usage() -> Iterator[tuple[str, ...]]:
    types = types_of(usage_sql(USAGE.name, {USAGE.name: empty_relation(USAGE)}))
    own = {column.name for column in USAGE.columns} | READABLE.keys()
    return (
        (code(name), kind, meaning_of(USAGE.name, name))
        for name, kind in types.items()
        if name not in own
    )


def _added_to_entries() -> Iterator[tuple[str, ...]]:
    types = types_of(f"FROM {no_entries_sql()}")
    return ((code(name), types[name], code(sql)) for name, sql in DERIVED_COLUMNS.items())


def types_of(query: str) -> dict[str, str]:
    """Return DuckDB's types of a query's columns, by name."""
    with duckdb.connect() as connection:
        described = connection.execute(f"DESCRIBE {query}").fetchall()
    return {name: kind for name, kind, *_ in described}
