"""Time of which the kubelet did not report the allocation is neither idle nor a tenant's."""

import json
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from gpuledger_reports.presenting.explanation import explain_line
from gpuledger_reports.presenting.output import as_json, unknown_text
from gpuledger_reports.pricing.billing import BillMaker
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    UNKNOWN,
    Row,
    Value,
    allocated,
    pod_row,
    usage_row,
    used,
)
from tests.unit.reports.test_bill import bill_of, costs, store_of

MINUTE_NS = HOUR_NS // 60
MINUTES = "prices: [{name: h100, model: H100, per_gpu_hour: 60}]\n"
"""A minute costs 1."""


def given_to(pod: str | None, minutes: int, **fields: Value) -> Row:
    return allocated(0, pod, minutes * MINUTE_NS, **fields)


def by(pod: str, minutes: int) -> Row:
    return used(0, pod, minutes * MINUTE_NS)


CASES: dict[str, tuple[Sequence[Row], dict[str, int]]] = {
    "not used": ([given_to(UNKNOWN, 60)], {UNKNOWN: 60}),
    "used by a pod": ([given_to(UNKNOWN, 60), by("c", 40)], {"c": 40, UNKNOWN: 20}),
    "used by the host": (
        [given_to(UNKNOWN, 60), usage_row(0, category="host", busy_ns=10 * MINUTE_NS)],
        {"__host__/overhead": 10, UNKNOWN: 50},
    ),
    "while an allocatee works": (
        [given_to("a", 45), given_to(UNKNOWN, 15), by("a", 60)],
        {"a": 45, UNKNOWN: 15},
    ),
    "in an hour of a pod that only the kubelet names": (
        [
            given_to("a", 45, allocated_pod_uid=None, allocated_pod_state="named"),
            given_to(UNKNOWN, 15),
        ],
        {"a": 45, UNKNOWN: 15},
    ),
    "unallocated time is used first": (
        [given_to(None, 30), given_to(UNKNOWN, 30), by("c", 20)],
        {"c": 20, "__idle__/idle": 10, UNKNOWN: 30},
    ),
    "unallocated time is used up": (
        [given_to(None, 30), given_to(UNKNOWN, 30), by("c", 40)],
        {"c": 40, UNKNOWN: 20},
    ),
    "not answered by the GPU either": (
        [given_to(UNKNOWN, 60, unresponsive_ns=10 * MINUTE_NS)],
        {"__unresponsive__/overhead": 10, UNKNOWN: 50},
    ),
}


@pytest.mark.parametrize("pods", [[], [pod_row("a"), pod_row("c")]], ids=["no records", "records"])
@pytest.mark.parametrize(("rows", "expected"), CASES.values(), ids=CASES)
def test_a_bill_has_a_line_of_its_own_for_time_of_unknown_allocation(
    rows: Sequence[Row], expected: dict[str, int], pods: Sequence[Row], tmp_path: Path
) -> None:
    bill = bill_of(store_of(tmp_path, *rows, pods=pods), MINUTES, hours=1)
    named = {"__unknown__/no_data" if who == UNKNOWN else who: m for who, m in expected.items()}
    assert costs(bill) == {who: f"{minutes}.00" for who, minutes in named.items()}
    assert json.loads(as_json(bill))["unknown_gpu_seconds"] == expected[UNKNOWN] * 60
    assert (bill.data_coverage_ratio, bill.line_cost) == (Fraction(1), Decimal(60))


def test_a_bill_names_the_time_of_unknown_allocation_and_its_cause(tmp_path: Path) -> None:
    rows = [given_to("a", 30), given_to(UNKNOWN, 30)]
    store = store_of(tmp_path, *rows, pods=[pod_row("a")])
    note = unknown_text(bill_of(store, MINUTES, hours=1))
    assert note
    assert all(word in note for word in ("kubelet", "0.50 GPU-hours", "__unknown__"))


def test_a_line_of_unknown_allocation_is_explained_by_its_rows(tmp_path: Path) -> None:
    store = store_of(tmp_path, given_to(UNKNOWN, 60))
    read = ReadPolicy(parse_policy(MINUTES), "0" * 64, "test")
    maker = BillMaker(UsageReader(store), read, by=("pod",))
    bill = maker.make(Window(BEGIN_US, BEGIN_US + HOUR_US))
    (line,) = bill.lines
    text = "\n".join(explain_line(bill, line, maker=maker, max_rows=0))
    assert "GPU-a - allocated 3600" in text
