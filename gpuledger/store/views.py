"""All tables of a store as DuckDB views: whole numbers, readable units, and names.

`create_views` creates a view for each table, without rows if the table has none yet. The views of
usage have all columns of their table, the columns in `READABLE`, and the current description of the
pod, the allocation, the node and the namespace. A row is joined to the version in force at the
row's start, or to the first version if the row is older. Views of tables with versions have the
column `valid_to`, which is null for the last version.

`usage_hourly_unnamed` and `usage_daily_unnamed` have the same rows without any descriptions, and
are many times as fast. `with_nodes` adds the nodes' descriptions to sums of these rows.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from gpuledger.store.bill_table import BILL_LINES
from gpuledger.store.commits import complete_through_us
from gpuledger.store.object_files import FileRegistry, open_object_files
from gpuledger.store.pod_names import NEWEST_LAST, named_usage
from gpuledger.store.query import (
    DERIVED_COLUMNS,
    empty_relation,
    entries_sql,
    live_files,
    no_entries_sql,
    no_store,
    open_table,
    relation,
)
from gpuledger.store.schema import ENTRIES, GAPS, PODS, TableSchema
from gpuledger.store.usage_schema import (
    INCIDENTS,
    INVENTORY,
    NAMESPACES,
    NODES,
    PENDING_PODS,
    USAGE,
    USAGE_DAILY,
    USAGE_HOURLY,
)

_PERIODS: Final[Mapping[str, str]] = {
    USAGE.name: "minute",
    USAGE_HOURLY.name: "hour",
    USAGE_DAILY.name: "day",
}
READABLE: Final[Mapping[str, str]] = {
    **{
        f"{column.name.removesuffix('_ns')}_seconds": f"{column.name} * 0.000000001"
        for column in USAGE.columns
        # Excludes points in time. Also excludes byte-time, which has more digits than a column of
        # seconds can hold.
        if column.name.endswith("_ns") and not column.name.endswith(("_time_ns", "_byte_ns"))
    },
    # 29 of 38 digits are before the point; no device's amount exceeds them.
    "memory_byte_seconds": "try_cast(memory_byte_ns AS DECIMAL(29, 0)) * 0.000000001",
    "joules": "energy_millijoules * 0.001",
    "measured_joules": "measured_energy_millijoules * 0.001",
    "device_fraction": DERIVED_COLUMNS["device_fraction"],
    "gpu_hours": DERIVED_COLUMNS["gpu_hours"],
    "allocated_gpu_hours": DERIVED_COLUMNS["allocated_gpu_hours"],
}
"""Columns that the views of usage add to their tables' columns, with DuckDB's SQL for each.
GPU-hours are floating-point numbers, for people; the rest is exact."""
_NAMES: Final = (
    *("owner_kind", "owner_name", "labels", "requested"),
    *("allocated_owner_kind", "allocated_owner_name", "allocated_labels"),
)
_OF_NODE: Final[Mapping[str, str]] = {
    "node_pool": "node_pool",
    "instance_type": "instance_type",
    "zone": "zone",
    "region": "region",
    "capacity_type": "capacity_type",
    "labels": "node_labels",
}
_OF_NAMESPACE: Final[Mapping[str, str]] = {
    "labels": "namespace_labels",
    "annotations": "namespace_annotations",
}
_VERSIONED: Final[Mapping[str, tuple[str, str]]] = {
    PODS.name: ("cluster, node, pod_uid", NEWEST_LAST),
    PENDING_PODS.name: ("cluster, pod_uid", NEWEST_LAST),
    NODES.name: ("cluster, node", NEWEST_LAST),
    NAMESPACES.name: ("cluster, namespace", NEWEST_LAST),
    # Ordered by the agent's clock, as in bills, because there is no resource version.
    INVENTORY.name: ("cluster, node", "in_force_from, kafka_offset"),
}
"""The key of each versioned table, and the order in which versions replace one another."""


class Connection(FileRegistry, Protocol):
    """The part of a DuckDB connection that is used here."""

    def execute(self, query: str) -> Any:  # noqa: ANN401  # DuckDB's own
        """Run a statement."""


TABLES: Final[Mapping[str, TableSchema]] = {
    schema.name: schema
    for schema in (
        *(USAGE, USAGE_HOURLY, USAGE_DAILY, ENTRIES, PODS, PENDING_PODS, NODES, NAMESPACES),
        *(INVENTORY, INCIDENTS, GAPS, BILL_LINES),
    )
}
"""All tables with views, by name."""


def create_views(
    connection: Connection, store_uri: str, storage_options: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Create a view for each table; return the files of each table, by its name.

    Days and times are in UTC. Raises `UserError` if there is no store.
    """
    files = {name: live_files(store_uri, name, storage_options) for name in TABLES}
    relations = {name: _rows_of(name, found) for name, found in files.items() if found}
    if not relations:
        raise no_store(store_uri, "no store with rows at")
    open_object_files(connection, store_uri, storage_options)
    # Days and hours are in UTC, whatever the machine's time zone.
    connection.execute("SET TimeZone = 'UTC'")
    for name in TABLES:
        connection.execute(
            f"CREATE VIEW {name} AS {_view(name, relations, store_uri, storage_options)}"
        )
    for name in (USAGE_HOURLY.name, USAGE_DAILY.name):
        rows = {name: relations.get(name) or empty_relation(TABLES[name])}
        connection.execute(f"CREATE VIEW {name}_unnamed AS {usage_sql(name, rows)}")
    return files


def _rows_of(name: str, files: Iterable[str]) -> str:
    """Return the SQL for the rows of files; columns that all files lack are null."""
    return f"(FROM {empty_relation(TABLES[name])} UNION ALL BY NAME FROM {relation(files)})"


def _view(
    name: str,
    relations: Mapping[str, str],
    store_uri: str,
    storage_options: Mapping[str, str] | None,
) -> str:
    if name == ENTRIES.name:
        rows = entries_sql(store_uri, storage_options) if name in relations else no_entries_sql()
        return f"SELECT * FROM {rows}"  # noqa: S608  # quoted there
    rows = relations.get(name) or empty_relation(TABLES[name])
    if name in _PERIODS:
        return usage_sql(name, {**relations, name: rows})
    if name in _VERSIONED:
        return versions_sql(name, rows)
    return f"SELECT * FROM {rows}"  # noqa: S608  # quoted there


def versions_sql(name: str, rows: str) -> str:
    """Return the SQL for the rows of a versioned table, with the column `valid_to`.

    `valid_to` is the time at which the next version replaces a version. A version may have several
    rows; all of them have the same `valid_to`.
    """
    keys, order = _VERSIONED[name]
    return (
        "SELECT *, first_value(in_force_from) OVER ("  # noqa: S608  # the tables' own names, quoted files
        f"PARTITION BY {keys} ORDER BY {order}"
        " GROUPS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS valid_to"
        f" FROM {rows}"
    )


def usage_sql(name: str, relations: Mapping[str, str]) -> str:
    """Return the SQL for a table of usage with readable units and joined descriptions."""
    period = _PERIODS[name]
    day = f"({period} AT TIME ZONE 'UTC')::DATE AS event_date"
    missing = ", ".join(f"NULL::VARCHAR AS {column}" for column in _NAMES)
    rows = f"(SELECT *, {day}, {period} AS time, {missing} FROM {relations[name]})"  # noqa: S608  # quoted files
    if pods := relations.get(PODS.name):
        # The start of the next period is excluded.
        until = f"entries.time + INTERVAL 1 {period} - INTERVAL 1 MICROSECOND"
        # A pod matches if it existed at any time of the period.
        rows = named_usage(rows, pods, until=until)
    rows = with_nodes(rows, relations.get(NODES.name))
    rows = _with_version(
        rows,
        relations.get(NAMESPACES.name),
        keys={
            "cluster": "of_rows.cluster",
            "namespace": "coalesce(of_rows.namespace, of_rows.allocated_namespace)",
        },
        has=_OF_NAMESPACE,
    )
    added = ", ".join(f"{sql} AS {column}" for column, sql in READABLE.items())
    return f"SELECT * EXCLUDE (time), {added} FROM {rows}"  # noqa: S608  # the tables' own names


def with_nodes(rows: str, versions: str | None = NODES.name) -> str:
    """Return the SQL for rows with the node's description at their `time`.

    `rows` is the SQL for rows with `cluster`, `node` and `time`; `versions` is that of the nodes.
    """
    keys = {"cluster": "of_rows.cluster", "node": "of_rows.node"}
    return _with_version(rows, versions, keys=keys, has=_OF_NODE)


def with_namespaces(rows: str) -> str:
    """Return the SQL for rows with the labels and annotations of their namespace at their `time`.

    `rows` is the SQL for rows with `cluster`, `namespace` and `time`.
    """
    keys = {"cluster": "of_rows.cluster", "namespace": "of_rows.namespace"}
    return _with_version(rows, NAMESPACES.name, keys=keys, has=_OF_NAMESPACE)


def _with_version(
    rows: str, versions: str | None, *, keys: Mapping[str, str], has: Mapping[str, str]
) -> str:
    """Return the SQL for rows joined to the version of an object that is in force at a row's time.

    `versions` is the SQL for the object's versions. `keys` maps each key of the versions to the SQL
    of the same key in `rows`; `has` maps each column of the versions to its name in the result.
    Without `versions`, the columns are null.
    """
    if versions is None:
        absent = ", ".join(f"NULL::VARCHAR AS {name}" for name in has.values())
        return f"(SELECT *, {absent} FROM {rows})"  # noqa: S608  # the tables' own names
    own = ", ".join(keys)
    # The first version also applies to earlier times, because no earlier version is known. If an
    # object was deleted and created again, the new object applies from the deletion on. The hour of
    # its creation contains only usage of the new object, although the deletion was in force when
    # that hour began. Bills use the same rule (`gpuledger_reports.reading.versions`).
    history = f"OVER (PARTITION BY {own} ORDER BY in_force_from, kafka_offset)"
    since = (
        f"CASE WHEN row_number() {history} = 1 THEN TIMESTAMPTZ '0001-01-01 00:00:00+00'"
        f" WHEN lag(deleted_time) {history} IS NOT NULL THEN lag(in_force_from) {history}"
        " ELSE in_force_from END AS since"
    )
    is_replaced = (
        f"deleted_time IS NOT NULL AND lead(in_force_from) {history} IS NOT NULL"
        f" AND lag(in_force_from) {history} IS NOT NULL"
    )
    # A deletion may lack the deleted object's properties.
    kept = ", ".join(
        f"CASE WHEN deleted_time IS NULL THEN {column}"
        f" ELSE coalesce({column}, lag({column}) {history}) END AS {column}"
        for column in has
    )
    # If two versions are in force from the same time, the newer one counts.
    one_a_time = (
        f"(SELECT * FROM {versions} QUALIFY lead(in_force_from)"  # noqa: S608  # the tables' own names
        f" OVER (PARTITION BY {own}, in_force_from ORDER BY {NEWEST_LAST}) IS NULL)"
    )
    # Only the first of several consecutive deletions counts.
    first_deletions = (
        f"(SELECT * FROM {one_a_time} QUALIFY deleted_time IS NULL"  # noqa: S608  # as above
        f" OR lag(deleted_time) {history} IS NULL)"
    )
    described = ", ".join(f"versions.{column} AS {name}" for column, name in has.items())
    joined = " AND ".join(f"versions.{key} = {value}" for key, value in keys.items())
    return (
        f"(SELECT of_rows.*, {described} FROM {rows} AS of_rows ASOF LEFT JOIN"  # noqa: S608  # the tables' own names
        f" (SELECT * REPLACE ({kept}), {since} FROM {first_deletions} QUALIFY NOT ({is_replaced}))"
        " AS versions"
        f" ON {joined} AND of_rows.time >= versions.since)"
    )


def valid_through(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> datetime | None:
    """Return the time up to which a table is complete, judging by its newest commits.

    Data from unresponsive nodes, or lost in gaps, may still be missing before that time. Returns
    `None` if the table does not exist or no commit has a time.
    """
    table = open_table(store_uri, name, storage_options)
    if table is None:
        return None
    marks = complete_through_us(table)
    return datetime.fromtimestamp(min(marks.values()) / 1e6, tz=UTC) if marks else None
