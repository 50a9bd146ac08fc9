"""Rightsizing: loads, compared with a list of all minutes, and the changes that they allow."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from math import ceil
from typing import Any, Final

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.errors import ArgumentError
from gpuledger.store.distributions import BUSY, DRAM, GIB, MEMORY, Distribution
from gpuledger.store.query import empty_relation
from gpuledger.store.usage_schema import INVENTORY, NODES
from gpuledger_reports.capacity.asking import answer, open_store, options_of
from gpuledger_reports.capacity.loads import BY
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.capacity.rightsizing import REPORT
from gpuledger_reports.capacity.waste import REPORT as WASTE
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.pricing.policy_file import parse_policy
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window
from tests.tables import for_each
from tests.unit.reports.capacity.views import view_usage
from tests.unit.reports.stores import (
    BEGIN_US,
    UNKNOWN,
    Row,
    Value,
    allocated,
    namespace_row,
    node_row,
    pod_row,
    usage_row,
    used,
    write_store,
)

MINUTE_NS: Final = 60 * 10**9
H100: Final = "NVIDIA H100 80GB HBM3"
FITS: Final = "no smaller device fits and saves more than 10 %"
POLICY: Final = parse_policy("""
prices:
  - {name: h100, product: H100, per_gpu_hour: 4}
  - {name: a100, product: A100, per_gpu_hour: 2}
  - {name: l4, product: L4, per_gpu_hour: 1}
""")


@dataclass(frozen=True)
class Minute:
    """The use of a device by its pod in a minute: percent of the minute, and GiB of memory."""

    busy: int
    gib: float = 8
    bandwidth: int | None = None


def buckets(of: Distribution, values: Sequence[float]) -> Row:
    counts = Counter(bisect_left(of.bounds, value) for value in values)
    return {column: counts[at] for at, column in enumerate(of.columns)}


def day_of(
    day: int, pod: str, minutes: Sequence[Minute | None], *, share: float = 1, **fields: Value
) -> list[Row]:
    """Return the rows of a day with these minutes, in which a device was allocated to a pod.

    A minute without a process is `None`.
    """
    there = [minute for minute in minutes if minute]
    busy = [minute.busy if minute else 0 for minute in minutes]
    of_device: Row = {"model": H100, **fields}
    bandwidths = [m.bandwidth for m in there if m.bandwidth is not None]
    rows = [
        allocated(
            day * 24,
            pod,
            round(len(minutes) * MINUTE_NS * share),
            **of_device,
            **buckets(BUSY, busy),
        )
    ]
    if there:
        rows.append(
            used(
                day * 24,
                pod,
                sum(busy) * MINUTE_NS // 100,
                **of_device,
                **buckets(BUSY, [minute.busy for minute in there]),
                **buckets(MEMORY, [minute.gib for minute in there]),
                **(buckets(DRAM, bandwidths) if bandwidths else {}),
                memory_bytes_max=round(max(minute.gib for minute in there) * GIB),
            )
        )
    return rows


def sized(
    rows: Sequence[Row],
    *,
    days: int = 7,
    policy: BillPolicy = POLICY,
    explain: str | None = None,
    history: int = 7,
    nodes: Sequence[Row] = (),
) -> Answer:
    memory = {H100: 80, "NVIDIA A100-SXM4-80GB": 80, "NVIDIA L4": 24}
    with duckdb.connect() as connection:
        view_usage(connection, "usage_daily", rows)
        connection.execute(f"CREATE TABLE inventory AS FROM {empty_relation(INVENTORY)}")
        for model, gib in memory.items():
            connection.execute(
                "INSERT INTO inventory (model, memory_total_bytes) VALUES (?, ?)",
                [model, gib * GIB],
            )
        connection.execute(f"DROP VIEW nodes; CREATE TABLE nodes AS FROM {empty_relation(NODES)}")
        for node in nodes:
            row = {
                **node,
                "in_force_from": datetime.fromtimestamp(node["in_force_from"] / 1e6, UTC),
            }
            values = ", ".join(f"${name} AS {name}" for name in row)
            connection.execute(f"INSERT INTO nodes BY NAME SELECT {values}", row)
        question = Question(
            # The part of a day at each end does not count.
            window=Window(BEGIN_US - HOUR_US, BEGIN_US + days * DAY_US + HOUR_US),
            by=BY,
            policy=policy,
            options={"minimum_history": history, "explain": explain},
        )
        return REPORT.read(connection, question)


def rank(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that this part of the values does not exceed."""
    return sorted(values)[ceil(percent * len(values) / 100) - 1]


minutes_of_a_device = st.lists(
    st.none()
    | st.builds(
        Minute,
        st.integers(0, 100),
        st.sampled_from([0.5, 1, 1.5, 11, 79, 300]),
        st.sampled_from([3, 50, 100]),
    ),
    min_size=1,
    max_size=60,
)


@given(st.lists(minutes_of_a_device, min_size=1, max_size=3))
def test_percentiles_are_those_of_all_minutes_rounded_up_to_a_bound(
    devices: list[list[Minute | None]],
) -> None:
    rows = [
        row
        for at, minutes in enumerate(devices)
        for row in day_of(0, "chat", minutes, gpu=f"GPU-{at}")
    ]
    (found,) = sized(rows).rows
    is_used = [any(minute and minute.busy for minute in minutes) for minutes in devices]
    counted = [
        minute
        for minutes, counts in zip(devices, is_used, strict=True)
        for minute in minutes
        if counts or not any(is_used)
    ]
    assert (found["gpus"], found["used_gpus"]) == (len(devices), sum(is_used))
    most = max((minute.gib for minute in counted if minute), default=0)
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
        busy = rank([minute.busy if minute else 0 for minute in counted], percent)
        gib = rank([minute.gib if minute else 0 for minute in counted], percent)
        bound = next(each for each in BUSY.bounds if busy <= each)
        assert found[f"utilization_{name}_ratio"] == bound / 100
        of_memory = next((each for each in MEMORY.bounds if gib <= each), most)
        assert found[f"memory_{name}_gib"] == min(most, of_memory)
        if any(counted):
            bandwidth = rank(
                [minute.bandwidth or 0 if minute else 0 for minute in counted], percent
            )
            bound = next(each for each in DRAM.bounds if bandwidth <= each)
            assert found[f"bandwidth_{name}_ratio"] == bound / 100


STEADY: Final = [Minute(busy=4)] * 1440
BUSY_DAY: Final = [Minute(busy=100, gib=70)] * 1440


def week(pod: str, minutes: Sequence[Minute | None], **fields: Value) -> list[Row]:
    return [row for day in range(7) for row in day_of(day, pod, minutes, **fields)]


def only(answer: Answer) -> dict[str, Any]:
    (row,) = answer.rows
    return row


def test_a_small_load_gets_the_instance_that_saves_most() -> None:
    found = only(sized(week("chat", STEADY)))
    assert found["recommendation"] == f"1 x {H100} 1g.10gb"
    assert (found["recommended_gpus"], found["recommended_mig_profile"]) == (1, "1g.10gb")
    assert found["saved_gpu_hours"] == round(168 * 6 / 7, 2)
    assert (found["saved_cost"], found["currency"]) == (576.0, "USD")
    assert found["risk"] == "medium"
    assert found["risk_reasons"] == ["memory bandwidth is not measured"]


def test_a_measured_bandwidth_lowers_the_risk() -> None:
    found = only(sized(week("chat", [Minute(busy=4, bandwidth=1)] * 1440)))
    assert (found["risk"], found["risk_reasons"]) == ("low", [])


def test_gpus_that_no_pod_used_are_returned() -> None:
    rows = [
        *week("train", BUSY_DAY),
        *week("train", [None] * 1440, gpu="GPU-b"),
    ]
    found = only(sized(rows))
    assert (found["gpus"], found["used_gpus"], found["risk"]) == (2, 1, "low")
    assert found["recommendation"] == f"1 x {H100}"
    assert (found["saved_gpu_hours"], found["saved_cost"]) == (168.0, 672.0)
    assert found["saved_by_fewer_cost"] == 672.0


def test_the_saving_by_fewer_gpus_is_known_if_smaller_ones_save_more() -> None:
    rows = week("chat", STEADY)
    assert only(sized(rows))["saved_by_fewer_cost"] is None
    found = only(sized([*rows, *week("chat", [None] * 1440, gpu="GPU-b")]))
    assert found["recommendation"] == f"1 x {H100} 1g.10gb"
    assert (found["saved_cost"], found["saved_by_fewer_cost"]) == (576.0 + 672.0, 672.0)


def test_gpus_that_a_pod_had_one_after_another_are_one() -> None:
    """It moved on the fourth day. The GPU that it left was never used."""
    rows = [
        *(row for day in range(4) for row in day_of(day, "train", [None] * 1440)),
        *(row for day in range(3, 7) for row in day_of(day, "train", BUSY_DAY, gpu="GPU-b")),
    ]
    found = only(sized(rows))
    assert (found["gpus"], found["used_gpus"]) == (1, 1)
    assert (found["recommendation"], found["note"]) == (None, FITS)


def test_memory_on_an_unused_gpu_is_a_risk() -> None:
    holding = [Minute(busy=0, gib=30)] * 1440
    found = only(sized([*week("train", BUSY_DAY), *week("train", holding, gpu="GPU-b")]))
    assert found["risk_reasons"] == ["an unused GPU held 30 GiB"]


def test_a_workload_needs_the_gpus_of_its_busiest_pod() -> None:
    def of_pods(*used_gpus: int) -> list[Row]:
        return [
            row
            for number, count in enumerate(used_gpus)
            for gpu in range(3)
            for row in week(
                f"pod-{number}",
                BUSY_DAY if gpu < count else [None] * 1440,
                gpu=f"GPU-{number}-{gpu}",
            )
        ]

    rows = sized([{**row, "allocated_pod": "w", "pod": "w"} for row in of_pods(1, 2)]).rows
    (found,) = rows
    assert (found["recommended_gpus"], found["saved_gpu_hours"]) == (2, 2 * 168.0)
    (found,) = sized([{**row, "allocated_pod": "w", "pod": "w"} for row in of_pods(1, 3)]).rows
    assert (found["recommendation"], found["note"]) == (None, FITS)


def test_another_model_of_the_cluster_is_recommended_if_it_saves_more() -> None:
    rows = [
        *week("light", [Minute(busy=5, gib=20, bandwidth=1)] * 1440),
        *week("other", [None] * 1440, gpu="GPU-l4", model="NVIDIA L4"),
    ]
    found = sized(rows).rows[0]
    assert found["recommendation"] == "1 x NVIDIA L4"
    assert (found["saved_gpu_hours"], found["saved_cost"]) == (168.0, 168 * 3.0)
    assert found["risk_reasons"] == ["the speeds of the models are from data sheets"]
    elsewhere = [{**row, "cluster": "lab"} if row["model"] != H100 else row for row in rows]
    assert sized(elsewhere).rows[0]["recommended_model"] == H100


SPOT: Final = parse_policy("""
prices:
  - {name: spot, product: A100, capacity_type: spot, per_gpu_hour: 0.5}
  - {name: a100, product: A100, per_gpu_hour: 2}
  - {name: h100, product: H100, per_gpu_hour: 4}
""")
MOVED: Final = "the speeds of the models are from data sheets"


@for_each(
    "present, others, saved, reasons",
    [
        ("on_demand", ["on_demand", "spot"], 2.0, [MOVED]),
        ("spot", ["on_demand", "spot"], 3.5, [MOVED]),
        (None, [None, "spot"], 2.0, [MOVED]),
        ("on_demand", ["spot"], 3.5, ["its capacity type is spot instead of on_demand", MOVED]),
        ("on_demand", [None], 2.0, ["its capacity type is unknown instead of on_demand", MOVED]),
    ],
)
def test_another_capacity_type_is_recommended_only_if_the_present_one_lacks_the_model_and_is_a_risk(
    present: str | None, others: list[str | None], saved: float, reasons: list[str]
) -> None:
    a100: Row = {"model": "NVIDIA A100-SXM4-80GB"}
    rows = week("chat", [Minute(busy=20, gib=60, bandwidth=1)] * 1440)
    nodes = [node_row(capacity_type=present)]
    for name in others:
        nodes.append(node_row(node=f"of-{name}", capacity_type=name))
        rows += week(f"pod-{name}", BUSY_DAY, gpu=f"GPU-{name}", node=f"of-{name}", **a100)
    found = sized(rows, policy=SPOT, nodes=nodes).rows[0]
    assert (found["workload"], found["recommended_model"]) == ("Pod/chat", a100["model"])
    assert found["saved_cost"] == 168 * saved
    assert found["risk_reasons"] == reasons
    assert found["risk"] == ("high" if len(reasons) > 1 else "medium")


def test_costs_are_split_on_the_day_after_a_node_changes() -> None:
    policy = parse_policy("""
prices:
  - {name: small, node_pool: small, per_gpu_hour: 1}
  - {name: large, node_pool: large, per_gpu_hour: 10}
""")
    rows = [*week("train", BUSY_DAY), *week("train", [None] * 1440, gpu="GPU-b")]
    nodes = [
        node_row(node_pool="small"),
        node_row(hour=30, node_pool="small", resource_version="2"),
        node_row(hour=99, node_pool="large", resource_version="3"),
    ]
    found = only(sized(rows, policy=policy, nodes=nodes))
    assert (found["gpus"], found["history_days"]) == (2, 7)
    assert (found["saved_gpu_hours"], found["saved_cost"]) == (168.0, 5 * 24 * 1.0 + 2 * 24 * 10.0)


def test_without_prices_only_gpu_hours_of_the_same_model_are_saved() -> None:
    rows = [
        *week("light", [Minute(busy=5, gib=20, bandwidth=1)] * 1440),
        *week("other", [None] * 1440, gpu="GPU-l4", model="NVIDIA L4"),
    ]
    answer = sized(rows, policy=BillPolicy())
    found = answer.rows[0]
    assert (found["recommended_model"], found["saved_gpu_hours"]) == (H100, 96.0)
    assert (found["saved_cost"], found["currency"]) == (None, None)
    assert answer.notes[-1].startswith("336.0 GPU-hours have no cost")


A_THIRD: Final[Mapping[str, Any]] = {
    "gpu": "MIG-1",
    "mig_profile": "3g.40gb",
    "compute_slices": 3,
    "gpu_compute_slices": 7,
    "memory_slices": 4,
    "gpu_memory_slices": 8,
}


def test_an_instance_may_become_smaller() -> None:
    found = only(sized(week("chat", [Minute(busy=5, gib=8, bandwidth=1)] * 1440, **A_THIRD)))
    assert found["recommended_mig_profile"] == "1g.10gb"
    assert found["saved_gpu_hours"] == round(168 * 2 / 7, 2)


@for_each(
    "rows, note",
    [
        (week("chat", BUSY_DAY), FITS),
        (week("chat", STEADY)[:-2], "history of 6 days; 7 are needed"),
        (
            [*day_of(0, "chat", STEADY), *day_of(29, "chat", STEADY)],
            "history of 2 days; 7 are needed",
        ),
        (week("chat", STEADY[:10], share=144), "its use is known for only 1 % of its time"),
        (week("chat", STEADY, share=1 / 4), "shares its GPUs"),
        (week("chat", [None] * 1440), "never used; see the report `waste`"),
        (week("chat", [Minute(0)] * 1440), "never used; see the report `waste`"),
        (
            [allocated(24 * day, "chat", busy_ns=None, model=H100) for day in range(7)],
            "its use is unknown",
        ),
        (
            [
                *week("chat", STEADY),
                *(
                    usage_row(24 * day, category="unattributed", model=H100, **counts)
                    for day in range(7)
                    for counts in [buckets(BUSY, [50] * 144)]
                ),
            ],
            "unknown processes used its GPUs in 10 % of minutes",
        ),
    ],
)
def test_a_workload_that_fits_or_is_unknown_gets_no_recommendation(
    rows: list[Row], note: str
) -> None:
    answer = sized(rows, days=30)
    found = only(answer)
    assert (found["recommendation"], found["saved_gpu_hours"], found["risk"]) == (None,) * 3
    assert found["note"] == note
    assert not answer.is_found


def test_days_without_counts_of_minutes_are_no_history() -> None:
    old = [allocated(24 * day, "chat", model=H100) for day in range(6)]
    assert only(sized([*old, *day_of(6, "chat", STEADY)]))["history_days"] == 1


def test_days_without_daily_sums_are_noted() -> None:
    note = "3 of 10 days have no daily sums, which `gpuledger store maintain` adds."
    assert sized(week("chat", STEADY), days=10).notes[1] == note
    assert note not in sized(week("chat", STEADY)).notes
    assert sized([], days=10).notes[1] == note.replace("3 of", "10 of")


def test_a_job_is_explained_by_its_number() -> None:
    rows = [
        {**row, "allocated_job_id": "77", "allocated_pod_state": None, "allocated_pod_uid": None,
         "allocated_namespace": None, "allocated_pod": None}
        if row["category"] == "idle" else {**row, "category": "job", "job_id": "77"}
        for row in week("chat", STEADY)
    ]  # fmt: skip
    (row,) = sized(rows, explain="job/77").rows
    assert (row["namespace"], row["workload"], row["used_gpus"]) == (None, "job/77", 1)


def test_time_without_an_allocation_is_no_workload() -> None:
    assert sized([allocated(0, None, model=H100), allocated(0, UNKNOWN, model=H100)]).rows == []


def test_a_row_is_a_workload_and_dimensions_only_select() -> None:
    rows = sized([*week("a", STEADY), *week("b", STEADY, gpu="GPU-b")]).rows
    found = [(row["cluster"], row["namespace"], row["workload"]) for row in rows]
    assert found == [("prod", "ns", "Pod/a"), ("prod", "ns", "Pod/b")]
    assert options_of(REPORT).keys() >= {"where", "top"}
    assert "by" not in options_of(REPORT)


@for_each(
    "where",
    [{"pool": "search"}, {"team": "search"}, {"model": H100, "namespace": "ns"}],
)
def test_a_selection_has_the_loads_and_savings_of_its_devices_only(
    where: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also if a workload has other devices, too."""
    owner: Row = {"owner_kind": "Deployment", "owner_name": "chat"}
    pods = [
        pod_row("chat-1", labels='{"team": "search"}', **owner),
        pod_row("chat-2", labels='{"team": "ads"}', node="m", **owner),
    ]
    nodes = [node_row(node_pool="search"), node_row(node="m", node_pool="ads")]
    rows = week("chat-1", STEADY)
    others = week("chat-2", BUSY_DAY, gpu="GPU-b", node="m", model="NVIDIA L4")

    def found(rows: Sequence[Row], where: Mapping[str, str]) -> Sequence[Row]:
        store = tmp_path_factory.mktemp("store")
        write_store(store, usage_daily=rows, pods=pods, nodes=nodes)
        with duckdb.connect() as connection:
            open_store(connection, str(store))
            window = Window(BEGIN_US, BEGIN_US + 7 * DAY_US)
            options = {"minimum_history": 7, "explain": None}
            question = Question(window=window, by=BY, policy=POLICY, where=where, options=options)
            return answer(REPORT, question, connection).rows

    assert len(found([*rows, *others], {})) == 2
    assert found([*rows, *others], where) == found(rows, {}) != []


@for_each("hours, pool_hour", [([50], 99), ([48, 50, 99], 99), ([30], 50)])
def test_teams_and_pools_have_the_same_hours_as_in_the_report_waste(
    hours: Sequence[int], pool_hour: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also if the labels of the namespace or node change, and with the load of their own days."""
    teams = ["team-0", *(f"team-{hour}" for hour in hours)]
    namespaces = [
        namespace_row("ns", hour=hour, labels=f'{{"team": "{team}"}}')
        for hour, team in zip((-24, *hours), teams, strict=True)
    ]
    nodes = [node_row(node_pool="small"), node_row(hour=pool_hour, node_pool="large")]
    busy = [0, 10, 20, 30, 40, 60, 100]
    of_days = [day_of(day, "p", [Minute(busy=each)] * 1440) for day, each in enumerate(busy)]
    store = tmp_path_factory.mktemp("store")
    write_store(
        store,
        usage_daily=[row for rows in of_days for row in rows],
        usage_hourly=[allocated(hour, "p", model=H100) for hour in range(7 * 24)],
        nodes=nodes,
        namespaces=namespaces,
    )

    window = Window(BEGIN_US, BEGIN_US + 7 * DAY_US)
    by = ("team", "pool")
    of_waste: Mapping[str, Any] = {"idle_minutes": "60"}
    options: Mapping[str, Any] = {"minimum_history": 1, "explain": None}
    with duckdb.connect() as connection:
        open_store(connection, str(store))
        question = Question(window=window, by=by, policy=POLICY, options=of_waste)
        waste = WASTE.read(connection, question).rows
        question = Question(window=window, by=(*BY, *by), policy=POLICY, options=options)
        found = REPORT.read(connection, question).rows
    expected = {(row["team"], row["pool"]): row["allocated_gpu_hours"] for row in waste}
    assert {(row["team"], row["pool"]): row["allocated_gpu_hours"] for row in found} == expected
    assert (len(found), sum(expected.values())) == (len(expected), 7 * 24)
    found = sorted(found, key=lambda row: row["utilization_max_ratio"])
    ends = [*accumulate(row["history_days"] for row in found)]
    assert ends[-1] == 7
    assert [row["utilization_max_ratio"] * 100 for row in found] == [busy[end - 1] for end in ends]


def test_the_largest_saving_comes_first() -> None:
    rows = [
        *week("little", STEADY[:60], gpu="GPU-a"),
        *week("large", BUSY_DAY, gpu="GPU-b"),
        *week("much", STEADY, gpu="GPU-c"),
    ]
    names = [row["workload"] for row in sized(rows).rows]
    assert names == ["Pod/much", "Pod/little", "Pod/large"]


def test_the_explanation_has_the_data_the_rule_and_the_risks() -> None:
    notes = sized(week("chat", STEADY), explain="ns/Pod/chat").notes
    assert notes == [
        "Whole days from 2026-10-01T00:00:00Z to 2026-10-08T00:00:00Z.",
        f"Data: 168.0 GPU-hours of {H100} in 7 days; a pod usually had up to 1 and used at most 1.",
        "Load in 10,080 minutes of used devices, as p50, p95, p99 and max:",
        "- utilization: 5, 5, 5, 5 %",
        "- memory: 8, 8, 8, 8 GiB",
        "- bandwidth: not measured",
        (
            "Rule: p99 of memory is at most 90 % of the device's, p95 of utilization and bandwidth"
            " at most 80 %, the saving more than 10 %, and the history at least 7 days."
        ),
        *notes[7:-2],
        f"Result: 1 x {H100} 1g.10gb.",
        "Costs are in USD.",
    ]
    assert notes[7] == (
        f"1 x {H100} 1g.10gb saves 144.0 GPU-hours and 576.00 USD; risk medium: memory bandwidth"
        " is not measured."
    )
    assert [note.split()[6] for note in notes[8:-2]] == ["1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb"]


def test_an_unknown_workload_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ArgumentError, match="did you mean ns/Pod/chat"):
        sized(week("chat", STEADY), explain="ns/Pod/chatt")
