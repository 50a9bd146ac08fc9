"""How much of its board each row is: a lone small instance is never a whole board."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.entries import UNKNOWN_SLICES, DeviceSlices
from gpuledger.records import GpuReading
from gpuledger_enricher.join.booking.books import slices_by_row

BOARD = GpuReading(uuid="GPU-a", index=0, compute_slices=7, memory_slices=8)
CUT = GpuReading(uuid="GPU-a", index=0, mig_enabled=True, compute_slices=7, memory_slices=8)


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
    ("a GPU that is not cut: its reading says it", [BOARD], [UNKNOWN_SLICES]),
    ("a GPU that is cut into nothing", [CUT], [(7, 8, 7, 8)]),
    ("a GPU that does not say", [GpuReading(uuid="GPU-a", index=0)], [UNKNOWN_SLICES]),
    ("a lone small instance", [BOARD, instance(0, 1, 1, 1)], [(6, 7, 7, 8), (1, 1, 7, 8)]),
    (
        "compute instances of one GPU instance: its memory stands with the first",
        [BOARD, instance(0, 1, 4, 1), instance(1, 2, 4, 1)],
        [(4, 4, 7, 8), (1, 4, 7, 8), (2, 0, 7, 8)],
    ),
    (
        "an instance that does not say: nor is known what is left",
        [BOARD, instance(0, None, 1, 1)],
        [(None, 7, 7, 8), (None, 1, 7, 8)],
    ),
    ("an instance whose GPU is not in the tick", [instance(0, 1, 1, 1)], [(1, 1, None, None)]),
    (
        "more than there is, as no driver says",
        [BOARD, instance(0, 8, 9, 1)],
        [(0, 0, 7, 8), (8, 9, 7, 8)],
    ),
]


@pytest.mark.parametrize(("case", "rows", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_a_row_is_so_much_of_its_board(
    case: str, rows: list[GpuReading], expected: list[tuple[int | None, ...]]
) -> None:
    assert slices_by_row(rows) == [DeviceSlices(*numbers) for numbers in expected], case


@given(
    parts=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 9)), max_size=7)
)
def test_the_slices_of_a_boards_rows_sum_to_the_boards(parts: list[tuple[int, int, int]]) -> None:
    instances = [instance(number, *part) for number, part in enumerate(parts)]
    found = slices_by_row([CUT, *instances])
    assert sum(row.compute_slices or 0 for row in found) == 7
    assert sum(row.memory_slices or 0 for row in found) == 8
