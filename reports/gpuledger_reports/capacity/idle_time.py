"""The idle time of allocations: idle stretches of pods and jobs, and memory held meanwhile.

A minute of a holder is idle if its kernels ran on none of its devices. A minute is not idle if the
use of one of the devices is unknown, or if an unknown process used one of them. An idle stretch is
a sequence of idle minutes in the window. It is exact to the minute, from the bitmaps of
`usage_hourly`.

Most hours of a fleet are entirely busy, and are not read in detail:

1. `shared`: the devices and days on which a holder was not the only user of its allocation.
2. `seen`: bitmaps of the hours in which each holder had each device, and in which it can be idle.
3. `unseen` and `candidates`: the hours in which a holder cannot, or can, be idle on all devices.

The other hours are read in slices of the window, each in these steps:

1. `parties`: the hours of each device by holder, from `usage_hourly`.
2. `devices`: allocated hours of known holders, with a bitmap of idle minutes.
3. `stretches`: the idle stretches of holders; `open_stretches` continue in the next slice.
4. `idle_sums`: sums by identity and day of change, with the minutes that each limit would have
   reclaimed.
"""

from itertools import pairwise
from typing import Final

import duckdb

from gpuledger.store.distributions import ALLOCATED, BUSY, GIB, USED
from gpuledger_reports.capacity.allocations import (
    HOLDER,
    IDENTITY_HASH,
    IS_HELD,
    USAGE,
    Terms,
    usage_limits,
)
from gpuledger_reports.capacity.report import Question
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window

LIMITS: Final = (30, 60, 120)
"""Minutes."""
_WHOLE_HOUR: Final = (1 << 60) - 1
_BLOCK_HOURS: Final = 48
"""A block of hours fits into the bits of one number. It begins at midnight."""
_BLOCK_US: Final = _BLOCK_HOURS * HOUR_US
SLICE_HOURS: Final = 1_000_000
"""The approximate number of hours of devices that are in memory at once."""
IN_WINDOW: Final = "hour >= make_timestamptz($begin_us) AND hour < make_timestamptz($end_us)"
_DEVICE: Final = "hash(cluster, node, gpu_uuid)"
_NUMBER: Final = f"epoch_us(hour) // {HOUR_US}"
_STILL: Final = BUSY.columns[0]
"""The column with the number of minutes without kernels."""
_SHARED: Final = f"""
CREATE OR REPLACE TEMP TABLE shared AS
SELECT DISTINCT device, day FROM (
    SELECT {_DEVICE} AS device, epoch_us(time) // {DAY_US} AS day, {HOLDER} AS holder
    FROM {USAGE} GROUP BY ALL
    HAVING sum(CASE category
        -- Use of the allocation by all processes: `busy_ns` is its unused time.
        WHEN 'idle' THEN allocated_ns::DOUBLE - coalesce(unresponsive_ns, 0) - busy_ns
        -- Use by the holder.
        ELSE -busy_ns END) <> 0)
"""  # noqa: S608  # our own names
"""SQL of the devices and days on which other processes also used a holder's allocation. On the
others, `used_minutes` of a row of allocated time is the use by its holder."""
_SEEN: Final = f"""
CREATE OR REPLACE TEMP TABLE seen AS
WITH hours AS (
    SELECT {_DEVICE} AS device, {HOLDER} AS holder, {_NUMBER} AS number,
        1::BIGINT << number % {_BLOCK_HOURS} AS bit,
        CASE WHEN allocated_pod_state = 'unknown' THEN bit ELSE 0 END AS unknown_bit,
        CASE WHEN {ALLOCATED} & {_WHOLE_HOUR} & ~coalesce({USED}, 0) <> 0 THEN bit ELSE 0 END
            AS idle_bit
    FROM usage_hourly_unnamed WHERE {IN_WINDOW} AND category = 'idle'
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
"""SQL of the hours in which a device has no known row, although the holder had it before and
after."""
_CANDIDATES: Final = """
CREATE OR REPLACE TEMP TABLE candidates AS
SELECT holder, block, bit_and(idle_hours | ~hours) & bit_or(hours) AS hours
FROM seen WHERE holder IS NOT NULL GROUP BY ALL
"""
"""SQL of the hours in which all devices of a holder can be idle."""
_ROWS: Final = f"""(
    FROM usage_hourly_unnamed WHERE {IN_WINDOW}
        AND ({USED} <> {_WHOLE_HOUR} OR {USED} IS NULL)
    UNION ALL
    FROM usage_hourly_unnamed WHERE {IN_WINDOW} AND {USED} = {_WHOLE_HOUR}
        AND ({_DEVICE}, epoch_us(hour) // {DAY_US}) IN (SELECT (device, day) FROM shared)
)"""  # noqa: S608  # as above
"""SQL of the rows that may have minutes without kernels, and of all rows of the devices and days in
`shared`."""
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
    max({_STILL}) FILTER (category <> 'idle' AND memory_byte_ns > 0) AS still_minutes,
    sum(memory_byte_ns) FILTER (category <> 'idle')::DOUBLE / {GIB} / 6e10
        / nullif(max({_STILL} + bit_count({USED})) FILTER (category <> 'idle'), 0) AS gib
FROM {_ROWS} WHERE category <> 'idle' OR {IS_HELD}
GROUP BY ALL
"""  # noqa: S608  # as above
"""SQL of these rows by device, hour and holder. The holder of use by unknown processes is null."""
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
        max({{{{'minutes': stretch_end - stretch_begin, 'negated_begin': -stretch_begin}}}})
            AS stretch,
        {
    ", ".join(
        f"bit_or(minutes(hour, greatest(first_minute, stretch_begin + {limit}), end_minute))"
        f" AS reclaimed_{limit}"
        for limit in LIMITS
    )
}
    FROM stretches WHERE hour IS NOT NULL GROUP BY ALL
), with_memory AS (
    SELECT *, least(coalesce(still_minutes, 0), bit_count(idle)) AS idle_memory_minutes FROM devices
)
SELECT identity, {{since}} AS since,
    sum(idle_memory_minutes * minute_hours) AS idle_memory,
    sum(idle_memory_minutes * gib) AS idle_memory_gib_minutes,
    sum(idle_memory_minutes) FILTER (gib IS NOT NULL) AS idle_memory_minutes,
    {
    ", ".join(
        f"sum(minute_hours * bit_count(allocated & reclaimed_{limit})) AS reclaimed_{limit}"
        for limit in LIMITS
    )
},
    max(stretch) AS stretch
FROM with_memory LEFT JOIN reclaimed USING (holder, hour) LEFT JOIN changes USING (identity)
GROUP BY identity, since
"""  # noqa: S608  # as above


def create_idle_sums(
    connection: duckdb.DuckDBPyConnection, question: Question, terms: Terms, *, slice_hours: int
) -> None:
    """Create the temporary table `idle_sums`: sums by `identity` and `since`.

    `reclaimed_…` are the GPU-hours that a limit would have reclaimed, `idle_memory` those in which
    memory was held without kernels. `stretch` is the longest idle stretch and, among equals, the
    earliest one: the largest pair of its length and its negated begin, in minutes.
    """
    connection.execute(_SHARED, usage_limits(connection, question.window))
    connection.execute(_SEEN, question.window._asdict())
    for made in (_SEEN_SHARED, _UNSEEN, _CANDIDATES, _MINUTES, _OPEN):
        connection.execute(made)
    since = terms.since_change_sql(f"make_timestamptz(hour * {HOUR_US})")
    into = "CREATE OR REPLACE TEMP TABLE idle_sums AS"
    for part in question.each(_slices(connection, question.window, slice_hours)):
        connection.execute(_PARTIES, part._asdict())
        connection.execute(_DEVICES)
        connection.execute(_STRETCHES, {"begin_us": part.begin_us})
        connection.execute(_CONTINUED, {"end_us": part.end_us})
        connection.execute(f"{into} {_SLICE_SUMS.format(since=since)}")
        into = "INSERT INTO idle_sums"
        connection.execute("DROP TABLE parties; DROP TABLE devices; DROP TABLE stretches")
    for table in ("shared", "seen", "unseen", "candidates", "open_stretches"):
        connection.execute(f"DROP TABLE {table}")


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
