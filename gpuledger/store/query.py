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
from gpuledger.store.schema import ENTRIES, GAPS, table_uri

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

    They have the table's columns and `DERIVED_COLUMNS`. Raises `UserError` where there is no table,
    or nothing was ever written to it.
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
    return f"(SELECT *, {added} FROM {rows})"  # noqa: S608  # the table's own names, quoted files


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
