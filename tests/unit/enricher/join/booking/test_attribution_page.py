"""The pages on attribution: their examples agree with the join, and no method is missing."""

from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from gpuledger.ledger.allocated_parts import find_allocated_parts
from gpuledger.ledger.quantities import apportion
from gpuledger.records import BusyMethod, Category, DeviceAllocation, EnergyMethod, GpuReading
from gpuledger_agent import sampling
from gpuledger_agent.core import gpu_sampler
from gpuledger_enricher.join.booking import books, late_adjustments, shares
from gpuledger_enricher.join.booking.shares import (
    Claim,
    book_gpu,
    energy_of,
    idle_milliwatts,
    make_claim,
)
from tests.unit.enricher.join.ticks import GIB, SECOND_NS, process, sample

ROOT: Final = Path(__file__).parents[5]
CONCEPTS: Final = ROOT / "docs" / "concepts"
PAGE: Final = (CONCEPTS / "attribution.md").read_text()
ALLOCATION_PAGE: Final = (CONCEPTS / "usage-and-idle.md").read_text()
INTERVAL_NS: Final = 2 * SECOND_NS
MEMORY_AFTER_THE_END_BYTES: Final = 34 * GIB


def table(name: str, *, page: str = PAGE) -> list[list[str]]:
    """Return the rows of a marked table, without its head."""
    between = page.partition(f"<!-- {name}:begin -->\n")[2].partition(f"<!-- {name}:end -->")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in between.splitlines()]
    return rows[2:]


NAMES: Final = [name for name, *_ in table("claims")]
"""The page's containers, by their position in the tick."""


def device() -> GpuReading:
    ((model, utilization, active, total, used, reserved, joules),) = table("device")
    return GpuReading(
        uuid="GPU-a",
        index=0,
        model=model,
        utilization_ratio=float(utilization),
        memory_total_bytes=int(total) * GIB,
        memory_used_bytes=int(used) * GIB,
        memory_reserved_bytes=int(reserved) * GIB,
        energy_millijoules=int(float(joules) * 1000),
        energy_method=EnergyMethod.COUNTER,
        sm_active_ratio=float(active),
    )


def allocations() -> list[DeviceAllocation]:
    return [
        DeviceAllocation(
            gpu_uuid="GPU-a",
            device_id=device_id,
            resource_name="nvidia.com/gpu",
            namespace="research",
            pod=pod,
            container="main",
            replica=device_id.partition("::")[2],
        )
        for _, device_id, pod in table("allocations")
    ]


def claims(*ended: str) -> list[Claim]:
    """Return the page's claims; those named in `ended` no longer have memory."""
    found = []
    for name, ratio, held, has_ended in table("claims"):
        if has_ended == "yes":
            continue
        is_host = name == "host"
        claim = make_claim(*((Category.HOST,) if is_host else (Category.POD, NAMES.index(name))))
        claim.add(
            process(
                sm_utilization_ratio=float(ratio),
                memory_used_bytes=int(held) * GIB,
                ended=name in ended or None,
            )
        )
        found.append(claim)
    return found


def as_written(name: str) -> dict[tuple[str, str], tuple[float, ...]]:
    """Return the rows of a table of entries, by category and allocation."""
    return {
        (row[0].strip("*"), row[1]): tuple(float(cell or 0) for cell in row[2:])
        for row in table(name)
    }


def as_booked(reading: GpuReading, found: list[Claim]) -> dict[tuple[str, str], tuple[float, ...]]:
    """Return the join's entries in the form of the page's table, with the sum."""
    (holders,) = find_allocated_parts(sample(gpus=[reading], allocations=allocations()))
    energy = energy_of(reading, INTERVAL_NS)
    booked = book_gpu(reading, reading, found, INTERVAL_NS, energy, holders)
    assert booked.busy_method is BusyMethod.PROCESS_UTILIZATION
    rows = {
        (
            str(entry.category) if entry.container is None else NAMES[entry.container],
            "" if entry.allocation is None else str(entry.allocation),
        ): (
            (entry.busy_ns or 0) / SECOND_NS,
            (entry.memory_bytes or 0) / GIB,
            (entry.energy_millijoules or 0) / 1000,
            (sm_active_ns or 0) / SECOND_NS,
        )
        for entry, (sm_active_ns, _, _) in zip(
            booked.entries, apportion(booked, INTERVAL_NS), strict=True
        )
    }
    return rows | {("sum", ""): tuple(map(sum, zip(*rows.values(), strict=True)))}


def test_the_example_agrees_with_the_join() -> None:
    written, booked = as_written("entries"), as_booked(device(), claims())

    assert list(written) == list(booked)
    for category, quantities in written.items():
        assert booked[category] == pytest.approx(quantities, abs=1e-9), category


def test_the_example_with_an_ended_process_agrees_with_the_join() -> None:
    reading = replace(device(), memory_used_bytes=MEMORY_AFTER_THE_END_BYTES)
    written, booked = as_written("ended"), as_booked(reading, claims("notebook"))

    assert list(written) == list(booked)
    for category, quantities in written.items():
        assert booked[category] == pytest.approx(quantities, abs=1e-9), category


def test_every_method_is_documented_and_used_by_the_code() -> None:
    # The agent names the methods that it applies itself.
    modules = (books, shares, late_adjustments, gpu_sampler, sampling)
    # The source is next to the compiled module, if there is one.
    code = "".join(
        Path(module.__file__ or "")
        .with_name(f"{module.__name__.rpartition('.')[2]}.py")
        .read_text()
        for module in modules
    )
    table = PAGE.partition("| method | applies when |")[2].partition("\n\n")[0]
    reported = [
        row.split("|")[1].strip(" `") for row in table.splitlines() if row.startswith("| `")
    ]

    assert sorted(reported) == sorted(method.value for method in BusyMethod)
    assert {f"BusyMethod.{method.name}" in code for method in BusyMethod} == {True}


def test_every_category_is_documented() -> None:
    reported = {row.split("|")[1].strip(" `") for row in PAGE.splitlines() if row.startswith("| `")}

    assert {category.value for category in Category} <= reported


def test_the_page_lists_the_idle_draw_that_the_join_uses() -> None:
    reported = {product: float(watts) * 1000 for product, watts in table("idle")}

    assert reported == shares.IDLE_MILLIWATTS
    assert {product: idle_milliwatts(f"NVIDIA {product}") for product in reported} == reported


def test_the_example_of_allocated_time_agrees_with_the_join() -> None:
    board = replace(device(), mig_enabled=True, compute_slices=7, memory_slices=8)
    parts = [
        replace(
            board,
            uuid=f"MIG-{profile}",
            parent_uuid=board.uuid,
            gpu_instance=number,
            mig_profile=profile,
            compute_slices=slices,
            memory_slices=memory_slices,
            mig_enabled=None,
        )
        for number, (profile, slices, memory_slices) in enumerate(
            [("3g.40gb", 3, 4), ("1g.10gb", 1, 1)]
        )
    ]
    chat = replace(
        allocations()[0],
        device_id="MIG-GPU-a/0/0",
        gpu_instance=0,
        replica=None,
        pod="chat",
    )
    tick = sample(interval_ns=INTERVAL_NS, gpus=[board, *parts], allocations=[chat])
    found: list[tuple[str, int, str, float, float]] = []
    for row, held in zip(books.book_tick(tick), find_allocated_parts(tick), strict=True):
        (idle,) = [one for one in row.entries if one.allocated_ns is not None]
        name = row.reading.mig_profile or "GPU"
        seconds = (idle.allocated_ns or 0) / SECOND_NS
        slices, of = row.compute_slices or 0, row.gpu_compute_slices or 1
        holder = "" if held.parts[0][0] is None else "chat"
        found.append((name, slices, holder, seconds, seconds * slices / of))
    *rows, total = table("allocated", page=ALLOCATION_PAGE)

    assert [[*row[:3], *map(float, row[3:])] for row in rows] == [
        [name, str(slices), holder, seconds, round(of_physical_gpu, 3)]
        for name, slices, holder, seconds, of_physical_gpu in found
    ]
    of_all = [
        (slices, seconds, of_physical_gpu) for _, slices, _, seconds, of_physical_gpu in found
    ]
    sums = [sum(column) for column in zip(*of_all, strict=True)]
    assert [float(total[place]) for place in (1, 3, 4)] == pytest.approx(sums)
