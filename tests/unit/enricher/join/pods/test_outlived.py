"""A pod whose processes outlive its tombstone keeps its description while ticks name it."""

from collections.abc import Sequence

import pytest
from hypothesis import example
from hypothesis import given as for_all
from hypothesis import strategies as st

from gpuledger.records import ContainerRef, GpuEvent, PodState
from gpuledger_enricher.join.pods.pods import NAMED_NS
from tests.examples import examples
from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.pods.test_allocations import allocated_to
from tests.unit.enricher.join.ticks import CONTAINER_IDS, SECOND_NS, UIDS, pod, process

NAMED_SECONDS = NAMED_NS // SECOND_NS
BOTH = [
    ContainerRef(pod_uid=uid, container_id=container)
    for uid, container in zip(UIDS[:2], CONTAINER_IDS[:2], strict=True)
]
DELETED = pod(deleted_time_ns=T_NS + SECOND_NS, resource_version="8")
SUCCESSOR = pod(1, name=DELETED.name, created_time_ns=T_NS + 2 * SECOND_NS)


def tick(given: Given, *numbers: int, late_ns: int = 0) -> GpuEvent:
    """Take a tick with a process of each of these pods, and an allocation by name."""
    return given.take(
        time_ns=given.now_ns - late_ns,
        containers=[BOTH[number] for number in numbers],
        processes=[process(pid=1000 + place, container=place) for place in range(len(numbers))],
        allocations=allocated_to(DELETED.name),
    )


step = st.one_of(
    st.tuples(
        st.sampled_from([(0,), (1,), (0, 1), ()]),
        st.integers(1, NAMED_SECONDS),
        st.sampled_from([0, 0, 100, 2000]),
    ),
    st.sampled_from(["successor", "again"]),
)


@examples(200)
@for_all(steps=st.lists(step, max_size=20))
@example(steps=["successor", ((0, 1), 600, 0), ((1,), 300, 0), ((0, 1), 300, 0), ((0,), 86_000, 0)])
def test_a_tombstone_changes_no_event_while_ticks_name_the_pod(
    steps: Sequence[tuple[tuple[int, ...], int, int] | str],
) -> None:
    """Neither of a late tick, nor if the next pod has the same name."""
    kept, unchanged = Given(), Given()
    for given in (kept, unchanged):
        given.read_pod(DELETED)
        tick(given, 0)
    kept.read_tombstone(DELETED.uid)
    last_ns = kept.now_ns
    for one in steps:
        if isinstance(one, str):
            for given in (kept, unchanged):
                given.read_pod(SUCCESSOR if one == "successor" else DELETED)
            if one == "again":
                kept.read_tombstone(DELETED.uid)
            continue
        numbers, wait_seconds, late_seconds = one
        events = []
        for given in (kept, unchanged):
            given.wait(wait_seconds)
            events.append(tick(given, *numbers, late_ns=late_seconds * SECOND_NS))
        time_ns = kept.now_ns - late_seconds * SECOND_NS
        if 0 in numbers:
            last_ns = time_ns
        elif abs(time_ns - last_ns) > NAMED_NS:
            break  # the pod may be forgotten
        assert events[0] == events[1]
    kept.wait(NAMED_SECONDS + 1)
    tick(kept, 1)
    assert kept.stage.pods.of("default").find(DELETED.uid, None, node="node-a") is None


@pytest.mark.parametrize("has_record", [True, False])
def test_the_next_pod_of_the_name_is_described_as_if_the_first_were_forgotten(
    *,
    has_record: bool,
) -> None:
    given, without = Given(), Given()
    given.read_pod(pod())
    tick(given, 0)
    given.read_tombstone(UIDS[0])
    for one in (given, without):
        one.wait(60)
        if has_record:
            one.read_pod(SUCCESSOR)
    event, expected = tick(given, 0, 1), tick(without, 1)
    place, expected_place = (each.allocations[0].pod for each in (event, expected))
    assert event.pods[place] == expected.pods[expected_place]
    names = [(each.name, each.state) for each in event.pods if each.uid == UIDS[0]]
    assert names == [(DELETED.name, PodState.KNOWN)]


@pytest.mark.parametrize(
    ("deleted_time_ns", "expected_ns"),
    [(DELETED.deleted_time_ns, DELETED.deleted_time_ns), (None, T_NS)],
)
def test_a_pod_after_its_tombstone_counts_as_deleted(
    deleted_time_ns: int | None, expected_ns: int
) -> None:
    """By podwatch's time of the deletion, if a record with it was read."""
    given = Given()
    given.read_pod(pod(deleted_time_ns=deleted_time_ns))
    tick(given, 0)
    given.read_tombstone(UIDS[0])
    given.wait(60)
    (found,) = [each for each in tick(given, 0).pods if each.uid == UIDS[0]]
    assert found.deleted_time_ns == expected_ns


@pytest.mark.parametrize("seconds", [NAMED_SECONDS + 1, -86_400])
def test_only_pods_that_ticks_name_are_kept_after_their_tombstones(seconds: int) -> None:
    """Also if the node's clock is set back."""
    given = Given()
    for number in range(4):
        given.read_pod(pod(number))
    tick(given, 0, 1)
    for number in range(4):
        given.read_tombstone(UIDS[number])
    assert len(given.stage.pods) == 2
    tick(given, 1, late_ns=-seconds * SECOND_NS)
    assert len(given.stage.pods) == 1


def test_pods_of_a_node_without_ticks_are_forgotten_with_its_progress() -> None:
    given = Given()
    given.read_pod(pod())
    tick(given, 0)
    given.read_tombstone(UIDS[0])
    given.wait(2 * 86_400)
    given.take(node="node-b", time_ns=given.now_ns, containers=[])
    given.stage.find_complete(3, is_at_end=True)
    given.stage.drain_progress(3)
    assert len(given.stage.pods) == 0


def test_pods_of_a_revoked_partition_are_forgotten_although_ticks_name_them() -> None:
    given = Given()
    given.read_pod(pod())
    tick(given, 0)
    given.read_tombstone(UIDS[0])
    given.stage.forget(3)
    assert len(given.stage.pods) == 0
    given.read_pod(pod())
    given.read_tombstone(UIDS[0])
    assert len(given.stage.pods) == 0
