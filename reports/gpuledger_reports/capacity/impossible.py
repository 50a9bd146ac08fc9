"""Rows of usage that cannot be right: those with impossible amounts, and GPUs that count twice.

An agent that is broken or forged can publish any number. One such row would exceed all others in a
sum, so the amount counts as unknown, and reports leave the row out.

If two nodes sample a GPU, reports count its time twice. Bills choose a node by the inventory. For
reports, that would cost more than it is worth, so a note has the number of hours.
"""

from collections.abc import Iterator
from typing import Final

import duckdb

from gpuledger.clock import NS_PER_DAY, NS_PER_HOUR
from gpuledger.store.distributions import MEMORY_MAX
from gpuledger.store.usage_schema import USAGE_DAILY, USAGE_HOURLY
from gpuledger.texts import counted
from gpuledger_reports.capacity.allocations import IS_HELD, USAGE, usage_limits
from gpuledger_reports.reading.times import DAY_US, Window

_PERIODS: Final = {
    USAGE_HOURLY.name: ("hour", NS_PER_HOUR),
    USAGE_DAILY.name: ("day", NS_PER_DAY),
}
_TIMES: Final = ("allocated_ns", "unresponsive_ns", "busy_ns")
_MEMORY_LIMIT: Final = 2**50
_SHOWN: Final = 3
# Not temporary, because the summary drops the temporary tables of each report.
_ROWS: Final = """
CREATE OR REPLACE TABLE impossible_rows
    (cluster VARCHAR, node VARCHAR, time TIMESTAMPTZ, period VARCHAR)
"""
# Days sum up hours, so a node's days count only if no hours are left out.
_NODES: Final = """
SELECT cluster || '/' || node AS name,
    coalesce(nullif(count(*) FILTER (period = 'hour'), 0), count(*)) AS rows
FROM impossible_rows
WHERE time >= make_timestamptz($begin_us) AND time < make_timestamptz($end_us)
GROUP BY name ORDER BY name
"""
_HELD: Final = f"category = 'idle' AND {IS_HELD}"
_GPU: Final = "coalesce(parent_uuid, gpu_uuid) AS gpu"
_COUNTED_TWICE: Final = f"""
WITH moved AS (
    SELECT gpu_uuid AS gpu FROM inventory GROUP BY gpu_uuid
    HAVING count(DISTINCT (cluster, node)) > 1
), shared AS (
    SELECT gpu, epoch_us(time) // {DAY_US} AS day
    FROM (SELECT *, {_GPU} FROM {USAGE} WHERE {_HELD}) SEMI JOIN moved USING (gpu)
    GROUP BY ALL HAVING count(DISTINCT (cluster, node)) > 1
), hours AS (
    SELECT gpu, hour, sum(allocated_gpu_hours) - 1 AS excess
    FROM (
        SELECT *, {_GPU}, epoch_us(hour) // {DAY_US} AS day FROM usage_hourly_unnamed
        WHERE {_HELD} AND hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)
    ) SEMI JOIN shared USING (gpu, day)
    GROUP BY ALL HAVING count(DISTINCT (cluster, node)) > 1
)
SELECT coalesce(sum(greatest(excess, 0)), 0) FROM hours
"""  # noqa: S608  # our own names
"""SQL of the allocated GPU-hours that exceed a GPU's time, because several nodes sampled it.

Days on which the inventories and samples of two nodes had the GPU are few, and only their hours are
read."""
_SOME_HOURS: Final = 0.05


def leave_out_impossible(connection: duckdb.DuckDBPyConnection) -> None:
    """Replace the views of usage without descriptions by views without impossible rows."""
    connection.execute(_ROWS)
    for table, (period, length_ns) in _PERIODS.items():
        # Minutes that arrive after their rows were purged can count twice.
        limits = {**dict.fromkeys(_TIMES, 2 * length_ns), MEMORY_MAX: _MEMORY_LIMIT}
        outside = [f"{column} NOT BETWEEN 0 AND {bound}" for column, bound in limits.items()]
        view = f"{table}_unnamed"
        # One condition at a time, because DuckDB excludes files by the statistics of one column.
        queries = [f"SELECT 1 FROM {view} WHERE {each} LIMIT 1" for each in outside]  # noqa: S608  # our own names
        if any(connection.sql(query).fetchall() for query in queries):
            is_impossible = f"({' OR '.join(outside)}) IS true"
            connection.execute(f"""
            ALTER VIEW {view} RENAME TO {view}_all;
            CREATE VIEW {view} AS FROM {view}_all WHERE NOT ({is_impossible});
            INSERT INTO impossible_rows
            SELECT cluster, node, {period}, '{period}' FROM {view}_all WHERE {is_impossible}
            """)  # noqa: S608  # our own names


def notes_on_impossible(connection: duckdb.DuckDBPyConnection, window: Window) -> Iterator[str]:
    """Yield a note with the nodes whose rows are left out of a window, if there are any."""
    nodes = connection.execute(_NODES, window._asdict()).fetchall()
    if nodes:
        count = sum(rows for _, rows in nodes)
        more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
        names = ", ".join(name for name, _ in nodes[:_SHOWN])
        rows = counted(count, "row")
        yield f"Left out: {rows} with impossible amounts, from nodes {names}{more}."


def note_on_counted_twice(connection: duckdb.DuckDBPyConnection, window: Window) -> Iterator[str]:
    """Yield a note with the GPU-hours that count twice in a window, if there are any."""
    limits = usage_limits(connection, window)
    ((hours,),) = connection.execute(_COUNTED_TWICE, limits).fetchall()
    if hours >= _SOME_HOURS:
        yield (
            f"{hours:,.1f} allocated GPU-hours count twice, because two nodes sampled the same GPU;"
            " bills count them once. See the alert GpuledgerGpuOnTwoNodes."
        )
