"""A record belongs in its node's partition under its own key; a misplaced one is rejected."""

from typing import Any

import pytest

from gpuledger.keys import key_in
from gpuledger.placement import placement_rule
from gpuledger.records import ContainerRef, NodeProgress, PodState, ProcessChange, ProcessRecord
from gpuledger.topics import partition_of_node
from tests.default_topics import PODS, PROCESSES, PROGRESS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.incidents import incident, incident_record
from tests.unit.enricher.join.ticks import CONTAINER_IDS, UIDS, pod, record, sample

HOME = 3
NAMED = [ContainerRef(pod_uid=UIDS[0], container_id=CONTAINER_IDS[0])]


@pytest.fixture
def given() -> Given:
    """Return a stage that has read nothing but knows the partition of node-a."""
    given = Given()
    given.homes["default/node-a"] = HOME
    return given


def watermark(**changes: object) -> NodeProgress:
    """Return a watermark far ahead of any tick."""
    values = {
        "cluster": "default",
        "node": "node-a",
        "boot_id": "boot",
        "seq": 10**9,
        "time_ns": 1,
        "offset": 1,
    }
    return NodeProgress(**(values | changes))  # type: ignore[arg-type]  # the names are a NodeProgress's


def seen_process() -> ProcessRecord:
    """Return a process that a node has seen."""
    return ProcessRecord(
        cluster="default",
        node="node-a",
        boot_id="boot",
        pid=1,
        time_ns=1,
        change=ProcessChange.SEEN,
        gpu_uuids=["GPU-a"],
    )


OF_NODE_A = {
    "a tick": ("take_samples", record(sample(seq=9000), offset=9)),
    "an incident": ("take_incidents", incident_record(incident())),
    "a process": ("take_processes", record(seen_process(), topic=PROCESSES.name)),
    "a watermark": ("restore_progress", record(watermark(), topic=PROGRESS.name)),
    "a pod": ("take_pods", record(pod(), topic=PODS.name)),
}
ELSEWHERE: dict[str, dict[str, Any]] = {
    "under another node's name": {"key": b"default/node-b"},
    "under another UID": {"key": key_in("default", UIDS[1]).encode()},
    "under the empty key": {"key": b""},
    "without a key": {"key": None},
    "in another partition": {"partition": HOME + 1},
}


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("what", OF_NODE_A)
async def test_a_misplaced_record_is_rejected_and_changes_nothing(
    given: Given, what: str, where: str
) -> None:
    """The dead letter names the node and the partition."""
    taken, read = OF_NODE_A[what]
    given.take(seq=1000, containers=[])
    assert not getattr(given.stage, taken)([read._replace(**ELSEWHERE[where])])
    event = given.take(seq=2000, containers=NAMED)
    assert [one.state for one in event.pods] == [PodState.PENDING]
    (dead_letter,) = await given.rejected_records()
    assert dead_letter.reason == "misplaced"
    home, lies = (f"partition {each}" for each in (HOME, ELSEWHERE[where].get("partition", HOME)))
    assert f"of node default/node-a belongs in {home} under key " in dead_letter.detail
    assert f"it is in {lies} under key " in dead_letter.detail


@pytest.mark.parametrize("what", OF_NODE_A)
async def test_a_record_in_the_right_place_is_used(given: Given, what: str) -> None:
    """The same records, each where its writer puts it."""
    taken, read = OF_NODE_A[what]
    getattr(given.stage, taken)([read])
    assert await given.rejected_records() == []


def test_a_tombstone_removes_nothing_of_another_partition(given: Given) -> None:
    """Neither a pod nor a watermark; in its own partition it does."""
    given.read_pod(pod())
    given.take(seq=1000)
    given.read_tombstone(UIDS[0], partition=HOME + 1)
    gone = record(None, topic=PROGRESS.name, key="default/node-a")
    given.stage.restore_progress([gone._replace(partition=HOME + 1)])
    (found,) = given.take(seq=2000, containers=NAMED).pods
    assert (found.state, found.deleted_time_ns) == (PodState.KNOWN, None)
    assert given.offer(seq=1000) == []
    given.read_tombstone(UIDS[0], partition=HOME)
    (found,) = given.take(seq=3000, containers=NAMED).pods
    assert found.deleted_time_ns is not None


@pytest.mark.parametrize("partitions", [1, 12, 50])
def test_a_nodes_partition_is_the_one_in_which_every_writer_puts_its_records(
    partitions: int,
) -> None:
    """Exactly one of all partitions."""
    is_placed = placement_rule(partitions=partitions)
    for number in range(100):
        node = f"default/gpu-node-{number}"
        homes = [each for each in range(partitions) if is_placed(node, each)]
        assert homes == [partition_of_node(node, partitions=partitions)]
