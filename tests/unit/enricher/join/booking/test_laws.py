"""The laws of the books, for any tick: also for those whose readings contradict one another."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enricher.join.booking.books import book_tick
from gpuledger.codec import Decoder, encode
from gpuledger.ledger.quantities import conservation_error
from gpuledger.records import (
    Account,
    ContainerRef,
    DeviceAllocation,
    Entry,
    GpuBooks,
    GpuProcess,
    GpuReading,
    NodeSample,
    ProcessKind,
)
from tests.default_topics import SAMPLES
from tests.unit.enricher.join.ticks import CONTAINER_IDS, GIB, UIDS, process, reading, sample

MAX_ERROR = 1e-9
QUANTITIES = [
    "busy_seconds",
    "memory_byte_seconds",
    "joules",
]

ratios = st.none() | st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0)
sizes = st.none() | st.integers(0, 90 * GIB)
COUNTERS = dict.fromkeys(("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"), ratios)


def rows_of(gpu: int, count: int) -> st.SearchStrategy[list[GpuReading]]:
    """Return a GPU, whole or cut into `count` instances, some of which share their memory."""
    uuid = f"GPU-{gpu}"
    board = st.builds(
        reading,
        uuid=st.just(uuid),
        model=st.sampled_from([None, "NVIDIA H100 80GB HBM3", "NVIDIA L4"]),
        utilization_ratio=ratios,
        memory_total_bytes=sizes,
        memory_used_bytes=sizes,
        memory_reserved_bytes=sizes,
        energy_joules=st.none() | st.floats(0.0, 1e5),
        power_watts=st.none() | st.floats(0.0, 2e3),
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
            energy_joules=st.none(),
            **COUNTERS,
        )
        for place in range(count)
    ]
    return st.tuples(board, *parts).map(list)


@st.composite
def ticks(draw: st.DrawFn) -> NodeSample:
    """Draw a tick of up to two GPUs, their instances, processes and allocations."""
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
    ]
    return sample(
        interval_ns=draw(st.integers(10**6, 10**11)),
        gpus=gpus,
        containers=containers,
        processes=draw(st.lists(processes(len(gpus)), max_size=8)) if gpus else [],
        allocations=draw(st.lists(allocations, max_size=8)),
    )


def processes(rows: int) -> st.SearchStrategy[GpuProcess]:
    return st.builds(
        process,
        gpu=st.integers(0, rows - 1),
        pid=st.integers(1, 10**6),
        started_boottime_ns=st.none() | st.just(1),
        container=st.none() | st.integers(0, 4),
        kind=st.sampled_from(ProcessKind),
        memory_used_bytes=sizes,
        sm_utilization_ratio=ratios,
        ended=st.none() | st.just(True),  # noqa: FBT003 - a value, not a flag
    )


allocations = st.builds(
    DeviceAllocation,
    gpu_uuid=st.sampled_from(["GPU-0", "GPU-1", "GPU-gone"]),
    device_id=st.sampled_from(["GPU-0", "MIG-0-1", "nvidia0"]),
    resource_name=st.sampled_from(["nvidia.com/gpu", "aliyun.com/gpu-mem"]),
    namespace=st.just("research"),
    pod=st.sampled_from(["p", "q", "r"]),
    container=st.just("main"),
    gpu_instance=st.none() | st.integers(0, 3),
    replica=st.none() | st.sampled_from(["0", "1"]),
)


@settings(max_examples=150, deadline=None)
@given(ticks())
def test_entries_sum_to_the_device_and_none_is_negative(tick: NodeSample) -> None:
    """To 1e-9 of it, for each quantity, whatever the readings say."""
    books = book_tick(tick)
    assert conservation_error(books, tick.interval_ns / 1e9) <= MAX_ERROR
    for row in books:
        for quantity in QUANTITIES:
            values = [getattr(entry, quantity) for entry in row.entries]
            assert all(value is None or value >= 0.0 for value in values)


@settings(max_examples=40, deadline=None)
@given(ticks())
def test_a_quantity_is_known_of_all_entries_or_of_none(tick: NodeSample) -> None:
    for row in book_tick(tick):
        for quantity in QUANTITIES:
            known = {getattr(entry, quantity) is not None for entry in row.entries}
            assert len(known) <= 1, quantity


@settings(max_examples=40, deadline=None)
@given(ticks())
def test_nothing_is_booked_on_a_pod_without_a_process_there(tick: NodeSample) -> None:
    for place, row in enumerate(book_tick(tick)):
        there = {one.container for one in tick.processes if one.gpu == place} - {None}
        booked = [one.container for one in row.entries if one.account is Account.POD]
        assert set(booked) <= there
        assert len(set(booked)) == len(booked)
        outside = [one for one in row.entries if one.account is not Account.POD]
        assert {one.container for one in outside} == {None}


@settings(max_examples=40, deadline=None)
@given(ticks())
def test_idle_names_allocations_of_that_gpu_alone_and_each_container_once(
    tick: NodeSample,
) -> None:
    for row in book_tick(tick):
        gpu = row.reading.parent_uuid or row.reading.uuid
        named = [tick.allocations[place] for place in allocations_of(row)]
        assert all(one.gpu_uuid == gpu for one in named)
        assert len({one.pod for one in named}) == len(named)
        is_part = row.reading.parent_uuid is not None
        assert all((one.gpu_instance is not None) == is_part for one in named)


def allocations_of(row: GpuBooks) -> Iterator[int]:
    for entry in row.entries:
        if entry.allocation is not None:
            assert entry.account is Account.IDLE
            yield entry.allocation


@settings(max_examples=40, deadline=None)
@given(ticks())
def test_a_tick_read_from_its_bytes_has_the_same_books(tick: NodeSample) -> None:
    decoder = Decoder(topic=SAMPLES.name, record=NodeSample)
    assert encode_books(book_tick(decoder.decode(encode(tick)))) == encode_books(book_tick(tick))


def encode_books(books: list[GpuBooks]) -> list[list[tuple[object, ...]]]:
    return [[tuple(getattr(one, name) for name in NAMES) for one in row.entries] for row in books]


NAMES = [*QUANTITIES, "account", "container", "allocation", "method"]


def entry(account: Account, **quantities: float) -> Entry:
    (row,) = book_tick(sample())
    return Entry(account=account, method=row.entries[0].method, **quantities)  # type: ignore[arg-type]  # the names are its own


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({}, 0.0),
        ({"busy_seconds": 0.9}, 0.1),
        ({"memory_byte_seconds": 60.0 * GIB}, 0.25),
        ({"joules": 330.0}, 0.1),
    ],
    ids=["nothing", "busy", "memory", "joules"],
)
def test_books_that_do_not_balance_are_told_by_how_much(
    wrong: dict[str, float], error: float
) -> None:
    right = {
        "busy_seconds": 1.0,
        "memory_byte_seconds": 80.0 * GIB,
        "joules": 300.0,
    }
    device = reading()
    books = [GpuBooks(reading=device, entries=[entry(Account.UNATTRIBUTED, **(right | wrong))])]
    assert conservation_error(books, sample(gpus=[device]).interval_ns / 1e9) == pytest.approx(
        error
    )
