"""Use of a GPU that is allocated to another pod or job: on both line items, without other costs."""

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given

from gpuledger.store import bill_table
from gpuledger.store.bill_table import BILL_LINES
from gpuledger_cli.bill_table import bill_table as table_of
from gpuledger_reports.presenting.bill_html import as_html
from gpuledger_reports.presenting.explanation import explain_line
from gpuledger_reports.presenting.focus import focus_rows
from gpuledger_reports.presenting.output import as_csv, file_columns, file_rows
from gpuledger_reports.pricing.billing import Approval, Bill, BillMaker, gpu_seconds
from gpuledger_reports.pricing.closing import close, closed_lines, standing_bill
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.pricing.rows import row_of
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.examples import examples
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    Value,
    allocated,
    pod_row,
    usage_row,
    used,
)
from tests.unit.reports.test_bill import SEVEN, bill_of, costs, store_of
from tests.unit.reports.test_charging import rows_of_hours

MINUTE_NS = HOUR_NS // 60
SLICES: Mapping[str, Value] = {"gpu_compute_slices": 7}
INSTANCE: Mapping[str, Value] = {
    "gpu": "MIG-1",
    "parent_uuid": "GPU-a",
    "mig_profile": "1g",
    "compute_slices": 1,
    **SLICES,
}

UNKNOWN_INSTANCE: Mapping[str, Value] = {**INSTANCE, "compute_slices": None}


def given_to(pod: str | None, minutes: int = 60, **fields: Value) -> Row:
    return allocated(0, pod, minutes * MINUTE_NS, **fields)


def by(pod: str, minutes: int, **fields: Value) -> Row:
    return used(0, pod, minutes * MINUTE_NS, **fields)


def to_job(job: str, minutes: int = 60) -> Row:
    return usage_row(0, allocated_ns=minutes * MINUTE_NS, allocated_job_id=job)


def by_job(job: str, minutes: int) -> Row:
    return usage_row(0, category="job", job_id=job, busy_ns=minutes * MINUTE_NS)


def other(category: str, minutes: int) -> Row:
    return usage_row(0, category=category, busy_ns=minutes * MINUTE_NS)


def minutes_of(bill: Bill) -> dict[str, Fraction]:
    """Return the minutes used by others of each line that has some, by its values."""
    return {
        "/".join(line.values): Fraction(gpu_seconds(line.by_others)) / 60
        for line in bill.lines
        if line.by_others
    }


CASES: dict[str, tuple[Sequence[Row], dict[str, float]]] = {
    "one allocatee": ([given_to("a"), by("c", 40)], {"a": 40, "c": 40}),
    "an allocatee that also works": (
        [given_to("a"), by("a", 20), by("c", 40)],
        {"a": 40, "c": 40},
    ),
    "two allocatees, by allocated time": (
        [given_to("a", 45), given_to("b", 15), by("c", 40)],
        {"a": 30, "b": 10, "c": 40},
    ),
    "two users": ([given_to("a"), by("c", 30), by("d", 6)], {"a": 36, "c": 30, "d": 6}),
    "unallocated time first": (
        [given_to("a", 50), given_to(None, 10), by("c", 16)],
        {"a": 6, "c": 6},
    ),
    "the host has its part of the unallocated time": (
        [given_to("a", 50), given_to(None, 10), by("c", 15), other("host", 5)],
        {"a": 7.5, "c": 7.5},
    ),
    "only unallocated time": ([given_to("a", 50), given_to(None, 10), by("c", 10)], {}),
    "nobody has it": ([given_to(None), by("c", 40)], {}),
    "only allocatees": ([given_to("a", 30), given_to("b", 30), by("a", 60)], {}),
    "host and unattributed": ([given_to("a"), other("host", 20), other("unattributed", 9)], {}),
    "a pod whose name and UID are unknown": (
        [given_to("a"), usage_row(0, category="pod", busy_ns=HOUR_NS, pod_state="pending")],
        {},
    ),
    "a pod whose name is unknown": (
        [
            given_to("a"),
            usage_row(0, category="pod", busy_ns=HOUR_NS, pod_uid="c", pod_state="pending"),
        ],
        {},
    ),
    "an allocatee that the allocation only names": (
        [given_to("a", allocated_pod_uid=None, allocated_pod_state="named"), by("a", 20)],
        {},
    ),
    "an allocatee while the GPU is unresponsive": (
        [given_to("a", 30, unresponsive_ns=30 * MINUTE_NS), given_to("b", 30), by("a", 5)],
        {},
    ),
    "another GPU of the same pod": (
        [given_to("c"), given_to("a", gpu="GPU-b"), by("c", 12, gpu="GPU-b")],
        {"a": 12, "c": 12},
    ),
    "replicas, of which half are allocated": (
        [given_to("a", 15), given_to("b", 15), given_to(None, 30), by("a", 30), by("c", 20)],
        {},
    ),
    "replicas, all allocated": (
        [*(given_to(pod, 15) for pod in "abef"), by("a", 30), by("c", 20)],
        {**dict.fromkeys("abef", 5), "c": 20},
    ),
    "an instance": (
        [
            given_to(None, compute_slices=6, **SLICES),
            given_to("a", **INSTANCE),
            by("c", 35, **INSTANCE),
        ],
        {"a": 5, "c": 5},
    ),
    "an instance with unknown slices": (
        [given_to("a", **UNKNOWN_INSTANCE), by("c", 35, **UNKNOWN_INSTANCE)],
        {},
    ),
    "the GPU of a job": ([to_job("7"), by("c", 40)], {"__job__ 7": 40, "c": 40}),
    "a job on the GPU of a pod": ([given_to("a"), by_job("7", 40)], {"a": 40, "__job__ 7": 40}),
    "a job on the GPU of another job": (
        [to_job("7"), by_job("7", 3), by_job("8", 40)],
        {"__job__ 7": 40, "__job__ 8": 40},
    ),
    "a pod and a job that share a GPU": ([given_to("a", 30), to_job("7", 30), by("a", 50)], {}),
    "more use than a clock allows": ([given_to("a", 30), by("c", 60)], {"a": 30, "c": 30}),
}


@pytest.mark.parametrize("case", CASES)
def test_use_of_what_others_have_is_on_the_lines_of_both(case: str, tmp_path: Path) -> None:
    rows, expected = CASES[case]
    store = store_of(tmp_path, *rows, pods=[pod_row("a")])
    bill = bill_of(store, by=["pod", "job"], hours=1)
    found = {}
    for values, minutes in minutes_of(bill).items():
        pod, _, job = values.partition("/")
        found[pod if job == "__unallocated__" else f"__job__ {job}"] = minutes
    assert found == expected


def test_it_changes_no_cost(tmp_path: Path) -> None:
    store = store_of(tmp_path, given_to("a"), by("c", 40))
    assert costs(bill_of(store, hours=1)) == {"a": "7.00", "c": "0.00"}


def test_the_example_of_the_rules_has_its_result(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        given_to("a", 30),
        given_to("b", 20, unresponsive_ns=5 * MINUTE_NS),
        given_to(None, 10),
        by("b", 6),
        by("c", 16),
    )
    bill = bill_of(store, SEVEN + "basis: [{match: {pod: b}, basis: used}]", hours=1)
    assert minutes_of(bill) == {
        "a": Fraction("3.6"),
        "b": Fraction("2.4"),
        "c": 6,
    }
    assert gpu_seconds(next(line.billed for line in bill.lines if line.values == ("c",))) == 600


USERS_PAY = SEVEN + "use_without_allocation: user\n"


@pytest.mark.parametrize(
    ("rows", "basis", "expected"),
    [
        ([given_to("a"), by("c", 30)], "", {"a": "3.50", "c": "3.50"}),
        (
            [given_to("a", 30), given_to("b", 30), by("c", 30)],
            "",
            {"a": "1.75", "b": "1.75", "c": "3.50"},
        ),
        ([given_to("a"), by("c", 60), by("d", 60)], "", {"a": "0.00", "c": "3.50", "d": "3.50"}),
        (
            [given_to("a", 30), given_to(None, 30), by("c", 45)],
            "",
            {"a": "1.75", "c": "5.25"},
        ),
        ([given_to("a"), other("host", 30)], "", {"a": "7.00", "__host__": "0.00"}),
        (
            [given_to("a"), by("c", 30)],
            "basis: [{basis: used}]",
            {"a": "0.00", "c": "0.00", "__unused__": "7.00"},
        ),
    ],
)
def test_the_user_pays_for_the_allocatees_time_if_the_policy_requires_it(
    rows: Sequence[Row], basis: str, expected: dict[str, str], tmp_path: Path
) -> None:
    bill = bill_of(store_of(tmp_path, *rows), USERS_PAY + basis, hours=1)
    assert {line.values[0]: f"{line.cost:f}" for line in bill.lines} == expected
    assert bill.exact_asset_cost == 7


def test_unused_cost_stays_with_the_allocatee(tmp_path: Path) -> None:
    store = store_of(tmp_path, given_to("a", busy_ns=15 * MINUTE_NS), by("c", 45))
    bill = bill_of(store, USERS_PAY, hours=1)
    found = {line.values[0]: (line.gpu_cost, line.unused_cost) for line in bill.lines}
    assert found == {"a": (Fraction(7, 4), Fraction(7, 4)), "c": (Fraction(21, 4), 0)}


def test_a_line_of_both_pods_counts_it_once(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        given_to("a"),
        by("c", 40),
        given_to("a", gpu="GPU-b"),
        by("d", 6, gpu="GPU-b", namespace="other"),
    )
    assert minutes_of(bill_of(store, by=["namespace"], hours=1)) == {"ns": 46, "other": 6}
    assert minutes_of(bill_of(store, by=["cluster"], hours=1)) == {"prod": 46}
    assert minutes_of(bill_of(store, by=["gpu"], hours=1)) == {"GPU-a": 40, "GPU-b": 6}


@examples(30)
@given(rows=rows_of_hours())
def test_lines_of_any_dimensions_have_the_same_use(
    rows: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pods count it twice, and a cluster once."""
    store = store_of(tmp_path_factory.mktemp("store"), *rows)
    by_pod, by_cluster = (bill_of(store, by=[name]) for name in ("pod", "cluster"))
    assert sum(line.by_others for line in by_pod.lines) == 2 * sum(
        line.by_others for line in by_cluster.lines
    )
    for line in by_pod.lines:
        assert line.by_others >= 0
        assert line.allocated or line.by_others <= line.used


PRICES = SEVEN + "energy: [{name: grid, per_kilowatt_hour: 0.3}]\n"


def shown(bill: Bill) -> str:
    table, _ = table_of(bill, width=200)
    return " ".join(str(column.header) for column in table.columns)


def test_every_format_shows_it(tmp_path: Path) -> None:
    store = store_of(tmp_path, given_to("a"), by("c", 40))
    bill = bill_of(store, PRICES, hours=1)
    written = list(csv.DictReader(io.StringIO(as_csv([*file_columns(bill)], file_rows(bill)))))
    assert {row["pod"]: row["used_by_others_gpu_seconds"] for row in written} == {
        "a": "2400.000",
        "c": "2400.000",
    }
    hours: dict[str, Decimal] = defaultdict(Decimal)
    for row in focus_rows(bill, allocations=False):
        hours[row["SubAccountId"]] += row["x_UsedByOthersGpuHours"]
    assert hours == dict.fromkeys("ac", Decimal("0.666666667"))
    assert "Used by others" in shown(bill)
    page = as_html(bill, closed=[], arguments=[])
    assert "Used by others" in page
    assert page.count('<data value="2400.000">') == 4  # and what c used, with its total


def test_a_bill_without_it_has_no_column_for_people(tmp_path: Path) -> None:
    bill = bill_of(store_of(tmp_path, given_to("a"), by("a", 40)), hours=1)
    assert "others" not in shown(bill)
    assert "Used by others" not in as_html(bill, closed=[], arguments=[])
    assert all(row_of(bill, line)["used_by_others_gpu_seconds"] == 0 for line in bill.lines)


def test_an_explanation_names_the_other_line(tmp_path: Path) -> None:
    store = store_of(tmp_path, given_to("a", 45), given_to("b", 15), by("c", 40))
    maker = BillMaker(UsageReader(store), ReadPolicy(parse_policy(SEVEN), "", "test"), by=("pod",))
    bill = maker.make(Window(BEGIN_US, BEGIN_US + HOUR_US))
    texts = {
        line.values[0]: list(explain_line(bill, line, maker=maker, max_rows=0))
        for line in bill.lines
    }
    assert "  used by others: 0.5 h, by pod c" in texts["a"]
    assert "  used without an allocation: 0.5 h, allocated to pod a" in texts["c"]
    assert "  used without an allocation: 0.166667 h, allocated to pod b" in texts["c"]


def test_an_explanation_shows_the_time_for_which_the_user_pays(tmp_path: Path) -> None:
    read = ReadPolicy(parse_policy(USERS_PAY), "", "test")
    maker = BillMaker(
        UsageReader(store_of(tmp_path, given_to("a"), by("c", 30))), read, by=("pod",)
    )
    bill = maker.make(Window(BEGIN_US, BEGIN_US + HOUR_US))
    (line,) = (line for line in bill.lines if line.values == ("a",))
    texts = list(explain_line(bill, line, maker=maker, max_rows=0))
    assert "  used by others: 0.5 h, by pod c; the user pays for 0.5 h" in texts
    assert "  H100, prod: 0.5 GPU h x 7 = 3.5" in texts


def test_a_closed_bill_keeps_it(tmp_path: Path) -> None:
    bill = bill_of(store_of(tmp_path, given_to("a"), by("c", 40)), hours=1)
    close(bill, str(tmp_path))
    closed = closed_lines(str(tmp_path), bill.window, bill.by)
    again = standing_bill(closed, window=bill.window, by=bill.by, policy=bill.policy.policy)
    assert minutes_of(again) == {"a": 40, "c": 40}
    assert close(bill, str(tmp_path)) == []


def test_an_older_table_of_closed_bills_gets_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, given_to("a"), by("c", 40))
    older, newer = bill_of(store, by=["node"], hours=1), bill_of(store, hours=1)
    added = ("used_by_others_gpu_seconds", "note", "approved_by")
    with monkeypatch.context() as patch:
        columns = tuple(each for each in BILL_LINES.columns if each.name not in added)
        patch.setattr(bill_table, "BILL_LINES", replace(BILL_LINES, columns=columns))
        close(older, store)
    assert used_by_others(store, older) == [0]
    close(newer, store, approval=Approval("late"))
    assert used_by_others(store, newer) == [2400, 2400]
    assert {each.note for each in closed_lines(store, newer.window, newer.by)} == {"late"}
    assert used_by_others(store, older) == [0]


def used_by_others(store: str, bill: Bill) -> list[Decimal]:
    closed = closed_lines(store, bill.window, bill.by)
    return [line.used_by_others_gpu_seconds for line in closed]
