"""Reads the hourly demand for GPUs, and the GPUs that there were, from the store's hourly sums.

Demand is allocated time of GPUs by pods and jobs: GPU-hours in an hour, so 1 is a whole GPU. A MIG
instance counts as its part of the GPU. GPUs are counted by the time that samples cover.

The first and the newest hour are left out, because usage may cover only a part of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import duckdb

DIMENSIONS: Final[Mapping[str, str]] = {
    "cluster": "cluster",
    "pool": "node_pool",
    "model": "model",
    "instance_type": "instance_type",
    "zone": "zone",
    "capacity_type": "capacity_type",
}
"""The column of the view `usage_hourly` for each dimension of a report."""
_SQL: Final = """
    SELECT epoch(hour)::BIGINT // 3600 AS hour_number, {columns},
        coalesce(sum(allocated_gpu_hours) FILTER (
            allocated_job_id IS NOT NULL OR allocated_pod_state <> 'unknown'), 0) AS allocated,
        coalesce(sum(allocated_gpu_hours) FILTER (allocated_pod_state = 'unknown'), 0) AS unknown,
        coalesce(sum(allocated_gpu_hours), 0) AS present
    FROM usage_hourly WHERE category = 'idle'
    GROUP BY ALL ORDER BY hour_number
"""
Key = tuple[str | None, ...]
Hour = tuple[int, Key, float, float, float]
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
    gpus: float
    """The mean number of GPUs in the last day."""
    filled_hours: int
    """Hours without samples, which have the demand of the hour before."""
    unknown_hours: float
    """GPU-hours whose allocation is unknown, and which do not count as demand."""


def read_demand(connection: duckdb.DuckDBPyConnection, by: Iterable[str]) -> list[Demand]:
    """Return the demand of each group of GPUs, the largest first.

    `connection` has the store's views; `by` are names in `DIMENSIONS`.
    """
    columns = ", ".join(DIMENSIONS[name] for name in by)
    rows = connection.sql(_SQL.format(columns=columns)).fetchall()
    return find_demand((row[0], tuple(row[1:-3]), *row[-3:]) for row in rows)


def find_demand(hours: Iterable[Hour]) -> list[Demand]:
    """Return the demand of each group, the largest first, from its hours in order.

    An hour has its number since the epoch, the group, and its allocated, unknown and present GPUs.
    A group whose hours end before the newest hour has no GPUs left, and no demand.
    """
    groups: dict[Key, dict[int, tuple[float, float, float]]] = {}
    for at, key, *amounts in hours:
        allocated, unknown, present = amounts
        groups.setdefault(key, {})[at] = (allocated, unknown, present)
    if not groups:
        return []
    # The first hour and the newest hour of the store, not of each group.
    first = min(min(found) for found in groups.values()) + 1
    end = max(max(found) for found in groups.values())
    made = [
        _demand(key, {at: amounts for at, amounts in found.items() if first <= at < end}, end)
        for key, found in groups.items()
        if any(first <= at < end for at in found)
    ]
    return sorted(made, key=lambda demand: (-demand.gpus, str(demand.key)))


def _demand(key: Key, hours: Mapping[int, tuple[float, float, float]], end: int) -> Demand:
    first = min(hours)
    allocated: list[float] = []
    for at in range(first, end):
        known = hours.get(at)
        # A group that has disappeared is not filled up.
        gone = known is None and at > max(hours)
        allocated.append(known[0] if known else 0.0 if gone else allocated[-1])
    last_day = [hours[at][2] for at in range(end - _DAY, end) if at in hours]
    return Demand(
        key=key,
        first_hour=first,
        allocated=tuple(allocated),
        gpus=sum(last_day) / len(last_day) if last_day else 0.0,
        filled_hours=max(hours) + 1 - first - len(hours),
        unknown_hours=sum(unknown for _, unknown, _ in hours.values()),
    )
