"""The GPUs that pods held, if some pods held parts: a time slice, an MPS share or an instance.

A pod that requests `nvidia.com/gpu: 1`, or a renamed resource, does not state whether it gets a
whole GPU; the device plugin decides. It is known once the pod runs: a pod held a part of a GPU if,
in the minutes in which it held the GPU, less than their time was allocated to it. The first and the
last minute of a run may be partial. The day with the most minutes of known use counts. If all days
have at most two, or more allocated time than known minutes, the size is unknown.
"""

from typing import Final

import duckdb

from gpuledger.store.distributions import BUSY
from gpuledger_reports.reading.times import Window

WHOLE_FROM: Final = 0.8
"""Larger parts count as the whole GPU: the first and last minutes of a run may be partial."""
# `busy_minutes_…` count the minutes of known use in which a row's pod held the device.
_DEVICES: Final = f"""
WITH devices AS NOT MATERIALIZED (
    SELECT cluster, allocated_pod_uid AS pod_uid, day, coalesce(device_fraction, 1) AS fraction,
        (allocated_ns - coalesce(unresponsive_ns, 0)) / 6e10 AS held,
        {" + ".join(BUSY.columns)} AS minutes
    FROM usage_daily_unnamed
    WHERE category = 'idle' AND allocated_pod_uid IS NOT NULL AND day < make_timestamptz($end_us)
        AND day >= date_trunc('day', make_timestamptz($begin_us))
), sized AS NOT MATERIALIZED (
    SELECT cluster, pod_uid, day, minutes,
        fraction * CASE WHEN minutes > 2 AND held < least({WHOLE_FROM} * minutes, minutes - 2)
                THEN held / (minutes - 1)
            WHEN fraction < 1 OR (minutes > 2 AND held <= minutes + 1) THEN 1 END AS gpus
    FROM devices
)
"""  # noqa: S608  # our own names
_PART: Final = f"{_DEVICES} SELECT 1 FROM sized WHERE gpus < 1 LIMIT 1"  # noqa: S608  # as above
_HELD: Final = f"""
CREATE OR REPLACE TEMP TABLE held AS
{_DEVICES}, days AS (
    SELECT cluster, pod_uid, day, max(coalesce(minutes, 0)) AS minutes, sum(gpus) AS gpus
    FROM sized GROUP BY ALL HAVING count(gpus) = count(*)
)
SELECT cluster, pod_uid, max_by(gpus, (minutes, day)) AS held_gpus FROM days GROUP BY ALL
"""  # noqa: S608  # our own names
_NONE_HELD: Final = (
    "CREATE OR REPLACE TEMP TABLE held (cluster VARCHAR, pod_uid VARCHAR, held_gpus DOUBLE)"
)


def create_held(connection: duckdb.DuckDBPyConnection, window: Window) -> bool:
    """Create the temporary table `held`: the GPUs of each pod whose size is known.

    Returns whether any pod held a part of a GPU; if none did, the table is empty. The days of the
    window are read from the daily sums.
    """
    limits = window._asdict()
    has_parts = connection.execute(_PART, limits).fetchone() is not None
    connection.execute(_HELD if has_parts else _NONE_HELD, limits if has_parts else {})
    return has_parts
