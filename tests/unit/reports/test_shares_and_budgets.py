"""Distribution of idle cost by a table, the days of budgets, and the parts of a line."""

import re
from collections import defaultdict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_reports.presenting.explanation import explain_line
from gpuledger_reports.presenting.output import file_columns, file_rows, write_parquet
from gpuledger_reports.pricing.billing import BillMaker, line_id
from gpuledger_reports.pricing.lookup import CellKey
from gpuledger_reports.pricing.policy import OWN_COLUMNS
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.pricing.rows import COSTS, row_of
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    allocated,
    inventory_row,
    usage_row,
    used,
)
from tests.unit.reports.test_bill import SEVEN, bill_of, costs, store_of

TABLE = (
    "dimensions: {team: [namespace]}\n"
    "idle: [{kind: idle, share: table, by: team, weights: {ns: 1}}]\n"
)


def budget(since: str, until: str, match: str = "{namespace: ns}") -> str:
    return f"budgets: [{{name: x, amount: 100, from: {since}, to: {until}, match: {match}}}]\n"


@pytest.mark.parametrize(
    ("since", "until", "spent", "forecast"),
    [
        pytest.param("2026-10-01", "2026-10-02", 168, 168, id="days before the end of the bill"),
        pytest.param("2026-10-02", "2026-10-03", 84, 168, id="days within it"),
        pytest.param("2026-10-01", "2026-10-04", 252, 504, id="days after it"),
    ],
)
def test_a_budget_covers_its_own_days_whatever_the_period_of_the_bill(
    tmp_path: Path, since: str, until: str, spent: int, forecast: int
) -> None:
    store = store_of(tmp_path, *(allocated(hour, "a") for hour in range(36)))
    (state,) = bill_of(store, SEVEN + budget(since, until), hours=48).budgets
    assert (state.spent, state.forecast) == (Fraction(spent), Fraction(forecast))


def test_a_budget_for_days_outside_the_bill_is_not_shown(tmp_path: Path) -> None:
    store = store_of(tmp_path, allocated(0, "a"))
    for since, until in (("2026-09-01", "2026-10-01"), ("2026-11-01", "2026-12-01")):
        assert bill_of(store, SEVEN + budget(since, until)).budgets == []


def test_a_budget_includes_the_idle_cost_that_a_table_assigns(tmp_path: Path) -> None:
    store = store_of(tmp_path, allocated(0, "a"), allocated(1, None))
    policy = SEVEN + TABLE + budget("2026-10-01", "2026-11-01", "{team: ns}")
    bill = bill_of(store, policy, by=["team"], hours=2)
    assert costs(bill)["ns/idle"] == "7.00"
    assert bill.budgets[0].spent == 14


def test_idle_cost_distributed_by_a_table_stays_with_its_cluster(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        *(allocated(0, "a"), allocated(1, None)),
        *(
            allocated(1, None, gpu="GPU-c", cluster="eu"),
            allocated(0, None, gpu="GPU-c", cluster="eu"),
        ),
        inventory=[inventory_row(), inventory_row("GPU-c", cluster="eu")],
    )
    bill = bill_of(store, SEVEN + TABLE, by=["cluster", "team"], hours=2)
    of_clusters: dict[str, Decimal] = defaultdict(Decimal)
    for line in bill.lines:
        of_clusters[line.values[0]] += line.cost
    assert of_clusters == {"prod": 14, "eu": 14}
    assert costs(bill)["eu/ns/idle"] == "14.00"


def test_the_parts_of_a_line_sum_to_it(tmp_path: Path) -> None:
    """Each is about half a cent; rounded separately they would be nothing or a cent too much."""
    store = store_of(tmp_path, allocated(0, "a", energy_millijoules=18_000_000))
    policy = "prices: [{name: h, per_gpu_hour: 0.005}]\nenergy: [{name: e, per_kilowatt_hour: 1}]\n"
    bill = bill_of(store, policy)
    row = row_of(bill, bill.lines[0])
    assert row["cost"] == Decimal("0.01")
    assert row["gpu_cost"] + row["energy_cost"] + row["shared_cost"] == row["cost"]


def test_the_reserved_names_of_dimensions_are_the_columns_of_a_line(tmp_path: Path) -> None:
    bill = bill_of(store_of(tmp_path, allocated(0, "a")))
    (row,) = file_rows(bill)
    assert set(row) - {"pod"} == OWN_COLUMNS
    assert [*row] == [*file_columns(bill)]
    assert set(COSTS) <= OWN_COLUMNS


def test_files_have_memory_in_gibibyte_hours_of_any_amount(tmp_path: Path) -> None:
    """In bytes, a month of a large cluster needs more than 64 bits."""
    store = store_of(tmp_path, allocated(0, "a", memory_byte_ns=10**9 * 2**30 * HOUR_NS))
    (row,) = file_rows(bill_of(store))
    assert row["memory_gibibyte_hours"] == 10**9


@given(values=st.lists(st.text(max_size=9), min_size=1))
def test_the_id_of_a_line_is_not_a_number(values: list[str]) -> None:
    found = line_id(Window(0, HOUR_US), values, CellKey(tuple(values), None))
    assert re.fullmatch("[g-v][0-9a-f]{11}", found)


def test_a_label_with_a_quote_is_a_column_of_parquet(tmp_path: Path) -> None:
    bill = bill_of(store_of(tmp_path, allocated(0, "a")), by=['label:a"b'])
    file = tmp_path / "bill.parquet"
    write_parquet(file_columns(bill), file_rows(bill), file=file)
    assert file.stat().st_size > 0


def test_brackets_in_a_model_are_literal(tmp_path: Path) -> None:
    name = "A100 [PG506]"
    store = store_of(tmp_path, allocated(0, "a", model=name), inventory=[inventory_row(model=name)])
    policy = "prices: [{name: h, model: 'A100 [PG506]', per_gpu_hour: 7}]"
    assert bill_of(store, policy).unpriced == {}


def explained(store: str, policy: str, kind: str, *, hours: int, max_rows: int = 5) -> list[str]:
    """Return the explanation of the usage of the only line of a kind of idle."""
    read = ReadPolicy(parse_policy(policy), "0" * 64, "test")
    maker = BillMaker(UsageReader(store), read, by=["namespace"])
    bill = maker.make(Window(BEGIN_US, BEGIN_US + hours * HOUR_US))
    (line,) = (line for line in bill.lines if line.idle_kind == kind)
    texts = list(explain_line(bill, line, maker=maker, max_rows=max_rows))
    head = next(at for at, text in enumerate(texts) if text.startswith(("usage", "hours")))
    return texts[head + 1 :]


def test_unresponsive_time_is_explained_by_its_rows(tmp_path: Path) -> None:
    unresponsive = allocated(0, "a", HOUR_NS, unresponsive_ns=HOUR_NS // 2)
    row, last = explained(
        store_of(tmp_path, unresponsive, allocated(1, "a")), SEVEN, "overhead", hours=2
    )
    assert "a allocated 3600 (unresponsive 1800)" in row
    assert "all 1 rows: allocated 3600 s" in last


@pytest.mark.parametrize(("slices", "seconds"), [((), "3600"), ((1, 7), "514.285714286")])
def test_idle_time_is_explained_as_time_of_physical_gpus_that_was_not_allocated(
    slices: tuple[int, ...], seconds: str, tmp_path: Path
) -> None:
    sizes = dict(zip(("compute_slices", "gpu_compute_slices"), slices, strict=False))
    store = store_of(tmp_path, allocated(0, None, **sizes))
    row, last = explained(store, SEVEN, "idle", hours=1)
    assert f" - not allocated {seconds}  " in row
    assert last == f"  all 1 rows: not allocated {seconds} s"


def test_unused_time_is_explained_by_the_rows_of_the_allocations(
    tmp_path: Path,
) -> None:
    policy = SEVEN + "basis: [{basis: used, match: {pod: a}}]"
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        used(0, "a", HOUR_NS // 4),
        allocated(1, "b"),
        allocated(2, None),
    )
    row, last = explained(store, policy, "unused", hours=3)
    assert "a allocated 3600" in row
    assert "all 1 rows: allocated 3600 s" in last


@pytest.mark.parametrize(
    ("max_rows", "shown", "message"), [(1, 1, "2 more rows"), (3, 3, ""), (0, 3, "")]
)
def test_omitted_rows_are_counted(tmp_path: Path, max_rows: int, shown: int, message: str) -> None:
    """Even if their amounts are zero."""
    hosts = [usage_row(hour, category="host", busy_ns=1 if hour == 0 else 0) for hour in range(3)]
    store = store_of(tmp_path, allocated(2, None), *hosts)
    texts = explained(store, SEVEN, "overhead", hours=3, max_rows=max_rows)
    assert len([text for text in texts if "GPU-a" in text]) == shown
    more = [text for text in texts if "more" in text]
    assert [message in text for text in more] == ([True] if message else [])


@pytest.mark.parametrize("max_rows", [0, 1])
def test_time_without_data_is_explained_by_the_hours_of_each_node(
    tmp_path: Path, max_rows: int
) -> None:
    """Node n lacks hour 1 and a half of hour 2; node m lacks all hours from 2 on."""
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(2, "a", HOUR_NS // 2),
        *(allocated(hour, "a") for hour in range(3, 6)),
        *(allocated(hour, "b", node="m", gpu="GPU-m") for hour in range(2)),
        inventory=[inventory_row(), inventory_row("GPU-m", node="m")],
    )
    *spans, last = explained(store, SEVEN, "no_data", hours=6, max_rows=max_rows)
    shown = [
        "  2026-10-01T02:00:00Z to 2026-10-01T06:00:00Z prod/m: 4 GPU h",
        "  2026-10-01T01:00:00Z to 2026-10-01T03:00:00Z prod/n: 1.5 GPU h",
    ]
    more = ["  and 1 more rows; --rows 0 shows all"]
    assert spans == (shown[:1] + more if max_rows else shown)
    assert last == "  all 2 rows: 5.5 GPU h"


SHARED = "shared: [{{match: {{namespace: operator}}, share: {share}{more}}}]\n"


@pytest.mark.parametrize(
    ("share", "more", "expected"),
    [
        pytest.param(
            "own_line", "", {"a": "7.00", "b": "21.00", "operator": "7.00"}, id="not shared"
        ),
        pytest.param("even", "", {"a": "10.50", "b": "24.50", "operator": "0.00"}, id="evenly"),
        pytest.param(
            "allocated", "", {"a": "8.75", "b": "26.25", "operator": "0.00"}, id="by allocated time"
        ),
        pytest.param(
            "table",
            ", by: namespace, weights: {b: 1}",
            {"a": "7.00", "b": "28.00", "operator": "0.00"},
            id="by a table",
        ),
    ],
)
def test_the_cost_of_a_shared_namespace_is_paid_by_the_others(
    tmp_path: Path, share: str, more: str, expected: dict[str, str]
) -> None:
    store = store_of(
        tmp_path,
        allocated(0, "x", allocated_namespace="operator"),
        allocated(1, "y", allocated_namespace="a"),
        *(allocated(hour, "z", allocated_namespace="b") for hour in (2, 3, 4)),
    )
    policy = SEVEN + SHARED.format(share=share, more=more)
    bill = bill_of(store, policy, by=["namespace"], hours=5)
    assert costs(bill) == expected
    assert bill.line_cost == bill.asset_cost == 35


def test_costs_are_shared_only_among_tenants_of_the_same_kind_of_gpu(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        allocated(0, "x", allocated_namespace="operator"),
        allocated(0, "y", allocated_namespace="a", node="n2", gpu_uuid="G2", model="T4"),
    )
    policy = "prices: [{name: any, per_gpu_hour: 7}]\n" + SHARED.format(share="allocated", more="")
    bill = bill_of(store, policy, by=["namespace"], hours=1)
    # Nobody else had a GPU like the operator's: its cost stays there.
    assert costs(bill) == {"a": "7.00", "operator": "7.00"}


def test_energy_that_others_pay_stays_on_its_line(tmp_path: Path) -> None:
    """Without any time: a host process on a GPU that is allocated to a pod."""
    store = store_of(
        tmp_path,
        allocated(0, "a", energy_millijoules=3_600_000_000),
        usage_row(0, category="host", busy_ns=0, energy_millijoules=3_600_000_000),
    )
    policy = SEVEN + "energy: [{name: e, per_kilowatt_hour: 1}]\n"
    bill = bill_of(store, policy + "idle: [{kind: overhead, share: allocated}]\n", hours=1)
    (host,) = (line for line in bill.lines if line.idle_kind == "overhead")
    assert (host.energy_cost, host.shared_cost) == (Fraction(1), Fraction(-1))
    assert host.cost == 0
    assert sum(line.shared_cost for line in bill.lines) == 0
    assert sum(line.energy_millijoules for line in bill.lines) == 2 * 3_600_000_000
