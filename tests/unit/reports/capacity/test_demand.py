"""The hourly demand for GPUs by group, as read from a store, and as derived from given hours."""

from pathlib import Path
from typing import Any

import duckdb
import pytest

from gpuledger.store.views import create_views
from gpuledger_reports.capacity.demand import Demand, Hour, find_demand, read_demand, read_waiting
from gpuledger_reports.capacity.waits import notes_on_too_large
from gpuledger_reports.reading.times import Window
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    UNKNOWN,
    Row,
    allocated,
    inventory_row,
    node_row,
    pending_row,
    pod_row,
    write_store,
)

WINDOW = Window(BEGIN_US + HOUR_US, BEGIN_US + 3 * HOUR_US)


def hours(key: str, *amounts: tuple[int, float]) -> list[Hour]:
    """Return the hours of a group with two GPUs: number and allocated GPUs."""
    return [(at, (key,), used, 0.0, 2.0, 0.0) for at, used in amounts]


def demand_of(store: Path, usage: list[Row], by: tuple[str, ...] = ("model",)) -> list[Demand]:
    with duckdb.connect() as connection:
        create_views(connection, write_store(store, usage_hourly=usage))
        return read_demand(connection, by, window=WINDOW, waiting={})


def test_allocated_time_is_demand_and_neither_idle_nor_unknown_time(tmp_path: Path) -> None:
    usage = []
    for hour in range(4):
        usage += [
            allocated(hour, "train", HOUR_NS // 2),
            allocated(hour, None, HOUR_NS // 4),
            allocated(hour, UNKNOWN, HOUR_NS // 4),
            allocated(hour, "train", HOUR_NS, gpu="GPU-b"),
            allocated(hour, None, HOUR_NS, gpu="GPU-c", model="L4"),
        ]
    h100, l4 = demand_of(tmp_path, usage)
    assert (h100.key, l4.key) == (("H100",), ("L4",))
    assert h100.allocated == pytest.approx((1.5, 1.5))
    assert (h100.gpus, l4.gpus) == (2.0, 1.0)
    assert h100.unknown_hours == pytest.approx(0.5)
    assert l4.allocated == (0.0, 0.0)


def test_an_instance_counts_as_its_part_of_the_gpu(tmp_path: Path) -> None:
    mig: dict[str, Any] = {
        "parent_uuid": "GPU-a",
        "mig_profile": "2g.20gb",
        "compute_slices": 2,
        "gpu_compute_slices": 7,
    }
    usage = [allocated(hour, "serve", gpu="MIG-1", **mig) for hour in range(3)]
    (found,) = demand_of(tmp_path, usage)
    assert found.allocated == pytest.approx((2 / 7,) * 2)


def test_an_hour_counts_to_the_pool_that_its_node_then_had(tmp_path: Path) -> None:
    usage = [allocated(hour, "train") for hour in range(4)]
    nodes = [node_row(node_pool="old"), node_row(hour=2, node_pool="new")]
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, usage_hourly=usage, nodes=nodes))
        found = read_demand(connection, ("pool", "model"), window=WINDOW, waiting={})
    assert {demand.key: demand.allocated for demand in found} == {
        ("old", "H100"): (1.0, 0.0),
        ("new", "H100"): (1.0,),
    }


def test_a_store_without_usage_has_no_demand(tmp_path: Path) -> None:
    assert demand_of(tmp_path, [allocated(0, "train")]) == []  # before the window


def test_hours_without_samples_have_the_demand_of_the_hour_before_and_are_counted() -> None:
    found = find_demand([*hours("a", (1, 1), (2, 2), (5, 1))], {("a",): {2: 4.0, 4: 8.0}})
    assert found == [
        Demand(
            key=("a",),
            allocated=(1, 2, 2, 2, 1),
            gpus=2.0,
            waiting=(0.0, 4.0, 0.0, 8.0, 0.0),
            filled_hours=2,
            unknown_hours=0.0,
            known=(True, True, False, False, True),
        )
    ]


def test_a_group_that_has_gone_has_no_gpus_and_no_demand() -> None:
    kept = hours("kept", *[(at, 1) for at in range(60)])
    gone = hours("gone", *[(at, 2) for at in range(20)])
    first, last = find_demand(sorted([*kept, *gone]), {})
    assert (first.key, first.gpus) == (("kept",), 2.0)
    assert (last.key, last.gpus, last.filled_hours) == (("gone",), 0.0, 0)
    assert last.allocated == (2,) * 20 + (0.0,) * 40


def test_gpus_are_the_mean_of_the_last_day_since_the_first_hour_of_the_group() -> None:
    kept = hours("kept", *[(at, 1) for at in range(60)])
    gone = hours("gone", *[(at, 2) for at in range(57)])
    new = hours("new", *[(at, 0) for at in range(57, 60)])
    found = find_demand(sorted([*kept, *gone, *new]), {})
    assert {demand.key: demand.gpus for demand in found} == {
        ("kept",): 2.0,
        ("new",): 2.0,
        ("gone",): 2.0 * 21 / 24,
    }


def test_a_gpu_that_does_not_respond_does_not_count_and_one_on_a_cordoned_node_does(
    tmp_path: Path,
) -> None:
    usage = [
        row
        for hour in range(4)
        for row in (
            allocated(hour, None),
            allocated(hour, "train", gpu="GPU-b", unresponsive_ns=HOUR_NS),
            allocated(hour, None, gpu="GPU-c", unresponsive_ns=HOUR_NS // 4),
        )
    ]
    nodes = [node_row(unschedulable=True)]
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, usage_hourly=usage, nodes=nodes))
        (found,) = read_demand(connection, ("pool",), window=WINDOW, waiting={})
    assert (found.gpus, found.allocated) == (1.75, (1.0, 1.0))
    assert found.known == (True, True)


def test_waiting_pods_count_to_the_gpus_of_their_node_or_of_pods_like_them(tmp_path: Path) -> None:
    nodes = {"a": ("H100", "train"), "b": ("L4", "serve")}

    def waits(pod: str, node: str | None, namespace: str, owner: str) -> None:
        about: dict[str, Any] = {"namespace": namespace, "owner_kind": "Job", "owner_name": owner}
        pending.append(pending_row(pod, created=1, left=2.5 if node else None, **about))
        if node:
            got: dict[str, Any] = {"node": node, "scheduled_time": BEGIN_US + 5 * HOUR_US // 2}
            pods.append(pod_row(pod, **about, **got))

    pending: list[Row] = []
    pods: list[Row] = []
    waits("placed-a", "a", "x", "one")
    waits("placed-b", "b", "x", "two")
    waits("placed-c", "b", "x", "three")
    waits("of-workload", None, "x", "one")
    waits("of-namespace", None, "x", "new")
    waits("of-cluster", None, "y", "new")
    store = write_store(
        tmp_path,
        pending_pods=pending,
        pods=pods,
        inventory=[
            inventory_row(f"GPU-{node}", node=node, model=model)
            for node, (model, _) in nodes.items()
        ],
        nodes=[node_row(node=node, node_pool=pool) for node, (_, pool) in nodes.items()],
    )
    with duckdb.connect() as connection:
        create_views(connection, store)
        found = read_waiting(connection, ("pool", "model"), window=WINDOW)
        by_cluster = read_waiting(connection, ("cluster",), window=WINDOW)
    first = BEGIN_US // HOUR_US + 1
    assert found == {
        ("train", "H100"): {first: pytest.approx(2), first + 1: pytest.approx(1.5)},
        ("serve", "L4"): {first: pytest.approx(4), first + 1: pytest.approx(3)},
    }
    assert by_cluster == {("prod",): {first: pytest.approx(6), first + 1: pytest.approx(4.5)}}


def test_pods_that_no_node_of_their_cluster_could_have_are_not_demand(tmp_path: Path) -> None:
    """Node n has two GPUs, and had four; by its resources, node m of another cluster has eight."""

    def waits(pod: str, gpus: int, **fields: Any) -> Row:  # noqa: ANN401  # any column
        return pending_row(
            pod, created=0, requested=f'{{"nvidia.com/gpu":"{gpus}"}}', **{"left": None, **fields}
        )

    inventory = [
        *(inventory_row(f"GPU-{number}", hour=-24) for number in range(4)),
        *(inventory_row(f"GPU-{number}", hour=-12) for number in range(2)),
        inventory_row("GPU-other", cluster="other", node="m"),
    ]
    resources = '{"nvidia.com/gpu":"8"}'
    pods = [
        waits("fits", 4),
        waits("mistyped", 1000),
        waits("large", 5),
        waits("fits-too", 8, cluster="other"),
        waits("large-there", 9, cluster="other"),
        waits("of-an-unknown-cluster", 16, cluster="unknown"),
        waits("got-a-node", 32, left=2),
    ]
    placed = pod_row("got-a-node", scheduled_time=BEGIN_US + 2 * HOUR_US)
    store = write_store(
        tmp_path,
        inventory=inventory,
        pending_pods=pods,
        pods=[placed],
        nodes=[node_row(cluster="other", node="m", allocatable_resources=resources)],
    )
    with duckdb.connect() as connection:
        create_views(connection, store)
        found = read_waiting(connection, ("cluster",), window=WINDOW)
        notes = list(notes_on_too_large(connection))
    first = BEGIN_US // HOUR_US + 1
    assert found == {
        ("prod",): {first: 36.0, first + 1: 4.0},
        ("other",): {first: 8.0, first + 1: 8.0},
        ("unknown",): {first: 16.0, first + 1: 16.0},
    }
    assert notes == [
        "Pods that request more GPUs than any node has: 3, such as ns/mistyped (1000 GPUs)."
    ]


def silent_store(store: Path, **tables: Any) -> list[Demand]:  # noqa: ANN401  # any table
    """Return the demand of a GPU with samples, and of an A100 without, in its last hours."""
    usage = [allocated(hour, "train") for hour in range(4)]
    usage += [allocated(hour, "serve", gpu="GPU-b", node="m", model="A100") for hour in range(2)]
    with duckdb.connect() as connection:
        create_views(connection, write_store(store, usage_hourly=usage, **tables))
        return read_demand(connection, ("model",), window=WINDOW, waiting={})


def a100_row(node: str, **fields: Any) -> Row:  # noqa: ANN401  # any column
    """Return the row of a node's inventory that lists the A100."""
    return inventory_row("GPU-b", node=node, model="A100", **fields)


def test_a_silent_node_keeps_its_gpus_and_its_demand_while_its_inventory_lists_them_last(
    tmp_path: Path,
) -> None:
    listed = [a100_row("m")]
    ends: dict[str, dict[str, list[Row]]] = {
        "listed": {"inventory": listed},
        "emptied": {"inventory": [*listed, inventory_row(None, hour=1.5, node="m")]},
        "deleted": {
            "inventory": listed,
            "nodes": [
                node_row(node="m"),
                node_row(hour=1.5, node="m", deleted_time=BEGIN_US + 3 * HOUR_US // 2),
            ],
        },
        "moved": {"inventory": [*listed, a100_row("other", hour=1.5)]},
        "of a renamed cluster": {"inventory": [*listed, a100_row("m", hour=2, cluster="new")]},
        "moved there": {"inventory": [a100_row("other", hour=-48), *listed]},
        "moved and returned": {
            "inventory": [
                *listed,
                a100_row("other", hour=0.5),
                a100_row("m", hour=1),
                a100_row("m", hour=1.5),
            ]
        },
        "deleted and listed again": {
            "inventory": [*listed, a100_row("m", hour=1)],
            "nodes": [node_row(node="m", hour=0.5, deleted_time=BEGIN_US + HOUR_US // 2)],
        },
        "never listed": {},
    }
    found = {name: silent_store(tmp_path / name, **tables) for name, tables in ends.items()}
    a100s = {name: next(d for d in each if d.key == ("A100",)) for name, each in found.items()}
    assert {name: (d.allocated, d.filled_hours) for name, d in a100s.items()} == {
        "listed": ((1.0, 1.0), 1),
        "emptied": ((1.0, 0.0), 0),
        "deleted": ((1.0, 0.0), 0),
        "moved": ((1.0, 0.0), 0),
        "of a renamed cluster": ((1.0, 0.0), 0),
        "moved there": ((1.0, 1.0), 1),
        "moved and returned": ((1.0, 1.0), 1),
        "deleted and listed again": ((1.0, 1.0), 1),
        "never listed": ((1.0, 0.0), 0),
    }
    assert a100s["listed"].gpus == 1.0
    assert a100s["listed"].known == (True, False)


def test_the_hours_of_one_silent_node_of_a_group_are_counted(tmp_path: Path) -> None:
    usage = [allocated(hour, "train") for hour in range(4)]
    usage += [allocated(hour, "serve", gpu="GPU-b", node="m") for hour in (1, 3)]
    with duckdb.connect() as connection:
        create_views(connection, write_store(tmp_path, usage_hourly=usage))
        window = Window(BEGIN_US, BEGIN_US + 4 * HOUR_US)
        (found,) = read_demand(connection, ("model",), window=window, waiting={})
    assert found.allocated == (1.0, 2.0, 2.0, 2.0)
    assert found.known == (True, True, False, True)
    assert (found.gpus, found.filled_hours) == (1.75, 1)


def test_a_node_of_unknown_allocation_keeps_the_demand_of_its_last_known_hour(
    tmp_path: Path,
) -> None:
    usage = [allocated(1, "train"), allocated(2, UNKNOWN)]
    (found,) = demand_of(tmp_path, usage)
    assert (found.allocated, found.known) == ((1.0, 1.0), (True, False))
    assert (found.unknown_hours, found.filled_hours) == (1.0, 0)
