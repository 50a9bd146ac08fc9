"""How the store is read: the files of the table as they are now, as a relation for SQL.

Here lives what a reader needs beside a SQL engine, such as DuckDB. Nothing is written here.
"""

from collections.abc import Mapping

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from gpuledger.store.schema import GAPS, StoreColumn, table_uri


def entries_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the live rows: `SELECT … FROM {entries_sql(uri)}`.

    Raises deltalake's TableNotFoundError where there is no table.
    """
    table = DeltaTable(table_uri(store_uri), storage_options=dict(storage_options or {}))
    files = ", ".join(_quoted(uri) for uri in table.file_uris())
    # By name, because a file that is older than a column has not got it.
    return f"read_parquet([{files}], hive_partitioning = true, union_by_name = true)"


def gaps_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the rows of `gaps`; a relation without rows where there are none."""
    try:
        uri = table_uri(store_uri, GAPS.name)
        files = DeltaTable(uri, storage_options=dict(storage_options or {})).file_uris()
    except TableNotFoundError:
        files = []
    if files:
        return f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true)"
    columns = ", ".join(f"NULL::{_sql_type(column)} AS {column.name}" for column in GAPS.columns)
    return f"(SELECT {columns} WHERE false)"


def _sql_type(column: StoreColumn) -> str:
    """Return DuckDB's name of a column's type."""
    kind = str(column.kind)
    names = {"Utf8": "VARCHAR", "Int32": "INTEGER", "Int64": "BIGINT"}
    return next((name for part, name in names.items() if part in kind), "TIMESTAMPTZ")


def count_rows(store_uri: str, storage_options: Mapping[str, str] | None = None) -> int:
    """Return the number of live rows, from the table's log; 0 where there is no table."""
    try:
        table = DeltaTable(table_uri(store_uri), storage_options=dict(storage_options or {}))
    except TableNotFoundError:
        return 0
    return sum(table.get_add_actions(flatten=True)["num_records"].to_pylist())


def _quoted(uri: str) -> str:
    escaped = uri.replace("'", "''")
    return f"'{escaped}'"
