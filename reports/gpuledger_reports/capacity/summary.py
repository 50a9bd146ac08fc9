"""The report `summary`: headlines of the other reports, and the most valuable actions.

The summary runs each other report once, with the report's defaults. A headline is the sum or the
minimum of a column, or its value in the most important row. An action is a row of a report, with
the money that the action would have saved in the time range, or the value of the GPUs that waiting
pods could have used.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

import duckdb

from gpuledger.store.query import quoted_name
from gpuledger.time_ranges import write_duration
from gpuledger_reports.capacity.report import (
    GPU_DIMENSIONS,
    Answer,
    Key,
    Question,
    Report,
    Row,
    plain_cell,
)
from gpuledger_reports.pricing.money import minor_digits
from gpuledger_reports.pricing.policy_file import days_of_change
from gpuledger_reports.pricing.rates import DeviceTraits, PriceBook
from gpuledger_reports.reading.times import HOUR_US, Window, day_of, days_in

_TEMPORARY: Final = "SELECT table_name FROM duckdb_tables() WHERE temporary"
_SHOWN_ACTIONS: Final = 3
_PLACE: Final = ("pool", "node", "namespace", "workload")
_WHOLE_FROM: Final = 100
"""Larger numbers are shown without decimals."""
_MONEY: Final = "money"
"""A placeholder for the currency of the prices."""


Known = Sequence[tuple[Any, Row]]
"""The rows of a report with a value in a column, with the value."""


def _first(amounts: Iterable[Any]) -> Any:  # noqa: ANN401  # as the amounts
    """Return the value of the most important row."""
    return next(iter(amounts))


def _largest(known: Known, names: Sequence[str]) -> str | None:
    amount, row = max(known, key=itemgetter(0))
    return f"{_number(amount)} in {_place(row, names)}" if amount else None


def _horizon(known: Known, _: Sequence[str]) -> str:
    gpus = sum(row["gpus"] for _, row in known)
    return f"in {known[0][1]['horizon_days']} days; GPUs: {_number(gpus)}"


def _idle(_: Known, __: Sequence[str]) -> str:
    return "__idle__ on the bill, without cordoned GPUs"


def _by_fewer(known: Known, _: Sequence[str]) -> str | None:
    saved = sum(row["saved_by_fewer_cost"] or 0.0 for _, row in known)
    return f"{_number(saved)} of it from GPUs that are never used" if saved else None


def _of_instances(row: Row) -> str:
    """Return which part of the saving depends on the use of a partitioned GPU's other parts."""
    if row["recommended_mig_profile"] is None:
        return ""
    fewer = row["saved_by_fewer_cost"]
    part = f"{_number(fewer)} of it from GPUs that are never used, the rest " if fewer else ""
    return f"; {part}only if other pods use the other MIG instances"


def _place(row: Row, names: Sequence[str]) -> str:
    return ", ".join(str(row[name]) for name in names if row[name])


class Headline(NamedTuple):
    """A number that is derived from a column of a report."""

    column: str
    text: str
    unit: str = "GPUs"
    of: Callable[[Iterable[Any]], Any] = sum
    """Derives the number from the known values of the column: `sum`, `min` or `_first`."""
    unknown: str = "unknown"
    """The note if no row has a value."""
    within: tuple[str, str] | None = None
    """Columns with the band outside which a value is not reliable, and left out."""
    is_optional: bool = False
    """Whether a missing value counts as 0 instead of unknown."""
    about: Callable[[Known, Sequence[str]], str | None] | None = None
    """Returns the note on a sum, given the names of the rows' dimensions."""


HEADLINES: Final[Mapping[str, tuple[Headline, ...]]] = {
    "fleet": (
        Headline("total", "GPUs"),
        Headline("healthy", "Healthy"),
        Headline("allocated", "Allocated"),
        Headline("used", "Used"),
        Headline("mean_allocated", "Allocated, mean"),
        Headline("mean_used", "Used, mean"),
        Headline("mean_free", "Cost of free GPUs", _MONEY, about=_idle),
    ),
    "waste": (
        Headline("unused_gpu_hours", "Allocated and unused", "GPU-hours"),
        Headline("unused_cost", "Cost of unused time", _MONEY),
        Headline("reclaimed_60_cost", "Cost after 60 idle minutes", _MONEY),
    ),
    "rightsizing": (
        Headline(
            "saved_cost",
            "Saved by smaller or fewer GPUs",
            _MONEY,
            is_optional=True,
            about=_by_fewer,
        ),
    ),
    "fragmentation": (Headline("stranded_gpus", "Stranded, mean"),),
    "queue": (
        Headline("waiting", "Waiting now", "pods"),
        Headline("waiting_gpus", "GPUs that they request"),
        Headline("unmet_gpus", "Unmet demand, mean", about=_largest),
        Headline("wait_p95_seconds", "p95 of waits, largest unmet demand", "seconds", _first),
    ),
    "forecast": (
        Headline(
            "expected",
            "Expected demand",
            unknown="unknown or unreliable",
            within=("low_80", "high_80"),
            about=_horizon,
        ),
        Headline("full_days_p50", "First group full, P50", "days", min, "not within the horizon"),
    ),
    "faults": (
        Headline("failures", "Failures", "failures"),
        Headline("lost_gpu_hours", "Lost to failures and cordons", "GPU-hours"),
        Headline("interrupted_gpu_hours", "Interrupted by failures", "GPU-hours"),
    ),
}
"""The headlines by report."""
PRICE_DIMENSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "fleet": tuple(GPU_DIMENSIONS),
    "fragmentation": ("cluster", "pool", "model"),
    "faults": ("cluster", "pool", "model", "node"),
}
"""The dimensions that determine the prices of a report that has no costs."""


class Advice(NamedTuple):
    """How a row of a report becomes an action."""

    action: str
    """A template with columns of the row and `place`, such as a workload or node."""
    evidence: str
    value: tuple[str, ...]
    """Columns whose sum is the value: `…_cost`, `…_gpu_hours`, or a mean number of GPUs."""
    reason: str | None = None
    """A column that has a value only if the row recommends the action."""
    at_most: str | None = None
    """A column that limits the value."""
    condition: Callable[[Row], str] = lambda _: ""
    """Returns a note on the value of a row."""
    is_always_shown: bool = False
    """Whether the action is shown in addition to those with the highest value."""


ADVICE: Final[Mapping[str, Advice]] = {
    "waste": Advice(
        "Stop {place} when it is idle",
        "{reclaimed_60_gpu_hours:,.0f} GPU-hours after 60 idle minutes; idle for up to"
        " {longest_idle_hours:,.0f} hours",
        value=("reclaimed_60_cost",),
    ),
    "rightsizing": Advice(
        "Give {place} {recommendation}",
        "{saved_gpu_hours:,.0f} GPU-hours less; risk: {risk}",
        value=("saved_cost",),
        reason="recommendation",
        condition=_of_instances,
    ),
    "fragmentation": Advice(
        "Pack the pods of {place}",
        "usable capacity, not savings: {stranded_gpus:,.1f} GPUs are stranded, and pods wait"
        " for {unmet_gpus:,.1f}; {advice}",
        value=("stranded_gpus",),
        reason="advice",
        at_most="unmet_gpus",
    ),
    "faults": Advice(
        "Repair {place}",
        "up to this value, if interrupted runs lost all their work; {note}",
        value=("lost_gpu_hours", "interrupted_gpu_hours"),
        reason="note",
        is_always_shown=True,
    ),
}
"""The advice by report. Other reports recommend no actions."""
_COLUMNS: Final[Mapping[str, str]] = {
    "report": "Report",
    "headline": "Headline",
    "value": "Value",
    "unit": "Unit",
    "about": "About",
    "column": "",
    "action": "",
}


class _Action(NamedTuple):
    value: float
    """In money."""
    place: tuple[Any, ...]
    """Each place is listed once, with its best action."""
    row: Row
    is_always_shown: bool


def summary_of(reports: Iterable[Report]) -> Report:
    """Return the report that summarizes other reports."""
    summarized = tuple(reports)
    return Report(
        name="summary",
        summary="Show headlines of all reports, the most valuable actions, and nodes to repair.",
        about=(
            "Now is the last hour of the time range. Means and sums cover the whole time range; the"
            " forecast uses all complete usage. The three actions with the highest value are shown,"
            " one for each workload, pool or node, and repairs of all nodes that fail significantly"
            " more often than others. Most values estimate the saving in the time range. Packing"
            " does not cut cost; its value is the price of the GPUs that waiting pods could have"
            " used. The value of a repair is an upper bound. GPUs without a price have no value."
            " Run the report in the first column to see all rows, and notes on missing data."
        ),
        examples={"The last 30 days": "--prices prices.yaml"},
        columns=_COLUMNS,
        texts=frozenset({"report", "headline", "unit", "about", "column"}),
        counts=frozenset({"action"}),
        dimensions={},
        default_by="",
        has_money=True,
        codes=("at least one report found something", "no report found anything"),
        cell=_cell,
        read=lambda connection, question: _read(summarized, connection, question),
    )


def _read(
    reports: Sequence[Report], connection: duckdb.DuckDBPyConnection, question: Question
) -> Answer:
    book, currency = PriceBook(question.policy), question.policy.currency
    changes = days_of_change(question.policy)
    headlines: list[Row] = []
    actions: list[_Action] = []
    for report in question.each(reports):
        advice = ADVICE.get(report.name)
        asked = report.default_question(question, by=PRICE_DIMENSIONS.get(report.name, ()))
        worth: Callable[[Row, str], float | None] = partial(_worth, book, asked.window)
        found = report.read(connection, asked)
        if report.name == "fleet" and changes.intersection(_days(asked.window)):
            daily = replace(asked, options={**asked.options, "history": "day"})
            worth = _cost_by_days(book, daily, report.read(connection, daily).rows)
        _drop_tables(connection)
        headlines += _headlines(report, found, currency, worth)
        if advice:
            actions += _actions(report.name, advice, found.rows, currency, worth)
    best: dict[tuple[Any, ...], _Action] = {}
    for action in sorted(actions, key=lambda each: -each.value):
        best.setdefault(action.place, action)
    others = [action for action in best.values() if not action.is_always_shown][:_SHOWN_ACTIONS]
    shown = [action.row for action in best.values() if action.is_always_shown or action in others]
    chosen = [
        {**row, "action": number, "headline": f"{number}. {row['headline']}"}
        for number, row in enumerate(shown, start=1)
    ]
    notes = [] if chosen else ["No report recommends an action that has a value."]
    # Only reports that found something have columns.
    is_found = any(row["column"] for row in headlines)
    return Answer(rows=[*headlines, *chosen], notes=notes, is_found=is_found)


def _drop_tables(connection: duckdb.DuckDBPyConnection) -> None:
    """Drop the temporary tables of a report, to free their memory for the next one."""
    for (name,) in connection.execute(_TEMPORARY).fetchall():
        connection.execute(f"DROP TABLE {quoted_name(name)}")


def _worth(book: PriceBook, window: Window, row: Row, name: str) -> float | None:
    """Return the value of an amount of GPUs or GPU-hours, at the mean price in the window.

    It is `None` if the amount is unknown, or if the GPUs have no price on one of the days.
    """
    amount: float | None = row[name]
    if not amount or name.endswith("_cost"):
        return amount
    gpu = DeviceTraits(
        row.get("cluster", ""),
        row.get("node", ""),
        row.get("model"),
        node_pool=row.get("pool"),
        instance_type=row.get("instance_type"),
        zone=row.get("zone"),
        capacity_type=row.get("capacity_type"),
    )
    rates = [(day, book.rate_of(gpu, day_of(day.begin_us))) for day in days_in(window)]
    if any(rate.price is None for _, rate in rates):
        return None
    of_window = sum(rate.per_gpu_hour * (day.end_us - day.begin_us) for day, rate in rates)
    length_us = window.end_us - window.begin_us if name.endswith("_gpu_hours") else HOUR_US
    return float(amount) * float(of_window / length_us)


def _days(window: Window) -> dict[date, Window]:
    return {day_of(day.begin_us): day for day in days_in(window)}


def _cost_by_days(
    book: PriceBook, asked: Question, rows: Iterable[Row]
) -> Callable[[Row, str], float | None]:
    """Return a function for the cost of a group's free GPUs, with the prices of each day.

    `rows` is the history of days. The cost is `None` if the GPUs have no price on one of them.
    """
    days = {str(day): window for day, window in _days(asked.window).items()}
    costs = defaultdict[Key, list[float | None]](list)
    for row in rows:
        if row["free"] is not None:
            key = tuple(row[name] for name in asked.by)
            costs[key].append(_worth(book, days[row["day"]], row, "free"))

    def cost(row: Row, name: str) -> float | None:
        found = costs[tuple(row[name] for name in asked.by)]
        known = [each for each in found if each is not None]
        return sum(known) if row[name] is not None and len(known) == len(found) else None

    return cost


def _headlines(
    report: Report, found: Answer, currency: str, worth: Callable[[Row, str], float | None]
) -> Iterator[Row]:
    nothing = dict.fromkeys(_COLUMNS) | {"report": report.name}
    if not (found.rows and found.is_found):
        yield nothing | {"headline": report.codes[1]}
        return
    names = report.default_by.split(",")
    for headline in HEADLINES.get(report.name, ()):
        known = _known(headline, found.rows, worth)
        value = round(headline.of(amount for amount, _ in known), 2) if known else None
        yield nothing | {
            "headline": headline.text,
            "value": value,
            "unit": currency if headline.unit == _MONEY else headline.unit,
            "about": _about(headline, known, len(found.rows), names),
            "column": headline.column,
        }


def _known(
    headline: Headline, rows: Iterable[Row], worth: Callable[[Row, str], float | None]
) -> Known:
    """Return the rows with a reliable value in a headline's column, with the value."""
    read = worth if headline.unit == _MONEY else dict.__getitem__
    found = [(read(row, headline.column), row) for row in rows]
    found = [(amount, row) for amount, row in found if amount is not None]
    if headline.within is None:
        return found
    low, high = headline.within
    return [(amount, row) for amount, row in found if row[low] <= amount <= row[high]]


def _about(headline: Headline, known: Known, count: int, names: Sequence[str]) -> str | None:
    """Return the note on a headline: the row that it shows, or how its sum is composed.

    `count` is the number of all rows, and `names` are those of their dimensions.
    """
    if not known:
        return headline.unknown
    if headline.of is not sum:
        value = headline.of(amount for amount, _ in known)
        return _place(next(row for amount, row in known if amount == value), names)
    notes = [headline.about and headline.about(known, names)]
    if (rest := count - len(known)) and not headline.is_optional:
        notes += [f"{headline.unknown} for {rest} of {count} rows, which are left out"]
    return "; ".join(filter(None, notes)) or None


def _actions(
    report: str,
    advice: Advice,
    rows: Iterable[Row],
    currency: str,
    worth: Callable[[Row, str], float | None],
) -> Iterator[_Action]:
    digits = minor_digits(currency)
    for row in rows:
        if advice.reason and row[advice.reason] is None:
            continue
        value = sum(worth(row, name) or 0.0 for name in advice.value)
        if advice.at_most:
            value = min(value, worth(row, advice.at_most) or 0.0)
        if round(value, digits) > 0 or advice.is_always_shown:
            place = [row[name] for name in _PLACE if row.get(name)]
            named = row | {"place": "/".join(place)}
            yield _Action(
                value,
                (row.get("cluster"), *place),
                {
                    "report": report,
                    "headline": advice.action.format_map(named),
                    "value": round(value, digits) or None,
                    "unit": currency,
                    "about": advice.evidence.format_map(named) + advice.condition(row),
                    "column": None,
                },
                advice.is_always_shown,
            )


def _cell(name: str, row: Mapping[str, Any]) -> str:
    value = row["value"]
    if row["unit"] == "seconds" and value is not None:
        row = {**row, "value": write_duration(round(value * 1000)), "unit": None}
    elif name == "value" and value is not None:
        return _number(value)
    return plain_cell(name, row)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= _WHOLE_FROM else f"{value:.3g}"
