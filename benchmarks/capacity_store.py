"""A store of a large fleet with pods that come and go, for capacity reports. Measures nothing.

Each node has places for one pod of eight GPUs, two of four, four of two, or eight of one. In a
place, a pod runs for 45 hours; six hours later the next one starts. Nodes belong to 20 pools, and
pods to 3,000 workloads, each in one pool. One of twenty workloads never computes, three of twenty
pause for a third of the hours and within others, and the rest have a load of their own. One of 100
nodes is cordoned all the time.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import duckdb

from benchmarks.synthetic_store import commit_files, write_rows
from gpuledger.clock import NS_PER_HOUR
from gpuledger.store.distributions import ALLOCATED, BITMAPS, BUSY, DRAM, MEMORY, MEMORY_MAX, USED
from gpuledger.store.schema import PARTITION_COLUMN, PODS
from gpuledger.store.usage_schema import (
    INCIDENTS,
    INVENTORY,
    NAMESPACES,
    NODES,
    PENDING_PODS,
    USAGE_DAILY,
    USAGE_HOURLY,
)

BEGIN_SECONDS: Final = 1_783_036_800
"""2026-07-03T00:00:00Z."""
_MACROS: Final = f"""
CREATE MACRO time_of(hour) AS to_timestamp({BEGIN_SECONDS} + 3600 * hour);
CREATE MACRO uuid_of(number) AS '00000000-0000-4000-8000-' || lpad(number::VARCHAR, 12, '0');
CREATE MACRO chance(a, b, sides) AS (hash(a * 1000003 + b) % sides)::BIGINT;
CREATE MACRO pool_of(node) AS node % 20;
CREATE MACRO cluster_of(node) AS CASE WHEN pool_of(node) < 4 THEN 'lab' ELSE 'prod' END;
CREATE MACRO model_of(node) AS
    ['NVIDIA H100 80GB HBM3', 'NVIDIA A100-SXM4-80GB', 'NVIDIA L40S'][pool_of(node) // 4 % 3 + 1];
CREATE MACRO width_of(node) AS [8, 4, 2, 1][pool_of(node) % 4 + 1];
CREATE MACRO place_of(gpu) AS gpu - gpu % width_of(gpu // 8);
CREATE MACRO turn_of(place, hour) AS hour + chance(place, 0, 51);
CREATE MACRO pod_of(place, turn) AS place * 1000 + turn // 51;
CREATE MACRO workload_of(pod) AS chance(pod, 0, 150) * 20 + pool_of(pod // 8000);
CREATE MACRO kind_of(workload) AS workload // 20 % 20;
CREATE MACRO busy_percent(workload, pod, hour) AS CASE
    WHEN kind_of(workload) = 0 OR (kind_of(workload) < 4 AND chance(pod, hour, 3) = 0) THEN 0
    ELSE 1 + (workload * 37 % 90 + chance(pod, hour, 10)) END;
CREATE MACRO memory_gib(workload) AS 1 + workload * 13 % 70;
"""
_MINUTE: Final = NS_PER_HOUR // 60
_ALL_MINUTES: Final = (1 << 60) - 1
_ROWS: Final = f"""
WITH devices AS (
    SELECT gpu, gpu // 8 AS node, hour, place_of(gpu) AS place, turn_of(place, hour) AS turn,
        CASE WHEN turn % 51 < 45 THEN pod_of(place, turn) END AS pod,
        workload_of(pod) AS workload, coalesce(busy_percent(workload, pod, hour), 0) AS percent,
        CASE WHEN percent = 0 THEN 0
            WHEN kind_of(workload) < 4 AND chance(pod, hour, 4) = 0 THEN 1 + chance(gpu, hour, 59)
            ELSE 60 END AS minutes,
        memory_gib(workload)::HUGEINT * 1073741824 AS memory_bytes
    FROM range($gpus) AS gpus(gpu), range($day * 24, $day * 24 + 24) AS hours(hour)
), entries AS (
    SELECT *, unnest(CASE WHEN pod IS NULL THEN ['idle'] ELSE ['idle', 'pod'] END) AS category
    FROM devices
), described AS (
    SELECT *, category = 'idle' AS is_idle, percent * minutes * {_MINUTE} // 100 AS used_ns,
        uuid_of(pod) AS uid, 'pod-' || pod AS name, 'team-' || workload % 60 AS team
    FROM entries
)
SELECT time_of($day * 24)::DATE AS event_date, cluster_of(node) AS cluster,
    'gpu-node-' || node AS node, time_of(hour) AS hour, 'GPU-' || md5(gpu::VARCHAR) AS gpu_uuid,
    gpu % 8 AS gpu_index, model_of(node) AS model, 7 AS compute_slices, 8 AS memory_slices,
    7 AS gpu_compute_slices, 8 AS gpu_memory_slices, category,
    CASE WHEN NOT is_idle THEN uid END AS pod_uid,
    CASE WHEN NOT is_idle THEN 'known' END AS pod_state,
    CASE WHEN NOT is_idle THEN team END AS namespace, CASE WHEN NOT is_idle THEN name END AS pod,
    CASE WHEN NOT is_idle THEN 'main' END AS container,
    CASE WHEN is_idle AND pod IS NOT NULL THEN 'known' END AS allocated_pod_state,
    CASE WHEN is_idle THEN uid END AS allocated_pod_uid,
    CASE WHEN is_idle AND pod IS NOT NULL THEN team END AS allocated_namespace,
    CASE WHEN is_idle THEN name END AS allocated_pod,
    CASE WHEN is_idle AND pod IS NOT NULL THEN 'main' END AS allocated_container,
    CASE WHEN is_idle THEN {NS_PER_HOUR} - used_ns ELSE used_ns END AS busy_ns,
    CASE WHEN NOT is_idle THEN used_ns END AS measured_busy_ns,
    CASE WHEN NOT is_idle THEN memory_bytes * {NS_PER_HOUR} END AS memory_byte_ns,
    CASE WHEN is_idle THEN 200000000 ELSE used_ns // 1000000 END AS energy_millijoules,
    CASE WHEN is_idle THEN {NS_PER_HOUR} END AS allocated_ns,
    CASE WHEN is_idle THEN 0 END AS unresponsive_ns,
    CASE WHEN NOT is_idle THEN used_ns // 2 END AS dram_active_ns,
    1800 AS sample_count, node % 12 AS kafka_partition,
    hour * 1000000 AS first_offset, hour * 1000000 + 999999 AS last_offset, 0 AS ingested_time_ns,
    {{buckets}}, CASE WHEN NOT is_idle THEN memory_bytes END AS {MEMORY_MAX},
    CASE WHEN is_idle THEN CASE WHEN pod IS NULL THEN 0 ELSE {_ALL_MINUTES} END END AS {ALLOCATED},
    (1::BIGINT << minutes) - 1 AS {USED}
FROM described
"""  # noqa: S608  # numbers
_PODS_OF_ALL: Final = """
CREATE TEMP TABLE all_pods AS
WITH places AS (
    SELECT DISTINCT place_of(gpu) AS place, gpu // 8 AS node FROM range($gpus) AS gpus(gpu)
), turns AS (
    SELECT *, unnest(range(turn_of(place, 0) // 51, turn_of(place, $hours) // 51 + 1)) AS number
    FROM places
)
SELECT place * 1000 + number AS pod, node, workload_of(place * 1000 + number) AS workload,
    width_of(node) AS gpus, number * 51 - chance(place, 0, 51) AS begin_hour,
    -- One of ten pods waits, for up to ten hours.
    CASE WHEN chance(place, number, 10) = 0 THEN 1 + chance(number, place, 10) ELSE 0 END AS waits
FROM turns WHERE begin_hour < $hours
"""
_OF_POD: Final = """
    cluster_of(node) AS cluster, uuid_of(pod) AS pod_uid, 'team-' || workload % 60 AS namespace,
    'pod-' || pod AS pod, 'Job' AS owner_kind, 'job-' || workload AS owner_name,
    '{"team":"team-' || workload % 60 || '","app":"job-' || workload || '"}' AS labels,
    '{"nvidia.com/gpu":"' || gpus || '"}' AS requested, 0 AS priority,
    time_of(begin_hour - waits) - INTERVAL 20 SECONDS AS created_time
"""
_TABLES: Final = (
    (
        PODS,
        f"""
WITH versions AS (
    SELECT *, time_of(begin_hour) AS begin_time, time_of(begin_hour + 45) AS end_time, version
    FROM all_pods CROSS JOIN range(4) AS versions(version)
    WHERE version < 2 OR begin_hour + 45 <= $hours
)
SELECT {_OF_POD}, 'gpu-node-' || node AS node,
    [begin_time - INTERVAL 20 SECONDS, begin_time, end_time, end_time + INTERVAL 30 SECONDS]
        [version + 1] AS in_force_from,
    CASE WHEN version = 3 THEN end_time + INTERVAL 30 SECONDS END AS deleted_time,
    begin_time - INTERVAL 20 SECONDS AS scheduled_time,
    CASE WHEN version > 0 THEN begin_time END AS started_time,
    CASE WHEN version > 1 THEN end_time END AS ended_time,
    pod * 4 + version AS resource_version,
    CASE WHEN version > 0 THEN md5(pod::VARCHAR) || md5(node::VARCHAR) END AS container_id,
    CASE WHEN version > 0 THEN 'main' END AS container, node % 12 AS kafka_partition,
    row_number() OVER () AS kafka_offset
FROM versions ORDER BY kafka_offset
""",  # noqa: S608  # as above
    ),
    (
        PENDING_PODS,
        f"""
SELECT {_OF_POD}, 'Unschedulable' AS reason,
    CASE WHEN version = 0 THEN created_time ELSE time_of(begin_hour) END AS in_force_from,
    CASE WHEN version = 1 THEN time_of(begin_hour) - INTERVAL 20 SECONDS END AS left_time,
    pod * 4 + version AS resource_version, 0 AS kafka_partition,
    row_number() OVER () AS kafka_offset
FROM all_pods CROSS JOIN range(2) AS versions(version) WHERE waits > 0
""",  # noqa: S608  # as above
    ),
    (
        NODES,
        """
SELECT cluster_of(node) AS cluster, 'gpu-node-' || node AS node, time_of(-720) AS in_force_from,
    'pool-' || pool_of(node) AS node_pool, 'p5.48xlarge' AS instance_type, 'eu-west-1' AS region,
    'eu-west-1a' AS zone, 'reserved' AS capacity_type,
    '{"kubernetes.io/hostname":"gpu-node-' || node || '"}' AS labels, '1' AS resource_version,
    0 AS kafka_partition, node AS kafka_offset, node % 100 = 0 AS unschedulable
FROM range($gpus // 8) AS nodes(node)
""",
    ),
    (
        NAMESPACES,
        """
SELECT cluster, 'team-' || number AS namespace, time_of(-720) AS in_force_from, '{}' AS labels,
    '1' AS resource_version, 0 AS kafka_partition, number AS kafka_offset
FROM range(60) AS numbers(number), unnest(['lab', 'prod']) AS clusters(cluster)
""",
    ),
    (
        INVENTORY,
        """
SELECT cluster_of(gpu // 8) AS cluster, 'gpu-node-' || gpu // 8 AS node,
    time_of(-720) AS in_force_from, 'GPU-' || md5(gpu::VARCHAR) AS gpu_uuid,
    model_of(gpu // 8) AS model, gpu % 8 AS gpu_index, 85899345920 AS memory_total_bytes,
    0 AS kafka_partition, gpu // 8 AS kafka_offset, 700000 AS power_limit_milliwatts
FROM range($gpus) AS gpus(gpu)
""",
    ),
    (
        INCIDENTS,
        """
SELECT cluster_of(gpu // 8) AS cluster, 'gpu-node-' || gpu // 8 AS node,
    time_of(chance(number, 2, $hours)) AS time, 'boot' AS boot_id,
    'GPU-' || md5(gpu::VARCHAR) AS gpu_uuid, gpu % 8 AS gpu_index, 'xid' AS kind,
    'critical' AS severity, 'nvml' AS source, [48, 63, 79, 94, 95][number % 5 + 1] AS xid,
    '[]' AS pods, 0 AS kafka_partition, number AS kafka_offset
FROM (SELECT number, chance(number, 1, $gpus) AS gpu FROM range($gpus // 2) AS numbers(number))
""",
    ),
)
SCHEMAS: Final = (USAGE_HOURLY, USAGE_DAILY, *(schema for schema, _ in _TABLES))
"""The tables of the store."""
# In the order in which rollups write it.
_ORDER: Final = "cluster, node, gpu_uuid, {}"


def write_store(store: Path, *, gpus: int, days: int) -> None:
    """Write the tables of a store."""
    with duckdb.connect() as connection:
        prepare(connection)
        write_objects(connection, store, gpus=gpus, days=days)
        for day in range(days):
            write_day(connection, store, day, gpus=gpus)
    for schema in SCHEMAS:
        commit_files(store, schema)


def prepare(connection: duckdb.DuckDBPyConnection) -> None:
    """Define what the queries use."""
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(_MACROS)


def write_objects(
    connection: duckdb.DuckDBPyConnection, store: Path, *, gpus: int, days: int
) -> None:
    """Write the files of all tables except usage."""
    given = {"gpus": gpus, "hours": days * 24}
    connection.execute(_PODS_OF_ALL, given)
    for schema, rows in _TABLES:
        used = {name: value for name, value in given.items() if f"${name}" in rows}
        write_rows(connection, schema, rows, store / schema.name, used)


def write_day(connection: duckdb.DuckDBPyConnection, store: Path, day: int, *, gpus: int) -> None:
    """Write the files of a day's usage."""
    date = datetime.fromtimestamp(BEGIN_SECONDS, tz=UTC) + timedelta(days=day)
    hours, sums = (
        store / schema.name / f"{PARTITION_COLUMN}={date:%Y-%m-%d}"
        for schema in (USAGE_HOURLY, USAGE_DAILY)
    )
    rows, given = _ROWS.format(buckets=_buckets()), {"gpus": gpus, "day": day}
    write_rows(connection, USAGE_HOURLY, rows, hours, given, order=_ORDER.format("hour"))
    write_rows(connection, USAGE_DAILY, _sums_of(hours), sums, order=_ORDER.format("day"))


def _buckets() -> str:
    """Return the SQL for the columns that count minutes: one bucket has all minutes with a use."""
    found = []
    for each, value, is_known in (
        (BUSY, "percent", "true"),
        (DRAM, "percent // 2", "NOT is_idle"),
        (MEMORY, "memory_gib(workload)", "NOT is_idle"),
    ):
        below = "NULL"
        for column, bound in zip(each.columns, (*each.bounds, 1 << 30), strict=False):
            inside = f"{value} <= {bound} AND ({value} > {below}) IS NOT false"
            amount = f"CASE WHEN {inside} THEN minutes ELSE 0 END"
            rest = " + 60 - minutes" if below == "NULL" else ""
            found.append(f"CASE WHEN {is_known} THEN {amount}{rest} END AS {column}")
            below = str(bound)
    return ", ".join(found)


def _sums_of(hours: Path) -> str:
    """Return the SQL for the sums of a day's hours."""
    sums = {column.name: _sum(column.name) for column in USAGE_DAILY.columns if _sum(column.name)}
    aggregates = ", ".join(f"{sql}({name}) AS {name}" for name, sql in sums.items())
    left = ", ".join([*sums, *BITMAPS, "hour"])
    return (
        f"SELECT * EXCLUDE ({left}), date_trunc('day', hour) AS day, {aggregates}"  # noqa: S608  # the tables' own names
        f" FROM '{hours}/*.parquet' GROUP BY ALL"
    )


def _sum(name: str) -> str | None:
    """Return the aggregate of a column of usage; none for what rows are grouped by."""
    if name in (MEMORY_MAX, "last_offset", "ingested_time_ns"):
        return "max"
    if name == "first_offset":
        return "min"
    is_sum = name.endswith(("_ns", "_millijoules", "sample_count")) or "_minutes_" in name
    return "sum" if is_sum else None
