"""A tick adds the same to the counters, whatever is remembered from the node's last tick."""

from collections import defaultdict
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.entries import GPU_UNITS, booked_entries
from gpuledger.ledger.families import ALLOCATION, AllocationLabels
from gpuledger.ledger.series import values_of
from gpuledger.ledger.usage import (
    COUNTED,
    UNUSED,
    UNUSED_ENERGY,
    CountedLabels,
    KnownUsers,
    Unnamed,
    used_in,
)
from gpuledger.records import Category, Entry, GpuBooks, GpuEvent, PodDescription, PodState
from tests.unit.sinks.builders import SECOND_NS, books, entry, event, holder, pod, reading

_PODS: Final = [
    pod(),
    pod(name="train-1"),
    pod(labels={"team": "other"}),
    PodDescription(uid="uid-train", state=PodState.PENDING),
]
"""How ticks may describe the only pod that uses GPUs."""
_ENTRIES: Final = [
    entry(busy_ns=3, memory_bytes=5, energy_millijoules=7, allocated_ns=11, allocation=0),
    entry(busy_ns=13, container_id="d" * 64, allocated_ns=17),
    entry(Category.IDLE, busy_ns=19, allocated_ns=23, allocation=1),
    entry(Category.IDLE, busy_ns=29, allocated_ns=31),
    entry(Category.UNATTRIBUTED, busy_ns=37, memory_bytes=None),
    entry(Category.JOB, busy_ns=41, memory_bytes=43, job_id="7"),
    entry(Category.JOB, busy_ns=47, job_id="8"),
    entry(Category.IDLE, busy_ns=53, allocated_ns=59, job_id="7"),
    entry(Category.IDLE, busy_ns=61, allocated_ns=67, allocation_unknown=True),
]
_ALLOCATEES: Final = [holder("notebook-0"), holder("notebook-1"), holder("notebook-1", uid="uid-2")]


@st.composite
def events(draw: st.DrawFn) -> GpuEvent:
    gpus = [
        books(reading(uuid=uuid), *draw(st.lists(st.sampled_from(_ENTRIES), max_size=4)))
        for uuid in draw(st.lists(st.sampled_from(["GPU-1", "GPU-2"]), unique=True))
    ]
    allocated_to = draw(st.permutations(_ALLOCATEES))
    return event(gpus=gpus, pods=[draw(st.sampled_from(_PODS))], allocated_to=allocated_to)


def added(
    to: GpuEvent, known: KnownUsers | None = None
) -> list[tuple[CountedLabels, Unnamed | None, list[int | None]]]:
    """Return what a tick adds, with the user by value."""
    return [(user.labels, user.unnamed, amounts) for user, amounts in used_in(to, known)]


def test_used_and_allocated_amounts_of_a_job_are_counted_under_its_id() -> None:
    job = entry(Category.JOB, busy_ns=3, memory_bytes=None, energy_millijoules=None, job_id="7")
    idle = entry(
        Category.IDLE,
        busy_ns=5,
        memory_bytes=None,
        energy_millijoules=7,
        allocated_ns=8,
        job_id="7",
    )
    jobs = CountedLabels("GPU-1", "job", job_id="7")

    assert added(event(gpus=[books(reading(uuid="GPU-1"), job, idle)])) == [
        (jobs, None, [3 * GPU_UNITS, *[None] * 6]),
        (CountedLabels("GPU-1", "idle"), None, [5 * GPU_UNITS, None, 7, *[None] * 4]),
        (jobs, None, [None, None, None, 8 * GPU_UNITS, 5 * GPU_UNITS, 7, None]),
    ]


def test_time_of_unknown_allocation_is_neither_unallocated_nor_a_containers() -> None:
    amounts = {"memory_bytes": None, "energy_millijoules": None}
    idle = entry(Category.IDLE, busy_ns=5, allocated_ns=8, allocation_unknown=True, **amounts)
    tick = event(gpus=[books(reading(uuid="GPU-1"), idle)])

    counted = {
        labels.category: dict(zip(COUNTED, amounts, strict=True))
        for labels, _, amounts in added(tick)
    }
    assert counted.keys() == {"idle", "unknown"}
    assert {*counted["unknown"].values()} == {8 * GPU_UNITS, None}
    assert counted["unknown"][UNUSED] is None
    (labels,) = (group.label_values for group in values_of(tick) if group.family is ALLOCATION)
    expected = AllocationLabels(allocated_pod_state="unknown")
    assert labels == ("GPU-1", *expected)
    (booked,) = booked_entries(tick)
    assert (booked.allocatee.described.state, booked.allocatee.described.name) == ("unknown", None)


@given(st.lists(events(), max_size=5))
def test_remembering_the_last_tick_changes_no_result(ticks: list[GpuEvent]) -> None:
    known = KnownUsers()

    for tick in ticks:
        assert added(tick, known) == added(tick)


@given(events())
def test_a_user_stays_the_same_object_while_the_tick_stays_the_same(tick: GpuEvent) -> None:
    known = KnownUsers()
    first = [user for user, _ in used_in(tick, known)]
    again = [user for user, _ in used_in(tick, known)]

    assert all(one is other for one, other in zip(first, again, strict=True))


@given(events())
def test_the_amounts_of_a_device_sum_to_its_entries(tick: GpuEvent) -> None:
    of_devices: dict[str, list[int]] = defaultdict(lambda: [0] * 4)
    for labels, _, amounts in added(tick):
        for index, amount in enumerate(amounts[:4]):
            of_devices[labels.gpu_uuid][index] += amount or 0

    for device in tick.gpus:
        assert of_devices[device.reading.uuid] == [
            sum(entry.busy_ns or 0 for entry in device.entries) * GPU_UNITS,
            sum(entry.memory_bytes or 0 for entry in device.entries) * SECOND_NS,
            sum(entry.energy_millijoules or 0 for entry in device.entries),
            sum(entry.allocated_ns or 0 for entry in device.entries) * GPU_UNITS,
        ]


@given(events())
def test_unused_time_and_energy_are_those_of_idle_entries_that_are_allocated(
    tick: GpuEvent,
) -> None:
    positions = COUNTED.index(UNUSED), COUNTED.index(UNUSED_ENERGY)
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for labels, _, amounts in added(tick):
        for index, position in enumerate(positions):
            assert amounts[position] is None or labels.category in ("pod", "job")
            found[labels.gpu_uuid][index] += amounts[position] or 0

    for device in tick.gpus:
        allocated = [
            entry
            for entry in device.entries
            if entry.category is Category.IDLE
            and entry.allocated_ns is not None
            and (entry.allocation is not None or entry.job_id is not None)
        ]
        assert found[device.reading.uuid] == [
            sum(entry.busy_ns or 0 for entry in allocated) * GPU_UNITS,
            sum(entry.energy_millijoules or 0 for entry in allocated),
        ]


@given(st.integers(1, 12), st.data())
def test_the_times_of_a_partitioned_gpu_sum_to_the_physical_gpus_time(
    slices: int, data: st.DataObject
) -> None:
    """However it is partitioned; the GPU's own row has the slices without an instance."""
    cuts = sorted(data.draw(st.lists(st.integers(0, slices), max_size=6)))
    parts = [end - begin for begin, end in zip([0, *cuts], [*cuts, slices], strict=True)]
    whole = [
        entry(busy_ns=SECOND_NS // 4),
        entry(Category.IDLE, busy_ns=3 * SECOND_NS // 4, allocated_ns=SECOND_NS),
    ]
    gpus = [
        books(
            reading(uuid=f"MIG-{number}", parent_uuid="GPU-1")
            if number
            else reading(uuid="GPU-1", mig_enabled=True),
            *whole,
            compute_slices=part,
            gpu_compute_slices=slices,
        )
        for number, part in enumerate(parts)
    ]
    totals = [0] * len(COUNTED)
    for *_, amounts in added(event(gpus=gpus)):
        totals = [total + (amount or 0) for total, amount in zip(totals, amounts, strict=True)]

    assert totals[COUNTED.index("busy_units")] == SECOND_NS * GPU_UNITS
    assert totals[COUNTED.index("allocated_units")] == SECOND_NS * GPU_UNITS


@pytest.mark.parametrize(
    "slices",
    [
        {},
        {"gpu_compute_slices": 7},
        {"compute_slices": 1},
        {"compute_slices": 1, "gpu_compute_slices": 13},
    ],
    ids=["no slices", "own unknown", "GPU's unknown", "slices that are no whole units"],
)
def test_the_time_of_an_instance_whose_part_is_unknown_is_not_counted(
    slices: dict[str, int],
) -> None:
    instance = reading(uuid="MIG-1", parent_uuid="GPU-1")
    idle = entry(Category.IDLE, busy_ns=5, memory_bytes=7, allocated_ns=11)
    tick = event(gpus=[books(instance, idle, **slices)])

    ((_, _, (busy, memory, *_)),) = added(tick)
    assert (busy, memory) == (None, 7 * SECOND_NS)


@pytest.mark.parametrize("wrong", [{"container": 9999}, {"allocation": 9999}])
def test_an_entry_that_refers_to_nothing_is_refused_even_if_the_last_tick_is_known(
    wrong: dict[str, Any],
) -> None:
    known = KnownUsers()
    assert added(event(), known)
    broken: list[GpuBooks] = [
        books(None, Entry(category=Category.POD, busy_ns=1, allocated_ns=1, **wrong))
    ]

    with pytest.raises(ValueError, match="9999"):
        added(event(gpus=broken), known)
    assert added(event(), known) == added(event())
