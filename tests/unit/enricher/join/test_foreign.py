"""A node gets names only for pods that the API server placed on it; booking is unaffected."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.codec import Decoder
from gpuledger.records import (
    AttributedIncident,
    Category,
    ContainerRef,
    DeviceAllocation,
    PodContainer,
    PodDescription,
    PodRecord,
    PodState,
)
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.enricher.join.builders import Given, value_of
from tests.unit.enricher.join.incidents import incident, incident_record
from tests.unit.enricher.join.ticks import (
    CONTAINER_IDS,
    SECOND_NS,
    UIDS,
    pod,
    process,
    record,
    sample,
)

HASH = "a" * 32
NAMED = [
    ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[0]),
    ContainerRef(pod_uid=UIDS[0]),
    ContainerRef(container_id=CONTAINER_IDS[0]),
]
_ATTRIBUTED = Decoder(topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident)


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.mark.parametrize("container", NAMED)
async def test_a_tick_that_names_another_nodes_pod_is_booked_and_the_pod_gets_no_name(
    given: Given, container: ContainerRef
) -> None:
    """However the tick names it: the event keeps the node's report and marks the pod as foreign."""
    given.read_pod(pod(node="node-b"))
    before = refused()
    event = given.take(containers=[container], processes=[process(container=0)])
    assert event.pods == [PodDescription(uid=container.pod_uid, state=PodState.FOREIGN)]
    assert [(one.container_id, one.pod) for one in event.containers] == [
        (container.container_id, 0)
    ]
    (entry,) = [one for one in event.gpus[0].entries if one.category is Category.POD]
    assert (entry.container, entry.busy_ns) == (0, 500_000_000)
    assert refused() == before + 1
    assert await given.rejected_records() == []


def test_the_other_pods_of_the_tick_keep_their_names(given: Given) -> None:
    """One foreign pod does not affect the others."""
    given.read_pod(pod(0))
    given.read_pod(pod(1, node="node-b"))
    event = given.take(processes=[process(container=0), process(container=1)])
    assert [(each.name, each.state) for each in event.pods[:2]] == [
        ("train-0", PodState.KNOWN),
        (None, PodState.FOREIGN),
    ]


def test_a_foreign_pod_is_logged_once_a_minute_for_each_node(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log line names the reporting node and the pod's own node."""
    given.read_pod(pod(node="node-b"))
    for _ in range(3):
        given.take(containers=NAMED[:1])
    output = [line for line in capsys.readouterr().out.splitlines() if "pod_names_rejected" in line]
    assert len(output) == 1
    for part in ("node-a", "research/train-0", UIDS[0], "node-b"):
        assert part in output[0]


async def test_the_same_pods_on_their_own_node_are_named(given: Given) -> None:
    """Including a static pod, which the node itself has placed."""
    given.read_pod(pod(0, node="node-b"))
    given.read_pod(pod(1, node="node-b", config_hash=HASH))
    event = given.take(node="node-b", containers=[*NAMED[:1], ContainerRef(pod_uid=HASH)])
    assert [each.state for each in event.pods] == [PodState.KNOWN] * 2


def test_a_pod_whose_record_has_not_come_is_pending_until_the_record_names_its_node(
    given: Given,
) -> None:
    """Then it is known or foreign, in both cases from the next tick on."""
    for number, node, state in ((0, "node-b", PodState.FOREIGN), (1, "node-a", PodState.KNOWN)):
        containers = [ContainerRef(pod_uid=UIDS[number], container_id=CONTAINER_IDS[number])]
        assert [one.state for one in given.take(containers=containers).pods] == [PodState.PENDING]
        given.read_pod(pod(number, node=node))
        assert [one.state for one in given.take(containers=containers).pods] == [state]


def test_a_deleted_pod_still_belongs_to_its_node(given: Given) -> None:
    """Until its tombstone: after that its node is unknown."""
    given.read_pod(pod(node="node-b", deleted_time_ns=SECOND_NS))
    assert given.take(containers=NAMED[:1]).pods[0].state is PodState.FOREIGN
    given.read_tombstone(UIDS[0])
    assert given.take(containers=NAMED[:1]).pods[0].state is PodState.PENDING


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_status_that_names_another_nodes_container_does_not_take_its_name(
    given: Given, order: Sequence[int]
) -> None:
    """A node writes the status of its pods, and so could name any container there."""
    theirs = PodContainer(name="theirs", container_id=CONTAINER_IDS[0], restarts=0)
    read = [pod(0), pod(1, node="node-b", containers=[theirs], created_time_ns=2**60)]
    for number in order:
        given.read_pod(read[number])
    for container in NAMED:
        (described,) = given.take(containers=[container]).pods
        assert (described.uid, described.name) == (UIDS[0], "train-0")
    (described,) = given.take(node="node-b", containers=NAMED[2:]).pods
    assert (described.uid, described.name) == (UIDS[1], "train-1")
    given.read_tombstone(UIDS[0])
    (described,) = given.take(node="node-b", containers=NAMED[2:]).pods
    assert (described.uid, described.name) == (UIDS[1], "train-1")


CRAFTED = [
    pytest.param(f"node-a/{HASH}", id="the node and the hash"),
    pytest.param(HASH, id="the hash"),
    pytest.param(f"node-a/{CONTAINER_IDS[1]}", id="the node and the container"),
    pytest.param(CONTAINER_IDS[1], id="the container"),
    pytest.param(UIDS[1], id="the UID"),
]


@pytest.mark.parametrize("is_former", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)])
@pytest.mark.parametrize("container_id", CRAFTED)
def test_a_status_from_another_node_cannot_name_the_use_of_a_static_pod(
    given: Given, container_id: str, order: Sequence[int], *, is_former: bool
) -> None:
    """Its kubelet may write any text as an id; the static pod's record may come late, or never."""
    theirs = PodContainer(
        name="theirs",
        restarts=0,
        container_id=None if is_former else container_id,
        previous_container_id=container_id if is_former else None,
    )
    read = [
        pod(0, node="node-b", containers=[theirs], created_time_ns=1),
        pod(1, config_hash=HASH),
    ]
    for number in order:
        given.read_pod(read[number])
    expected = "train-1" if 1 in order else None
    for named in (
        ContainerRef(pod_uid=HASH),
        ContainerRef(pod_uid=HASH, container_id=CONTAINER_IDS[1]),
        ContainerRef(container_id=CONTAINER_IDS[1]),
    ):
        (described,) = given.take(containers=[named]).pods
        assert described.name == expected
        assert described.uid != UIDS[0]
    given.read_tombstone(UIDS[0])
    for named in (ContainerRef(pod_uid=HASH), ContainerRef(container_id=CONTAINER_IDS[1])):
        (described,) = given.take(containers=[named]).pods
        assert described.name == expected


async def test_an_incident_of_another_nodes_pod_is_reported_without_names(given: Given) -> None:
    """It lists the processes, but that pod's owner is not alerted."""
    before = refused()
    given.read_pod(pod(node="node-b"))
    (message,) = given.stage.take_incidents([incident_record(incident())])
    reported = _ATTRIBUTED.decode(message.value)
    assert [one.pid for one in reported.incident.processes] == [1]
    assert reported.pods == [PodDescription(uid=UIDS[0], state=PodState.FOREIGN)]
    assert refused() == before + 1
    assert await given.rejected_records() == []


NODES = ("node-a", "node-b")
written_ids = st.sampled_from(
    [*CONTAINER_IDS[:4], *UIDS[:4], HASH, *(f"{node}/{HASH}" for node in NODES)]
)
known_pods = st.lists(
    st.builds(
        pod,
        st.integers(0, 3),
        node=st.sampled_from(NODES),
        deleted_time_ns=st.none() | st.just(1),
        config_hash=st.none() | st.just(HASH),
        containers=st.lists(
            st.builds(
                PodContainer, name=st.just("main"), container_id=written_ids, restarts=st.just(0)
            ),
            max_size=2,
        ),
    ),
    max_size=6,
)
named_containers = st.lists(
    st.builds(
        ContainerRef,
        pod_uid=st.none() | st.sampled_from([*UIDS[:4], HASH]),
        container_id=st.none() | st.sampled_from(CONTAINER_IDS[:4]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda each: (each.pod_uid, each.container_id),
)


allocations = st.lists(
    st.builds(
        DeviceAllocation,
        gpu_uuid=st.just("GPU-a"),
        device_id=st.sampled_from(["GPU-a::0", "GPU-a::1"]),
        resource_name=st.just("nvidia.com/gpu"),
        namespace=st.just("research"),
        pod=st.sampled_from([f"train-{number}" for number in range(4)]),
        container=st.just("main"),
    ),
    max_size=4,
)


@for_any(
    cached=known_pods,
    containers=st.lists(named_containers, min_size=1, max_size=4),
    allocated=allocations,
)
def test_ticks_are_booked_the_same_whatever_pods_are_cached(
    cached: list[PodRecord],
    containers: list[list[ContainerRef]],
    allocated: list[DeviceAllocation],
) -> None:
    """Byte for byte; a pod has a name only if its record names the node.

    Or if it has no record and the node reported the name, and never if a record contradicts it.
    """
    with_none, with_some = Given(), Given()
    for each in cached:
        with_some.read_pod(each)
    last_versions = {each.uid: each for each in cached}.values()
    of_node = {each.uid: each.node for each in cached}
    for number, named in enumerate(containers, 1):
        processes = [
            process(container=partition, pid=partition + 1) for partition in range(len(named))
        ]
        tick = record(
            sample(seq=1000 * number, containers=named, processes=processes, allocations=allocated),
            offset=number,
        )
        (first,) = with_none.stage.take_samples([tick])
        (second,) = with_some.stage.take_samples([tick])
        assert books_of(first.value) == books_of(second.value)
        event = msgspec.json.decode(second.value or b"")
        for described in event["pods"]:
            is_known = described["state"] == "known"
            assert ("name" in described) == (is_known or described["state"] == "named")
            if described["state"] == "named":
                output = (described["namespace"], described["name"])
                assert all(
                    (last_version.namespace, last_version.name) != output
                    or last_version.deleted_time_ns is not None
                    for last_version in last_versions
                )
            assert not is_known or of_node[described["uid"]] == "node-a"


DESCRIPTION = {"pods", "containers", "allocations"}


def books_of(event: bytes | None) -> dict[str, msgspec.Raw]:
    """Return an event's encoded fields except the descriptions of pods and allocatees."""
    fields = msgspec.json.decode(event or b"", type=dict[str, msgspec.Raw])
    return {name: value for name, value in fields.items() if name not in DESCRIPTION}


def refused() -> float:
    """Return how often names were refused so far."""
    return value_of("gpuledger_join_names_rejected_total", reason="foreign_pod")
