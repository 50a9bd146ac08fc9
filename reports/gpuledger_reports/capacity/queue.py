"""The report `queue`: how long pods and jobs waited for GPUs, and the demand that was not met."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple

import duckdb

from gpuledger.time_ranges import write_duration
from gpuledger_reports.capacity.allocations import Terms
from gpuledger_reports.capacity.report import (
    Answer,
    Option,
    Question,
    Report,
    Row,
    one_of,
    plain_cell,
)
from gpuledger_reports.capacity.slurm_jobs import SLURM_JOBS
from gpuledger_reports.capacity.waits import (
    create_waits,
    divide_by_days,
    hourly_sql,
    name_teams,
    notes_on_too_large,
)
from gpuledger_reports.reading.times import HOUR_US, Window, day_of, days_in

_COLUMNS: Final[Mapping[str, str]] = {
    "day": "Day",
    "pods": "Pods",
    "waiting": "Waiting",
    "waiting_gpus": "Waiting GPUs",
    "never_scheduled": "Never scheduled",
    "wait_p50_seconds": "Wait: p50",
    "wait_p95_seconds": "p95",
    "wait_p99_seconds": "p99",
    "wait_max_seconds": "max",
    "unmet_gpu_hours": "Unmet GPU-hours",
    "unmet_gpus": "Unmet GPUs",
    "unmet_gpus_max": "",
    "unknown_size": "",
    "reasons": "Reasons",
}
_NOTES: Final[Mapping[str, str]] = {
    "waiting": "Pods that still wait: {}. Each counts with its wait so far, so the real waits are"
    " longer.",
    "never_scheduled": "Pods that were deleted before they got a node: {}. Their waits count as"
    " unmet demand, but not in the percentiles.",
    "unknown_size": "Pods with claims or shares of unknown size: {}. Unmet demand does not include"
    " them.",
}
"""The note for each column whose sum is not 0."""
_DIMENSIONS: Final[Mapping[str, str]] = {
    "cluster": "cluster",
    "namespace": "namespace",
    "workload": "coalesce(owner_kind || '/' || owner_name, 'Pod/' || pod, 'SlurmJob/' || job_name)",
    "team": "team",
    "shape": "shape",
    "priority": "coalesce(priority_class, priority::VARCHAR)",
    "queue": "queue",
    "account": "account",
    "reason": "reason",
}
_GROUPED: Final = """
SELECT {columns}, count(*) AS pods,
    count(*) FILTER (state = 'waiting') AS waiting,
    sum(gpus) FILTER (state = 'waiting') AS waiting_gpus,
    count(*) FILTER (state = 'never_scheduled') AS never_scheduled,
    quantile_disc(seconds, [0.5, 0.95, 0.99, 1]) FILTER (state <> 'never_scheduled') AS waited,
    sum(unmet_gpu_hours) AS unmet_gpu_hours,
    count(*) FILTER (gpus IS NULL) AS unknown_size,
    histogram(reason) FILTER (reason IS NOT NULL) AS reasons,
    min((-seconds, coalesce(namespace || '/' || pod, 'Slurm job ' || pod_uid), shape, message))
        FILTER (state = 'waiting') AS longest
FROM {waits} GROUP BY ALL
"""


class _Group(NamedTuple):
    row: Row
    longest: tuple[float, str, str, str | None] | None
    """The pod that has waited longest: its negated wait in seconds, name, shape and message."""


def _read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
    by, window = question.by, question.window
    create_waits(connection, window, question.options["slurm_jobs"] or ())
    if "team" in by:
        name_teams(connection, Terms(question.policy, window))
    groups = _groups(connection, by, {None: window}, waits="waits")
    notes = [*_notes([group for group in groups if question.selects(group.row)])]
    notes += notes_on_too_large(connection)
    if question.options["history"]:
        divide_by_days(connection, window)
        days = ((day_of(day.begin_us).isoformat(), day) for day in days_in(window))
        groups = _groups(connection, by, dict(days), waits="daily_waits")
    return Answer(rows=[group.row for group in groups], notes=notes)


def _groups(
    connection: duckdb.DuckDBPyConnection,
    by: Sequence[str],
    days: Mapping[str | None, Window],
    *,
    waits: str,
) -> list[_Group]:
    """Return the groups of each day, the most important first; the day `None` is the whole window.

    `waits` is the name of their table.
    """
    columns = [f"{_DIMENSIONS[name]} AS {name}_" for name in by]
    columns.append("NULL AS day_" if None in days else "day AS day_")
    names = ", ".join(f"{name}_" for name in (*by, "day"))
    hourly = f"SELECT {names}, max(unmet_gpus) FROM ({hourly_sql(columns, waits)}) GROUP BY ALL"  # noqa: S608  # our own names
    highest = {tuple(key): gpus for *key, gpus in connection.execute(hourly).fetchall()}
    groups = []
    for found in connection.execute(
        _GROUPED.format(columns=", ".join(columns), waits=waits)
    ).fetchall():
        key, amounts, longest = found[: len(columns)], found[len(columns) : -1], found[-1]
        hours = (days[key[-1]].end_us - days[key[-1]].begin_us) / HOUR_US
        row = _row(amounts, hours, highest.get(key, 0.0))
        groups.append(_Group(dict(zip((*by, "day"), key, strict=True)) | row, longest))
    return sorted(groups, key=_rank)


def _rank(group: _Group) -> tuple[Any, ...]:
    row = group.row
    amounts = (-(row["unmet_gpu_hours"] or 0), -row["waiting"], -row["pods"])
    return (row["day"] or "", *amounts, str(row))


def _row(amounts: Iterable[Any], hours: float, highest: float) -> Row:
    pods, waiting, waiting_gpus, never, waited, unmet, unknown, reasons = amounts
    p50, p95, p99, longest = waited or [None] * 4
    named = sorted((reasons or {}).items(), key=lambda item: (-item[1], item[0]))
    return {
        "pods": pods,
        "waiting": waiting,
        "waiting_gpus": None if waiting_gpus is None and waiting else round(waiting_gpus or 0.0, 2),
        "never_scheduled": never,
        "wait_p50_seconds": p50,
        "wait_p95_seconds": p95,
        "wait_p99_seconds": p99,
        "wait_max_seconds": longest,
        "unmet_gpu_hours": None if unmet is None else round(unmet, 3),
        "unmet_gpus": None if unmet is None else round(unmet / hours, 3),
        "unmet_gpus_max": None if unmet is None else round(highest, 3),
        "unknown_size": unknown,
        "reasons": ", ".join(f"{name} ({count})" for name, count in named) or None,
    }


def _notes(groups: Sequence[_Group]) -> Iterator[str]:
    for column, text in _NOTES.items():
        if count := sum(group.row[column] for group in groups):
            yield text.format(count)
    if waits := [group.longest for group in groups if group.longest]:
        negated_seconds, pod, shape, message = min(waits, key=itemgetter(0, 1))
        reason = f"; {' '.join(message.split())}" if message else ""
        yield f"{pod} ({shape}) has waited the longest: {_duration(-negated_seconds)}{reason}"


def _duration(seconds: float) -> str:
    return write_duration(round(seconds * 1000))


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name.endswith("_seconds") and row[name] is not None:
        return _duration(row[name])
    return plain_cell(name, row)


REPORT: Final = Report(
    name="queue",
    summary="Show how long pods waited for GPUs, and the demand that was not met.",
    about=(
        "A wait lasts from a pod's creation until a scheduler assigns it to a node. Each pod that"
        " requested GPUs and waited during the time range counts once. Pods that still wait count"
        " with their wait so far. Pods that were deleted while they waited count only in `Never"
        " scheduled` and in the unmet demand. `Unmet GPU-hours` are requested GPUs times the hours"
        " waited in the time range, whatever the reason; `Unmet GPUs` is their mean per hour. A"
        " request that may get time slices or MIG instances counts as the parts of GPUs that the"
        " pod later held, or that pods like it held. `Reasons` counts pods by their longest-lasting"
        " reason. Scheduling gates, such as Kueue's, are appended. `--by queue` groups by the queue"
        " of Kueue, Volcano, KAI Scheduler or slurm-bridge; it is unknown for pods that got a node"
        " immediately. Rules of teams that depend on the GPU or node do not match. For pods that"
        " got a node immediately, GPUs of init containers are added to those of the other"
        " containers."
    ),
    examples={
        "The last 30 days, by namespace and shape": "",
        "Queues with their priorities": "--by queue,priority",
        "Whether the queue of each team grows": "--by team --history day",
        "The ten workloads with the largest unmet demand in a week": (
            "--by namespace,workload --window 7d --top 10"
        ),
        "Also jobs that wait in Slurm": "--by queue --slurm-jobs sacct.txt",
    },
    columns=_COLUMNS,
    droppable=(
        "unmet_gpu_hours",
        "wait_max_seconds",
        "wait_p95_seconds",
        "never_scheduled",
        "reasons",
        "waiting_gpus",
        "pods",
    ),
    texts=frozenset({"day", "reasons"}),
    counts=frozenset({"pods", "waiting", "never_scheduled", "unknown_size"}),
    dimensions=_DIMENSIONS,
    default_by="namespace,shape",
    options={
        "history": Option(
            help="`day` for a row per day and group, with the pods that waited on that day.",
            parse=one_of("day"),
        ),
        "slurm_jobs": SLURM_JOBS,
    },
    cell=_cell,
    read=_read,
)
