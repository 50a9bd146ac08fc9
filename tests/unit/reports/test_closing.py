"""Closed bills stay, and what changes later is a correction line each."""

from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest

from cli.command import main
from gpuledger.errors import UserError
from gpuledger.store.bill_table import BILL_LINES, append_revision
from reports.closing import closed_lines, revision_rows
from reports.periods import last_month, parse_period
from tests.unit.reports.stores import (
    HOUR_NS,
    held,
    inventory_row,
    pod_row,
    used,
    write_store,
)
from tests.unit.reports.test_bill import bill_of, store_of

PRICES = "prices: [{name: h100, model: H100, per_gpu_hour: 7}]\n"


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return a store of a day in which every hour is covered."""
    return write_store(
        tmp_path / "store",
        usage_hourly=[held(hour, "a" if hour < 20 else None) for hour in range(24)],
        inventory=[inventory_row()],
        pods=[pod_row("a")],
    )


@pytest.fixture
def arguments(store: str, tmp_path: Path) -> list[str]:
    (tmp_path / "prices.yaml").write_text(PRICES)
    prices = str(tmp_path / "prices.yaml")
    return ["--store", store, "--period", "2026-10-01", "--by", "pod", "--prices", prices]


def test_a_late_hour_after_the_close_gives_corrections_that_sum_to_the_difference(
    store: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bill", "close", *arguments]) == 0
    assert "revision 1: 2 lines, 168.00" in capsys.readouterr().out
    # A second GPU, of which the store hears after the close.
    write_store(
        Path(store),
        usage_hourly=[
            held(3, "b", gpu="GPU-b"),
            used(3, "b", HOUR_NS, gpu="GPU-b"),
        ],
    )
    assert main(["bill", *arguments]) == 0
    assert "closed as revision 1, and 7.00 more since" in capsys.readouterr().err
    assert main(["bill", "close", *arguments]) == 0
    assert "revision 2: 1 correction lines, 7.00" in capsys.readouterr().out
    closed = closed_lines(store, parse_period("2026-10-01"), ["pod"])
    assert sorted((each.revision, each.charge_class or "", each.cost) for each in closed) == [
        (1, "", Decimal(28)),
        (1, "", Decimal(140)),
        (2, "correction", Decimal(7)),
    ]
    assert closed[-1].supersedes == 1
    assert main(["bill", "close", *arguments]) == 0
    assert "nothing has changed" in capsys.readouterr().out


def test_an_explanation_shows_every_revision_of_a_line(
    store: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["bill", "close", *arguments])
    write_store(Path(store), usage_hourly=[held(3, "a", gpu="GPU-b")])
    main(["bill", "close", *arguments])
    line = next(
        each.line
        for each in closed_lines(store, parse_period("2026-10-01"), ["pod"])
        if each.charge_class
    )
    capsys.readouterr()
    assert main(["bill", "explain", line, *arguments]) == 0
    explained = capsys.readouterr().out
    assert "revision 1: closed 140 USD" in explained
    assert "revision 2: correction 7 USD" in explained


def test_a_line_that_is_gone_is_taken_back_whole(tmp_path: Path) -> None:
    before = bill_of(store_of(tmp_path / "before", held(0, "a")))
    after = bill_of(store_of(tmp_path / "after", held(0, "b")))
    first = revision_rows(before, [], closed_time_us=0)
    assert [(row["revision"], row["supersedes"], row["cost"]) for row in first] == [(1, None, 7)]
    store = str(tmp_path / "closed")
    append_revision(store, first, stream="bill", revision=1)
    closed = closed_lines(store, before.window, before.by)
    second = revision_rows(after, closed, closed_time_us=0)
    assert sorted(row["cost"] for row in second) == [-7, 7]
    assert {row["charge_class"] for row in second} == {"correction"}


def test_of_two_who_close_at_once_one_is_refused(tmp_path: Path) -> None:
    rows = revision_rows(bill_of(store_of(tmp_path, held(0, "a"))), [], closed_time_us=0)
    append_revision(str(tmp_path), rows, stream="bill", revision=1)
    with pytest.raises(UserError, match="revision 1"):
        append_revision(str(tmp_path), rows, stream="bill", revision=1)


@pytest.mark.parametrize(
    ("usage", "prices", "reason"),
    [
        ([held(3, "a")], PRICES, "no usage up to the end"),
        ([held(23, "a"), used(23, "a", 1)], PRICES, "min_covered_ratio"),
        ([held(hour, "a") for hour in range(24)], "prices: []", "no price for H100"),
    ],
)
def test_a_period_of_which_something_is_missing_is_not_closed(
    tmp_path: Path,
    usage: list[dict[str, object]],
    prices: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = write_store(tmp_path / "store", usage_hourly=usage, inventory=[inventory_row()])
    file = tmp_path / "prices.yaml"
    file.write_text(prices)
    arguments = ["--store", store, "--period", "2026-10-01", "--prices", str(file)]
    assert main(["bill", "close", *arguments]) == 1
    assert reason in capsys.readouterr().err
    assert closed_lines(store, parse_period("2026-10-01"), ["namespace"]) == []


@pytest.mark.parametrize(
    ("now", "month"),
    [
        ("2026-11-03T06:30:00", "2026-10"),
        ("2026-11-01T00:00:00", "2026-10"),
        ("2026-10-31T23:59:59", "2026-09"),
        ("2027-01-15T00:00:00", "2026-12"),
    ],
)
def test_last_month_is_the_whole_month_before_the_one_that_it_is(now: str, month: str) -> None:
    now_us = int(datetime.fromisoformat(f"{now}+00:00").timestamp()) * 10**6
    assert last_month(now_us) == parse_period(month)


def test_the_page_has_the_columns_of_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs/bill.md").read_text()
    table = page.partition("<!-- bill_lines:begin -->")[2].partition("<!-- bill_lines:end -->")[0]
    rows = [line.split("|")[1:4] for line in table.strip().splitlines()[2:]]
    assert [(name.strip(" `"), null.strip()) for name, _, null in rows] == [
        (column.name, "yes" if column.nullable else "") for column in BILL_LINES.columns
    ]
