"""Reads the states of nodes at some instants, and the mix of the pods that use their GPUs.

Interchangeable GPUs form a kind: the same cluster, pool, model and MIG profile. The free CPU and
memory of a node are unknown if podwatch has not published the sizes of the node and all its pods.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Final, NamedTuple

import duckdb

from gpuledger.store.query import DERIVED_COLUMNS
from gpuledger_reports.capacity.allocations import USAGE, usage_limits
from gpuledger_reports.capacity.cordons import CORDONS
from gpuledger_reports.capacity.packing import NodeState, Pod
from gpuledger_reports.capacity.report import GPU_DIMENSIONS, Question
from gpuledger_reports.capacity.shares import WHOLE_FROM
from gpuledger_reports.capacity.unusable import WHOLE, Shape
from gpuledger_reports.reading.times import HOUR_US, Window, time_text

_MAX_INSTANTS: Final = 25
_HOURS_A_WEEK: Final = 168
_MINUTE: Final = 30
"""The minute of the hour at which the state is read. Runs often begin on the hour."""
_MAX_SHAPES: Final = 100
"""Maximum number of different shapes in a mix, the most frequent first."""
_MINUTE_US: Final = 60_000_000
_COMMON_MINUTES: Final = 2
"""A part of a GPU is a share if other parts were allocated or free in more of the same minutes. A
run that has the whole GPU may have its first and last minute in common with other runs."""
_ROUNDING_PERCENT: Final = 0.2
"""Added to a share before it is rounded down to whole percents. A share that is measured slightly
too small thus keeps its size."""
_HOLDER: Final = """cluster || ' ' || coalesce(allocated_pod_uid, 'job ' || allocated_job_id,
    allocated_namespace || '/' || allocated_pod)"""
"""Names are unique only in a cluster."""
_FRACTION: Final = f"({DERIVED_COLUMNS['device_fraction']})"
# The unpartitioned rest of a GPU with MIG instances is not a device.
_IS_DEVICE: Final = f"{_FRACTION} > 0 AND (mig_profile IS NOT NULL OR {_FRACTION} = 1)"
_KIND: Final = """[{by}] AS key,
    [cluster, node_pool, model, mig_profile, fraction::VARCHAR] AS kind"""
# The newest known values of a node count, because the record of a deletion may lack them.
_OF_NODE: Final = """
    CREATE OR REPLACE TEMP TABLE of_node AS
    SELECT cluster, node, arg_max(node_pool, in_force_from) AS node_pool,
        arg_max(instance_type, in_force_from) AS instance_type,
        arg_max(zone, in_force_from) AS zone,
        arg_max(capacity_type, in_force_from) AS capacity_type
    FROM nodes GROUP BY ALL
"""
_PODS: Final = """
    CREATE OR REPLACE TEMP TABLE pods_of_window AS
    SELECT cluster, node, pod_uid, cluster || ' ' || pod_uid AS holder,
        any_value(cluster || ' ' || namespace || '/' || pod) AS name,
        any_value(requested_cpu_millicores) AS cpu, any_value(requested_memory_bytes) AS memory,
        coalesce(any_value(owner_kind) = 'DaemonSet', false) AS is_fixed,
        min(coalesce(scheduled_time, started_time, created_time)) AS since,
        max(coalesce(ended_time, deleted_time)) AS until
    FROM pods WHERE valid_to IS NULL GROUP BY ALL HAVING until IS NULL OR until >= {begin}
"""
_WAITING: Final = """
    CREATE OR REPLACE TEMP TABLE waiting_pods AS
    SELECT *, cluster || ' ' || pod_uid AS holder FROM pending_pods
    WHERE valid_to IS NULL AND created_time < {end} AND coalesce(left_time, {end}) >= {begin}
        AND holder NOT IN (SELECT holder FROM pods_of_window)
"""
# By UID, and by name for rows of usage that have only the names from the kubelet.
_NEEDS: Final = """
    CREATE OR REPLACE TEMP TABLE needs AS
    SELECT holder, cpu, memory, is_fixed FROM pods_of_window
    UNION ALL
    SELECT name, any_value(cpu), any_value(memory), any_value(is_fixed)
    FROM pods_of_window GROUP BY name
    UNION ALL
    SELECT holder, requested_cpu_millicores, requested_memory_bytes, false FROM waiting_pods
"""
# A share is the allocated time, divided by the minutes with an allocation. It is rounded down to
# whole percents, so that equal shares fill a GPU.
_DEVICES: Final = """
    CREATE OR REPLACE TEMP TABLE devices AS
    WITH found AS (
        SELECT cluster, node, model, mig_profile, {fraction} AS fraction, hour, gpu_uuid,
            allocated_pod_state IS NOT DISTINCT FROM 'unknown' AS is_unknown, {holder} AS holder,
            bit_or(allocated_minutes) AS minutes,
            sum(allocated_ns) / (60e9 * bit_count(minutes)) AS part
        FROM usage_hourly_unnamed
        WHERE category = 'idle' AND hour IN ({hours}) AND {is_device}
            AND (allocated_minutes >> {minute}) & 1 = 1
        GROUP BY ALL
    )
    SELECT * REPLACE (bool_or(is_unknown) OVER (PARTITION BY hour, gpu_uuid) AS is_unknown),
        bit_count(minutes & bit_or(minutes) OVER (PARTITION BY hour, gpu_uuid
            ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING EXCLUDE CURRENT ROW)
        ) AS shared_minutes,
        CASE WHEN part > {whole_from} OR coalesce(shared_minutes, 0) <= {common_minutes}
            THEN {whole}
            ELSE greatest(1, floor(100 * part + {rounding_percent})) * {whole} // 100
            END::BIGINT AS share
    FROM found
"""
_CORDONED_NODES: Final = """
    CREATE OR REPLACE TEMP TABLE cordoned_nodes AS
    SELECT DISTINCT hour, cluster, node FROM devices JOIN cordons USING (cluster, node)
    WHERE epoch_us(hour) + {minute} * {minute_us} BETWEEN since_us AND until_us - 1
"""
_TABLES: Final = (_OF_NODE, _PODS, _WAITING, _NEEDS, _DEVICES, _CORDONED_NODES)
_STATES: Final = """
    SELECT epoch_us(hour), cluster || '/' || node, {kind}, holder IS NULL, list(gpu_uuid),
        list(share), any_value(cpu), any_value(memory), coalesce(any_value(is_fixed), false)
    FROM devices ANTI JOIN cordoned_nodes USING (cluster, node, hour)
    LEFT JOIN needs USING (holder) LEFT JOIN of_node USING (cluster, node)
    WHERE NOT is_unknown
    GROUP BY hour, cluster, node, node_pool, instance_type, zone, capacity_type, model, mig_profile,
        fraction, holder
"""
_UNKNOWN_GPUS: Final = "SELECT count(DISTINCT (hour, gpu_uuid)) FROM devices WHERE is_unknown"
_ON_CORDONED: Final = """
    SELECT count(DISTINCT (hour, gpu_uuid)) FROM devices
    SEMI JOIN cordoned_nodes USING (cluster, node, hour) WHERE NOT is_unknown
"""
# Each pod of the window and its GPUs. A pod without a node counts for each kind of GPUs that its
# namespace used.
_MIX: Final = """
    WITH ran AS (
        SELECT cluster, node, model, mig_profile, {fraction} AS fraction,
            allocated_namespace AS namespace, {holder} AS holder, count(DISTINCT gpu_uuid) AS gpus
        FROM {usage}
        WHERE category = 'idle' AND allocated_ns > 0 AND {is_device} AND {holder} IS NOT NULL
        GROUP BY ALL
    ),
    found AS (
        FROM ran UNION ALL BY NAME
        SELECT DISTINCT ran.* EXCLUDE (holder, gpus), waiting_pods.holder,
            TRY(json_extract_string(requested, '$."nvidia.com/' || coalesce(
                'mig-' || replace(mig_profile, '+', '.'), 'gpu') || '"')::BIGINT) AS gpus
        FROM ran JOIN waiting_pods USING (cluster, namespace)
    ),
    of_kind AS (
        SELECT DISTINCT {kind}, holder, gpus
        FROM found LEFT JOIN of_node USING (cluster, node) WHERE gpus > 0
    ),
    shares AS (SELECT holder, max(share) AS share FROM devices GROUP BY holder)
    SELECT key, kind, gpus, share, cpu, memory, count(*)
    FROM of_kind LEFT JOIN needs USING (holder) LEFT JOIN shares USING (holder)
    WHERE is_fixed IS NOT TRUE GROUP BY ALL
"""
# The free CPU and memory of each node at each instant. Pods without a GPU use CPU and memory, too.
# A sum with an unknown part is unknown; without pods on the node, it is 0.
_FREE_RESOURCES: Final = """
    WITH instants AS (SELECT unnest([{instants}]) AS instant),
    used AS (
        SELECT instant, cluster, node,
            CASE WHEN count(cpu) = count(*) THEN sum(cpu) END AS cpu,
            CASE WHEN count(memory) = count(*) THEN sum(memory) END AS memory
        FROM instants JOIN pods_of_window
            ON since <= instant AND (until IS NULL OR instant < until)
        GROUP BY ALL
    )
    SELECT epoch_us(instant), cluster || '/' || node,
        (allocatable_cpu_millicores - CASE WHEN used.instant IS NULL THEN 0 ELSE cpu END)::BIGINT,
        (allocatable_memory_bytes - CASE WHEN used.instant IS NULL THEN 0 ELSE memory END)::BIGINT
    FROM instants
    JOIN nodes ON in_force_from <= instant AND (valid_to IS NULL OR instant < valid_to)
        AND deleted_time IS NULL
    LEFT JOIN used USING (instant, cluster, node)
"""


class Kind(NamedTuple):
    """Interchangeable GPUs."""

    key: tuple[str | None, ...]
    """The values of the report's dimensions."""
    about: tuple[str | None, ...]
    """Cluster, pool, model, MIG profile, and part of a GPU."""

    @property
    def fraction(self) -> float:
        """A device's part of a GPU."""
        return float(self.about[-1] or 1)

    def describe(self, shape: Shape) -> str:
        """Describe a pod's GPUs, such as `2 GPUs` or `1g.10gb`."""
        profile, count = self.about[-2], shape.gpus
        if profile:
            return f"{count} x {profile}" if count > 1 else profile
        if shape.share < WHOLE:
            return f"{count * shape.share / WHOLE:.2g} GPUs"
        return f"{count} GPU{'s' if count > 1 else ''}"


def find_instants(window: Window) -> list[int]:
    """Return the starts of the hours in which the state is read, in microseconds, newest first.

    If the window is longer than a week, they are spread over all hours of the day and week: the
    only common divisor of the step and the hours of a week is 1.
    """
    hours = range(window.begin_us // HOUR_US, window.end_us // HOUR_US)
    step = -(-len(hours) // _MAX_INSTANTS) or 1
    while len(hours) > _HOURS_A_WEEK and gcd(step, _HOURS_A_WEEK) > 1:
        step += 1
    return [hour * HOUR_US for hour in hours[::-1][::step]]


@dataclass(kw_only=True)
class NodeStates:
    """The states of nodes and the mixes of pods in a window."""

    nodes: dict[Kind, dict[int, dict[str, NodeState]]]
    """The nodes of each kind at each instant, by node key."""
    mixes: dict[Kind, Counter[Shape]]
    """How often each shape occurred."""
    unknown_gpus: float
    """The mean number of devices with unknown allocation."""
    cordoned_gpus: float
    """The mean number of devices on cordoned nodes, which `nodes` does not contain."""


def read_states(connection: duckdb.DuckDBPyConnection, question: Question) -> NodeStates:
    """Return the node states of a question's window, with kinds by the question's dimensions."""
    hours = find_instants(question.window)
    names = _sql_names(question, hours)

    def rows(sql: str, **parameters: int) -> list[tuple[Any, ...]]:
        return connection.execute(sql.format(**names), parameters).fetchall()

    connection.execute(CORDONS, question.window._asdict())
    for table in _TABLES:
        connection.execute(table.format(**names))
    free = {
        (at // HOUR_US * HOUR_US, node): amounts for at, node, *amounts in rows(_FREE_RESOURCES)
    }
    nodes: dict[Kind, dict[int, dict[str, NodeState]]] = defaultdict(lambda: defaultdict(dict))
    for at, node, key, about, is_free, gpus, shares, *needs in rows(_STATES):
        of_kind = nodes[Kind(tuple(key), tuple(about))][at]
        found = of_kind.get(node)
        if found is None:
            found = of_kind[node] = NodeState(*free.get((at, node), (None, None)))
        found.gpus.update(gpus)
        if not is_free:
            found.pods.append(Pod(dict(zip(gpus, shares, strict=True)), *needs))
    (unknown,), (cordoned,) = (*rows(_UNKNOWN_GPUS), *rows(_ON_CORDONED))
    mixes = _mixes(rows(_MIX, **usage_limits(connection, question.window)), nodes)
    return NodeStates(
        nodes=nodes,
        mixes=mixes,
        unknown_gpus=unknown / len(hours),
        cordoned_gpus=cordoned / len(hours),
    )


def _sql_names(question: Question, hours: Sequence[int]) -> dict[str, str | float]:
    """Return the parts of the SQL that depend on the question, and those that queries share."""
    begin, end = map(_sql_time, question.window)
    return {
        "kind": _KIND.format(by=", ".join(GPU_DIMENSIONS[name] for name in question.by)),
        "fraction": _FRACTION,
        "is_device": _IS_DEVICE,
        "holder": _HOLDER,
        "whole": WHOLE,
        "whole_from": WHOLE_FROM,
        "common_minutes": _COMMON_MINUTES,
        "rounding_percent": _ROUNDING_PERCENT,
        "minute": _MINUTE,
        "minute_us": _MINUTE_US,
        "hours": ", ".join(map(_sql_time, hours)),
        "instants": ", ".join(_sql_time(hour + _MINUTE * _MINUTE_US) for hour in hours),
        "begin": begin,
        "end": end,
        "usage": USAGE,
    }


def _mixes(
    counts: Sequence[tuple[Any, ...]], nodes: Mapping[Kind, Mapping[int, Mapping[str, NodeState]]]
) -> dict[Kind, Counter[Shape]]:
    """Return how often each shape occurs among the pods of each kind.

    A pod that did not run at any of the instants has the usual share of its kind. Pods that do not
    fit on any node, even an empty one, do not count.
    """
    of_kind: dict[Kind, list[list[Any]]] = defaultdict(list)
    for key, about, *shape in counts:
        of_kind[Kind(tuple(key), tuple(about))].append(shape)
    mixes = {}
    for kind, found in of_kind.items():
        seen, shapes = Counter[int](), Counter[Shape]()
        for _, share, _, _, number in found:
            if share is not None:
                seen[share] += number
        usual = seen.most_common(1)[0][0] if seen else WHOLE
        states = nodes.get(kind, {}).values()
        largest = max((len(node.gpus) for state in states for node in state.values()), default=0)
        for gpus, share, cpu, memory, number in found:
            if gpus <= largest:
                shapes[Shape(gpus, usual if share is None else share, cpu, memory)] += number
        mixes[kind] = Counter(dict(shapes.most_common(_MAX_SHAPES)))
    return mixes


def _sql_time(time_us: int) -> str:
    return f"TIMESTAMPTZ '{time_text(time_us)}'"
