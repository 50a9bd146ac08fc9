"""Reads when nodes were cordoned, and the GPU-hours that were free meanwhile.

A node is cordoned from its first version with `unschedulable` to the next version without it.
Before, it is unknown and counts as not cordoned. Schedulers place no pods on a cordoned node, but
its pods continue to run.
"""

from typing import Final

import duckdb

from gpuledger_reports.reading.times import HOUR_US, Window

_MINUTE_US: Final = HOUR_US // 60
CORDONS: Final = """
CREATE OR REPLACE TEMP TABLE cordons AS
SELECT cluster, node, greatest(epoch_us(in_force_from), $begin_us) AS since_us,
    least(epoch_us(valid_to), $end_us) AS until_us
FROM nodes WHERE unschedulable AND deleted_time IS NULL AND since_us < until_us
"""
"""SQL of the times in a window in which nodes were cordoned."""
_LIMITS: Final = "SELECT min(since_us), max(until_us) FROM cordons"
# A device is free in minutes of the bitmap. Without one, free time is spread over the hour.
_CORDONED: Final = f"""
CREATE OR REPLACE TEMP TABLE cordoned_hours AS
WITH free AS (
    SELECT hour, cluster, node, gpu_uuid, coalesce(parent_uuid, gpu_uuid) AS gpu, model,
        device_fraction, (allocated_ns - coalesce(unresponsive_ns, 0)) / 3.6e12 AS hours,
        coalesce(allocated_minutes, 0) AS minutes,
        greatest(0, (since_us - epoch_us(hour)) // {_MINUTE_US}) AS first_minute,
        least(60, (until_us - epoch_us(hour)) // {_MINUTE_US}) AS end_minute
    FROM usage_hourly_unnamed JOIN cordons USING (cluster, node)
    WHERE hour >= make_timestamptz($first_us) AND hour < make_timestamptz($end_us)
        AND epoch_us(hour) < until_us AND epoch_us(hour) + {HOUR_US} > since_us
        AND category = 'idle' AND allocated_pod_state IS NULL AND allocated_job_id IS NULL
)
SELECT hour, cluster, node, gpu_uuid, gpu, model, device_fraction, sum(hours * coalesce(
    bit_count(minutes & ((1::BIGINT << end_minute) - (1::BIGINT << first_minute)))
        / nullif(bit_count(minutes), 0),
    (end_minute - first_minute) / 60)) AS hours
FROM free GROUP BY ALL
"""  # noqa: S608  # our own numbers


def create_cordoned(connection: duckdb.DuckDBPyConnection, window: Window) -> None:
    """Create the table `cordoned_hours`: the free time of devices on cordoned nodes, by hour.

    Its columns are `hour`, `cluster`, `node`, `gpu_uuid`, `gpu` (the physical GPU), `model`,
    `device_fraction` and `hours`.
    """
    connection.execute(CORDONS, window._asdict())
    ((since_us, until_us),) = connection.execute(_LIMITS).fetchall()
    limits = {
        "first_us": (since_us or 0) // HOUR_US * HOUR_US,
        "end_us": until_us or 0,
    }
    connection.execute(_CORDONED, limits)
