"""Stores for bills: tables of usage, inventory, nodes, pods and namespaces, written as Delta."""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, write_deltalake

from gpuledger.store.schema import TableSchema, table_uri
from gpuledger.store.views import TABLES

HOUR_US = 3_600_000_000
HOUR_NS = HOUR_US * 1000
DAY = date(2026, 10, 1)
BEGIN_US = int(datetime(2026, 10, 1, tzinfo=UTC).timestamp()) * 1_000_000

UNKNOWN = "?"
Value = Any
"""The value of a column of any type."""
Row = Mapping[str, Value]


def usage_row(hour: int, *, gpu: str = "GPU-a", category: str = "idle", **fields: Value) -> Row:
    """Return a row of usage of an hour of the first day, by default of a whole H100 of node n."""
    time_us = BEGIN_US + hour * HOUR_US
    return {
        "event_date": (time_us // 86_400_000_000),
        "cluster": "prod",
        "node": "n",
        "hour": time_us,
        "gpu_uuid": gpu,
        "gpu_index": 0,
        "model": "H100",
        "category": category,
        "busy_ns": 0,
        "sample_count": 1,
        "kafka_partition": 3,
        "first_offset": hour * 10,
        "last_offset": hour * 10 + 9,
        "ingested_time_ns": 0,
        **fields,
    }


def allocated(hour: int, pod: str | None, allocated_ns: int = HOUR_NS, **fields: Value) -> Row:
    """Return a row of time allocated to a pod of namespace ns, or unallocated time.

    The pod `UNKNOWN` stands for time whose allocation is unknown.
    """
    holder = (
        {}
        if pod is None
        else {"allocated_pod_state": "unknown"}
        if pod == UNKNOWN
        else {
            "allocated_pod_state": "known",
            "allocated_pod_uid": f"uid-{pod}",
            "allocated_namespace": "ns",
            "allocated_pod": pod,
        }
    )
    return usage_row(
        hour, **{"allocated_ns": allocated_ns, "busy_ns": allocated_ns, **holder, **fields}
    )


def used(hour: int, pod: str, busy_ns: int, **fields: Value) -> Row:
    """Return a row of usage of a pod of namespace ns."""
    user = {"pod_uid": f"uid-{pod}", "pod_state": "known", "namespace": "ns", "pod": pod}
    return usage_row(hour, category="pod", busy_ns=busy_ns, **{**user, **fields})


def inventory_row(gpu: str | None = "GPU-a", *, hour: float = -24, **fields: Value) -> Row:
    """Return the row of a GPU that is in the inventory from an hour of the first day on."""
    return {
        "cluster": "prod",
        "node": "n",
        "in_force_from": BEGIN_US + round(hour * HOUR_US),
        "gpu_uuid": gpu,
        "model": "H100" if gpu else None,
        "kafka_partition": 3,
        "kafka_offset": round(hour * 10) + 1000,
        **fields,
    }


def node_row(*, hour: float = -24, **fields: Value) -> Row:
    """Return the row of a version of node n."""
    return {
        "cluster": "prod",
        "node": "n",
        "in_force_from": BEGIN_US + round(hour * HOUR_US),
        "kafka_partition": 3,
        "kafka_offset": round(hour * 10) + 1000,
        **fields,
    }


def pod_row(pod: str, *, hour: float = -1, **fields: Value) -> Row:
    """Return the row of a version of a pod of node n."""
    time_us = BEGIN_US + round(hour * HOUR_US)
    return {
        "cluster": "prod",
        "node": "n",
        "pod_uid": f"uid-{pod}",
        "in_force_from": time_us,
        "namespace": "ns",
        "pod": pod,
        "labels": "{}",
        "created_time": BEGIN_US - HOUR_US,
        "resource_version": str(1000 + round(hour)),
        "kafka_partition": 3,
        "kafka_offset": round(hour * 10) + 1000,
        **fields,
    }


def pending_row(pod: str, *, created: float, left: float | None = None, **fields: Value) -> Row:
    """Return the row of the last version of a pod that waited between two hours of the first day.

    By default, it requests a GPU.
    """
    created_us = BEGIN_US + round(created * HOUR_US)
    left_us = None if left is None else BEGIN_US + round(left * HOUR_US)
    return {
        "cluster": "prod",
        "pod_uid": f"uid-{pod}",
        "in_force_from": created_us if left_us is None else left_us,
        "namespace": "ns",
        "pod": pod,
        "requested": '{"nvidia.com/gpu":"1"}',
        "created_time": created_us,
        "left_time": left_us,
        "resource_version": str(1000 + (left is not None)),
        "kafka_partition": 0,
        "kafka_offset": 0,
        **fields,
    }


def namespace_row(namespace: str, *, hour: float = -24, **fields: Value) -> Row:
    """Return the row of a version of a namespace."""
    return {
        "cluster": "prod",
        "namespace": namespace,
        "in_force_from": BEGIN_US + round(hour * HOUR_US),
        "kafka_partition": 3,
        "kafka_offset": round(hour * 10) + 1000,
        **fields,
    }


def write_store(
    store: Path, *, properties: Mapping[str, str] | None = None, **tables: Sequence[Row]
) -> str:
    """Append rows to the tables of a store; return its URI. `properties` goes with the commits."""
    for name, rows in tables.items():
        if rows:
            _append(store, TABLES[name], rows, properties or {})
    return str(store)


def minute_row(row: Row, minute: int) -> Row:
    """Return an hour's row as that of one of its minutes, counted from the start of the hour."""
    return {**row, "hour": row["hour"] + minute * 60_000_000}


def _append(
    store: Path, table: TableSchema, rows: Sequence[Row], properties: Mapping[str, str]
) -> None:
    period = {"usage": "minute", "usage_daily": "day"}.get(table.name, "hour")
    named = [
        {**row, period: row["hour"]} if "hour" in row and period != "hour" else row for row in rows
    ]
    columns = [column.name for column in table.columns]
    known = {*columns, "hour"}
    unknown = {name for row in named for name in row} - known
    assert not unknown, unknown
    write_deltalake(
        table_uri(str(store), table.name),
        table.table_of([tuple(row.get(column) for column in columns) for row in named]),
        mode="append",
        partition_by=list(table.partition_by) or None,
        commit_properties=CommitProperties(custom_metadata=dict(properties)),
    )
