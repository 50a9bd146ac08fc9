"""GPUs partitioned by MIG: the entries of all rows sum to the GPU, and nothing is booked twice."""

from hypothesis import given
from hypothesis import strategies as st

from gpuledger.records import Category, GpuBooks, GpuReading, NodeSample
from gpuledger_enricher.join.booking.books import book_tick
from tests.unit.enricher.join.ticks import GIB, SECOND_NS, process, reading, sample


def physical_gpu(**changes: object) -> GpuReading:
    """Return the row of a partitioned GPU: no utilization, the GPU's energy, all its memory."""
    return reading(**{"mig_enabled": True, "utilization_ratio": None, **changes})


def instance(
    gpu_instance: int, compute_instance: int = 0, *, total: int = 10, **changes: object
) -> GpuReading:
    """Return the row of an instance: no energy, the memory of its GPU instance."""
    values: dict[str, object] = {
        "uuid": f"MIG-{gpu_instance}-{compute_instance}",
        "parent_uuid": "GPU-a",
        "gpu_instance": gpu_instance,
        "compute_instance": compute_instance,
        "memory_total_bytes": total * GIB,
        "memory_used_bytes": 0,
        "memory_reserved_bytes": None,
        "energy_millijoules": None,
        "energy_method": None,
    }
    return reading(**(values | changes))


def partitioned(*gpus: GpuReading, **changes: object) -> NodeSample:
    return sample(gpus=[physical_gpu(), *gpus], **changes)


def memory_gib(books: list[GpuBooks]) -> list[float]:
    return [sum(entry.memory_bytes or 0 for entry in row.entries) / GIB for row in books]


def test_a_gpu_keeps_the_memory_that_no_instance_has() -> None:
    books = book_tick(partitioned(instance(1), instance(2, total=40)))
    assert memory_gib(books) == [30, 10, 40]
    # On the GPU 20 GiB are in use that no instance reports.
    (unattributed,) = [one for one in books[0].entries if one.category is Category.UNATTRIBUTED]
    assert unattributed.memory_bytes == 20 * GIB
    assert books[0].reading.memory_total_bytes == 80 * GIB


def test_the_busy_time_of_a_partitioned_gpu_is_absent() -> None:
    """Even if a driver reports a utilization: it is that of kernels that the instances report."""
    for ratio in (None, 0.7):
        tick = sample(gpus=[physical_gpu(utilization_ratio=ratio), instance(1)])
        whole, part = book_tick(tick)
        assert {one.busy_ns for one in whole.entries} == {None}
        assert sum(one.busy_ns or 0 for one in part.entries) == SECOND_NS


def test_an_instances_busy_time_is_booked_only_on_its_own_processes() -> None:
    tick = partitioned(
        instance(1, utilization_ratio=0.8),
        instance(2, utilization_ratio=0.4),
        processes=[process(gpu=1, container=0), process(gpu=2, container=1, pid=2)],
    )
    _, one, other = book_tick(tick)
    assert [(e.container, e.busy_ns) for e in one.entries if e.category == "pod"] == [
        (0, 800_000_000)
    ]
    assert [(e.container, e.busy_ns) for e in other.entries if e.category == "pod"] == [
        (1, 400_000_000)
    ]


def test_compute_instances_that_share_memory_book_it_once() -> None:
    """The first row has the GPU instance's memory less that of the other row's processes."""
    shared = {"total": 20, "memory_used_bytes": 9 * GIB}
    tick = partitioned(
        instance(3, 0, **shared),
        instance(3, 1, **shared),
        processes=[
            process(gpu=1, container=0, memory_used_bytes=5 * GIB),
            process(gpu=2, container=1, pid=2, memory_used_bytes=4 * GIB),
        ],
    )
    books = book_tick(tick)
    assert memory_gib(books) == [60, 16, 4]
    held = [
        (one.memory_bytes or 0) / GIB
        for row in books
        for one in row.entries
        if one.container is not None
    ]
    assert held == [5, 4]


def test_instances_of_one_gpu_do_not_affect_another() -> None:
    other = reading(uuid="GPU-b", index=1)
    books = book_tick(sample(gpus=[physical_gpu(), instance(1), other]))
    assert memory_gib(books) == [70, 10, 80]
    assert sum(one.energy_millijoules or 0 for one in books[2].entries) == 300_000


sizes = st.none() | st.integers(min_value=0, max_value=12 * GIB)
rows = st.lists(st.tuples(st.integers(1, 4), sizes, sizes), max_size=7)
holders = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5), sizes), max_size=8)


@given(rows=rows, used=sizes, reserved=sizes, holders=holders)
def test_the_rows_of_a_gpu_sum_to_the_gpu_whatever_they_report(
    rows: list[tuple[int, int | None, int | None]],
    used: int | None,
    reserved: int | None,
    holders: list[tuple[int, int, int | None]],
) -> None:
    """If the instances report their memory and do not have more than the GPU."""
    parts = [
        instance(
            number,
            place,
            memory_used_bytes=part_used,
            memory_reserved_bytes=part_reserved,
            utilization_ratio=None,
        )
        for place, (number, part_used, part_reserved) in enumerate(rows)
    ]
    whole = physical_gpu(memory_used_bytes=used, memory_reserved_bytes=reserved)
    processes = [
        process(gpu=gpu, pid=pid + 2, container=container, memory_used_bytes=held)
        for pid, (gpu, container, held) in enumerate(holders)
        if gpu <= len(parts)
    ]
    books = book_tick(sample(gpus=[whole, *parts], processes=processes))
    assert sum(one.memory_bytes or 0 for row in books for one in row.entries) == 80 * GIB
    values = [one.memory_bytes for row in books for one in row.entries]
    assert all(value is not None and value >= 0 for value in values)
    assert sum(one.energy_millijoules or 0 for row in books for one in row.entries) == 300_000
