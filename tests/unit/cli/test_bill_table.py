"""A bill on a terminal of any width: no number and no line id is ever cut."""

import io
import re
from decimal import Decimal
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from gpuledger_cli.bill_table import Sort, bill_table
from gpuledger_reports.pricing.billing import Bill
from tests.unit.reports.stores import HOUR_NS, allocated, inventory_row, pod_row, used, write_store
from tests.unit.reports.test_bill import bill_of

POLICY = (
    "prices: [{name: h100, model: H100, per_gpu_hour: 13300}]\n"
    "budgets: [{name: research, amount: 10000, from: 2026-10-01, to: 2026-10-02}]\n"
)
OWNER = "a-workload-with-a-rather-long-name-that-nobody-shortened"


@pytest.fixture
def bill(tmp_path: Path) -> Bill:
    store = write_store(
        tmp_path,
        usage_hourly=[allocated(0, "a"), used(0, "a", HOUR_NS // 60), allocated(1, None)],
        inventory=[inventory_row()],
        pods=[pod_row("a", owner_kind="Deployment", owner_name=OWNER)],
    )
    return bill_of(store, POLICY, by=["owner", "model", "namespace"], hours=2)


def printed(bill: Bill, width: int) -> str:
    return shown(bill_table(bill, width=width))


def shown(made: tuple[Table, int]) -> str:
    table, wanted = made
    out = io.StringIO()
    Console(file=out, width=wanted).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 60, 80, 100, 120, 160, 300])
def test_costs_and_line_ids_are_shown_in_full_at_any_width(bill: Bill, width: int) -> None:
    text = printed(bill, width)
    assert [line.id for line in bill.lines if line.id not in text] == []
    assert text.count(" 13,300.00 ") >= len(bill.lines)
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_table_is_no_wider_than_the_terminal(bill: Bill, width: int) -> None:
    assert max(map(len, printed(bill, width).splitlines())) <= width


def test_texts_of_dimensions_are_wrapped_before_a_column_is_omitted(bill: Bill) -> None:
    text = printed(bill, 150)
    assert OWNER not in text
    assert "not shown" not in text
    assert OWNER in printed(bill, 220)


def test_omitted_columns_are_named(bill: Bill) -> None:
    """The last numeric column is omitted first, and the cost never."""
    text = " ".join(printed(bill, 80).split())
    assert "not shown, terminal too narrow: Unused cost, Used GPU-hours" in text


def test_idle_time_is_billed_and_not_allocated(bill: Bill) -> None:
    """As in the files: each column has one meaning, and billed time has its own column."""
    (idle,) = (row for row in printed(bill, 300).splitlines() if "idle" in row)
    assert [cell.strip() for cell in idle.split("│")[5:9]] == ["0.0", "0.0", "", "1.0"]


def test_efficiency_is_used_over_allocated(bill: Bill) -> None:
    (line,) = (row for row in printed(bill, 300).splitlines() if OWNER in row)
    assert [cell.strip() for cell in line.split("│")[5:9]] == ["1.0", "0.017", "1.6 %", "1.0"]


def test_short_times_have_two_significant_digits_and_budgets_their_currency(
    bill: Bill,
) -> None:
    text = printed(bill, 300)
    assert " 0.017 " in text
    assert "budget research: 26,600.00 of 10,000.00 USD" in text


def test_the_caption_compares_the_sum_of_the_line_items_with_the_cost_of_the_gpus(
    bill: Bill,
) -> None:
    assert "Sum of line items 26,600.00 = cost of GPUs 26,600.00" in printed(bill, 300)


@pytest.fixture
def three(tmp_path: Path) -> Bill:
    """Return a bill of two pods and idle time: `b` used more of less time than `a`."""
    store = write_store(
        tmp_path,
        usage_hourly=[
            *(allocated(hour, "a") for hour in (0, 1, 2)),
            used(0, "a", HOUR_NS // 60),
            allocated(3, "b"),
            used(3, "b", HOUR_NS // 2),
            *(allocated(hour, None) for hour in (4, 5)),
        ],
        inventory=[inventory_row()],
    )
    return bill_of(store, POLICY, by=["pod", "model"], hours=6)


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("cost", ["a", "__idle__", "b"]),
        ("billed", ["a", "__idle__", "b"]),
        ("allocated", ["a", "b", "__idle__"]),
        ("used", ["b", "a", "__idle__"]),
        ("efficiency", ["b", "a", "__idle__"]),
        ("unused", ["a", "b", "__idle__"]),
    ],
)
@pytest.mark.parametrize("top", [None, 1, 2, 3, 9])
def test_a_table_shows_the_highest_lines_the_sum_of_the_others_and_the_total(
    three: Bill, sort: Sort, order: list[str], top: int | None
) -> None:
    text = shown(bill_table(three, width=300, sort=sort, top=top))
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in text.splitlines()]
    rows = [row for row in rows if row]
    named = [row[0] for row in rows]
    assert named == [*order[:top], *(["others"] if len(order[:top]) < 3 else []), "total"]
    for at, total in ((3, "4.0"), (4, "0.52"), (6, "6.0"), (7, "79,800.00")):
        assert rows[-1][at] == total
        amounts = [Decimal(row[at].replace(",", "")) for row in rows]
        assert abs(sum(amounts[:-1]) - amounts[-1]) <= Decimal("0.01")
    assert {row[2] for row in rows if row[0] in {"others", "total"}} == {""}
    assert "GPU-hours without a tenant: 2.0\n" in re.sub(" +\n", "\n", text)
    assert rows[-1][-1] == ""


def test_a_bill_without_lines_has_no_total(tmp_path: Path) -> None:
    store = write_store(tmp_path, usage_hourly=[allocated(30, "a")])
    assert "total" not in printed(bill_of(store, POLICY, hours=2), 300)
