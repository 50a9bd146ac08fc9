"""The summary: its headlines are numbers of the other reports, its actions their best rows."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal

import duckdb
import pytest

from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import (
    GPU_DIMENSIONS,
    Answer,
    Option,
    Question,
    Report,
    Row,
    whole,
)
from gpuledger_reports.capacity.summary import ADVICE, HEADLINES, PRICE_DIMENSIONS, summary_of
from gpuledger_reports.pricing.policy import BillPolicy, Price
from gpuledger_reports.reading.times import HOUR_US, Window
from tests.tables import for_each

WINDOW = Window(0, 100 * HOUR_US)
COMPLETE = Window(-500 * HOUR_US, 100 * HOUR_US)
POLICY = BillPolicy(currency="EUR", prices=[Price(name="h100", per_gpu_hour=Decimal(2))])


def report(name: str, rows: Sequence[Row], *, asked: list[Question] | None = None) -> Report:
    """Return a report with these rows, whose missing columns are unknown."""
    of_name = {headline.column for headline in HEADLINES.get(name, ())}
    columns = dict.fromkeys([*of_name, *(column for row in rows for column in row)], "")

    def read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
        if asked is not None:
            asked.append(question)
        # No report finds the tables of another.
        connection.execute("CREATE TEMP TABLE parties AS SELECT 1")
        return Answer(rows=[dict.fromkeys(columns) | row for row in rows])

    return Report(
        name=name,
        summary="",
        examples={},
        columns=columns,
        dimensions={},
        default_by="namespace,workload",
        default_window=None if name == "forecast" else "30d",
        options={"horizon": Option(help="", default="28d", parse=whole())},
        codes=("found", "nothing was lost"),
        read=read,
    )


def summary(*reports: Report, policy: BillPolicy = POLICY) -> Answer:
    question = Question(window=WINDOW, by=(), policy=policy, complete=COMPLETE)
    with duckdb.connect() as connection:
        return summary_of(reports).read(connection, question)


def workload(name: str, cost: float) -> Row:
    """Return a row of waste."""
    return {
        "cluster": "prod",
        "namespace": "ns",
        "workload": name,
        "reclaimed_60_cost": cost,
        "reclaimed_60_gpu_hours": cost / 2,
        "longest_idle_hours": 12.0,
    }


def test_headlines_are_sums_with_the_largest_part_or_the_most_important_group_by_name() -> None:
    rows: list[Row] = [
        {"namespace": "b", "workload": None, "waiting": 3, "unmet_gpus": 9.876},
        {"namespace": "a", "workload": "x", "waiting": 2, "unmet_gpus": 0.3},
        {"namespace": "c", "workload": "z", "waiting": 0, "unmet_gpus": None},
    ]
    waits = (3600.0, 7200.0, 60.0)
    with_waits = [row | {"wait_p95_seconds": p95} for row, p95 in zip(rows, waits, strict=True)]
    found = {row["column"]: row for row in summary(report("queue", with_waits)).rows}
    assert (found["waiting"]["value"], found["waiting"]["about"]) == (5, None)
    # The group with the largest unmet demand is first, and has no longest p95.
    assert (found["wait_p95_seconds"]["value"], found["wait_p95_seconds"]["about"]) == (3600, "b")
    assert (found["unmet_gpus"]["value"], found["unmet_gpus"]["about"]) == (
        10.18,
        "9.88 in b; unknown for 1 of 3 rows, which are left out",
    )
    # No row has this column, so it is unknown and not 0.
    assert (found["waiting_gpus"]["value"], found["waiting_gpus"]["about"]) == (None, "unknown")
    (nothing,) = [
        row
        for row in summary(report("queue", [rows[0] | {"unmet_gpus": 0.0}])).rows
        if row["column"] == "unmet_gpus"
    ]
    assert (nothing["value"], nothing["about"]) == (0, None)


def test_a_sum_states_how_many_rows_it_leaves_out() -> None:
    rows: list[Row] = [{"model": "L4", "stranded_gpus": 1.0}, *[{"model": "H100"}] * 2]
    rows = [{"advice": None} | row for row in rows]
    (found,) = summary(report("fragmentation", rows)).rows
    assert (found["value"], found["about"]) == (1.0, "unknown for 2 of 3 rows, which are left out")


def test_expected_demand_outside_its_band_is_left_out() -> None:
    rows: list[Row] = [
        {"expected": 1.0, "low_80": 0.5, "high_80": 1.0},
        {"expected": 5.0, "low_80": 1.0, "high_80": 4.0},
        {"expected": None, "low_80": None, "high_80": None},
    ]
    rows = [{"gpus": 45.0, "horizon_days": 14} | row for row in rows]
    known = "in 14 days; GPUs: 45"
    for of_rows, expected in (
        (rows[:1], (1.0, known)),
        (rows, (1.0, f"{known}; unknown or unreliable for 2 of 3 rows, which are left out")),
        (rows[1:], (None, "unknown or unreliable")),
    ):
        found = {row["column"]: row for row in summary(report("forecast", of_rows)).rows}
        assert (found["expected"]["value"], found["expected"]["about"]) == expected


def changed(name: str, cost: float, *, fewer: float | None = None, mig: str | None = None) -> Row:
    """Return a row of rightsizing."""
    return {
        "workload": name,
        "recommendation": f"1 x {mig or 'L4'}",
        "recommended_mig_profile": mig,
        "saved_gpu_hours": 1.0,
        "saved_cost": cost,
        "saved_by_fewer_cost": fewer,
        "risk": "low",
    }


def test_a_workload_without_a_recommendation_saves_nothing() -> None:
    rows = [changed("a", 2.0), {"workload": "b", "recommendation": None, "saved_cost": None}]
    found, *_ = summary(report("rightsizing", rows)).rows
    assert (found["value"], found["about"]) == (2.0, None)


def test_the_saving_by_an_instance_depends_on_the_use_of_the_others() -> None:
    rows = [
        changed("both", 3826.0, fewer=2232.0, mig="2g.20gb"),
        changed("smaller", 300.0, mig="1g.10gb"),
        changed("fewer", 40.0, fewer=40.0),
    ]
    found, *actions = summary(report("rightsizing", rows)).rows
    assert (found["value"], found["about"]) == (
        4166.0,
        "2,272 of it from GPUs that are never used",
    )
    condition = "only if other pods use the other MIG instances"
    assert [row["about"].removeprefix("1 GPU-hours less; risk: low") for row in actions] == [
        f"; 2,232 of it from GPUs that are never used, the rest {condition}",
        f"; {condition}",
        "",
    ]


def test_a_report_that_found_nothing_has_one_headline_that_says_so() -> None:
    found = summary(report("faults", []))
    (row,) = found.rows
    assert (row["report"], row["headline"], row["value"]) == ("faults", "nothing was lost", None)
    assert not found.is_found
    assert summary(report("faults", []), report("waste", [workload("a", 1.0)])).is_found


def test_each_report_is_asked_with_its_defaults_and_the_forecast_on_all_usage() -> None:
    asked: list[Question] = []
    summary(*(report(name, [], asked=asked) for name in ("waste", "forecast")))
    waste, forecast = asked
    assert (waste.window, forecast.window) == (WINDOW, COMPLETE)
    assert (waste.by, waste.top, waste.options) == (
        ("namespace", "workload"),
        None,
        {"horizon": 28},
    )


def test_the_three_actions_worth_most_are_ranked_and_each_place_has_one() -> None:
    waste = [workload("d", 4.0), workload("a", 9.0), workload("b", 8.0), workload("c", 7.0)]
    waste += [workload("a", 1.0), workload("none", 0.0)]
    actions = [row for row in summary(report("waste", waste)).rows if row["action"]]
    assert [(row["headline"], row["value"], row["unit"]) for row in actions] == [
        ("1. Stop ns/a when it is idle", 9.0, "EUR"),
        ("2. Stop ns/b when it is idle", 8.0, "EUR"),
        ("3. Stop ns/c when it is idle", 7.0, "EUR"),
    ]
    assert actions[0]["about"] == "4 GPU-hours after 60 idle minutes; idle for up to 12 hours"


@for_each(
    "name, row, worth",
    [
        # 3 GPUs for 100 hours at 2 EUR.
        ("fragmentation", {"stranded_gpus": 3.0, "unmet_gpus": 4.0, "advice": "pack"}, 600.0),
        # Pods wait for fewer GPUs than are stranded, or for none.
        ("fragmentation", {"stranded_gpus": 3.0, "unmet_gpus": 1.0, "advice": "pack"}, 200.0),
        ("fragmentation", {"stranded_gpus": 3.0, "unmet_gpus": 0.0, "advice": "pack"}, None),
        ("fragmentation", {"stranded_gpus": 0.5, "unmet_gpus": 4.0, "advice": None}, None),
        ("faults", {"lost_gpu_hours": 4.0, "interrupted_gpu_hours": 6.0, "note": "worse"}, 20.0),
        ("faults", {"lost_gpu_hours": 4.0, "interrupted_gpu_hours": 6.0, "note": None}, None),
    ],
)
def test_hours_are_worth_the_price_of_their_gpus(name: str, row: Row, worth: float | None) -> None:
    place = {"cluster": "prod", "pool": "h100", "model": "H100", "node": "n"}
    found = summary(report(name, [place | row]))
    assert [row["value"] for row in found.rows if row["action"]] == ([worth] if worth else [])
    assert bool(found.notes) == (worth is None)


def test_the_evidence_of_packing_has_rounded_gpus() -> None:
    place: Row = {"cluster": "prod", "pool": "h100", "model": "H100"}
    row = place | {"stranded_gpus": 2.67907, "unmet_gpus": 1.78537, "advice": "pack"}
    about = summary(report("fragmentation", [row])).rows[-1]["about"]
    assert about.endswith("2.7 GPUs are stranded, and pods wait for 1.8; pack")


def test_the_price_is_the_mean_over_the_window() -> None:
    """The window has 24 hours in each of the first four days, and 4 in the fifth."""
    prices = [
        Price(name="new", per_gpu_hour=Decimal(1), since=date(1970, 1, 5)),
        Price(name="old", per_gpu_hour=Decimal(2)),
    ]
    place = {"cluster": "prod", "pool": "h100", "model": "H100", "node": "n", "note": "worse"}
    row = place | {"lost_gpu_hours": 4.0, "interrupted_gpu_hours": 6.0}
    found = summary(report("faults", [row]), policy=BillPolicy(currency="EUR", prices=prices))
    (value,) = [row["value"] for row in found.rows if row["action"]]
    assert value == pytest.approx(10 * (96 * 2 + 4 * 1) / 100)


def test_free_gpus_cost_their_price_and_hours() -> None:
    rows: list[Row] = [
        {"cluster": "prod", "pool": "p", "model": "H100", "mean_free": 1.5},
        {"cluster": "prod", "pool": "q", "model": "H100", "mean_free": None},
    ]
    found = {row["column"]: row for row in summary(report("fleet", rows)).rows}
    assert (found["mean_free"]["value"], found["mean_free"]["unit"]) == (300, "EUR")


def test_free_gpus_cost_the_price_of_each_day_as_on_bills() -> None:
    """The first four days of the window are whole; the price changes after the second one."""
    prices = [
        Price(name="new", per_gpu_hour=Decimal(1), since=date(1970, 1, 3)),
        Price(name="old", per_gpu_hour=Decimal(2)),
    ]
    place = dict.fromkeys(GPU_DIMENSIONS) | {"cluster": "prod", "model": "H100"}
    free = {"1970-01-01": 4.0, "1970-01-02": 0.0, "1970-01-03": None, "1970-01-05": 3.0}
    days: list[Row] = [{**place, "day": day, "free": gpus} for day, gpus in free.items()]
    mean = report("fleet", [place | {"mean_free": 1.08}])

    def read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
        by_day = question.options.get("history") == "day"
        return Answer(rows=days) if by_day else mean.read(connection, question)

    found = summary(replace(mean, read=read), policy=BillPolicy(currency="EUR", prices=prices))
    (row,) = [row for row in found.rows if row["column"] == "mean_free"]
    assert row["value"] == 4 * 24 * 2 + 3 * 4 * 1


BILL = "__idle__ on the bill, without cordoned GPUs"


def test_free_gpus_without_a_price_are_unknown_and_not_free_of_charge() -> None:
    prices = [Price(name="h100", per_gpu_hour=Decimal(2), model="H100")]
    policy = BillPolicy(currency="EUR", prices=prices)
    place: Row = {"cluster": "prod", "pool": "p"}
    l4, h100 = (place | {"model": model, "mean_free": 1.5} for model in ("L4", "H100"))
    for rows, value, about in (
        ([l4, h100], 300, f"{BILL}; unknown for 1 of 2 rows, which are left out"),
        ([l4], None, "unknown"),
    ):
        found = {row["column"]: row for row in summary(report("fleet", rows), policy=policy).rows}
        assert (found["mean_free"]["value"], found["mean_free"]["about"]) == (value, about)


def test_faulty_nodes_are_shown_in_addition_to_the_three_actions_worth_most() -> None:
    waste = [workload("a", 900.0), *(workload(name, 9.0) for name in "bcd")]
    place: Row = {"cluster": "prod", "pool": "h100", "model": "H100", "note": "worse"}
    faults = [
        place | {"node": "slow", "lost_gpu_hours": 4.0, "interrupted_gpu_hours": 6.0},
        place | {"node": "free", "lost_gpu_hours": 0.0, "interrupted_gpu_hours": 0.0},
    ]
    found = summary(report("waste", waste), report("faults", faults))
    actions = [(row["headline"], row["value"]) for row in found.rows if row["action"]]
    assert found.rows[-1]["about"].startswith("up to this value")
    assert actions[1:] == [
        ("2. Repair h100/slow", 20.0),
        ("3. Stop ns/b when it is idle", 9.0),
        ("4. Stop ns/c when it is idle", 9.0),
        ("5. Repair h100/free", None),
    ]


def test_without_prices_there_is_no_action() -> None:
    place: Row = {"cluster": "prod", "pool": "p", "model": "L4"}
    row = place | {"stranded_gpus": 3.0, "unmet_gpus": 4.0, "advice": "pack"}
    assert summary(report("fragmentation", [row]), policy=BillPolicy()).notes == [
        "No report recommends an action that has a value."
    ]


@pytest.mark.parametrize("name", [name for name in REPORTS if name != "summary"])
def test_headlines_and_advice_name_columns_and_dimensions_that_the_report_has(name: str) -> None:
    report = REPORTS[name]
    for headline in HEADLINES[name]:
        assert {headline.column, *(headline.within or ())} <= report.columns.keys()
    if advice := ADVICE.get(name):
        named = set(re.findall(r"\{(\w+)", advice.action + advice.evidence)) - {"place"}
        assert named | {*advice.value} <= report.columns.keys()
        assert {advice.reason, advice.at_most} - {None} <= report.columns.keys()
    assert {*PRICE_DIMENSIONS.get(name, ())} <= report.dimensions.keys()
