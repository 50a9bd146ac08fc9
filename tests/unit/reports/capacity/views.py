"""The views of usage over rows in memory, as over a store that has only these rows."""

from collections.abc import Sequence

import duckdb
import msgspec

from gpuledger.store.query import empty_relation, sql_type
from gpuledger.store.schema import PARTITION_COLUMN, PODS
from gpuledger.store.usage_schema import NAMESPACES, NODES, USAGE_HOURLY
from gpuledger.store.views import TABLES, usage_sql
from gpuledger_sinks.store.rollups import DAILY, sums_sql
from tests.unit.reports.stores import Row


def view_usage(connection: duckdb.DuckDBPyConnection, name: str, rows: Sequence[Row]) -> None:
    """Create the view of a usage table; `hour` is the time of each row, in microseconds."""
    period = {"usage_hourly": "hour", "usage_daily": "day"}[name]
    columns = [column for column in TABLES[name].columns if column.name != "event_date"]
    casts = ", ".join(
        f"make_timestamptz(hour::BIGINT) AS {period}"
        if column.name == period
        else f"{column.name}::{sql_type(column)} AS {column.name}"
        for column in columns
    )
    texts = [
        {
            column: None if row.get(column) is None else str(row[column])
            for column in ("hour", *(column.name for column in columns))
        }
        for row in rows
    ]
    shape = dict.fromkeys(("hour", *(column.name for column in columns)), "VARCHAR")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(f"CREATE TABLE {name}_rows AS FROM {empty_relation(TABLES[name])}")
    connection.execute(
        f"INSERT INTO {name}_rows BY NAME SELECT {casts} FROM"  # noqa: S608  # our own names
        " (SELECT unnest(from_json($rows, $shape), recursive := true))",
        {
            "rows": msgspec.json.encode(texts).decode(),
            "shape": msgspec.json.encode([shape]).decode(),
        },
    )
    for each in ("usage_hourly", "usage_daily"):
        relations = {each: f"{each}_rows" if each == name else empty_relation(TABLES[each])}
        for view in (each, f"{each}_unnamed"):
            connection.execute(f"CREATE VIEW {view} AS {usage_sql(each, relations)}")
    for table in (PODS, NODES, NAMESPACES):
        connection.execute(f"CREATE VIEW {table.name} AS FROM {empty_relation(table)}")


def sum_up_days(connection: duckdb.DuckDBPyConnection) -> None:
    """Fill the view of daily usage from hours that `view_usage` made, as maintenance does."""
    has = {column.name for column in USAGE_HOURLY.columns} - {PARTITION_COLUMN}
    sums = sums_sql(DAILY, "usage_hourly_rows", "true", has=has)
    connection.execute(f"CREATE TABLE usage_daily_rows AS {sums}")
    rows = f"(SELECT * EXCLUDE ({PARTITION_COLUMN}) FROM usage_daily_rows)"  # noqa: S608  # our own name
    sql = usage_sql("usage_daily", {"usage_daily": rows})
    connection.execute(f"CREATE OR REPLACE VIEW usage_daily_unnamed AS {sql}")
