"""Two clusters with equal names are never mixed up."""

from typing import Final

import pytest
from prometheus_client import REGISTRY

from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.completeness import JOIN, MAX_CLUSTERS, PODWATCH, key_of
from gpuledger.keys import key_in, node_key, show_node, split_key
from gpuledger.records import NodeProgress, NodeRecord, PodState, Watermark
from gpuledger_enricher.join.progress.watermarks import NodeWatermarks
from gpuledger_enricher.podwatch.kinds import NODE, POD
from gpuledger_enricher.podwatch.publish import KnownRecords
from gpuledger_enricher.podwatch.table import ObjectTable
from tests.default_topics import EVENTS, PODS, TOPICS, WATERMARKS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import SECOND_NS, UIDS, pod, record, sample

BLUE, GREEN = CLUSTERS = ("blue", "green")
NOW_NS: Final = 1_790_000_000 * SECOND_NS


@pytest.fixture
def given() -> Given:
    return Given()


def test_a_key_consists_of_a_cluster_and_a_name_within_the_cluster() -> None:
    tick = sample(cluster=BLUE, node="node-a")
    assert node_key(tick) == key_in(BLUE, "node-a") == "blue/node-a"
    assert split_key("blue/node-a.example") == (BLUE, "node-a.example")
    assert split_key("no-key") == ("no-key", "")
    assert show_node("default", "node-a") == "node-a"
    assert show_node(BLUE, "node-a") == "blue/node-a"


def test_ticks_of_both_clusters_are_booked_each_with_its_own_pods(given: Given) -> None:
    """Although only the clusters differ, and even the UIDs are equal."""
    for cluster in CLUSTERS:
        given.read_pod(pod(cluster=cluster, labels={"team": cluster}))
    for cluster in CLUSTERS:
        (event,) = given.offer(cluster=cluster, seq=1000)
        labels = [each.labels for each in event.pods if each.uid == UIDS[0]]
        assert (event.cluster, labels) == (cluster, [{"team": cluster}])
    assert [given.offer(cluster=cluster, seq=1000) for cluster in CLUSTERS] == [[], []]


def test_a_tombstone_of_one_cluster_removes_nothing_of_the_other(given: Given) -> None:
    for cluster in CLUSTERS:
        given.read_pod(pod(cluster=cluster))
    gone = record(None, topic=PODS.name, key=key_in(GREEN, UIDS[0]))
    given.stage.take_pods([gone])
    states = [given.take(cluster=cluster).pods[0].state for cluster in CLUSTERS]
    assert states == [PodState.KNOWN, PodState.PENDING]
    assert len(given.stage.pods) == 1


def test_a_pod_of_the_other_cluster_is_neither_foreign_nor_known(given: Given) -> None:
    """A pod that only the other cluster has is waited for, and its record resolves nothing here."""
    given.read_pod(pod(cluster=GREEN, node="node-b"))
    assert given.take(cluster=BLUE).pods[0].state is PodState.PENDING
    given.read_pod(pod(cluster=BLUE))
    assert given.take(cluster=BLUE).pods[0].state is PodState.KNOWN


def test_progress_names_its_cluster(given: Given) -> None:
    for cluster in CLUSTERS:
        given.take(cluster=cluster, seq=1000)
    drained = {message.key: message.value or b"" for message in given.stage.drain_progress(3)}
    assert drained.keys() == {b"blue/node-a", b"green/node-a"}
    assert all(f'"cluster":"{cluster}"'.encode() in drained[f"{cluster}/node-a".encode()]
               for cluster in CLUSTERS)  # fmt: skip


def test_a_worker_publishes_a_watermark_of_its_own_for_each_cluster() -> None:
    """A cluster that is an hour behind delays no other, and its own watermark stays behind."""
    nodes = NodeWatermarks()
    behind_ns = NOW_NS - 3600 * SECOND_NS
    for cluster, time_ns in ((BLUE, NOW_NS), (GREEN, behind_ns)):
        tick = sample(cluster=cluster, time_ns=time_ns)
        nodes.advance(tick, offset=1, written_ms=NOW_NS // 10**6, now_ns=NOW_NS)
    found = nodes.find_complete(now_ns=NOW_NS, is_at_end=False)
    assert {cluster: each.until_ns for cluster, each in found.items()} == {
        BLUE: NOW_NS,
        GREEN: behind_ns,
    }
    assert [each.node_count for each in found.values()] == [1, 1]


def test_a_cluster_without_a_node_in_a_partition_is_as_complete_as_the_partition(
    given: Given,
) -> None:
    """It is known by its podwatch's watermark."""
    for cluster in CLUSTERS:
        given.stage.take_watermarks([podwatch_watermark(cluster, time_ns=1, offset=0)])
    event = given.take(cluster=BLUE)
    found = given.stage.find_complete(3, is_at_end=False)
    assert {cluster: each.until_ns for cluster, each in found.items()} == dict.fromkeys(
        CLUSTERS, event.time_ns
    )
    assert (found[BLUE].node_count, found[GREEN].node_count) == (1, 0)


def test_a_cluster_is_new_once_unless_a_watermark_names_it(given: Given) -> None:
    """However many nodes it has; podwatch or an earlier worker of the join publishes watermarks."""

    def count() -> float:
        return REGISTRY.get_sample_value("gpuledger_join_new_clusters_total") or 0.0

    before = count()
    given.stage.take_watermarks([podwatch_watermark(BLUE, time_ns=1, offset=0)])
    for number in range(3):
        given.take(cluster=BLUE, node=f"node-{number}")
    assert count() == before
    for number in range(3):
        given.take(cluster=GREEN, node=f"node-{number}")
    assert count() == before + 1
    given.take(cluster="invented")
    assert count() == before + 2


def test_invented_clusters_are_no_burden_and_displace_no_watermark_of_another() -> None:
    nodes = NodeWatermarks()
    for number in range(MAX_CLUSTERS + 100):
        cluster = BLUE if number == 0 else f"invented-{number}"
        nodes.advance(sample(cluster=cluster), offset=1, written_ms=1, now_ns=NOW_NS)
    for _ in range(2):
        found = nodes.find_complete(now_ns=NOW_NS, is_at_end=True)
        assert len(found) == MAX_CLUSTERS
        assert found[BLUE].node_count == 1


def podwatch_watermark(cluster: str, *, time_ns: int, offset: int) -> Record:
    """Return a podwatch's watermark as it is read at an offset."""
    output = Watermark(
        component=PODWATCH, cluster=cluster, partition=3, complete_until_ns=time_ns,
        topic=PODS.name, next_offset=0, publisher="test",
    )  # fmt: skip
    return Record(WATERMARKS.name, 3, offset, 0, key_of(output), encode(output))


def test_a_starting_join_waits_for_the_podwatch_of_each_active_cluster() -> None:
    """It does not wait for one that was silent for a minute, which may be gone for good."""
    given = Given(watermarks_from={3: 10})
    stage, now_ns = given.stage, given.now_ns
    stage.take_watermarks(
        [
            podwatch_watermark(BLUE, time_ns=now_ns - SECOND_NS, offset=1),
            podwatch_watermark(GREEN, time_ns=now_ns - SECOND_NS, offset=2),
            podwatch_watermark("gone", time_ns=now_ns - 3600 * SECOND_NS, offset=3),
        ]
    )
    stage.pods_completeness.read_to(3, 0)
    complete = []
    for offset, cluster in ((10, BLUE), (11, GREEN)):
        stage.take_watermarks([podwatch_watermark(cluster, time_ns=now_ns, offset=offset)])
        complete.append(stage.pods_completeness.complete_until_ns([3]))
    assert complete == [None, now_ns]


@pytest.mark.parametrize("component", [PODWATCH, JOIN])
async def test_a_watermark_from_the_future_is_rejected(component: str) -> None:
    """It would stay in force forever, and every component after the join would repeat it."""
    given = Given()
    output = Watermark(
        component=component, cluster=BLUE, partition=3,
        complete_until_ns=given.now_ns + 61 * SECOND_NS, topic=EVENTS.name, next_offset=0,
        publisher="test",
    )  # fmt: skip
    given.stage.take_watermarks([Record(WATERMARKS.name, 3, 0, 0, key_of(output), encode(output))])
    assert given.stage.find_complete(3, is_at_end=False) == {}
    assert [dead_letter.reason for dead_letter in await given.rejected_records()] == ["invalid"]


def test_restored_progress_belongs_to_its_own_cluster() -> None:
    nodes = NodeWatermarks()
    for number, cluster in enumerate(CLUSTERS, 1):
        nodes.take(
            NodeProgress(
                cluster=cluster, node="n", boot_id="b", seq=number, time_ns=number, offset=number
            ),
            last_seen_ns=NOW_NS,
        )
    found = [nodes.of(key_in(cluster, "n")) for cluster in CLUSTERS]
    assert [each.seq for each in found if each] == [1, 2]


def test_a_podwatch_reads_back_only_its_own_clusters_records() -> None:
    """Another podwatch's records are neither known, nor deleted, nor invalid."""
    known = KnownRecords(kind=POD, topics=TOPICS, cluster=BLUE)
    records = [record(pod(cluster=cluster), topic=PODS.name) for cluster in CLUSTERS]
    gone = record(None, topic=PODS.name, key=key_in(GREEN, UIDS[0]))
    known.ingest([*records, gone])
    assert [each.cluster for each in known.by_identity.values()] == [BLUE]
    assert (known.undecodable, known.overtaken) == (0, set())


def test_a_recreated_node_is_not_ended_by_the_tombstone_of_its_predecessor() -> None:
    table = ObjectTable(
        tombstone_after_seconds=1, max_tombstones=9, node_of=NODE.node_of,
        identity_of=NODE.identity_of,
    )  # fmt: skip
    first, second = (
        NodeRecord(
            cluster=BLUE, uid=uid, name="n", labels={}, created_time_ns=at, resource_version=str(at)
        )
        for uid, at in (("u1", 1), ("u2", 2))
    )
    table.upsert(first, time_ns=1)
    table.delete(first, time_ns=2)
    table.upsert(second, time_ns=3)
    table.expire(time_ns=10**12)
    assert [each.record for each in table.batch(9)] == [second]
