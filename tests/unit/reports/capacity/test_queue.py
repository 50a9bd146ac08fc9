"""How long pods waited for GPUs, and the demand that was not met."""

import csv
import gzip
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.store.distributions import BUSY
from gpuledger.store.views import create_views
from gpuledger_reports.capacity.queue import REPORT
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.pricing.policy import BillPolicy, TeamRow
from gpuledger_reports.reading.times import Window
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    Row,
    Value,
    allocated,
    inventory_row,
    namespace_row,
    pending_row,
    pod_row,
    usage_row,
    write_store,
)

TRACE = Path(__file__).parents[3] / "data/traces/openb_waits.csv.gz"
GPU = '{"nvidia.com/gpu":"1"}'
HOUR = 3600.0


def queue(
    store: Path,
    *,
    waiting: Sequence[Row] = (),
    placed: Sequence[Row] = (),
    by: tuple[str, ...] = ("namespace",),
    begin: float = 0,
    hours: float = 10,
    namespaces: Sequence[Row] = (),
    held: Sequence[Row] = (),
    policy: BillPolicy | None = None,
    **given: str,
) -> Answer:
    uri = write_store(
        store, pending_pods=waiting, pods=placed, namespaces=namespaces, usage_daily=held
    )
    with duckdb.connect() as connection:
        create_views(connection, uri)
        return answer(connection, by=by, begin=begin, hours=hours, policy=policy, **given)


def answer(
    connection: duckdb.DuckDBPyConnection,
    *,
    by: tuple[str, ...] = ("namespace",),
    begin: float,
    hours: float,
    policy: BillPolicy | None = None,
    **given: str,
) -> Answer:
    begin_us = BEGIN_US + round(begin * HOUR_US)
    window = Window(begin_us, begin_us + round(hours * HOUR_US))
    policy, options = policy or BillPolicy(prices=[]), REPORT.parse_options(given)
    question = Question(window=window, by=by, policy=policy, options=options)
    return REPORT.read(connection, question)


def placed_row(pod: str, *, created: float, scheduled: float | None, **fields: Value) -> Row:
    """Return the row of a pod that got a node, with a container that requests a GPU."""
    at = [
        None if hour is None else BEGIN_US + round(hour * HOUR_US) for hour in (created, scheduled)
    ]
    return pod_row(
        pod,
        **{
            "created_time": at[0],
            "scheduled_time": at[1],
            "container_id": f"id-{pod}",
            "container": "main",
            "requested": GPU,
            **fields,
        },
    )


def test_a_note_names_a_pod_that_no_node_could_have(tmp_path: Path) -> None:
    mistyped = pending_row("mistyped", created=0, requested='{"nvidia.com/gpu":"1000"}')
    write_store(tmp_path, inventory=[inventory_row()])
    found = queue(tmp_path, waiting=[mistyped, pending_row("fits", created=0)])
    assert found.rows[0]["unmet_gpus"] == 1001
    note = "Pods that request more GPUs than any node has: 1, such as ns/mistyped (1000 GPUs)."
    assert note in found.notes


def test_an_instance_with_media_engines_has_the_size_that_usage_has(tmp_path: Path) -> None:
    usage = usage_row(
        1,
        gpu="MIG-1",
        parent_uuid="GPU-a",
        mig_profile="1g.6gb+me",
        compute_slices=1,
        gpu_compute_slices=4,
    )
    write_store(tmp_path, usage_hourly=[usage])
    pod = pending_row("media", created=0, requested='{"nvidia.com/mig-1g.6gb.me":"2"}')
    (row,) = queue(tmp_path, waiting=[pod]).rows
    assert row["waiting_gpus"] == 0.5


def test_each_pod_counts_once_whichever_tables_have_it(tmp_path: Path) -> None:
    found = queue(
        tmp_path,
        waiting=[
            pending_row("both", created=1, left=3.5),
            pending_row("both", created=1, kafka_offset=1, resource_version="1001"),
            pending_row("both", created=1, left=3.5, kafka_offset=2, resource_version="1002"),
            pending_row("waits", created=4),
            pending_row("deleted", created=5, left=7),
        ],
        placed=[
            # Two containers and a restart; only one container requests a GPU.
            placed_row("both", created=1, scheduled=3),
            placed_row("both", created=1, scheduled=3, container_id="id-2"),
            placed_row("both", created=1, scheduled=3, container="log", requested=None),
            placed_row("at-once", created=2, scheduled=2),
            placed_row("without-gpu", created=2, scheduled=9, requested=None),
            placed_row("old-row", created=2, scheduled=None),
        ],
    )
    (row,) = found.rows
    assert (row["pods"], row["waiting"], row["never_scheduled"]) == (4, 1, 1)
    # Waits of 0 h, 2 h, and 6 h up to the end of the window.
    assert [row[f"wait_{name}_seconds"] for name in ("p50", "p95", "max")] == [
        2 * HOUR,
        6 * HOUR,
        6 * HOUR,
    ]
    assert row["unmet_gpu_hours"] == pytest.approx(2 + 6 + 2)
    assert (row["unmet_gpus"], row["waiting_gpus"]) == (pytest.approx(1.0), 1)
    assert row["unmet_gpus_max"] == pytest.approx(2.0)


def test_only_the_part_in_the_window_is_unmet_demand_but_the_whole_wait_counts(
    tmp_path: Path,
) -> None:
    rows = [
        pending_row("before", created=0, left=2),
        pending_row("into", created=0, left=4),
        pending_row("around", created=1, left=9),
        pending_row("after", created=6, left=7),
    ]
    got = [
        placed_row(name, created=created, scheduled=until)
        for name, created, until in [("before", 0, 2), ("into", 0, 4), ("around", 1, 9)]
    ]
    (row,) = queue(tmp_path, waiting=rows, placed=got, begin=3, hours=2).rows
    assert (row["pods"], row["waiting"], row["unmet_gpu_hours"]) == (2, 1, pytest.approx(1 + 2))
    assert (row["wait_p50_seconds"], row["wait_max_seconds"]) == (4 * HOUR, 4 * HOUR)


def test_groups_are_ranked_by_unmet_demand_and_have_their_reasons(tmp_path: Path) -> None:
    gate: dict[str, Value] = {
        "reason": "SchedulingGated",
        "scheduling_gates": '["kueue.x-k8s.io/admission"]',
    }
    waiting = [
        pending_row("small", created=1, queue="a"),
        pending_row("large", created=1, queue="b", requested='{"nvidia.com/gpu":"8"}', **gate),
        # Unschedulable for less time than it was gated.
        pending_row(
            "large",
            created=1,
            queue="b",
            requested='{"nvidia.com/gpu":"8"}',
            reason="Unschedulable",
            message="0/3 nodes are available",
            in_force_from=BEGIN_US + 9 * HOUR_US,
            resource_version="1002",
        ),
        pending_row(
            "claim", created=1, queue="a", requested="{}", message="cannot allocate\n\tall claims\n"
        ),
    ]
    found = queue(tmp_path, waiting=waiting, by=("queue", "shape"))
    assert [(row["queue"], row["shape"], row["unmet_gpu_hours"]) for row in found.rows] == [
        ("b", "8 GPUs", pytest.approx(72)),
        ("a", "1 GPU", pytest.approx(9)),
        ("a", "claim", None),
    ]
    assert found.rows[0]["reasons"] == "SchedulingGated: kueue.x-k8s.io/admission (1)"
    assert found.rows[1]["reasons"] == "no reason yet (1)"
    assert found.rows[2]["waiting_gpus"] is None
    longest = "ns/claim (claim) has waited the longest: 9h; cannot allocate all claims"
    assert longest in found.notes


def test_teams_are_those_of_bills(tmp_path: Path) -> None:
    """The rules come from the price file; the newest labels of a pod and its namespace count."""
    policy = BillPolicy(
        prices=[],
        dimensions={"team": ["label:team", "namespace-label:team"]},
        teams=[
            TeamRow(match={"namespace": "old-*"}, team="before", until=date(2026, 10, 2)),
            TeamRow(match={"namespace": "old-*"}, team="after"),
        ],
    )
    later: dict[str, Value] = {"in_force_from": BEGIN_US + 9 * HOUR_US, "labels": '{"team":"b"}'}
    later["resource_version"] = "1002"
    found = queue(
        tmp_path,
        waiting=[
            pending_row("labeled", created=1, labels='{"team":"a"}'),
            pending_row("labeled", created=1, **later),
            pending_row("in-namespace", created=1, left=2),
            pending_row("in-another", created=1, namespace="other"),
            pending_row("until", created=1, left=2, namespace="old-x"),
            pending_row("since", created=30, namespace="old-x"),
        ],
        placed=[placed_row("at-once", created=1, scheduled=1, labels='{"team":"b"}')],
        namespaces=[namespace_row("ns", labels='{"team":"c"}')],
        by=("team",),
        hours=48,
        policy=policy,
    )
    assert {row["team"]: row["pods"] for row in found.rows} == {
        "b": 2,
        "c": 1,
        "__unallocated__": 1,
        "before": 1,
        "after": 1,
    }


hours_of_days = st.integers(0, 3 * 24 * 4).map(lambda quarter: quarter / 4)
ends = st.sampled_from(["placed", "deleted", "waits"])


@given(st.lists(st.tuples(hours_of_days, hours_of_days, ends), min_size=1))
@settings(max_examples=20)
def test_the_history_of_a_day_is_the_report_on_this_day(
    pods: list[tuple[float, float, str]],
) -> None:
    waiting, placed = [], []
    for number, (one, other, end) in enumerate(pods):
        created, left = sorted((one, other))
        pod, namespace = f"p{number}", "ab"[number % 2]
        if end != "placed" or created < left:
            until = None if end == "waits" else left
            waiting.append(pending_row(pod, created=created, left=until, namespace=namespace))
        if end == "placed":
            row = placed_row(pod, created=created, scheduled=left, namespace=namespace)
            placed.append(row)
    with TemporaryDirectory() as folder, duckdb.connect() as connection:
        create_views(connection, write_store(Path(folder), pending_pods=waiting, pods=placed))
        history = answer(connection, begin=6, hours=3 * 24 - 6, history="day")
        days = [
            {**row, "day": f"2026-10-0{number}"}
            for number, (begin, hours) in enumerate(((6, 18), (24, 24), (48, 24)), start=1)
            for row in answer(connection, begin=begin, hours=hours).rows
        ]
    assert history.rows == days


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    assert queue(tmp_path, placed=[placed_row("cpu", created=1, scheduled=2, requested=None)]) == (
        Answer(rows=[])
    )


def test_waiting_gpus_are_rounded_and_unknown_only_if_a_pod_that_waits_has_no_size(
    tmp_path: Path,
) -> None:
    waiting = [
        pending_row("mig", created=1, requested='{"nvidia.com/mig-1g.10gb":"1"}'),
        pending_row("claim", created=1, requested="{}"),
        pending_row("left", created=1, left=2),
    ]
    found = queue(tmp_path, waiting=waiting, by=("shape",))
    assert {row["shape"]: row["waiting_gpus"] for row in found.rows} == {
        "1g.10gb": 0.14,
        "claim": None,
        "1 GPU": 0,
    }


def held_row(
    pod: str, part: float, *, minutes: int = 600, hours: float = 10, **fields: Value
) -> Row:
    """Return the day in which a pod held a part of a GPU for some hours."""
    about = dict.fromkeys(BUSY.columns, 0) | {"busy_minutes_0": 1, "busy_minutes_100": minutes - 1}
    return allocated(0, pod, round(part * hours * HOUR_NS), **{**about, **fields})


def test_pods_that_wait_for_time_slices_count_as_parts_of_gpus(tmp_path: Path) -> None:
    """Two GPUs have four slices each; 16 pods request one, and half of them run."""
    (row,) = queue(
        tmp_path,
        waiting=[pending_row(f"waits-{number}", created=1) for number in range(8)],
        # They got their node before the time range.
        placed=[placed_row(f"runs-{number}", created=-30, scheduled=-30) for number in range(8)],
        held=[held_row(f"runs-{number}", 0.25, gpu=f"GPU-{number // 4}") for number in range(8)],
    ).rows
    assert (row["pods"], row["waiting"], row["waiting_gpus"]) == (8, 8, 2)
    assert (row["unmet_gpus"], row["unmet_gpus_max"]) == (
        pytest.approx(1.8, rel=0.01),
        pytest.approx(2, rel=0.01),
    )


TWO = '{"nvidia.com/gpu":"2"}'
RENAMED = '{"nvidia.com/gpu.shared":"1"}'
MIG: dict[str, Value] = {"mig_profile": "1g.10gb", "compute_slices": 1, "gpu_compute_slices": 7}


UNCOUNTED: dict[str, Value] = dict.fromkeys(BUSY.columns)
REQUESTS: Sequence[tuple[str, list[Row], float | None]] = [
    (GPU, [held_row("runs", 1)], 1),
    (GPU, [], 1),
    (GPU, [held_row("runs", 0.5)], 0.5),
    # An earlier version of gpuledger did not count minutes.
    (GPU, [held_row("runs", 0.5, **UNCOUNTED)], 1),
    # Two slices of one GPU, and of two GPUs.
    (TWO, [held_row("runs", 0.5)], 0.5),
    (TWO, [held_row("runs", 0.25), held_row("runs", 0.25, gpu="GPU-b")], 0.5),
    # All slices of the second GPU.
    (TWO, [held_row("runs", 0.25), held_row("runs", 1, gpu="GPU-b")], 1.25),
    (RENAMED, [held_row("runs", 0.5)], 0.5),
    (RENAMED, [], None),
    # The device plugin has a MIG instance for each `nvidia.com/gpu`.
    (GPU, [held_row("runs", 1, gpu="MIG-a", **MIG)], 0.14),
    # The first and the last of three minutes are partial.
    (GPU, [held_row("runs", 1, minutes=3, hours=1.1 / 60)], 1),
    (GPU, [held_row("runs", 0.25, minutes=3, hours=2 / 60)], 0.25),
    # Two minutes show nothing, and neither does a day whose use is mostly unknown.
    (GPU, [held_row("runs", 0.25, minutes=2, hours=2 / 60)], 1),
    (GPU, [held_row("runs", 0.5, minutes=120)], 1),
    # Unresponsive time is not known use.
    (GPU, [held_row("runs", 0.25, minutes=120, unresponsive_ns=2 * HOUR_NS)], 0.25),
    # The request states the size.
    ('{"nvidia.com/gpu":"1","nvidia.com/gpucores":"30"}', [held_row("runs", 0.5)], 0.3),
]
"""Requests, the usage of a pod that ran, and the GPUs of another one."""


def test_a_pod_that_waits_counts_as_the_part_that_a_pod_with_its_request_held(
    tmp_path: Path,
) -> None:
    waiting, placed, held = [], [], []
    for number, (requested, rows, _) in enumerate(REQUESTS):
        about: dict[str, Value] = {"cluster": f"c{number}", "requested": requested}
        waiting.append(pending_row("waits", created=1, **about))
        placed.append(placed_row("runs", created=1, scheduled=1, **about))
        held += [{**row, "cluster": f"c{number}"} for row in rows]
    found = queue(tmp_path, waiting=waiting, placed=placed, held=held, by=("cluster",))
    assert {row["cluster"]: row["waiting_gpus"] for row in found.rows} == {
        f"c{number}": gpus for number, (*_, gpus) in enumerate(REQUESTS)
    }


def test_pods_that_ran_without_a_known_size_do_not_count_as_whole_gpus(tmp_path: Path) -> None:
    (row,) = queue(
        tmp_path,
        waiting=[pending_row("waits", created=1)],
        placed=[placed_row(f"runs-{number}", created=1, scheduled=1) for number in range(6)],
        held=[held_row("runs-0", 0.25)]
        + [held_row(f"runs-{number}", 0.25, minutes=2, hours=2 / 60) for number in (1, 2, 3)],
    ).rows
    assert row["waiting_gpus"] == 0.25


def test_the_pod_itself_counts_before_its_workload_its_namespace_and_its_cluster(
    tmp_path: Path,
) -> None:
    def about(namespace: str, owner: str) -> dict[str, Value]:
        return {"namespace": namespace, "owner_kind": "Job", "owner_name": owner}

    parts = [("x", "a", 0.5), ("x", "b", 0.25), ("x", "b", 0.25), ("y", "c", 1), ("y", "c", 1)]
    placed, held, waiting = [], [], []
    for number, (namespace, owner, part) in enumerate(parts):
        row = placed_row(f"p{number}", created=1, scheduled=2, **about(namespace, owner))
        placed.append(row)
        held.append(held_row(f"p{number}", part, allocated_namespace=namespace))
    for namespace, owner in (("x", "a"), ("x", "new"), ("y", "new"), ("z", "new")):
        waiting.append(pending_row(f"{namespace}-{owner}", created=2, **about(namespace, owner)))
    found = queue(
        tmp_path, waiting=waiting, placed=placed, held=held, by=("namespace", "workload"), hours=3
    )
    assert {
        (row["namespace"], row["workload"][4:]): row["unmet_gpu_hours"] for row in found.rows
    } == pytest.approx(
        {
            # One pod waited for an hour, and ran; another waits.
            ("x", "a"): 0.5 + 0.5,
            ("x", "b"): 0.25 + 0.25,
            ("x", "new"): 0.25,
            ("y", "c"): 2,
            ("y", "new"): 1,
            ("z", "new"): 0.5,
        },
        rel=0.01,
    )


def test_the_waits_of_a_real_cluster_are_reproduced(tmp_path: Path) -> None:
    waiting, placed, unmet_seconds = [], [], 0.0
    with gzip.open(TRACE, "rt") as file:
        for number, each in enumerate(csv.DictReader(file)):
            gpus, milli = int(each["num_gpu"]), int(each["gpu_milli"])
            created, end = int(each["creation_time"]), each["scheduled_time"]
            left = int(end or each["deletion_time"])
            unmet_seconds += (left - created) * gpus * milli / 1000
            requested = {"nvidia.com/gpu": str(gpus)}
            if milli < 1000:
                requested["nvidia.com/gpucores"] = str(milli // 10)
            pod, text = f"p{number}", orjson.dumps(requested).decode()
            # Some pods got a node before podwatch published that they waited.
            if not end or (left > created and number % 3):
                hours = {"created": created / HOUR, "left": left / HOUR}
                waiting.append(pending_row(pod, requested=text, **hours))
            if end:
                hours = {"created": created / HOUR, "scheduled": left / HOUR}
                placed.append(placed_row(pod, requested=text, **hours))
    (row,) = queue(tmp_path, waiting=waiting, placed=placed, hours=150 * 24).rows
    assert (row["pods"], row["never_scheduled"], row["waiting"]) == (7064, 861, 0)
    assert row["wait_p50_seconds"] == 2
    assert row["wait_p99_seconds"] == pytest.approx(1109, rel=0.02)
    assert row["wait_max_seconds"] == 14_330
    assert row["unmet_gpu_hours"] == pytest.approx(unmet_seconds / 3600, abs=1e-3)
    assert row["unknown_size"] == 0
