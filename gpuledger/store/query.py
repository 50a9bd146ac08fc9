"""Reads the store: the current files of a table become a relation for SQL.

This module has what a reader needs in addition to an SQL engine such as DuckDB. It writes nothing.

The table contains whole numbers. The relation adds columns in units for people: seconds,
byte-seconds, joules, GPU-hours. All added columns except the hours are decimals, which DuckDB
multiplies and adds without rounding, in 38 digits, so sums over rows equal the sums over the events
exactly. GPU-hours are hours of whole physical GPUs: an hour of an instance counts in proportion to
its slices.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.damaged_files import (
    LOG,
    damaged_log_files,
    damaged_row_files,
    lacks_log,
    local_folder,
)
from gpuledger.store.object_files import resolve_options
from gpuledger.store.pod_names import named_entries
from gpuledger.store.schema import (
    ENTRIES,
    GAPS,
    PARTITION_COLUMN,
    PODS,
    StoreColumn,
    TableSchema,
    table_uri,
)

# A GPU without known slices is a whole physical GPU; for an instance without known slices, the
# fraction is unknown. A partitioned GPU's own row is the part without an instance.
_DEVICE_FRACTION: Final = (
    "CASE WHEN gpu_compute_slices > 0 THEN compute_slices / gpu_compute_slices"
    " WHEN parent_uuid IS NULL THEN 1.0 END"
)
DERIVED_COLUMNS: Final[Mapping[str, str]] = {
    # 64 bits times a decimal of nine digits give at most 29 digits, which fit.
    **{
        f"{column.name.removesuffix('_ns')}_seconds": f"{column.name} * 0.000000001"
        for column in ENTRIES.columns
        # Columns of points in time are excluded.
        if column.name.endswith("_ns") and not column.name.endswith("_time_ns")
    },
    # The product exceeds 64 bits: 80 GiB for one second are 8.6e19 byte-nanoseconds.
    "memory_byte_seconds": "memory_bytes::DECIMAL(38, 0) * interval_ns * 0.000000001",
    "joules": "energy_millijoules * 0.001",
    "device_fraction": _DEVICE_FRACTION,
    "gpu_hours": "busy_ns / 3.6e12 * device_fraction",
    "allocated_gpu_hours": "allocated_ns / 3.6e12 * device_fraction",
}
"""Columns that the relation adds to the table's, with DuckDB's SQL for each."""
_DAY_FOLDER: Final = re.compile(rf"/{PARTITION_COLUMN}=(\d{{4}}-\d\d-\d\d)/[^/]*$")
_DAMAGE: Final = (
    "Json error",
    "Parquet error",
    "Invalid JSON in log",
    "Corrupt footer",
    "Expected contiguous commit files",
    "No table metadata or protocol found",
    "Invalid Checkpoint",
)
"""Errors of deltalake 1.6 for an unreadable log, as opposed to unavailable storage."""
REPAIR: Final = 'see "Repair a table" in docs/guides/store.md'
_CREDENTIALS: Final = "while loading credentials"
_CAUSE: Final = "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}"
"""Start of an error line that explains the line before."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def entries_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of `entries`, for use in `SELECT … FROM {entries_sql(uri)}`.

    The rows have the table's columns and `DERIVED_COLUMNS`. Rows that were written before their pod
    was known get the pod's names if the store has the names now. Raises `UserError` if there is no
    table or the table has no rows.
    """
    by_day = files_of(store_uri, ENTRIES.name, storage_options)
    if not by_day:
        raise no_store(store_uri, "no store with rows at")
    # Files are listed by day, so that a query for a few days opens only the files of these days.
    # DuckDB's own hive_partitioning would make a column of every directory a=b above the store.
    days = list[str]()
    for day, of_day in sorted(by_day.items(), key=lambda each: each[0] or ""):
        # The day is computed from the time if another engine has laid out the files differently.
        column = f"DATE '{day}'" if day else "(time AT TIME ZONE 'UTC')::DATE"
        days.append(f"SELECT *, {column} AS {PARTITION_COLUMN} FROM {relation(of_day)}")  # noqa: S608  # see below
    rows = f"({' UNION ALL BY NAME '.join(days)})"
    if pods := live_files(store_uri, PODS.name, storage_options):
        rows = named_entries(rows, relation(pods))
    return _readable(rows)


def no_entries_sql() -> str:
    """Return DuckDB's SQL for a relation with the columns of `entries_sql` but without rows."""
    day = f"NULL::DATE AS {PARTITION_COLUMN}"
    return _readable(f"(SELECT *, {day} FROM {empty_relation(ENTRIES)})")  # noqa: S608  # the table's own names


def _readable(rows: str) -> str:
    added = ", ".join(f"{sql} AS {name}" for name, sql in DERIVED_COLUMNS.items())
    return f"(SELECT *, {added} FROM {rows})"  # noqa: S608  # the table's own names, quoted files


def rows_sql(store_uri: str, name: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of a table as they are stored, without `event_date`.

    Raises `UserError` if there is no such table or the table has no rows.
    """
    if files := live_files(store_uri, name, storage_options):
        return relation(files)
    raise no_store(store_uri, f"no table {name} with rows at")


def no_store(store_uri: str, missing: str) -> UserError:
    """Return the error for a missing table or store; `missing` is its text before the address."""
    if (folder := local_folder(store_uri)) is not None and not folder.is_dir():
        missing = "no such directory:"
    return UserError(
        f"{missing} {mask_address(store_uri)}; give the directory or URI to which a store sink,"
        " `gpuledger standalone` or `gpuledger demo` has written"
    )


def open_table(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> DeltaTable | None:
    """Return the current version of a table; `None` if the table does not exist.

    Raises `UserError` with one line if the storage does not answer or the log cannot be read.
    """
    uri = table_uri(store_uri, name)
    try:
        return DeltaTable(uri, storage_options=resolve_options(storage_options))
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        message = unfold(error)
        remedy = ""
        if is_damage(message):
            files = ", ".join(damaged_log_files(uri))
            remedy = f"; damaged: {files}" if files else ""
            remedy += f"; {REPAIR}"
        if _CREDENTIALS in message:
            remedy = "; set the credentials in the environment or in store.storage_options"
        raise UserError(
            f"cannot read the store at {mask_address(uri)}: {message[:400].rstrip('.')}{remedy}"
        ) from error


def open_own_table(
    store_uri: str, schema: TableSchema, storage_options: Mapping[str, str] | None = None
) -> DeltaTable | None:
    """Return a table like `open_table`; it has the columns that every version of gpuledger writes.

    Raises `UserError` if a column is missing, because a data lake may have its own table with this
    name.
    """
    table = open_table(store_uri, schema.name, storage_options)
    found = {field.name for field in table.schema().fields} if table else set()
    needed = [column.name for column in schema.columns if not column.nullable]
    missing = ", ".join(name for name in needed if name not in found)
    if table and missing:
        raise no_store(store_uri, f"the table {schema.name} lacks {missing} in the store at")
    return table


def unfold(error: BaseException) -> str:
    """Return deltalake's error and its causes in one line.

    Only the first line of each is used, because further lines contain a server's whole response or
    a Rust backtrace.
    """
    lines = [_COLOUR.sub("", line).strip() for line in str(error).strip().splitlines()]
    causes = [line.removeprefix(_CAUSE).strip() for line in lines[1:] if line.startswith(_CAUSE)]
    return ": ".join([lines[0] if lines else type(error).__name__, *causes])


def is_damage(message: str) -> bool:
    """Return whether a deltalake error means that the log is damaged."""
    return any(sign in message for sign in _DAMAGE)


def live_files(store_uri: str, name: str, storage_options: Mapping[str, str] | None) -> list[str]:
    """Return the current files of a table; none if there is no such table."""
    table = open_table(store_uri, name, storage_options)
    return [] if table is None else _files_of_table(table)


def _files_of_table(table: DeltaTable) -> list[str]:
    # On a file system, deltalake returns percent-encoded addresses, but the paths are not encoded.
    return [unquote(uri) if uri.startswith("/") else uri for uri in table.file_uris()]


def relation(files: Iterable[str]) -> str:
    """Return DuckDB's SQL for the rows of files, with columns matched by name.

    Columns that an older file lacks are null.
    """
    listed = ", ".join(quoted(escape_path(file)) for file in files)
    return f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"


def gaps_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of `gaps`, or for an empty relation if there are none."""
    return gaps_of_files(live_files(store_uri, GAPS.name, storage_options))


def gaps_of_files(files: Sequence[str]) -> str:
    """Return DuckDB's SQL for the rows of these files of `gaps`, or for an empty relation."""
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
"""DuckDB's type for each Arrow type; parameters follow the Arrow type's name."""


def empty_relation(schema: TableSchema) -> str:
    """Return DuckDB's SQL for a table without rows, with the columns of `relation`.

    The columns have types, so that queries work even if there are no rows yet.
    """
    columns = ", ".join(
        f"NULL::{sql_type(column)} AS {column.name}"
        for column in schema.columns
        # Partition columns are in the directories' names instead of the files.
        if column.name not in schema.partition_by
    )
    return f"(SELECT {columns} WHERE false)"


def sql_type(column: StoreColumn) -> str:
    """Return the SQL name of a column's type."""
    kind = str(column.kind)
    name = next(name for name in _SQL_TYPES if name in kind)
    digits = re.search(r"\(\d+, *\d+\)", kind) if name == "Decimal128" else None
    return f"{_SQL_TYPES[name]}{digits[0] if digits else ''}"


def files_of(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> dict[str | None, list[str]]:
    """Return a table's files by day, as `days_of_files` does; empty if there is no such table."""
    table = open_table(store_uri, name, storage_options)
    return {} if table is None else days_of_files(table)


def days_of_files(table: DeltaTable) -> dict[str | None, list[str]]:
    """Return the files of a table by the day (2026-10-01) in their directory's name.

    Files without a day have the key `None`.
    """
    by_day: dict[str | None, list[str]] = {}
    for file in sorted(_files_of_table(table)):
        found = _DAY_FOLDER.search(file)
        by_day.setdefault(found[1] if found else None, []).append(file)
    return by_day


def check_table(
    store_uri: str, name: str, storage_options: Mapping[str, str] | None = None
) -> int | None:
    """Check a table's files, and return its version; return `None` if the table does not exist.

    Raises `UserError` with the name of a file that is missing or was cut short. On an object store,
    only the log is read.
    """
    uri, problem = table_uri(store_uri, name), None
    if (table := open_table(store_uri, name, storage_options)) is not None:
        problem = next(damaged_row_files(table), None)
    elif lacks_log(uri):
        problem = f"{LOG} is missing"
    if problem:
        raise UserError(f"cannot read the store at {mask_address(uri)}: {problem}; {REPAIR}")
    return None if table is None else table.version()


def count_rows(
    store_uri: str,
    storage_options: Mapping[str, str] | None = None,
    *,
    name: str = ENTRIES.name,
) -> int:
    """Return the number of rows in a table's current files, from its log; 0 without a table."""
    table = open_table(store_uri, name, storage_options)
    if table is None:
        return 0
    return sum(table.get_add_actions(flatten=True)["num_records"].to_pylist())


def escape_path(uri: str) -> str:
    """Return a file's path with all characters escaped that DuckDB would read as a pattern."""
    # In brackets, each of these characters matches only itself.
    return re.sub(r"[*?\[]", r"[\g<0>]", uri) if uri.startswith("/") else uri


def quoted(text: str) -> str:
    """Return a text as an SQL literal; names of buckets and directories may contain quotes."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def quoted_name(name: str) -> str:
    """Return a column's name as an SQL identifier, in quotes."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
