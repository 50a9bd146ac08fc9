"""The pods of an incident: those with a process on the GPU, and those with an idle allocation."""

import pytest

from gpuledger.codec import Decoder
from gpuledger.records import (
    AttributedIncident,
    DeviceAllocation,
    Incident,
    PodContainer,
    PodDescription,
    PodRecord,
    PodState,
)
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.incidents import at, incident, incident_record
from tests.unit.enricher.join.ticks import CONTAINER_IDS, UIDS, pod

ATTRIBUTED = Decoder(topic=ATTRIBUTED_INCIDENTS.name, record=AttributedIncident)


@pytest.fixture
def given() -> Given:
    return Given()


def attributed(given: Given, happened: Incident) -> AttributedIncident:
    """Let the stage take an incident, and return the attributed one."""
    (message,) = given.stage.take_incidents([incident_record(happened)])
    return ATTRIBUTED.decode(message.value)


def allocated_to(*names: str, container: str = "main") -> list[DeviceAllocation]:
    """Return the kubelet's report if each of these pods has a part of the GPU."""
    return [
        DeviceAllocation(
            gpu_uuid="GPU-a",
            device_id=f"GPU-a::{partition}",
            resource_name="nvidia.com/gpu",
            namespace="research",
            pod=name,
            container=container,
        )
        for partition, name in enumerate(names)
    ]


def on_idle_gpu(given: Given, *names: str) -> list[PodDescription]:
    """Return the pods of an incident on a GPU that is allocated to these but unused."""
    happened = incident(processes=[], allocations=allocated_to(*names))
    return attributed(given, happened).pods


def test_an_incident_is_described_by_its_own_time(given: Given) -> None:
    """With the owner that the pod had then, and the processes of that time."""
    given.read_pod(pod(owner_name="before"), seen_time_ns=at(5))
    given.read_pod(pod(owner_name="after", deleted_time_ns=at(20)), seen_time_ns=at(15))
    found = attributed(given, incident())
    assert [(each.owner_name, each.deleted_time_ns) for each in found.pods] == [("before", None)]
    assert [process.pid for process in found.incident.processes] == [1]


def test_an_allocatee_without_a_process_is_named(given: Given) -> None:
    """With its owner."""
    sidecar = PodContainer(name="proxy", container_id=CONTAINER_IDS[1], restarts=0)
    given.read_pod(pod(containers=[*pod().containers, sidecar]), seen_time_ns=0)
    (found,) = on_idle_gpu(given, "train-0")
    assert (found.uid, found.state, found.owner_name) == (UIDS[0], PodState.KNOWN, "train")


def test_pods_with_processes_come_first_and_each_is_named_once(given: Given) -> None:
    """The owner of an incident's first pod is the one that is alerted."""
    for number in range(3):
        given.read_pod(pod(number))
    allocated = allocated_to("train-2", "train-0", "train-2", "train-1")
    found = attributed(given, incident(allocations=allocated))
    assert [each.name for each in found.pods] == ["train-0", "train-1", "train-2"]
    assert found.incident.allocations == allocated
    assert found.allocation_pods == [2, 0, 2, 1]


def test_an_allocatee_whose_record_has_not_come_is_named_by_the_node(given: Given) -> None:
    (found,) = on_idle_gpu(given, "train-0")
    assert found == PodDescription(state=PodState.NAMED, namespace="research", name="train-0")


def test_an_allocatee_is_looked_up_only_on_its_own_node(given: Given) -> None:
    """A node that names another node's pod alerts none of its owners."""
    given.read_pod(pod(node="node-b"))
    (found,) = on_idle_gpu(given, "train-0")
    assert found == PodDescription(state=PodState.FOREIGN)


def life(number: int, born: int, gone: int | None) -> PodRecord:
    """Return one of the pods of the same name, created and deleted at these seconds."""
    deleted_time_ns = None if gone is None else at(gone)
    created_time_ns = at(born)
    return pod(
        number, name="db-0", created_time_ns=created_time_ns, deleted_time_ns=deleted_time_ns
    )


# The incident happens at second 10.
OF_ONE_NAME = [
    ("one after the other", [life(0, 1, 8), life(1, 9, None)], 1),
    ("read in any order", [life(1, 9, None), life(0, 1, 8)], 1),
    ("the next came after it", [life(0, 1, 11), life(1, 12, None)], 0),
    ("both are gone by now", [life(0, 1, 5), life(1, 6, 20)], 1),
    ("the API server deleted it before its node did", [life(0, 1, 9)], 0),
    ("the API server's clock is ahead", [life(0, 11, None)], 0),
]


@pytest.mark.parametrize(("case", "lives", "number"), OF_ONE_NAME)
def test_an_allocation_by_name_means_the_pod_with_that_name_at_the_incidents_time(
    given: Given, case: str, lives: list[PodRecord], number: int
) -> None:
    """Such as those of a StatefulSet on one node."""
    for live in lives:
        given.read_pod(live, seen_time_ns=0)
    assert [each.uid for each in on_idle_gpu(given, "db-0")] == [UIDS[number]], case
