"""The lines of a bill: tenants, prices and costs, and that they add up."""

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuledger.errors import ArgumentError
from gpuledger_reports.presenting.output import scaled_text
from gpuledger_reports.pricing.billing import Bill, BillMaker, gpu_seconds
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.reading.charging_sql import UNITS
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from tests.examples import examples
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    allocated,
    inventory_row,
    namespace_row,
    node_row,
    pod_row,
    usage_row,
    used,
    write_store,
)
from tests.unit.reports.test_charging import rows_of_hours

SEVEN = "prices: [{name: h100, model: H100, per_gpu_hour: 7}]\n"
SEVENTH: Row = {"compute_slices": 1, "gpu_compute_slices": 7}


def bill_of(
    store: str,
    policy: str = SEVEN,
    *,
    by: Sequence[str] = ("pod",),
    since: int = 0,
    hours: int = 4,
) -> Bill:
    """Return the bill of the first hours of the first day, starting at one of them."""
    read = ReadPolicy(parse_policy(policy), "0" * 64, "test")
    maker = BillMaker(UsageReader(store, distinguishes_gpus="gpu" in by), read, by=by)
    window = Window(BEGIN_US + since * HOUR_US, BEGIN_US + hours * HOUR_US)
    return maker.make(window, with_days=True)


def costs(bill: Bill) -> dict[str, str]:
    """Return the cost of each line by its values, and its kind of idle if it has one."""
    return {
        "/".join((*line.values, *([line.idle_kind] if line.idle_kind else []))): f"{line.cost:f}"
        for line in bill.lines
    }


def store_of(tmp_path: Path, *usage: Row, **tables: Sequence[Row]) -> str:
    inventory = tables.pop("inventory", [inventory_row()])
    return write_store(tmp_path, properties=None, usage_hourly=usage, inventory=inventory, **tables)


def test_a_tenant_pays_for_allocated_time_and_its_unused_cost_is_shown(tmp_path: Path) -> None:
    busy = HOUR_NS // 4
    store = store_of(
        tmp_path,
        allocated(0, "a", busy_ns=HOUR_NS - busy),
        used(0, "a", busy),
        allocated(1, None),
    )
    bill = bill_of(store)
    assert costs(bill) == {"a": "7.00", "__idle__/idle": "7.00"}
    (line,) = (line for line in bill.lines if not line.idle_kind)
    assert (gpu_seconds(line.allocated), gpu_seconds(line.used)) == (Decimal(3600), Decimal(900))
    assert line.unused_cost == Fraction(21, 4)
    assert bill.asset_cost == bill.line_cost == Decimal(14)
    assert bill.data_coverage_ratio == Fraction(1)


@pytest.mark.parametrize("has_column", [True, False])
def test_a_bill_names_gpus_of_which_more_than_the_whole_was_allocated(
    tmp_path: Path, *, has_column: bool
) -> None:
    half = HOUR_NS // 2
    scaled = {"scaled_allocated_ns": half} if has_column else {}
    store = store_of(tmp_path, *(allocated(0, pod, half, **scaled) for pod in "ab"))
    bill = bill_of(store, hours=1)
    assert costs(bill) == {"a": "3.50", "b": "3.50"}
    assert bill.scaled_gpus == ({(("prod", "n"), "GPU-a")} if has_column else set())
    note = scaled_text(bill)
    assert all(word in note for word in ("GPU-a", "n")) if note else not has_column


def test_an_hour_of_an_instance_costs_its_share_of_slices(tmp_path: Path) -> None:
    cut: Row = {"parent_uuid": "GPU-a", "gpu_compute_slices": 7}
    store = store_of(
        tmp_path,
        allocated(0, None, compute_slices=2, gpu_compute_slices=7),
        allocated(0, "a", gpu="MIG-1", mig_profile="1g.10gb", compute_slices=1, **cut),
        allocated(0, "b", gpu="MIG-2", mig_profile="4g.40gb", compute_slices=4, **cut),
    )
    by_slices = {"__idle__/idle": "2.00", "a": "1.00", "b": "4.00"}
    assert costs(bill_of(store)) == by_slices
    own_price = "prices: [{name: 1g, mig_profile: '1g.*', per_gpu_hour: 1.5},"
    assert costs(bill_of(store, SEVEN.replace("prices: [", own_price))) == by_slices | {"a": "1.50"}


def test_an_instance_costs_its_share_of_memory_slices_if_the_policy_requires_it(
    tmp_path: Path,
) -> None:
    board: Row = {"gpu_compute_slices": 7, "gpu_memory_slices": 8}
    cut: Row = {"parent_uuid": "GPU-a", "mig_profile": "1g.20gb", "compute_slices": 1, **board}
    store = store_of(
        tmp_path,
        allocated(0, None, compute_slices=6, memory_slices=6, **board),
        allocated(0, "a", gpu="MIG-1", memory_slices=2, **cut),
    )
    by_compute, by_memory = (
        costs(bill_of(store, SEVEN + f"mig_slices: {slices}\n", hours=1))
        for slices in ("compute", "memory")
    )
    assert by_compute == {"a": "1.00", "__idle__/idle": "6.00"}
    assert by_memory == {"a": "1.75", "__idle__/idle": "5.25"}


@pytest.mark.parametrize(
    ("inventory", "nodes", "no_data"),
    [
        pytest.param([inventory_row()], [], "14.00", id="present all the time"),
        pytest.param(
            [inventory_row(hour=1.5)], [], "10.50", id="present from its first version on"
        ),
        pytest.param(
            [inventory_row(), inventory_row(None, hour=1.5)],
            [],
            "3.50",
            id="present until its removal",
        ),
        pytest.param(
            [inventory_row()],
            [node_row(), node_row(hour=1.25, deleted_time=BEGIN_US + HOUR_US + HOUR_US // 4)],
            "1.75",
            id="present until the node is deleted",
        ),
        pytest.param(
            [inventory_row()],
            [
                node_row(),
                node_row(hour=1.25, deleted_time=BEGIN_US + HOUR_US + HOUR_US // 4),
                node_row(hour=1.75),
            ],
            "10.50",
            id="present again once the node is back",
        ),
        pytest.param([], [], None, id="never in the inventory"),
    ],
)
def test_the_time_of_a_present_gpu_without_ticks_is_no_data(
    tmp_path: Path, inventory: list[Row], nodes: list[Row], no_data: str | None
) -> None:
    """Only the first of three hours has ticks; a row of another GPU extends usage to all three."""
    other = [inventory_row("GPU-z", hour=99)]
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(2, "z", 0, gpu="GPU-z"),
        inventory=[*inventory, *other],
        nodes=nodes,
    )
    found = costs(bill_of(store, hours=3))
    assert found.get("__no_data__/no_data") == no_data


@pytest.mark.parametrize(
    ("inventory", "cost", "coverage", "unlisted"),
    [
        pytest.param(
            [inventory_row(), inventory_row("GPU-b")], 42, Fraction(5, 6), {}, id="complete"
        ),
        pytest.param([inventory_row()], 35, Fraction(3, 5), {"GPU-b": 2}, id="one GPU is missing"),
        pytest.param([inventory_row(None)], 35, 0, {"GPU-a": 3, "GPU-b": 2}, id="without GPUs"),
        pytest.param([], 35, 0, {"GPU-a": 3, "GPU-b": 2}, id="no inventory"),
        pytest.param(
            [inventory_row(), inventory_row(hour=1), inventory_row("GPU-b", hour=1)],
            42,
            Fraction(4, 6),
            {"GPU-b": 1},
            id="one GPU is listed later",
        ),
        pytest.param(
            [inventory_row(), inventory_row("GPU-b"), inventory_row(hour=1)],
            35,
            Fraction(4, 5),
            {"GPU-b": 1},
            id="one GPU is no longer listed",
        ),
    ],
)
def test_samples_are_billed_whatever_the_inventory_lists_and_their_gpus_are_counted(
    tmp_path: Path,
    inventory: list[Row],
    cost: int,
    coverage: Fraction,
    unlisted: dict[str, int],
) -> None:
    """GPU-a has samples in three hours, and GPU-b in the first and the last one."""
    usage = [allocated(hour, "a") for hour in range(3)]
    usage += [allocated(hour, "b", gpu="GPU-b") for hour in (0, 2)]
    bill = bill_of(store_of(tmp_path, *usage, inventory=inventory), hours=3)
    assert (costs(bill)["a"], costs(bill)["b"]) == ("21.00", "14.00")
    assert bill.exact_asset_cost == cost
    assert bill.data_coverage_ratio == coverage
    assert bill.unlisted_gpus == {(("prod", "n"), gpu) for gpu in unlisted}
    assert gpu_seconds(bill.unlisted_units) == 3600 * sum(unlisted.values())


def test_time_after_the_last_usage_is_not_billed(tmp_path: Path) -> None:
    bill = bill_of(store_of(tmp_path, allocated(0, "a")), hours=24)
    assert costs(bill) == {"a": "7.00"}
    assert not bill.is_complete


def test_rows_of_a_pod_known_by_uid_or_by_name_are_one_line(
    tmp_path: Path,
) -> None:
    store = store_of(
        tmp_path,
        allocated(
            0, None, allocated_pod_state="named", allocated_namespace="ns", allocated_pod="a"
        ),
        usage_row(0, category="pod", busy_ns=HOUR_NS, pod_uid="uid-a", pod_state="pending"),
        pods=[pod_row("a", owner_kind="Job", owner_name="train")],
    )
    bill = bill_of(store, by=["namespace", "owner", "pod"])
    assert costs(bill) == {"ns/Job/train/a": "7.00"}
    assert gpu_seconds(bill.lines[0].used) == 3600


def test_a_name_refers_to_the_pod_that_had_it_in_that_hour(tmp_path: Path) -> None:
    by_name: Row = {
        "allocated_pod_state": "named",
        "allocated_namespace": "ns",
        "allocated_pod": "a",
    }
    gone = BEGIN_US + HOUR_US
    again = {"pod_uid": "uid-a2", "created_time": gone, "owner_kind": "Job", "owner_name": "2"}
    store = store_of(
        tmp_path,
        allocated(0, None, **by_name),
        allocated(1, None, **by_name),
        allocated(2, None, **by_name),
        pods=[
            pod_row("a", owner_kind="Job", owner_name="1", deleted_time=gone - 10_000_000),
            pod_row("a", hour=1, **again),
        ],
    )
    assert costs(bill_of(store, by=["owner_name"])) == {"1": "7.00", "2": "14.00"}


def test_labels_are_those_at_the_time_of_use(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        *(allocated(hour, "a") for hour in range(3)),
        pods=[
            pod_row("a", labels='{"team": "blue"}'),
            pod_row("a", hour=0.5, labels='{"team": "red"}'),
        ],
    )
    assert costs(bill_of(store, by=["label:team"])) == {"blue": "7.00", "red": "14.00"}


def test_annotations_are_those_at_the_time_of_use_and_can_replace_labels(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        *(allocated(hour, "a") for hour in range(3)),
        allocated(3, "b"),
        pods=[
            pod_row("a", annotations='{"example.com/cost-center": "17"}'),
            pod_row("a", hour=0.5, annotations='{"example.com/cost-center": "18"}'),
            pod_row("b", labels='{"cost-center": "19"}'),
        ],
    )
    tried = "['label:cost-center', 'annotation:example.com/cost-center']"
    policy = SEVEN + f"dimensions: {{centre: {tried}}}\n"
    expected = {"17": "7.00", "18": "14.00", "19": "7.00"}
    assert costs(bill_of(store, policy, by=["centre"])) == expected


def test_a_custom_dimension_has_the_first_existing_value(tmp_path: Path) -> None:
    policy = (
        SEVEN
        + "dimensions: {project: ['label:project', 'namespace-annotation:project', namespace]}\n"
    )
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(1, "b", allocated_namespace="said"),
        allocated(2, "c", allocated_namespace="silent"),
        pods=[pod_row("a", labels='{"project": "apollo"}')],
        namespaces=[namespace_row("said", annotations='{"project": "gemini"}')],
    )
    expected = {"apollo": "7.00", "gemini": "7.00", "silent": "7.00"}
    assert costs(bill_of(store, policy, by=["project"])) == expected


def test_missing_values_of_tenants_differ_from_unattributed_and_host_usage(tmp_path: Path) -> None:
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(1, None, busy_ns=0),
        usage_row(1, category="unattributed", busy_ns=HOUR_NS),
        allocated(2, None, busy_ns=0),
        usage_row(2, category="host", busy_ns=HOUR_NS),
        pods=[pod_row("a")],
    )
    found = costs(bill_of(store, by=["label:team", "mig_profile"], hours=3))
    assert found == {
        "__unallocated__/__unallocated__": "7.00",
        "__unattributed__/__unallocated__/overhead": "7.00",
        "__host__/__unallocated__/overhead": "7.00",
    }


def test_without_a_policy_a_team_is_the_label_of_the_pod_or_of_its_namespace(
    tmp_path: Path,
) -> None:
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(1, "b", allocated_namespace="other"),
        pods=[pod_row("a", labels='{"team": "red"}'), pod_row("b", namespace="other")],
        namespaces=[namespace_row("other", labels='{"team": "blue"}')],
    )
    expected = {"red": "7.00", "blue": "7.00"}
    assert costs(bill_of(store, by=["team"], hours=2)) == expected
    own = SEVEN + "dimensions: {project: ['label:project']}\n"
    assert costs(bill_of(store, own, by=["team"], hours=2)) == expected


def test_teams_can_be_assigned_by_a_table_with_dates(tmp_path: Path) -> None:
    policy = SEVEN + (
        "dimensions: {team: ['label:team']}\n"
        "teams:\n"
        "- {team: old, match: {namespace: ns}, to: 2026-10-01}\n"
        "- {team: nlp, match: {namespace: 'n?', pod: 'a*'}, from: 2026-10-01}\n"
    )
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(1, "b"),
        allocated(2, "c"),
        pods=[pod_row("b", labels='{"team": "own"}')],
    )
    expected = {"nlp": "7.00", "own": "7.00", "__unallocated__": "7.00"}
    assert costs(bill_of(store, policy, by=["team"])) == expected


def test_usage_without_an_allocation_is_billed_by_time_if_the_gpu_is_not_allocated(
    tmp_path: Path,
) -> None:
    store = store_of(
        tmp_path,
        allocated(0, None),
        used(0, "a", HOUR_NS // 2),
        usage_row(0, category="host", busy_ns=HOUR_NS // 4),
        allocated(1, "b"),
        used(1, "a", HOUR_NS // 2),
    )
    assert costs(bill_of(store)) == {
        "a": "3.50",
        "b": "7.00",
        "__host__/overhead": "1.75",
        "__idle__/idle": "1.75",
    }


def test_time_of_an_unresponsive_gpu_is_overhead(tmp_path: Path) -> None:
    store = store_of(tmp_path, allocated(0, "a", unresponsive_ns=HOUR_NS // 2))
    assert costs(bill_of(store)) == {"a": "3.50", "__unresponsive__/overhead": "3.50"}


@pytest.mark.parametrize(
    ("basis", "expected"),
    [
        ("basis: allocated", {"a": "7.00"}),
        ("basis: used", {"a": "1.75", "__unused__/unused": "5.25"}),
        ("basis: greater", {"a": "7.00"}),
        ("basis: blended, allocated_weight: 0.5", {"a": "4.37", "__unused__/unused": "2.63"}),
        ("basis: used, match: {pod: b}", {"a": "7.00"}),
    ],
)
def test_each_tenant_pays_by_its_basis_and_the_rest_is_unused(
    tmp_path: Path, basis: str, expected: dict[str, str]
) -> None:
    store = store_of(tmp_path, allocated(0, "a"), used(0, "a", HOUR_NS // 4))
    assert costs(bill_of(store, f"{SEVEN}basis: [{{{basis}}}]")) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("share: own_line", {"a": "7.00", "b": "14.00", "__idle__/idle": "7.00"}),
        ("share: even", {"a": "10.50", "b": "17.50", "__idle__/idle": "0.00"}),
        ("share: allocated", {"a": "9.33", "b": "18.67", "__idle__/idle": "0.00"}),
        ("share: used", {"a": "14.00", "b": "14.00", "__idle__/idle": "0.00"}),
        (
            "share: table, by: pod, weights: {a: 1, c: 3}",
            {
                "a": "7.00",
                "b": "14.00",
                "a/idle": "1.75",
                "c/idle": "5.25",
                "__idle__/idle": "0.00",
            },
        ),
        (
            "share: allocated, model: A100",
            {"a": "7.00", "b": "14.00", "__idle__/idle": "7.00"},
        ),
    ],
)
def test_idle_cost_is_distributed_as_the_policy_requires(
    tmp_path: Path, share: str, expected: dict[str, str]
) -> None:
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        used(0, "a", HOUR_NS // 2),
        allocated(1, "b"),
        allocated(2, "b"),
        allocated(3, None),
    )
    policy = f"{SEVEN}idle: [{{kind: idle, {share}}}]"
    assert costs(bill_of(store, policy)) == expected


def test_idle_cost_is_distributed_only_within_a_pool(tmp_path: Path) -> None:
    other: Row = {"node": "m", "gpu": "GPU-m"}
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(1, None),
        allocated(0, "b", **other),
        inventory=[inventory_row(), inventory_row("GPU-m", node="m", in_force_from=BEGIN_US)],
        nodes=[node_row(node_pool="one"), node_row(node="m", node_pool="two")],
    )
    policy = f"{SEVEN}idle: [{{kind: idle, share: allocated}}]"
    found = costs(bill_of(store, policy, by=["node_pool", "pod"], hours=1))
    assert found == {"one/a": "7.00", "two/b": "7.00"}
    found = costs(bill_of(store, policy, by=["node_pool", "pod"]))
    assert found["one/a"] == "14.00"
    assert found["two/__no_data__/no_data"] == "7.00"


def test_energy_is_billed_in_addition_to_hours_if_it_has_a_price(tmp_path: Path) -> None:
    policy = SEVEN + "energy: [{name: grid, per_kilowatt_hour: 0.20, pue: 1.5}]"
    store = store_of(
        tmp_path,
        allocated(0, "a", energy_millijoules=1_800_000_000),
        used(0, "a", HOUR_NS, energy_millijoules=1_800_000_000),
    )
    (line,) = bill_of(store, policy).lines
    assert (line.energy_cost, line.cost) == (Fraction(3, 10), Decimal("7.30"))


def test_gpus_without_a_price_cost_nothing_and_are_named(tmp_path: Path) -> None:
    bill = bill_of(store_of(tmp_path, allocated(0, "a")), "prices: []")
    assert costs(bill) == {"a": "0.00"}
    assert {model: gpu_seconds(units) for model, units in bill.unpriced.items()} == {"H100": 3600}


def test_an_instance_with_its_own_price_does_not_count_as_unpriced(tmp_path: Path) -> None:
    cut: Row = {"parent_uuid": "GPU-a", "gpu_compute_slices": 7, "mig_profile": "4g.40gb"}
    store = store_of(
        tmp_path,
        allocated(0, "a", gpu="MIG-1", compute_slices=4, **cut),
        allocated(0, None, compute_slices=3, gpu_compute_slices=7),
    )
    bill = bill_of(store, "prices: [{name: m, mig_profile: '4g*', per_gpu_hour: 3}]", hours=1)
    assert costs(bill) == {"a": "3.00", "__idle__/idle": "0.00"}
    left_over = Fraction(3600 * 3, 7)
    (unpriced,) = bill.unpriced.values()
    assert Fraction(unpriced, UNITS * 10**9) == left_over


def test_a_budget_shows_the_spent_amount_and_a_forecast(tmp_path: Path) -> None:
    policy = SEVEN + (
        "budgets: [{name: nlp, amount: 100, match: {namespace: ns}, from: 2026-10-01,"
        " to: 2026-10-02}]"
    )
    store = store_of(tmp_path, allocated(0, "a"), allocated(1, "b"), allocated(2, None))
    (state,) = bill_of(store, policy, hours=3).budgets
    assert (state.spent, state.elapsed) == (Fraction(14), Fraction(1, 8))
    assert state.forecast == Fraction(112)


def test_an_hour_is_billed_by_the_facts_at_its_start(tmp_path: Path) -> None:
    policy = (
        "prices:\n"
        "- {name: spot, capacity_type: spot, per_gpu_hour: 2}\n"
        "- {name: demand, per_gpu_hour: 7}\n"
    )
    store = store_of(
        tmp_path,
        *(allocated(hour, "a") for hour in range(3)),
        nodes=[node_row(capacity_type="spot"), node_row(hour=1.5, capacity_type="on-demand")],
    )
    assert costs(bill_of(store, policy)) == {"a": "11.00"}


EVEN = "{kind: no_data, share: even}, {kind: overhead, share: used}"


def test_nodes_with_equal_facts_are_distinguished_once_one_of_them_changes(tmp_path: Path) -> None:
    """Even on later days without changes: a group of nodes has the same facts all day."""
    spot = "{name: spot, capacity_type: spot, per_gpu_hour: 2}"
    policy = f"prices: [{spot}, {{name: rest, per_gpu_hour: 7}}]"
    hours = [*range(3), *range(24, 27)]
    store = store_of(
        tmp_path,
        *(allocated(hour, "a", node=node, gpu=f"GPU-{node}") for hour in hours for node in "mn"),
        inventory=[],
        nodes=[
            node_row(node="m", capacity_type="spot"),
            node_row(node="m", hour=2, capacity_type="on-demand"),
            node_row(node="n", capacity_type="spot"),
        ],
    )
    # m: two hours at 2 and four at 7; n: six hours at 2.
    expected = "44.00"
    assert costs(bill_of(store, policy, by=["namespace"], hours=48)) == {"ns": expected}
    assert costs(bill_of(store, policy, by=["node"], hours=48)) == {"m": "32.00", "n": "12.00"}
    assert costs(bill_of(store, policy, by=["owner"], hours=48)) == {"__unallocated__": expected}


def test_a_deleted_node_keeps_its_facts_for_the_time_before(tmp_path: Path) -> None:
    """The record of a deletion contains only the node's name."""
    policy = "prices: [{name: own, node_pool: dgx, per_gpu_hour: 7}]"
    store = store_of(
        tmp_path,
        allocated(0, "a"),
        allocated(1, "a"),
        nodes=[
            node_row(node_pool="dgx"),
            node_row(hour=1.5, deleted_time=BEGIN_US + HOUR_US + HOUR_US // 2),
        ],
    )
    assert costs(bill_of(store, policy, hours=2)) == {"a": "10.50"}


SHARED = "{kind: idle, share: allocated}"
TABLE = "{kind: idle, share: table, by: pod, weights: {a: 1, x: 2}}"
MACHINE = "{name: m, instance: {per_hour: 98.32, gpus: 8, vcpus: 192, memory_gb: 2048}}"
POLICIES = [
    SEVEN,
    SEVEN + "use_without_allocation: user\nbasis: [{basis: used, match: {pod: a}}]",
    SEVEN + "basis: [{basis: used, match: {pod: a}}, {basis: blended, allocated_weight: 0.3}]",
    f"currency: JPY\nprices: [{{name: h, per_gpu_hour: 100.1}}]\nidle: [{EVEN}, {SHARED}]",
    f"{SEVEN}idle: [{EVEN}]\nshared: [{{match: {{pod: a}}, share: allocated}}]",
    f"prices: [{{name: i, mig_profile: 1g, per_gpu_hour: 1}}, {MACHINE}]\nidle: [{TABLE}]",
    "prices: [{name: h, model: H100, per_gpu_hour: 7}, {name: a, model: A100, per_gpu_hour: 3}]",
]
models = st.sampled_from(["H100", "A100", None])
inventories = st.lists(
    st.builds(
        inventory_row,
        st.sampled_from([None, "GPU-a", "GPU-b"]),
        hour=st.sampled_from([-24, 0, 0.25, 0.5, 1, 1.5]),
    ).flatmap(lambda row: models.map(lambda model: {**row, "model": row["gpu_uuid"] and model})),
    max_size=6,
)


@examples(40)
@given(rows=rows_of_hours(), policy=st.sampled_from(POLICIES), inventory=inventories)
def test_the_lines_of_any_bill_sum_to_the_cost_of_the_gpus(
    rows: list[Row], policy: str, inventory: list[Row]
) -> None:
    """Exactly before rounding, and also as rounded; a second bill is equal."""
    with TemporaryDirectory() as folder:
        store = write_store(Path(folder), usage_hourly=rows, inventory=inventory)
        bill = bill_of(store, policy, by=["node", "pod"])
        again = bill_of(store, policy, by=["node", "pod"])
    assert sum(line.exact_cost for line in bill.lines) == bill.exact_asset_cost
    assert bill.line_cost == bill.asset_cost
    of_days = [cost for day in bill.days for cost in day.costs.values()]
    assert sum(of_days) == bill.exact_asset_cost
    assert bill.lines == again.lines
    assert min((line.billed for line in bill.lines), default=0) >= 0


@examples(15)
@given(rows=rows_of_hours())
def test_present_gpus_cost_their_hours_whatever_their_rows_contain(rows: list[Row]) -> None:
    inventory = [inventory_row(gpu) for gpu in ("GPU-a", "GPU-b")]
    with TemporaryDirectory() as folder:
        bill = bill_of(write_store(Path(folder), usage_hourly=rows, inventory=inventory))
    hours = (bill.end_us - BEGIN_US) // HOUR_US
    assert bill.exact_asset_cost == 2 * 7 * hours


@pytest.mark.parametrize(
    ("rows", "inventory", "cost"),
    [
        pytest.param(
            [allocated(0, "a", model=None)], [inventory_row()], 7, id="a row without a model"
        ),
        pytest.param(
            [allocated(0, "a", model="H100 NVL")],
            [inventory_row()],
            7,
            id="another name in the row",
        ),
        pytest.param(
            [allocated(0, "a")], [inventory_row(model=None)], 7, id="not in the inventory"
        ),
        pytest.param(
            [allocated(0, "a"), allocated(1, "a", model="A100")],
            [inventory_row(), inventory_row(hour=0.5, model="A100")],
            10,
            id="another model from the next full hour on",
        ),
        pytest.param(
            [allocated(0, "a", gpu="MIG-1", parent_uuid="GPU-a", model="H100 MIG 7g", **SEVENTH)],
            [inventory_row()],
            1,
            id="an instance whose name differs from its GPU's",
        ),
    ],
)
def test_a_row_its_gpu_and_their_price_have_one_model(
    tmp_path: Path, rows: list[Row], inventory: list[Row], cost: int
) -> None:
    policy = (
        "prices: [{name: h, model: H100, per_gpu_hour: 7}, {name: a, model: A100, per_gpu_hour: 3}]"
    )
    bill = bill_of(store_of(tmp_path, *rows, inventory=inventory), policy, hours=len(rows))
    assert costs(bill)["a"] == f"{cost}.00"
    assert bill.unpriced == {}


def test_time_of_an_instance_with_unknown_slices_is_no_data(tmp_path: Path) -> None:
    unknown = {**SEVENTH, "compute_slices": None}
    store = store_of(tmp_path, allocated(0, "a", gpu="MIG-1", parent_uuid="GPU-a", **unknown))
    assert costs(bill_of(store)) == {"__no_data__/no_data": "7.00"}


def test_absurd_amounts_are_billed_as_no_more_than_the_gpu(tmp_path: Path) -> None:
    store = store_of(
        tmp_path, allocated(0, "a", 2**62), allocated(0, "b", 2**62), used(0, "b", 2**62)
    )
    assert costs(bill_of(store)) == {"a": "3.50", "b": "3.50"}


@pytest.mark.parametrize(
    ("nodes", "no_data"),
    [
        pytest.param([], None, id="from its first usage on"),
        pytest.param([node_row(node="m", hour=1)], "7.00", id="or from its node in Kubernetes on"),
    ],
)
def test_a_gpu_of_a_node_without_a_clock_costs_nothing_before_it_was_present(
    tmp_path: Path, nodes: list[Row], no_data: str | None
) -> None:
    store = store_of(
        tmp_path,
        *(allocated(hour, "a") for hour in range(3)),
        allocated(2, "b", gpu="GPU-b", node="m"),
        inventory=[
            inventory_row(),
            inventory_row("GPU-b", node="m", in_force_from=5_000_000),
            inventory_row("GPU-b", node="m", hour=2),
        ],
        nodes=nodes,
    )
    found = costs(bill_of(store, hours=3))
    assert (found["a"], found["b"]) == ("21.00", "7.00")
    assert found.get("__no_data__/no_data") == no_data


@pytest.mark.parametrize(
    ("before", "after", "idle"), [("prod", "batch", "7.00"), ("batch", "prod", "7.00")]
)
def test_a_basis_selected_by_a_label_applies_for_the_time_of_that_label(
    tmp_path: Path, before: str, after: str, idle: str
) -> None:
    policy = SEVEN + "basis: [{match: {'label:tier': batch}, basis: used}]\n"
    store = store_of(
        tmp_path,
        *(allocated(hour, "a", busy_ns=HOUR_NS // 2) for hour in range(4)),
        *(used(hour, "a", HOUR_NS // 2) for hour in range(4)),
        pods=[
            pod_row("a", labels=f'{{"tier":"{before}"}}', resource_version="1"),
            pod_row("a", hour=2, labels=f'{{"tier":"{after}"}}', resource_version="2"),
        ],
    )
    assert costs(bill_of(store, policy, by=["label:tier"])) == {
        "prod": "14.00",
        "batch": "7.00",
        "__unused__/unused": idle,
    }


def test_a_pod_deleted_long_ago_is_not_a_tenant_whatever_its_versions(
    tmp_path: Path,
) -> None:
    """Its first versions do not contain the deletion, and another pod may have its name."""
    long_ago = {"created_time": BEGIN_US - 4800 * HOUR_US, "labels": '{"team": "gone"}'}
    store = store_of(
        tmp_path,
        allocated(0, "db-0", allocated_pod_state="named", allocated_pod_uid=None),
        pods=[
            pod_row("db-0", hour=-4800, **long_ago),
            pod_row("db-0", hour=-4799, deleted_time=BEGIN_US - 4799 * HOUR_US, **long_ago),
        ],
    )
    assert costs(bill_of(store, by=["label:team"])) == {"__unallocated__": "7.00"}
    assert UsageReader(store).pods(Window(BEGIN_US, BEGIN_US + HOUR_US)) == []


def test_a_bill_contains_the_table_versions_that_it_was_made_from(tmp_path: Path) -> None:
    """Neither the bill nor its versions include commits made meanwhile."""
    store = store_of(tmp_path, allocated(0, "a"), allocated(3, "a"))
    read = ReadPolicy(parse_policy(SEVEN), "0" * 64, "test")
    maker = BillMaker(UsageReader(store), read, by=["pod"])
    write_store(tmp_path, usage_hourly=[allocated(1, "b", gpu="GPU-b")])
    bill = maker.make(Window(BEGIN_US, BEGIN_US + 4 * HOUR_US))
    assert bill.versions["usage_hourly"] == 0
    assert "b" not in costs(bill)


UNNAMED_USER: Row = {"pod_state": "pending", "namespace": None, "pod": None}
UNNAMED_ALLOCATEE: Row = {
    "allocated_pod_state": "pending",
    "allocated_namespace": None,
    "allocated_pod": None,
}


def states_of(rows: list[Row], state: str, unnamed: set[int]) -> list[Row]:
    """Return the rows as written before pod b was known, or as only its node reported it.

    Some of them do not contain its name.
    """
    found: list[Row] = []
    for number, row in enumerate(rows):
        written = dict(row)
        if row.get("pod") == "b":
            written |= UNNAMED_USER if number in unnamed else {"pod_state": state}
        if row.get("allocated_pod") == "b":
            written |= UNNAMED_ALLOCATEE if number in unnamed else {"allocated_pod_state": state}
        found.append(written)
    return found


@examples(25)
@given(
    rows=rows_of_hours(),
    state=st.sampled_from(["known", "unknown"]),
    unnamed=st.sets(st.integers(0, 20)),
    recorded=st.sampled_from(["abcd", "acd"]),
)
@example(
    rows=[allocated(hour, "b", busy_ns=0) for hour in range(2)],
    state="known",
    unnamed={0},
    recorded="",
)
def test_a_bill_by_fewer_dimensions_is_the_sum_of_a_bill_by_more(
    rows: list[Row], state: str, unnamed: set[int], recorded: str
) -> None:
    """Whatever else divides the rows: the namespace, the pod's name or its UID.

    A bill is also the sum of the bills of the parts of its period.
    """
    with TemporaryDirectory() as folder:
        store = write_store(
            Path(folder),
            usage_hourly=states_of(rows, state, unnamed),
            inventory=[inventory_row("GPU-a"), inventory_row("GPU-b")],
            pods=[pod_row(pod) for pod in recorded],
        )
        coarse = amounts_of(bill_of(store, by=["namespace"]))
        for more in ("pod", "gpu", "owner"):
            assert amounts_of(bill_of(store, by=["namespace", more])) == coarse
        parts = [bill_of(store, by=["namespace"], since=at, hours=at + 1) for at in range(2)]
        assert amounts_of(*parts) == coarse


def amounts_of(*bills: Bill) -> dict[tuple[str, str | None], tuple[Fraction, ...]]:
    """Return the amounts of the lines of all bills by their first value and kind of idle."""
    found: dict[tuple[str, str | None], tuple[Fraction, ...]] = {}
    for line in (line for bill in bills for line in bill.lines):
        key = (line.values[0], line.idle_kind)
        amounts = (line.exact_cost, *map(Fraction, (line.allocated, line.used, line.billed)))
        before = found.get(key, (Fraction(0),) * len(amounts))
        found[key] = tuple(a + b for a, b in zip(before, amounts, strict=True))
    return found


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("nmespace", r"did you mean namespace\?"),
        ("centr", r"did you mean centre\?"),
        ("workload", "dimensions are cluster, .*, owner, .*, node-label:KEY"),
    ],
)
def test_an_unknown_dimension_is_rejected_by_name(name: str, remedy: str, tmp_path: Path) -> None:
    store = store_of(tmp_path, allocated(0, "a"))
    with pytest.raises(ArgumentError, match=f"by: unknown dimension '{name}'; {remedy}"):
        bill_of(store, "dimensions: {centre: [label:centre]}", by=[name])


@examples(15)
@given(
    rows=rows_of_hours(),
    policy=st.sampled_from(POLICIES),
    inventory=inventories,
    hours=st.sampled_from([1, 2, 24]),
)
def test_bills_of_consecutive_periods_equal_those_made_separately(
    rows: list[Row], policy: str, inventory: list[Row], hours: int
) -> None:
    """Whether a period ends with a day or within one; for GPUs whose model does not change."""
    rows = [{**row, "model": "H100"} for row in rows]
    inventory = [{**row, "model": "H100"} for row in inventory]
    windows = [
        Window(begin_us, begin_us + hours * HOUR_US)
        for begin_us in range(BEGIN_US, BEGIN_US + 48 * HOUR_US, hours * HOUR_US)
    ]
    with TemporaryDirectory() as folder:
        store = write_store(Path(folder), usage_hourly=rows, inventory=inventory)
        read = ReadPolicy(parse_policy(policy), "0" * 64, "test")
        maker = BillMaker(UsageReader(store), read, by=["node", "pod"])
        together = list(maker.make_each(windows))
        alone = [maker.make(window) for window in windows]
    assert [bill.lines for bill in together] == [bill.lines for bill in alone]
    assert [bill.exact_asset_cost for bill in together] == [bill.exact_asset_cost for bill in alone]
    assert [bill.end_us for bill in together] == [bill.end_us for bill in alone]


def test_versions_of_a_pod_without_a_change_are_not_read(tmp_path: Path) -> None:
    """All but one: the others do not affect the pod's name at a time or its deletion."""
    gone = BEGIN_US + 3 * HOUR_US
    versions = [
        pod_row("a", hour=0),
        pod_row("a", hour=0.5, container_id="c"),
        pod_row("a", hour=1, labels='{"team":"x"}'),
        pod_row("a", hour=2, labels='{"team":"x"}', container_id="c"),
        pod_row("a", hour=3, labels='{"team":"x"}', deleted_time=gone),
    ]
    store = store_of(tmp_path, allocated(0, "a"), pods=versions)
    found = UsageReader(store).pods(Window(BEGIN_US, BEGIN_US + 4 * HOUR_US))
    assert [(each.since_us, each.labels, each.deleted_us) for each in found] == [
        (BEGIN_US, "{}", gone),
        (BEGIN_US + HOUR_US, '{"team":"x"}', gone),
    ]
