"""Reads when pods and Slurm jobs that request GPUs waited for a node, each once.

A wait begins with the pod's creation. It ends when a scheduler gives the pod a node, or when the
pod is deleted. Pods that podwatch saw waiting are in `pending_pods`. Pods that got a node earlier
are only in `pods`, with the same times. Unmet demand is the GPUs of waiting pods, for any reason:
quotas and scheduling gates also keep a workload from GPUs that it needs. Slurm jobs are not in the
store; `slurm_jobs` reads them from a file.

A request for GPUs may get time slices or MIG instances, and a renamed resource has no known size. A
pod that later ran has the size that it held. A pod that did not run has the median size of pods
with the same workload and shape. If none ran, pods with the same namespace and shape count, or
those with the same cluster and shape. Without these, a request for GPUs is for whole GPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import duckdb
import orjson

from gpuledger.store.views import with_namespaces
from gpuledger_reports.capacity.allocations import PRICED, Terms
from gpuledger_reports.capacity.pod_shapes import read_shape
from gpuledger_reports.capacity.shares import create_held
from gpuledger_reports.capacity.slurm_jobs import Job
from gpuledger_reports.reading.times import HOUR_US, Window

_JOBS: Final = """
SELECT unnest(from_json($jobs, '[{"cluster": "VARCHAR", "pod_uid": "VARCHAR", "node": "VARCHAR",
    "job_name": "VARCHAR", "account": "VARCHAR", "queue": "VARCHAR", "priority_class": "VARCHAR",
    "reason": "VARCHAR", "requested": "VARCHAR", "created": "BIGINT", "scheduled": "BIGINT",
    "given_up": "BIGINT"}]'), recursive := true)
"""
_JOBS_AT_ONCE: Final = 10_000
"""DuckDB needs 6 KB for each job while it reads the JSON."""
_WAITS: Final = """
CREATE OR REPLACE TEMP TABLE unsized_waits AS
-- The longest-lasting reason of each pod.
WITH reasons AS (
    SELECT cluster, pod_uid, arg_max(reason, seconds) AS reason FROM (
        SELECT cluster, pod_uid,
            concat_ws(': ', coalesce(reason, 'no reason yet'),
                nullif(translate(scheduling_gates, '[]"', ''), '')) AS reason,
            sum(epoch(coalesce(valid_to, left_time, make_timestamptz($end_us)) - in_force_from))
                AS seconds
        FROM pending_pods GROUP BY ALL
    ) GROUP BY ALL
),
-- The pods that podwatch saw waiting.
waiting AS (
    SELECT DISTINCT ON (cluster, pod_uid) * EXCLUDE (reason), reasons.reason
    FROM pending_pods JOIN reasons USING (cluster, pod_uid) WHERE valid_to IS NULL
),
-- The pods that got a node, with their containers.
placed AS (
    SELECT cluster, pod_uid, any_value(node) AS node, any_value(namespace) AS namespace,
        any_value(pod) AS pod, any_value(owner_kind) AS owner_kind,
        any_value(owner_name) AS owner_name, any_value(priority) AS priority,
        any_value(priority_class) AS priority_class, min(created_time) AS created_time,
        max(scheduled_time) AS scheduled_time, min(in_force_from) AS seen_time,
        max(coalesce(ended_time, deleted_time, 'infinity')) FILTER (valid_to IS NULL) AS gone_time,
        list(DISTINCT {'container': container, 'requested': requested})
            FILTER (container IS NOT NULL AND requested IS NOT NULL) AS containers
    FROM pods GROUP BY ALL
),
-- All pods and Slurm jobs, with the end of their wait.
lives AS (
    SELECT cluster, pod_uid, placed.node,
        coalesce(waiting.namespace, placed.namespace) AS namespace,
        coalesce(waiting.pod, placed.pod) AS pod,
        coalesce(waiting.owner_kind, placed.owner_kind) AS owner_kind,
        coalesce(waiting.owner_name, placed.owner_name) AS owner_name,
        coalesce(waiting.priority, placed.priority) AS priority,
        coalesce(waiting.priority_class, placed.priority_class) AS priority_class,
        waiting.queue, waiting.reason, waiting.message,
        CASE WHEN waiting.pod_uid IS NOT NULL THEN [coalesce(waiting.requested, '{}')]
            ELSE list_sort([each.requested FOR each IN placed.containers]) END AS requests,
        coalesce(waiting.created_time, placed.created_time) AS created_time,
        -- Older rows lack the scheduler's time, so podwatch's time counts.
        CASE WHEN placed.node IS NOT NULL THEN coalesce(scheduled_time,
            CASE WHEN waiting.pod_uid IS NOT NULL THEN coalesce(left_time, seen_time) END)
            END AS scheduled_time,
        CASE WHEN placed.node IS NULL THEN left_time END AS given_up_time,
        placed.gone_time
    FROM waiting FULL JOIN placed USING (cluster, pod_uid)
    WHERE waiting.pod_uid IS NOT NULL OR placed.scheduled_time IS NOT NULL
    UNION ALL BY NAME
    -- A Slurm job has no `pod`, and its id is the `pod_uid`.
    SELECT * EXCLUDE (requested, created, scheduled, given_up), [requested] AS requests,
        to_timestamp(created) AS created_time, to_timestamp(scheduled) AS scheduled_time,
        to_timestamp(given_up) AS given_up_time
    FROM slurm_jobs
)
-- Pods that got a node before the window, and ran in it, show the sizes of others.
SELECT * EXCLUDE (scheduled_time, given_up_time, gone_time),
    CASE WHEN scheduled_time < end_time THEN 'scheduled'
        WHEN given_up_time < end_time THEN 'never_scheduled' ELSE 'waiting' END AS state,
    greatest(created_time, least(coalesce(scheduled_time, given_up_time, end_time), end_time))
        AS until_time
FROM lives, (SELECT make_timestamptz($end_us) AS end_time)
WHERE requests IS NOT NULL AND created_time < end_time
    AND coalesce(gone_time, scheduled_time, given_up_time, end_time) >= make_timestamptz($begin_us)
"""
_SHAPES: Final = """
CREATE OR REPLACE TEMP TABLE shapes AS
SELECT unnest(from_json($shapes,
    '[{"requests": ["VARCHAR"], "shape": "VARCHAR", "gpus": "DOUBLE"}]'), recursive := true)
"""
_SIZED: Final = """
CREATE OR REPLACE TEMP TABLE waits AS
WITH largest_nodes AS (
    SELECT cluster, max(gpus) AS most_gpus FROM (
        SELECT cluster, count(DISTINCT gpu_uuid) AS gpus
        FROM inventory GROUP BY cluster, node, in_force_from, kafka_offset
        UNION ALL
        SELECT cluster, TRY((allocatable_resources ->> '$."nvidia.com/gpu"')::BIGINT) FROM nodes
    ) GROUP BY cluster
),
found AS (
    SELECT unsized_waits.*, shape, shapes.gpus AS requested_gpus,
        CASE shape WHEN 'share' THEN requests::VARCHAR ELSE shape END AS size,
        CASE WHEN pod IS NULL OR state <> 'scheduled' THEN NULL
            WHEN shape LIKE '% GPU%'
                THEN CASE WHEN held_gpus > 0 THEN least(requested_gpus, held_gpus) END
            WHEN shape = 'share' THEN coalesce(requested_gpus, held_gpus)
            ELSE requested_gpus END AS got_gpus
    FROM unsized_waits JOIN shapes USING (requests) LEFT JOIN held USING (cluster, pod_uid)
),
sized AS (SELECT * EXCLUDE (size, got_gpus), {gpus} AS gpus FROM found)
SELECT sized.* EXCLUDE (requested_gpus), epoch(until_time - created_time) AS seconds,
    -- The part of the wait that lies in the window.
    greatest(created_time, make_timestamptz($begin_us)) AS from_time,
    gpus * epoch(until_time - from_time) / 3600 AS unmet_gpu_hours,
    -- Jobs may use several nodes.
    pod IS NOT NULL AND node IS NULL AND coalesce(requested_gpus > most_gpus, false)
        AS is_too_large
FROM sized LEFT JOIN largest_nodes USING (cluster)
WHERE until_time >= make_timestamptz($begin_us)
"""
_TOO_LARGE: Final = """
SELECT count(*), arg_max(namespace || '/' || pod || ' (' || shape || ')', unmet_gpu_hours)
FROM waits WHERE is_too_large HAVING count(*) > 0
"""
_GOT: Final = """coalesce(got_gpus, CASE WHEN pod IS NULL THEN requested_gpus END,
    median(got_gpus) OVER (PARTITION BY cluster, namespace, owner_kind, owner_name, size),
    median(got_gpus) OVER (PARTITION BY cluster, namespace, size),
    median(got_gpus) OVER (PARTITION BY cluster, size), requested_gpus)"""
_TENANTS: Final = """
CREATE OR REPLACE TEMP TABLE tenants AS
SELECT cluster, pod_uid, {since} AS since, to_json({{'cluster': cluster, 'namespace': namespace,
    'pod': pod, 'owner_kind': owner_kind, 'owner_name': owner_name,
    'job': CASE WHEN pod IS NULL THEN pod_uid END, 'labels': labels,
    'of_namespace': [namespace_labels, namespace_annotations]}})::VARCHAR AS facts
FROM {waits} LEFT JOIN (
    SELECT cluster, pod_uid, arg_max(labels, in_force_from) AS labels FROM (
        SELECT cluster, pod_uid, labels, in_force_from FROM pending_pods
        UNION ALL SELECT cluster, pod_uid, labels, in_force_from FROM pods
    ) GROUP BY ALL
) USING (cluster, pod_uid)
"""
_WITH_TEAMS: Final = """
CREATE OR REPLACE TEMP TABLE waits AS
SELECT waits.*, team
FROM waits JOIN tenants USING (cluster, pod_uid) JOIN (
    SELECT unnest(from_json($teams, '[{"since": "DATE", "facts": "VARCHAR", "team": "VARCHAR"}]'),
        recursive := true)
) USING (since, facts)
"""
_DAILY: Final = """
CREATE OR REPLACE TEMP TABLE daily_waits AS
WITH days AS (
    SELECT strftime(midnight, '%Y-%m-%d') AS day,
        greatest(midnight, make_timestamptz($begin_us)) AS day_begin,
        least(midnight + INTERVAL 1 day, make_timestamptz($end_us)) AS day_end
    FROM (SELECT unnest(range(date_trunc('day', make_timestamptz($begin_us)),
        make_timestamptz($end_us), INTERVAL 1 day)) AS midnight)
)
SELECT waits.* REPLACE (
    CASE WHEN until_time >= day_end THEN 'waiting' ELSE state END AS state,
    epoch(least(until_time, day_end) - created_time) AS seconds,
    greatest(from_time, day_begin) AS from_time, least(until_time, day_end) AS until_time,
    gpus * epoch(least(until_time, day_end) - greatest(from_time, day_begin)) / 3600
        AS unmet_gpu_hours
), day FROM waits JOIN days ON created_time < day_end AND until_time >= day_begin
"""
_FRACTIONS: Final = """
SELECT replace(mig_profile, '+', '.'), max(device_fraction) FROM usage_hourly_unnamed
WHERE mig_profile IS NOT NULL AND device_fraction IS NOT NULL GROUP BY ALL
"""
_LOCATED: Final = """
CREATE OR REPLACE TEMP TABLE located_waits AS
WITH models AS (
    SELECT cluster, node, arg_max(model, in_force_from) AS model FROM inventory GROUP BY ALL
),
places AS (
    SELECT cluster, node, {'node_pool': node_pool, 'instance_type': instance_type, 'zone': zone,
        'capacity_type': capacity_type, 'model': model} AS place
    FROM models LEFT JOIN (
        SELECT DISTINCT ON (cluster, node) * FROM nodes WHERE deleted_time IS NULL
        ORDER BY in_force_from DESC
    ) USING (cluster, node)
)
SELECT waits.*, unnest(coalesce(place,
    CASE WHEN pod IS NULL THEN mode(place) OVER (PARTITION BY cluster, namespace, queue) END,
    mode(place) OVER (PARTITION BY cluster, namespace, owner_kind, owner_name, shape),
    mode(place) OVER (PARTITION BY cluster, namespace, shape),
    mode(place) OVER (PARTITION BY cluster, shape),
    mode(place) OVER (PARTITION BY cluster)))
FROM waits LEFT JOIN places USING (cluster, node) WHERE NOT is_too_large
"""
_HOURLY: Final = """
SELECT {columns}, epoch_us(hour) // {hour_us} AS hour_number,
    sum(gpus * epoch(least(until_time, hour + INTERVAL 1 hour) - greatest(from_time, hour)) / 3600)
        AS unmet_gpus
FROM (
    SELECT *, unnest(range(date_trunc('hour', from_time), until_time, INTERVAL 1 hour)) AS hour
    FROM {waits} WHERE gpus IS NOT NULL
) GROUP BY ALL
"""


def create_waits(
    connection: duckdb.DuckDBPyConnection, window: Window, jobs: Sequence[Job] = ()
) -> None:
    """Create the temporary table `waits`: a row for each pod or job that waited in the window.

    `state` is `scheduled`, `never_scheduled` or `waiting`, at the end of the window. `seconds` is
    the whole wait, up to the end of the window; `unmet_gpu_hours` is the part in the window, and
    null if the pod's size in GPUs is unknown. A pod without a node `is_too_large` if it requests
    more GPUs than any node of its cluster has had.
    """
    for at in range(0, len(jobs) or 1, _JOBS_AT_ONCE):
        into = "INSERT INTO slurm_jobs" if at else "CREATE OR REPLACE TEMP TABLE slurm_jobs AS"
        # As JSON, because a list of thousands of parameters takes seconds.
        given = {"jobs": orjson.dumps(jobs[at : at + _JOBS_AT_ONCE]).decode()}
        connection.execute(f"{into} {_JOBS}", given)
    times = {"begin_us": window.begin_us, "end_us": window.end_us}
    connection.execute(_WAITS, times)
    found = connection.execute("SELECT DISTINCT requests FROM unsized_waits").fetchall()
    fractions = read_fractions(connection)
    shapes = [
        {"requests": requests, "shape": shape, "gpus": gpus}
        for (requests,) in found
        for shape, gpus in [read_shape(requests, fractions)]
    ]
    connection.execute(_SHAPES, {"shapes": orjson.dumps(shapes).decode()})
    # Without parts, every request is for whole GPUs.
    has_parts = create_held(connection, window)
    sized = _SIZED.format(gpus=_GOT if has_parts else "requested_gpus")
    connection.execute(sized, {"begin_us": window.begin_us})
    connection.execute("DROP TABLE unsized_waits; DROP TABLE slurm_jobs; DROP TABLE held")


def notes_on_too_large(connection: duckdb.DuckDBPyConnection) -> Iterator[str]:
    """Yield a note on the pods in `waits` that are too large for all nodes, if there are any."""
    for count, largest in connection.execute(_TOO_LARGE).fetchall():
        yield f"Pods that request more GPUs than any node has: {count}, such as {largest}."


def read_fractions(connection: duckdb.DuckDBPyConnection) -> dict[str, float]:
    """Return the part of a GPU of each MIG profile in use, by its name in resources."""
    return dict(connection.execute(_FRACTIONS).fetchall())


def name_teams(connection: duckdb.DuckDBPyConnection, terms: Terms) -> None:
    """Add the column `team` to `waits`. Rules that depend on the GPU or the node do not match."""
    waits = with_namespaces("(SELECT *, from_time AS time FROM waits)")
    connection.execute(_TENANTS.format(since=terms.since_sql("from_time"), waits=waits))
    teams = [
        {"since": since, "facts": facts, "team": terms.named("team", facts, device)}
        for cluster, since, facts in connection.execute(
            "SELECT DISTINCT cluster, since, facts FROM tenants"
        ).fetchall()
        for device in [dict.fromkeys(PRICED) | {"cluster": cluster, "since": since}]
    ]
    connection.execute(_WITH_TEAMS, {"teams": orjson.dumps(teams).decode()})


def divide_by_days(connection: duckdb.DuckDBPyConnection, window: Window) -> None:
    """Create the temporary table `daily_waits`: `waits`, divided into the days of its window.

    `day` is the date, and `state` that at its end. The rows of a day are those that `create_waits`
    finds for this day. The columns are those of `waits`, so call `name_teams` first.
    """
    connection.execute(_DAILY, window._asdict())


def locate_waits(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the temporary table `located_waits`: `waits` with the columns of the pods' nodes.

    Pods that are too large for all nodes are left out, because most of their requests are mistakes.
    A pod without a node gets the most frequent values of pods with the same workload and shape. If
    there are none, pods with the same namespace and shape, cluster and shape, or cluster count. A
    Slurm job gets those of jobs in the same partition first.
    """
    connection.execute(_LOCATED)


def hourly_sql(columns: Iterable[str], waits: str) -> str:
    """Return the SQL for the GPUs of waiting pods, `unmet_gpus`, by columns and `hour_number`.

    Hours are numbered from 1970; hours without waiting pods have no row.
    """
    return _HOURLY.format(columns=", ".join(columns), hour_us=HOUR_US, waits=waits)
