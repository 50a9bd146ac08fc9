"""The device fraction of each row: a single small instance is never a whole GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.entries import UNKNOWN_SLICES, DeviceSlices
from gpuledger.records import GpuReading
from gpuledger_enricher.join.booking.books import slices_by_row

WHOLE = GpuReading(uuid="GPU-a", index=0, compute_slices=7, memory_slices=8)
PARTITIONED = GpuReading(uuid="GPU-a", index=0, mig_enabled=True, compute_slices=7, memory_slices=8)


def instance(
    number: int, compute_slices: int | None, memory_slices: int | None, gpu_instance: int
) -> GpuReading:
    return GpuReading(
        uuid=f"MIG-{number}",
        index=0,
        parent_uuid="GPU-a",
        gpu_instance=gpu_instance,
        compute_slices=compute_slices,
        memory_slices=memory_slices,
    )


ROWS = [
    ("a GPU that is not partitioned, by its reading", [WHOLE], [UNKNOWN_SLICES]),
    ("a MIG GPU without instances", [PARTITIONED], [(7, 8, 7, 8)]),
    ("a GPU that does not report it", [GpuReading(uuid="GPU-a", index=0)], [UNKNOWN_SLICES]),
    ("a single small instance", [WHOLE, instance(0, 1, 1, 1)], [(6, 7, 7, 8), (1, 1, 7, 8)]),
    (
        "compute instances of one GPU instance: the first has its memory",
        [WHOLE, instance(0, 1, 4, 1), instance(1, 2, 4, 1)],
        [(4, 4, 7, 8), (1, 4, 7, 8), (2, 0, 7, 8)],
    ),
    (
        "an instance that does not report it: the rest is unknown too",
        [WHOLE, instance(0, None, 1, 1)],
        [(None, 7, 7, 8), (None, 1, 7, 8)],
    ),
    ("an instance whose GPU is not in the tick", [instance(0, 1, 1, 1)], [(1, 1, None, None)]),
    (
        "more than the GPU has, which no driver reports",
        [WHOLE, instance(0, 8, 9, 1)],
        [(0, 0, 7, 8), (8, 9, 7, 8)],
    ),
]


@pytest.mark.parametrize(("case", "rows", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_has_this_fraction_of_its_physical_gpu(
    case: str, rows: list[GpuReading], expected: list[tuple[int | None, ...]]
) -> None:
    assert slices_by_row(rows) == [DeviceSlices(*numbers) for numbers in expected], case


@given(
    parts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 9)), max_size=7)
)
def test_the_slices_of_a_gpus_rows_sum_to_the_gpus(parts: list[tuple[int, int, int]]) -> None:
    instances = [instance(number, *part) for number, part in enumerate(parts)]
    found = slices_by_row([PARTITIONED, *instances])
    assert sum(row.compute_slices or 0 for row in found) == 7
    assert sum(row.memory_slices or 0 for row in found) == 8
