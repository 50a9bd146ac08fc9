"""The hourly demand for GPUs, by group, as read from a store and as found in its hours."""

from pathlib import Path
from typing import Any

import duckdb
import pytest

from gpuledger.store.views import create_views
from gpuledger_reports.capacity.demand import Demand, Hour, find_demand, read_demand
from gpuledger_reports.reading.times import Window
from tests.unit.reports.stores import (
    BEGIN_US,
    HOUR_NS,
    HOUR_US,
    UNKNOWN,
    Row,
    allocated,
    write_store,
)

WINDOW = Window(BEGIN_US + HOUR_US, BEGIN_US + 3 * HOUR_US)


def hours(key: str, *amounts: tuple[int, float]) -> list[Hour]:
    """Return the hours of a group with two GPUs: number and allocated GPUs."""
    return [(at, (key,), used, 0.0, 2.0) for at, used in amounts]


def demand_of(store: Path, usage: list[Row], by: tuple[str, ...] = ("model",)) -> list[Demand]:
    with duckdb.connect() as connection:
        create_views(connection, write_store(store, usage_hourly=usage))
        return read_demand(connection, by, window=WINDOW)


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


def test_a_store_without_usage_has_no_demand(tmp_path: Path) -> None:
    assert demand_of(tmp_path, [allocated(0, "train")]) == []  # before the window


def test_hours_without_samples_have_the_demand_of_the_hour_before_and_are_counted() -> None:
    found = find_demand([*hours("a", (1, 1), (2, 2), (5, 1))])
    assert found == [
        Demand(
            key=("a",),
            first_hour=1,
            allocated=(1, 2, 2, 2, 1),
            gpus=2.0,
            filled_hours=2,
            unknown_hours=0.0,
        )
    ]


def test_a_group_that_has_gone_has_no_gpus_and_no_demand() -> None:
    kept = hours("kept", *[(at, 1) for at in range(60)])
    gone = hours("gone", *[(at, 2) for at in range(20)])
    first, last = find_demand(sorted([*kept, *gone]))
    assert (first.key, first.gpus) == (("kept",), 2.0)
    assert (last.key, last.gpus, last.filled_hours) == (("gone",), 0.0, 0)
    assert last.allocated == (2,) * 20 + (0.0,) * 40
