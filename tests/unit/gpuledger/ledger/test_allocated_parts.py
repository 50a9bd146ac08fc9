"""One rule finds the device of an allocation, both for exclusive use and for idle parts."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.ledger.allocated_parts import (
    TooManyEntriesError,
    exclusive_container,
    find_allocated_parts,
)
from gpuledger.records import DeviceAllocation, GpuReading, JobAllocation, NodeSample

MIG = [f"MIG-00000000-0000-4000-8000-00000000000{digit}" for digit in range(3)]
PHYSICAL_GPU = GpuReading(uuid="GPU-a", index=0)
INSTANCES = [
    GpuReading(uuid=uuid, index=0, parent_uuid="GPU-a", gpu_instance=number, compute_instance=0)
    for uuid, number in zip(MIG, (1, 2, 2), strict=True)
]
ROWS = [PHYSICAL_GPU, *INSTANCES]


def allocated(device: str = "GPU-a", pod: str = "p", **changes: Any) -> DeviceAllocation:  # noqa: ANN401  # any field
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
    ("another GPU matches none of these", allocated("GPU-b", gpu_uuid="GPU-b"), []),
    ("an instance by its UUID", allocated(MIG[0], gpu_instance=1), [1]),
    ("among compute instances, the one with that UUID", allocated(MIG[2], gpu_instance=2), [3]),
    (
        "an instance by its number: all rows of that GPU instance",
        allocated("GPU-a/2/0", gpu_instance=2),
        [2, 3],
    ),
    ("another GPU's instance", allocated("GPU-b/1/0", gpu_uuid="GPU-b", gpu_instance=1), []),
]


@pytest.mark.parametrize(("case", "allocation", "rows"), MEANT, ids=[row[0] for row in MEANT])
def test_page_and_entries_match_an_allocation_to_the_same_device(
    case: str, allocation: DeviceAllocation, rows: list[int]
) -> None:
    found = find_allocated_parts(tick([allocation]))
    assert [
        row for row, allocated in enumerate(found) if allocated.parts[0][0] is not None
    ] == rows, case
    exclusive = [exclusive_container(reading, [allocation]) for reading in ROWS]
    assert [index for index, holder in enumerate(exclusive) if holder] == rows, case


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([allocated()], [[], ["p"], ["p"], ["p"]]),
        ([allocated(), allocated(MIG[0], "q", gpu_instance=1)], [[], ["q"], ["p"], ["p"]]),
        ([allocated(), allocated(pod="q")], [[], ["p", "q"], ["p", "q"], ["p", "q"]]),
    ],
    ids=["to one", "and an instance to another", "to two"],
)
def test_a_partitioned_gpu_is_allocated_as_all_its_instances_without_another_allocatee(
    given: list[DeviceAllocation], expected: list[list[str]]
) -> None:
    """Nothing runs outside the instances; a separately allocated instance has its own allocatee."""
    found = [
        [place for place, _ in row.parts if isinstance(place, int)]
        for row in find_allocated_parts(tick(given))
    ]

    assert [[given[place].pod for place in places] for places in found] == expected


@pytest.mark.parametrize(
    ("allocations", "jobs", "expected"),
    [
        ([], [("7", None)], [{None: 1}, {"7": 1}, {"7": 1}, {"7": 1}]),
        ([], [("8", None), ("7", None), ("8", None)], [{None: 1}, *[{"7": 1, "8": 1}] * 3]),
        ([], [("7", 2)], [{None: 1}, {None: 1}, {"7": 1}, {"7": 1}]),
        ([], [("7", 1), ("8", None)], [{None: 1}, {"7": 1}, {"8": 1}, {"8": 1}]),
        ([], [("7", 9)], [{None: 1}] * 4),
        (
            [allocated(MIG[0], gpu_instance=1)],
            [("7", None), ("8", 1)],
            [{None: 1}, {0: 1, "8": 1}, {"7": 1}, {"7": 1}],
        ),
        ([allocated()], [("7", None)], [{None: 1}, {0: 1}, {0: 1}, {0: 1}]),
    ],
    ids=[
        "a partitioned GPU to one",
        "to two",
        "an instance",
        "an instance to one, the rest to another",
        "a missing instance",
        "an instance to a pod and to a job",
        "a partitioned GPU to a pod and to a job",
    ],
)
def test_a_job_can_have_whole_devices_along_with_containers(
    allocations: list[DeviceAllocation],
    jobs: list[tuple[str, int | None]],
    expected: list[dict[int | str | None, int]],
) -> None:
    given = [
        JobAllocation(gpu_uuid="GPU-a", job_id=job, gpu_instance=instance) for job, instance in jobs
    ]
    found = find_allocated_parts(replace(tick(allocations), job_allocations=given))

    assert [dict(row.parts) for row in found] == expected
    assert all(row.whole == sum(part for _, part in row.parts) for row in found)


@pytest.mark.parametrize(
    ("allocations", "jobs", "is_unknown"),
    [
        ([], [], [False, True, True, True]),
        ([], ["7"], [False, False, False, False]),
        ([allocated(MIG[0], gpu_instance=1)], [], [False, False, True, True]),
    ],
    ids=["nothing known", "a job", "an allocation of which another source knows"],
)
def test_without_an_answer_of_the_kubelet_the_rest_of_a_device_is_unknown(
    allocations: list[DeviceAllocation], jobs: list[str], is_unknown: list[bool]
) -> None:
    """Except the row of a partitioned GPU, because nothing runs outside the instances."""
    sample = replace(
        tick(allocations),
        allocations_unknown=True,
        job_allocations=[JobAllocation(gpu_uuid="GPU-a", job_id=job) for job in jobs],
    )
    known = find_allocated_parts(replace(sample, allocations_unknown=None))
    found = find_allocated_parts(sample)

    assert [(row.parts, row.whole) for row in found] == [(row.parts, row.whole) for row in known]
    assert [row.is_rest_unknown and row.parts[-1][0] is None for row in found] == is_unknown


def test_half_of_a_device_with_one_pod_and_two_jobs_belongs_to_the_pod() -> None:
    jobs = [JobAllocation(gpu_uuid="GPU-a", job_id=job) for job in ("7", "8")]
    (row,) = find_allocated_parts(
        replace(tick([allocated()]), gpus=[PHYSICAL_GPU], job_allocations=jobs)
    )

    assert (list(row.parts), row.whole) == ([(0, 2), ("7", 1), ("8", 1)], 4)


@pytest.mark.parametrize(
    ("pods", "jobs", "parts", "is_scaled"),
    [
        (["p"], [], [(0, 1)], False),
        (["p", "p"], [], [(0, 1)], False),
        (["p", "q"], [], [(0, 1), (1, 1)], True),
        (["p", "q", "p"], [], [(0, 1), (1, 1)], True),
        ([], ["7", "8"], [("7", 1), ("8", 1)], False),
        (["p"], ["7"], [(0, 1), ("7", 1)], True),
    ],
    ids=[
        "one pod",
        "one pod twice",
        "two pods",
        "two pods, one of them twice",
        "two jobs, which share it",
        "a pod and a job",
    ],
)
@pytest.mark.parametrize("others", [[], [allocated("GPU-b", "z", gpu_uuid="GPU-b")]])
def test_allocatees_of_the_same_whole_gpu_have_equal_parts_and_that_is_noted(
    pods: list[str],
    jobs: list[str],
    parts: list[tuple[int | str, int]],
    *,
    is_scaled: bool,
    others: list[DeviceAllocation],
) -> None:
    """As with a broken device plugin, or a pod that the kubelet still lists after its end."""
    allocations = [allocated(pod=pod) for pod in pods]
    gpus = [PHYSICAL_GPU, GpuReading(uuid="GPU-b", index=1)]
    for given in (allocations + others, others + allocations[::-1]):
        sample = replace(
            tick(given),
            gpus=gpus,
            job_allocations=[JobAllocation(gpu_uuid="GPU-a", job_id=job) for job in jobs],
        )
        row, other = find_allocated_parts(sample)
        assert (row.parts, row.is_scaled) == (parts, is_scaled)
        assert row.whole == sum(part for _, part in row.parts)
        assert not other.is_scaled


def test_too_many_jobs_are_refused_and_not_booked() -> None:
    """Anyone may write a tick, and each row of a partitioned GPU would have all its jobs."""
    jobs = [JobAllocation(gpu_uuid="GPU-a", job_id=str(number)) for number in range(4096)]
    rows = [replace(INSTANCES[0], uuid=f"MIG-{number}") for number in range(17)]

    with pytest.raises(TooManyEntriesError, match="jobs"):
        find_allocated_parts(replace(tick([]), gpus=[PHYSICAL_GPU, *rows], job_allocations=jobs))


def test_a_gpu_that_is_not_partitioned_belongs_to_its_allocatee_as_a_whole() -> None:
    (row,) = find_allocated_parts(replace(tick([allocated()]), gpus=[PHYSICAL_GPU]))

    assert list(row.parts) == [(0, 1)]
    assert exclusive_container(PHYSICAL_GPU, [allocated()]) == ("research", "p", "main")


@pytest.mark.parametrize(
    ("allocations", "expected"),
    [
        ([], None),
        ([allocated()], ("research", "p", "main")),
        ([allocated(), allocated(claim="research/c")], ("research", "p", "main")),
        ([allocated(), allocated(pod="q")], None),
        ([allocated("GPU-a::0", replica="0")], None),
        ([allocated(), allocated(pod="q", admin_access=True)], ("research", "p", "main")),
        ([allocated(admin_access=True)], None),
    ],
    ids=[
        "nobody",
        "one container",
        "one container twice",
        "two containers",
        "a replica",
        "one container and admin access",
        "admin access",
    ],
)
def test_a_shared_device_has_no_exclusive_container(
    allocations: list[DeviceAllocation], expected: tuple[str, str, str] | None
) -> None:
    assert exclusive_container(PHYSICAL_GPU, allocations) == expected
