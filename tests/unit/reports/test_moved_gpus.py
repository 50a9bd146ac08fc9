"""A second of a GPU is on the bill once, whichever nodes report the GPU."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_reports.presenting.output import as_json, duplicate_text
from gpuledger_reports.pricing.billing import Bill, gpu_seconds
from gpuledger_reports.reading.inventory import NEVER_US, InventoryRow, stays_of
from tests.examples import examples
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    allocated,
    inventory_row,
    used,
    write_store,
)
from tests.unit.reports.test_bill import bill_of, store_of

OLD: Row = {"node": "old"}
NEW: Row = {"node": "new"}


def hours_of(bill: Bill) -> dict[str, float]:
    """Return the billed GPU-hours of each node and tenant."""
    return {
        "/".join((*line.values, *([line.idle_kind] if line.idle_kind else []))): round(
            float(gpu_seconds(line.billed)) / 3600, 3
        )
        for line in bill.lines
        if line.billed
    }


MOVED = [
    inventory_row(**OLD),
    inventory_row(hour=1.5, **NEW),
]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [allocated(0, "a", **OLD), *(allocated(hour, "b", **NEW) for hour in (2, 3))],
            {
                "old/a": 1,
                "old/__no_data__/no_data": 0.5,
                "new/b": 2,
                "new/__no_data__/no_data": 0.5,
            },
            id="a node that is shut down",
        ),
        pytest.param(
            [allocated(hour, "a", **node) for hour in range(4) for node in (OLD, NEW)],
            {"old/a": 1.5, "new/a": 2.5},
            id="a node that was renamed while its old agent runs",
        ),
    ],
)
def test_a_gpu_is_billed_on_the_node_whose_inventory_listed_it_last(
    rows: list[Row], expected: dict[str, float], tmp_path: Path
) -> None:
    bill = bill_of(store_of(tmp_path, *rows, inventory=MOVED), by=("node", "pod"))
    found = hours_of(bill)
    assert sum(found.values()) == 4
    assert found == expected


def stays(*versions: tuple[str, int, str | None]) -> list[tuple[str, int, int | None]]:
    """Return the node, begin and end of each stay of `GPU-a`, from versions of inventories."""
    rows = [
        InventoryRow("prod", node, since_us, offset, gpu, "H100" if gpu else None)
        for offset, (node, since_us, gpu) in enumerate(versions)
    ]
    found = [
        (stay.node[1], stay.begin_us, None if stay.end_us == NEVER_US else stay.end_us)
        for stay in stays_of(rows, {})
        if stay.physical_gpu == "GPU-a"
    ]
    return sorted(found, key=lambda stay: stay[1])


def test_a_gpu_that_moves_back_is_in_one_node_at_a_time() -> None:
    versions = [("a", 1, "GPU-a"), ("b", 5, "GPU-a"), ("a", 9, "GPU-a")]
    assert stays(*versions) == [("a", 1, 5), ("b", 5, 9), ("a", 9, None)]


def test_a_gpu_that_leaves_its_node_does_not_return_to_the_former_one() -> None:
    versions = [("a", 1, "GPU-a"), ("b", 5, "GPU-a"), ("b", 9, None)]
    assert stays(*versions) == [("a", 1, 5), ("b", 5, 9)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 9), st.sampled_from(["GPU-a", "GPU-b", None])
        ),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 5), max_size=8),
)
def test_an_inventory_that_is_listed_again_moves_no_gpu(
    versions: list[tuple[str, int, str | None]], repeated: list[int]
) -> None:
    newest = [
        version
        for number, version in enumerate(versions)
        # An agent repeats the newest inventory of its node, at its own time.
        if all(other[0] != version[0] for other in versions[number + 1 :])
        and all(other[1] <= version[1] for other in versions if other[0] == version[0])
    ]
    again = [newest[number] for number in repeated if number < len(newest)]
    assert stays(*versions, *again) == stays(*versions)


def test_use_that_a_second_node_reports_is_not_billed_but_named(tmp_path: Path) -> None:
    """Here a node that was renamed while its old agent runs."""
    rows = [
        row
        for hour in range(4)
        for node in (OLD, NEW)
        for row in (
            allocated(hour, "a", **node, busy_ns=0),
            used(hour, "a", HOUR_NS, **node, energy_millijoules=1000),
        )
    ]
    bill = bill_of(store_of(tmp_path, *rows, inventory=MOVED), by=("node", "pod"))
    assert hours_of(bill) == {"old/a": 1.5, "new/a": 2.5}
    # In the hour of the change, the rows of both nodes count as they are.
    assert sum(gpu_seconds(line.used) for line in bill.lines) == 5 * 3600
    assert bill.data_coverage_ratio == 1
    assert bill.duplicate_gpus == {(("prod", "old"), "GPU-a"), (("prod", "new"), "GPU-a")}
    assert "samples of GPU-a from new and old are not" in (duplicate_text(bill) or "")
    assert json.loads(as_json(bill))["duplicate_gpus"] == 1
    more = replace(bill, duplicate_gpus=bill.duplicate_gpus | {(("prod", "old"), "GPU-b")})
    assert "from new and old and of 1 other GPU are not" in (duplicate_text(more) or "")


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        pytest.param(
            inventory_row(hour=1.5, node="third", kafka_offset=3),
            {"new/b": 0.5, "third/b": 0.5},
            id="moves on within an hour",
        ),
        pytest.param(
            inventory_row(hour=1.5, **NEW, kafka_offset=3, model="A100"),
            {"new/b": 1},
            id="is called another model within an hour",
        ),
    ],
)
def test_a_nodes_use_does_not_count_after_its_gpu_has_left_even_if_the_gpu(
    then: Row, expected: dict[str, float], tmp_path: Path
) -> None:
    lengths = {node.split("/")[0]: round(hours * HOUR_NS) for node, hours in expected.items()}
    rows = [
        allocated(1, "a", **OLD, busy_ns=0),
        used(1, "a", HOUR_NS, **OLD),
        *(allocated(1, "b", length, node=node) for node, length in lengths.items()),
    ]
    inventory = [inventory_row(**OLD), inventory_row(hour=-3, **NEW, kafka_offset=2), then]
    store = store_of(tmp_path, *rows, inventory=inventory)
    bill = bill_of(store, by=("node", "pod"), since=1, hours=2)
    assert hours_of(bill) == expected
    assert bill.duplicate_gpus == {(("prod", "old"), "GPU-a")}
    assert bill.excess_units == sum(line.used for line in bill.lines) == 0


lengths = st.sampled_from([0, 1, HOUR_NS // 3, HOUR_NS // 2, HOUR_NS, HOUR_NS + 7])
nodes = st.sampled_from(["old", "new", "third"])


@st.composite
def reports(draw: st.DrawFn) -> list[Row]:
    """Draw the usage of a GPU that several nodes report."""
    rows: list[Row] = []
    for hour in range(3):
        for node in draw(st.lists(nodes, max_size=3, unique=True)):
            pods = draw(st.lists(st.sampled_from(["a", None]), max_size=2, unique=True))
            rows += [allocated(hour, pod, draw(lengths), node=node) for pod in pods]
            rows += [used(hour, "c", draw(lengths), node=node)] if draw(st.booleans()) else []
    return rows or [allocated(0, None, 1, **OLD)]


inventories = st.lists(
    st.tuples(
        nodes,
        st.sampled_from([-24.0, 0.0, 0.25, 1.0, 1.5, 2.9]),
        st.booleans(),
        st.sampled_from(["H100", "A100"]),
    ),
    max_size=5,
    unique_by=lambda version: version[:2],
)


@examples(40)
@given(rows=reports(), inventory=inventories)
def test_each_second_of_a_gpu_is_billed_at_most_once_and_only_where_the_gpu_may_have_been(
    rows: list[Row], inventory: list[tuple[str, float, bool, str]]
) -> None:
    versions = [
        inventory_row(
            "GPU-a" if is_there else None, hour=hour, node=node, kafka_offset=offset, model=model
        )
        for offset, (node, hour, is_there, model) in enumerate(inventory)
    ]
    with TemporaryDirectory() as folder:
        store = write_store(Path(folder), usage_hourly=rows, inventory=versions)
        for since in range(3):
            bill = bill_of(store, by=("node", "pod"), since=since, hours=since + 1)
            assert sum(gpu_seconds(line.billed) for line in bill.lines) <= 3600
            elsewhere = nodes_without_gpu(versions, since)
            reporting = {row["node"] for row in rows if row["hour"] == BEGIN_US + since * HOUR_US}
            assert {node for (_, node), _ in bill.duplicate_gpus} == elsewhere & reporting
            assert not elsewhere & {line.values[0] for line in bill.lines if line.used}


def nodes_without_gpu(versions: list[Row], hour: int) -> set[str]:
    """Return the nodes that cannot have had the GPU: others had it for the whole hour."""
    rows = [
        InventoryRow(
            "prod",
            row["node"],
            row["in_force_from"],
            row["kafka_offset"],
            row["gpu_uuid"],
            row["model"],
        )
        for row in versions
    ]
    begin_us = BEGIN_US + hour * HOUR_US
    length_us = {
        node: sum(
            max(0, min(stay.end_us, begin_us + HOUR_US) - max(stay.begin_us, begin_us))
            for stay in stays_of(rows, {})
            if stay.node[1] == node
        )
        for node in ("old", "new", "third")
    }
    return {
        node
        for node in length_us
        if sum(length for other, length in length_us.items() if other != node) == HOUR_US
    }
