"""An allocatee is described like a user of a GPU, and never by a pod of another node."""

import msgspec
import pytest

from gpuledger.records import (
    Category,
    ContainerRequest,
    DeviceAllocation,
    EventAllocation,
    GpuEvent,
    PodContainer,
    PodDescription,
    PodState,
)
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, UIDS, pod

REFUSED = "gpuledger_join_names_rejected_total"


@pytest.fixture
def given() -> Given:
    return Given()


def allocated_to(*names: str) -> list[DeviceAllocation]:
    """Return the kubelet's report if each of these pods has a share of the GPU."""
    return [
        DeviceAllocation(
            gpu_uuid="GPU-a",
            device_id=f"GPU-a::{place}",
            resource_name="nvidia.com/gpu",
            namespace="research",
            pod=name,
            container="main",
            replica=str(place),
        )
        for place, name in enumerate(names)
    ]


def idle_of(event: GpuEvent) -> list[tuple[int | None, int | None]]:
    """Return each idle entry's allocation and amount."""
    entries = [entry for entry in event.gpus[0].entries if entry.category is Category.IDLE]
    return [(one.allocation, one.busy_ns) for one in entries]


def allocatees_of(event: GpuEvent) -> list[PodDescription]:
    """Return the pod of each allocatee."""
    return [event.pods[each.pod] for each in event.allocations]


def test_admin_access_is_not_an_allocation_and_does_not_reduce_others(
    given: Given,
) -> None:
    given.read_pod(pod(1))
    allocated = allocated_to("train-1")
    admin = msgspec.structs.replace(
        allocated[0], pod="a-watcher", replica=None, claim="research/watch", admin_access=True
    )
    event = given.take(allocations=[admin, *allocated])
    assert [each.name for each in allocatees_of(event)] == ["train-1"]
    assert [
        (one.allocation, one.allocated_ns) for one in event.gpus[0].entries if one.allocated_ns
    ] == [(0, event.interval_ns)]


def test_a_node_books_idle_time_on_no_pod_of_another_node(given: Given) -> None:
    """The part stays allocated without a name.

    A pod without a record has the name from the node.
    """
    given.read_pod(pod(0))
    given.read_pod(pod(1, node="node-b"))
    before = value_of(REFUSED, reason="foreign_allocation")
    allocated = allocated_to("train-0", "train-1", "train-1", "train-2")
    event = given.take(allocations=allocated, containers=[])
    known, foreign, named = allocatees_of(event)
    assert (known.uid, known.state) == (UIDS[0], PodState.KNOWN)
    assert foreign == PodDescription(state=PodState.FOREIGN)
    assert named == PodDescription(state=PodState.NAMED, namespace="research", name="train-2")
    assert idle_of(event) == [(0, 125_000_000), (1, 250_000_000), (2, 125_000_000)]
    assert value_of(REFUSED, reason="foreign_allocation") == before + 1


def test_an_allocatee_is_known_from_the_tick_after_its_record(given: Given) -> None:
    """A tick without allocations lists no allocatees."""
    allocated = allocated_to("train-0")
    states = []

    def take() -> None:
        (holder,) = allocatees_of(given.take(allocations=allocated, containers=[]))
        states.append(holder.state)

    take()
    given.read_pod(pod())
    take()
    assert given.take(containers=[]).allocations == []
    take()
    given.read_tombstone(UIDS[0])
    take()
    assert states == [PodState.NAMED, PodState.KNOWN, PodState.KNOWN, PodState.NAMED]


def test_an_allocation_by_name_means_the_pod_with_that_name_at_the_ticks_time(given: Given) -> None:
    """Whatever the order of the ticks."""
    at = [T_NS + seconds * SECOND_NS for seconds in (0, 10, 20)]
    given.read_pod(pod(0, name="db-0", created_time_ns=at[0], deleted_time_ns=at[1]))
    given.read_pod(pod(1, name="db-0", created_time_ns=at[1]))
    allocated = allocated_to("db-0")
    for seconds, number in ((5, 0), (15, 1), (6, 0), (25, 1)):
        event = given.take(allocations=allocated, time_ns=T_NS + seconds * SECOND_NS)
        assert [each.uid for each in allocatees_of(event)] == [UIDS[number]], seconds


@pytest.mark.parametrize(
    ("seconds", "state"),
    [
        (-161, PodState.NAMED),
        (-160, PodState.KNOWN),
        (-1, PodState.KNOWN),
        (4, PodState.KNOWN),
        (5, PodState.NAMED),
        (600, PodState.NAMED),
    ],
)
def test_a_pod_that_did_not_exist_at_the_ticks_time_does_not_have_the_name(
    seconds: int, state: PodState
) -> None:
    """A kubelet lists a deleted pod for seconds; a StatefulSet's next pod has the same name."""
    created_ns = T_NS - 100 * SECOND_NS
    live = Given()
    live.read_pod(pod(0, created_time_ns=created_ns, deleted_time_ns=T_NS))
    for _ in range(2):  # the second time from the cached description
        event = live.take(allocations=allocated_to("train-0"), time_ns=T_NS + seconds * SECOND_NS)
        assert [each.state for each in allocatees_of(event)] == [state]


def test_a_description_is_not_cached_beyond_the_last_pod_of_a_cluster(given: Given) -> None:
    """Even if the number of changes is the same as before."""
    given.read_pod(pod(0, uid="old", name="db-0"))
    allocated = allocated_to("db-0")
    assert [
        each.uid for each in allocatees_of(given.take(allocations=allocated, containers=[]))
    ] == ["old"]
    given.read_tombstone("old")
    given.read_pod(pod(1, uid="new", name="db-0"))
    assert [
        each.uid for each in allocatees_of(given.take(allocations=allocated, containers=[]))
    ] == ["new"]


def test_a_pod_that_uses_its_allocation_occurs_once_in_the_event(given: Given) -> None:
    given.read_pod(pod())
    event = given.take(allocations=allocated_to("train-0"))
    assert [each.uid for each in event.pods].count(UIDS[0]) == 1
    assert event.allocations[0].pod == event.containers[0].pod


def test_a_container_with_several_resources_and_claims_is_one_allocatee(
    given: Given,
) -> None:
    (first,) = allocated_to("train-0")
    changes: list[dict[str, str]] = [
        {"resource_name": "aliyun.com/gpu-mem"},
        {"resource_name": "aliyun.com/gpu-core"},
        {"claim": "research/two"},
        {"claim": "research/one", "device_id": "GPU-b"},
    ]
    allocated = [msgspec.structs.replace(first, **change) for change in changes]
    expected = EventAllocation(
        pod=0,
        container="main",
        resources=["aliyun.com/gpu-core", "aliyun.com/gpu-mem", "nvidia.com/gpu"],
        claims=["research/one", "research/two"],
    )
    assert given.take(allocations=allocated, containers=[]).allocations == [expected]


def test_requests_are_reported_only_for_containers_in_the_event(given: Given) -> None:
    query = ContainerRequest(resources={"nvidia.com/gpu": 1})
    containers = [
        PodContainer(name=name, requested=requested, restarts=0)
        for name, requested in (("main", query), ("other", query), ("init", None))
    ]
    given.read_pod(pod(containers=containers))
    (holder,) = allocatees_of(given.take(allocations=allocated_to("train-0"), containers=[]))
    assert holder.requested == {"main": query}
