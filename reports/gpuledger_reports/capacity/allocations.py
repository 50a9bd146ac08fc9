"""Allocations of GPUs in the views of usage: the holder, its workload and team, and the price.

A holder is a pod, or a job of a scheduler, to which devices are allocated. A row of the category
`idle` has the time in which a part of a device was allocated to one holder, or was free, or had an
unknown allocation (`allocated_ns`, `allocated_gpu_hours`). Its `busy_ns` and `gpu_hours` are the
part of this time in which no kernel ran, so they are *unused* time.

Rows of other categories contain use: `busy_ns` is the time in which kernels ran, and `allocated_ns`
is null. Such a row belongs to a holder only if it is certain which pod or job used the device.

Reports first sum up rows without descriptions, because joining each row with the pods' history
would take most of the time. `create_descriptions` then adds the descriptions to the sums. Sums are
split on the days from which another description of their node or namespace counts: `create_changes`
finds these days. A day belongs to the description at its start, because daily sums cannot be split.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

import duckdb
import msgspec

from gpuledger.store.query import empty_relation
from gpuledger.store.schema import PODS
from gpuledger.store.usage_schema import NAMESPACES, NODES, USAGE_HOURLY
from gpuledger.store.views import usage_sql, with_namespaces, with_nodes
from gpuledger_reports.capacity.report import GPU_DIMENSIONS
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.pricing.policy_file import days_of_change
from gpuledger_reports.pricing.rates import DeviceTraits, PriceBook
from gpuledger_reports.pricing.tenants import UNALLOCATED, Tenant, ValueFinder
from gpuledger_reports.reading.times import DAY_US, Window, day_of
from gpuledger_reports.reading.versions import NamespaceVersion

IDENTITY: Final = (
    *("cluster", "node", "model", "mig_profile", "compute_slices", "gpu_compute_slices"),
    *("memory_slices", "gpu_memory_slices", "allocated_pod_state", "allocated_pod_uid"),
    *("allocated_namespace", "allocated_pod", "allocated_job_id"),
)
"""The columns of a row of allocated time that determine its descriptions."""
_OF_NODE: Final = ("node_pool", "instance_type", "zone", "region", "capacity_type")
_OF_NAMESPACE: Final = ("namespace_labels", "namespace_annotations")
_DESCRIBED: Final = (
    *IDENTITY,
    *_OF_NODE,
    *("allocated_owner_kind", "allocated_owner_name", "allocated_labels"),
    *_OF_NAMESPACE,
)
_VERSIONED: Final = (
    (NODES.name, "cluster, node", _OF_NODE, with_nodes),
    (NAMESPACES.name, "cluster, namespace", _OF_NAMESPACE, with_namespaces),
)
"""The tables of descriptions, with their keys, the columns that descriptions use, and the function
that adds these columns to rows."""
_OF_POD: Final = (
    *("in_force_from", "namespace", "pod", "owner_kind", "owner_name", "labels", "created_time"),
    *("deleted_time", "resource_version", "config_hash", "kafka_offset"),
)
_NEWEST_PODS: Final = f"""
CREATE OR REPLACE TEMP TABLE newest_pods AS
SELECT cluster, node, pod_uid, unnest(max_by({{
    {", ".join(f"'{name}': {name}" for name in _OF_POD)},
    'container_id': NULL::VARCHAR, 'container': NULL::VARCHAR, 'requested': NULL::VARCHAR
}}, (coalesce(try_cast(resource_version AS HUGEINT), -1), kafka_offset)))
FROM pods GROUP BY cluster, node, pod_uid
"""  # noqa: S608  # our own names
"""SQL of the newest version of each pod, as `NEWEST_LAST` orders them."""
_FOUND_PODS: Final = """
CREATE OR REPLACE TEMP TABLE found_pods AS
SELECT DISTINCT ON (identity) identity, owner_kind, owner_name, labels
FROM identities JOIN newest_pods USING (cluster, node)
WHERE pod_uid = allocated_pod_uid AND namespace = allocated_namespace AND pod = allocated_pod
    AND allocated_pod_state <> 'foreign'
"""
"""SQL of the pods of the identities that name a pod by its UID and its names."""
_OTHER_PODS: Final = """(
    FROM newest_pods SEMI JOIN (FROM identities ANTI JOIN found_pods USING (identity)) AS others
    ON newest_pods.cluster = others.cluster AND newest_pods.node = others.node
        AND (pod_uid = allocated_pod_uid OR (namespace = allocated_namespace
            AND pod = allocated_pod))
)"""
_CHANGES: Final = f"""
CREATE OR REPLACE TEMP TABLE {{table}} AS
WITH described AS (
    SELECT {{keys}}, time, hash({{columns}}) AS description FROM {{rows}}
), changed AS (
    SELECT *, make_timestamptz((epoch_us(time) + {DAY_US - 1}) // {DAY_US} * {DAY_US}) AS day
    FROM described
    QUALIFY description <> lag(description) OVER (PARTITION BY {{keys}} ORDER BY time)
)
SELECT {{keys}}, list(DISTINCT day) AS change_days FROM changed
WHERE day > make_timestamptz($begin_us) AND day < make_timestamptz($end_us) GROUP BY ALL
"""  # noqa: S608  # our own names
"""SQL of the days from which another description of an object counts. A version with the same
description changes nothing, and neither does the first version."""
_CHANGES_OF_IDENTITIES: Final = """
CREATE OR REPLACE TEMP TABLE changes AS
SELECT identity, list_concat(of_node.change_days, of_namespace.change_days) AS change_days
FROM identities LEFT JOIN node_changes AS of_node USING (cluster, node)
LEFT JOIN namespace_changes AS of_namespace
    ON of_namespace.cluster = identities.cluster AND namespace = allocated_namespace
WHERE coalesce(of_node.change_days, of_namespace.change_days) IS NOT NULL
"""
IDENTITY_HASH: Final = f"hash({', '.join(IDENTITY)})"
HOLDER: Final = """CASE category
    WHEN 'idle' THEN CASE
        WHEN allocated_job_id IS NOT NULL THEN hash(cluster, 'job', allocated_job_id)
        WHEN allocated_pod_uid IS NOT NULL THEN hash(cluster, node, allocated_pod_uid)
        WHEN allocated_pod IS NOT NULL
        THEN hash(cluster, node, allocated_namespace, allocated_pod) END
    WHEN 'pod' THEN CASE pod_state WHEN 'known' THEN hash(cluster, node, pod_uid) END
    WHEN 'job' THEN hash(cluster, 'job', job_id)
    WHEN 'host' THEN 0 END"""
"""SQL of a row's holder. It is null for time that is not allocated, or whose allocation is unknown,
and for use by a process or pod that was unknown when the row was written. A job may have devices on
several nodes. Host use has the holder 0, because it is certain that no pod used the device."""
IS_HELD: Final = "coalesce(allocated_job_id, allocated_pod_uid, allocated_pod) IS NOT NULL"
"""SQL of whether a row of allocated time has a holder."""
HOLDER_NAME: Final = "coalesce('job/' || allocated_job_id, allocated_pod)"
WORKLOAD: Final = (
    "coalesce('job/' || allocated_job_id, allocated_owner_kind || '/' || allocated_owner_name,"
    " 'Pod/' || allocated_pod)"
)
"""SQL of the workload of an allocation: the kind and name of the pod's owner, or the pod itself."""
_TEAM: Final = """to_json({'cluster': cluster, 'namespace': allocated_namespace,
    'pod': allocated_pod, 'owner_kind': allocated_owner_kind, 'owner_name': allocated_owner_name,
    'job': allocated_job_id, 'labels': allocated_labels,
    'of_namespace': [namespace_labels, namespace_annotations]})"""
"""SQL of the JSON object from which `Terms.named` derives the team."""
DIMENSIONS: Final[Mapping[str, str]] = {
    **GPU_DIMENSIONS,
    "namespace": "allocated_namespace",
    "workload": WORKLOAD,
    "team": _TEAM,
}
PRICED: Final = (
    *("cluster", "model", "mig_profile", "compute_slices", "gpu_compute_slices"),
    *_OF_NODE,
)
"""The columns of a device that determine its price."""

USAGE: Final = """(
    SELECT day AS time, * EXCLUDE (day) FROM usage_daily_unnamed
    WHERE day >= make_timestamptz($first_us) AND day < make_timestamptz($last_us)
    UNION ALL BY NAME
    SELECT hour AS time, * EXCLUDE (hour) FROM usage_hourly_unnamed
    WHERE hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($first_us)
    UNION ALL BY NAME
    SELECT hour AS time, * EXCLUDE (hour) FROM usage_hourly_unnamed
    WHERE hour >= make_timestamptz($last_us) AND hour < make_timestamptz($end_us)
)"""
"""SQL of all usage in `usage_limits`: whole days from the daily sums, which have a 24th of
the rows, and the other hours from the hourly ones."""


def usage_limits(connection: duckdb.DuckDBPyConnection, window: Window) -> dict[str, int]:
    """Return the parameters of `USAGE` for a window.

    The newest day of the daily sums may have been summed up only in part.
    """
    newest = connection.sql("SELECT epoch_us(max(day)) FROM usage_daily_unnamed").fetchall()[0][0]
    first_us = min(-(-window.begin_us // DAY_US) * DAY_US, window.end_us)
    last_us = max(first_us, min(window.end_us // DAY_US * DAY_US, newest or 0))
    return {"first_us": first_us, "last_us": last_us, **window._asdict()}


def create_identities(
    connection: duckdb.DuckDBPyConnection, usage: str, limits: Mapping[str, int]
) -> None:
    """Create the temporary table `identities`: the columns `IDENTITY` of each hash in a window.

    `usage` is the SQL of the window's rows, and `limits` has its parameters.
    """
    columns = ", ".join(f"any_value({name}) AS {name}" for name in IDENTITY)
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE identities AS
        SELECT {IDENTITY_HASH} AS identity, {columns} FROM {usage} WHERE category = 'idle'
        GROUP BY identity""",  # noqa: S608  # our own names
        limits,
    )


def create_changes(connection: duckdb.DuckDBPyConnection, window: Window) -> None:
    """Create the temporary tables `node_changes`, `namespace_changes` and `changes` of identities.

    Their column `change_days` has the days in a window from which another description counts.
    Objects without such days have no row. Call `create_identities` first.
    """
    for versions, keys, columns, with_descriptions in _VERSIONED:
        rows = f"(SELECT DISTINCT {keys}, in_force_from AS time FROM {versions})"  # noqa: S608  # our own names
        changes = _CHANGES.format(
            table=f"{versions.removesuffix('s')}_changes",
            keys=keys,
            columns=", ".join(columns),
            rows=with_descriptions(rows),
        )
        connection.execute(changes, window._asdict())
    connection.execute(_CHANGES_OF_IDENTITIES)


def create_descriptions(connection: duckdb.DuckDBPyConnection, sums: str) -> str:
    """Create the temporary table `descriptions`; return the SQL of the sums with it.

    It describes the allocations and nodes at `first_time`. `sums` is a table with the columns
    `identity` and `first_time`, and `create_identities` has created `identities`. The newest
    description of a pod applies to all of its time.
    """
    connection.execute(_NEWEST_PODS)
    connection.execute(_FOUND_PODS)
    rows = f"""(SELECT DISTINCT identity, first_time AS hour FROM {sums})
        JOIN identities USING (identity)"""  # noqa: S608  # our own names
    found = _described_sql(f"{rows} SEMI JOIN found_pods USING (identity)")
    others = _described_sql(f"{rows} ANTI JOIN found_pods USING (identity)", pods=_OTHER_PODS)
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE descriptions AS
        SELECT described.* REPLACE (owner_kind AS allocated_owner_kind,
            owner_name AS allocated_owner_name, labels AS allocated_labels)
        FROM ({found}) AS described JOIN found_pods USING (identity)
        UNION ALL {others}"""  # noqa: S608  # our own names
    )
    return f"(FROM {sums} JOIN descriptions USING (identity, first_time))"


def _described_sql(rows: str, *, pods: str | None = None) -> str:
    empty = empty_relation(USAGE_HOURLY)
    relations = {
        USAGE_HOURLY.name: f"(FROM {rows} UNION ALL BY NAME FROM {empty})",
        **({PODS.name: pods} if pods else {}),
        **{table.name: table.name for table in (NODES, NAMESPACES)},
    }
    named = usage_sql(USAGE_HOURLY.name, relations)
    return f"SELECT identity, hour AS first_time, {', '.join(_DESCRIBED)} FROM ({named})"  # noqa: S608  # as above


class Terms:
    """The prices of devices and the teams of pods in a window, by the rules of bills."""

    def __init__(self, policy: BillPolicy, window: Window) -> None:
        self._policy, self._book = policy, PriceBook(policy)
        first, last = day_of(window.begin_us), day_of(window.end_us - 1)
        changes = (day for day in days_of_change(policy) if first < day <= last)
        self._days = [first, *sorted(changes)]
        self._unpriced: dict[str, float] = defaultdict(float)

    @property
    def currency(self) -> str:
        """The currency of prices."""
        return self._policy.currency

    def since_sql(self, time: str) -> str:
        """Return the SQL of the day of the last change of prices or teams before `time`."""
        cases = [f"WHEN {time} >= TIMESTAMPTZ '{day} 00:00:00Z' THEN DATE '{day}'"
                 for day in self._days[:0:-1]]  # fmt: skip
        return f"CASE {' '.join((*cases, ''))}WHEN true THEN DATE '{self._days[0]}' END"

    def since_change_sql(self, time: str) -> str:
        """Return the same SQL, with changes of descriptions in the column `change_days`, too."""
        change = f"list_max(list_filter(change_days, lambda each: each <= {time}))::DATE"
        return f"greatest({self.since_sql(time)}, {change})"

    def price(self, row: Mapping[str, Any]) -> Fraction | None:
        """Return the price of a GPU-hour, or `None`; `row` has `since` and the columns `PRICED`."""
        rate = self._book.rate_of(_traits(row), row["since"])
        return None if rate.price is None else rate.per_gpu_hour

    def note_unpriced(self, row: Mapping[str, Any], hours: float) -> None:
        """Add the GPU-hours of a row to the note on missing prices, if the row has no price."""
        if self.price(row) is None:
            self._unpriced[row["model"] or "an unknown model"] += hours

    def notes(self) -> Iterator[str]:
        """Yield a note on the currency, and one on GPUs without a price."""
        yield f"Costs are in {self.currency}."
        if hours := sum(self._unpriced.values()):
            models = ", ".join(sorted(self._unpriced))
            yield f"{hours:,.1f} GPU-hours have no cost, because no price matches: {models}."

    def named(self, name: str, value: str | None, row: Mapping[str, Any]) -> str | None:
        """Convert a dimension's value in SQL to the value that the report shows."""
        if name != "team" or value is None:
            return value
        facts = msgspec.json.decode(value, type=dict[str, Any])
        namespace = NamespaceVersion(0, None, *facts.pop("of_namespace"))
        tenant = Tenant((), "pod" if facts["job"] is None else "job", **facts)
        finder = ValueFinder(tenant, _traits(row), namespace, row["since"], self._policy)
        return finder.value(name) or UNALLOCATED


def _traits(row: Mapping[str, Any]) -> DeviceTraits:
    return DeviceTraits(node="", **{name: row[name] for name in PRICED})


def rows_of(
    found: duckdb.DuckDBPyConnection | duckdb.DuckDBPyRelation,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a result, with values by column."""
    columns = [column[0] for column in found.description]
    while rows := found.fetchmany(10_000):
        yield from (dict(zip(columns, row, strict=True)) for row in rows)
