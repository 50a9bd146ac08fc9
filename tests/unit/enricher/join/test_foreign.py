"""A node speaks only for the pods that the API server has placed on it."""

import pytest

from gpuledger.records import ContainerRef, PodState
from tests.unit.enricher.join.given import Given, value_of
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


@pytest.fixture
def given() -> Given:
    """Give a stage that has read nothing."""
    return Given()


@pytest.mark.parametrize("container", NAMED)
async def test_a_tick_that_names_another_nodes_pod_is_put_aside_whole(
    given: Given, container: ContainerRef
) -> None:
    """However it names it; the letter says who spoke for whom, and holds the tick."""
    given.read_pod(pod(node="node-b"))
    assert given.offer(containers=[container], processes=[process(container=0)]) == []
    (letter,) = await given.letters()
    assert letter.reason == "foreign_pod"
    for part in ("node-a", "research/train-0", UIDS[0], "node-b"):
        assert part in letter.detail
    assert letter.value_base64 is not None


async def test_one_foreign_pod_among_others_is_enough(given: Given) -> None:
    """What else such a tick says is not believed either."""
    given.read_pod(pod(0))
    given.read_pod(pod(1, node="node-b"))
    assert given.offer(processes=[process(container=0), process(container=1)]) == []


async def test_the_same_pods_on_their_own_node_are_booked(given: Given) -> None:
    """A static pod among them, which the node itself has placed."""
    given.read_pod(pod(0, node="node-b"))
    given.read_pod(pod(1, node="node-b", config_hash=HASH))
    event = given.take(node="node-b", containers=[*NAMED[:1], ContainerRef(pod_uid=HASH)])
    assert [each.state for each in event.pods] == [PodState.KNOWN] * 2
    assert await given.letters() == []


async def test_a_pod_whose_record_has_not_come_is_pending_and_not_foreign(given: Given) -> None:
    """Until it comes, and says that it is another node's."""
    containers = NAMED[:1]
    (described,) = given.take(containers=containers).pods
    assert described.state is PodState.PENDING
    given.read_pod(pod(node="node-b"))
    assert given.offer(containers=containers) == []
    assert [letter.reason for letter in await given.letters()] == ["foreign_pod"]


async def test_a_pod_that_is_gone_is_still_its_nodes(given: Given) -> None:
    """Its deletion gives it to nobody else; its last trace does, for nobody can tell any more."""
    given.read_pod(pod(node="node-b", deleted_time_ns=SECOND_NS))
    assert given.offer(containers=NAMED[:1]) == []
    given.read_tombstone(UIDS[0])
    assert given.take(containers=NAMED[:1]).pods[0].state is PodState.PENDING


async def test_the_time_of_a_tick_that_was_put_aside_is_a_gap(given: Given) -> None:
    """It is not booked, and the next event says so."""
    given.read_pod(pod(node="node-b"))
    given.take(containers=[])
    given.offer(containers=NAMED[:1])
    assert given.take(containers=[]).uncovered_seconds == 1.0


async def test_an_incident_that_names_another_nodes_pod_is_put_aside(given: Given) -> None:
    """It would alert the wrong people."""
    name = "gpuledger_join_incidents_total"
    before = value_of(name)
    given.read_pod(pod(node="node-b"))
    assert given.stage.take_incidents([incident_record(incident())]) == []
    assert [letter.reason for letter in await given.letters()] == ["foreign_pod"]
    assert value_of(name) == before


@pytest.mark.parametrize("key", [b"node-b", b"", None])
async def test_a_tick_under_another_key_than_its_nodes_is_put_aside_and_moves_no_mark(
    given: Given, key: bytes | None
) -> None:
    """So whoever may write under one key alone cannot speak for another node."""
    given.take(seq=1000)
    assert given.stage.take_samples([record(sample(seq=9000), offset=9)._replace(key=key)]) == []
    assert given.take(seq=2000).seq == 2000
    (letter,) = await given.letters()
    assert letter.reason == "foreign_key"
    assert "node-a" in letter.detail


async def test_incidents_and_processes_stand_under_their_nodes_key_too(given: Given) -> None:
    """Those of another are neither attributed nor counted."""
    assert given.stage.take_incidents([incident_record(incident())._replace(key=b"node-b")]) == []
    assert len(given.stage.take_incidents([incident_record(incident())])) == 1
    (letter,) = await given.letters()
    assert letter.reason == "foreign_key"
