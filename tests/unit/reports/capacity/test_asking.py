"""Options become a question, and an answer has at most the requested rows."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import duckdb
import pytest

from gpuledger.errors import ArgumentError
from gpuledger.store.commits import describe
from gpuledger_reports.capacity.asking import answer, ask, open_store
from gpuledger_reports.capacity.report import (
    Answer,
    Option,
    Question,
    Report,
    Row,
    file_columns,
    one_of,
    plain_cell,
    whole,
)
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window
from tests.tables import for_each
from tests.unit.reports.stores import BEGIN_US, allocated, node_row, write_store

COMPLETE = Window(BEGIN_US, BEGIN_US + 60 * DAY_US)
NOW_US = COMPLETE.end_us + 10 * 60 * 10**6


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yield a connection with the views of a store."""
    with duckdb.connect() as connection:
        open_store(connection, write_store(tmp_path, nodes=[node_row()]))
        yield connection


def report(rows: int = 0) -> Report:
    """Return a report with a row for each number below `rows`."""
    return Report(
        name="count",
        summary="Count.",
        examples={},
        columns={"count": "Count", "idle_ratio": "Idle"},
        dimensions={"cluster": "cluster", "model": "model"},
        default_by="model",
        options={
            "horizon": Option(help="", default="28d", parse=whole(maximum=30)),
            "history": Option(help="", parse=one_of("hour", "day")),
        },
        read=lambda _, __: Answer(rows=[{"model": None, "count": n} for n in range(rows)]),
    )


def asked(given: dict[str, str], complete: Window | None = COMPLETE) -> Question:
    return ask(
        report(),
        given,
        complete=complete,
        policy=BillPolicy(),
        now_us=NOW_US,
        advance=lambda _: None,
    )


def window_of(given: dict[str, str]) -> tuple[float, float]:
    """Return the window's days after the first complete one."""
    begin_us, end_us = asked(given).window
    return (begin_us - BEGIN_US) / DAY_US, (end_us - BEGIN_US) / DAY_US


@for_each(
    "given, days",
    [
        ({}, (30, 60)),
        ({"window": "12h"}, (59.5, 60)),
        ({"window": "90d"}, (0, 60)),
        ({"window": "2026-11"}, (31, 60)),
        ({"from": "2026-11-01"}, (31, 60)),
        ({"from": "2026-11-01", "to": "2026-11-02"}, (31, 32)),
    ],
)
def test_the_window_ends_with_complete_usage_at_the_latest(
    given: dict[str, str], days: tuple[float, float]
) -> None:
    assert window_of(given) == days


def test_without_usage_the_window_ends_with_the_last_hour() -> None:
    end_us = asked({}, complete=None).window.end_us
    assert NOW_US - HOUR_US < end_us <= NOW_US
    assert end_us % HOUR_US == 0


def test_options_have_their_defaults_and_are_parsed() -> None:
    assert asked({}).options == {"horizon": 28, "history": None}
    found = asked({"horizon": "2w", "history": "day", "by": "model,cluster,model"})
    assert found.options == {"horizon": 14, "history": "day"}
    assert found.by == ("model", "cluster")
    assert asked({"where": "model=A, B, cluster="}).where == {"model": "A, B", "cluster": ""}


@for_each(
    "given, message",
    [
        ({"window": "1h", "from": "-2d"}, "window: conflicts with from and to"),
        ({"window": "2025"}, "window: has no complete usage; give a time between 2026-10-01T00"),
        ({"window": "36s"}, "window: invalid duration '36s'; it must be whole hours, at least 1"),
        ({"to": "2026-11-02"}, "from: is missing; give it with `to`"),
        ({"from": "2025-01-01", "to": "2025-01-02"}, "from: has no complete usage"),
        ({"by": "modle"}, "by: unknown dimension 'modle'; did you mean model?"),
        ({"by": ","}, "by: empty; choose from cluster, model"),
        ({"where": "modle=x"}, "where: unknown dimension 'modle'; did you mean model?"),
        ({"where": "x=1"}, "where: unknown dimension 'x'; choose from cluster, model"),
        ({"where": "model"}, "where: invalid value 'model'; give KEY=VALUE"),
        ({"where": "model=a,model=b"}, "where: model is given twice; give one value"),
        ({"top": "0"}, "top: invalid value '0'; give a whole number from 1"),
        ({"top": "9" * 5000}, f"top: invalid value '{'9' * 40}…'; give a whole number from 1"),
        ({"window": "9" * 5000 + "d"}, "window: "),
        ({"window": "9" * 5000}, "window: "),
        ({"from": "-" + "9" * 5000 + "h"}, "from: "),
        ({"horizon": "9" * 5000 + "d"}, "horizon: "),
        ({"horizon": "36h"}, "horizon: invalid duration '36h'; it must be whole days, at least 1"),
        ({"horizon": "5w"}, "horizon: '5w' is longer than 30 days"),
        ({"history": "week"}, "history: invalid value 'week'; give hour or day"),
    ],
)
def test_a_mistake_is_named_with_its_fix(given: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=r"^.") as raised:
        asked(given)
    assert str(raised.value).startswith(message)


def test_an_answer_has_at_most_the_requested_rows(
    opened: duckdb.DuckDBPyConnection,
) -> None:
    found = answer(report(rows=5), asked({"top": "2"}), opened)
    assert ([row["count"] for row in found.rows], found.is_found) == ([0, 1], True)
    assert not answer(report(), asked({}), opened).is_found


def test_costs_at_example_prices_are_labelled(
    opened: duckdb.DuckDBPyConnection,
) -> None:
    examples, own = read_policy(None).policy, BillPolicy()
    costs = replace(report(rows=1), has_money=True)
    labelled = [
        (each.has_money, policy is examples)
        for each, policy in product((costs, report(rows=1)), (examples, own))
        if answer(each, replace(asked({}), policy=policy), opened).notes
    ]
    assert labelled == [(True, True)]


def test_a_day_has_at_most_the_requested_rows_and_no_day_is_left_out(
    opened: duckdb.DuckDBPyConnection,
) -> None:
    rows: list[Row] = [
        {"model": None, "day": day, "count": count}
        for day in ("2026-11-01", "2026-11-02")
        for count in range(3)
    ]
    daily = replace(report(), read=lambda _, __: Answer(rows=rows))
    found = answer(daily, asked({"top": "2"}), opened)
    assert found.rows == [row for row in rows if row["count"] < 2]


def test_a_selection_has_the_rows_of_a_grouping_by_its_dimensions(
    opened: duckdb.DuckDBPyConnection,
) -> None:
    """Also if the dimension is not shown, or is unknown in some rows."""
    rows = [
        {"cluster": cluster, "model": model, "count": number}
        for number, (cluster, model) in enumerate(
            product(["prod", None, "lab"], ["H100", "L4' OR true --"])
        )
    ]

    def read(_: duckdb.DuckDBPyConnection, question: Question) -> Answer:
        assert question.by == ("model", "cluster")
        return Answer(rows=rows)

    for cluster, at in {"prod": 0, "": 2, "lab": 4}.items():
        given = {"where": f"cluster={cluster}"}
        found = answer(replace(report(), read=read), asked(given), opened)
        assert found.rows == [
            {"model": row["model"], "count": row["count"]} for row in rows[at : at + 2]
        ]
    given = {"where": "cluster=dev", "by": "model,cluster"}
    found = answer(replace(report(), read=read), asked(given), opened)
    assert (found.rows, found.is_found) == ([], False)
    assert found.notes == ["No row has cluster=dev. Group by cluster to see all values."]


def test_progress_ends_at_100_percent() -> None:
    done: list[int] = []
    question = Question(window=COMPLETE, by=("model",), policy=BillPolicy(), advance=done.append)
    assert list(question.each("abcdefg")) == [*"abcdefg"]
    assert sum(done) == 100


def test_usage_is_complete_from_its_first_hour_as_in_bills_but_without_its_newest(
    tmp_path: Path,
) -> None:
    store = write_store(tmp_path, usage_hourly=[allocated(hour, "train") for hour in range(4)])
    with duckdb.connect() as connection:
        assert open_store(connection, store) == (BEGIN_US, BEGIN_US + 3 * HOUR_US)


def test_a_commit_that_ends_with_an_hour_makes_this_hour_complete(tmp_path: Path) -> None:
    mark = describe(valid_through={"3": BEGIN_US + 4 * HOUR_US})
    rows = [allocated(hour, "train") for hour in range(4)]
    store = write_store(tmp_path, properties=mark, usage_hourly=rows)
    with duckdb.connect() as connection:
        assert open_store(connection, store) == (BEGIN_US, BEGIN_US + 4 * HOUR_US)


@for_each("minutes, hours", [(None, None), (40, None), (60, (0, 1)), (100, (0, 1))])
def test_a_first_hour_is_complete_only_if_a_mark_is_at_its_end(
    tmp_path: Path, minutes: int | None, hours: tuple[int, int] | None
) -> None:
    mark = None if minutes is None else BEGIN_US + minutes * HOUR_US // 60
    properties = None if mark is None else describe(valid_through={"3": mark})
    rows = [allocated(0, "train")]
    store = write_store(tmp_path / str(minutes), properties=properties, usage_hourly=rows)
    expected = hours and tuple(BEGIN_US + hour * HOUR_US for hour in hours)
    with duckdb.connect() as connection:
        assert open_store(connection, store) == expected


def test_a_store_without_hourly_usage_has_no_complete_time(tmp_path: Path) -> None:
    store = write_store(tmp_path, nodes=[node_row()])
    with duckdb.connect() as connection:
        assert open_store(connection, store) is None


def test_cells_and_types_follow_from_names_and_values() -> None:
    row = {"idle_ratio": 0.4567, "count": 3.0, "model": None}
    assert [plain_cell(name, row) for name in row] == ["45.7 %", "3", ""]
    assert file_columns(report(), ("model",), [{"count": "three"}]) == {
        "model": "VARCHAR",
        "count": "VARCHAR",
        "idle_ratio": "DOUBLE",
        "period_begin": "TIMESTAMP WITH TIME ZONE",
        "period_end": "TIMESTAMP WITH TIME ZONE",
    }
