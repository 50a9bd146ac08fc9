"""How the store is read: the files of the table as they are now, as a relation for SQL.

Here lives what a reader needs beside a SQL engine, such as DuckDB. Nothing is written here.

The table has whole numbers. The relation has them too, and beside them what people ask for:
seconds, byte-seconds, joules, GPU-hours. All but the hours are decimals, which DuckDB multiplies
and sums without rounding, in 38 digits: a sum over rows is what the events sum to, to the last one.
GPU-hours are of whole boards: an hour of an instance counts as its slices of the board.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.object_files import resolve_options
from gpuledger.store.schema import (
    ENTRIES,
    GAPS,
    PARTITION_COLUMN,
    PODS,
    StoreColumn,
    TableSchema,
    table_uri,
)

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
_SKEW_SECONDS: Final = 60
"""So far the clocks of a node and of the API server may be apart: a pod holds once it is made."""
_LINGER_SECONDS: Final = 5
"""How long a kubelet may list a pod that the API server has no more."""


def entries_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the live rows: `SELECT … FROM {entries_sql(uri)}`.

    They have the table's columns and `DERIVED_COLUMNS`. Rows that were written before their pod was
    known have its names, as far as the store has them by now. Raises `UserError` where there is no
    table, or nothing was ever written to it.
    """
    files = live_files(store_uri, ENTRIES.name, storage_options)
    if not files:
        raise UserError(
            f"no store with rows at {mask_address(store_uri)}; give the store.uri of a"
            " `gpuledger-sink store` that has written events there"
        )
    by_day: dict[str, list[str]] = {}
    for file in files:
        by_day.setdefault(_day_of(file), []).append(file)
    # Each day with its files, so that a query of a few days opens those alone. Not by DuckDB's own
    # hive_partitioning, which takes every folder above the store that is called a=b for a column.
    days = (
        f"SELECT *, {day} AS {PARTITION_COLUMN} FROM {relation(of_day)}"  # noqa: S608  # see below
        for day, of_day in sorted(by_day.items())
    )
    rows = f"({' UNION ALL BY NAME '.join(days)})"
    if pods := live_files(store_uri, PODS.name, storage_options):
        rows = named_rows(rows, relation(pods))
    return _readable(rows)


def no_entries_sql() -> str:
    """Return DuckDB's SQL for the same without any row."""
    day = f"NULL::DATE AS {PARTITION_COLUMN}"
    return _readable(f"(SELECT *, {day} FROM {empty_relation(ENTRIES)})")  # noqa: S608  # the table's own names


def _readable(rows: str) -> str:
    added = ", ".join(f"{sql} AS {name}" for name, sql in DERIVED_COLUMNS.items())
    return f"(SELECT *, {added} FROM {rows})"  # noqa: S608  # the table's own names, quoted files


def rows_sql(store_uri: str, name: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the live rows of a table as they are, without `event_date`.

    Raises `UserError` where there is no such table, or nothing was ever written to it.
    """
    if files := live_files(store_uri, name, storage_options):
        return relation(files)
    raise UserError(
        f"no table {name} with rows at {mask_address(store_uri)}; give the store.uri of a"
        " `gpuledger-sink store` that has written there"
    )


def open_table(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> DeltaTable | None:
    """Return a table as it is now; absent where there is none.

    Raises UserError, in one line, where the storage does not answer or the log cannot be read.
    """
    uri = table_uri(store_uri, name)
    try:
        return DeltaTable(uri, storage_options=resolve_options(storage_options))
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        # Below the first line are its causes, and then the server's whole answer.
        lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()
        causes = [line.strip(" \N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}") for line in lines[:3]]
        said = ": ".join(cause for cause in causes if cause and not cause.startswith("<"))
        raise UserError(
            f"cannot read the store at {mask_address(uri)}: {said[:400]}{_remedy(said)}"
        ) from error


def _remedy(said: str) -> str:
    """Return what to do where an error is of a log that was cut short."""
    is_damage = re.search(r"JSON|Parquet|EOF", said, re.IGNORECASE)
    return "; repair its log as docs/store.md says under Repair" if is_damage else ""


def live_files(store_uri: str, name: str, storage_options: Mapping[str, str] | None) -> list[str]:
    """Return the files of a table as they are now; none where there is no such table."""
    table = open_table(store_uri, name, storage_options)
    return [] if table is None else _files_of_table(table)


def _files_of_table(table: DeltaTable) -> list[str]:
    # Of a file system the log's addresses are percent-encoded, and its paths are not.
    return [unquote(uri) if uri.startswith("/") else uri for uri in table.file_uris()]


def relation(files: Iterable[str]) -> str:
    """Return DuckDB's SQL for the rows of files, by the columns' names.

    A file that is older than a column has not got it.
    """
    listed = ", ".join(quote(escape_path(file)) for file in files)
    return f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"


def _day_of(file: str) -> str:
    """Return the SQL of the day of which a file's rows are, which stands in its folder's name."""
    found = re.search(rf"/{PARTITION_COLUMN}=(\d{{4}}-\d\d-\d\d)/[^/]*$", file)
    # By its definition where another engine has laid the files out otherwise.
    return f"DATE '{found[1]}'" if found else "(time AT TIME ZONE 'UTC')::DATE"


def named_rows(rows: str, pods: str, *, until: str = "entries.time", has_names: bool = True) -> str:
    """Return the relation of the rows with the names that came after them.

    `until` is the SQL of a row's end, where it is about more than an instant. Where rows do not say
    who owns a pod (`has_names`), all are looked up, holders by their UID first.

    A user is found by its container, then by its UID, then as a static pod by its hash, and among
    the pods of the row's node alone: what a node says of another's pods is its own word. Once its
    record has come, all that is said of it is the record's: the kubelet's name was a guess. A
    holder, which the kubelet calls by name, is the pod of the node that had that name at the row's
    time; one that was deleted before is not meant. Each join finds one row at most, so that no
    entry is counted twice.
    """
    # Absent where the event says nothing of the pod at all.
    states = "IN ('pending', 'named')" if has_names else "<> 'foreign'"
    is_unknown = f"coalesce(entries.pod_state, 'pending') {states}"
    known_holder = "false" if has_names else "entries.holder_state <> 'foreign'"
    version = (
        "{'since': in_force_from, 'uid': pod_uid, 'namespace': namespace, 'pod': pod,"
        " 'kind': owner_kind, 'owner': owner_name, 'labels': labels}"
    )
    # By Kubernetes' own order where that is told by numbers, else as they were written: podwatch's
    # clock may have been set back in between.
    history = f"list({version} ORDER BY try_cast(resource_version AS HUGEINT), kafka_offset)"
    # Of a history the version in force at the row's time, before the first one that one.
    in_force = "coalesce(list_filter({0}, lambda each: each.since <= entries.time)[-1], {0}[1])"
    skew, lingering = (f"INTERVAL {seconds} SECOND" for seconds in (_SKEW_SECONDS, _LINGER_SECONDS))
    # Of pods of one name the newest that was there; else one that was by the API server's clock.
    bears = (
        f"lambda each: each.created <= {{0}}"
        f" AND (each.deleted IS NULL OR entries.time < each.deleted + {lingering})"
    )
    return f"""(
        WITH versions AS (
            -- Files that are older than the column have not got it.
            SELECT NULL::VARCHAR AS requested WHERE false UNION ALL BY NAME SELECT * FROM {pods}
        ), asked AS (
            SELECT cluster, node, pod_uid, container,
                arg_max(requested, kafka_offset) AS requested
            FROM versions WHERE container IS NOT NULL AND requested IS NOT NULL
            GROUP BY cluster, node, pod_uid, container
        ), by_uid AS (
            SELECT cluster, node, pod_uid, {history} AS history
            FROM versions GROUP BY cluster, node, pod_uid
        ), by_hash AS (
            SELECT cluster, node, config_hash, {history} AS history
            FROM versions WHERE config_hash IS NOT NULL GROUP BY cluster, node, config_hash
        ), placed AS (
            SELECT cluster, node, container_id, arg_max(pod_uid, kafka_offset) AS pod_uid,
                arg_max(container, kafka_offset) AS container
            FROM versions WHERE container_id IS NOT NULL GROUP BY cluster, node, container_id
        ), bearers AS (
            SELECT cluster, node, namespace, pod,
                list({{'created': created_time, 'deleted': deleted_time, 'history': history}}
                    ORDER BY created_time, pod_uid) AS pods
            FROM (
                SELECT cluster, node, namespace, pod, pod_uid,
                    max(created_time) AS created_time, max(deleted_time) AS deleted_time,
                    {history} AS history
                FROM versions GROUP BY cluster, node, namespace, pod, pod_uid
            ) GROUP BY cluster, node, namespace, pod
        ), found AS (
            SELECT entries.*, placed.container AS placed_container,
                {in_force.format("coalesce(of_container.history, by_uid.history, by_hash.history)")}
                    AS user,
                coalesce(by_holder.history, coalesce(
                    list_filter(bearers.pods, {bears.format(until)})[-1],
                    list_filter(bearers.pods, {bears.format(until + " + " + skew)})[1]
                ).history) AS holder_history
            FROM {rows} AS entries
            LEFT JOIN placed ON placed.cluster = entries.cluster AND placed.node = entries.node
                AND placed.container_id = CASE WHEN {is_unknown} THEN entries.container_id END
            LEFT JOIN by_uid AS of_container ON of_container.cluster = entries.cluster
                AND of_container.node = entries.node AND of_container.pod_uid = placed.pod_uid
            LEFT JOIN by_uid ON by_uid.cluster = entries.cluster AND by_uid.node = entries.node
                AND by_uid.pod_uid = CASE WHEN {is_unknown} THEN entries.pod_uid END
            LEFT JOIN by_uid AS by_holder ON by_holder.cluster = entries.cluster
                AND by_holder.node = entries.node
                AND by_holder.pod_uid = CASE WHEN {known_holder} THEN entries.holder_uid END
            LEFT JOIN by_hash ON by_hash.cluster = entries.cluster AND by_hash.node = entries.node
                AND by_hash.config_hash = CASE WHEN {is_unknown} THEN entries.pod_uid END
            LEFT JOIN bearers ON bearers.cluster = entries.cluster AND bearers.node = entries.node
                AND bearers.namespace = entries.holder_namespace
                AND bearers.pod
                    = CASE WHEN entries.holder_state = 'named' THEN entries.holder_pod END
        ), told AS (
            SELECT *, {in_force.format("holder_history")} AS holder FROM found AS entries
        )
        SELECT entries.* EXCLUDE (user, holder, holder_history, placed_container) REPLACE (
            CASE WHEN user IS NULL THEN entries.pod_uid ELSE user.uid END AS pod_uid,
            CASE WHEN user IS NULL THEN entries.pod_state ELSE 'known' END AS pod_state,
            CASE WHEN user IS NULL THEN entries.namespace ELSE user.namespace END AS namespace,
            CASE WHEN user IS NULL THEN entries.pod ELSE user.pod END AS pod,
            coalesce(entries.container, placed_container) AS container,
            CASE WHEN user IS NULL THEN entries.owner_kind ELSE user.kind END AS owner_kind,
            CASE WHEN user IS NULL THEN entries.owner_name ELSE user.owner END AS owner_name,
            CASE WHEN user IS NULL THEN entries.labels ELSE user.labels END AS labels,
            CASE WHEN holder IS NULL THEN entries.holder_state ELSE 'known' END AS holder_state,
            CASE WHEN holder IS NULL THEN entries.holder_uid ELSE holder.uid END AS holder_uid,
            CASE WHEN holder IS NULL THEN entries.holder_owner_kind ELSE holder.kind END
                AS holder_owner_kind,
            CASE WHEN holder IS NULL THEN entries.holder_owner_name ELSE holder.owner END
                AS holder_owner_name,
            CASE WHEN holder IS NULL THEN entries.holder_labels ELSE holder.labels END
                AS holder_labels,
            coalesce(entries.requested, of_user.requested, of_holder.requested) AS requested
        )
        FROM told AS entries
        LEFT JOIN asked AS of_user ON of_user.cluster = entries.cluster
            AND of_user.node = entries.node AND of_user.pod_uid = entries.user.uid
            AND of_user.container = coalesce(entries.container, entries.placed_container)
        LEFT JOIN asked AS of_holder ON of_holder.cluster = entries.cluster
            AND of_holder.node = entries.node AND of_holder.pod_uid = entries.holder.uid
            AND of_holder.container = entries.holder_container
    )"""  # noqa: S608  # the tables' own names, quoted files


def gaps_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of `gaps`; a relation without rows where there are none."""
    return gaps_of_files(live_files(store_uri, GAPS.name, storage_options))


def gaps_of_files(files: Sequence[str]) -> str:
    """Return the same of known files."""
    return relation(files) if files else empty_relation(GAPS)


_SQL_TYPES: Final[Mapping[str, str]] = {
    "Utf8": "VARCHAR",
    "Int32": "INTEGER",
    "Int64": "BIGINT",
    "Boolean": "BOOLEAN",
    "Date32": "DATE",
    "Timestamp": "TIMESTAMPTZ",
    "Decimal128": "DECIMAL",
}
"""DuckDB's types by the names of Arrow's, which have their parameters behind them."""


def empty_relation(schema: TableSchema) -> str:
    """Return DuckDB's SQL for a table without rows, as `relation` gives one that has some.

    Typed, so that a query finds the columns and their operators also where there is nothing yet.
    """
    columns = ", ".join(
        f"NULL::{_sql_type(column)} AS {column.name}"
        for column in schema.columns
        # It stands in the folders' names, and not in the files.
        if column.name not in schema.partition_by
    )
    return f"(SELECT {columns} WHERE false)"


def _sql_type(column: StoreColumn) -> str:
    kind = str(column.kind)
    name = next(name for name in _SQL_TYPES if name in kind)
    digits = re.search(r"\(\d+, *\d+\)", kind) if name == "Decimal128" else None
    return f"{_SQL_TYPES[name]}{digits[0] if digits else ''}"


def files_of(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> dict[str | None, list[str]]:
    """Return the files of a table as `days_of_files`; nothing where there is no such table."""
    table = open_table(store_uri, name, storage_options)
    return {} if table is None else days_of_files(table)


def days_of_files(table: DeltaTable) -> dict[str | None, list[str]]:
    """Return the files of a table by the day (2026-10-01) in their folder's name.

    Those in no day's folder stand under `None`.
    """
    by_day: dict[str | None, list[str]] = {}
    for file in sorted(_files_of_table(table)):
        found = re.search(rf"/{PARTITION_COLUMN}=(\d{{4}}-\d\d-\d\d)/[^/]*$", file)
        by_day.setdefault(found[1] if found else None, []).append(file)
    return by_day


def version_of(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> int | None:
    """Return the version of a table as it is now; absent where there is no such table."""
    table = open_table(store_uri, name, storage_options)
    return None if table is None else table.version()


def count_rows(
    store_uri: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    name: str = ENTRIES.name,
) -> int:
    """Return the number of a table's live rows, from its log; 0 where there is no such table."""
    table = open_table(store_uri, name, storage_options)
    if table is None:
        return 0
    return sum(table.get_add_actions(flatten=True)["num_records"].to_pylist())


def escape_path(uri: str) -> str:
    """Return how DuckDB is given a file, so that nothing in its name is a pattern."""
    # In a path these are patterns to DuckDB, which a class of one character is not.
    return re.sub(r"[*?\[]", r"[\g<0>]", uri) if uri.startswith("/") else uri


def quote(text: str) -> str:
    """Return a text as SQL has it: a bucket or a folder may have a quote in its name."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"
