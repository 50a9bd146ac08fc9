"""The report `forecast`: the expected demand of each group, compared with its GPUs."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Final

import duckdb

from gpuledger.errors import ArgumentError
from gpuledger.texts import counted, shorten
from gpuledger_reports.capacity.demand import Demand, read_demand, read_waiting
from gpuledger_reports.capacity.forecasting import DAY, WEEK, Forecast, forecast, hours_needed
from gpuledger_reports.capacity.report import (
    GPU_DIMENSIONS,
    Answer,
    Key,
    Option,
    Question,
    Report,
    Row,
    one_of,
    plain_cell,
    split_items,
    whole,
)
from gpuledger_reports.capacity.slurm_jobs import SLURM_JOBS
from gpuledger_reports.capacity.waits import notes_on_too_large

_QUANTILES: Final = (0.1, 0.5, 0.9)
_INCLUDED: Final = "included"
_DAYS: Final = (28, 14, 7)
"""The default horizons, the best first."""
_FULL_TOLERANCE_GPUS: Final = 0.01
"""Number of free GPUs up to which a group still counts as full."""
_RANKED: Final = ("full_days_p50", "full_days_p10")
_RELIABLE_COVERAGE: Final = 0.5
"""Coverage of the 80 % band below which a note warns. Past bands had less history than this one."""
COLUMNS: Final[Mapping[str, str]] = {
    "history_days": "",
    "gpus": "GPUs",
    "demand": "Demand",
    "waiting": "Waiting",
    "horizon_days": "",
    "expected": "Expected",
    "low_80": "80 % from",
    "high_80": "to",
    "low_95": "",
    "high_95": "",
    "full_days_p10": "Full in days: P10",
    "full_days_p50": "P50",
    "full_days_p90": "P90",
    "method": "Method",
    "error": "Error",
    "naive_error": "",
    "coverage_80": "Coverage",
    "coverage_95": "",
    "filled_hours": "",
    "unknown_gpu_hours": "",
    "note": "Note",
}
"""The columns of an outlook after its dimensions, with their headings."""


def find_outlook(
    demand: Demand,
    dimensions: Sequence[str],
    *,
    days: int,
    added_gpus: float = 0.0,
    pause: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return a row with the dimensions and `COLUMNS`; unknown values are `None`.

    `added_gpus` changes the number of GPUs with which the demand is compared. `pause` is called
    between steps, and may raise to end the work.
    """
    found: dict[str, Any] = dict.fromkeys((*dimensions, *COLUMNS))
    found |= dict(zip(dimensions, demand.key, strict=True))
    series = [sum(each) for each in zip(demand.allocated, demand.waiting, strict=True)]
    hours, known = len(series), sum(demand.known)
    gpus = max(0.0, demand.gpus + added_gpus)
    found |= {
        "history_days": known // DAY,
        "gpus": round(gpus, 2),
        "demand": round(fmean(series[-DAY:]), 2),
        "waiting": round(fmean(demand.waiting[-DAY:]), 2),
        "horizon_days": days,
        "filled_hours": demand.filled_hours,
        "unknown_gpu_hours": round(demand.unknown_hours, 2),
    }
    needed = hours_needed(days * DAY)
    notes = []
    if demand.gpus + added_gpus < 0:
        present = f"{round(demand.gpus, 2):.12g}"
        notes.append(f"only {present} GPUs, fewer than the {-added_gpus:g} to remove")
    if known < needed:
        notes.append(f"too short a history; {-(-needed // DAY)} days are needed")
    if demand.filled_hours:
        notes.append(
            f"{counted(demand.filled_hours, 'hour')} in which over 10 % of the GPUs had no samples"
        )
    if unknown := hours - known - demand.filled_hours:
        notes.append(f"{counted(unknown, 'hour')} of unknown allocation")
    if known >= needed:
        made = forecast(series, days * DAY, known=demand.known, pause=pause)
        found |= _of_forecast(made, gpus)
        if not found["low_80"] <= found["expected"] <= found["high_80"]:
            notes.append("past forecasts were too low or too high; rely on the band")
        if (covered := made.bands[0].measured) < _RELIABLE_COVERAGE:
            notes.append(
                f"the band may be too narrow: past bands contained {100 * covered:.0f} % of hours"
            )
    found["note"] = "; ".join(notes) or None
    return found


def _of_forecast(made: Forecast, gpus: float) -> dict[str, Any]:
    narrow, wide = made.bands
    # Allocations cannot exceed the GPUs, so a group without waiting pods is full if all are
    # allocated.
    crossings = made.hours_until_above(gpus - _FULL_TOLERANCE_GPUS, _QUANTILES)
    return {
        "expected": _mean_of_end(made.expected),
        "low_80": _mean_of_end(narrow.low),
        "high_80": _mean_of_end(narrow.high),
        "low_95": _mean_of_end(wide.low),
        "high_95": _mean_of_end(wide.high),
        **{
            f"full_days_p{quantile * 100:.0f}": None if hours is None else round(hours / DAY, 1)
            for quantile, hours in zip(_QUANTILES, crossings, strict=True)
        },
        "method": made.method,
        "error": round(made.error, 2),
        "naive_error": round(made.naive_error, 2),
        "coverage_80": round(narrow.measured, 3),
        "coverage_95": round(wide.measured, 3),
    }


def _mean_of_end(hours: Sequence[float]) -> float:
    """Return the mean of the last week, or of all hours of a shorter series."""
    return round(fmean(hours[-WEEK:]), 2)


def parse_added(text: str, name: str) -> list[tuple[str, str, float]]:
    """Return numbers of GPUs, each with the dimension and value of its row, or with empty texts."""
    found = []
    for item in split_items(text):
        row, _, amounts = item.rpartition(":")
        key, equals, value = row.partition("=")
        try:
            first, *others = map(float, amounts.split(","))
        except ValueError:
            first, others = math.nan, []
        if not all(map(math.isfinite, (first, *others))) or (row and not equals):
            problem = f"invalid value {shorten(item, 40)!r}; give a number, or KEY=VALUE:NUMBER"
            raise ArgumentError(name, problem)
        found += [(key.strip(), value, first), *(("", "", gpus) for gpus in others)]
    return found


def find_added(
    by: Sequence[str], keys: Sequence[Key], parsed: Sequence[tuple[str, str, float]]
) -> Mapping[Key, float]:
    """Return the GPUs to add to each group. Raises `ArgumentError` unless each names one group."""
    added = defaultdict[Key, float](float)
    for name, value, gpus in parsed if keys else ():
        if name and name not in by:
            raise ArgumentError("added", f"rows have no {shorten(name, 40)}; add it to `by`")
        named = [key for key in keys if not name or (key[by.index(name)] or "") == value]
        if len(named) != 1:
            raise ArgumentError(
                "added",
                f"{gpus:g} GPUs match {len(named)} of {len(keys)} rows; select one row by `where`,"
                f" or give KEY=VALUE:{gpus:g} with a value that only one row has",
            )
        added[named[0]] += gpus
    return added


def default_days(groups: Sequence[Demand]) -> int:
    """Return the longest default horizon for which one group has enough history, or the shortest.

    All groups have the same horizon, so that their demands can be added.
    """
    known = max((sum(group.known) for group in groups), default=0)
    return next((days for days in _DAYS if hours_needed(days * DAY) <= known), _DAYS[-1])


def _read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
    by, window = question.by, question.window
    is_included = question.options["waiting"] == _INCLUDED
    jobs = question.options["slurm_jobs"] or ()
    waiting = read_waiting(connection, by, window=window, jobs=jobs) if is_included else {}
    too_large = [*notes_on_too_large(connection)] if is_included else []
    found = read_demand(connection, by, window=window, waiting=waiting)
    groups = [
        group
        for group in found
        if question.selects(dict(zip(by, group.key, strict=True)))
        and any((group.gpus, *group.allocated[-DAY:], *group.waiting[-DAY:]))
    ]
    days = question.options["horizon"] or default_days(groups)
    added = find_added(by, [group.key for group in groups], question.options["added"] or ())
    rows = [
        find_outlook(
            group,
            by,
            days=days,
            added_gpus=added.get(group.key, 0.0),
            pause=partial(question.advance, 0),
        )
        for group in question.each(groups)
    ]
    rows.sort(key=_rank)
    if not is_included:
        rows = [{**row, "waiting": None} for row in rows]
    unplaced = sum(
        sum(waiting[key].values()) for key in waiting.keys() - {group.key for group in found}
    )
    is_found = any(row["method"] for row in rows)
    notes = []
    if is_found and question.options["horizon"] is None:
        notes.append(
            f"Horizon: {days} days, the longest of 28, 14 and 7 days that the history allows."
        )
    if unplaced:
        notes.append(
            f"{unplaced:.0f} GPU-hours of waiting pods are not in any row, because it is unknown"
            " which GPUs they would get."
        )
    notes += [f"{note} Demand does not include them." for note in too_large]
    return Answer(rows=rows, notes=notes, is_found=is_found)


def _rank(row: Row) -> tuple[Any, ...]:
    """Return the sort key of rows: those full first, then those full later, then unknown ones."""
    full = [math.inf if row[name] is None else row[name] for name in _RANKED]
    return (row["method"] is None, *full, -row["gpus"])


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if name.startswith("full_days_") and row["method"] and value is None:
        return f"> {row['horizon_days']}"
    if name == "coverage_80" and value is not None:
        return f"{100 * value:.0f} %"
    return plain_cell(name, row)


REPORT: Final = Report(
    name="forecast",
    summary="Forecast the demand for GPUs, and when all GPUs will be allocated.",
    about=(
        "`Demand` is the mean number of GPUs in the last day that were allocated to pods and jobs,"
        " or for which pods waited; `Waiting` is the second part. Pods that wait due to a quota or"
        " a scheduling gate are demand, too. A pod that waited counts toward the GPUs that it got"
        " later. Without a node, it counts toward the GPUs that most pods of its workload,"
        " namespace or cluster got. Pods that request more GPUs than any node has are excluded."
        " Each group of GPUs is forecast by the method that was most accurate in its past."
        " `weekly_profile` is the median week, adjusted to the last day; `weekly_trend` adds the"
        " trend of eight weeks; `seasonal_naive` is the last week. Expected demand and bands are"
        " means over the last seven days of the horizon. `Full in days` is when demand reaches the"
        " number of GPUs in the last day: for P10, one in ten possible futures is full by then."
        " The group that is full first comes first."
        " `Error` is the mean absolute error of past forecasts in GPUs, and `Coverage` the share of"
        " hours in past 80 % bands, in the same seven days. Groups with neither GPUs nor demand in"
        " the last day are omitted."
    ),
    examples={
        "The next weeks, by model": "",
        "The next quarter, by cluster and node pool": "--by cluster,pool --horizon 90d",
        "If others take 64 GPUs of a pool": "--where pool=h100 --added -64",
    },
    columns=COLUMNS,
    droppable=(
        "method",
        "waiting",
        "coverage_80",
        "error",
        "demand",
        "note",
    ),
    texts=frozenset({"method", "note"}),
    counts=frozenset({"history_days", "horizon_days", "filled_hours"}),
    dimensions=GPU_DIMENSIONS,
    default_by="model",
    default_window=None,
    options={
        "horizon": Option(
            help="Horizon, by default 28d, 14d or 7d. The history must be three times as long and"
            " at least 27 days longer. Duration: 7d or 2w.",
            parse=whole(maximum=366),
        ),
        "added": Option(
            help="GPUs to add before the comparison with demand, such as 64, or -64 if others use"
            " them. With several rows: pool=training:64, separated by commas.",
            parse=parse_added,
            may_be_negative=True,
            is_list=True,
        ),
        "waiting": Option(
            help="Whether demand includes GPUs for which pods wait: included or excluded.",
            default=_INCLUDED,
            parse=one_of(_INCLUDED, "excluded"),
        ),
        "slurm_jobs": SLURM_JOBS,
    },
    codes=("at least one group is forecast", "no group has enough history"),
    cell=_cell,
    read=_read,
)
