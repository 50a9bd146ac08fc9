"""The state of a fleet: how many GPUs are healthy, allocated and used, and what fits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest

from gpuledger.store.views import create_views
from gpuledger_reports.capacity.fleet import REPORT, Fits, FreeDevice, find_fits
from gpuledger_reports.capacity.report import Answer, Question
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.times import Window
from tests.tables import for_each
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    UNKNOWN,
    Row,
    Value,
    allocated,
    inventory_row,
    node_row,
    used,
    write_store,
)

NODE = ("prod", "n")
FLEET = ("total", "healthy", "allocatable", "allocated", "used", "free")


def answer_of(
    store: str, by: tuple[str, ...] = ("model",), hours: int = 2, history: str | None = None
) -> Answer:
    """Return the report's answer on the first hours of the first day."""
    question = Question(
        window=Window(BEGIN_US, BEGIN_US + hours * HOUR_US),
        by=by,
        policy=BillPolicy(),
        options={"history": history},
    )
    with duckdb.connect() as connection:
        create_views(connection, store)
        return REPORT.read(connection, question)


def amounts(row: Row, prefix: str = "") -> tuple[float | None, ...]:
    return tuple(row[prefix + name] for name in FLEET)


def free(hour: int, gpu: str, **fields: Value) -> Row:
    return allocated(hour, None, gpu=gpu, **fields)


def inventory(*gpus: str, **fields: Value) -> list[Row]:
    return [inventory_row(gpu, **fields) for gpu in gpus]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return two hours of a node with one GPU of each state; GPU-f was free only in the first."""
    usage: list[Row] = []
    for hour in range(2):
        usage += [
            allocated(hour, "train", gpu="GPU-a"),
            used(hour, "train", HOUR_NS // 2, gpu="GPU-a"),
            free(hour, "GPU-b"),
            allocated(hour, UNKNOWN, gpu="GPU-c"),
            allocated(hour, "lost", gpu="GPU-d", unresponsive_ns=HOUR_NS, busy_ns=None),
        ]
    usage += [free(0, "GPU-f"), allocated(1, "new", HOUR_NS // 2, gpu="GPU-f")]
    usage += [free(1, "GPU-f", allocated_ns=HOUR_NS // 2)]
    gpus = inventory("GPU-a", "GPU-b", "GPU-c", "GPU-d", "GPU-silent", "GPU-f")
    return write_store(
        tmp_path, usage_hourly=usage, inventory=gpus, nodes=[node_row(node_pool="p")]
    )


def test_lost_and_silent_gpus_are_not_healthy_and_an_unknown_allocation_is_not_free(
    store: str,
) -> None:
    found = answer_of(store)
    (row,) = found.rows
    assert amounts(row) == (6, 4, 3, 2.5, 0.5, 1.5)
    assert amounts(row, "mean_") == (6, 4, 3, 2.25, 0.5, 1.75)
    silent, unknown = found.notes
    assert silent.endswith("do not respond or have no samples: 2.")
    assert "GPUs with unknown allocation: 1;" in unknown


def test_a_gpu_fits_a_pod_only_if_it_was_free_for_the_whole_newest_hour(store: str) -> None:
    (row,) = answer_of(store).rows
    assert [row[f"fits_{size}"] for size in (1, 2, 4, 8)] == [1, 0, 0, 0]
    (row,) = answer_of(store, hours=1).rows
    assert [row[f"fits_{size}"] for size in (1, 2, 4, 8)] == [2, 1, 0, 0]


def test_a_gpu_on_a_cordoned_node_is_allocatable_only_while_it_is_allocated(
    tmp_path: Path,
) -> None:
    """The node is cordoned after an hour and a half."""
    usage = [allocated(hour, "train", gpu="GPU-a") for hour in range(2)]
    usage += [free(hour, "GPU-b", allocated_minutes=HOUR) for hour in range(2)]
    usage += [free(1, "GPU-c", node="other", allocated_minutes=HOUR)]
    store = write_store(
        tmp_path,
        usage_hourly=usage,
        inventory=[*inventory("GPU-a", "GPU-b"), *inventory("GPU-c", node="other")],
        nodes=[
            node_row(node_pool="p"),
            node_row(hour=1.5, node_pool="p", unschedulable=True, resource_version="2"),
        ],
    )
    found = answer_of(store, by=("pool", "node"))
    cordoned, other = found.rows
    assert amounts(cordoned) == (2, 2, 1.5, 1, 0, 0.5)
    assert amounts(cordoned, "mean_") == (2, 2, 1.75, 1, 0, 0.75)
    assert (cordoned["cordoned"], cordoned["fits_1"], other["fits_1"]) == (0.5, 0, 1)
    assert found.notes[-1].endswith("which are not allocatable: 0.5.")
    assert not any("unknown" in note for note in found.notes)


POWER = ("power_limit_watts", "mean_power_watts", "peak_power_watts", "power_headroom_watts")


def test_headroom_is_the_limit_minus_the_mean_power_of_the_peak_hour(tmp_path: Path) -> None:
    """GPU-a and the instances of GPU-b have limits; GPU-c has none, and GPU-d is gone."""

    def draws(hour: int, gpu: str, watts: int, **fields: Value) -> Row:
        return free(hour, gpu, energy_millijoules=watts * 3_600_000, **fields)

    usage = [draws(0, "GPU-a", 100), draws(2, "GPU-a", 300), draws(2, "MIG-1", 90)]
    usage += [used(2, "pod", 0, gpu="MIG-2", parent_uuid="GPU-b", energy_millijoules=36_000_000)]
    usage += [draws(hour, gpu, 1000) for hour in range(3) for gpu in ("GPU-c", "GPU-d")]
    usage = [
        {**row, "parent_uuid": "GPU-b"} if row["gpu_uuid"] == "MIG-1" else row for row in usage
    ]
    both = [
        inventory_row("GPU-a", power_limit_milliwatts=650_000),
        inventory_row("GPU-b", power_limit_milliwatts=350_000),
    ]
    listed = [inventory_row("GPU-d", power_limit_milliwatts=900_000), *both, inventory_row("GPU-c")]
    # The newest version has a lower limit, and lists GPU-b without facts.
    lower = inventory_row("GPU-a", hour=1.5, power_limit_milliwatts=600_000)
    newest = [lower, inventory_row("GPU-b", hour=1.5), inventory_row("GPU-c", hour=1.5)]
    store = write_store(tmp_path, usage_hourly=usage, inventory=[*listed, *newest])
    found = answer_of(store, hours=3)
    (row,) = found.rows
    assert [row[name] for name in POWER] == [950, 250, 400, 550]
    assert "Power excludes GPUs whose power limit is unknown: 1." in found.notes
    (before,) = answer_of(store, hours=1).rows
    assert before["power_limit_watts"] == 650 + 350 + 900


def test_power_is_unknown_without_limits_or_energy(tmp_path: Path) -> None:
    usage = [allocated(0, "train", gpu="GPU-a")]
    unlimited = write_store(
        tmp_path / "a", usage_hourly=usage, inventory=inventory("GPU-a", "GPU-b")
    )
    found = answer_of(unlimited)
    assert [found.rows[0][name] for name in POWER] == [None] * 4
    assert not any("Power" in note for note in found.notes)
    limited = inventory("GPU-a", power_limit_milliwatts=700_000)
    (row,) = answer_of(write_store(tmp_path / "b", usage_hourly=usage, inventory=limited)).rows
    assert [row[name] for name in POWER] == [700, None, None, None]


def test_gpus_belong_to_no_namespace_and_allocations_and_use_to_one(store: str) -> None:
    gpus, ns = answer_of(store, by=("pool", "namespace")).rows
    assert (gpus["pool"], gpus["namespace"]) == ("p", None)
    assert amounts(gpus) == (6, 4, 3, 0, 0, 1.5)
    assert (ns["pool"], ns["namespace"]) == ("p", "ns")
    assert amounts(ns) == (None, None, None, 2.5, 0.5, None)
    assert (gpus["fits_1"], ns["fits_1"]) == (1, None)


def test_an_instance_is_its_part_of_the_gpu_and_fits_pods_of_its_profile(tmp_path: Path) -> None:
    def instance(profile: str, slices: int) -> dict[str, Any]:
        return {
            "gpu": f"MIG-{profile}",
            "parent_uuid": "GPU-a",
            "mig_profile": profile,
            "compute_slices": slices,
            "gpu_compute_slices": 7,
        }

    usage = [
        allocated(0, "serve", **instance("3g.40gb", 3)),
        allocated(0, None, **instance("2g.20gb", 2)),
        allocated(0, None, **instance("1g.10gb", 1)),
        # The slice without an instance.
        free(0, "GPU-a", compute_slices=1, gpu_compute_slices=7),
    ]
    store = write_store(tmp_path, usage_hourly=usage, inventory=inventory("GPU-a"))
    (row,) = answer_of(store, hours=1).rows
    assert amounts(row) == pytest.approx((1, 1, 1, 3 / 7, 0, 4 / 7), abs=1e-6)
    assert row["fits_mig"] == {"1g.10gb": 1, "2g.20gb": 1, "3g.40gb": 0}
    assert row["fits_1"] == 0


def test_whole_days_are_read_from_the_daily_sums_and_hours_only_at_the_ends(
    tmp_path: Path,
) -> None:
    day = 24 * HOUR_NS
    usage = [allocated(hour, "train") for hour in (23, 48)]
    # The rows of the hours of the second day are missing, so they cannot be counted twice.
    daily = [allocated(24, "train", day // 2), allocated(24, None, day // 2)]
    daily += [allocated(48, "train")]
    store = write_store(
        tmp_path, usage_hourly=usage, usage_daily=daily, inventory=inventory("GPU-a")
    )
    question = Question(
        window=Window(BEGIN_US + 23 * HOUR_US, BEGIN_US + 49 * HOUR_US),
        by=("model",),
        policy=BillPolicy(),
        options={"history": "day"},
    )
    with duckdb.connect() as connection:
        create_views(connection, store)
        rows = REPORT.read(connection, question).rows
    assert [(row["day"], row["allocated"], row["free"]) for row in rows] == [
        ("2026-10-01", 1, 0),
        ("2026-10-02", 0.5, 0.5),
        ("2026-10-03", 1, 0),
    ]


@pytest.mark.parametrize("summed_hours", [0, 7])
def test_days_that_are_not_summed_up_yet_are_read_by_hour(
    tmp_path: Path, summed_hours: int
) -> None:
    """The newest summed day may have only some of its hours."""
    store = write_store(
        tmp_path,
        usage_hourly=[allocated(hour, "train") for hour in range(48)],
        usage_daily=[allocated(0, "train", summed_hours * HOUR_NS)] * bool(summed_hours),
        inventory=inventory("GPU-a"),
    )
    found = answer_of(store, hours=48, history="day")
    assert [amounts(row)[:4] for row in found.rows] == [(1, 1, 1, 1)] * 2


def test_a_deleted_node_has_no_gpus_and_a_later_one_counts_from_its_start(tmp_path: Path) -> None:
    gone: dict[str, Any] = {"node": "gone"}
    late: dict[str, Any] = {"node": "late"}
    store = write_store(
        tmp_path,
        usage_hourly=[allocated(0, None, node="n")],
        inventory=[
            *inventory("GPU-a"),
            *inventory("GPU-b", **gone),
            *inventory("GPU-c", hour=1.5, **late),
        ],
        nodes=[
            node_row(**gone),
            node_row(hour=0.5, deleted_time=BEGIN_US + HOUR_US // 2, **gone),
        ],
    )
    (row,) = answer_of(store).rows
    assert row["mean_total"] == (2 + 0.5 + 0.5) / 2


def relabelled(path: Path, hours: Sequence[float]) -> str:
    """Return two days of a node with a GPU in pool b, and one with two GPUs that moves to it.

    The other node has a new label at each of some hours: `b`, `a`, `b` and so on.
    """
    of_gpus = (("GPU-a", "moved", None), ("GPU-b", "moved", "train"), ("GPU-c", "n", "serve"))

    def usage(times: Sequence[int], length: int) -> list[Row]:
        return [
            allocated(time, pod, length * HOUR_NS, gpu=gpu, node=node)
            for time in times
            for gpu, node, pod in of_gpus
        ]

    versions = enumerate([-24, *hours])
    return write_store(
        path,
        usage_hourly=usage(range(48), 1),
        usage_daily=usage((0, 24), 24),
        inventory=[
            inventory_row(gpu, node=node, power_limit_milliwatts=700_000)
            for gpu, node, _ in of_gpus
        ],
        nodes=[
            node_row(node_pool="b"),
            *(
                node_row(hour=hour, node="moved", node_pool="ab"[at % 2], resource_version=str(at))
                for at, hour in versions
            ),
        ],
    )


@pytest.mark.parametrize("relabelled_at", [(12,), (19.5,), (12, 15), (3, 30), (0, 24.5)])
def test_each_column_of_all_pools_sums_up_to_the_fleet_however_nodes_are_relabelled(
    tmp_path: Path, relabelled_at: Sequence[float]
) -> None:
    store = relabelled(tmp_path, relabelled_at)
    names = [*FLEET, *(f"mean_{name}" for name in FLEET)]
    names += [f"fits_{size}" for size in (1, 2, 4, 8)] + ["power_limit_watts"]
    for hours in (20, 31):
        for history in (None, "day"):
            pools, fleet = (
                answer_of(store, by, hours, history).rows for by in (("pool",), ("cluster",))
            )
            assert {row["day"] for row in pools} == {row["day"] for row in fleet}
            for row in fleet:
                of_day = [pool for pool in pools if pool["day"] == row["day"]]
                sums = [sum(pool[name] or 0 for pool in of_day) for name in names]
                # Means are rounded.
                assert sums == pytest.approx([row[name] or 0 for name in names], abs=0.02)


def test_now_has_the_labels_of_the_last_hour_and_a_pool_without_gpus_has_0(tmp_path: Path) -> None:
    """At noon, a node moves from pool a to pool b."""
    store = relabelled(tmp_path, (12,))
    found = {row["pool"]: row for row in answer_of(store, ("pool",), 20).rows}
    assert amounts(found["a"]) == (0,) * len(FLEET)
    assert (found["a"]["mean_total"], found["a"]["fits_1"]) == (2, None)
    assert amounts(found["b"]) == (3, 3, 3, 2, 0, 1)
    assert (found["b"]["mean_total"], found["b"]["fits_1"]) == (1, 1)
    nodes = {(row["pool"], row["node"]): row for row in answer_of(store, ("pool", "node"), 20).rows}
    new = nodes["b", "moved"]
    assert (new["total"], new["mean_total"], new["fits_1"]) == (2, 0, 1)


def test_a_model_that_is_in_no_inventory_any_more_has_0_gpus_and_not_an_unknown_number(
    tmp_path: Path,
) -> None:
    removed: dict[str, Any] = {"node": "old", "model": "A100"}
    store = write_store(
        tmp_path,
        usage_hourly=[free(0, "GPU-a"), free(1, "GPU-a"), free(0, "GPU-b", **removed)],
        inventory=[
            *inventory("GPU-a"),
            *inventory("GPU-b", **removed),
            inventory_row(None, hour=1, node="old"),
        ],
    )
    new, old = answer_of(store).rows
    assert (new["model"], new["total"]) == ("H100", 1)
    assert (old["model"], old["mean_total"]) == ("A100", 0.5)
    assert [old[name] for name in FLEET] == [0] * len(FLEET)


def test_a_short_run_on_a_whole_gpu_makes_no_shares(tmp_path: Path) -> None:
    run = allocated(0, "short", HOUR_NS // 4, allocated_minutes=(1 << 15) - 1)
    usage = [run, allocated(0, None, HOUR_NS * 3 // 4), free(0, "GPU-b")]
    store = write_store(tmp_path, usage_hourly=usage, inventory=inventory("GPU-a", "GPU-b"))
    (row,) = answer_of(store, hours=1).rows
    assert (row["fits_1"], row["fits_shares"]) == (1, 0)


HOUR: Final = (1 << 60) - 1


@pytest.mark.parametrize(
    ("of_gpu", "whole", "shares"),
    [
        # A run of 30 seconds crosses the border of a minute.
        (
            [
                allocated(0, "short", HOUR_NS // 120, allocated_minutes=3),
                allocated(0, None, HOUR_NS - HOUR_NS // 120, allocated_minutes=HOUR),
            ],
            (7, 3, 1, 0),
            0,
        ),
        # Older sums do not have the minutes.
        ([allocated(0, "run", HOUR_NS // 2), allocated(0, None, HOUR_NS // 2)], (7, 3, 1, 0), 0),
        # Two pods have one whole GPU.
        (
            [allocated(0, pod, HOUR_NS // 2, allocated_minutes=HOUR) for pod in "ab"],
            (7, 3, 1, 0),
            0,
        ),
        # Three of four shares are free.
        (
            [
                allocated(0, "a", HOUR_NS // 4, allocated_minutes=HOUR),
                allocated(0, None, HOUR_NS * 3 // 4, allocated_minutes=HOUR),
            ],
            (0, 0, 0, 0),
            31,
        ),
    ],
)
def test_gpus_are_shared_only_if_a_part_was_held_while_the_rest_was_free(
    tmp_path: Path, of_gpu: list[Row], whole: Sequence[int], shares: int
) -> None:
    """There are seven free GPUs, too."""
    usage = of_gpu + [free(0, f"GPU-{number}", allocated_minutes=HOUR) for number in range(7)]
    (row,) = answer_of(write_store(tmp_path, usage_hourly=usage), hours=1).rows
    assert tuple(row[f"fits_{size}"] for size in (1, 2, 4, 8)) == whole
    assert row["fits_shares"] == shares


def device(
    free: float, share: float | None = None, *, node: str = "n", profile: str | None = None
) -> FreeDevice:
    return FreeDevice(("H100",), ("prod", node), profile, share, free)


@for_each(
    "devices, whole, mig, shares",
    [
        # Free GPUs of different nodes do not fit one pod.
        ([device(1), device(1, node="m"), device(1, node="m")], (3, 1, 0, 0), {}, 0),
        ([device(1)] * 8 + [device(0.5)], (8, 4, 2, 1), {}, 0),
        # One pod has a quarter of the first GPU, so the other GPU of the node is shared, too.
        ([device(0.75, 0.25), device(1)], (0, 0, 0, 0), {}, 7),
        ([device(2 / 3, 1 / 3)], (0, 0, 0, 0), {}, 2),
        # A pod held the whole GPU for most of its first hour.
        ([device(0.1, 0.9), device(1)], (1, 0, 0, 0), {}, 0),
        ([device(1, 1, profile="1g"), device(0, 1, profile="2g")], (0,) * 4, {"1g": 1, "2g": 0}, 0),
    ],
)
def test_pods_of_a_shape_fit_as_often_as_the_free_devices_of_a_node_allow(
    devices: Sequence[FreeDevice], whole: Sequence[int], mig: dict[str, int], shares: int
) -> None:
    assert find_fits(devices) == {
        ("H100",): Fits(whole=dict(zip((1, 2, 4, 8), whole, strict=True)), mig=mig, shares=shares)
    }
