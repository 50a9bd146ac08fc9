"""Reads the hourly demand for GPUs, and the number of GPUs, from the store's hourly sums.

Demand is the time of GPUs that is allocated to pods and jobs, in GPU-hours per hour: 1 is a whole
GPU. A MIG instance counts as its fraction of the GPU. GPUs are counted by the time that samples
cover and in which they respond, also on cordoned nodes. GPUs for which pods wait are demand, too;
each pod counts toward the group of its node.

A node without samples keeps the GPUs and the demand of its last hour while it was the last node
whose inventory listed any of these GPUs. A node whose allocation is mostly unknown keeps the demand
of its last known hour.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

import duckdb

from gpuledger.store.views import with_nodes
from gpuledger_reports.capacity.report import GPU_DIMENSIONS, Key
from gpuledger_reports.capacity.slurm_jobs import Job
from gpuledger_reports.capacity.waits import create_waits, hourly_sql, locate_waits
from gpuledger_reports.reading.times import Window

_SUMS: Final = """(
    WITH
    -- The GPUs of each model on each node, by hour with samples.
    sampled AS (
        SELECT hour AS time, cluster, node, model,
            coalesce(sum(allocated_gpu_hours) FILTER (
                allocated_job_id IS NOT NULL OR allocated_pod_state <> 'unknown'), 0) AS allocated,
            coalesce(sum(allocated_gpu_hours)
                FILTER (allocated_pod_state = 'unknown'), 0) AS unknown,
            coalesce(sum((allocated_ns - coalesce(unresponsive_ns, 0)) / 3.6e12 * device_fraction),
                0) AS present
        FROM usage_hourly_unnamed
        WHERE category = 'idle'
            AND hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)
        GROUP BY ALL
    ),
    -- The GPUs of each version of a node's inventory, until the next version, until another node
    -- lists the GPU, or until the node is deleted.
    listed AS (
        SELECT inventory.cluster, inventory.node, model, in_force_from AS since,
            least(valid_to, deleted_time, lead(in_force_from) OVER (PARTITION BY gpu_uuid
                ORDER BY in_force_from, inventory.cluster, inventory.node, kafka_offset)) AS until
        FROM (FROM inventory WHERE in_force_from < make_timestamptz($end_us)) AS inventory
        ASOF LEFT JOIN (
            SELECT cluster, node, deleted_time FROM nodes
            WHERE deleted_time < make_timestamptz($end_us)
        ) AS deletions ON deletions.cluster = inventory.cluster
            AND deletions.node = inventory.node AND in_force_from <= deleted_time
    ),
    -- The listed GPUs of each model on each node, from a time on.
    versions AS (
        SELECT cluster, node, model, time AS since,
            sum(gpus) OVER (PARTITION BY cluster, node, model ORDER BY time) AS gpus
        FROM (
            SELECT cluster, node, model, since AS time, 1 AS gpus FROM listed
            UNION ALL
            SELECT cluster, node, model, until, -1 FROM listed
            WHERE until < make_timestamptz($end_us)
        )
    ),
    -- The models that a node has at the end of the window.
    newest AS (
        SELECT cluster, node, model FROM versions GROUP BY ALL HAVING arg_max(gpus, since) > 0
    ),
    -- Samples with the time of the next ones. An allocation that is mostly unknown is replaced by
    -- the last known one.
    followed AS (
        SELECT * REPLACE (coalesce(last_value(
                CASE WHEN unknown <= present / 2 THEN allocated END IGNORE NULLS
            ) OVER hours, allocated) AS allocated),
            lead(time) OVER hours AS next_time
        FROM sampled WINDOW hours AS (PARTITION BY cluster, node, model ORDER BY time)
    ),
    -- The samples before hours without samples: between two samples, or after the last ones if the
    -- node still has the model.
    before_gap AS (
        FROM followed WHERE next_time > time + INTERVAL 1 hour
        UNION ALL
        SELECT followed.* REPLACE (make_timestamptz($end_us) AS next_time)
        FROM followed SEMI JOIN newest USING (cluster, node, model) WHERE next_time IS NULL
    ),
    -- The same with the end of the gap: the node has samples again, or no longer has the model.
    filled AS (
        SELECT before_gap.*, min(least(next_time, since)) AS until_time
        FROM before_gap LEFT JOIN versions ON versions.cluster = before_gap.cluster
            AND versions.node = before_gap.node AND versions.model = before_gap.model
            AND since > time AND gpus = 0
        GROUP BY ALL
    )
    SELECT time, cluster, node, model, allocated, unknown, present, 0 AS filled FROM followed
    UNION ALL
    SELECT unnest(range(time + INTERVAL 1 hour, until_time, INTERVAL 1 hour)),
        cluster, node, model, allocated, 0, present, present
    FROM filled
)"""
_HOURLY_DEMAND: Final = """
    SELECT epoch(time)::BIGINT // 3600 AS hour_number, {columns},
        sum(allocated), sum(unknown), sum(present), sum(filled)
    FROM {sums} GROUP BY ALL ORDER BY hour_number
"""
_OF_DEVICES: Final = ("cluster", "model")
"""The columns that are available without a join with `nodes`."""
Waiting = Mapping[Key, Mapping[int, float]]
"""GPUs for which pods of a group wait, by hour."""
Hour = tuple[int, Key, float, float, float, float]
"""Hour since the epoch, group, and its allocated, unknown, present and filled GPUs."""
_DAY: Final = 24
_KNOWN_GPUS: Final = 0.9
"""Minimum share of GPUs with known allocation for an hour to count as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one group of GPUs, such as a model, hour by hour."""

    key: Key
    """The value of each dimension."""
    allocated: tuple[float, ...]
    """GPUs per hour."""
    waiting: tuple[float, ...]
    """GPUs for which pods waited, in the same hours."""
    gpus: float
    """The mean number of GPUs in the last day; hours before the first one do not count."""
    filled_hours: int
    """Hours in which over 10 % of the GPUs had no samples. They have the demand of the last known
    hour."""
    unknown_hours: float
    """GPU-hours whose allocation is unknown."""
    known: tuple[bool, ...]
    """Whether the allocation of nearly all GPUs is known, in the same hours as `allocated`."""


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
    sums = _SUMS if {*columns} <= {*_OF_DEVICES} else with_nodes(_SUMS)
    sql = _HOURLY_DEMAND.format(columns=", ".join(columns), sums=sums)
    rows = connection.execute(sql, window._asdict()).fetchall()
    return find_demand(((row[0], tuple(row[1:-4]), *row[-4:]) for row in rows), waiting)


def read_waiting(
    connection: duckdb.DuckDBPyConnection,
    by: Sequence[str],
    *,
    window: Window,
    jobs: Sequence[Job] = (),
) -> Waiting:
    """Return the GPUs for which pods and jobs wait; `by` are names in `GPU_DIMENSIONS`."""
    create_waits(connection, window, jobs)
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
    groups: dict[Key, dict[int, _Amounts]] = {}
    for at, key, *amounts in hours:
        groups.setdefault(key, {})[at] = _Amounts(*amounts)
    if not groups:
        return []
    end = max(max(found) for found in groups.values()) + 1
    made = [_demand(key, found, end, waiting.get(key, {})) for key, found in groups.items()]
    return sorted(made, key=lambda demand: (-demand.gpus, str(demand.key)))


class _Amounts(NamedTuple):
    """The GPUs of an hour."""

    allocated: float
    unknown: float
    present: float
    """GPUs that respond."""
    filled: float
    """GPUs without samples."""


_GONE: Final = _Amounts(0.0, 0.0, 0.0, 0.0)


def _demand(
    key: Key,
    hours: Mapping[int, _Amounts],
    end: int,
    waiting: Mapping[int, float],
) -> Demand:
    first = min(hours)
    last = max(hours)
    series: list[_Amounts] = []
    for at in range(first, end):
        # Hours after the last sample of a group are not filled: its GPUs are gone.
        series.append(hours.get(at) or (_GONE if at > last else series[-1]))
    tolerated = {at: (1 - _KNOWN_GPUS) * each.present for at, each in hours.items()}
    filled = sum(each.filled > tolerated[at] for at, each in hours.items())
    return Demand(
        key=key,
        allocated=tuple(each.allocated for each in series),
        waiting=tuple(waiting.get(at, 0.0) for at in range(first, end)),
        gpus=fmean(each.present for each in series[-_DAY:]),
        filled_hours=last + 1 - first - len(hours) + filled,
        unknown_hours=sum(each.unknown for each in hours.values()),
        known=tuple(
            at > last or (at in hours and hours[at].unknown + hours[at].filled <= tolerated[at])
            for at in range(first, end)
        ),
    )
