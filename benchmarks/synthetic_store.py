"""Writes a store from queries, without a sink: large tables for benchmarks. Measures nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from gpuledger.store.schema import TableSchema

_TYPES = {
    "Utf8": "VARCHAR",
    "Boolean": "BOOLEAN",
    "Int32": "INTEGER",
    "Int64": "BIGINT",
    "Date32": "DATE",
    "Timestamp": "TIMESTAMPTZ",
    "Decimal128": "DECIMAL(38, 0)",
}


def write_rows(
    connection: duckdb.DuckDBPyConnection,
    schema: TableSchema,
    rows: str,
    folder: Path,
    given: Mapping[str, Any] | None = None,
    *,
    order: str = "ALL",
) -> None:
    """Write the result of a query as a Parquet file with all columns of a table.

    Columns that the query lacks are null. `folder` is the table's, or that of a day.
    """
    folder.mkdir(parents=True)
    kinds = {column.name: _type_of(str(column.kind)) for column in schema.columns}
    made = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in kinds.items())
    empty = ", ".join(f"NULL AS {name}" for name in kinds)
    connection.execute(
        f"COPY (SELECT {made} FROM (SELECT {empty} WHERE false UNION ALL BY NAME (FROM ({rows})))"  # noqa: S608  # the table's own names
        f" ORDER BY {order}) TO '{folder}/rows.parquet' (FORMAT parquet, COMPRESSION zstd)",
        given,
    )


def commit_files(store: Path, schema: TableSchema) -> None:
    """Create a Delta table from the files in its folder."""
    table = store / schema.name
    partition_by = list(schema.partition_by)
    written = DeltaTable.create(str(table), schema.arrow, partition_by=partition_by or None)
    written.create_write_transaction(
        [
            AddAction(
                path=str(file.relative_to(table)),
                size=file.stat().st_size,
                partition_values=dict(
                    [folder.split("=")] if (folder := file.parent.name).count("=") else []
                ),
                modification_time=0,
                data_change=True,
                stats="{}",
            )
            for file in sorted(table.rglob("*.parquet"))
        ],
        mode="append",
        schema=written.schema(),
        partition_by=partition_by or None,
    )


def _type_of(arrow: str) -> str:
    """Return DuckDB's type of an Arrow type."""
    return next(kind for name, kind in _TYPES.items() if name in arrow)
