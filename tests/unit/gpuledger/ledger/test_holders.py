"""Who has all of a device, and whose its idle part is: one rule says which device is meant."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.ledger.holders import exclusive_holder, find_holders
from gpuledger.records import DeviceAllocation, GpuReading, NodeSample

MIG = [f"MIG-00000000-0000-4000-8000-00000000000{digit}" for digit in range(3)]
BOARD = GpuReading(uuid="GPU-a", index=0)
INSTANCES = [
    GpuReading(uuid=uuid, index=0, parent_uuid="GPU-a", gpu_instance=number, compute_instance=0)
    for uuid, number in zip(MIG, (1, 2, 2), strict=True)
]
ROWS = [BOARD, *INSTANCES]


def held(device: str = "GPU-a", pod: str = "p", **changes: Any) -> DeviceAllocation:  # noqa: ANN401  # any field
    values: dict[str, Any] = {
        "gpu_uuid": "GPU-a",
        "device_id": device,
        "resource_name": "nvidia.com/gpu",
        "namespace": "research",
        "pod": pod,
        "container": "main",
    }
    return DeviceAllocation(**values | changes)


def tick(allocations: list[DeviceAllocation]) -> NodeSample:
    return NodeSample(
        cluster="default",
        node="n",
        boot_id="b",
        seq=1,
        time_ns=1,
        interval_ns=1,
        gpus=ROWS,
        processes=[],
        containers=[],
        allocations=allocations,
    )


MEANT: list[tuple[str, DeviceAllocation, list[int]]] = [
    ("another GPU is none of these", held("GPU-b", gpu_uuid="GPU-b"), []),
    ("an instance by its UUID", held(MIG[0], gpu_instance=1), [1]),
    ("of compute instances the one with that UUID", held(MIG[2], gpu_instance=2), [3]),
    (
        "an instance by its number: all of that GPU instance",
        held("GPU-a/2/0", gpu_instance=2),
        [2, 3],
    ),
    ("another GPU's instance", held("GPU-b/1/0", gpu_uuid="GPU-b", gpu_instance=1), []),
]


@pytest.mark.parametrize(("case", "allocation", "rows"), MEANT, ids=[row[0] for row in MEANT])
def test_page_and_books_take_an_allocation_for_the_same_device(
    case: str, allocation: DeviceAllocation, rows: list[int]
) -> None:
    found = find_holders(tick([allocation]))
    assert [row for row, held in enumerate(found) if held.parts[0][0] is not None] == rows, case
    exclusive = [exclusive_holder(reading, [allocation]) for reading in ROWS]
    assert [index for index, holder in enumerate(exclusive) if holder] == rows, case


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([held()], [[], ["p"], ["p"], ["p"]]),
        ([held(), held(MIG[0], "q", gpu_instance=1)], [[], ["q"], ["p"], ["p"]]),
        ([held(), held(pod="q")], [[], ["p", "q"], ["p", "q"], ["p", "q"]]),
    ],
    ids=["to one", "and an instance to another", "to two"],
)
def test_a_cut_gpu_as_a_whole_is_its_instances_and_what_none_of_them_has_is_nobodys(
    given: list[DeviceAllocation], expected: list[list[str]]
) -> None:
    """Nothing runs outside of them; one that is given by itself is of whom it was given to."""
    found = [
        [place for place, _ in row.parts if place is not None] for row in find_holders(tick(given))
    ]

    assert [[given[place].pod for place in places] for places in found] == expected


def test_a_gpu_that_is_not_cut_is_whose_it_is_as_a_whole() -> None:
    (row,) = find_holders(replace(tick([held()]), gpus=[BOARD]))

    assert list(row.parts) == [(0, 1)]
    assert exclusive_holder(BOARD, [held()]) == ("research", "p", "main")


@pytest.mark.parametrize(
    ("allocations", "expected"),
    [
        ([], None),
        ([held()], ("research", "p", "main")),
        ([held(), held(claim="research/c")], ("research", "p", "main")),
        ([held(), held(pod="q")], None),
        ([held("GPU-a::0", replica="0")], None),
        ([held(), held(pod="q", admin_access=True)], ("research", "p", "main")),
        ([held(admin_access=True)], None),
    ],
    ids=[
        "nobody",
        "one container",
        "one container twice",
        "two containers",
        "a replica",
        "one container beside admin access",
        "admin access",
    ],
)
def test_a_device_that_is_shared_is_nobodys_alone(
    allocations: list[DeviceAllocation], expected: tuple[str, str, str] | None
) -> None:
    assert exclusive_holder(BOARD, allocations) == expected
