"""The report `waste`: allocated time of GPUs that was not used, by workload or team.

A minute of a pod is idle if its kernels ran on none of its devices. A minute is not idle if the use
of one of the devices is unknown, or if an unknown process used one of them. An idle stretch is a
sequence of idle minutes in the window.

A limit of idle minutes would have reclaimed the part of each idle stretch beyond the limit. The
stretches are exact to the minute, from the bitmaps of `usage_hourly`.

Most hours of a fleet are entirely busy, and are not read in detail:

1. `allocated_sums`: allocated and unused time by identity and period, mostly from daily sums.
2. `seen`: bitmaps of the hours in which each holder had each device, and in which it can be idle.
3. `unseen` and `candidates`: the hours in which a holder cannot, or can, be idle on all devices.

The other hours are read in slices of the window, each in these steps:

1. `parties`: the hours of each device by holder, from `usage_hourly`.
2. `devices`: allocated hours of known holders, with a bitmap of idle minutes.
3. `stretches`: the idle stretches of holders; `open_stretches` continue in the next slice.
4. `slice_sums`: sums by identity and period, with the minutes that each limit would have reclaimed.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from itertools import pairwise
from typing import Any, Final

import duckdb

from gpuledger.store.distributions import ALLOCATED, BUSY, GIB, USED
from gpuledger_reports.capacity.allocations import (
    DIMENSIONS,
    HOLDER,
    HOLDER_NAME,
    IDENTITY_HASH,
    IS_HELD,
    PRICED,
    USAGE,
    Terms,
    create_descriptions,
    create_identities,
    rows_of,
    usage_limits,
)
from gpuledger_reports.capacity.report import Answer, Option, Question, Report, Row, one_of
from gpuledger_reports.pricing.money import minor_digits
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window

LIMITS: Final = (30, 60, 120)
"""Minutes."""
_RECLAIMED: Final = tuple(f"reclaimed_{limit}" for limit in LIMITS)
_AMOUNTS: Final = ("allocated", "unused", "idle_memory", *_RECLAIMED)
_WHOLE_HOUR: Final = (1 << 60) - 1
_BLOCK_HOURS: Final = 48
"""A block of hours fits into the bits of one number. It begins at midnight."""
_BLOCK_US: Final = _BLOCK_HOURS * HOUR_US
_PERIOD_US: Final = 10 * DAY_US
"""Sums of an allocation are split into periods, because a node may get another pool."""
_SLICE_HOURS: Final = 600_000
"""The approximate number of hours of devices that are in memory at once."""
_IN_WINDOW: Final = "hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)"
_DEVICE: Final = "hash(cluster, node, gpu_uuid)"
_NUMBER: Final = f"epoch_us(hour) // {HOUR_US}"
_ALLOCATED_SUMS: Final = f"""
CREATE OR REPLACE TEMP TABLE allocated_sums AS
SELECT {IDENTITY_HASH} AS identity, epoch_us(time) // {_PERIOD_US} AS period, {{since}} AS since,
    min(time) AS hour, sum(allocated_gpu_hours) AS allocated, sum(gpu_hours) AS unused,
    count(coalesce({ALLOCATED}, {BUSY.columns[0]})) AS known_hours
FROM {USAGE} WHERE category = 'idle' AND {IS_HELD}
GROUP BY ALL HAVING sum(allocated_gpu_hours) > 0
"""  # noqa: S608  # our own names
_SHARED: Final = f"""
CREATE OR REPLACE TEMP TABLE shared AS
SELECT DISTINCT device, day FROM (
    SELECT {_DEVICE} AS device, epoch_us(time) // {DAY_US} AS day, {HOLDER} AS holder
    FROM {USAGE} GROUP BY ALL
    HAVING sum(CASE category
        WHEN 'idle' THEN allocated_ns::DOUBLE - coalesce(unresponsive_ns, 0) - busy_ns
        ELSE -busy_ns END) <> 0)
"""  # noqa: S608  # as above
"""SQL of the devices and days on which a holder did not use all of the time that was used in its
allocation. On the others, `used_minutes` of a row of allocated time is the use by its holder."""
_SEEN: Final = f"""
CREATE OR REPLACE TEMP TABLE seen AS
WITH hours AS (
    SELECT {_DEVICE} AS device, {HOLDER} AS holder, {_NUMBER} AS number,
        1::BIGINT << number % {_BLOCK_HOURS} AS bit,
        CASE WHEN allocated_pod_state = 'unknown' THEN bit ELSE 0 END AS unknown_bit,
        CASE WHEN {ALLOCATED} & {_WHOLE_HOUR} & ~coalesce({USED}, 0) <> 0 THEN bit ELSE 0 END
            AS idle_bit
    FROM usage_hourly_unnamed WHERE {_IN_WINDOW} AND category = 'idle'
        AND (allocated_ns > 0 OR NOT {IS_HELD})
)
SELECT device, holder, number // {_BLOCK_HOURS} AS block,
    min(number) AS first_hour, max(number) AS last_hour, bit_or(bit) AS hours,
    bit_or(unknown_bit) AS unknown_hours, bit_or(idle_bit) AS idle_hours
FROM hours GROUP BY ALL
"""  # noqa: S608  # as above
"""SQL of the hours of each device by holder, as bits of a block. A device can be idle only in
`idle_hours`."""
_SEEN_SHARED: Final = f"""
UPDATE seen SET idle_hours = idle_hours | (hours & shared_hours)
FROM (
    SELECT device, day * 24 // {_BLOCK_HOURS} AS block,
        bit_or({(1 << 24) - 1}::BIGINT << (day * 24 % {_BLOCK_HOURS})) AS shared_hours
    FROM shared GROUP BY ALL
) AS days WHERE days.device = seen.device AND days.block = seen.block
"""  # noqa: S608  # as above
_UNSEEN: Final = f"""
CREATE OR REPLACE TEMP TABLE unseen AS
WITH gaps AS (
    SELECT device, holder, unnest(range(min(first_hour), max(last_hour))) AS hour
    FROM seen WHERE holder IS NOT NULL GROUP BY device, holder
    HAVING max(last_hour) - min(first_hour) >= sum(bit_count(hours))
), known AS (
    SELECT device, block, bit_or(hours & ~unknown_hours) AS hours FROM seen GROUP BY ALL
)
SELECT DISTINCT holder, hour FROM gaps LEFT JOIN known
    ON known.device = gaps.device AND known.block = hour // {_BLOCK_HOURS}
WHERE coalesce(hours >> hour % {_BLOCK_HOURS} & 1, 0) = 0
"""  # noqa: S608  # as above
"""SQL of the hours in which a device has no known row that the holder had before and after."""
_CANDIDATES: Final = """
CREATE OR REPLACE TEMP TABLE candidates AS
SELECT holder, block, bit_and(idle_hours | ~hours) & bit_or(hours) AS hours
FROM seen WHERE holder IS NOT NULL GROUP BY ALL
"""
"""SQL of the hours in which all devices of a holder can be idle."""
_ROWS: Final = f"""(
    FROM usage_hourly_unnamed WHERE {_IN_WINDOW}
        AND ({USED} <> {_WHOLE_HOUR} OR {USED} IS NULL)
    UNION ALL
    FROM usage_hourly_unnamed WHERE {_IN_WINDOW} AND {USED} = {_WHOLE_HOUR}
        AND ({_DEVICE}, epoch_us(hour) // {DAY_US}) IN (SELECT (device, day) FROM shared)
)"""  # noqa: S608  # as above
"""SQL of the rows of hours in which a device can be idle, and of some others."""
_PARTIES: Final = f"""
CREATE OR REPLACE TEMP TABLE parties AS
SELECT {_DEVICE} AS device, {_NUMBER} AS hour, {HOLDER} AS holder,
    max(CASE WHEN category = 'idle' AND allocated_gpu_hours > 0 THEN {IDENTITY_HASH} END)
        AS identity,
    bit_or({ALLOCATED}) & {_WHOLE_HOUR} AS allocated,
    coalesce(bit_or({USED}) FILTER (category <> 'idle'), 0) AS used,
    -- The GPU-hours of an allocated minute: at most those of the whole device.
    least(any_value(device_fraction) / 60,
        sum((allocated_ns::DOUBLE - coalesce(unresponsive_ns, 0)) * device_fraction)
        / 3.6e12 / nullif(bit_count(bit_or({ALLOCATED})), 0)) AS minute_hours,
    -- Minutes without kernels of processes that held memory, and their mean memory in this hour.
    max({BUSY.columns[0]}) FILTER (category <> 'idle' AND memory_byte_ns > 0) AS still_minutes,
    sum(memory_byte_ns) FILTER (category <> 'idle')::DOUBLE / {GIB} / 6e10
        / nullif(max({BUSY.columns[0]} + bit_count({USED})) FILTER (category <> 'idle'), 0) AS gib
FROM {_ROWS} WHERE category <> 'idle' OR {IS_HELD}
GROUP BY ALL
"""  # noqa: S608  # as above
"""SQL of these hours by device and holder. The holder of use by unknown processes is null."""
_DEVICES: Final = """
CREATE OR REPLACE TEMP TABLE devices AS
SELECT parties.*, coalesce(allocated & ~parties.used & ~coalesce(unknown.used, 0), 0) AS idle
FROM parties LEFT JOIN (
    SELECT device, hour, bit_or(used) AS used
    FROM parties WHERE holder IS NULL AND used <> 0 GROUP BY ALL
) AS unknown USING (device, hour)
WHERE identity IS NOT NULL
"""
_OPEN: Final = "CREATE OR REPLACE TEMP TABLE open_stretches (holder UBIGINT, begin BIGINT)"
_STRETCHES: Final = f"""
CREATE OR REPLACE TEMP TABLE stretches AS
WITH holders AS (
    SELECT holder, hour, bit_and(idle) AS idle
    FROM devices JOIN candidates USING (holder)
        ANTI JOIN unseen ON unseen.holder = devices.holder AND unseen.hour = devices.hour
    WHERE candidates.block = devices.hour // {_BLOCK_HOURS}
        AND candidates.hours >> (devices.hour % {_BLOCK_HOURS}) & 1 = 1
    GROUP BY ALL HAVING bit_and(idle) <> 0
), borders AS (
    SELECT holder, hour, idle = {_WHOLE_HOUR} AS is_whole,
        CASE WHEN is_whole THEN [0] ELSE list_filter(range(60),
            lambda each: ((idle & ~(idle << 1)) >> each) & 1 = 1) END AS begins,
        CASE WHEN is_whole THEN [59] ELSE list_filter(range(60),
            lambda each: ((idle & ~(idle >> 1)) >> each) & 1 = 1) END AS lasts
    FROM holders
), runs AS (
    SELECT holder, hour, hour * 60 + unnest(begins) AS first_minute,
        hour * 60 + unnest(lasts) + 1 AS end_minute
    FROM borders
    UNION ALL SELECT holder, NULL, begin, $begin_us // 60000000 FROM open_stretches
), marked AS (
    SELECT *, first_minute IS DISTINCT FROM lag(end_minute) OVER history AS is_new
    FROM runs WINDOW history AS (PARTITION BY holder ORDER BY first_minute)
), numbered AS (
    SELECT *, sum(is_new::INTEGER) OVER history AS number
    FROM marked WINDOW history AS (PARTITION BY holder ORDER BY first_minute)
)
SELECT *, min(first_minute) OVER stretch AS stretch_begin,
    max(end_minute) OVER stretch AS stretch_end
FROM numbered WINDOW stretch AS (PARTITION BY holder, number)
"""  # noqa: S608  # our own names
"""SQL of the idle stretches of holders: a row for each sequence of idle minutes in an hour, with
its stretch. A row without an hour is the part of a stretch before the slice.

In `borders`, a bit begins a sequence if the bit before is 0, and ends it if the bit after is 0."""
_CONTINUED: Final = """
CREATE OR REPLACE TEMP TABLE open_stretches AS
SELECT DISTINCT holder, stretch_begin AS begin FROM stretches
WHERE stretch_end = $end_us // 60000000
"""
_MINUTES: Final = """
CREATE OR REPLACE TEMP MACRO minutes(hour, begin_minute, end_minute) AS
    CASE WHEN end_minute > begin_minute
        THEN ((1::BIGINT << (end_minute - begin_minute)) - 1) << (begin_minute - hour * 60)
        ELSE 0 END
"""
"""SQL of a macro: the bitmap of the minutes between two minutes that are in the same hour."""
_SLICE_SUMS: Final = f"""
WITH reclaimed AS (
    SELECT holder, hour,
        max_by({{{{'begin': stretch_begin, 'end': stretch_end}}}},
            (stretch_end - stretch_begin, -stretch_begin)) AS stretch,
        {
    ", ".join(
        f"bit_or(minutes(hour, greatest(first_minute, stretch_begin + {limit}), end_minute))"
        f" AS reclaimed_{limit}"
        for limit in LIMITS
    )
}
    FROM stretches WHERE hour IS NOT NULL GROUP BY ALL
), held AS (
    SELECT *, least(coalesce(still_minutes, 0), bit_count(idle)) AS held_minutes FROM devices
)
SELECT identity, hour * {HOUR_US} // {_PERIOD_US} AS period, {{since}} AS since,
    sum(held_minutes * minute_hours) AS idle_memory, sum(held_minutes * gib) AS held_gib_minutes,
    sum(held_minutes) FILTER (gib IS NOT NULL) AS held_minutes,
    {
    ", ".join(
        f"sum(minute_hours * bit_count(allocated & reclaimed_{limit})) AS reclaimed_{limit}"
        for limit in LIMITS
    )
},
    max_by(stretch, (stretch.end - stretch.begin, -stretch.begin))
        FILTER (stretch IS NOT NULL) AS stretch
FROM held LEFT JOIN reclaimed USING (holder, hour) GROUP BY identity, period, since
"""  # noqa: S608  # as above
_SUMS: Final = """
CREATE OR REPLACE TEMP TABLE sums AS
FROM allocated_sums
UNION ALL BY NAME
SELECT slice_sums.*, allocated_sums.hour
FROM slice_sums JOIN allocated_sums USING (identity, period, since)
"""
_SUMMED: Final = (
    *("allocated", "unused", "idle_memory", "held_gib_minutes", "held_minutes", "known_hours"),
    *(f"reclaimed_{limit}" for limit in LIMITS),
)
_OF_ALLOCATIONS: Final = f"FROM usage_hourly_unnamed WHERE {_IN_WINDOW} AND category = 'idle'"
_UNKNOWN: Final = f"""
SELECT (SELECT count(DISTINCT hour) FROM usage_hourly_unnamed WHERE {_IN_WINDOW}) AS hours,
    (SELECT sum(allocated_gpu_hours) {_OF_ALLOCATIONS} AND allocated_pod_state = 'unknown')
        AS unknown,
    (SELECT sum(allocated_gpu_hours) {_OF_ALLOCATIONS} AND busy_ns IS NULL AND {IS_HELD})
        AS unmeasured,
    (SELECT sum(allocated_gpu_hours) {_OF_ALLOCATIONS} AND {ALLOCATED} IS NULL
        AND busy_ns IS NOT NULL AND {IS_HELD}) AS without_minutes
"""  # noqa: S608  # our own names
"""SQL with a query for each number, because DuckDB excludes files by the statistics of a column."""
_REASONS: Final[Mapping[str, str]] = {
    "unknown": "may be allocated, but the kubelet did not answer; they are not in the table",
    "unmeasured": "are allocated, but their use is unknown; they do not count as unused",
    "without_minutes": "are from hours that an earlier version of gpuledger summed up without"
    " minutes; their idle stretches are unknown",
}
_COLUMNS: Final[Mapping[str, str]] = {
    "allocated_gpu_hours": "Allocated GPU-h",
    "unused_gpu_hours": "Unused GPU-h",
    "unused_ratio": "Unused",
    "unused_cost": "Unused cost",
    "longest_idle_hours": "Longest idle h",
    "longest_idle_begin": "",
    "longest_idle_end": "",
    "longest_idle_pod": "",
    "idle_memory_gpu_hours": "",
    "idle_memory_gib": "Idle memory GiB",
    **{f"reclaimed_{limit}_gpu_hours": "" for limit in LIMITS},
    **{f"reclaimed_{limit}_cost": f"Cost > {limit} min" for limit in LIMITS},
    "currency": "",
}


@dataclass(kw_only=True)
class Waste:
    """The sums of one row of the report."""

    hours: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_AMOUNTS, 0.0))
    costs: dict[str, float] = field(default_factory=dict)
    """Empty if no device has a price."""
    known_hours: int = 0
    """Number of device-hours whose minutes are known."""
    held_minutes: float = 0
    held_gib_minutes: float = 0.0
    longest: tuple[int, int, str] | None = None
    """Its length and its negated begin in minutes, and the pod. The maximum is thus the longest
    stretch and, among equals, the earliest one."""

    def add(self, row: Mapping[str, Any], price: Fraction | None) -> None:
        """Add the sums of devices with one price."""
        for name in _AMOUNTS:
            self.hours[name] += row[name] or 0.0
            if price is not None:
                cost = (row[name] or 0.0) * float(price)
                self.costs[name] = self.costs.get(name, 0.0) + cost
        self.known_hours += row["known_hours"]
        self.held_minutes += row["held_minutes"] or 0
        self.held_gib_minutes += row["held_gib_minutes"] or 0.0
        if row["longest"]:
            begin, end, pod = row["longest"].values()
            found = (end - begin, -begin, pod)
            self.longest = max(self.longest or found, found)

    def rank(self, limit: int) -> tuple[float, ...]:
        """Return the sort key of the row: by the cost that a limit would have reclaimed."""
        reclaimed = f"reclaimed_{limit}"
        known = (self.costs.get(name, 0.0) for name in (reclaimed, "unused"))
        return (*(-cost for cost in known), -self.hours[reclaimed], -self.hours["unused"])

    def row(self, currency: str) -> Row:
        """Return the values of the report's columns."""
        hours, digits = self.hours, minor_digits(currency)
        found: Row = {
            **{f"{name}_gpu_hours": round(amount, 2) for name, amount in hours.items()},
            **{f"{name}_cost": round(cost, digits) for name, cost in self.costs.items()},
            "unused_ratio": round(hours["unused"] / hours["allocated"], 4),
            "currency": currency,
        }
        if self.held_minutes:
            found["idle_memory_gib"] = round(self.held_gib_minutes / self.held_minutes, 2)
        if self.longest:
            length, negated_begin, pod = self.longest
            begin = -negated_begin
            found |= {
                "longest_idle_hours": round(length / 60, 2),
                "longest_idle_begin": _time(begin),
                "longest_idle_end": _time(begin + length),
                "longest_idle_pod": pod,
            }
        of_minutes = ("idle_memory", "reclaimed")
        return {
            name: None if not self.known_hours and name.startswith(of_minutes) else found.get(name)
            for name in _COLUMNS
        }


def read_waste(
    connection: duckdb.DuckDBPyConnection, question: Question, *, slice_hours: int
) -> tuple[dict[tuple[str | None, ...], Waste], list[str]]:
    """Return the waste by the values of the dimensions, and notes on missing data."""
    terms, window = Terms(question.policy, question.window), question.window._asdict()
    limits = usage_limits(connection, question.window)
    create_identities(connection, USAGE, limits)
    connection.execute(_ALLOCATED_SUMS.format(since=terms.since_sql("time")), limits)
    connection.execute(_SHARED, limits)
    connection.execute(_SEEN, window)
    for made in (_SEEN_SHARED, _UNSEEN, _CANDIDATES, _MINUTES, _OPEN):
        connection.execute(made)
    since = terms.since_sql(f"make_timestamptz(hour * {HOUR_US})")
    kept = "CREATE OR REPLACE TEMP TABLE slice_sums AS"
    for part in question.each(_slices(connection, question.window, slice_hours)):
        connection.execute(_PARTIES, part._asdict())
        connection.execute(_DEVICES)
        connection.execute(_STRETCHES, {"begin_us": part.begin_us})
        connection.execute(_CONTINUED, {"end_us": part.end_us})
        connection.execute(f"{kept} {_SLICE_SUMS.format(since=since)}")
        kept = "INSERT INTO slice_sums"
        connection.execute("DROP TABLE parties; DROP TABLE devices; DROP TABLE stretches")
    connection.execute(_SUMS)
    for table in ("seen", "candidates", "allocated_sums", "slice_sums"):
        connection.execute(f"DROP TABLE {table}")
    waste: dict[tuple[str | None, ...], Waste] = defaultdict(Waste)
    named = create_descriptions(connection, "sums")
    for row in rows_of(connection.sql(_sums_sql(named, question.by))):
        key = tuple(terms.named(name, row[f"by_{name}"], row) for name in question.by)
        waste[key].add(row, terms.price(row))
        terms.note_unpriced(row, row["allocated"] or 0.0)
    return waste, [*_notes(connection, question), *terms.notes()]


def _sums_sql(named: str, by: Iterable[str]) -> str:
    """Return the SQL of the sums by dimensions and prices, of the SQL of sums with names."""
    return f"""
SELECT {", ".join(f"{DIMENSIONS[name]} AS by_{name}" for name in by)}, {", ".join(PRICED)},
    since, {", ".join(f"sum({name}) AS {name}" for name in _SUMMED)},
    max_by({{'begin': stretch.begin, 'end': stretch.end, 'pod': {HOLDER_NAME}}},
        (stretch.end - stretch.begin, -stretch.begin, {HOLDER_NAME}))
        FILTER (stretch IS NOT NULL) AS longest
FROM {named} GROUP BY ALL
"""  # noqa: S608  # our own names


def _slices(
    connection: duckdb.DuckDBPyConnection, window: Window, slice_hours: int
) -> list[Window]:
    """Return slices of the window: whole blocks with a limited number of hours of devices."""
    counts = dict(
        connection.sql(
            "SELECT block, sum(bit_count(idle_hours)) FROM seen GROUP BY block"
        ).fetchall()
    )
    borders, hours = [window.begin_us], 0
    for block in range(window.begin_us // _BLOCK_US, -(-window.end_us // _BLOCK_US)):
        hours += counts.get(block, 0)
        if hours > slice_hours and block * _BLOCK_US > borders[-1]:
            borders.append(block * _BLOCK_US)
            hours = counts.get(block, 0)
    return [Window(*limits) for limits in pairwise([*borders, window.end_us])]


def _notes(connection: duckdb.DuckDBPyConnection, question: Question) -> Iterable[str]:
    window = question.window._asdict()
    (unknown,) = rows_of(connection.execute(_UNKNOWN, window))
    hours = (question.window.end_us - question.window.begin_us) // HOUR_US
    if missing := hours - unknown["hours"]:
        yield f"{missing} of {hours} hours have no samples."
    for name, reason in _REASONS.items():
        if amount := unknown[name]:
            yield f"{amount:,.1f} GPU-hours {reason}."


def _time(minute: int) -> str:
    return datetime.fromtimestamp(minute * 60, tz=UTC).strftime("%Y-%m-%dT%H:%MZ")


def read_rows(
    connection: duckdb.DuckDBPyConnection, question: Question, *, slice_hours: int = _SLICE_HOURS
) -> Answer:
    """Return the rows of the report. The number of hours in a slice does not change them."""
    found, notes = read_waste(connection, question, slice_hours=slice_hours)
    limit = int(question.options["idle_minutes"])
    ranked = sorted(found.items(), key=lambda each: (each[1].rank(limit), str(each[0])))
    rows: list[Row] = [
        {**dict(zip(question.by, key, strict=True)), **waste.row(question.policy.currency)}
        for key, waste in ranked
        if round(waste.hours["unused"], 2)
    ]
    return Answer(rows=rows, notes=notes)


REPORT: Final = Report(
    name="waste",
    summary="List allocated GPU time that was not used, by workload or team.",
    about=(
        "Unused time is allocated time of a GPU in which no kernel ran on it, as on a bill. Time"
        " whose use or allocation is unknown does not count as unused. A pod is idle in a minute"
        " if it ran no kernel on any of its devices. `Cost > 60 min` is the cost that a limit of"
        " 60 idle minutes would have reclaimed: the part of each idle stretch after its first 60"
        " minutes. Rows are ranked by this cost, for the limit `--idle-minutes`. `Idle memory"
        " GiB` is the mean memory that processes of a pod held on a device in minutes without"
        " kernels. Files have more columns, such as the longest idle stretch with its start, end"
        " and pod."
    ),
    examples={
        "The 20 workloads whose idle pods cost the most": "--prices prices.yaml --top 20",
        "By team, with a limit of two hours": "--by team --idle-minutes 120",
    },
    columns=_COLUMNS,
    droppable=(
        "reclaimed_30_cost",
        "reclaimed_120_cost",
        "idle_memory_gib",
        "unused_gpu_hours",
        "allocated_gpu_hours",
        "unused_ratio",
        "longest_idle_hours",
    ),
    texts=frozenset({"longest_idle_begin", "longest_idle_end", "longest_idle_pod", "currency"}),
    dimensions=DIMENSIONS,
    default_by="cluster,namespace,workload",
    has_money=True,
    options={
        "idle_minutes": Option(
            help="Idle limit for ranking rows, in minutes: 30, 60 or 120.",
            default="60",
            parse=one_of(*map(str, LIMITS)),
        )
    },
    codes=("allocated time was not used", "no allocated time is known to be unused"),
    read=read_rows,
)
