"""SQL that sums the rows of a day before other queries use them.

The rows are grouped by the files' own columns, because DuckDB compares their dictionary entries.
Expressions over text would be evaluated for each row. The party is therefore determined only for
about ten thousand sums instead of half a million rows.
"""

from typing import Final

import msgspec

from gpuledger_reports.reading.charging_sql import (
    COLUMNS,
    FACTOR,
    NAMED_US,
    PARTY,
    Detail,
    DeviceRow,
    rows_of_hours,
    scaled,
)
from gpuledger_reports.reading.parties import PartyKind
from gpuledger_reports.reading.pods_sql import ROWS_WITHOUT_POD_RECORD

PARTS_NOT_NAMED_BY_ROW: Final = "kind = 'pod' AND NOT coalesce(is_named_by_row, false)"
"""Condition on `usage_parts`: rows of pods for which the row's names do not suffice."""
PARTS_WITHOUT_NAMESPACE: Final = "kind = 'pod' AND uid IS NOT NULL AND namespace IS NULL"
"""Condition on `usage_parts`: rows of pods that have only a UID."""
_ALL_NAMES: Final = "pod_uid, allocated_pod_uid, pod, allocated_pod, job_id, allocated_job_id"


def parts_sql(detail: Detail) -> str:
    """Return the SQL that makes `usage_parts`: the rows of a day, summed.

    Columns that the bill does not need are null. With `detail.by_names`, rows are grouped without
    pod UIDs, even the rows whose names do not suffice. Delete these rows by
    `PARTS_NOT_NAMED_BY_ROW`, then add them again with `add_unnamed_sql`.
    """
    rows = _parts(detail, _name_columns(detail) if detail.by_names else _ALL_NAMES)
    return f"CREATE OR REPLACE TEMP TABLE usage_parts AS {rows}"


def add_unnamed_sql(detail: Detail) -> str:
    """Return the SQL that adds rows whose names do not suffice to `usage_parts`, by all columns."""
    return f"INSERT INTO usage_parts {_parts(detail, _ALL_NAMES, rows=ROWS_WITHOUT_POD_RECORD)}"


def _name_columns(detail: Detail) -> str:
    nothing = "NULL::VARCHAR AS {}".format
    uids = [nothing("pod_uid"), nothing("allocated_pod_uid")]
    if detail.names_pods:
        return ", ".join([*uids, "pod, allocated_pod, job_id, allocated_job_id"])
    # Keep only whether a job has the allocation, because this determines the kind.
    job = "CASE WHEN allocated_job_id IS NOT NULL THEN '' END AS allocated_job_id"
    return ", ".join([*uids, *map(nothing, ("pod", "allocated_pod", "job_id")), job])


_SUMMED: Final = (
    "allocated_ns",
    "unresponsive_ns",
    "busy_ns",
    "measured_busy_ns",
    "energy_millijoules",
    "memory_byte_ns",
)


def _parts(
    detail: Detail, names: str, *, of: str = "usage_raw", rows: str = "true", also: str = ""
) -> str:
    hour = "hour_us" if detail.by_hour else "NULL::BIGINT AS hour_us"
    if names != _name_columns(detail) and not detail.by_hour:
        # A name without a UID identifies a pod only within its hour.
        hour = (
            "CASE WHEN pod_uid IS NULL AND pod IS NOT NULL"
            " OR allocated_pod_uid IS NULL AND allocated_pod IS NOT NULL"
            " THEN hour_us END AS hour_us"
        )
    sums = ", ".join(
        f"NULL::HUGEINT AS {name}" if also else f"sum({name}) AS {name}" for name in _SUMMED
    )
    return f"""
SELECT hour_us, {COLUMNS}{also and f", {also}"}
FROM (
    SELECT {hour}, cluster, node, {detail.gpu} AS gpu_uuid, model,
        CASE WHEN parent_uuid IS NOT NULL THEN '' END AS parent_uuid, mig_profile,
        compute_slices, gpu_compute_slices, category, pod_state, namespace, allocated_pod_state,
        allocated_namespace, {names}, {sums}, {also and f"sum({also}) AS {also},"}
        NULL AS kafka_partition, NULL AS first_offset, NULL AS last_offset
    FROM {of} WHERE {rows} GROUP BY ALL
)
"""  # noqa: S608  # our own names


class DevicePartyRow(DeviceRow, frozen=True, gc=False):
    """Identifies a sum by its party and its class of similar devices; base of rows with sums."""

    kind: PartyKind
    uid: str | None
    named_namespace: str | None
    named_pod: str | None
    job: str | None
    is_named_by_row: bool
    namespace: str | None
    pod: str | None


class SumRow(DevicePartyRow, frozen=True, gc=False):
    """A row of `sums_sql`: time, energy and memory of one party on one class of similar devices.

    The party is the pod, job or other user that the usage rows name. If `is_allocated`, the sums
    are of rows of allocated time, otherwise of used time.
    """

    is_allocated: bool
    factor: int
    allocated_ns: int
    unresponsive_ns: int
    busy_ns: int
    measured_busy_ns: int
    energy_millijoules: int
    memory_byte_ns: int


def sums_sql(rows: str, detail: Detail) -> str:
    """Return the SQL that sums rows by device class, time and party, as `SumRow`."""
    return f"""
SELECT {detail.device(node=detail.node, since_us=detail.since_us)}, {detail.party}, is_allocated,
    ({FACTOR})::HUGEINT AS factor,
    {", ".join(f"coalesce(sum({name}), 0) AS {name}" for name in _SUMMED)}
FROM {rows} JOIN node_classes USING (cluster, node)
GROUP BY ALL
"""  # noqa: S608  # our own names


class PartyRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `parties_sql`: a party with its names."""

    cluster: str
    node: str
    kind: PartyKind
    uid: str | None
    named_namespace: str | None
    named_pod: str | None
    job: str | None
    named_us: int | None
    namespace: str | None
    pod: str | None
    since_us: int

    @property
    def key(self) -> tuple[object, ...]:
        """The values that identify the party's rows, without descriptive names."""
        return (
            self.cluster,
            self.node,
            self.kind,
            self.uid,
            self.named_namespace,
            self.named_pod,
            self.job,
            self.named_us,
            self.since_us,
        )


def parties_sql(rows: str, detail: Detail) -> str:
    """Return the SQL that selects the distinct parties of the rows, as `PartyRow`."""
    return f"""
SELECT cluster, node, {PARTY}, {NAMED_US} AS named_us, max(namespace) AS namespace,
    max(pod) AS pod, {detail.since} AS since_us
FROM {rows} WHERE kind NOT IN ('nobody', 'unknown')
GROUP BY ALL
"""  # noqa: S608  # our own names


# Equal remainders have the same order as in complex hours: time of unknown allocation first, then
# unallocated time, then by allocatee.
_IN_ORDER: Final = ", ".join(
    f"{column} NULLS FIRST"
    for column in (
        "allocated_pod_state IS DISTINCT FROM 'unknown'",
        "allocated_pod_uid",
        "allocated_namespace",
        "allocated_pod",
        "allocated_job_id",
    )
)


class ExcessRow(DevicePartyRow, frozen=True, gc=False):
    """A row of `excess_sql`: allocated units of one party on one class of similar devices.

    Only units beyond the time for which the physical GPUs were present are counted.
    """

    units: int


def excess_sql(detail: Detail, *, same_device: str) -> str:
    """Return the SQL of the allocated units of each party that exceed the presence of its GPUs.

    It reads only plain hours in which ticks cover more time than the GPU was present.
    """
    condition = "NOT is_complex AND covered > present AND category = 'idle'"
    alone, shared = (
        rows_of_hours(f"{condition} AND {which}", same_device=same_device, of="usage_raw")
        for which in ("NOT is_shared", "is_shared")
    )
    fitted = scaled("allocated", "present", "covered", "device, hour_us", _IN_ORDER)
    # Rows have a user or an allocatee, not both; unused columns would only slow down the sort.
    users = ("pod_uid", "pod_state", "namespace", "pod", "job_id")
    row = f"* REPLACE ({', '.join(f'NULL::VARCHAR AS {name}' for name in users)})"
    rows = f"""(
    SELECT {row}, covered - present AS excess FROM {alone}
    UNION ALL SELECT {row}, allocated - ({fitted}) AS excess FROM {shared}
)"""  # noqa: S608  # our own names
    parts = _parts(detail, _ALL_NAMES, of=rows, also="excess")
    return f"""
SELECT {detail.device(node=detail.node, since_us=detail.since_us)}, {detail.party},
    sum(excess) AS units
FROM ({parts}) JOIN node_classes USING (cluster, node)
GROUP BY ALL
"""  # noqa: S608  # our own names
