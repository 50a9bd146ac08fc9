"""The series of an event's entries: idle by allocatee, activity, and a node's gaps."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.families import POD
from gpuledger.ledger.series import values_of
from gpuledger.records import (
    Category,
    Entry,
    GpuEvent,
    GpuReading,
    PodDescription,
    PodState,
)
from gpuledger.records.bounds import MAX_INTERVAL_NS, MAX_MEMORY_BYTES, MAX_TICK_MILLIJOULES
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from tests.unit.sinks.builders import (
    SECOND_NS,
    books,
    entry,
    event,
    holder,
    reading,
    settlement,
)
from tests.unit.sinks.remote_write.interval_samples import samples_of
from tests.unit.sinks.remote_write.oracle import Series
from tests.unit.sinks.remote_write.test_active_series import encode, is_stale, named, stale_names

HELD = [holder(), holder("chat-0", namespace="serving")]
NOTEBOOK = {
    "allocated_namespace": "research",
    "allocated_pod": "notebook-0",
    "allocated_container": "jupyter",
}
CHAT = {
    "allocated_namespace": "serving",
    "allocated_pod": "chat-0",
    "allocated_container": "jupyter",
}
IDLE = "gpuledger_category_gpu_busy_ratio"


def idle(seconds: float, allocation: int | None = None) -> Entry:
    return entry(Category.IDLE, busy_ns=round(seconds * SECOND_NS), allocation=allocation)


def holders(series: list[Series]) -> dict[str | None, float]:
    found = [one for one in series if one.name == IDLE and not is_stale(one)]
    assert len({one.labels for one in found}) == len(found)
    return {one.label("allocated_pod"): one.value for one in found}


def ended_allocatees(series: list[Series]) -> set[str | None]:
    return {one.label("allocated_pod") for one in series if one.name == IDLE and is_stale(one)}


def test_idle_time_has_a_series_for_each_allocatee_and_one_for_unallocated_time() -> None:
    booked = [
        idle(0.25, 0),
        idle(0.125, 1),
        idle(0.5),
        entry(Category.HOST, busy_ns=125_000_000),
    ]

    series = encode(ActiveSeries(), event(entries=booked, allocated_to=HELD))

    for labels, value in ((NOTEBOOK, 0.25), (CHAT, 0.125)):
        found = named(series, IDLE, category="idle", **labels)
        assert (found.value, found.label("node")) == (value, "node-a")
    nobodys = [
        dict(one.labels)
        for one in series
        if one.name == IDLE and one.label("allocated_pod") is None
    ]
    assert [one["category"] for one in nobodys] == ["idle", "host"]
    assert not any(key.startswith("allocated_") for one in nobodys for key in one)
    assert sum(one.value for one in series if one.name == IDLE) == 1.0


def test_late_adjustments_are_in_no_gauge() -> None:
    """They belong to other ticks than the sample's; the store has them."""
    without, settled = event(), event(late_adjustments=[settlement()])

    assert values_of(settled) == values_of(without)


@given(
    busy_ns=st.integers(0, MAX_INTERVAL_NS),
    memory_bytes=st.integers(0, MAX_MEMORY_BYTES),
    energy_millijoules=st.integers(0, MAX_TICK_MILLIJOULES),
    interval_ns=st.integers(1, MAX_INTERVAL_NS),
)
def test_the_whole_numbers_of_an_entry_can_be_recovered_exactly_from_its_series(
    busy_ns: int, memory_bytes: int, energy_millijoules: int, interval_ns: int
) -> None:
    booked = entry(
        busy_ns=busy_ns, memory_bytes=memory_bytes, energy_millijoules=energy_millijoules
    )
    values = values_of(event(entries=[booked], interval_ns=interval_ns))
    ((busy, allocated, watts, *_),) = [of for group, of in values.items() if group.family is POD]

    assert None not in (busy, allocated, watts)
    assert round(Fraction(busy or 0) * interval_ns) == busy_ns
    assert allocated == memory_bytes
    assert round(Fraction(watts or 0) * interval_ns / 10**6) == energy_millijoules


def test_containers_without_names_are_summed_in_whole_numbers() -> None:
    """As floats, three tenths would be more than 0.3."""
    parts = [entry(pod_uid="uid", container_id=one, busy_ns=100_000_000) for one in "abc"]

    values = values_of(event(entries=parts, pods=[]))

    ((busy, *_),) = [of for group, of in values.items() if group.family is POD]
    assert busy == 0.3


def test_several_allocations_of_one_container_are_summed_in_one_series() -> None:
    booked = [idle(0.25, 0), idle(0.5, 0)]

    series = encode(ActiveSeries(), event(entries=booked, allocated_to=[holder()]))

    assert holders(series) == {"notebook-0": 0.75}


def test_allocated_time_of_a_foreign_pod_is_sent_without_names_and_separate_from_free_time() -> (
    None
):
    """A node's claim about a pod that is not scheduled on it reaches no series."""
    allocated = event(
        entries=[idle(0.25, allocation=0), idle(0.5, allocation=1), idle(0.25)],
        allocated_to=[PodDescription(state=PodState.FOREIGN)] * 2,
    )
    found = [one for one in encode(ActiveSeries(), allocated) if one.name == IDLE]
    reported = {one.label("allocated_pod_state"): one.value for one in found}
    assert reported == {"foreign": 0.75, None: 0.25}
    assert {one.label("allocated_pod") for one in found} == {None}


def test_an_allocatee_that_frees_its_gpu_has_its_series_ended_at_that_tick() -> None:
    series = ActiveSeries()
    allocated = event(0, entries=[idle(0.25, 0), idle(0.75, 1)], allocated_to=HELD)
    assert holders(encode(series, allocated)) == {"notebook-0": 0.25, "chat-0": 0.75}

    then = encode(series, event(1, entries=[idle(1.0, 0)], allocated_to=HELD[1:]))
    last = encode(series, event(2, entries=[idle(1.0)]))

    assert holders(then) == {"chat-0": 1.0}
    assert ended_allocatees(then) == {"notebook-0"}
    assert holders(last) == {None: 1.0}
    assert ended_allocatees(last) == {"chat-0"}


@pytest.mark.parametrize("position", [0, 7])
def test_an_allocatee_that_the_event_does_not_list_is_rejected_and_changes_nothing(
    position: int,
) -> None:
    series = ActiveSeries()
    alive = len(encode(series, event(0, entries=[idle(1.0)])))

    with pytest.raises(
        ValueError, match=rf"allocation: position out of range: {position}; the event has 0 "
    ):
        series.encode(samples_of(event(1, entries=[idle(1.0, position)])))

    assert len(series) == alive
    assert stale_names(encode(series, event(1, entries=[idle(1.0)]))) == set()


def test_activity_becomes_ratios_of_the_tick_if_the_chip_counts_it() -> None:
    counted = reading(sm_active_ratio=0.3, tensor_active_ratio=0.15)
    booked = [
        entry(busy_ns=1_000_000_000),
        entry(Category.HOST, busy_ns=500_000_000),
        entry(Category.IDLE, busy_ns=500_000_000),
    ]
    series = encode(ActiveSeries(), event(of=counted, entries=booked, interval_ns=2 * SECOND_NS))

    active = {one.name: one.value for one in series if "_active_" in one.name}
    assert active == pytest.approx(
        {
            "gpuledger_pod_gpu_sm_active_ratio": 0.2,
            "gpuledger_pod_gpu_tensor_active_ratio": 0.1,
            "gpuledger_category_gpu_sm_active_ratio": 0.1,
            "gpuledger_category_gpu_tensor_active_ratio": 0.05,
        }
    )


def test_a_gap_is_a_sample_of_its_node_only_at_the_first_tick_after_it() -> None:
    series = ActiveSeries()
    encode(series, event(0))

    after = named(encode(series, event(9, gap_ns=8 * SECOND_NS)), "gpuledger_node_gap_seconds")
    then = encode(series, event(10))
    last = encode(series, event(11))

    assert (after.value, dict(after.labels)) == (
        8.0,
        {
            "__name__": "gpuledger_node_gap_seconds",
            "cluster": "default",
            "node": "node-a",
        },
    )
    assert stale_names(then) == {"gpuledger_node_gap_seconds"}
    assert stale_names(last) == set()


def test_each_allocation_has_its_own_series_whatever_is_known_of_its_usage() -> None:
    """Its labels do not depend on usage, so it continues if the GPU stops answering."""
    series = ActiveSeries()
    before = encode(
        series, allocated_event(0, entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS))
    )
    lost = encode(series, lost_event(1))

    for tick in (before, lost):
        found = named(tick, ALLOCATED_SERIES)
        assert (found.value, found.label("allocated_pod")) == (1.0, "notebook-0")
        assert found.label("busy_method") is None
        assert named(tick, "gpuledger_allocation_physical_gpu_ratio").value == 3 / 7
    assert ALLOCATED_SERIES not in stale_names(lost)


def test_the_series_of_a_removed_allocatee_ends_with_a_stale_marker() -> None:
    series = ActiveSeries()
    encode(series, allocated_event(0, entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS)))
    after = encode(series, allocated_event(1, entry(Category.IDLE, allocated_ns=SECOND_NS)))

    nobodys, gone = (
        next(one for one in after if one.name == ALLOCATED_SERIES and is_stale(one) == ended)
        for ended in (False, True)
    )
    assert (nobodys.value, nobodys.label("allocated_pod")) == (1.0, None)
    assert gone.label("allocated_pod") == "notebook-0"


def test_a_gap_of_a_gpu_is_a_sample_in_the_ticks_in_which_the_gpu_did_not_answer() -> None:
    series = ActiveSeries()
    encode(series, allocated_event(0, entry(Category.IDLE, allocated_ns=SECOND_NS)))
    lost = [named(encode(series, lost_event(tick)), GAP_SERIES).value for tick in (1, 2)]
    back = encode(series, allocated_event(3, entry(Category.IDLE, allocated_ns=SECOND_NS)))

    assert lost == [1.0, 1.0]
    assert GAP_SERIES in stale_names(back)


ALLOCATED_SERIES = "gpuledger_allocation_gpu_ratio"
GAP_SERIES = "gpuledger_gpu_gap_seconds"
SLICES = {"compute_slices": 3, "gpu_compute_slices": 7}


def allocated_event(tick: int, *entries: Entry) -> GpuEvent:
    of_gpu = books(reading(), *entries, **SLICES)
    return event(tick, gpus=[of_gpu], allocated_to=HELD)


def lost_event(tick: int) -> GpuEvent:
    """Return an event of an allocated GPU that did not answer."""
    nothing = {"busy_ns": None, "memory_bytes": None, "energy_millijoules": None}
    left = entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS, **nothing)
    unknown = {"busy_method": None, "memory_method": None, "energy_method": None}
    unresponsive = GpuReading(uuid=reading().uuid, index=0, unresponsive=True)
    of_gpu = books(unresponsive, left, gap_ns=SECOND_NS, **unknown, **SLICES)
    return event(tick, gpus=[of_gpu], allocated_to=HELD)


def test_a_gpu_without_known_slices_counts_as_whole_and_its_instances_have_no_share() -> None:
    allocated = entry(Category.IDLE, allocated_ns=SECOND_NS)
    part = reading(uuid="MIG-1", parent_uuid="GPU-a", gpu_instance=1)
    series = encode(
        ActiveSeries(), event(gpus=[books(reading(), allocated), books(part, allocated)])
    )

    names = "gpuledger_allocation_gpu_ratio", "gpuledger_allocation_physical_gpu_ratio"
    found = [[one.label("gpu_uuid") for one in series if one.name == name] for name in names]
    assert found == [[reading().uuid, "MIG-1"], [reading().uuid]]
    assert named(series, names[1]).value == 1.0


def test_the_free_share_of_a_partitioned_gpu_is_unknown_if_an_instance_lacks_its_slices() -> None:
    allocated = entry(Category.IDLE, allocated_ns=SECOND_NS)
    cut = reading(mig_enabled=True)
    unknown = books(cut, allocated, compute_slices=None, gpu_compute_slices=7)
    series = encode(ActiveSeries(), event(gpus=[unknown]))
    assert "gpuledger_allocation_gpu_ratio" in {one.name for one in series}
    assert "gpuledger_allocation_physical_gpu_ratio" not in {one.name for one in series}
