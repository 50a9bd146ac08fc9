"""The row of a group: its forecast, compared with its GPUs."""

from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from gpuledger.errors import ArgumentError
from gpuledger.store.views import create_views
from gpuledger_reports.capacity.demand import Demand
from gpuledger_reports.capacity.forecasting import DAY, WEEK
from gpuledger_reports.capacity.outlook import (
    COLUMNS,
    REPORT,
    default_days,
    find_added,
    find_outlook,
    parse_added,
)
from gpuledger_reports.capacity.report import Question
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.times import Window
from tests.tables import for_each
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_US,
    allocated,
    inventory_row,
    node_row,
    pending_row,
    pod_row,
    write_store,
)

WEEKS = 12
FULL = ("full_days_p10", "full_days_p50", "full_days_p90")


def demand(allocated: list[float], gpus: float = 10.0, waiting: float = 0.0) -> Demand:
    return Demand(
        key=("prod", "H100"),
        allocated=tuple(allocated),
        waiting=(waiting,) * len(allocated),
        gpus=gpus,
        filled_hours=0,
        unknown_hours=0.0,
        known=(True,) * len(allocated),
    )


def test_a_steady_demand_is_never_full_and_needs_no_band() -> None:
    found = find_outlook(demand([4.0] * WEEKS * WEEK), ("cluster", "model"), days=7)
    assert list(found) == ["cluster", "model", *COLUMNS]
    assert (found["cluster"], found["model"], found["gpus"]) == ("prod", "H100", 10.0)
    assert found["demand"] == found["expected"] == found["low_80"] == found["high_95"] == 4.0
    assert [found[name] for name in FULL] == [None, None, None]
    assert found["note"] is None


def test_a_note_names_the_gpus_of_a_group_that_has_fewer_than_are_to_be_removed() -> None:
    notes = [
        find_outlook(
            demand([4.0] * WEEKS * WEEK), ("cluster", "model"), days=7, added_gpus=-removed
        )["note"]
        for removed in (10, 64)
    ]
    assert notes == [None, "only 10 GPUs, fewer than the 64 to remove"]


def test_a_fleet_that_is_allocated_as_a_whole_is_full_today() -> None:
    found = find_outlook(demand([10.0] * WEEKS * WEEK), ("cluster", "model"), days=7)
    assert [found[name] for name in FULL] == [0.0, 0.0, 0.0]


def test_gpus_for_which_pods_wait_are_demand() -> None:
    found = find_outlook(demand([9.0] * WEEKS * WEEK, waiting=3.0), ("cluster", "model"), days=7)
    assert (found["demand"], found["waiting"], found["expected"]) == (12.0, 3.0, 12.0)
    assert [found[name] for name in FULL] == [0.0, 0.0, 0.0]


def test_gpus_for_others_bring_the_end_nearer() -> None:
    growing = demand([hour / WEEK for hour in range(WEEKS * WEEK)], gpus=13.0)
    later, sooner = (
        find_outlook(growing, ("cluster", "model"), days=7, added_gpus=added)
        for added in (0.0, -0.5)
    )
    assert (later["gpus"], sooner["gpus"]) == (13.0, 12.5)
    assert sooner["full_days_p50"] == pytest.approx(3.5, abs=1.0)
    assert later["full_days_p50"] is None or later["full_days_p50"] > sooner["full_days_p50"]


TRAINING, SERVING, OTHER = ("training", "H100"), ("serving", "H100"), ("serving", None)


@for_each(
    "text, keys, added",
    [
        ("-64", [TRAINING], {TRAINING: -64}),
        ("pool=training:64", [TRAINING, SERVING], {TRAINING: 64}),
        ("pool=training:-1, pool=serving:1", [TRAINING, SERVING], {TRAINING: -1, SERVING: 1}),
        ("model=:2,model=:1", [SERVING, OTHER], {OTHER: 3}),
        ("64", [], {}),
        ("64,-32", [TRAINING], {TRAINING: 32}),
        ("1,pool=training:64,-32", [TRAINING], {TRAINING: 33}),
        ("pool=a, b:64", [("a, b", None)], {("a, b", None): 64}),
    ],
)
def test_gpus_are_added_to_the_row_that_is_named_or_to_the_only_one(
    text: str, keys: list[tuple[str | None, ...]], added: dict[tuple[str | None, ...], float]
) -> None:
    assert find_added(["pool", "model"], keys, parse_added(text, "added")) == added


@for_each(
    "text, message",
    [
        ("nan", "added: invalid value 'nan'; give a number, or KEY=VALUE:NUMBER"),
        ("64,", "added: invalid value '64,'; give a number, or KEY=VALUE:NUMBER"),
        ("pool=serving:1,64", "added: 1 GPUs match 2 of 3 rows; select"),
        ("pool=training", "added: invalid value 'pool=training'; give a number, or"),
        ("training:64", "added: invalid value 'training:64'; give a number, or"),
        ("node=a:64", "added: rows have no node; add it to `by`"),
        ("64", "added: 64 GPUs match 3 of 3 rows; select one row by `where`, or give KEY=VALUE:64"),
        ("pool=serving:1", "added: 1 GPUs match 2 of 3 rows; select"),
        ("pool=x:-2", "added: -2 GPUs match 0 of 3 rows; select"),
    ],
)
def test_gpus_are_never_added_to_several_rows(text: str, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        find_added(["pool", "model"], [TRAINING, SERVING, OTHER], parse_added(text, "added"))
    assert str(raised.value).startswith(message)


def test_a_note_names_an_expected_demand_outside_its_band_and_a_band_that_did_not_hold() -> None:
    growing = demand([(hour / WEEK) ** 3 for hour in range(WEEKS * WEEK)], gpus=9999.0)
    found = find_outlook(growing, ("cluster", "model"), days=7)
    assert found["expected"] < found["low_80"]
    assert found["note"] == (
        "past forecasts were too low or too high; rely on the band; "
        "the band may be too narrow: past bands contained 34 % of hours"
    )


def test_a_short_history_is_not_forecast_and_the_note_states_what_is_needed() -> None:
    found = find_outlook(demand([4.0] * 30 * DAY), ("cluster", "model"), days=7)
    assert found["note"] == "too short a history; 34 days are needed"
    assert found["history_days"] == 30
    assert found["method"] is found["expected"] is found["full_days_p50"] is None


@for_each("history, days", [([9, 84], 28), ([83, 3], 14), ([42], 14), ([41], 7), ([1], 7), ([], 7)])
def test_the_default_horizon_is_the_longest_that_a_group_allows(
    history: list[int], days: int
) -> None:
    assert default_days([demand([4.0] * each * DAY) for each in history]) == days


def test_a_history_of_mostly_unknown_hours_is_not_forecast() -> None:
    """It has samples for 3 of 61 days."""
    silent = 58 * DAY
    steady = demand([10.0] * 61 * DAY)
    known = (*(True,) * 2 * DAY, *(False,) * silent, *(True,) * DAY)
    found = find_outlook(
        replace(steady, known=known, filled_hours=silent), ("cluster", "model"), days=7
    )
    assert found["note"] == (
        "too short a history; 34 days are needed;"
        " 1392 hours in which over 10 % of the GPUs had no samples"
    )
    assert found["method"] is found["error"] is found["full_days_p50"] is None


def test_a_note_counts_the_hours_of_unknown_allocation() -> None:
    steady = demand([4.0] * WEEKS * WEEK)
    known = (*(True,) * (WEEKS - 2) * WEEK, *(False,) * 2 * WEEK)
    found = find_outlook(replace(steady, known=known), ("cluster", "model"), days=7)
    assert found["note"] == "336 hours of unknown allocation"
    assert found["history_days"] == (WEEKS - 2) * 7
    assert found["expected"] == 4.0


def test_a_pool_that_has_been_gone_for_a_day_has_no_row(tmp_path: Path) -> None:
    usage = [allocated(hour, "train") for hour in range(60)]
    nodes = [node_row()]
    for name, hours in {"gone": 36, "going": 37}.items():
        usage += [allocated(hour, "serve", gpu=f"GPU-{name}", node=name) for hour in range(hours)]
        nodes.append(node_row(node=name, node_pool=name))
    question = Question(
        window=Window(BEGIN_US, BEGIN_US + 60 * HOUR_US),
        by=("pool",),
        policy=BillPolicy(),
        options=REPORT.parse_options({}),
    )
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, usage_hourly=usage, nodes=nodes))
        rows = REPORT.read(connection, question).rows
    assert {row["pool"]: row["gpus"] for row in rows} == {None: 1.0, "going": round(1 / 24, 2)}


def test_a_mistyped_request_is_not_demand_but_a_note_names_it(tmp_path: Path) -> None:
    mistyped = pending_row("mistyped", created=0, requested='{"nvidia.com/gpu":"1000"}')
    request = '{"nvidia.com/gpu":"1"}'
    placed = pod_row("train", scheduled_time=BEGIN_US, container="main", requested=request)
    store = write_store(
        tmp_path,
        usage_hourly=[allocated(hour, "train") for hour in range(24)],
        inventory=[inventory_row()],
        pods=[placed],
        pending_pods=[mistyped, pending_row("fits", created=0)],
    )
    question = Question(
        window=Window(BEGIN_US, BEGIN_US + 24 * HOUR_US),
        by=("model",),
        policy=BillPolicy(),
        options=REPORT.parse_options({}),
    )
    with duckdb.connect() as connection:
        create_views(connection, store)
        answer = REPORT.read(connection, question)
    assert [row["demand"] for row in answer.rows] == [2.0]
    assert (
        "Pods that request more GPUs than any node has: 1, such as ns/mistyped (1000 GPUs)."
        " Demand does not include them."
    ) in answer.notes


def test_the_group_that_is_full_first_is_first_and_a_short_history_last(tmp_path: Path) -> None:
    """The larger a group is, the earlier it comes in the store's order."""
    usage = []
    for model, gpus, held, first in (
        ("new", 5, 5, 30),
        ("large", 4, 0, 0),
        ("growing", 3, None, 0),
        ("full", 1, 1, 0),
        ("small", 2, 0, 0),
    ):
        for gpu in range(gpus):
            for day in range(first, 40):
                is_held = gpu < (day // 15 if held is None else held)
                for hour in range(24 * day, 24 * day + 24):
                    pod = "train" if is_held else None
                    usage.append(allocated(hour, pod, gpu=f"{model}-{gpu}", model=model))
    question = Question(
        window=Window(BEGIN_US, BEGIN_US + 40 * 24 * HOUR_US),
        by=("model",),
        policy=BillPolicy(),
        options=REPORT.parse_options({"horizon": "7d"}),
    )
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, usage_hourly=usage))
        rows = REPORT.read(connection, question).rows
    assert [row["model"] for row in rows] == ["full", "growing", "large", "small", "new"]
