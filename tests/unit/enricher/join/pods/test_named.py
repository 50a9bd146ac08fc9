"""A container without its pod's record gets the kubelet's name if the allocation is unambiguous."""

import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuEvent,
    NamespaceRecord,
    PodDescription,
    PodState,
)
from tests.default_topics import NAMESPACES
from tests.unit.enricher.join.builders import T_NS, Given
from tests.unit.enricher.join.ticks import (
    CONTAINER_IDS,
    SECOND_NS,
    UIDS,
    pod,
    process,
    reading,
    record,
)

GPUS = [reading(uuid=f"GPU-{number}", index=number) for number in range(3)]
CONTAINERS = [
    ContainerRef(pod_uid=uid, container_id=container)
    for uid, container in zip(UIDS, CONTAINER_IDS, strict=True)
]


@pytest.fixture
def given() -> Given:
    return Given()


def allocated(gpu: int, name: str = "train-0", **changes: object) -> DeviceAllocation:
    """Return an allocation of a GPU to a pod."""
    values: dict[str, object] = {
        "gpu_uuid": f"GPU-{gpu}",
        "device_id": f"GPU-{gpu}",
        "resource_name": "nvidia.com/gpu",
        "namespace": "research",
        "pod": name,
        "container": "main",
    }
    return DeviceAllocation(**(values | changes))  # type: ignore[arg-type]  # the names are its own


def described(
    given: Given, *allocated_to: DeviceAllocation, on: dict[int, list[int]]
) -> dict[str | None, PodDescription]:
    """Return the descriptions of a tick's pods; `on` lists the GPUs used by each container."""
    event = given.take(
        gpus=GPUS,
        containers=[CONTAINERS[each] for each in on],
        processes=[
            process(container=position, gpu=gpu, pid=100 * position + gpu)
            for position, gpus in enumerate(on.values())
            for gpu in gpus
        ],
        allocations=list(allocated_to),
    )
    users = {each.pod for each in event.containers}
    return {each.uid: each for position, each in enumerate(event.pods) if position in users}


def test_the_only_allocatee_of_a_containers_gpus_gives_it_namespace_and_name(given: Given) -> None:
    found = described(given, allocated(0), on={0: [0]})[UIDS[0]]
    assert found == PodDescription(
        uid=UIDS[0],
        state=PodState.NAMED,
        namespace="research",
        name="train-0",
    )


def test_once_the_record_has_come_the_pod_is_known_with_its_owner_and_labels(given: Given) -> None:
    assert described(given, allocated(0), on={0: [0]})[UIDS[0]].state is PodState.NAMED
    given.read_pod(pod(0))
    found = described(given, allocated(0), on={0: [0]})[UIDS[0]]
    assert (found.state, found.name, found.owner_name) == (PodState.KNOWN, "train-0", "train")


def test_the_next_tick_after_the_record_has_its_requests_and_its_namespaces_labels(
    given: Given,
) -> None:
    """The namespace's record may come before or after the pod's."""
    namespace = NamespaceRecord(
        cluster="default",
        name="research",
        uid="namespace",
        labels={"team": "vision"},
        annotations={},
        created_time_ns=T_NS - SECOND_NS,
        resource_version="1",
    )

    def tick() -> GpuEvent:
        return given.take(
            gpus=GPUS,
            containers=CONTAINERS[:1],
            processes=[process(container=0)],
            allocations=[allocated(0)],
        )

    assert tick().pods[0].requested is None
    given.read_pod(pod(0))
    assert tick().pods[0].requested == {"main": pod(0).containers[0].requested}
    given.stage.take_namespaces([record(namespace, topic=NAMESPACES.name, key="default/research")])
    (found,) = tick().namespaces or []
    assert (found.name, found.labels) == ("research", {"team": "vision"})


PENDING = {
    "the device is unallocated": ((allocated(1),), {0: [0]}),
    "nothing is allocated": ((), {0: [0]}),
    "it is allocated to two pods": ((allocated(0), allocated(0, "other", replica="2")), {0: [0]}),
    "it uses devices of two pods": ((allocated(0), allocated(1, "other")), {0: [0, 1]}),
    "one of its devices is unallocated": ((allocated(0),), {0: [0, 1]}),
    "two containers could be meant": ((allocated(0),), {0: [0], 1: [0]}),
    "two containers, on two devices of one pod": ((allocated(0), allocated(1)), {0: [0], 1: [1]}),
}


@pytest.mark.parametrize("case", PENDING)
def test_a_container_whose_allocation_is_ambiguous_stays_pending(given: Given, case: str) -> None:
    allocations, on = PENDING[case]
    found = described(given, *allocations, on=on)
    assert {each.state for each in found.values()} == {PodState.PENDING}
    assert {each.name for each in found.values()} == {None}


def test_each_of_two_pods_with_their_own_devices_has_its_own_name(given: Given) -> None:
    found = described(
        given, allocated(0), allocated(1, "other"), allocated(2), on={0: [0, 2], 1: [1]}
    )
    assert [found[uid].name for uid in UIDS[:2]] == ["train-0", "other"]


def test_a_pod_with_a_record_does_not_make_another_on_its_device_ambiguous(given: Given) -> None:
    """The known pod is not the allocatee, so the other one may be."""
    given.read_pod(pod(1))
    found = described(given, allocated(0), on={0: [0], 1: [0]})
    assert found[UIDS[0]].name == "train-0"


@pytest.mark.parametrize("node", ["node-a", "node-b"])
def test_a_pod_gets_no_name_that_belongs_to_another_pod_by_its_record(
    given: Given, node: str
) -> None:
    """Whether that pod is on another node, or on this one under another UID."""
    given.read_pod(pod(1, name="train-0", node=node))
    assert described(given, allocated(0), on={0: [0]})[UIDS[0]].state is PodState.PENDING


@pytest.mark.parametrize("node", ["node-a", "node-b"])
def test_the_next_pod_gets_the_name_of_a_deleted_one(given: Given, node: str) -> None:
    """As in a StatefulSet, whose successive pods have the same name."""
    given.read_pod(pod(1, name="train-0", node=node, deleted_time_ns=T_NS - SECOND_NS))
    assert described(given, allocated(0), on={0: [0]})[UIDS[0]].name == "train-0"


def test_a_name_in_another_namespace_is_another_name(given: Given) -> None:
    given.read_pod(pod(1, name="train-0", namespace="other", node="node-b"))
    assert described(given, allocated(0), on={0: [0]})[UIDS[0]].name == "train-0"


def test_a_name_is_free_again_once_all_records_with_that_name_are_deleted(given: Given) -> None:
    for number in (1, 2):
        given.read_pod(pod(number, name="train-0", node="node-b"))
    for uid in UIDS[1:3]:
        assert described(given, allocated(0), on={0: [0]})[UIDS[0]].name is None
        given.read_tombstone(uid)
    assert described(given, allocated(0), on={0: [0]})[UIDS[0]].name == "train-0"


def test_booked_amounts_are_the_same_with_and_without_a_name(given: Given) -> None:
    def books(*allocations: DeviceAllocation) -> object:
        return [
            entry
            for gpu in given.take(
                gpus=GPUS[:1],
                containers=CONTAINERS[:1],
                processes=[process(container=0, sm_utilization_ratio=1.0)],
                allocations=list(allocations),
            ).gpus
            for entry in gpu.entries
            if entry.container is not None
        ]

    assert books() == books(allocated(0))


STATES = st.lists(st.sampled_from(["known", "elsewhere", "none"]), min_size=3, max_size=3)
PLACES = st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=3, max_size=3)
ALLOCATED = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["train-0", "train-1", "train-2", "other"])),
    max_size=5,
)


@for_any(states=STATES, places=PLACES, allocated_to=ALLOCATED)
def test_no_tick_can_give_a_pod_the_name_of_another_pod(
    states: list[str], places: list[set[int]], allocated_to: list[tuple[int, str]]
) -> None:
    """The tick is booked in any case."""
    given = Given()
    for number, state in enumerate(states):
        if state != "none":
            given.read_pod(pod(number, node="node-a" if state == "known" else "node-b"))
    found = described(
        given,
        *(allocated(gpu, name) for gpu, name in allocated_to),
        on={number: sorted(gpus) for number, gpus in enumerate(places)},
    )
    named = [value.name for value in found.values() if value.name is not None]
    assert len(named) == len(set(named))
    for number, state in enumerate(states):
        wanted = {"known": {"known"}, "elsewhere": {"foreign"}, "none": {"pending", "named"}}
        assert found[UIDS[number]].state in wanted[state]
        if state == "elsewhere":
            assert f"train-{number}" not in named
