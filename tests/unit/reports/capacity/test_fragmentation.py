"""The report on free GPUs that typical pods cannot use, from a store."""

from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

import duckdb
import pytest

from gpuledger.store.views import create_views
from gpuledger_reports.capacity.fragmentation import REPORT
from gpuledger_reports.capacity.node_states import find_instants
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.times import DAY_US, HOUR_US, Window
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    UNKNOWN,
    Row,
    allocated,
    inventory_row,
    node_row,
    pending_row,
    pod_row,
    write_store,
)

DAY = Window(BEGIN_US, BEGIN_US + 24 * HOUR_US)
WHOLE_HOUR = (1 << 60) - 1
SECOND_HALF = WHOLE_HOUR - (1 << 30) + 1


def row(gpu: str, pod: str | None, node: str = "n", **fields: Any) -> Row:  # noqa: ANN401  # any column
    """Return a GPU's row of the first hour."""
    return allocated(0, pod, gpu=gpu, **{"node": node, "allocated_minutes": WHOLE_HOUR, **fields})


def test_pods_of_one_name_in_two_clusters_have_their_own_needs(tmp_path: Path) -> None:
    names: dict[str, Any] = {"allocated_pod": "web", "allocated_pod_uid": None}
    usage = [
        row(f"GPU-{cluster}{gpu}", holder, cluster=cluster, **fields)
        for cluster in ("prod", "lab")
        for gpu, (holder, fields) in enumerate([("web", names), (None, {})])
    ]
    pods = [
        pod_row("web", cluster=cluster, requested_cpu_millicores=cpu, requested_memory_bytes=0)
        for cluster, cpu in (("prod", 1000), ("lab", 7000))
    ]
    nodes = [
        node_row(cluster=cluster, allocatable_cpu_millicores=8000, allocatable_memory_bytes=0)
        for cluster in ("prod", "lab")
    ]
    of_row = found(tmp_path, usage, pods=pods, nodes=nodes)
    # In prod, another pod of 1 CPU fits; in lab, another pod of 7 CPUs does not.
    assert (of_row["free_gpus"], of_row["by_cpu_gpus"]) == (2, 1)


def spread() -> Iterator[Row]:
    """Yield the rows of three nodes, each with a pod of two GPUs, a pod of one, and a free GPU."""
    for node in "abc":
        for gpu, pod in enumerate((f"large-{node}", f"large-{node}", f"small-{node}", None)):
            yield row(f"GPU-{node}{gpu}", pod, node)


def answer_of(
    store: Path,
    *,
    window: Window = DAY,
    **tables: Any,  # noqa: ANN401  # rows of any table
) -> Answer:
    with duckdb.connect() as connection:
        create_views(connection, write_store(store, **tables))
        return REPORT.read(connection, Question(window=window, by=("model",), policy=BillPolicy()))


def found(store: Path, usage: list[Row], **tables: Any) -> Row:  # noqa: ANN401  # as above
    (only,) = answer_of(store, usage_hourly=usage, **tables).rows
    return only


def test_gpus_are_stranded_that_packed_pods_would_leave_together(tmp_path: Path) -> None:
    usage = list(spread())
    answer = answer_of(tmp_path, usage_hourly=usage)
    (row,) = answer.rows
    assert row == {
        "model": "H100",
        "instants": 1,
        "gpus": 12,
        "free_gpus": 3,
        "unusable_gpus": 1.5,
        "by_cpu_gpus": None,
        "by_memory_gpus": None,
        "packed_gpus": 0,
        "stranded_gpus": 1.5,
        "unmet_gpus": 0,
        "advice": "pack pods onto fewer nodes: pods of 2 GPUs (50 % of the pods) could use 0 of 3"
        " free GPUs on average, and 3 if packed",
    }
    assert row.keys() - {"model"} == REPORT.columns.keys()
    assert any("CPU or memory" in note for note in answer.notes)


def test_all_rows_are_means_over_the_same_instants(tmp_path: Path) -> None:
    """GPUs of another model exist only in the second of two hours."""
    second = BEGIN_US + HOUR_US
    usage = [{**each, "hour": hour} for hour in (BEGIN_US, second) for each in spread()]
    usage += [
        {**each, "hour": second, "node": f"x{each['node']}", "model": "L4"} for each in spread()
    ]
    rows = answer_of(tmp_path, window=Window(BEGIN_US, second + HOUR_US), usage_hourly=usage).rows
    found = {row["model"]: row for row in rows}
    assert {model: row["instants"] for model, row in found.items()} == {"H100": 2, "L4": 1}
    for name in ("gpus", "free_gpus", "unusable_gpus", "stranded_gpus"):
        assert found["L4"][name] == found["H100"][name] / 2


def test_progress_is_reported_after_each_instant(tmp_path: Path) -> None:
    usage = [{**each, "hour": BEGIN_US + at * HOUR_US} for at in range(4) for each in spread()]
    done: list[int] = []
    question = Question(window=DAY, by=("model",), policy=BillPolicy(), advance=done.append)
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, usage_hourly=usage))
        REPORT.read(connection, question)
    assert done == [25, 25, 25, 25]


def test_gpus_of_a_cordoned_node_are_not_free_and_not_packed(tmp_path: Path) -> None:
    nodes = [node_row(node="b", hour=0.25, unschedulable=True)]
    nodes += [node_row(node="c", hour=0.75, unschedulable=True)]
    hour = Window(BEGIN_US, BEGIN_US + HOUR_US)
    answer = answer_of(tmp_path, window=hour, usage_hourly=list(spread()), nodes=nodes)
    (row,) = answer.rows
    assert (row["gpus"], row["free_gpus"], row["packed_gpus"]) == (8, 2, 0)
    assert "4 GPUs or instances on cordoned nodes are excluded." in answer.notes


def test_there_is_no_advice_if_packing_improves_nothing(tmp_path: Path) -> None:
    usage = [
        row(f"GPU-{node}{n}", f"p-{node}" if n else None, node) for node in "ab" for n in range(4)
    ]
    of_row = found(tmp_path, usage)
    assert (of_row["unusable_gpus"], of_row["packed_gpus"], of_row["stranded_gpus"]) == (2, 2, 0)
    assert of_row["advice"] is None


def requests(cpu: int | None, memory: int | None) -> list[Row]:
    needs: dict[str, Any] = {"requested_cpu_millicores": cpu, "requested_memory_bytes": memory}
    pods = [f"{size}-{node}" for node in "abc" for size in ("large", "small")]
    return [pod_row(pod, node=pod[-1], **needs) for pod in pods]


def sized_nodes() -> list[Row]:
    amounts: dict[str, Any] = {"allocatable_cpu_millicores": 10, "allocatable_memory_bytes": 100}
    return [node_row(node=node, **amounts) for node in "abc"]


def test_cpus_that_other_pods_use_strand_gpus(tmp_path: Path) -> None:
    """Pods need four CPUs, and those without a GPU have the last two of node a."""
    other = pod_row("web", node="a", requested_cpu_millicores=2, requested_memory_bytes=0)
    of_row = found(tmp_path, list(spread()), pods=[*requests(4, 30), other], nodes=sized_nodes())
    # Small pods fit on none of the nodes for lack of CPU, large ones for lack of GPUs.
    assert (of_row["unusable_gpus"], of_row["by_cpu_gpus"]) == (3, 1.5)
    assert of_row["by_memory_gpus"] == 0


def test_memory_that_is_not_left_strands_gpus(tmp_path: Path) -> None:
    of_row = found(tmp_path, list(spread()), pods=requests(1, 50), nodes=sized_nodes())
    assert (of_row["by_cpu_gpus"], of_row["by_memory_gpus"]) == (0, 1.5)


@pytest.mark.parametrize("missing", ["pods", "nodes", "one pod", "one node"])
def test_amounts_that_are_not_known_of_all_are_unknown_and_not_zero(
    tmp_path: Path, missing: str
) -> None:
    pods, nodes = requests(4, 30), sized_nodes()
    without_amounts = pod_row("old", node="a")
    tables = {
        "pods": {"pods": [], "one pod": [*pods, without_amounts]}.get(missing, pods),
        "nodes": {"nodes": [], "one node": nodes[1:]}.get(missing, nodes),
    }
    of_row = found(tmp_path, list(spread()), **tables)
    assert (of_row["by_cpu_gpus"], of_row["by_memory_gpus"]) == (None, None)
    assert of_row["unusable_gpus"] == 1.5


def test_a_pod_uses_cpus_from_its_start_to_its_end(tmp_path: Path) -> None:
    """The state is read at half past the hour."""
    minute = 60_000_000
    half_past = BEGIN_US + 30 * minute
    pods = [
        pod_row(
            name,
            node="a",
            created_time=begin,
            ended_time=end,
            requested_memory_bytes=0,
            requested_cpu_millicores=100,
        )
        for name, begin, end in (
            ("before", BEGIN_US, half_past),
            ("after", half_past + minute, None),
        )
    ]
    of_row = found(tmp_path, list(spread()), pods=[*requests(1, 1), *pods], nodes=sized_nodes())
    assert of_row["by_cpu_gpus"] == 0


def test_pods_of_a_daemon_set_stay_and_are_not_in_the_mix(tmp_path: Path) -> None:
    usage = [*spread(), row("GPU-d", "probe", "d")]
    probe = pod_row("probe", node="d", owner_kind="DaemonSet")
    of_row = found(tmp_path, usage, pods=[probe])
    assert (of_row["gpus"], of_row["unusable_gpus"], of_row["packed_gpus"]) == (13, 1.5, 0)


def test_gpus_with_unknown_allocation_are_neither_free_nor_used(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, usage_hourly=[*spread(), row("GPU-x", UNKNOWN)])
    assert answer.rows[0]["gpus"] == 12
    assert any("unknown allocation" in note for note in answer.notes)


def test_only_what_is_allocated_at_the_instant_counts(tmp_path: Path) -> None:
    """One pod ends before half past, and the next one takes over."""
    half = HOUR_NS // 2
    usage = [
        row("GPU-a", "first", allocated_ns=half, allocated_minutes=WHOLE_HOUR ^ SECOND_HALF),
        row("GPU-a", "next", allocated_ns=half, allocated_minutes=SECOND_HALF),
        row("GPU-b", "first", allocated_ns=half, allocated_minutes=WHOLE_HOUR ^ SECOND_HALF),
        row("GPU-b", None, allocated_ns=half, allocated_minutes=SECOND_HALF),
    ]
    of_row = found(tmp_path, usage)
    assert (of_row["gpus"], of_row["free_gpus"]) == (2, 1)
    # Half of the pods of the hour had two GPUs.
    assert of_row["unusable_gpus"] == 0.5


@pytest.mark.parametrize("seconds", [60, 120])
def test_a_short_run_at_the_instant_has_the_whole_gpu(tmp_path: Path, seconds: int) -> None:
    """It begins at half a minute, beside seven free GPUs."""
    ns = seconds * 10**9
    minutes = sum(1 << 29 + number for number in range(seconds // 60 + 1))
    around = minutes & ~(1 << 30) if seconds > 60 else minutes
    usage = [
        row("GPU-a", "short", allocated_ns=ns, allocated_minutes=minutes),
        row(
            "GPU-a",
            None,
            allocated_ns=HOUR_NS - ns,
            allocated_minutes=WHOLE_HOUR ^ minutes | around,
        ),
        *(row(f"GPU-{number}", None) for number in range(7)),
    ]
    assert found(tmp_path, usage)["free_gpus"] == 7


def test_a_share_of_a_gpu_strands_the_rest_of_it_for_pods_of_whole_gpus(tmp_path: Path) -> None:
    quarter = HOUR_NS // 4
    usage = [row("GPU-whole", "whole")]
    for gpu in "ab":
        usage += [row(gpu, f"share-{gpu}", allocated_ns=quarter)]
        usage += [row(gpu, None, allocated_ns=3 * quarter)]
    of_row = found(tmp_path, usage)
    assert of_row["free_gpus"] == 1.5
    # One of three pods needs a whole GPU. If the others are packed, one of the two GPUs is free.
    assert (of_row["unusable_gpus"], of_row["packed_gpus"]) == (0.5, pytest.approx(1 / 6, abs=1e-6))


def test_an_instance_is_free_only_for_its_own_profile_and_counts_as_its_part(
    tmp_path: Path,
) -> None:
    def mig(name: str, slices: int, pod: str | None) -> Row:
        profile: dict[str, Any] = {
            "mig_profile": f"{slices}g",
            "compute_slices": slices,
            "gpu_compute_slices": 7,
        }
        return row(name, pod, parent_uuid="GPU-a", **profile)

    rest = row("GPU-a", None, compute_slices=1, gpu_compute_slices=7)
    usage = [mig("M1", 3, None), mig("M2", 2, "b"), mig("M3", 1, "c"), rest]
    of_row = found(tmp_path, usage)
    assert of_row["gpus"] == pytest.approx(6 / 7, abs=0.01)
    assert of_row["free_gpus"] == pytest.approx(3 / 7, abs=0.01)
    assert of_row["unusable_gpus"] == 0


def test_the_mix_has_all_pods_of_a_long_window_and_its_last_hours(tmp_path: Path) -> None:
    """Summed days are read by day, and the hours after them by hour."""
    window = Window(BEGIN_US, BEGIN_US + 3 * DAY_US + HOUR_US)
    last = [
        allocated(72, pod, gpu=gpu, allocated_minutes=WHOLE_HOUR)
        for gpu, pod in (("GPU-a", "one"), ("GPU-b", None))
    ]
    daily = [allocated(24 * day, f"two-{day}", gpu=gpu) for day in range(3) for gpu in "ab"]
    # The newest day is summed up only in part.
    daily += [allocated(72, "one", gpu="GPU-a")]
    outside = [allocated(-24, "big", gpu=gpu) for gpu in "abc"]
    last += [allocated(73, "late", gpu=gpu) for gpu in "abcd"]
    answer = answer_of(tmp_path, window=window, usage_hourly=last, usage_daily=[*daily, *outside])
    # Three of four pods need two GPUs.
    assert answer.rows[0]["unusable_gpus"] == 0.75
    assert any("no usage with minutes" in note for note in answer.notes)


def waiting(gpus: int, namespace: str = "ns", **fields: Any) -> Row:  # noqa: ANN401  # any column
    """Return the row of a pod that waits for GPUs."""
    requested = f'{{"nvidia.com/gpu":"{gpus}"}}'
    pod = pod_row(f"waiting-{gpus}", namespace=namespace, requested=requested, **fields)
    return {name: value for name, value in pod.items() if name != "node"}


def test_pods_that_wait_are_in_the_mix_of_gpus_that_their_namespace_uses(tmp_path: Path) -> None:
    """Two pods of one GPU run, and one of two waits, although two GPUs are free."""
    usage = [
        row(f"GPU-{node}{n}", f"p-{node}" if n else None, node) for node in "ab" for n in (0, 1)
    ]
    pending = [
        waiting(2),
        waiting(3),  # more than a node has
        waiting(2, namespace="other", pod_uid="uid-other"),
        waiting(2, pod_uid="uid-left", left_time=BEGIN_US - 1),
        waiting(2, pod_uid="uid-p-a"),
        waiting(18 * 10**18),
        {**waiting(1, pod_uid="uid-odd"), "requested": '{"nvidia.com/gpu":"x"}'},
        {**waiting(1, pod_uid="uid-damaged"), "requested": "x"},
    ]
    of_row = found(tmp_path, usage, pending_pods=pending, pods=[pod_row("p-a", node="a")])
    assert (of_row["unusable_gpus"], of_row["packed_gpus"]) == (pytest.approx(2 / 3, abs=1e-6), 0)


def test_unmet_gpus_are_those_for_which_pods_waited_in_the_window(tmp_path: Path) -> None:
    """A pod waits for two GPUs in 6 of 24 hours, as pods of its namespace got GPUs of this kind."""
    two: dict[str, Any] = {"requested": '{"nvidia.com/gpu":"2"}'}
    placed = pod_row("large-a", node="a", container="main", scheduled_time=BEGIN_US, **two)
    pending = pending_row("late", created=3, left=9, **two)
    inventory = [inventory_row(f"GPU-a{number}", node="a") for number in range(4)]
    mistyped = pending_row("mistyped", created=0, requested='{"nvidia.com/gpu":"5"}')
    answer = answer_of(
        tmp_path,
        usage_hourly=list(spread()),
        pending_pods=[pending, mistyped],
        pods=[placed],
        inventory=inventory,
    )
    (row,) = answer.rows
    assert row["unmet_gpus"] == 0.5
    assert (
        "Pods that request more GPUs than any node has: 1, such as ns/mistyped (5 GPUs)."
        " `Unmet GPUs` does not include them."
    ) in answer.notes


def test_a_store_without_minutes_of_allocation_has_no_rows(tmp_path: Path) -> None:
    assert answer_of(tmp_path, usage_hourly=[allocated(0, "old")]).rows == []


@pytest.mark.parametrize("hours", [1, 2, 24, 25, 26, 168, 720, 2160])
def test_instants_cover_the_window_and_its_hours_of_the_day(hours: int) -> None:
    window = Window(BEGIN_US, BEGIN_US + hours * HOUR_US)
    instants = find_instants(window)
    assert instants[0] == window.end_us - HOUR_US
    assert instants[-1] >= window.begin_us
    assert len(instants) == hours or 12 <= len(instants) <= 25
    if hours > 168:
        step = (instants[0] - instants[1]) // HOUR_US
        assert gcd(step, 168) == 1
