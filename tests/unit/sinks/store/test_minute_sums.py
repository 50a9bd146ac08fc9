"""The rows of `usage` sum to the events' entries, in whatever order the events arrive."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_DAY, NS_PER_MINUTE
from gpuledger.ledger.entries import booked_entries
from gpuledger.records import (
    AllocatedMethod,
    BusyMethod,
    Category,
    EnergyMethod,
    Entry,
    EventAllocation,
    EventContainer,
    GpuBooks,
    GpuEvent,
    LateAdjustment,
    MemoryMethod,
    PodDescription,
    PodState,
)
from gpuledger.store.usage_schema import USAGE
from gpuledger_sinks.store.minute_sums import (
    MEASURED_BUSY,
    MEASURED_ENERGY,
    MEASURED_MEMORY,
    MinuteSums,
    TooManyRowsError,
    bookings_days,
    bookings_of,
    minute_parts,
)
from tests.examples import examples
from tests.unit.sinks.builders import START_NS, books, entry, event, reading, settlement

NAMES = [column.name for column in USAGE.columns]
SUMMED = (
    "busy_ns",
    "memory_byte_ns",
    "energy_millijoules",
    "allocated_ns",
    "sm_active_ns",
    "tensor_active_ns",
    "dram_active_ns",
)
OWNERS = (
    "gpu_uuid",
    "parent_uuid",
    "category",
    "pod_uid",
    "pod",
    "container",
    "job_id",
    "allocated_pod_state",
    "allocated_pod_uid",
    "allocated_pod",
    "allocated_container",
    "allocated_job_id",
)


class Place(NamedTuple):
    """The partition and offset of an event."""

    partition: int
    offset: int


def rows_of(*events: GpuEvent, partition: int = 0, first_offset: int = 0) -> list[dict[str, Any]]:
    sums = MinuteSums()
    for offset, one in enumerate(events, first_offset):
        sums.add(one, bookings_of(one), Place(partition, offset), ingested_time_ns=offset)
    return [dict(zip(NAMES, row, strict=True)) for row in sums.rows()]


_AMOUNTS = st.none() | st.integers(0, 2**50)
_ENTRIES = st.lists(
    st.builds(
        Entry,
        category=st.sampled_from(Category),
        container=st.none() | st.integers(0, 2),
        allocation=st.none() | st.integers(0, 1),
        job_id=st.none() | st.sampled_from(["7", "8"]),
        allocation_unknown=st.sampled_from([None, True]),
        busy_ns=_AMOUNTS,
        memory_bytes=_AMOUNTS,
        energy_millijoules=_AMOUNTS,
        allocated_ns=_AMOUNTS,
    ),
    max_size=4,
)
_READINGS = st.builds(
    reading,
    uuid=st.sampled_from(["GPU-a", "GPU-b"]),
    sm_active_ratio=st.none() | st.just(0.375),
    dram_active_ratio=st.none() | st.just(0.5),
) | st.builds(
    reading,
    uuid=st.sampled_from(["MIG-a", "MIG-b"]),
    parent_uuid=st.just("GPU-a"),
    mig_profile=st.just("1g.10gb"),
)
_BOOKS = st.builds(
    GpuBooks,
    reading=_READINGS,
    entries=_ENTRIES,
    busy_method=st.none() | st.sampled_from(BusyMethod),
    memory_method=st.none() | st.sampled_from(MemoryMethod),
    energy_method=st.none() | st.sampled_from(EnergyMethod),
    gap_ns=st.none() | st.just(1),
    allocated_method=st.none() | st.sampled_from(AllocatedMethod),
)
_LATE_ADJUSTMENTS = st.builds(
    lambda until_ns, length_ns, busy_ns, **values: LateAdjustment(
        **values,
        pid=1,
        started_boottime_ns=1,
        from_seq=1,
        until_seq=2,
        from_time_ns=until_ns - length_ns,
        until_time_ns=until_ns,
        entries=[
            Entry(category=Category.POD, container=1, busy_ns=busy_ns),
            Entry(category=Category.UNATTRIBUTED, busy_ns=-busy_ns),
        ],
    ),
    gpu=st.just(0),
    until_ns=st.integers(START_NS, START_NS + 2 * NS_PER_DAY),
    length_ns=st.integers(0, 5 * NS_PER_MINUTE),
    busy_ns=st.integers(0, 2**50),
    busy_method=st.just(BusyMethod.ACCOUNTING),
)


@st.composite
def events(draw: st.DrawFn) -> GpuEvent:
    gpus = draw(st.lists(_BOOKS, min_size=1, max_size=3))
    states = st.sampled_from(PodState)
    return event(
        node=draw(st.sampled_from(["node-a", "node-b"])),
        time_ns=START_NS + draw(st.integers(0, 3 * NS_PER_DAY)),
        interval_ns=draw(
            st.sampled_from([0, 1, NS_PER_MINUTE]) | st.integers(0, 3 * NS_PER_MINUTE)
        ),
        gpus=gpus,
        late_adjustments=draw(st.none() | st.lists(_LATE_ADJUSTMENTS, max_size=2)),
        pods=[
            PodDescription(uid="uid-1", state=draw(states), namespace="a", name="train-0"),
            PodDescription(state=draw(states), name=draw(st.none() | st.just("held"))),
        ],
        containers=[
            EventContainer(container_id="c" * 64, pod=0, name=draw(st.none() | st.just("main"))),
            EventContainer(container_id="d" * 64, pod=0, name="main"),
            EventContainer(container_id=None, pod=None),
        ],
        allocations=[
            EventAllocation(pod=place, container="main", resources=["nvidia.com/gpu"])
            for place in (0, 1)
        ],
    )


def booked(of: Sequence[GpuEvent]) -> Iterator[tuple[tuple[Any, ...], str, int]]:
    """Yield each amount of each entry by its owner, as the rows of single ticks have it."""
    for one in of:
        for each in booked_entries(one):
            owner = (
                each.gpu.uuid,
                each.gpu.parent_uuid,
                each.entry.category.value,
                each.user.described.uid,
                each.user.described.name,
                each.user.container,
                each.job_id,
                each.allocatee.described.state,
                each.allocatee.described.uid,
                each.allocatee.described.name,
                each.allocatee.container,
                each.allocated_job_id,
            )
            is_measured = {
                "busy_ns": each.busy_method in MEASURED_BUSY,
                "memory_byte_ns": each.memory_method in MEASURED_MEMORY,
                "energy_millijoules": each.energy_method in MEASURED_ENERGY,
            }
            memory = each.entry.memory_bytes
            amounts = {
                **{
                    name: getattr(each.entry, name)
                    for name in ("busy_ns", "energy_millijoules", "allocated_ns")
                },
                "memory_byte_ns": None if memory is None else memory * each.interval_ns,
                **dict(zip(SUMMED[4:], each.apportioned, strict=True)),
            }
            for name, amount in amounts.items():
                if amount is None:
                    continue
                yield owner, name, amount
                if is_measured.get(name):
                    yield owner, f"measured_{name}", amount
                if name == "allocated_ns" and each.books.gap_ns is not None:
                    yield owner, "unresponsive_ns", amount
                if name == "allocated_ns" and each.books.allocated_method is not None:
                    yield owner, "scaled_allocated_ns", amount


def summed(of: Sequence[GpuEvent]) -> Counter[tuple[tuple[Any, ...], str]]:
    sums: Counter[tuple[tuple[Any, ...], str]] = Counter()
    for owner, name, amount in booked(of):
        sums[owner, name] += amount
    return sums


MEASURED = ("measured_busy_ns", "measured_memory_byte_ns", "measured_energy_millijoules")


def found(rows: Sequence[dict[str, Any]]) -> Counter[tuple[tuple[Any, ...], str]]:
    sums: Counter[tuple[tuple[Any, ...], str]] = Counter()
    for row in rows:
        owner = tuple(row[name] for name in OWNERS)
        for name in (*SUMMED, *MEASURED, "unresponsive_ns", "scaled_allocated_ns"):
            if row[name] is not None:
                sums[owner, name] += row[name]
    return sums


@examples(100)
@given(data=st.data(), of=st.lists(events(), max_size=6))
def test_rows_sum_to_the_entries_of_the_events_whatever_the_flushes_and_partitions(
    data: st.DataObject, of: list[GpuEvent]
) -> None:
    # Events in a drawn order, on two partitions, with flushes at drawn positions.
    places = data.draw(st.permutations(range(len(of))))
    rows: list[dict[str, Any]] = []
    sums = MinuteSums()
    for place in places:
        at = Place(place % 2, place)
        sums.add(of[place], bookings_of(of[place]), at, ingested_time_ns=0)
        if data.draw(st.booleans()):
            rows += [dict(zip(NAMES, row, strict=True)) for row in sums.rows()]
            sums = MinuteSums()
    rows += [dict(zip(NAMES, row, strict=True)) for row in sums.rows()]
    assert +found(rows) == +summed(of)
    assert -found(rows) == -summed(of)
    ticks = sum(len(books.entries) for one in of for books in one.gpus)
    assert sum(row["sample_count"] for row in rows) == ticks
    days = {row["event_date"] for row in rows}
    bounds = [bookings_days(bookings_of(one)) for one in of]
    assert all(any(min(each) <= day <= max(each) for each in bounds) for day in days)


@given(end_ns=st.integers(0, 2**60), interval_ns=st.integers(0, 10 * NS_PER_MINUTE))
def test_the_parts_of_an_interval_are_adjacent_and_none_exceeds_its_minute(
    end_ns: int, interval_ns: int
) -> None:
    parts = minute_parts(end_ns, interval_ns)
    assert parts[0][1] == 0
    assert parts[-1][2] == interval_ns
    assert all(left[2] == right[1] for left, right in pairwise(parts))
    assert [part[0] for part in parts] == list(range(parts[0][0], parts[-1][0] + 1))
    assert all(0 <= to_ns - from_ns <= NS_PER_MINUTE for _, from_ns, to_ns in parts)


MINUTE_NS = START_NS // NS_PER_MINUTE * NS_PER_MINUTE


def test_a_tick_across_the_end_of_a_minute_is_divided_by_time_exactly() -> None:
    allocated = entry(
        Category.IDLE, busy_ns=None, allocated_ns=7, energy_millijoules=None, memory_bytes=3
    )
    one = event(time_ns=MINUTE_NS + 2, interval_ns=3, entries=[allocated])
    before, after = rows_of(one, first_offset=41)
    assert (before["allocated_ns"], after["allocated_ns"]) == (7 * 1 // 3, 7 - 7 * 1 // 3)
    assert (before["memory_byte_ns"], after["memory_byte_ns"]) == (3, 6)
    assert (before["sample_count"], after["sample_count"]) == (0, 1)
    assert after["minute"] - before["minute"] == 60_000_000
    assert (after["first_offset"], after["last_offset"]) == (41, 41)


def test_amounts_that_a_late_adjustment_subtracts_are_divided_exactly_too() -> None:
    settled = settlement(7, from_time_ns=MINUTE_NS - NS_PER_MINUTE - 1, until_time_ns=MINUTE_NS + 1)
    rows = rows_of(event(gpus=[books()], late_adjustments=[settled]))
    by_account = {
        category: [row["busy_ns"] for row in rows if row["category"] == category]
        for category in ("pod", "unattributed")
    }
    assert {name: sum(parts) for name, parts in by_account.items()} == {
        "pod": 7,
        "unattributed": -7,
    }
    assert [len(parts) for parts in by_account.values()] == [3, 3]
    assert {row["measured_busy_ns"] == row["busy_ns"] for row in rows} == {True}
    assert {row["sample_count"] for row in rows} == {0}


def test_ticks_of_a_minute_are_one_row_with_the_first_and_the_last_offset() -> None:
    ticks = [event(tick, time_ns=MINUTE_NS + (tick + 1) * 10**9) for tick in range(5)]
    rows = rows_of(*ticks, partition=3, first_offset=10)
    assert {(row["category"], row["sample_count"]) for row in rows} == {("pod", 5), ("idle", 5)}
    assert {
        (row["kafka_partition"], row["first_offset"], row["last_offset"], row["ingested_time_ns"])
        for row in rows
    } == {(3, 10, 14, 14)}


def test_a_container_is_identified_by_its_name_or_if_that_is_unknown_by_its_id() -> None:
    named, unnamed = entry(), entry(pod_uid="uid-other", container_id="e" * 64)
    rows = rows_of(event(entries=[named, unnamed]))
    assert {(row["container"], row["container_id"]) for row in rows} == {
        ("trainer", None),
        (None, "e" * 64),
    }


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("measured", {}, (5, 5 * 10**9, 5)),
        ("apportioned busy time", {"busy_method": BusyMethod.EQUAL_SHARE}, (0, 5 * 10**9, 5)),
        ("scaled memory", {"memory_method": MemoryMethod.SCALED}, (5, 0, 5)),
        ("unified memory", {"memory_method": MemoryMethod.UNIFIED}, (5, 5 * 10**9, 5)),
        ("energy by power", {"energy_method": EnergyMethod.POWER}, (5, 5 * 10**9, 0)),
        ("no method", {"busy_method": None}, (0, 5 * 10**9, 5)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_measured_part_of_a_sum_is_in_its_own_column(
    case: str, changes: dict[str, Any], expected: tuple[int, ...]
) -> None:
    used = entry(busy_ns=5, memory_bytes=5, energy_millijoules=5)
    (row,) = rows_of(event(gpus=[books(None, used, **changes)]))
    assert tuple(row[name] for name in (*MEASURED[:2], MEASURED[2])) == expected, case


def test_a_quantity_that_no_entry_has_is_null_not_zero() -> None:
    unresponsive = entry(
        Category.IDLE, busy_ns=None, memory_bytes=None, energy_millijoules=None, allocated_ns=9
    )
    (row,) = rows_of(event(gpus=[books(None, unresponsive, gap_ns=9)]))
    absent = {name for name in (*SUMMED, *MEASURED, "unresponsive_ns") if row[name] is None}
    assert absent == {*SUMMED, *MEASURED} - {"allocated_ns"}
    assert (row["allocated_ns"], row["unresponsive_ns"]) == (9, 9)


def test_sums_that_exceed_their_columns_are_several_rows_that_add_up() -> None:
    huge = entry(busy_ns=2**62, memory_bytes=2**62, energy_millijoules=2**62)
    ticks = [
        event(tick, time_ns=MINUTE_NS + (tick + 1) * 10**9, entries=[huge]) for tick in range(5)
    ]
    rows = rows_of(*ticks)
    assert len(rows) == 3
    assert sum(row["busy_ns"] for row in rows) == 5 * 2**62
    assert sum(row["memory_byte_ns"] for row in rows) == 5 * 2**62 * 10**9
    assert sum(row["sample_count"] for row in rows) == 5
    assert USAGE.table_of([tuple(row.values()) for row in rows]).num_rows == 3


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (event(gpus=[books(None, entry(), entry(container=99))]), "container"),
        (event(gpus=[books(None, entry(), entry(Category.IDLE, allocation=9))]), "allocation"),
        (event(containers=[EventContainer(container_id=None, pod=9)]), "pod"),
        (event(late_adjustments=[settlement(gpu=7)]), "gpu"),
        (event(late_adjustments=[settlement(from_time_ns=0)]), "rows"),
    ],
)
def test_an_event_that_cannot_be_booked_completely_is_not_booked_at_all(
    broken: GpuEvent, named: str
) -> None:
    with pytest.raises(ValueError, match=named) as refused:
        bookings_of(broken)
    assert isinstance(refused.value, TooManyRowsError) is (named == "rows")
