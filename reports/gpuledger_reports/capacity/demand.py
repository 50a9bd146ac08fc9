"""Reads the hourly demand for GPUs, and the number of GPUs, from the store's hourly sums.

Demand is the time of GPUs that is allocated to pods and jobs, in GPU-hours per hour: 1 is a whole
GPU. A MIG instance counts as its fraction of the GPU. GPUs are counted by the time that samples
cover. GPUs for which pods wait are demand, too; each pod counts toward the group of its node.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import duckdb

from gpuledger.store.views import with_nodes
from gpuledger_reports.capacity.report import GPU_DIMENSIONS
from gpuledger_reports.capacity.waits import create_waits, hourly_sql, locate_waits
from gpuledger_reports.reading.times import Window

_SUMS: Final = """(
    SELECT hour AS time, {keys},
        coalesce(sum(allocated_gpu_hours) FILTER (
            allocated_job_id IS NOT NULL OR allocated_pod_state <> 'unknown'), 0) AS allocated,
        coalesce(sum(allocated_gpu_hours) FILTER (allocated_pod_state = 'unknown'), 0) AS unknown,
        coalesce(sum(allocated_gpu_hours), 0) AS present
    FROM usage_hourly_unnamed
    WHERE category = 'idle'
        AND hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)
    GROUP BY ALL
)"""
_SQL: Final = """
    SELECT epoch(time)::BIGINT // 3600 AS hour_number, {columns},
        sum(allocated), sum(unknown), sum(present)
    FROM {sums} GROUP BY ALL ORDER BY hour_number
"""
_OF_DEVICES: Final = ("cluster", "model")
"""The columns that are available without a join with `nodes`."""
Key = tuple[str | None, ...]
Waiting = Mapping[Key, Mapping[int, float]]
"""GPUs for which pods of a group wait, by hour."""
Hour = tuple[int, Key, float, float, float]
"""Hour since the epoch, group, and its allocated, unknown and present GPUs."""
_DAY: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one group of GPUs, such as a model, hour by hour."""

    key: Key
    """The value of each dimension."""
    first_hour: int
    """In hours since the epoch."""
    allocated: tuple[float, ...]
    """GPUs per hour."""
    waiting: tuple[float, ...]
    """GPUs for which pods waited, in the same hours."""
    gpus: float
    """The mean number of GPUs in the last day."""
    filled_hours: int
    """Hours without samples, filled with the demand of the previous hour."""
    unknown_hours: float
    """GPU-hours whose allocation is unknown. They do not count as demand."""


def read_demand(
    connection: duckdb.DuckDBPyConnection,
    by: Sequence[str],
    *,
    window: Window,
    waiting: Waiting,
) -> list[Demand]:
    """Return the demand of each group, the group with the most GPUs first.

    `connection` has the store's views; `by` are names in `GPU_DIMENSIONS`.
    """
    columns = [GPU_DIMENSIONS[name] for name in by]
    sums = _SUMS.format(keys=", ".join(_OF_DEVICES))
    if not {*columns} <= {*_OF_DEVICES}:
        sums = with_nodes(_SUMS.format(keys=", ".join(("node", *_OF_DEVICES))))
    sql = _SQL.format(columns=", ".join(columns), sums=sums)
    rows = connection.execute(sql, window._asdict()).fetchall()
    return find_demand(((row[0], tuple(row[1:-3]), *row[-3:]) for row in rows), waiting)


def read_waiting(
    connection: duckdb.DuckDBPyConnection, by: Sequence[str], *, window: Window
) -> Waiting:
    """Return the GPUs for which pods wait; `by` are names in `GPU_DIMENSIONS`."""
    create_waits(connection, window)
    locate_waits(connection)
    sql = hourly_sql([GPU_DIMENSIONS[name] for name in by], "located_waits")
    waiting: dict[Key, dict[int, float]] = {}
    for *key, hour, gpus in connection.execute(sql).fetchall():
        waiting.setdefault(tuple(key), {})[hour] = gpus
    return waiting


def find_demand(hours: Iterable[Hour], waiting: Waiting) -> list[Demand]:
    """Return the demand of each group, the group with the most GPUs first.

    If the hours of a group end before the newest hour of all groups, it has no demand after them.
    """
    groups: dict[Key, dict[int, tuple[float, float, float]]] = {}
    for at, key, allocated, unknown, present in hours:
        groups.setdefault(key, {})[at] = (allocated, unknown, present)
    if not groups:
        return []
    end = max(max(found) for found in groups.values()) + 1
    made = [_demand(key, found, end, waiting.get(key, {})) for key, found in groups.items()]
    return sorted(made, key=lambda demand: (-demand.gpus, str(demand.key)))


def _demand(
    key: Key,
    hours: Mapping[int, tuple[float, float, float]],
    end: int,
    waiting: Mapping[int, float],
) -> Demand:
    first = min(hours)
    allocated: list[float] = []
    for at in range(first, end):
        known = hours.get(at)
        # Hours after the last sample of a group are not filled: its GPUs are gone.
        gone = known is None and at > max(hours)
        allocated.append(known[0] if known else 0.0 if gone else allocated[-1])
    last_day = [hours[at][2] for at in range(end - _DAY, end) if at in hours]
    return Demand(
        key=key,
        first_hour=first,
        allocated=tuple(allocated),
        waiting=tuple(waiting.get(at, 0.0) for at in range(first, end)),
        gpus=sum(last_day) / len(last_day) if last_day else 0.0,
        filled_hours=max(hours) + 1 - first - len(hours),
        unknown_hours=sum(unknown for _, unknown, _ in hours.values()),
    )
