"""How the store is read: the files of the table as they are now, as a relation for SQL.

Here lives what a reader needs beside a SQL engine, such as DuckDB. Nothing is written here.

The table has whole numbers. The relation has them too, and beside them what people ask for:
seconds, byte-seconds, joules, GPU-hours. All but the hours are decimals, which DuckDB multiplies
and sums without rounding, in 38 digits: a sum over rows is what the events sum to, to the last one.
GPU-hours are of whole boards: an hour of an instance counts as its slices of the board.
"""

from collections.abc import Mapping
from typing import Final

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.schema import ENTRIES, GAPS, PODS, table_uri

# A GPU of which no slices are known is a board by itself; of an instance, nobody knows how much of
# one it is. A cut board's own row is what no instance has.
_DEVICE_FRACTION: Final = (
    "CASE WHEN board_compute_slices > 0 THEN compute_slices / board_compute_slices"
    " WHEN parent_uuid IS NULL THEN 1.0 END"
)
DERIVED_COLUMNS: Final[Mapping[str, str]] = {
    # 64 bits times a decimal of nine digits is one of 29 digits, which holds them all.
    **{
        f"{column.name.removesuffix('_ns')}_seconds": f"{column.name} * 0.000000001"
        for column in ENTRIES.columns
        # A time is no length.
        if column.name.endswith("_ns") and not column.name.endswith("_time_ns")
    },
    # 64 bits do not hold the product: 80 GiB for a second are 8.6e19 byte-nanoseconds.
    "memory_byte_seconds": "memory_bytes::DECIMAL(38, 0) * interval_ns * 0.000000001",
    "joules": "energy_millijoules * 0.001",
    "device_fraction": _DEVICE_FRACTION,
    "gpu_hours": "busy_ns / 3.6e12 * device_fraction",
    "held_gpu_hours": "held_ns / 3.6e12 * device_fraction",
}
"""What the relation of the live rows adds to the table's columns, with DuckDB's SQL for each."""


def entries_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the live rows: `SELECT … FROM {entries_sql(uri)}`.

    They have the table's columns and `DERIVED_COLUMNS`. Rows that were written before their pod was
    known have its names, as far as the store has them by now. Raises `UserError` where there is no
    table, or nothing was ever written to it.
    """
    try:
        table = DeltaTable(table_uri(store_uri), storage_options=dict(storage_options or {}))
        uris = table.file_uris()
    except TableNotFoundError:
        uris = []
    if not uris:
        raise UserError(
            f"no store with rows at {mask_address(store_uri)}; give the store.uri of a"
            " `gpuledger-sink store` that has written events there"
        )
    files = ", ".join(map(_quoted, uris))
    # By name, because a file that is older than a column has not got it.
    rows = f"read_parquet([{files}], hive_partitioning = true, union_by_name = true)"
    added = ", ".join(f"{sql} AS {name}" for name, sql in DERIVED_COLUMNS.items())
    if (pods := _pods_sql(store_uri, storage_options)) is not None:
        rows = _named(rows, pods)
    return f"(SELECT *, {added} FROM {rows})"  # noqa: S608  # the table's own names, quoted files


def _pods_sql(store_uri: str, storage_options: Mapping[str, str] | None) -> str | None:
    """Return DuckDB's SQL for the rows of `pods`; `None` where there are none."""
    try:
        uri = table_uri(store_uri, PODS.name)
        files = DeltaTable(uri, storage_options=dict(storage_options or {})).file_uris()
    except TableNotFoundError:
        return None
    return (
        f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true)" if files else None
    )


def _named(rows: str, pods: str) -> str:
    """Return the relation of the rows with the names that came after them.

    By the UID that the row has, or by its container, and of pods of the row's node alone: what a
    node says of another's pods is its own word. A holder, which the kubelet calls by name, is the
    pod of the node that had that name at the row's time. Each join finds one row at most, so that
    no entry is counted twice. What a row says itself it keeps.
    """
    # Absent where the event says nothing of the pod at all.
    is_unknown = "coalesce(entries.pod_state, 'pending') IN ('pending', 'named')"
    return f"""(
        WITH versions AS (FROM {pods}), named AS (
            SELECT cluster, node, called, any_value(pod_uid) AS pod_uid,
                any_value(namespace) AS namespace, any_value(pod) AS pod,
                any_value(owner_kind) AS owner_kind,
                any_value(owner_name) AS owner_name,
                list({{'since': in_force_from, 'labels': labels}}
                    ORDER BY in_force_from, kafka_offset) AS versions
            FROM (SELECT *, pod_uid AS called FROM versions UNION ALL
                SELECT *, config_hash AS called FROM versions WHERE config_hash IS NOT NULL)
            GROUP BY cluster, node, called
        ), placed AS (
            SELECT cluster, node, container_id, arg_max(pod_uid, kafka_offset) AS pod_uid,
                arg_max(container, kafka_offset) AS container
            FROM versions WHERE container_id IS NOT NULL GROUP BY cluster, node, container_id
        ), bearers AS (
            SELECT cluster, node, namespace, pod,
                list({{'since': in_force_from, 'uid': pod_uid, 'kind': owner_kind,
                    'owner': owner_name, 'labels': labels}}
                    ORDER BY in_force_from, kafka_offset) AS versions
            FROM versions GROUP BY cluster, node, namespace, pod
        ), told AS (
            SELECT entries.*, CASE WHEN entries.holder_state = 'named' THEN coalesce(
                list_filter(bearers.versions, lambda version: version.since <= entries.time)[-1],
                bearers.versions[1]) END AS holder
            FROM {rows} AS entries
            LEFT JOIN bearers ON bearers.cluster = entries.cluster AND bearers.node = entries.node
                AND bearers.namespace = entries.holder_namespace
                AND bearers.pod
                    = CASE WHEN entries.holder_state = 'named' THEN entries.holder_pod END
        )
        SELECT entries.* EXCLUDE (holder) REPLACE (
            coalesce(named.pod_uid, entries.pod_uid) AS pod_uid,
            CASE WHEN named.pod IS NULL THEN entries.pod_state ELSE 'known' END AS pod_state,
            coalesce(entries.namespace, named.namespace) AS namespace,
            coalesce(entries.pod, named.pod) AS pod,
            coalesce(entries.container,
                CASE WHEN placed.pod_uid = named.pod_uid THEN placed.container END) AS container,
            coalesce(entries.owner_kind, named.owner_kind) AS owner_kind,
            coalesce(entries.owner_name, named.owner_name) AS owner_name,
            coalesce(entries.labels, coalesce(
                list_filter(named.versions, lambda version: version.since <= entries.time)[-1],
                named.versions[1]).labels) AS labels,
            CASE WHEN holder IS NULL THEN entries.holder_state ELSE 'known' END AS holder_state,
            coalesce(entries.holder_uid, holder.uid) AS holder_uid,
            coalesce(entries.holder_owner_kind, holder.kind) AS holder_owner_kind,
            coalesce(entries.holder_owner_name, holder.owner) AS holder_owner_name,
            coalesce(entries.holder_labels, holder.labels) AS holder_labels
        )
        FROM told AS entries
        LEFT JOIN placed ON placed.cluster = entries.cluster AND placed.node = entries.node
            AND placed.container_id = CASE WHEN {is_unknown} THEN entries.container_id END
        LEFT JOIN named ON named.cluster = entries.cluster AND named.node = entries.node
            AND named.called
                = CASE WHEN {is_unknown} THEN coalesce(entries.pod_uid, placed.pod_uid) END
    )"""  # noqa: S608  # the tables' own names, quoted files


def gaps_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of `gaps`; a relation without rows where there are none."""
    try:
        uri = table_uri(store_uri, GAPS.name)
        files = DeltaTable(uri, storage_options=dict(storage_options or {})).file_uris()
    # No gap was ever recorded there, which is what a reader is to see.
    except TableNotFoundError:
        files = []
    if files:
        return f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true)"
    # Typed, so that a query finds the columns and their operators also where nothing is missing.
    names = {"Utf8": "VARCHAR", "Int32": "INTEGER", "Int64": "BIGINT"}
    columns = ", ".join(
        f"NULL::{next((names[kind] for kind in names if kind in str(column.kind)), 'TIMESTAMPTZ')}"
        f" AS {column.name}"
        for column in GAPS.columns
    )
    return f"(SELECT {columns} WHERE false)"


def count_rows(store_uri: str, storage_options: Mapping[str, str] | None = None) -> int:
    """Return the number of live rows, from the table's log; 0 where there is no table."""
    try:
        table = DeltaTable(table_uri(store_uri), storage_options=dict(storage_options or {}))
    except TableNotFoundError:
        return 0
    return sum(table.get_add_actions(flatten=True)["num_records"].to_pylist())


def _quoted(uri: str) -> str:
    # SQL's own: a bucket or a folder may have a quote in its name.
    escaped = uri.replace("'", "''")
    return f"'{escaped}'"
