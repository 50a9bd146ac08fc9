"""SQL that finds the pod to which each row belongs, and the pod's name.

The names come from pods' records if they exist, otherwise from other rows of the day. The rows come
from a usage table, through the view `usage_raw`. `charging_sql` bills the rows.
"""

from collections.abc import Iterable, Sequence
from typing import Final

UNPLACED: Final = (
    "each.category = 'pod' AND each.container_id IS NOT NULL"
    " AND coalesce(each.pod_state, 'pending') NOT IN ('known', 'foreign')"
)
"""Condition on `usage_raw`, with the alias `each`: rows of a container whose pod was still
unknown."""


ROWS_WITHOUT_POD_RECORD: Final = (
    "category = 'pod' AND pod_state IS DISTINCT FROM 'known'"
    " OR category = 'idle' AND allocated_pod_state NOT IN ('known', 'unknown')"
)
"""Condition on `usage_raw`: rows of pods for which the row's names do not suffice."""


def spans_sql(pods: str) -> str:
    """Return the SQL that makes `pod_spans`: the pods created before `$end_us`, with their names.

    The column `is_gone` marks pods that were deleted before `$begin_us`.
    """
    return f"""
CREATE OR REPLACE TEMP TABLE pod_spans AS
SELECT cluster, node, pod_uid,
    coalesce(max(deleted_time) <= make_timestamptz($begin_us), false) AS is_gone,
    list_distinct([pod_uid] || list(config_hash) || list(container_id)) AS ids,
    list_distinct(list(namespace || '/' || pod)) AS full_names
FROM {pods} GROUP BY cluster, node, pod_uid HAVING min(created_time) < make_timestamptz($end_us)
"""  # noqa: S608  # quoted files


def pod_versions_sql(pods: str, uids: str) -> str:
    """Return the SQL of some pods' versions, but only of versions that change a fact.

    Most versions repeat the facts of the previous version, for example when containers start. Each
    row contains the deletion time of the last version. All versions of static pods are kept: a node
    may have several static pods with one hash, and their versions replace each other.
    """
    # The same order as in `tenants`.
    digits = "CASE WHEN regexp_full_match(resource_version, '[0-9]+') THEN resource_version END"
    number = f"coalesce(try_cast({digits} AS HUGEINT), 0)"
    named_columns = "(namespace, pod, owner_kind, owner_name, labels, created_us, annotations)"
    return f"""
WITH versions AS (
    SELECT cluster, node, pod_uid, epoch_us(in_force_from) AS since_us, namespace, pod, owner_kind,
        owner_name, labels, epoch_us(created_time) AS created_us,
        epoch_us(deleted_time) AS deleted_us, resource_version, min(kafka_offset) AS kafka_offset,
        config_hash, annotations
    FROM {pods} WHERE (cluster, node, pod_uid) IN ({uids}) GROUP BY ALL
)
SELECT * REPLACE (max(deleted_us) OVER (PARTITION BY cluster, node, pod_uid) AS deleted_us)
FROM versions
WINDOW history AS (PARTITION BY cluster, node, pod_uid ORDER BY {number}, kafka_offset)
QUALIFY config_hash IS NOT NULL OR lag(config_hash) OVER history IS NOT NULL
    OR {named_columns} IS DISTINCT FROM lag({named_columns}) OVER history
    OR since_us < lag(since_us) OVER history
ORDER BY ALL
"""  # noqa: S608  # quoted files


PODS_THERE: Final = "SELECT cluster, node, pod_uid FROM pod_spans WHERE NOT is_gone"


def gone_pods_sql(rows: Iterable[str]) -> str:
    """Return the SQL of pods that were deleted before the period, but to which rows still refer."""
    named = " UNION ALL ".join(_names_sql(_IDS, f"({each})") for each in rows)
    return _pods_named_sql("ids", named, "WHERE is_gone")


def unnamed_rows_sql(rows: Iterable[str]) -> str:
    """Return the SQL that makes `unnamed_rows`.

    It contains the ids and names of pods in `ROWS_WITHOUT_POD_RECORD`.
    """
    named_columns = (
        "pod_uid, allocated_pod_uid, container_id,"
        " namespace, pod, allocated_namespace, allocated_pod"
    )
    parts = " UNION ALL ".join(
        f"SELECT {named_columns} FROM ({each}) WHERE {ROWS_WITHOUT_POD_RECORD}"  # noqa: S608  # quoted files
        for each in rows
    )
    return f"CREATE OR REPLACE TEMP TABLE unnamed_rows AS SELECT DISTINCT * FROM ({parts})"  # noqa: S608  # as above


_IDS: Final = ("pod_uid", "allocated_pod_uid", "container_id")
_FULL_NAMES: Final = ("namespace || '/' || pod", "allocated_namespace || '/' || allocated_pod")


def unnamed_pods_sql() -> str:
    """Return the SQL of the pods of `pod_spans` that rows in `unnamed_rows` may refer to."""
    by_id = _pods_named_sql("ids", _names_sql(_IDS, "unnamed_rows"))
    return f"{by_id} UNION {_pods_named_sql('full_names', _names_sql(_FULL_NAMES, 'unnamed_rows'))}"


def _names_sql(columns: Sequence[str], rows: str) -> str:
    return " UNION ALL ".join(f"SELECT {column} AS name FROM {rows}" for column in columns)  # noqa: S608  # quoted files


def _pods_named_sql(known_by: str, names: str, condition: str = "") -> str:
    # Finds pods on any node; the caller checks the node of each pod that is found.
    return f"""
SELECT cluster, node, pod_uid
FROM (SELECT *, unnest({known_by}) AS name FROM pod_spans {condition})
SEMI JOIN ({names}) USING (name)
"""  # noqa: S608  # quoted files


def containers_sql(pods: str) -> str:
    """Return the SQL that makes `containers`: the pod of each container, from pods' records."""
    return f"""
CREATE TEMP TABLE IF NOT EXISTS containers AS
SELECT cluster, node, container_id, arg_max(pod_uid, kafka_offset) AS pod_uid
FROM {pods} WHERE container_id IS NOT NULL GROUP BY ALL
"""  # noqa: S608  # quoted files


def with_pods_sql(rows: str) -> str:
    """Return the SQL of rows, with the unknown pods of containers filled in from `containers`.

    The store's views find the pods in the same way.
    """
    return f"""
SELECT each.* REPLACE (coalesce(placed.pod_uid, each.pod_uid) AS pod_uid)
FROM ({rows}) AS each LEFT JOIN containers AS placed ON placed.cluster = each.cluster
    AND placed.node = each.node
    AND placed.container_id = CASE WHEN {UNPLACED} THEN each.container_id END
"""  # noqa: S608  # quoted files


def with_allocatees_sql(rows: str) -> str:
    """Return the SQL of rows in which allocations in `other_pods` have no UID.

    Such an allocation then belongs to the pod that had the allocation's pod name.
    """
    return f"""
SELECT each.* REPLACE (
    CASE WHEN other.uid IS NULL THEN each.allocated_pod_uid END AS allocated_pod_uid)
FROM ({rows}) AS each LEFT JOIN other_pods AS other ON other.cluster = each.cluster
    AND other.node = each.node AND other.uid = each.allocated_pod_uid
    AND other.namespace = each.allocated_namespace AND other.pod = each.allocated_pod
"""  # noqa: S608  # quoted files


def row_names_sql(rows: Iterable[str]) -> str:
    """Return the SQL that makes `row_names`: names that these rows have for pods in `unnamed`."""
    named_columns = " UNION ALL ".join(
        f"SELECT cluster, node, {uid} AS uid, {namespace} AS namespace, {pod} AS pod FROM {each}"  # noqa: S608  # quoted files
        for each in rows
        for uid, namespace, pod in (
            ("pod_uid", "namespace", "pod"),
            ("allocated_pod_uid", "allocated_namespace", "allocated_pod"),
        )
    )
    return f"""
CREATE OR REPLACE TEMP TABLE row_names AS
SELECT cluster, node, uid, max(name).namespace AS namespace, max(name).pod AS pod
FROM (SELECT *, {{'namespace': namespace, 'pod': pod}} AS name FROM ({named_columns}))
SEMI JOIN unnamed USING (cluster, node, uid)
WHERE namespace IS NOT NULL GROUP BY ALL
"""  # noqa: S608  # quoted files


def with_names_sql(rows: str) -> str:
    """Return the SQL of rows, with missing names filled in from `row_names`."""
    named = ", ".join(
        f"CASE WHEN each.{prefix}namespace IS NULL THEN {of}.{column}"
        f" ELSE each.{prefix}{column} END AS {prefix}{column}"
        for prefix, of in (("", "user_names"), ("allocated_", "allocatee_names"))
        for column in ("namespace", "pod")
    )
    joins = " ".join(
        f"LEFT JOIN row_names AS {of} ON {of}.cluster = each.cluster AND {of}.node = each.node"
        f" AND {of}.uid = each.{uid}"
        for uid, of in (("pod_uid", "user_names"), ("allocated_pod_uid", "allocatee_names"))
    )
    return f"SELECT each.* REPLACE ({named}) FROM ({rows}) AS each {joins}"  # noqa: S608  # quoted files
