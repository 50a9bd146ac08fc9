"""SQL that bills device-hours in whole units: the party to which each part of an hour belongs.

A unit is a nanosecond of a physical GPU divided by `UNITS`, so that the time of MIG slices is also
a whole number. The parts of a GPU's hour sum to the time for which the GPU was in the inventory. If
the inventory does not list the GPU in that hour, they sum to the time that ticks cover. If several
nodes report a GPU, the parts on all of them sum to at most an hour. The rows of a node do not count
in an hour in which the GPU was in other nodes all the time.

1. If ticks cover more than this time (a clock was set or slewed), allocated time is scaled down.
2. Time in which a device did not answer is unresponsive. An allocatee claims the other time by its
   tenant's basis. A user without an allocation claims its used time; these claims together are at
   most the device's unallocated time. The rest of a pod's or job's used time without an allocation
   is use of time that others have: at most the allocated time, and divided among the allocatees in
   proportion to it. It is a number of its own that changes no claim. A policy may later move the
   units of allocatees that pay by allocated time to the user.
3. If the claims exceed the device's time, they are scaled down. The remaining time is unused if it
   was allocated, otherwise idle. If the kubelet did not answer, it is unknown whether time was
   allocated: a user without an allocation may claim this time too, and the rest is unknown.
4. Time of the physical GPU without ticks is `no_data`.

Amounts are scaled by largest remainder. Equal remainders are ordered by device and tenant, so that
the order of rows does not matter. Most hours are plain: only allocatees used the device, and each
pays for allocated time. Plain hours are billed by sums over rows, so a month takes only seconds.
The other hours (`is_complex`) are subtracted from the sums and billed by all rules.

Example: five rows of a GPU's hour, in minutes. Pod b pays by used time, the others by allocated
time. Pod c has no allocation.

| category | allocatee | user | allocated | unresponsive | used |
|----------|-----------|------|-----------|--------------|------|
| idle     | a         |      | 30        | 0            | 0    |
| idle     | b         |      | 20        | 5            | 0    |
| idle     |           |      | 10        | 0            | 0    |
| pod      |           | b    | 0         | 0            | 6    |
| pod      |           | c    | 0         | 0            | 4    |

| billed to    | minutes | reason                                       |
|--------------|---------|----------------------------------------------|
| a            | 30      | allocated                                    |
| b            | 6       | used                                         |
| unused       | 9       | b's 15 minutes with answers, minus 6 used    |
| unresponsive | 5       | b's minutes without answers                  |
| c            | 4       | used, out of 10 unallocated                  |
| idle         | 6       | the rest of those 10                         |

If c had used 16 minutes, it would be billed 10, and the other 6 would be use of a's and b's time:
3.6 minutes of a's 30 and 2.4 of b's 20.
"""

from typing import Final, NamedTuple

import msgspec

from gpuledger.ledger.entries import GPU_UNITS
from gpuledger_reports.reading.times import HOUR_US

UNITS: Final = GPU_UNITS
HOUR_UNITS: Final = HOUR_US * 1000 * UNITS
_LONGEST_NS: Final = 1000 * HOUR_US * 1000
"""Maximum time of a party on a device in an hour. Even an hour in which a clock was set has less;
time above the maximum must be an error in the data, and is ignored."""

FACTOR: Final = (
    f"CASE WHEN gpu_slices > 0 AND {UNITS} % gpu_slices = 0"
    f" THEN coalesce(slices, 0) * ({UNITS} // gpu_slices)"
    f" WHEN gpu_slices IS NULL AND parent_uuid IS NULL THEN {UNITS} ELSE 0 END"
)
"""SQL of the number of units in a nanosecond of a device; 0 for an instance whose slices are
unknown."""

COLUMNS: Final = """
    cluster, node, gpu_uuid, model, parent_uuid, mig_profile,
    compute_slices AS slices, gpu_compute_slices AS gpu_slices,
    category = 'idle' AS is_allocated,
    CASE category WHEN 'idle' THEN
            CASE WHEN allocated_pod_state = 'unknown' THEN 'unknown'
                WHEN allocated_pod_state IS NOT NULL THEN 'pod'
                WHEN allocated_job_id IS NOT NULL THEN 'job' ELSE 'nobody' END
        WHEN 'pod' THEN 'pod' WHEN 'job' THEN 'job' WHEN 'host' THEN 'host'
        ELSE 'unattributed' END AS kind,
    CASE WHEN category = 'idle' THEN allocated_pod_uid ELSE pod_uid END AS uid,
    CASE WHEN category = 'idle' THEN allocated_namespace ELSE namespace END AS namespace,
    CASE WHEN category = 'idle' THEN allocated_pod ELSE pod END AS pod,
    CASE WHEN category = 'idle' THEN allocated_job_id WHEN category = 'job' THEN job_id END AS job,
    CASE WHEN category = 'idle' THEN allocated_pod_state ELSE pod_state END = 'known' AS
    is_named_by_row, allocated_ns, unresponsive_ns, busy_ns, measured_busy_ns, energy_millijoules,
    memory_byte_ns, kafka_partition, first_offset, last_offset
"""
"""The columns of a usage table that bills use. Allocatee and user share one set of columns."""


def rows_sql(relation: str, *, period: str, slices: str) -> str:
    """Return the SQL that adds the hour to each row of a table.

    `period` is the table's time column, `minute` or `hour`. `slices` is `compute` or `memory`: the
    kind of slices that determines an instance's part of its GPU. The column `compute_slices` then
    contains slices of this kind.
    """
    # Whole hours since the epoch are UTC hours, and cheaper than date_trunc in a time zone.
    hour = f"epoch_us({period})" + ("" if period == "hour" else f" // {HOUR_US} * {HOUR_US}")
    counted = (
        f"{slices}_slices AS compute_slices",
        f"gpu_{slices}_slices AS gpu_compute_slices",
    )
    as_slices = f"{slices}_slices AS slices, gpu_{slices}_slices AS gpu_slices"
    # Files of older versions lack the column.
    rows = f"({relation} UNION ALL BY NAME SELECT NULL::BIGINT AS scaled_allocated_ns WHERE false)"
    return f"SELECT * REPLACE ({', '.join(counted)}), {as_slices}, {hour} AS hour_us FROM {rows}"  # noqa: S608  # quoted files


UNRESPONSIVE_FLAG: Final = 1
FREE_FLAG: Final = 2
USED_FLAG: Final = 4
SCALED_FLAG: Final = 8
ROWS: Final = f"""
CREATE OR REPLACE TEMP VIEW usage_rows AS SELECT hour_us, {COLUMNS},
    CASE WHEN unresponsive_ns > 0 THEN {UNRESPONSIVE_FLAG} ELSE 0 END
    | CASE WHEN scaled_allocated_ns > 0 THEN {SCALED_FLAG} ELSE 0 END | CASE
        WHEN category <> 'idle' THEN CASE WHEN busy_ns > 0 THEN {USED_FLAG} ELSE 0 END
        WHEN coalesce(allocated_pod_state, 'unknown') = 'unknown' AND allocated_job_id IS NULL
            AND allocated_ns > 0 THEN {FREE_FLAG} ELSE 0 END AS flags,
    CASE WHEN category = 'idle' THEN 1 END AS idle_row
FROM usage_raw
"""  # noqa: S608  # our own names
"""SQL that makes `usage_rows`: the day's rows, with the columns that bills use."""


# The party of a row: a pod by UID if there is one, otherwise by its name in that hour.
PARTY_NAMES: Final = (
    "CASE WHEN uid IS NULL THEN namespace END AS named_namespace,"
    " CASE WHEN uid IS NULL THEN pod END AS named_pod"
)
PARTY: Final = f"kind, uid, {PARTY_NAMES}, job"
_SAME_PARTY: Final = " AND ".join(
    f"each.{column} IS NOT DISTINCT FROM parties.{column}"
    for column in (
        "cluster",
        "node",
        "kind",
        "uid",
        "named_namespace",
        "named_pod",
        "job",
        "named_us",
        "since_us",
    )
)
NAMED_US: Final = "CASE WHEN uid IS NULL AND pod IS NOT NULL THEN hour_us END"


class Detail(NamedTuple):
    """How finely rows are grouped, which depends on the bill; fewer groups are faster."""

    since: str
    """SQL of the time since which a row's facts have been the same."""
    gpu: str = "NULL::VARCHAR"
    """SQL of the GPU's UUID, if GPUs are distinguished."""
    physical_gpu: str = "NULL::VARCHAR"
    """SQL of the physical GPU's UUID, if GPUs are distinguished."""
    by_names: bool = False
    """Whether pods named by their rows are grouped by name; otherwise pods are grouped by UID."""
    names_pods: bool = True
    """Whether pods and jobs of a namespace are distinguished by name."""
    by_hour: bool = False
    """Whether `since` is the hour for some rows."""

    @property
    def node(self) -> str:
        """SQL of the node by which a row is grouped: one node for all nodes with the same facts.

        Rows of pods for which the row's names do not suffice are grouped by their own node.
        """
        unnamed = "kind = 'pod' AND NOT coalesce(is_named_by_row, false)"
        return f"CASE WHEN {unnamed} THEN node ELSE class_node END"

    @property
    def party(self) -> str:
        """SQL of the party: kind, UID, namespace, pod, job, and whether the names suffice."""
        if not self.by_names:
            return (
                f"{PARTY}, false AS is_named_by_row, max(namespace) AS namespace, max(pod) AS pod"
            )
        named = "coalesce(is_named_by_row, false)"
        unnamed = f"NOT {named}"
        jobs = "job" if self.names_pods else "NULL::VARCHAR"
        pods = "true" if self.names_pods else unnamed
        return f"""kind, CASE WHEN {unnamed} THEN uid END AS uid,
    CASE WHEN {named} OR uid IS NULL THEN namespace END AS named_namespace,
    CASE WHEN {pods} AND ({named} OR uid IS NULL) THEN pod END AS named_pod,
    {jobs} AS job, {named} AS is_named_by_row,
    max(CASE WHEN {unnamed} THEN namespace END) AS namespace,
    max(CASE WHEN {unnamed} THEN pod END) AS pod"""

    @property
    def since_us(self) -> str:
        """SQL of the time since which a row's names and facts have been the same."""
        named = (
            f"CASE WHEN is_named_by_row THEN NULL ELSE {NAMED_US} END"
            if self.by_names
            else NAMED_US
        )
        return f"coalesce({named}, {self.since})"

    def device(self, *, node: str, since_us: str) -> str:
        """Return the SQL of the columns of `DeviceRow`, with the given SQL for node and time."""
        return (
            f"cluster, {node} AS node, model, mig_profile, slices, gpu_slices,"
            f" {self.gpu} AS gpu, {since_us} AS since_us"
        )


class DeviceRow(msgspec.Struct, frozen=True, gc=False):
    """A class of similar devices, and the time since which the facts about it are the same."""

    cluster: str
    node: str
    model: str | None
    mig_profile: str | None
    slices: int | None
    gpu_slices: int | None
    gpu: str | None
    since_us: int


DEVICES: Final = f"""
CREATE OR REPLACE TEMP TABLE devices AS
WITH seen AS (
    SELECT cluster, node, gpu_uuid, parent_uuid, model, mig_profile, slices, gpu_slices
    FROM usage_rows GROUP BY ALL
), physical_gpus AS (
    SELECT cluster, node, coalesce(parent_uuid, gpu_uuid) AS physical_gpu,
        row_number() OVER (ORDER BY cluster, node, coalesce(parent_uuid, gpu_uuid))::INTEGER
            AS gpu_id,
        max(model) AS model, count(*) > 1 AS is_partitioned
    FROM seen GROUP BY cluster, node, physical_gpu
), stayed AS (
    SELECT cluster, node, physical_gpu,
        coalesce(max(model) FILTER (begin_us < $end_us AND end_us > $begin_us), max(model))
            AS model,
        count(DISTINCT model) FILTER (begin_us < $end_us AND end_us > $begin_us) > 1 AS changes,
        bool_or(begin_us <= $begin_us AND end_us >= $end_us) AS is_present_all_day
    FROM stays GROUP BY cluster, node, physical_gpu
)
SELECT row_number() OVER (
        ORDER BY seen.cluster, seen.node, gpu_uuid, mig_profile, slices, gpu_slices, seen.model
    )::INTEGER AS device,
    seen.*, class_node, {FACTOR} AS factor, gpu_id,
    coalesce(stayed.model, physical_gpus.model) AS gpu_model,
    coalesce(changes, false) AS changes_model,
    is_partitioned, coalesce(is_present_all_day, false) AS is_present_all_day
FROM (SELECT *, coalesce(parent_uuid, gpu_uuid) AS physical_gpu FROM seen) AS seen
JOIN node_classes USING (cluster, node)
JOIN physical_gpus USING (cluster, node, physical_gpu)
LEFT JOIN stayed USING (cluster, node, physical_gpu)
"""  # noqa: S608  # our own names
"""SQL that makes `devices`: the day's GPUs and instances. A GPU that is repartitioned or changes
its model becomes another device."""

OTHER_MODELS: Final = (
    "SELECT count(*) FROM devices WHERE changes_model OR model IS DISTINCT FROM gpu_model"
)
"""SQL of the number of devices whose rows have another model than the inventory."""
GPU_MODELS: Final = f"""
CREATE OR REPLACE TEMP TABLE gpu_models AS
WITH named AS (
    SELECT DISTINCT cluster, node, physical_gpu, gpu_model FROM devices
    WHERE changes_model OR model IS DISTINCT FROM gpu_model
), staying AS (
    SELECT cluster, node, physical_gpu, hours.hour_us, arg_min(model, begin_us) AS model
    FROM (SELECT DISTINCT hour_us FROM usage_raw) AS hours JOIN stays
        ON begin_us < hours.hour_us + {HOUR_US} AND end_us > hours.hour_us
    SEMI JOIN named USING (cluster, node, physical_gpu)
    GROUP BY ALL
)
SELECT cluster, node, physical_gpu, hours.hour_us, coalesce(staying.model, gpu_model) AS model
FROM named CROSS JOIN (SELECT DISTINCT hour_us FROM usage_raw) AS hours
LEFT JOIN staying USING (cluster, node, physical_gpu, hour_us)
"""  # noqa: S608  # our own names
"""SQL that makes `gpu_models`: the hourly model of each physical GPU whose rows have another model
than the inventory. Rows, GPUs and prices must have the same model. It is the inventory's model in
that hour, or the model of the day's rows if the inventory has none."""


def with_models_sql(rows: str) -> str:
    """Return the SQL of rows, with models replaced by the models in `gpu_models`."""
    return f"""
SELECT each.* REPLACE (
    CASE WHEN named.physical_gpu IS NULL THEN each.model ELSE named.model END AS model)
FROM ({rows}) AS each LEFT JOIN gpu_models AS named ON named.cluster = each.cluster
    AND named.node = each.node AND named.hour_us = each.hour_us
    AND named.physical_gpu = coalesce(each.parent_uuid, each.gpu_uuid)
"""  # noqa: S608  # quoted files


IS_ELSEWHERE: Final = """
SELECT count(*) > 0 FROM devices AS here JOIN stays USING (physical_gpu)
WHERE (stays.cluster, stays.node) <> (here.cluster, here.node)
    AND begin_us < $end_us AND end_us > $begin_us
"""
"""SQL of whether the inventory of another node lists a GPU of the day's rows."""
ELSEWHERE: Final = f"""
CREATE OR REPLACE TEMP TABLE elsewhere AS
SELECT here.cluster, here.node, physical_gpu, hour_us
FROM (
    SELECT DISTINCT cluster, node, coalesce(parent_uuid, gpu_uuid) AS physical_gpu, hour_us,
        greatest(hour_us, $begin_us) AS first_us, least(hour_us + {HOUR_US}, $end_us) AS last_us
    FROM usage_raw
) AS here JOIN stays USING (physical_gpu)
WHERE (stays.cluster, stays.node) <> (here.cluster, here.node)
    AND begin_us < last_us AND end_us > first_us
GROUP BY here.cluster, here.node, physical_gpu, hour_us, first_us, last_us
HAVING sum(least(end_us, last_us) - greatest(begin_us, first_us)) >= last_us - first_us
"""  # noqa: S608  # our own names
"""SQL that makes `elsewhere`: the hours in which a GPU has rows of one node, but was in other nodes
for the whole hour. Stays of a GPU in several nodes do not overlap, so their times are summed. If a
GPU was in other nodes for only a part of the hour, `hours_sql` limits its time instead."""
GPUS_ELSEWHERE: Final = (
    "SELECT cluster, node, physical_gpu, greatest(hour_us, $begin_us) FROM elsewhere"
)
"""SQL of the GPUs of one node that were in other nodes for a whole hour."""


def without_elsewhere_sql(rows: str) -> str:
    """Return the SQL of rows without those of the hours in `elsewhere`."""
    return f"""
SELECT each.* FROM ({rows}) AS each ANTI JOIN elsewhere ON elsewhere.cluster = each.cluster
    AND elsewhere.node = each.node AND elsewhere.hour_us = each.hour_us
    AND elsewhere.physical_gpu = coalesce(each.parent_uuid, each.gpu_uuid)
"""  # noqa: S608  # quoted files


BY_UUID: Final = "each.gpu_uuid = devices.gpu_uuid"
"""SQL condition that joins a row with its device if each UUID belongs to only one device."""
_OTHER_COLUMNS: Final = (
    "cluster",
    "node",
    "parent_uuid",
    "model",
    "mig_profile",
    "slices",
    "gpu_slices",
)
BY_ALL: Final = BY_UUID + "".join(
    f" AND each.{column} IS NOT DISTINCT FROM devices.{column}" for column in _OTHER_COLUMNS
)


def hours_sql(*, same_device: str) -> str:
    """Return the SQL that makes `device_hours`, with a row for each device and hour.

    Each row contains two times of the device's physical GPU, in units: the time that ticks cover,
    and the time for which the GPU was present. It also contains whether the inventory lists the GPU
    in that hour, and whether the hour is complex, which means that it must be billed by all rules.
    """
    return f"""
CREATE OR REPLACE TEMP TABLE device_hours AS
WITH summed AS (
    -- All flags in one number, because each aggregate takes time.
    SELECT device, hour_us, coalesce(sum(allocated_ns), 0) AS allocated_ns, bit_or(flags) AS flags,
        count(idle_row) AS idle_rows
    FROM usage_rows AS each JOIN devices ON {same_device}
    GROUP BY device, hour_us
), partitioned AS (
    SELECT gpu_id, hour_us, sum(allocated_ns * factor) AS allocated
    FROM summed JOIN devices USING (device) WHERE is_partitioned GROUP BY ALL
), partly AS (
    -- The time in each hour of physical GPUs that came or went during the day: in the inventory of
    -- their node, and in that of other nodes.
    SELECT gpu_id, hour_us, coalesce(sum(listed) FILTER (is_here), 0) AS listed,
        coalesce(sum(listed) FILTER (NOT is_here), 0) AS elsewhere
    FROM (
        SELECT gpu_id, hour_us, here.cluster = stays.cluster AND here.node = stays.node AS is_here,
            greatest(0, least(end_us, hour_us + {HOUR_US}, $end_us)
                - greatest(begin_us, hour_us, $begin_us))::HUGEINT * {1000 * UNITS} AS listed
        FROM (SELECT DISTINCT cluster, node, physical_gpu, gpu_id FROM devices
            WHERE NOT is_present_all_day) AS here
        JOIN stays USING (physical_gpu) CROSS JOIN (SELECT DISTINCT hour_us FROM summed)
    )
    GROUP BY ALL
), placed AS (
    SELECT summed.*, gpu_id, physical_gpu, is_partitioned,
        coalesce(partitioned.allocated, allocated_ns * factor) AS covered,
        is_present_all_day OR coalesce(partly.listed, 0) > 0 AS is_listed,
        CASE WHEN partly.listed > 0 THEN partly.listed
            ELSE (least(hour_us + {HOUR_US}, $end_us) - greatest(hour_us, $begin_us))::HUGEINT
                * {1000 * UNITS} - coalesce(elsewhere, 0) END AS present
    FROM summed JOIN devices USING (device)
    LEFT JOIN partitioned USING (gpu_id, hour_us) LEFT JOIN partly USING (gpu_id, hour_us)
), reported AS (
    -- Ticks of GPUs that their node's inventory does not list. If several nodes report a GPU, the
    -- nodes after the first one get only the rest of the hour.
    SELECT gpu_id, hour_us, least(free, before + covered) - least(free, before) AS present
    FROM (
        SELECT gpu_id, hour_us, covered, present AS free, coalesce(sum(covered) OVER (
                PARTITION BY physical_gpu, hour_us ORDER BY gpu_id
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ), 0) AS before
        FROM (SELECT DISTINCT gpu_id, physical_gpu, hour_us, covered, present FROM placed
            WHERE NOT is_listed)
    )
), limited AS (
    SELECT placed.* REPLACE (coalesce(reported.present, placed.present) AS present)
    FROM placed LEFT JOIN reported USING (gpu_id, hour_us)
)
SELECT device, hour_us, gpu_id, is_partitioned, is_listed, covered, present,
    -- If a whole GPU answers, only its allocated time needs scaling down; that hour is plain.
    flags & {FREE_FLAG | USED_FLAG} = {FREE_FLAG | USED_FLAG}
        OR (covered > present AND (flags & {UNRESPONSIVE_FLAG} <> 0 OR is_partitioned))
        OR covered > {_LONGEST_NS * UNITS} AS is_complex,
    idle_rows > 1 AS is_shared, flags & {SCALED_FLAG} <> 0 AS is_scaled
FROM limited
"""  # noqa: S608  # our own names


# A pod by UID or name, or a job; all parts are null if neither is known.
_WHO: Final = (
    "coalesce(pod_uid, allocated_pod_uid), CASE WHEN coalesce(pod_uid, allocated_pod_uid) IS NULL"
    " THEN coalesce(namespace || '/' || pod, allocated_namespace || '/' || allocated_pod) END,"
    " coalesce(job_id, allocated_job_id)"
)
_HAS_ALLOCATION: Final = 1
_HAS_USE: Final = 2


def _users_sql(same_device: str) -> tuple[str, str]:
    """Return the SQL of a row's hash by device, hour and party, and of users without allocation.

    The second one returns the hashes of users that no allocation row names. Users that are named in
    another way than in their allocation are among them.
    """
    device = ("gpu_uuid", *(_OTHER_COLUMNS if same_device == BY_ALL else ()))
    # Grouping by a hash takes half the time of grouping by the columns.
    hashed = f"hash({', '.join(device)}, hour_us, {_WHO})"
    users = f"""
SELECT {hashed} AS user_hash, bit_or(CASE
        WHEN category = 'idle' THEN CASE WHEN allocated_ns > 0 THEN {_HAS_ALLOCATION} ELSE 0 END
        WHEN category IN ('pod', 'job') AND busy_ns > 0
            AND coalesce(pod_uid, pod, job_id) IS NOT NULL THEN {_HAS_USE} ELSE 0 END) AS flags
FROM usage_raw GROUP BY user_hash HAVING flags = {_HAS_USE}
"""  # noqa: S608  # our own names
    return hashed, users


def has_other_users_sql(*, same_device: str) -> str:
    """Return the SQL of whether a device may have been used without an allocation in an hour."""
    return f"SELECT count(*) > 0 FROM ({_users_sql(same_device)[1]})"  # noqa: S608  # our own names


def mark_other_users_sql(*, same_device: str) -> str:
    """Return the SQL that marks hours with use without an allocation as complex."""
    hashed, users = _users_sql(same_device)
    return f"""
UPDATE device_hours SET is_complex = true
FROM (
    SELECT DISTINCT device, hour_us
    FROM (
        SELECT * FROM usage_raw WHERE {hashed} IN (SELECT user_hash FROM ({users}))
    ) AS each JOIN devices ON {same_device}
) AS marked
WHERE device_hours.device = marked.device AND device_hours.hour_us = marked.hour_us
"""  # noqa: S608  # our own names


# Only allocation rows matter, because users without an allocation always pay by used time.
def mark_special_sql(detail: Detail, *, same_device: str) -> str:
    """Return the SQL that marks an hour as complex unless all allocatees pay by allocated time."""
    return f"""
UPDATE device_hours SET is_complex = true
FROM (
    SELECT DISTINCT device, hour_us
    FROM (
        SELECT *, {NAMED_US} AS named_us, {PARTY_NAMES}, {detail.since} AS since_us
        FROM usage_rows WHERE is_allocated
    ) AS each
    JOIN devices ON {same_device} JOIN parties ON {_SAME_PARTY}
    WHERE basis <> 'allocated'
) AS special
WHERE device_hours.device = special.device AND device_hours.hour_us = special.hour_us
"""  # noqa: S608  # our own names


class CoveredRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `covered_sql`: times of a class of physical GPUs, in units."""

    cluster: str
    node: str
    model: str | None
    since_us: int
    gpu: str | None
    listed: int
    covered: int
    excess: int


# All devices of a partitioned physical GPU have the values of the whole GPU, so one row is enough.
def covered_sql(detail: Detail) -> str:
    """Return the SQL of the physical GPUs' time with ticks, as `CoveredRow`.

    `covered` contains at most the time for which the GPUs were present; `excess` is the rest of the
    time with ticks. `listed` is the part of `covered` in hours in which the inventory lists the
    GPU.
    """
    return f"""
SELECT cluster, class_node AS node, model, {detail.since} AS since_us, {detail.physical_gpu} AS gpu,
    coalesce(sum(least(covered, present)) FILTER (is_listed), 0) AS listed,
    sum(least(covered, present)) AS covered, sum(greatest(0, covered - present)) AS excess
FROM (
    SELECT gpu_id, hour_us, any_value(covered) AS covered, any_value(present) AS present,
        any_value(is_listed) AS is_listed, min(device) AS device
    FROM device_hours WHERE is_partitioned GROUP BY gpu_id, hour_us
    UNION ALL SELECT gpu_id, hour_us, covered, present, is_listed, device
    FROM device_hours WHERE NOT is_partitioned
) AS hours JOIN devices USING (device)
GROUP BY ALL
"""  # noqa: S608  # our own names


UNLISTED: Final = "NOT is_listed AND covered > 0"
"""Condition on `device_hours`: the GPU has ticks, but is not in the inventory."""
SCALED: Final = "is_scaled"
"""Condition on `device_hours`: more than the device was allocated."""


def gpus_sql(condition: str, detail: Detail) -> str:
    """Return the SQL of the physical GPUs with hours that fulfil a condition."""
    return f"""
SELECT DISTINCT cluster, node, physical_gpu, {detail.since} AS since_us
FROM device_hours JOIN devices USING (device) WHERE {condition}
"""  # noqa: S608  # our own names


WANTED: Final = (
    "cluster", "node", "model", "mig_profile", "slices", "gpu_slices", "gpu", "since_us",
    "kind", "uid", "named_namespace", "named_pod", "job", "is_allocated",
)  # fmt: skip
"""The columns of the table `wanted`. Their values identify the rows that make up a sum."""


def rows_in_sql(*, since: str, gpu: str) -> str:
    """Return the SQL of the rows whose device class, time and party are in the table `wanted`."""
    same = " AND ".join(f"each.{key} IS NOT DISTINCT FROM wanted.{key}" for key in WANTED)
    return f"""
SELECT hour_us, each.node, gpu_uuid, pod, coalesce(allocated_ns, 0), coalesce(unresponsive_ns, 0),
    coalesce(busy_ns, 0), each.is_allocated, kafka_partition, first_offset, last_offset,
    each.kind = 'nobody', factor
FROM (
    SELECT *, {FACTOR} AS factor, {gpu} AS gpu, coalesce({NAMED_US}, {since}) AS since_us,
        {PARTY_NAMES}
    FROM usage_rows
) AS each JOIN wanted ON {same}
ORDER BY ALL
"""  # noqa: S608  # our own names


def rows_of_hours(condition: str, *, same_device: str, of: str = "usage_rows") -> str:
    """Return the SQL of the rows in all device-hours that fulfil a condition.

    Each row also has its device, its allocated units, and its physical GPU's `covered` and
    `present` units in the hour.
    """
    return f"""(
    SELECT each.*, device, covered, present, coalesce(allocated_ns, 0) * factor AS allocated
    FROM {of} AS each JOIN devices ON {same_device} JOIN device_hours USING (device, hour_us)
    WHERE {condition}
)"""  # noqa: S608  # our own names


def _bounded(sum_ns: str) -> str:
    return f"least(coalesce({sum_ns}, 0), {_LONGEST_NS})"


# Products stay below 2^127: a GPU's hour is 10^17 units, and the limit of a party's time is 1000
# hours, so a product is at most 10^37.
def scaled(amount: str, to: str, total: str, partition: str, order: str) -> str:
    """Return the SQL of an amount, scaled so that the amounts of a partition sum to `to`.

    Amounts are scaled by largest remainder, and only if `total` exceeds `to`. The columns `order`
    decide between equal remainders.
    """
    return f"""CASE WHEN {total} > {to} THEN {amount} * {to} // {total}
        + CASE WHEN row_number() OVER (
                PARTITION BY {partition} ORDER BY {amount} * {to} % nullif({total}, 0) DESC, {order}
            ) <= {to} - sum({amount} * {to} // nullif({total}, 0)) OVER (PARTITION BY {partition})
            THEN 1 ELSE 0 END
        ELSE {amount} END"""


def complex_sql(detail: Detail, *, same_device: str) -> str:
    """Return the SQL that makes `complex_charges`: complex hours, billed by this module's rules."""
    hour, device_hour = "gpu_id, hour_us", "device, hour_us"
    return f"""
CREATE OR REPLACE TEMP TABLE complex_charges AS
WITH parted AS (
    -- Party 0 is nobody, party -1 is unknown.
    SELECT device, gpu_id, hour_us, covered, present,
        CASE WHEN each.kind = 'unknown' THEN -1 ELSE coalesce(party, 0) END AS party,
        any_value(coalesce(basis, 'allocated')) AS basis, any_value(coalesce(weight, 0)) AS weight,
        any_value(coalesce(weight_of, 1)) AS weight_of,
        bool_or(each.kind = 'job' OR each.kind = 'pod' AND coalesce(each.uid, pod) IS NOT NULL)
            AS is_tenant,
        {_bounded("sum(allocated_ns)")} * any_value(factor) AS allocated,
        {_bounded("sum(unresponsive_ns)")} * any_value(factor) AS unresponsive,
        greatest(0, {_bounded("sum(busy_ns) FILTER (NOT is_allocated)")}) * any_value(factor)
            AS used
    FROM (
        SELECT *, {NAMED_US} AS named_us, {PARTY_NAMES}, {detail.since} AS since_us
        FROM usage_rows
    ) AS each
    JOIN devices ON {same_device} JOIN device_hours USING (device, hour_us, gpu_id)
    LEFT JOIN parties ON {_SAME_PARTY}
    WHERE is_complex GROUP BY ALL
), bounded AS (
    SELECT * REPLACE (sum(allocated) OVER (PARTITION BY {hour}) AS covered) FROM parted
), fitted AS (
    SELECT * REPLACE (
        {scaled("allocated", "present", "covered", hour, "device, party")} AS allocated,
        CASE WHEN covered > present THEN unresponsive * present // covered ELSE unresponsive END
            AS unresponsive,
        CASE WHEN covered > present THEN used * present // covered ELSE used END AS used
    ) FROM bounded
), usable AS (
    SELECT *, least(unresponsive, allocated) AS unresponsive_part,
        allocated - least(unresponsive, allocated) AS answering
    FROM fitted
), requested AS (
    SELECT *,
        CASE WHEN party <= 0 OR answering = 0 THEN 0 ELSE CASE basis
            WHEN 'allocated' THEN answering WHEN 'used' THEN used
            WHEN 'greater' THEN greatest(answering, used)
            ELSE (weight * answering + (weight_of - weight) * used) // weight_of END END AS claim,
        CASE WHEN party > 0 AND answering = 0 THEN used ELSE 0 END AS request,
        coalesce(sum(answering) FILTER (party <= 0) OVER (PARTITION BY {device_hour}), 0) AS free,
        sum(answering) OVER (PARTITION BY {device_hour}) AS all_answering,
        CASE WHEN party > 0 THEN allocated ELSE 0 END AS own
    FROM usable
), totals AS (
    SELECT *, sum(request) OVER (PARTITION BY {device_hour}) AS all_requests FROM requested
), granted AS (
    SELECT *, {scaled("request", "free", "all_requests", device_hour, "party")} AS grant_
    FROM totals
), claimed AS (
    SELECT *, claim + grant_ AS due,
        sum(claim + grant_) OVER (PARTITION BY {device_hour}) AS all_due
    FROM granted
)
SELECT device, hour_us, party, unresponsive_part, answering, all_answering - free AS all_allocated,
    {scaled("due", "all_answering", "all_due", device_hour, "party")} AS billed,
    answering > 0 AND party > 0 AS has_allocation, own,
    CASE WHEN is_tenant AND own = 0 THEN request - grant_ ELSE 0 END AS by_others,
    basis = 'allocated' AS pays_allocated
FROM claimed
"""  # noqa: S608  # our own names


class ComplexPartyRow(DeviceRow, frozen=True, gc=False):
    """A row of `complex_parties_sql`: the units of a class of devices that a party pays for."""

    party: int
    units: int


def complex_parties_sql(detail: Detail) -> str:
    """Return the SQL of the units billed to parties in complex hours, by device class and time."""
    return f"""
SELECT {detail.device(node="class_node", since_us=detail.since)}, party, sum(billed) AS units
FROM complex_charges JOIN devices USING (device) WHERE party > 0 AND billed <> 0
GROUP BY ALL
"""  # noqa: S608  # our own names


class ComplexIdleRow(DeviceRow, frozen=True, gc=False):
    """A row of `complex_idle_sql`: the units of a class of devices that no party pays for."""

    unresponsive: int
    unused: int
    unknown: int
    idle: int


# Time that no party pays for is first unused, up to the allocated time that was not billed. Then it
# is unknown, up to the time whose allocation is unknown. The rest is idle.
def complex_idle_sql(detail: Detail) -> str:
    """Return the SQL of the units of complex hours that no party pays for, as `ComplexIdleRow`."""
    return f"""
WITH by_hour AS (
    SELECT device, hour_us, sum(unresponsive_part) AS unresponsive,
        sum(answering) - sum(billed) AS left_over,
        greatest(0, any_value(all_allocated)
            - sum(CASE WHEN has_allocation THEN billed ELSE 0 END)) AS allocated,
        coalesce(sum(answering) FILTER (party = -1), 0) AS unknown
    FROM complex_charges GROUP BY device, hour_us
), parted AS (
    SELECT * REPLACE (least(unknown, left_over - least(left_over, allocated)) AS unknown),
        least(left_over, allocated) AS unused
    FROM by_hour
)
SELECT {detail.device(node="class_node", since_us=detail.since)},
    sum(unresponsive) AS unresponsive, sum(unused) AS unused, sum(unknown) AS unknown,
    sum(left_over - unused - unknown) AS idle
FROM parted JOIN devices USING (device)
GROUP BY ALL
"""  # noqa: S608  # our own names


class UsedByOthersRow(DeviceRow, frozen=True, gc=False):
    """A row of `used_by_others_sql`: the units of an allocatee's time that a user used."""

    user_party: int
    allocatee_party: int
    units: int
    billed: int
    """The part that is billed to an allocatee that pays by allocated time."""


def used_by_others_sql(detail: Detail) -> str:
    """Return the SQL of use of allocated time by parties without an allocation, by both parties."""
    divided = scaled(
        "own", "by_others", "all_own", "device, hour_us, user_party", "allocatee_party"
    )
    billed = scaled("part", "billed", "all_parts", "device, hour_us, allocatee_party", "user_party")
    return f"""
WITH allocatees AS (
    SELECT device, hour_us, party AS allocatee_party, own,
        CASE WHEN pays_allocated THEN billed ELSE 0 END AS billed,
        sum(own) OVER (PARTITION BY device, hour_us) AS all_own
    FROM complex_charges WHERE own > 0
), pairs AS (
    SELECT device, hour_us, party AS user_party, allocatee_party, own, all_own, billed, by_others
    FROM (SELECT device, hour_us, party, by_others FROM complex_charges WHERE by_others > 0)
    JOIN allocatees USING (device, hour_us)
), parts AS (
    SELECT device, hour_us, user_party, allocatee_party, billed, {divided} AS part FROM pairs
), summed AS (
    SELECT *, sum(part) OVER (PARTITION BY device, hour_us, allocatee_party) AS all_parts
    FROM parts
), billed_parts AS (
    SELECT device, hour_us, user_party, allocatee_party, part, {billed} AS billed FROM summed
)
SELECT {detail.device(node="class_node", since_us=detail.since)}, user_party, allocatee_party,
    sum(part) AS units, sum(billed) AS billed
FROM billed_parts JOIN devices USING (device) GROUP BY ALL
"""  # noqa: S608  # our own names
