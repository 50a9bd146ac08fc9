"""The totals of a run."""

import pytest
from msgspec.structs import replace

from gpuledger.records import BusyMethod, Category, GpuBooks, GpuReading, LateAdjustment
from gpuledger_cli.demo.totals import AllocationTotal, Tally
from tests.unit.cli.demo.events import GIB, HELD, NOTEBOOK, PENDING, SECOND_NS, entry, event


def tally_of(*events: object) -> Tally:
    """Return the tally of some events."""
    tally = Tally()
    for each in events:
        tally.add(each)  # type: ignore[arg-type]  # only events are given
    return tally


def test_usage_booked_on_a_pod_is_summed() -> None:
    """Over ticks, for each quantity."""
    total = tally_of(event(second=1), event(second=2)).pods["default/uid-1"]
    assert total.busy_ns == SECOND_NS // 2
    assert total.memory_byte_ns == 40 * GIB * SECOND_NS
    assert total.energy_millijoules == 100_000


def test_a_late_adjustment_counts_for_the_pod_of_its_process() -> None:
    settled = LateAdjustment(
        gpu=0,
        pid=7,
        started_boottime_ns=0,
        from_seq=1,
        from_time_ns=0,
        until_seq=1,
        until_time_ns=SECOND_NS,
        entries=[entry(Category.POD, 0.125), entry(Category.UNATTRIBUTED, -0.125)],
        busy_method=BusyMethod.ACCOUNTING,
    )
    total = tally_of(replace(event(second=1), late_adjustments=[settled])).pods["default/uid-1"]
    assert total.busy_ns == 375_000_000


def test_a_pending_pod_gets_its_name_once_it_is_known() -> None:
    """Usage booked before the name is known remains with the pod."""
    total = tally_of(event(second=1, pods=[PENDING]), event(second=2)).pods["default/uid-1"]
    assert (total.namespace, total.pod, total.owner) == ("research", "train-0", "Job/train")
    assert total.busy_ns == SECOND_NS // 2


def test_entries_of_other_categories_belong_to_no_pod() -> None:
    """Host, unattributed and idle count only as entries."""
    accounts = [Category.HOST, Category.UNATTRIBUTED, Category.IDLE]
    tally = tally_of(event(entries=[entry(category, 0.1) for category in accounts]))
    assert tally.pods == {}
    assert tally.without_pod_ns == 200_000_000
    assert tally.entries == len(accounts)


@pytest.mark.parametrize(
    ("seconds", "stretches"),
    [
        ([1, 2, 3], [(0, 3)]),
        ([1, 2.005], [(0, 2.005)]),
        ([1, 5], [(0, 1), (4, 5)]),
    ],
)
def test_adjacent_ticks_are_one_interval_and_a_gap_separates_intervals(
    seconds: list[float], stretches: list[tuple[float, float]]
) -> None:
    """The truth is queried only for these intervals."""
    tally = tally_of(*(event(second=second) for second in seconds))
    covered = [
        (start / SECOND_NS, end / SECOND_NS) for start, end in tally.covered_ns["default/node-a"]
    ]
    assert covered == stretches


def test_a_gpu_balances_with_its_instances() -> None:
    """Usage of no instance is on the GPU's own row, together with the GPU's energy."""
    one = event()
    board = GpuReading(
        uuid="GPU-a", index=0, memory_total_bytes=80 * GIB, energy_millijoules=200_000
    )
    part = GpuReading(uuid="MIG-1", index=0, parent_uuid="GPU-a", memory_total_bytes=20 * GIB)
    left = entry(Category.UNATTRIBUTED, 0.0, gib=60, joules=200.0)
    own = [entry(Category.POD, 0.25, gib=5), entry(Category.IDLE, 0.75, gib=15)]
    rows = [
        GpuBooks(reading=board, entries=[replace(left, busy_ns=None, allocated_ns=SECOND_NS)]),
        GpuBooks(reading=part, entries=own),
    ]
    assert tally_of(replace(one, gpus=rows)).conservation_error_max_ratio == 0.0
    assert tally_of(replace(one, gpus=rows[:1])).conservation_error_max_ratio == 0.25


def test_idle_of_several_allocatees_balances_and_is_no_pods_usage() -> None:
    """Its parts and the pods' entries sum to the device; unused allocations are not booked."""
    idle = [
        entry(Category.IDLE, 0.375, gib=30, joules=75.0, allocation=one, allocated_seconds=0.5)
        for one in (0, None)
    ]
    booked = [entry(Category.POD, 0.25, gib=20, joules=50.0), *idle]
    notebook = replace(NOTEBOOK, owner_kind="StatefulSet", owner_name="notebook")
    tally = tally_of(event(entries=booked, allocations=[HELD], notebook=notebook))
    assert tally.allocations == {
        ("default", "research", "notebook-0"): AllocationTotal(
            owner="StatefulSet/notebook", unused_ns=375_000_000, allocated_ns=500_000_000
        )
    }
    assert tally.free_ns == 375_000_000
    assert tally.conservation_error_max_ratio == 0.0
    assert [total.busy_ns for total in tally.pods.values()] == [SECOND_NS // 4]


def test_the_time_of_every_gpu_is_used_unused_free_or_a_gap() -> None:
    """So that the totals at the end of a run add up to its GPUs' time."""
    one = event(
        entries=[
            entry(Category.POD, 0.25),
            entry(Category.HOST, 0.125),
            entry(Category.IDLE, 0.5, allocation=0),
            entry(Category.IDLE, 0.125),
        ],
        allocations=[HELD],
    )
    unresponsive = GpuBooks(
        reading=replace(one.gpus[0].reading, uuid="GPU-lost", unresponsive=True),
        entries=[replace(entry(Category.IDLE, 0.0), busy_ns=None, allocated_ns=SECOND_NS)],
        gap_ns=SECOND_NS,
    )
    tally = tally_of(replace(one, gpus=[*one.gpus, unresponsive]))
    used = sum(total.busy_ns for total in tally.pods.values()) + tally.without_pod_ns
    unused = sum(total.unused_ns for total in tally.allocations.values())
    assert used + unused + tally.free_ns + tally.gap_ns == 2 * SECOND_NS


def test_books_that_do_not_balance_are_detected() -> None:
    """A quarter of a GPU's second is missing here."""
    entries = [
        entry(Category.POD, 0.25, gib=20, joules=50.0),
        entry(Category.IDLE, 0.5, gib=60, joules=150.0),
    ]
    assert tally_of(event()).conservation_error_max_ratio == 0.0
    assert tally_of(event(entries=entries)).conservation_error_max_ratio == 0.25
