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
from gpuledger.store.pod_names import named_entries
from gpuledger.store.schema import ENTRIES, GAPS, PARTITION_COLUMN, PODS, table_uri

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
"""What deltalake 1.6 says of a log that it cannot read, as opposed to a storage that is away."""
_CAUSE: Final = "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}"
"""How a line of an error begins that says why the line before is so."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")


def entries_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the live rows: `SELECT … FROM {entries_sql(uri)}`.

    They have the table's columns and `DERIVED_COLUMNS`. Rows that were written before their pod was
    known have its names, as far as the store has them by now. Raises `UserError` where there is no
    table, or nothing was ever written to it.
    """
    by_day = files_of(store_uri, ENTRIES.name, storage_options)
    if not by_day:
        raise UserError(
            f"no store with rows at {mask_address(store_uri)}; give the store.uri of a"
            " `gpuledger-sink store` that has written events there"
        )
    # Each day with its files, so that a query of a few days opens those alone. Not by DuckDB's own
    # hive_partitioning, which takes every folder above the store that is called a=b for a column.
    days = list[str]()
    for day, of_day in sorted(by_day.items(), key=lambda each: each[0] or ""):
        # By its definition where another engine has laid the files out otherwise.
        column = f"DATE '{day}'" if day else "(time AT TIME ZONE 'UTC')::DATE"
        days.append(f"SELECT *, {column} AS {PARTITION_COLUMN} FROM {relation(of_day)}")  # noqa: S608  # see below
    rows = f"({' UNION ALL BY NAME '.join(days)})"
    added = ", ".join(f"{sql} AS {name}" for name, sql in DERIVED_COLUMNS.items())
    if pods := live_files(store_uri, PODS.name, storage_options):
        rows = named_entries(rows, relation(pods))
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
        said = unfold(error)
        remedy = "; repair its log as docs/store.md says under Repair" if tells_damage(said) else ""
        raise UserError(
            f"cannot read the store at {mask_address(uri)}: {said[:400]}{remedy}"
        ) from error


def unfold(error: BaseException) -> str:
    """Return what deltalake says first, and the causes of that, in one line.

    What follows them is a server's whole answer, or a backtrace of Rust's.
    """
    lines = [_COLOUR.sub("", line).strip() for line in str(error).strip().splitlines()]
    causes = [line.removeprefix(_CAUSE).strip() for line in lines[1:] if line.startswith(_CAUSE)]
    return ": ".join([lines[0] if lines else type(error).__name__, *causes])


def tells_damage(said: str) -> bool:
    """Return whether an error of deltalake's is of a log that was cut short."""
    return any(sign in said for sign in _DAMAGE)


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
    # In a path these are patterns to DuckDB, which a class of one character is not.
    literal = (
        re.sub(r"[*?\[]", r"[\g<0>]", file) if file.startswith("/") else file for file in files
    )
    listed = ", ".join(map(quoted, literal))
    return f"read_parquet([{listed}], union_by_name = true, hive_partitioning = false)"


def gaps_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of `gaps`; a relation without rows where there are none."""
    return gaps_of_files(live_files(store_uri, GAPS.name, storage_options))


def gaps_of_files(files: Sequence[str]) -> str:
    """Return the same of known files."""
    if files:
        return relation(files)
    # Typed, so that a query finds the columns and their operators also where nothing is missing.
    names = {"Utf8": "VARCHAR", "Int32": "INTEGER", "Int64": "BIGINT"}
    columns = ", ".join(
        f"NULL::{next((names[kind] for kind in names if kind in str(column.kind)), 'TIMESTAMPTZ')}"
        f" AS {column.name}"
        for column in GAPS.columns
    )
    return f"(SELECT {columns} WHERE false)"


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
        found = _DAY_FOLDER.search(file)
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


def quoted(text: str) -> str:
    """Return a text as SQL has it."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def quoted_name(name: str) -> str:
    """Return the name of a column as SQL has it, whatever stands in it."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'
