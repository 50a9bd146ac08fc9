"""The GPUs that pods held that had only a part of a GPU: a time slice, an MPS share or an instance.

A pod that requests `nvidia.com/gpu: 1`, or a renamed resource, does not state whether it gets a
whole GPU; the device plugin decides. It is known once the pod runs: a pod held a part of a GPU if,
in the minutes in which it held the GPU, less than their time was allocated to it. The first and the
last minute of a run may be partial.
"""

from typing import Final

import duckdb

from gpuledger.store.distributions import BUSY
from gpuledger_reports.reading.times import Window

# `busy_minutes_…` count the minutes in which a row's pod held the device.
_HELD: Final = f"""
CREATE OR REPLACE TEMP TABLE held AS
WITH days AS NOT MATERIALIZED (
    SELECT cluster, allocated_pod_uid AS pod_uid, allocated_container, gpu_uuid,
        allocated_ns / 6e10 AS held, {" + ".join(BUSY.columns)} AS minutes,
        coalesce(device_fraction, 1) AS fraction
    FROM usage_daily_unnamed
    WHERE category = 'idle' AND allocated_pod_uid IS NOT NULL AND day < make_timestamptz($end_us)
        AND day >= date_trunc('day', make_timestamptz($begin_us))
),
of_parts AS (
    SELECT DISTINCT cluster, pod_uid FROM days
    WHERE fraction < 1 OR held < least(0.8 * minutes, minutes - 2)
),
devices AS (
    SELECT cluster, pod_uid, sum(held) / sum(minutes - 1) AS share, any_value(fraction) AS fraction
    FROM days SEMI JOIN of_parts USING (cluster, pod_uid)
    WHERE minutes > 1 GROUP BY cluster, pod_uid, allocated_container, gpu_uuid
)
SELECT cluster, pod_uid, sum(CASE WHEN share > 0.8 THEN 1 ELSE share END * fraction) AS held_gpus
FROM devices GROUP BY ALL
"""  # noqa: S608  # our own names


def create_held(connection: duckdb.DuckDBPyConnection, window: Window) -> None:
    """Create the temporary table `held`: the GPUs of each pod that held parts of GPUs.

    The days of the window are read from the daily sums.
    """
    connection.execute(_HELD, window._asdict())
