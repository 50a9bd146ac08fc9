"""The report `waste`: allocated time of GPUs that was not used, by workload or team.

A limit of idle minutes would have reclaimed the part of each idle stretch beyond the limit;
`idle_time` defines and finds the stretches. Allocated and unused time is mostly from daily sums.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any, Final

import duckdb

from gpuledger.store.distributions import ALLOCATED, BUSY
from gpuledger_reports.capacity.allocations import (
    DIMENSIONS,
    HOLDER_NAME,
    IDENTITY_HASH,
    IS_HELD,
    PRICED,
    USAGE,
    Terms,
    create_changes,
    create_descriptions,
    create_identities,
    rows_of,
    usage_limits,
)
from gpuledger_reports.capacity.idle_time import (
    IN_WINDOW,
    LIMITS,
    SLICE_HOURS,
    create_idle_sums,
)
from gpuledger_reports.capacity.report import Answer, Option, Question, Report, Row, one_of
from gpuledger_reports.pricing.money import minor_digits
from gpuledger_reports.reading.times import HOUR_US

_RECLAIMED: Final = tuple(f"reclaimed_{limit}" for limit in LIMITS)
_AMOUNTS: Final = ("allocated", "unused", "idle_memory", *_RECLAIMED)
_ALLOCATED_SUMS: Final = f"""
CREATE OR REPLACE TEMP TABLE allocated_sums AS
SELECT identity, {{since}} AS since,
    min(time) AS first_time, sum(allocated_gpu_hours) AS allocated, sum(gpu_hours) AS unused,
    bool_or(coalesce({ALLOCATED}, {BUSY.columns[0]}) IS NOT NULL) AS has_minutes
FROM (SELECT *, {IDENTITY_HASH} AS identity FROM {USAGE} WHERE category = 'idle' AND {IS_HELD})
LEFT JOIN changes USING (identity)
GROUP BY ALL HAVING sum(allocated_gpu_hours) > 0
"""  # noqa: S608  # our own names
_SUMS: Final = """
CREATE OR REPLACE TEMP TABLE sums AS
FROM allocated_sums
UNION ALL BY NAME
SELECT idle_sums.*, allocated_sums.first_time
FROM idle_sums JOIN allocated_sums USING (identity, since)
"""
_SUMMED: Final = (*_AMOUNTS, "idle_memory_gib_minutes", "idle_memory_minutes")
_OF_ALLOCATIONS: Final = f"FROM usage_hourly_unnamed WHERE {IN_WINDOW} AND category = 'idle'"
_UNKNOWN: Final = f"""
SELECT (SELECT count(DISTINCT hour) FROM usage_hourly_unnamed WHERE {IN_WINDOW}) AS hours,
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
    has_minutes: bool = False
    """Whether any of its time was summed up with minutes."""
    idle_memory_minutes: float = 0
    idle_memory_gib_minutes: float = 0.0
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
        self.has_minutes |= row["has_minutes"]
        self.idle_memory_minutes += row["idle_memory_minutes"] or 0
        self.idle_memory_gib_minutes += row["idle_memory_gib_minutes"] or 0.0
        if row["longest"]:
            minutes, negated_begin, pod = row["longest"].values()
            found = (minutes, negated_begin, pod)
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
        if self.idle_memory_minutes:
            mean = self.idle_memory_gib_minutes / self.idle_memory_minutes
            found["idle_memory_gib"] = round(mean, 2)
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
            name: None if not self.has_minutes and name.startswith(of_minutes) else found.get(name)
            for name in _COLUMNS
        }


def read_waste(
    connection: duckdb.DuckDBPyConnection, question: Question, *, slice_hours: int
) -> tuple[dict[tuple[str | None, ...], Waste], list[str]]:
    """Return the waste by the values of the dimensions, and notes on missing data."""
    terms = Terms(question.policy, question.window)
    limits = usage_limits(connection, question.window)
    create_identities(connection, USAGE, limits)
    create_changes(connection, question.window)
    connection.execute(_ALLOCATED_SUMS.format(since=terms.since_change_sql("time")), limits)
    create_idle_sums(connection, question, terms, slice_hours=slice_hours)
    connection.execute(_SUMS)
    connection.execute("DROP TABLE allocated_sums; DROP TABLE idle_sums")
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
    bool_or(has_minutes) AS has_minutes,
    max({{'minutes': stretch.minutes, 'negated_begin': stretch.negated_begin,
        'pod': {HOLDER_NAME}}}) FILTER (stretch IS NOT NULL) AS longest
FROM {named} GROUP BY ALL
"""  # noqa: S608  # our own names


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
    return datetime.fromtimestamp(minute * 60, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def read_rows(
    connection: duckdb.DuckDBPyConnection, question: Question, *, slice_hours: int = SLICE_HOURS
) -> Answer:
    """Return the rows of the report. The number of hours in a slice does not change them."""
    found, notes = read_waste(connection, question, slice_hours=slice_hours)
    limit = int(question.options["idle_minutes"])
    ranked = sorted(found.items(), key=lambda each: (each[1].rank(limit), str(each[0])))
    rows: list[Row] = [
        {**dict(zip(question.by, key, strict=True)), **waste.row(question.policy.currency)}
        for key, waste in ranked
        # On a shared GPU, a pod can be idle in time that other pods use.
        if any(round(waste.hours[name], 2) for name in ("unused", *_RECLAIMED))
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
        " kernels. New labels of a node or namespace count from the next day on, in UTC. Files have"
        " more columns, such as the longest idle stretch with its start, end and pod."
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
