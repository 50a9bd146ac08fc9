"""Reads the power of groups of GPUs: their limits, and how much of them they drew."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import duckdb
import orjson

from gpuledger_reports.capacity.report import Key, Row
from gpuledger_reports.reading.inventory import Node
from gpuledger_reports.reading.times import Window

COLUMNS: Final[Mapping[str, str]] = {
    "power_limit_watts": "Power limit W",
    "mean_power_watts": "Mean W",
    "peak_power_watts": "Peak hour W",
    "power_headroom_watts": "Headroom W",
}
ABOUT: Final = (
    "`Power limit W` is the sum of the power limits of the GPUs at the end of the time range."
    " `Mean W` is the mean power that they drew in hours with samples, `Peak hour W` the mean"
    " power in the hour in which they drew the most, and `Headroom W` the limit minus this peak."
)
# The last known limit counts, because an inventory may lack the facts of a GPU for some time.
_LIMITS: Final = """
    SELECT cluster, node, gpu_uuid,
        arg_max(power_limit_milliwatts, (in_force_from, kafka_offset)) / 1000 AS watts
    FROM inventory WHERE in_force_from < make_timestamptz($end_us)
    GROUP BY ALL HAVING watts > 0
"""
_DRAWS: Final = """
    WITH known AS (
        SELECT unnest(from_json($gpus, '[{"gpu": "VARCHAR", "number": "BIGINT"}]'),
            recursive := true)
    ),
    hours AS (
        SELECT number, hour, sum(energy_millijoules) / 3.6e6 AS watts
        FROM usage_hourly_unnamed JOIN known ON coalesce(parent_uuid, gpu_uuid) = gpu
        WHERE hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)
        GROUP BY ALL
    )
    SELECT number, avg(watts), max(watts) FROM hours GROUP BY number
"""


def read_power(
    connection: duckdb.DuckDBPyConnection, window: Window, gpus: Mapping[tuple[Node, str], Key]
) -> tuple[dict[Key, Row], int]:
    """Return the power of each group of GPUs, and the number of GPUs whose limits are unknown.

    `gpus` has the group of each GPU, by node and UUID. GPUs without a known limit do not count.
    """
    limits: dict[Key, float] = defaultdict(float)
    numbers: dict[Key, int] = {}
    known = []
    for cluster, node, gpu, watts in connection.execute(
        _LIMITS, {"end_us": window.end_us}
    ).fetchall():
        key = gpus.get(((cluster, node), gpu))
        if key is not None:
            limits[key] += watts
            known.append({"gpu": gpu, "number": numbers.setdefault(key, len(numbers))})
    # As JSON, because a list of thousands of parameters takes seconds.
    given = {"gpus": orjson.dumps(known).decode(), **window._asdict()}
    draws = {number: draw for number, *draw in connection.execute(_DRAWS, given).fetchall()}
    power = {
        key: _columns(limits[key], *draws.get(number, (None, None)))
        for key, number in numbers.items()
    }
    return power, len(gpus) - len(known)


def _columns(limit: float, mean: float | None, peak: float | None) -> Row:
    headroom = None if peak is None else limit - peak
    values = (limit, mean, peak, headroom)
    return {
        name: None if value is None else round(value)
        for name, value in zip(COLUMNS, values, strict=True)
    }
