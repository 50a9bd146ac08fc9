"""The load of workloads on their devices, from the buckets of `usage_daily`.

A load covers the devices that a pod used at least once; minutes without a row of use count as 0 %.
Devices that a pod never used are only counted, because they would hide the load of the others. A
pod that used none of its devices has a load of 0 %.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Final

import duckdb

from gpuledger.store.distributions import (
    BUSY,
    DISTRIBUTIONS,
    DRAM,
    GIB,
    MEMORY,
    MEMORY_MAX,
    Distribution,
)
from gpuledger.store.views import with_nodes
from gpuledger_reports.capacity.allocations import (
    DIMENSIONS,
    HOLDER,
    IDENTITY_HASH,
    PRICED,
    Terms,
    create_changes,
    create_descriptions,
    create_identities,
    rows_of,
)
from gpuledger_reports.capacity.fitting import Device, Load, Percentiles
from gpuledger_reports.reading.times import DAY_US, Window

BY: Final = ("cluster", "namespace", "workload")
QUANTITIES: Final = {"utilization": BUSY, "memory": MEMORY, "bandwidth": DRAM}
"""In the order of the fields of `Load`."""
_PERCENTS: Final = (50, 95, 99, 100)
_MIG_MEMORY: Final = 0.95
"""The part of its memory slices that a MIG instance can use; some profiles can use more."""
_EXCLUSIVE: Final = 0.9
"""The minimum part of a device that counts as the whole device. In hours, partial minutes matter
more, so limits for hours are lower."""
_BUCKETS: Final = tuple(column for each in DISTRIBUTIONS for column in each.columns)
_WINDOW: Final = "day >= make_timestamptz($begin_us) AND day < make_timestamptz($end_us)"
_IS_KNOWN: Final = f"category = 'idle' AND {BUSY.columns[0]} IS NOT NULL"
_SLICE_DAYS: Final = 10
"""The days whose buckets are summed up at once, which bounds memory."""
_USAGE: Final = """(
    SELECT usage.*, list_concat(of_node.change_days, of_namespace.change_days) AS change_days
    FROM usage_daily_unnamed AS usage LEFT JOIN node_changes AS of_node USING (cluster, node)
    LEFT JOIN namespace_changes AS of_namespace ON of_namespace.cluster = usage.cluster
        AND of_namespace.namespace = coalesce(usage.namespace, usage.allocated_namespace)
)"""
"""SQL of the daily sums with the days on which the holder's node or namespace changes."""
_DEVICES: Final = f"""
CREATE OR REPLACE TEMP TABLE device_loads AS
SELECT hash(cluster, node, gpu_uuid) AS device, {HOLDER} AS holder, {{since}} AS since,
    max(CASE category WHEN 'idle' THEN {IDENTITY_HASH} END) AS identity,
    sum(allocated_gpu_hours) AS hours, min(day) AS first_time,
    min(day) FILTER ({_IS_KNOWN}) AS first_day, max(day) FILTER ({_IS_KNOWN}) AS last_day,
    bitstring_agg(epoch_us(day) // {DAY_US}, {{first}}, {{last}}) FILTER ({_IS_KNOWN}) AS days,
    sum({" + ".join(BUSY.columns)}) FILTER (category = 'idle') AS known_minutes,
    sum(allocated_ns - coalesce(unresponsive_ns, 0)) FILTER (category = 'idle') / 6e10
        / known_minutes AS share,
    sum(allocated_ns) FILTER (category = 'idle') / 6e10 AS allocated_minutes,
    sum(busy_ns) FILTER (category <> 'idle') > 0 AS is_used,
    max({MEMORY_MAX}) FILTER (category <> 'idle') AS memory_max
FROM {_USAGE} WHERE {_WINDOW} AND {HOLDER} IS NOT NULL
GROUP BY ALL HAVING sum(allocated_gpu_hours) > 0
"""  # noqa: S608  # our own names
"""SQL of each device by holder."""
_HOLDER_DEVICES: Final = f"""
CREATE OR REPLACE TEMP TABLE holder_devices AS
WITH days AS (
    SELECT {HOLDER} AS holder,
        count(DISTINCT (node, gpu_uuid)) FILTER (allocated_gpu_hours > 0) AS gpus,
        count(DISTINCT (node, gpu_uuid)) FILTER (category <> 'idle' AND busy_ns > 0) AS used_gpus
    FROM usage_daily_unnamed WHERE {_WINDOW} GROUP BY holder, day HAVING gpus > 0
), holders AS (
    SELECT holder, quantile_disc(gpus, 0.5) AS gpus,
        least(max(used_gpus), quantile_disc(gpus, 0.5)) AS used_gpus
    FROM days GROUP BY holder
), unknown AS (
    SELECT hash(cluster, node, gpu_uuid) AS device, day,
        sum({" + ".join(BUSY.columns[1:])}) AS minutes
    FROM usage_daily_unnamed WHERE {_WINDOW} AND category <> 'idle' AND {HOLDER} IS NULL
    GROUP BY ALL
), disturbed AS (
    SELECT holder, device, since, sum(unknown.minutes) AS unknown_minutes
    FROM device_loads JOIN unknown USING (device) WHERE day BETWEEN first_day AND last_day
    GROUP BY ALL
)
SELECT *, bool_or(coalesce(is_used, false)) OVER (PARTITION BY holder, device)
    OR used_gpus = 0 AS has_load
FROM device_loads JOIN holders USING (holder) LEFT JOIN disturbed USING (holder, device, since)
"""  # noqa: S608  # as above
"""SQL of each device by holder, with the number of devices that the holder has at once.

The number is the median over days; on a day when a job moves, both sets count."""
_BUCKET_SUMS: Final = f"""
SELECT identity, since, gpus, {", ".join(f"sum({name})::BIGINT AS {name}" for name in _BUCKETS)}
FROM (
    SELECT hash(cluster, node, gpu_uuid) AS device, {HOLDER} AS holder, {{since}} AS since,
        {", ".join(_BUCKETS)}
    FROM {_USAGE}
    WHERE {_WINDOW} AND category <> 'idle' AND {HOLDER} IS NOT NULL
) JOIN holder_devices USING (device, holder, since)
WHERE has_load GROUP BY identity, since, gpus
"""  # noqa: S608  # as above
"""SQL of the buckets of allocations in a few days."""
_LOADS: Final = f"""
CREATE OR REPLACE TEMP TABLE loads AS
WITH sums AS (
    SELECT identity, since, gpus, max(used_gpus) AS used_gpus, sum(hours) AS hours,
        min(first_time) AS first_time, bit_or(days) AS days, sum(known_minutes) AS known_minutes,
        sum(allocated_minutes) AS allocated_minutes, max(share) AS share,
        sum(known_minutes) FILTER (has_load) AS minutes, sum(unknown_minutes) AS unknown_minutes,
        max(memory_max) FILTER (NOT has_load) AS unused_memory,
        max(memory_max) FILTER (has_load) AS memory_max
    FROM holder_devices GROUP BY identity, since, gpus
), counts AS (
    SELECT identity, since, gpus,
        {", ".join(f"sum({name})::BIGINT AS sum_{name}" for name in _BUCKETS)}
    FROM bucket_sums GROUP BY identity, since, gpus
)
FROM sums LEFT JOIN counts USING (identity, since, gpus)
"""  # noqa: S608  # as above
"""SQL of the sums of allocations, by price and by the number of devices of the pod.

`known_minutes` count on all devices, `minutes` only on those that belong to the load."""
_WORKLOADS: Final = f"""
SELECT {{names}}, {", ".join(PRICED)},
    memory_slices, gpu_memory_slices, since, gpus, max(used_gpus) AS used_gpus,
    sum(hours) AS hours, bit_or(days) AS days, sum(known_minutes) AS known_minutes,
    sum(allocated_minutes) AS allocated_minutes, max(share) AS share,
    sum(minutes) AS minutes, sum(unknown_minutes) AS unknown_minutes,
    max(unused_memory) AS unused_memory, max(memory_max) AS memory_max,
    {", ".join(f"sum(sum_{name}) AS {name}" for name in _BUCKETS)}
FROM {{loads}} GROUP BY ALL
"""  # noqa: S608  # as above
"""SQL of the sums of workloads, by price and by the number of devices of their pods."""
_ONE_A_NODE: Final = """(
    SELECT DISTINCT cluster, node, model, mig_profile, compute_slices, gpu_compute_slices,
        make_timestamptz($begin_us) AS time FROM identities
    WHERE mig_profile IS NULL AND compute_slices IS NOT DISTINCT FROM gpu_compute_slices
)"""
_WHOLE_GPUS: Final = f"""
SELECT DISTINCT {", ".join(PRICED)} FROM {with_nodes(_ONE_A_NODE)}
WHERE model IS NOT NULL ORDER BY ALL
"""  # noqa: S608  # as above
_DAYS: Final = f"SELECT count(DISTINCT day) FROM usage_daily_unnamed WHERE {_WINDOW}"  # noqa: S608  # as above
_MEMORY: Final = """
SELECT model, min(memory_total_bytes) FROM inventory WHERE memory_total_bytes > 0 GROUP BY model
"""


@dataclass(kw_only=True)
class Workload:
    """The sums of a workload on one kind of device."""

    key: tuple[str | None, ...]
    device: Device
    parts: list[Mapping[str, Any]] = field(default_factory=list)
    """Its rows, by price and by the number of devices of its pods."""

    def _sum(self, name: str) -> float:
        return sum(part[name] or 0 for part in self.parts)

    def _maximum(self, name: str) -> float:
        return max(part[name] or 0 for part in self.parts)

    @property
    def hours(self) -> float:
        """Its allocated GPU-hours."""
        return self._sum("hours")

    @property
    def minutes(self) -> int:
        """The minutes with known use on the devices that belong to its load."""
        return int(self._sum("minutes"))

    @property
    def gpus(self) -> int:
        """The largest number of devices that a pod has at once on its median day."""
        return int(self._maximum("gpus"))

    @property
    def used_gpus(self) -> int:
        """The largest number of devices that a pod used on a day; at most those that it has."""
        return int(self._maximum("used_gpus"))

    @property
    def needed_gpus(self) -> int | None:
        """The number of devices that suffices for each pod, if each has more; otherwise `None`."""
        needed = max(1, self.used_gpus)
        return needed if all(part["gpus"] > needed for part in self.parts) else None

    @property
    def unused_gib(self) -> float:
        """The largest memory on a device that was never used."""
        return self._maximum("unused_memory") / GIB

    @property
    def history_days(self) -> int:
        """The number of days with known use."""
        return reduce(or_, (int(part["days"] or "0", 2) for part in self.parts)).bit_count()

    @property
    def known_ratio(self) -> float:
        """The part of the allocated time in which it is known whether the devices were used."""
        return self._sum("known_minutes") / self._sum("allocated_minutes")

    @property
    def is_shared(self) -> bool:
        """Whether its pods have only parts of devices."""
        return self._maximum("share") < _EXCLUSIVE

    @property
    def unknown_ratio(self) -> float:
        """The share of its minutes in which unknown processes used its devices."""
        return self._sum("unknown_minutes") / self.minutes if self.minutes else 0.0

    def load(self) -> Load | None:
        """Return its load; `None` if its use or memory is unknown."""
        counts = {
            name: [int(self._sum(column)) for column in each.columns]
            for name, each in QUANTITIES.items()
        }
        known = sum(counts["utilization"])
        for of_quantity in counts.values():
            if sum(of_quantity) or not known:
                # No process was on the device in the other minutes.
                of_quantity[0] += max(0, self.minutes - known)
        busy, memory, bandwidth = (
            self._percentiles(each, counts[name]) for name, each in QUANTITIES.items()
        )
        if busy is None or memory is None:
            return None
        maximum = self._maximum("memory_max") / GIB
        return Load(
            busy=busy,
            memory_gib=Percentiles(*(min(maximum, value) for value in memory)),
            bandwidth=bandwidth if known else None,
        )

    @staticmethod
    def _percentiles(each: Distribution, counts: Sequence[int]) -> Percentiles | None:
        if not sum(counts):
            return None
        found = (each.percentile(counts, percent) for percent in _PERCENTS)
        return Percentiles(*(float("inf") if value is None else value for value in found))


@dataclass(kw_only=True)
class Workloads:
    """All workloads, and the whole GPUs that exist."""

    workloads: list[Workload]
    gpus: Sequence[Mapping[str, Any]]
    """The columns `PRICED` of each kind of whole GPU."""
    memory: Mapping[str, int]
    """The bytes of a model's memory."""
    days: int
    """The number of days with usage."""

    def device(self, row: Mapping[str, Any]) -> Device:
        """Return the device that a row with models and slices describes."""
        return _device(row, self.memory)


def _device(row: Mapping[str, Any], memory: Mapping[str, int]) -> Device:
    memory_part = (row["memory_slices"] or 1) / (row["gpu_memory_slices"] or 1)
    return Device(
        model=row["model"],
        mig_profile=row["mig_profile"],
        compute_part=(row["compute_slices"] or 1) / (row["gpu_compute_slices"] or 1),
        memory_part=memory_part,
        memory_gib=memory.get(row["model"], 0)
        / GIB
        * (memory_part if memory_part == 1 else memory_part * _MIG_MEMORY),
    )


def read_workloads(
    connection: duckdb.DuckDBPyConnection,
    window: Window,
    terms: Terms,
    by: Sequence[str],
) -> Workloads:
    """Return the workloads of whole days, in order of their names.

    `by` begins with `BY`. Its other dimensions divide a workload, such as by pool.
    """
    limits = window._asdict()
    create_identities(connection, f"(FROM usage_daily_unnamed WHERE {_WINDOW})", limits)
    first, last = (time_us // DAY_US for time_us in (window.begin_us, window.end_us - 1))
    create_changes(connection, window)
    since = terms.since_change_sql("day")
    devices = _DEVICES.format(since=since, first=first, last=last)
    connection.execute(devices, limits)
    connection.execute(_HOLDER_DEVICES, limits)
    into = "CREATE OR REPLACE TEMP TABLE bucket_sums AS"
    for begin_us in range(*window, _SLICE_DAYS * DAY_US):
        part = Window(begin_us, min(begin_us + _SLICE_DAYS * DAY_US, window.end_us))
        connection.execute(f"{into} {_BUCKET_SUMS.format(since=since)}", part._asdict())
        into = "INSERT INTO bucket_sums"
    connection.execute(_LOADS)
    for table in ("device_loads", "holder_devices", "bucket_sums"):
        connection.execute(f"DROP TABLE {table}")
    gpus = [*rows_of(connection.execute(_WHOLE_GPUS, {"begin_us": window.begin_us}))]
    memory = dict(connection.sql(_MEMORY).fetchall())
    days = connection.execute(_DAYS, limits).fetchall()[0][0]
    found: dict[tuple[Any, ...], Workload] = {}
    described = create_descriptions(connection, "loads")
    columns = ", ".join(f"{DIMENSIONS[name]} AS by_{name}" for name in by)
    for row in rows_of(connection.sql(_WORKLOADS.format(loads=described, names=columns))):
        names = tuple(terms.named(name, row[f"by_{name}"], row) for name in by)
        device = _device(row, memory)
        workload = found.setdefault((*names, device), Workload(key=names, device=device))
        workload.parts.append(row)
    workloads = [found[key] for key in sorted(found, key=str)]
    return Workloads(workloads=workloads, gpus=gpus, memory=memory, days=days)
