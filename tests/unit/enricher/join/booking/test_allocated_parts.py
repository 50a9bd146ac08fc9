"""Idle time and its allocatees: allocated but unused parts name the allocation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.allocated_parts import find_allocated_parts
from gpuledger.records import (
    AllocationSource,
    Category,
    DeviceAllocation,
    Entry,
    GpuReading,
)
from gpuledger_enricher.join.booking.books import book_tick
from tests.unit.enricher.join.ticks import GIB, SECOND_NS, process, reading, sample

MIG_UUIDS = [f"MIG-00000000-0000-4000-8000-00000000000{digit}" for digit in range(3)]


def allocation(device: str = "GPU-a", pod: str = "p", **changes: object) -> DeviceAllocation:
    values: dict[str, object] = {
        "gpu_uuid": "GPU-a",
        "device_id": device,
        "resource_name": "nvidia.com/gpu",
        "namespace": "research",
        "pod": pod,
        "container": "main",
    }
    return DeviceAllocation(**(values | changes))  # type: ignore[arg-type]  # the names are its own


def admin(pod: str) -> DeviceAllocation:
    """Return an allocation of the GPU by a claim with admin access."""
    return allocation(pod=pod, claim="monitoring/watch", admin_access=True)


def replica(number: int, pod: str) -> DeviceAllocation:
    return allocation(f"GPU-a::{number}", pod, replica=str(number))


def memory(number: int, pod: str, *, of: int | None = None) -> DeviceAllocation:
    return allocation(
        f"GPU-a-_-{number}",
        pod,
        replica=str(number),
        resource_name="aliyun.com/gpu-mem",
        device_replicas=of,
    )


def shared(number: int, pod: str, *, of: int) -> DeviceAllocation:
    return allocation(f"GPU-a::{number}", pod, replica=str(number), device_replicas=of)


def cores(number: int, pod: str, *, of: int | None = None) -> DeviceAllocation:
    return allocation(
        f"GPU-a-_-{number}",
        pod,
        replica=str(number),
        resource_name="aliyun.com/gpu-core",
        device_replicas=of,
    )


def stated(share_ppm: int, pod: str) -> DeviceAllocation:
    """Return the allocation of a share that an annotation states."""
    return allocation(pod=pod, source=AllocationSource.HAMI, share_ppm=share_ppm)


PARTS = [
    ("by nobody", [], {None: (1, 1)}),
    ("whole for one container", [allocation()], {0: (1, 1)}),
    (
        "for a container that has another GPU too",
        [allocation(gpu_uuid="GPU-b"), allocation()],
        {0: (1, 1)},
    ),
    ("one replica: nobody else may use it", [replica(3, "p")], {0: (1, 1)}),
    ("replicas in equal parts", [replica(0, "p"), replica(1, "q")], {0: (1, 2), 1: (1, 2)}),
    (
        "two replicas of one container count twice, in one entry",
        [replica(0, "p"), replica(1, "q"), replica(2, "p")],
        {0: (2, 3), 1: (1, 3)},
    ),
    (
        "replicas out of the kubelet's total: the rest is unallocated",
        [shared(0, "p", of=4), shared(1, "q", of=4)],
        {0: (1, 4), 1: (1, 4), None: (2, 4)},
    ),
    (
        "more replicas than the total: in parts of those allocated",
        [shared(0, "p", of=2), shared(1, "q", of=2), shared(2, "q", of=2)],
        {0: (1, 3), 1: (2, 3)},
    ),
    (
        "memory and cores: the greater of the two parts",
        [
            *(memory(number, "p") for number in range(8)),
            *(cores(number, "p") for number in range(25)),
        ],
        {0: (100, 400), None: (300, 400)},
    ),
    (
        "a whole GPU and half of it: more than all, so each gets its part of the sum",
        [allocation(), shared(0, "q", of=2)],
        {0: (2, 3), 1: (1, 3)},
    ),
    (
        "one claim of two pods: by pod, then by container",
        [
            allocation(pod="p", claim="research/c"),
            allocation(pod="q", claim="research/c", container="main"),
            allocation(pod="q", claim="research/c", container="side"),
        ],
        {0: (2, 4), 1: (1, 4), 2: (1, 4)},
    ),
    (
        "one claim of two pods: in equal parts",
        [allocation(pod="p", claim="research/c"), allocation(pod="q", claim="research/c")],
        {0: (1, 2), 1: (1, 2)},
    ),
    (
        "admin access and a whole GPU: admin access has nothing",
        [admin(pod="a"), allocation(pod="p")],
        {0: (1, 1)},
    ),
    (
        "admin access and replicas: the replicas' parts are unchanged",
        [admin(pod="a"), shared(0, "p", of=4), shared(1, "q", of=4)],
        {0: (1, 4), 1: (1, 4), None: (2, 4)},
    ),
    (
        "a container with admin access and an allocation: only the allocation counts",
        [admin(pod="p"), replica(0, "p"), replica(1, "q")],
        {0: (1, 2), 1: (1, 2)},
    ),
    ("only admin access: the GPU is unallocated", [admin(pod="a")], {None: (1, 1)}),
    (
        "pieces of memory: by bytes, and the rest is unallocated",
        [*(memory(number, "p") for number in range(8)), memory(8, "q"), memory(9, "q")],
        {0: (8, 80), 1: (2, 80), None: (70, 80)},
    ),
    (
        "pieces of memory out of the kubelet's total, for example of a MiB each",
        [memory(number, "p", of=81_920) for number in range(8)],
        {0: (8, 81_920), None: (81_912, 81_920)},
    ),
    (
        "memory and cores with the kubelet's totals: the greater of the two parts",
        [
            *(memory(number, "p", of=40) for number in range(8)),
            *(cores(number, "p", of=100) for number in range(25)),
            *(memory(number, "q", of=40) for number in range(8, 20)),
            *(cores(number, "q", of=100) for number in range(25, 35)),
        ],
        {0: (50, 200), 1: (60, 200), None: (90, 200)},
    ),
    ("a single piece of memory", [memory(0, "p")], {0: (1, 80), None: (79, 80)}),
    (
        "more pieces than the total (of MiB, or too many): never more than all",
        [memory(number, f"p{number % 2}") for number in range(160)],
        {0: (80, 160), 1: (80, 160)},
    ),
    (
        "four stated shares of a quarter are the GPU",
        [stated(250_000, pod) for pod in "pqrs"],
        dict.fromkeys(range(4), (250_000, 1_000_000)),
    ),
    (
        "stated shares: the rest is unallocated",
        [stated(250_000, "p"), stated(1, "q")],
        {0: (250_000, 1_000_000), 1: (1, 1_000_000), None: (749_999, 1_000_000)},
    ),
    (
        "stated shares of more than the GPU: each gets its part of the sum",
        [stated(750_000, "p"), stated(750_000, "q")],
        {0: (750_000, 1_500_000), 1: (750_000, 1_500_000)},
    ),
    (
        "several stated shares of one container add up to the GPU at most",
        [stated(600_000, "p"), stated(600_000, "p")],
        {0: (1_000_000, 1_000_000)},
    ),
    (
        "a stated share and a replica",
        [stated(500_000, "p"), shared(0, "q", of=4)],
        {0: (500_000, 1_000_000), 1: (250_000, 1_000_000), None: (250_000, 1_000_000)},
    ),
    ("an instance is not the GPU", [allocation(MIG_UUIDS[0], gpu_instance=1)], {None: (1, 1)}),
]


@pytest.mark.parametrize(("case", "allocations", "parts"), PARTS, ids=[row[0] for row in PARTS])
def test_a_device_is_allocated_in_these_parts(
    case: str, allocations: list[DeviceAllocation], parts: dict[int | None, tuple[int, int]]
) -> None:
    (found,) = find_allocated_parts(sample(allocations=allocations))
    assert {place: (number, found.whole) for place, number in found.parts} == parts, case


def instance(place: int, gpu_instance: int, compute_instance: int = 0) -> GpuReading:
    return reading(
        uuid=MIG_UUIDS[place],
        parent_uuid="GPU-a",
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
        memory_total_bytes=10 * GIB,
        energy_millijoules=None,
    )


def test_an_instance_is_allocated_by_its_uuid_or_by_its_number() -> None:
    rows = [reading(mig_enabled=True), instance(0, 1, 0), instance(1, 1, 1), instance(2, 2)]
    given_out = [
        allocation(MIG_UUIDS[1], "by-uuid", gpu_instance=1),
        allocation("nvidia0/gi2", "by-number", gpu_instance=2),
        allocation("GPU-a", "whole"),
    ]
    board, first, second, third = find_allocated_parts(sample(gpus=rows, allocations=given_out))
    # The allocatee of the whole GPU has the instances without another allocatee.
    assert [row.parts for row in (board, first, second, third)] == [
        [(None, 1)],
        [(2, 1)],
        [(1, 1)],
        [(0, 1)],
    ]


def idle(entries: list[Entry]) -> list[Entry]:
    return [one for one in entries if one.category is Category.IDLE]


def test_an_allocated_gpu_without_a_process_names_its_allocatee() -> None:
    tick = sample(gpus=[reading(utilization_ratio=0.0)], allocations=[allocation()])
    (entry,) = idle(book_tick(tick)[0].entries)
    assert (entry.allocation, entry.busy_ns, entry.energy_millijoules) == (0, SECOND_NS, 300_000)


def test_a_gpu_that_does_not_answer_has_only_allocated_time() -> None:
    tick = sample(
        gpus=[GpuReading(uuid="GPU-a", index=0, unresponsive=True)],
        allocations=[shared(0, "p", of=3), shared(1, "q", of=3)],
    )
    (books,) = book_tick(tick)
    assert books.gap_ns == SECOND_NS
    assert books.entries == [
        Entry(category=Category.IDLE, allocation=0, allocated_ns=SECOND_NS // 3 + 1),
        Entry(category=Category.IDLE, allocation=1, allocated_ns=SECOND_NS // 3),
        Entry(category=Category.IDLE, allocated_ns=SECOND_NS // 3),
    ]


def test_the_row_of_a_partitioned_gpu_itself_is_unallocated() -> None:
    rows = [reading(mig_enabled=True), instance(0, 1)]
    tick = sample(gpus=rows, allocations=[allocation(MIG_UUIDS[0], gpu_instance=1)])
    allocated = [
        [(one.allocation, one.allocated_ns) for one in idle(row.entries)] for row in book_tick(tick)
    ]
    assert allocated == [[(None, SECOND_NS)], [(0, SECOND_NS)]]


def test_use_without_a_process_is_unattributed_even_if_one_container_has_the_gpu() -> None:
    """Nothing is booked on a pod without a process."""
    entries = book_tick(sample(allocations=[allocation()]))[0].entries
    used = {one.category: one.busy_ns for one in entries if one.category is not Category.IDLE}
    assert used == {Category.HOST: 0, Category.UNATTRIBUTED: SECOND_NS // 2}


def test_idle_is_split_by_allocation_and_the_rest_has_no_allocation() -> None:
    allocations = [memory(number, "p") for number in range(20)] + [memory(20, "q")]
    found = idle(book_tick(sample(allocations=allocations))[0].entries)
    assert [one.allocation for one in found] == [0, 1, None]
    assert [one.busy_ns for one in found] == [125_000_000, 6_250_000, 368_750_000]
    assert sum(one.memory_bytes or 0 for one in found) == 59 * GIB
    assert [one.memory_bytes for one in found] == [
        59 * GIB * 20 // 80,
        59 * GIB // 80,
        59 * GIB * 59 // 80 + 1,
    ]


def test_idle_of_an_unknown_quantity_stays_unknown() -> None:
    tick = sample(
        gpus=[reading(utilization_ratio=None)], allocations=[replica(0, "p"), replica(1, "q")]
    )
    found = idle(book_tick(tick)[0].entries)
    assert [one.busy_ns for one in found] == [None, None]


def test_a_pod_without_an_allocation_is_booked_by_its_process() -> None:
    tick = sample(
        processes=[process(container=0, sm_utilization_ratio=0.5)],
        allocations=[allocation(pod="another")],
    )
    (pod,) = [one for one in book_tick(tick)[0].entries if one.category is Category.POD]
    assert pod.busy_ns == SECOND_NS // 2


pods = st.sampled_from(["p", "q", "r"])
allocations = st.lists(
    st.one_of(
        st.builds(replica, st.integers(0, 9), pods),
        st.builds(memory, st.integers(0, 99), pods),
        st.builds(allocation, st.just("GPU-a"), pods),
        st.builds(allocation, st.sampled_from(MIG_UUIDS), pods, gpu_instance=st.integers(0, 3)),
    ),
    max_size=120,
)


@given(allocations=allocations, total=st.none() | st.integers(0, 100 * GIB))
def test_the_parts_of_a_row_sum_to_the_row_and_name_each_allocatee_once(
    allocations: list[DeviceAllocation], total: int | None
) -> None:
    rows = [reading(memory_total_bytes=total), instance(0, 1), instance(1, 2)]
    for parts, whole, *_ in find_allocated_parts(sample(gpus=rows, allocations=allocations)):
        pieces = [number for _, number in parts]
        assert all(number > 0 for number in pieces)
        assert sum(pieces) == whole
        assert len({place for place, _ in parts}) == len(parts)
