"""An event describes its node and namespaces as they were then, whatever the order of reading."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as for_any
from hypothesis import strategies as st

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Record
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import (
    ContainerRef,
    GpuEvent,
    NamespaceDescription,
    NamespaceRecord,
    NodeDescription,
    NodeRecord,
)
from gpuledger.records.bounds import (
    MAX_ANNOTATION_LENGTH,
    MAX_DESCRIPTION_BYTES,
    MAX_NAMESPACES_BYTES,
)
from gpuledger_enricher.join.pods.pods import MAX_PAST_VERSIONS, ClusterObjects
from gpuledger_enricher.join.replay_diff import Agreement, compare_events
from tests.default_topics import NAMESPACES, NODES
from tests.unit.enricher.join.builders import T_NS, Given, value_of
from tests.unit.enricher.join.ticks import SECOND_NS, pod, record

CREATED_NS = T_NS - 3600 * SECOND_NS
KNOWN_NODE = NodeDescription(
    pool="h100",
    instance_type="p5.48xlarge",
    zone="eu-west-1a",
    region="eu-west-1",
    capacity_type="spot",
    labels={"rack": "7"},
)


def node(version: str = "7", **changes: object) -> NodeRecord:
    """Return the record of the node that ticks."""
    values: dict[str, Any] = {
        "cluster": "default",
        "uid": "node-uid",
        "name": "node-a",
        **msgspec.structs.asdict(KNOWN_NODE),
        "created_time_ns": CREATED_NS,
        "resource_version": version,
    }
    return NodeRecord(**(values | changes))


def namespace(version: str = "7", **changes: object) -> NamespaceRecord:
    """Return the record of the pods' namespace."""
    values: dict[str, Any] = {
        "cluster": "default",
        "uid": "namespace-uid",
        "name": "research",
        "labels": {"team": "vision"},
        "created_time_ns": CREATED_NS,
        "resource_version": version,
    }
    return NamespaceRecord(**(values | changes))


def read(
    given: Given,
    one: NodeRecord | NamespaceRecord,
    *,
    seconds: float = 0,
    partition: int | None = None,
    key: str = "",
) -> None:
    """Let the stage read a record that podwatch saw this many seconds from now."""
    is_node = isinstance(one, NodeRecord)
    topic = NODES if is_node else NAMESPACES
    took = given.stage.take_nodes if is_node else given.stage.take_namespaces
    message = record(one, topic=topic.name, key=key or key_in(one.cluster, one.name))
    time_ms = (T_NS + round(seconds * SECOND_NS)) // 10**6
    place = partition if partition is not None else 3 if is_node else 0
    took([message._replace(timestamp_ms=time_ms, partition=place)])


def joined(*records: NodeRecord | NamespaceRecord) -> Given:
    """Return a stage that has read a pod and these records."""
    given = Given()
    given.read_pod(pod(), seen_time_ns=T_NS)
    for one in records:
        read(given, one)
    return given


def at(given: Given, seconds: float, **changes: object) -> GpuEvent:
    """Return the event of a tick of that time."""
    return given.take(time_ns=T_NS + round(seconds * SECOND_NS), **changes)


def test_the_node_and_the_pods_namespaces_are_described() -> None:
    given = joined(node(), namespace(annotations={"cost-center": "42"}), namespace(name="other"))
    event = at(given, 1)
    assert event.node_description == KNOWN_NODE
    assert event.namespaces == [
        NamespaceDescription(
            name="research", labels={"team": "vision"}, annotations={"cost-center": "42"}
        )
    ]


def test_unknown_objects_are_absent() -> None:
    event = at(joined(), 1)
    assert (event.node_description, event.namespaces) == (None, None)
    names = ("pool", "instance_type", "zone", "region", "capacity_type")
    bare = msgspec.structs.replace(node(labels={}), **dict.fromkeys(names))
    assert at(joined(bare), 1).node_description is None


def team_of(event: GpuEvent) -> str | None:
    """Return the team in the description of the only namespace."""
    return next(((each.labels or {}).get("team") for each in event.namespaces or ()), None)


def test_a_tick_is_described_by_the_versions_in_force_at_its_time() -> None:
    given = joined(node(), namespace())
    read(given, node("8", zone="eu-west-1b"), seconds=10)
    read(given, namespace("8", labels={"team": "speech"}), seconds=20)
    for seconds, zone, team in (
        (30, "b", "speech"),
        (9, "a", "vision"),
        (19, "b", "vision"),
        (10, "b", "vision"),
        (20, "b", "speech"),
    ):
        event = at(given, seconds)
        message = event.node_description
        assert (message and message.zone, team_of(event)) == (f"eu-west-1{zone}", team)


def test_a_cached_description_follows_new_records() -> None:
    given = joined()
    assert at(given, 1).node_description is None
    read(given, node())
    assert at(given, 2).node_description == KNOWN_NODE
    read(given, namespace())
    assert team_of(at(given, 3)) == "vision"
    read(given, namespace("8", labels={"team": "speech"}), seconds=4)
    assert [team_of(at(given, seconds)) for seconds in (3.5, 4)] == ["vision", "speech"]


def test_a_deleted_object_is_in_force_until_then_and_its_successor_from_its_creation() -> None:
    given = joined(namespace())
    read(given, namespace("8", deleted_time_ns=T_NS + 5 * SECOND_NS), seconds=5)
    again = {"uid": "another", "created_time_ns": T_NS + 8 * SECOND_NS}
    read(given, namespace("9", labels={"team": "speech"}, **again), seconds=9)
    message = [team_of(at(given, seconds)) for seconds in (4, 5, 7, 9)]
    assert message == ["vision", None, None, "speech"]


def test_a_newer_object_does_not_describe_its_predecessor_of_the_same_name() -> None:
    """The predecessor's tombstone has come, and a late tick belongs to the time before."""
    given = joined(namespace(), node())
    for topic, take in (
        (NAMESPACES, given.stage.take_namespaces),
        (NODES, given.stage.take_nodes),
    ):
        name = "research" if topic is NAMESPACES else "node-a"
        gone = record(None, topic=topic.name, key=f"default/{name}")
        take([gone._replace(partition=0 if topic is NAMESPACES else 3)])
    assert (
        len(given.stage.cluster_objects.nodes),
        len(given.stage.cluster_objects.namespaces),
    ) == (0, 0)
    later = {"uid": "another", "created_time_ns": T_NS + 8 * SECOND_NS}
    read(given, namespace("9", **later), seconds=9)
    read(given, node("9", **later), seconds=9)
    event = at(given, 1)
    assert (event.node_description, event.namespaces) == (None, None)
    assert at(given, 9).node_description == KNOWN_NODE


def test_a_tombstone_of_another_partition_removes_no_node() -> None:
    given = joined(node())
    gone = record(None, topic=NODES.name, key="default/node-a")
    given.stage.take_nodes([gone._replace(partition=4)])
    assert at(given, 1).node_description == KNOWN_NODE


def test_the_same_name_in_two_clusters_means_two_objects() -> None:
    given = joined(node(), namespace())
    read(given, node(cluster="other", zone="us-east-1a"))
    read(given, namespace(cluster="other", labels={"team": "speech"}))
    given.read_pod(pod(cluster="other"), seen_time_ns=T_NS)
    first, second = at(given, 1), at(given, 1, cluster="other")
    zones = [each.node_description and each.node_description.zone for each in (first, second)]
    assert zones == ["eu-west-1a", "us-east-1a"]
    assert [team_of(first), team_of(second)] == ["vision", "speech"]


VERSIONS: tuple[tuple[float, NodeRecord | NamespaceRecord], ...] = (
    (0, node()),
    (10, node("8", zone="eu-west-1b")),
    (0, namespace()),
    (20, namespace("8", labels={"team": "speech"})),
)


@for_any(order=st.permutations(range(len(VERSIONS))), ticks=st.permutations([5, 15, 25]))
def test_the_order_of_topics_and_ticks_changes_no_event(order: list[int], ticks: list[int]) -> None:
    """Within a topic versions come in their order."""

    def events(numbers: list[int], seconds: list[int]) -> set[bytes]:
        given = Given()
        of_each = {
            kind: [one for one in VERSIONS if isinstance(one[1], kind)]
            for kind in (NodeRecord, NamespaceRecord)
        }
        for number in numbers:
            seen, one = of_each[type(VERSIONS[number][1])].pop(0)
            read(given, one, seconds=seen)
        given.read_pod(pod(), seen_time_ns=T_NS)
        made = [at(given, each, boot_id=f"{each}", seq=1000) for each in seconds]
        return {encode(msgspec.structs.replace(one, gap_ns=None, late=None)) for one in made}

    assert events(order, ticks) == events(list(range(len(VERSIONS))), [5, 15, 25])


@for_any(order=st.permutations(["7", "8", "9"]))
def test_the_newest_version_counts_whatever_the_order(order: list[str]) -> None:
    given = joined(*(namespace(version, labels={"team": version}) for version in order))
    assert team_of(at(given, 1)) == "9"


def test_a_replay_gives_equal_events_and_describes_more_if_it_has_more_records() -> None:
    first, again, more = Given(), Given(), Given()
    for given in (first, again, more):
        given.read_pod(pod(), seen_time_ns=T_NS)
        read(given, namespace())
    read(more, namespace("8", labels={"team": "speech"}), seconds=5)
    read(more, node())
    one, two, three = (encode(at(given, 1)) for given in (first, again, more))
    assert one == two
    assert compare_events(one, three).agreement is Agreement.MORE_COMPLETE
    lost = compare_events(three, one)
    assert lost.agreement is Agreement.DIFFERENT
    assert [change.field for change in lost.changes] == ["node_description"]


def test_a_different_description_of_a_namespace_is_a_difference() -> None:
    first, second = joined(namespace()), joined(namespace(labels={"team": "speech"}))
    compared = compare_events(*(encode(at(given, 1)) for given in (first, second)))
    assert [change.field for change in compared.changes] == ["namespaces.research.labels"]


def test_booked_amounts_do_not_depend_on_the_known_nodes_and_namespaces() -> None:
    known, unknown = at(joined(node(), namespace()), 1), at(joined(), 1)
    assert known.gpus == unknown.gpus
    assert known.pods == unknown.pods


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"value": b"{"}, "undecodable"),
        ({"key": b"default/another"}, "misplaced"),
        ({"value": encode(node())[:-1]}, "undecodable"),
    ],
)
@pytest.mark.parametrize("topic", [NODES, NAMESPACES])
async def test_an_invalid_record_is_rejected_and_changes_nothing(
    topic: Any,  # noqa: ANN401  # a row of the table of topics
    bad: dict[str, bytes],
    reason: str,
) -> None:
    given = joined(node(), namespace())
    one = node("9", zone="z") if topic is NODES else namespace("9", labels={})
    good = record(one, topic=topic.name, key=key_in(one.cluster, one.name))
    take = given.stage.take_nodes if topic is NODES else given.stage.take_namespaces
    take([Record(**(good._asdict() | bad))])
    assert [dead_letter.reason for dead_letter in await given.rejected_records()] == [reason]
    assert at(given, 1).node_description == KNOWN_NODE
    assert team_of(at(given, 2)) == "vision"


def test_a_namespace_with_too_long_annotations_keeps_only_its_labels() -> None:
    before = value_of("gpuledger_join_descriptions_cut_total", what="namespace")
    given = joined(namespace(annotations={"note": "x" * MAX_ANNOTATION_LENGTH}))
    (message,) = at(given, 1).namespaces or []
    assert message == NamespaceDescription(name="research", labels={"team": "vision"})
    assert value_of("gpuledger_join_descriptions_cut_total", what="namespace") == before + 1
    many = {f"label-{number}": "x" * 63 for number in range(256)}
    (message,) = at(joined(namespace(labels=many)), 1).namespaces or []
    assert message == NamespaceDescription(name="research")


def test_the_namespaces_of_one_event_have_a_common_limit() -> None:
    given = Given()
    annotations = {"note": "x" * (MAX_DESCRIPTION_BYTES - 300)}
    count = 1 + MAX_NAMESPACES_BYTES // MAX_DESCRIPTION_BYTES
    containers = [ContainerRef(pod_uid=f"uid-{number}") for number in range(count)]
    for number in range(count):
        name = f"n{number}"
        one = pod(uid=f"uid-{number}", namespace=name, name=name, containers=[])
        given.read_pod(one, seen_time_ns=T_NS)
        read(given, namespace(name=name, annotations=annotations))
    before = value_of("gpuledger_join_descriptions_cut_total", what="namespaces")
    message = at(given, 1, containers=containers).namespaces or []
    assert [each.name for each in message] == [f"n{number}" for number in range(len(message))]
    assert count - 2 <= len(message) < count
    assert sum(len(encode(each)) for each in message) <= MAX_NAMESPACES_BYTES
    assert value_of("gpuledger_join_descriptions_cut_total", what="namespaces") == before + 1


def test_memory_is_bounded_for_an_object_that_changes_all_the_time() -> None:
    places = ClusterObjects()
    for number in range(MAX_PAST_VERSIONS + 50):
        one = namespace(str(100 + number), labels={"team": str(number)})
        seen_ns = T_NS + number * SECOND_NS // 10
        places.namespaces.put(one, partition=0, seen_time_ns=seen_ns)
    assert len(places.namespaces.changes_ns("default/research")) <= 2 * MAX_PAST_VERSIONS + 1


def test_nodes_of_a_revoked_partition_are_forgotten_and_namespaces_are_not() -> None:
    given = joined(node(), namespace())
    read(given, node(name="node-b"), partition=4)
    given.stage.forget(3)
    assert len(given.stage.cluster_objects.nodes) == 1
    assert len(given.stage.cluster_objects.namespaces) == 1


def test_an_event_that_its_descriptions_make_too_large_is_booked_without_them() -> None:
    """Otherwise anyone who labels a namespace could keep a node from being booked."""
    labels = [(f"{number:04d}" + "k" * 300, "v" * 60) for number in range(256)]
    used = [ContainerRef(pod_uid=f"uid-{number}") for number in range(11)]

    def event_of(last: int, *reported: NodeRecord) -> GpuEvent:
        """Return the event of ten pods with all labels and one with the first few."""
        given = joined(*reported)
        for number in range(11):
            mine = dict(labels[: 256 if number < 10 else last])
            one = pod(uid=f"uid-{number}", name=f"p{number}", containers=[], labels=mine)
            given.read_pod(one, seen_time_ns=T_NS)
        return at(given, 1, containers=used)

    bare = event_of(0)
    a_label = len(encode(event_of(1))) - len(encode(bare))
    last = (MAX_MESSAGE_BYTES - 1_000 - len(encode(bare))) // a_label
    before = value_of("gpuledger_join_descriptions_cut_total", what="event")
    reported = event_of(last, node(labels={f"{number}": "x" * 63 for number in range(100)}))
    assert MAX_MESSAGE_BYTES - 2_000 < len(encode(reported)) <= MAX_MESSAGE_BYTES
    assert reported.node_description is None
    assert reported.gpus == bare.gpus
    assert value_of("gpuledger_join_descriptions_cut_total", what="event") == before + 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_recreated_object_is_recognized_by_its_uid_and_not_by_its_version(
    order: tuple[int, int],
) -> None:
    """A rebuilt cluster counts resource versions from 1 again."""
    records = [
        namespace("900001", labels={"team": "a"}, deleted_time_ns=T_NS - 500 * SECOND_NS),
        namespace(
            "120",
            uid="another-uid",
            labels={"team": "b"},
            created_time_ns=T_NS - 400 * SECOND_NS,
        ),
    ]
    event = at(joined(*(records[place] for place in order)), 1)
    assert event.namespaces is not None
    assert [each.labels for each in event.namespaces] == [{"team": "b"}]
