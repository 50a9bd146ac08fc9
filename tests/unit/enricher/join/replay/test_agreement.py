"""Two events of one tick have identical entries, or the fields that differ are named."""

from collections.abc import Sequence

import pytest

from gpuledger.codec import encode
from gpuledger.records import (
    Category,
    ContainerRequest,
    Entry,
    EventAllocation,
    EventContainer,
    GpuBooks,
    GpuEvent,
    PodDescription,
    PodState,
)
from gpuledger_enricher.join.booking.late_adjustments import adjust_ends
from gpuledger_enricher.join.replay_diff import Agreement, compare_events
from tests.unit.enricher.join.ticks import CONTAINER_IDS, UIDS, process_end, reading, sample

FIRST, SECOND = CONTAINER_IDS[:2]
ENDED, ENDED_LATER = (sample(ended_processes=[process_end(until_seq=seq)]) for seq in (1000, 2000))


Described = tuple[PodDescription | None, str | None]
"""A container's pod, and its name if known."""


def event(
    *,
    busy_ns: int = 500,
    of: Sequence[Described] = (),
    allocated_to: Sequence[Described] = (),
    **more: object,
) -> bytes:
    """Return an encoded event of one entry with these descriptions of containers and allocatees."""
    entry = Entry(category=Category.POD, busy_ns=busy_ns)
    pods: list[PodDescription] = []

    def place(pod: PodDescription) -> int:
        if pod not in pods:
            pods.append(pod)
        return pods.index(pod)

    values: dict[str, object] = {
        "cluster": "default",
        "node": "node-a",
        "boot_id": "boot",
        "seq": 7,
        "time_ns": 10**9,
        "interval_ns": 10**9,
        "gpus": [GpuBooks(reading=reading(), entries=[entry])],
        "containers": [
            EventContainer(
                container_id=container_id, pod=None if pod is None else place(pod), name=name
            )
            for container_id, (pod, name) in zip(CONTAINER_IDS, of, strict=False)
        ],
        "allocations": [
            EventAllocation(pod=place(pod), container=name or "main", resources=["nvidia.com/gpu"])
            for pod, name in allocated_to
            if pod is not None
        ],
        "pods": pods,
    }
    return encode(GpuEvent(**(values | more)))  # type: ignore[arg-type]  # the names are a GpuEvent's


def pending(uid: str | None = UIDS[0]) -> PodDescription:
    """Return the description of a pod whose record has not come."""
    return PodDescription(uid=uid, state=PodState.PENDING)


def known(**more: object) -> PodDescription:
    """Return the description of the first pod."""
    values: dict[str, object] = {
        "uid": UIDS[0],
        "state": PodState.KNOWN,
        "namespace": "research",
        "name": "train",
        "labels": {"team": "vision"},
    }
    return PodDescription(**(values | more))  # type: ignore[arg-type]  # the names are its own


NAMED = PodDescription(state=PodState.NAMED, namespace="research", name="train")
REQUEST = ContainerRequest(resources={"nvidia.com/gpu": 1})


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ([(pending(), None)], [(known(), None)]),
        ([(pending(None), None)], [(known(), "main")]),
        ([(pending(None), None), (pending(None), None)], [(known(), None), (known(), None)]),
        ([(known(), None), (pending(None), None)], [(known(), None), (known(), None)]),
        ([(known(), None)], [(known(), "main")]),
        ([(known(), None)], [(known(deleted_time_ns=5), None)]),
        ([(known(owner_kind=None), None)], [(known(owner_kind="Job"), None)]),
        ([(known(), None)], [(known(requested={"main": REQUEST}), None)]),
        (
            [(known(requested={"main": REQUEST}), None)],
            [(known(requested={"main": REQUEST, "other": REQUEST}), None)],
        ),
    ],
)
def test_a_description_may_become_more_complete_but_never_less(
    then: list[Described], now: list[Described]
) -> None:
    first, replayed = event(of=then), event(of=now)

    assert compare_events(first, replayed).agreement is Agreement.MORE_COMPLETE
    assert compare_events(replayed, first).agreement is Agreement.DIFFERENT
    assert compare_events(first, first).agreement is Agreement.EQUAL


def test_the_position_of_a_pod_in_the_event_makes_no_difference() -> None:
    """The position depends on which pods the cache knows."""
    other = known(uid=UIDS[1])
    first = event(of=[(known(), None), (other, None)])
    second = event(
        of=[(known(), None), (other, None)],
        pods=[other, known()],
        containers=[
            EventContainer(container_id=CONTAINER_IDS[0], pod=1),
            EventContainer(container_id=CONTAINER_IDS[1], pod=0),
        ],
    )
    assert compare_events(first, second).agreement is Agreement.EQUAL


@pytest.mark.parametrize(
    ("then", "now", "field"),
    [
        (event(), event(busy_ns=250), "gpus[0].entries[0].busy_ns"),
        (event(), event(gap_ns=3), "gap_ns"),
        (event(), event(gpus=[]), "gpus"),
        (event(), event(interval_ns=5), "interval_ns"),
        (event(), event().replace(b'["pod",null,500', b'["pod",null,5e2'), "gpus"),
        (
            event(of=[(known(), None)]),
            event(of=[(known(name="other"), None)]),
            "containers[0].pod.name",
        ),
        (
            event(of=[(known(), None)]),
            event(of=[(known(labels={}), None)]),
            "containers[0].pod.labels",
        ),
        (event(of=[(known(), None)]), event(), "containers[0]"),
        (event(), event(of=[(pending(None), None)]), "containers[0]"),
        (event(of=[(known(), None)]), event(of=[(pending(), None)]), "containers[0].pod.state"),
        (
            event(of=[(known(), None)]),
            event(of=[(known(), None)]).replace(FIRST.encode(), SECOND.encode()),
            "containers[0].container_id",
        ),
        (
            event(allocated_to=[(known(), "main")]),
            event(allocated_to=[(known(), "other")]),
            "allocations[0].container",
        ),
    ],
)
def test_a_difference_is_named_by_its_field(then: bytes, now: bytes, field: str) -> None:
    compared = compare_events(then, now)

    assert compared.agreement is Agreement.DIFFERENT
    assert field in [change.field for change in compared.changes]


def test_both_values_of_a_difference_are_reported() -> None:
    (change,) = compare_events(event(), event(busy_ns=250)).changes
    assert (change.first, change.replayed) == (500, 250)


def test_late_adjustments_are_part_of_the_comparison() -> None:
    then, now = (event(late_adjustments=adjust_ends(tick)) for tick in (ENDED, ENDED_LATER))
    agreement, changes, _ = compare_events(then, now)
    assert agreement is Agreement.DIFFERENT
    assert [one.field for one in changes] == ["late_adjustments[0].until_seq"]
    assert compare_events(then, event()).agreement is Agreement.DIFFERENT


def test_an_allocatee_may_become_known_but_not_another_pod() -> None:
    named, first, second = (
        event(allocated_to=[(pod, None)]) for pod in (NAMED, known(), known(uid=UIDS[1]))
    )
    assert compare_events(named, first).agreement is Agreement.MORE_COMPLETE
    for then, now, field in (
        (first, named, "allocations[0].pod.state"),
        (first, second, "allocations[0].pod.uid"),
        (first, event(), "allocations[0]"),
    ):
        compared = compare_events(then, now)
        assert compared.agreement is Agreement.DIFFERENT
        assert field in [change.field for change in compared.changes]


def test_pending_and_foreign_count_as_equal_for_a_pod_without_a_name() -> None:
    foreign = PodDescription(uid=UIDS[0], state=PodState.FOREIGN)
    then, now, seen = (event(of=[(pod, None)]) for pod in (pending(), foreign, known()))
    assert compare_events(then, now).agreement is Agreement.EQUAL
    assert compare_events(now, then).agreement is Agreement.EQUAL
    assert compare_events(now, seen).agreement is Agreement.MORE_COMPLETE
    assert compare_events(seen, now).agreement is Agreement.DIFFERENT


def test_lateness_is_not_part_of_the_comparison() -> None:
    compared = compare_events(event(late=True), event())

    assert compared == (Agreement.EQUAL, [], True)
