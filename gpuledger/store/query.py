"""How the store is read: the files of the table as they are now, as a relation for SQL.

Here lives what a reader needs beside a SQL engine, such as DuckDB. Nothing is written here.
"""

from collections.abc import Mapping

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from gpuledger.errors import UserError
from gpuledger.settings.secret import mask_address
from gpuledger.store.schema import GAPS, table_uri


def entries_sql(store_uri: str, storage_options: Mapping[str, str] | None = None) -> str:
    """Return DuckDB's SQL for the live rows: `SELECT … FROM {entries_sql(uri)}`.

    Raises `UserError` where there is no table, or nothing was ever written to it.
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
    return f"read_parquet([{files}], hive_partitioning = true, union_by_name = true)"


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
