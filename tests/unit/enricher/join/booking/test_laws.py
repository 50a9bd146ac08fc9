"""The laws of booking for any tick, including ticks whose readings contradict each other."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.codec import Decoder, encode
from gpuledger.ledger.allocated_parts import AllocatedContainer, allocated_containers
from gpuledger.ledger.entries import energy_method_of
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import (
    Category,
    ContainerRef,
    DeviceAllocation,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuProcess,
    GpuReading,
    IdleDrawSource,
    JobAllocation,
    NodeSample,
    ProcessKind,
)
from gpuledger.records.bounds import (
    MAX_INTERVAL_NS,
    MAX_MEMORY_BYTES,
    MAX_MILLIWATTS,
    MAX_TICK_MILLIJOULES,
)
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.booking.shares import RepeatedContainerError
from tests.default_topics import SAMPLES
from tests.examples import examples
from tests.unit.enricher.join.ticks import (
    CONTAINER_IDS,
    GIB,
    SECOND_NS,
    UIDS,
    process,
    reading,
    sample,
)

QUANTITIES = [
    "busy_ns",
    "memory_bytes",
    "energy_millijoules",
]
AMOUNTS = [*QUANTITIES, "allocated_ns"]

ratios = (
    st.none()
    | st.sampled_from([0.0, 0.3, 1.0])
    | st.integers(0, 10**6).map(lambda ppm: ppm / 10**6)
    | st.floats(0.0, 1.0)
)
sizes = st.none() | st.sampled_from([0, GIB, 80 * GIB, MAX_MEMORY_BYTES]) | st.integers(0, 90 * GIB)
# Few values of each, so that ties are drawn, and the limits.
energies = st.none() | st.sampled_from([0, 1, 7, 300_000]) | st.integers(0, MAX_TICK_MILLIJOULES)
draws = st.none() | st.sampled_from([0, 1, 71_000]) | st.integers(0, MAX_MILLIWATTS)
intervals = st.sampled_from([1, 1000, SECOND_NS, MAX_INTERVAL_NS]) | st.integers(1, MAX_INTERVAL_NS)
COUNTERS = dict.fromkeys(("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"), ratios)


def rows_of(gpu: int, count: int) -> st.SearchStrategy[list[GpuReading]]:
    """Return a GPU, whole or partitioned into `count` instances; some share their memory."""
    uuid = f"GPU-{gpu}"
    board = st.builds(
        reading,
        uuid=st.just(uuid),
        model=st.sampled_from([None, "NVIDIA H100 80GB HBM3", "NVIDIA L4"]),
        utilization_ratio=ratios,
        memory_total_bytes=sizes,
        memory_used_bytes=sizes,
        memory_reserved_bytes=sizes,
        energy_millijoules=energies,
        energy_method=st.sampled_from(EnergyMethod),
        idle_draw_milliwatts=draws,
        mig_enabled=st.just(value=count > 0),
        **COUNTERS,
    )
    parts = [
        st.builds(
            reading,
            uuid=st.just(f"MIG-{gpu}-{place}"),
            parent_uuid=st.just(uuid),
            gpu_instance=st.none() | st.integers(0, 3),
            compute_instance=st.just(place),
            mig_profile=st.sampled_from([None, "1g.10gb", "1c.3g.40gb"]),
            utilization_ratio=ratios,
            memory_total_bytes=sizes,
            memory_used_bytes=sizes,
            memory_reserved_bytes=sizes,
            energy_millijoules=st.none(),
            energy_method=st.none(),
            **COUNTERS,
        )
        for place in range(count)
    ]
    return st.tuples(board, *parts).map(list)


@st.composite
def ticks(draw: st.DrawFn) -> NodeSample:
    """Draw a tick of up to two GPUs with their instances, processes and allocations."""
    gpus = [
        row
        for gpu in range(draw(st.integers(0, 2)))
        for row in draw(rows_of(gpu, draw(st.sampled_from([0, 0, 1, 4]))))
    ]
    containers = [
        ContainerRef(container_id=CONTAINER_IDS[0], pod_uid=UIDS[0]),
        ContainerRef(container_id=CONTAINER_IDS[1], pod_uid=UIDS[1]),
        ContainerRef(container_id=CONTAINER_IDS[2]),
        ContainerRef(pod_uid=UIDS[3]),
        ContainerRef(),
        ContainerRef(job_id="77"),
        ContainerRef(container_id=CONTAINER_IDS[2], job_id="77"),
        ContainerRef(job_id="1234[5].server"),
        # A pod takes precedence.
        ContainerRef(container_id=CONTAINER_IDS[0], pod_uid=UIDS[1], job_id="77"),
    ]
    return sample(
        interval_ns=draw(intervals),
        gpus=gpus,
        containers=containers,
        processes=draw(st.lists(processes(len(gpus)), max_size=8)) if gpus else [],
        allocations=draw(st.lists(allocations, max_size=8)),
        job_allocations=draw(st.none() | st.lists(job_allocations, max_size=6)),
    )


def processes(rows: int) -> st.SearchStrategy[GpuProcess]:
    return st.builds(
        process,
        gpu=st.integers(0, rows - 1),
        pid=st.integers(1, 10**6),
        started_boottime_ns=st.none() | st.just(1),
        container=st.none() | st.integers(0, 8),
        kind=st.sampled_from(ProcessKind),
        memory_used_bytes=sizes,
        sm_utilization_ratio=ratios,
        ended=st.none() | st.just(True),  # noqa: FBT003 - a value, not a flag
    )


allocations = st.builds(
    DeviceAllocation,
    gpu_uuid=st.sampled_from(["GPU-0", "GPU-1", "GPU-gone"]),
    device_id=st.sampled_from(["GPU-0", "MIG-0-1", "nvidia0", "nvidia1"]),
    resource_name=st.sampled_from(
        [
            "nvidia.com/gpu",
            "nvidia.com/gpu.shared",
            "aliyun.com/gpu-mem",
            "aliyun.com/gpu-core",
        ]
    ),
    namespace=st.just("research"),
    pod=st.sampled_from(["p", "q", "r"]),
    container=st.sampled_from(["main", "main", "side"]),
    gpu_instance=st.none() | st.integers(0, 3),
    replica=st.none() | st.sampled_from(["0", "1"]),
    claim=st.none() | st.sampled_from(["research/c", "research/d"]),
    device_replicas=st.none() | st.sampled_from([1, 3, 7, 80, 2**31 - 1]),
    share_ppm=st.none() | st.sampled_from([1, 250_000, 333_333, 1_000_000]),
)


job_allocations = st.builds(
    JobAllocation,
    gpu_uuid=st.sampled_from(["GPU-0", "GPU-1", "GPU-gone"]),
    job_id=st.sampled_from(["77", "78", "1234[5].server"]),
    gpu_instance=st.none() | st.integers(0, 3),
)


@examples(150)
@given(ticks())
def test_entries_sum_to_the_device_and_none_is_negative(tick: NodeSample) -> None:
    """The sum is exact for each quantity, whatever the readings are."""
    books = book_tick(tick)
    assert list(imbalances(books, tick.interval_ns)) == []
    for row in books:
        for quantity in AMOUNTS:
            values = [getattr(entry, quantity) for entry in row.entries]
            assert all(value is None or (type(value) is int and value >= 0) for value in values)


@examples(100)
@given(ticks())
def test_allocated_time_sums_to_the_interval_on_every_row_whatever_is_used(
    tick: NodeSample,
) -> None:
    """Also if a GPU does not answer or is partitioned: the same as if nothing were used."""
    allocated = allocated_by_row(tick)
    assert [sum(row.values()) for row in allocated] == [tick.interval_ns] * len(tick.gpus)
    unresponsive = [
        replace(row, utilization_ratio=None, memory_used_bytes=None, energy_millijoules=None)
        for row in tick.gpus
    ]
    assert (
        allocated_by_row(replace(tick, gpus=unresponsive, processes=[], ended_processes=None))
        == allocated
    )
    # The same as if everything were used.
    full = [
        replace(row, utilization_ratio=1.0, memory_used_bytes=row.memory_total_bytes)
        for row in tick.gpus
    ]
    assert allocated_by_row(replace(tick, gpus=full)) == allocated


def allocated_by_row(tick: NodeSample) -> list[dict[tuple[int | None, str | None], int]]:
    """Return the allocated time of each row by the allocation's position or the job."""
    return [
        {
            (entry.allocation, entry.job_id): entry.allocated_ns
            for entry in row.entries
            if entry.allocated_ns is not None and entry.category is Category.IDLE
        }
        for row in book_tick(tick)
    ]


@examples(150)
@given(ticks(), st.randoms(use_true_random=False))
def test_the_order_of_the_lists_in_a_tick_changes_nothing(tick: NodeSample, random: Random) -> None:
    """Every category has the same amounts, whatever the order of processes and containers."""
    assert amounts_of(in_another_order(tick, random)) == amounts_of(tick)


def in_another_order(tick: NodeSample, random: Random) -> NodeSample:
    """Return the same tick with its processes, containers and allocations shuffled."""
    places = list(range(len(tick.containers)))
    random.shuffle(places)
    processes = [
        one if one.container is None else replace(one, container=places.index(one.container))
        for one in tick.processes
    ]
    allocations = list(tick.allocations)
    jobs = None if tick.job_allocations is None else list(tick.job_allocations)
    random.shuffle(processes)
    random.shuffle(allocations)
    random.shuffle(jobs or [])
    return replace(
        tick,
        containers=[tick.containers[place] for place in places],
        processes=processes,
        allocations=allocations,
        job_allocations=jobs,
    )


def amounts_of(tick: NodeSample) -> list[dict[tuple[object, ...], tuple[object, ...]]]:
    """Return the amounts of each row by category and user, not by position."""
    found = []
    for row in book_tick(tick):
        amounts: dict[tuple[object, ...], tuple[object, ...]] = {}
        for entry in row.entries:
            container = None if entry.container is None else tick.containers[entry.container]
            holder = (
                None
                if entry.allocation is None
                else allocated_containers(tick.allocations)[entry.allocation]
            )
            category = (entry.category, container, holder, entry.job_id)
            assert category not in amounts
            amounts[category] = tuple(getattr(entry, name) for name in AMOUNTS)
        methods: tuple[object, ...] = (row.busy_method, row.memory_method, row.energy_method)
        found.append(amounts | {("methods",): methods})
    return found


@examples(40)
@given(ticks())
def test_a_quantity_has_a_method_exactly_if_it_is_known(tick: NodeSample) -> None:
    for row in book_tick(tick):
        reported = (row.busy_method, row.memory_method, energy_method_of(row))
        for quantity, method in zip(QUANTITIES, reported, strict=True):
            known = {getattr(entry, quantity) is not None for entry in row.entries}
            assert known == {method is not None}, quantity
        is_from_table = row.idle_draw_source is IdleDrawSource.TABLE
        assert (row.idle_draw_milliwatts is not None) == is_from_table


@examples(40)
@given(ticks())
def test_a_quantity_is_known_for_all_entries_or_for_none(tick: NodeSample) -> None:
    for row in book_tick(tick):
        for quantity in QUANTITIES:
            known = {getattr(entry, quantity) is not None for entry in row.entries}
            assert len(known) <= 1, quantity


@examples(40)
@given(ticks())
def test_nothing_is_booked_on_a_pod_without_a_process_on_the_device(tick: NodeSample) -> None:
    for place, row in enumerate(book_tick(tick)):
        there = {one.container for one in tick.processes if one.gpu == place} - {None}
        booked = [one.container for one in row.entries if one.category is Category.POD]
        assert set(booked) <= there
        assert len(set(booked)) == len(booked)
        outside = [one for one in row.entries if one.category is not Category.POD]
        assert {one.container for one in outside} == {None}


ORDER = [
    Category.POD,
    Category.JOB,
    Category.HOST,
    Category.UNATTRIBUTED,
    Category.IDLE,
]


@examples(80)
@given(ticks())
def test_a_job_with_a_process_has_one_entry_between_the_pods_and_the_host(
    tick: NodeSample,
) -> None:
    """However many containers it has; processes in a pod are the pod's."""
    refs = tick.containers
    for place, row in enumerate(book_tick(tick)):
        there = (one.container for one in tick.processes if one.gpu == place)
        used = [refs[position] for position in there if position is not None]
        jobs = {ref.job_id for ref in used if ref.pod_uid is None} - {None}
        booked = [one.job_id for one in row.entries if one.category is Category.JOB]
        assert booked == sorted(filter(None, jobs))
        accounts = [ORDER.index(one.category) for one in row.entries]
        assert accounts == sorted(accounts)
        others = (one for one in row.entries if one.category not in (Category.JOB, Category.IDLE))
        assert {one.job_id for one in others} <= {None}


@examples(80)
@given(ticks())
def test_the_jobs_of_a_device_have_equal_parts_after_its_containers(tick: NodeSample) -> None:
    for row in book_tick(tick):
        idle = [one for one in row.entries if one.category is Category.IDLE]
        jobs = [one.job_id for one in idle if one.job_id is not None]
        allocated = [one.allocated_ns or 0 for one in idle if one.job_id is not None]
        assert jobs == sorted(set(jobs))
        assert not allocated or max(allocated) - min(allocated) <= 1
        # If a whole device is allocated, no part is left unallocated.
        assert not jobs or all(one.allocation is not None or one.job_id is not None for one in idle)
        given = {
            one.job_id
            for one in tick.job_allocations or ()
            if one.gpu_uuid == (row.reading.parent_uuid or row.reading.uuid)
        }
        assert set(jobs) <= given
        is_partitioned = any(one.parent_uuid == row.reading.uuid for one in tick.gpus)
        assert not (is_partitioned and jobs)


@pytest.mark.parametrize(
    "containers",
    [
        [ContainerRef(job_id="7"), ContainerRef(job_id="7")],
        [ContainerRef(container_id="c", job_id="7"), ContainerRef(container_id="c", job_id="7")],
    ],
)
def test_a_tick_that_names_a_job_twice_is_refused(containers: list[ContainerRef]) -> None:
    with pytest.raises(RepeatedContainerError):
        book_tick(sample(containers=containers, processes=[process(container=0)]))


@examples(40)
@given(ticks())
def test_idle_names_only_allocatees_of_that_gpu_and_each_container_once(
    tick: NodeSample,
) -> None:
    containers = allocated_containers(tick.allocations)
    for row in book_tick(tick):
        gpu = row.reading.parent_uuid or row.reading.uuid
        is_part = row.reading.parent_uuid is not None
        whole = {
            name_of(allocation)
            for allocation in tick.allocations
            if is_of(allocation, gpu, is_part=False)
        }
        parts = {name_of(one) for one in tick.allocations if is_of(one, gpu, is_part=True)}
        named = {containers[place] for place in allocatees_of(row)}
        assert len(named) == len(list(allocatees_of(row)))
        # The allocatee of a whole partitioned GPU has its instances, and never the GPU's own
        # row.
        is_partitioned = any(one.parent_uuid == row.reading.uuid for one in tick.gpus)
        assert not (is_partitioned and named)
        assert named <= whole or (is_part and named <= parts)


def name_of(allocated: DeviceAllocation) -> AllocatedContainer:
    return AllocatedContainer(allocated.namespace, allocated.pod, allocated.container)


def is_of(allocated: DeviceAllocation, gpu: str, *, is_part: bool) -> bool:
    return allocated.gpu_uuid == gpu and (allocated.gpu_instance is not None) == is_part


def allocatees_of(row: GpuBooks) -> Iterator[int]:
    for entry in row.entries:
        if entry.allocation is not None:
            assert entry.category is Category.IDLE
            yield entry.allocation


@examples(40)
@given(ticks())
def test_a_decoded_tick_is_booked_like_the_original(tick: NodeSample) -> None:
    decoder = Decoder(topic=SAMPLES.name, record=NodeSample)
    assert encode_books(book_tick(decoder.decode(encode(tick)))) == encode_books(book_tick(tick))


def encode_books(books: list[GpuBooks]) -> list[list[tuple[object, ...]]]:
    return [[tuple(getattr(one, name) for name in NAMES) for one in row.entries] for row in books]


NAMES = [*AMOUNTS, "category", "container", "allocation", "job_id"]


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({}, []),
        ({"busy_ns": SECOND_NS - 1}, [("GPU-a", "busy_ns", SECOND_NS, SECOND_NS - 1)]),
        ({"memory_bytes": 1}, [("GPU-a", "memory_bytes", 80 * GIB, 1)]),
        ({"energy_millijoules": 330_000}, [("GPU-a", "energy_millijoules", 300_000, 330_000)]),
        ({"allocated_ns": 7}, [("GPU-a", "allocated_ns", SECOND_NS, 7)]),
    ],
    ids=["nothing", "busy", "memory", "energy", "allocated"],
)
def test_entries_that_do_not_balance_are_reported_with_the_difference(
    wrong: dict[str, int], reported: list[tuple[str, str, int, int]]
) -> None:
    right: dict[str, Any] = {
        "busy_ns": SECOND_NS,
        "memory_bytes": 80 * GIB,
        "energy_millijoules": 300_000,
        "allocated_ns": SECOND_NS,
    }
    entry = Entry(category=Category.UNATTRIBUTED, **(right | wrong))
    found = list(imbalances([GpuBooks(reading=reading(), entries=[entry])], SECOND_NS))
    assert found == reported
    assert [one.ratio for one in found if one.quantity == "energy_millijoules"] in ([], [0.1])
