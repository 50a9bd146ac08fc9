"""The topic table is consistent, and records go where Kafka's own clients would look for them."""

import re
from dataclasses import replace
from typing import get_type_hints

import pytest
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.partitioner import murmur2 as murmur2_of_aiokafka
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from gpuledger.bus.administration import with_partitions
from gpuledger.records import NodeRecord
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, Topics, murmur2, partition_of_node
from gpuledger_sinks.settings import RowsSettings
from tests.default_topics import BY_NAME, DEAD_LETTERS, PODS, SAMPLES, TOPICS

each_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


# Values of Apache Kafka's own UtilsTest.testMurmur2, as unsigned numbers.
@pytest.mark.parametrize(
    ("data", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_gives_the_values_of_kafkas_own_tests(data: bytes, hashed: int) -> None:
    assert murmur2(data) == hashed & 0xFFFFFFFF


@given(st.binary(max_size=300))
@example(b"")
def test_murmur2_agrees_with_aiokafka(data: bytes) -> None:
    assert murmur2(data) == murmur2_of_aiokafka(data) & 0xFFFFFFFF


@given(node=st.text(), partitions=st.integers(1, 500))
def test_a_nodes_records_go_where_the_default_partitioner_puts_its_name(
    node: str, partitions: int
) -> None:
    everywhere = list(range(partitions))

    expected = DefaultPartitioner()(node.encode(), everywhere, everywhere)

    assert partition_of_node(node, partitions=partitions) == expected


def test_topics_placed_by_node_have_the_same_number_of_partitions() -> None:
    counts = {topic.partitions for topic in TOPICS if topic.is_placed_by_node}

    assert len(counts) == 1


def test_watermarks_have_as_many_partitions_as_the_topics_that_they_describe() -> None:
    chosen = {topic.name: topic.partitions for topic in with_partitions(TOPICS, 48)}

    assert chosen[TOPICS.watermarks.name] == chosen[TOPICS.pods.name] == 48
    assert chosen[TOPICS.events.name] == 48


def test_topic_names_are_unique_and_versioned_and_can_be_looked_up() -> None:
    assert list(BY_NAME) == [topic.name for topic in TOPICS]
    assert len({topic.record for topic in TOPICS}) == len(BY_NAME)
    for name, topic in BY_NAME.items():
        assert name == topic.name
        assert name.startswith("gpuledger.")
        assert name.endswith(".v1")


@each_topic
def test_a_key_consists_of_required_fields_of_the_record_beginning_with_a_text(
    topic: Topic,
) -> None:
    parts = topic.key.split("/")
    for part in parts:
        record = topic.record
        for step in part.split(".")[:-1]:
            record = get_type_hints(record)[step]
        last = part.split(".")[-1]
        (field,) = [field for field in structs.fields(record) if field.name == last]

        assert get_type_hints(record)[last] is str or part != parts[0]
        assert field.required


@each_topic
def test_a_topic_placed_by_node_has_a_node_in_its_record(topic: Topic) -> None:
    hints = get_type_hints(topic.record)
    inner = [hints[name] for name in ("incident", "event") if name in hints]
    named = hints | {name: hint for each in inner for name, hint in get_type_hints(each).items()}

    assert topic.partitioner in ("node", "same", "source", "none")
    is_of_a_node = "node" in named or topic.record is NodeRecord
    assert is_of_a_node == (topic.partitioner == "node")
    assert topic.partitions == 1 or topic.partitioner != "none"


@each_topic
def test_a_topic_that_is_not_compacted_has_an_explicit_retention_time(topic: Topic) -> None:
    config = topic.config(replication_factor=3)

    assert ("retention.ms" in config) == (config["cleanup.policy"] == "delete")
    assert all(isinstance(value, str) for value in config.values())
    assert config["message.timestamp.type"] == "CreateTime"


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, "1"), (2, "1"), (3, "2"), (5, "2")])
def test_a_cluster_can_lose_a_replica_and_still_accept_records(replicas: int, in_sync: str) -> None:
    """With one replica there is none to lose."""
    config = SAMPLES.config(replication_factor=replicas)

    assert config["min.insync.replicas"] == in_sync


def test_every_version_of_a_pod_outlives_the_samples_that_it_describes() -> None:
    config = PODS.config(replication_factor=3)

    assert SAMPLES.retention_ms is not None
    assert config["cleanup.policy"] == "compact"
    assert int(config["min.compaction.lag.ms"]) >= SAMPLES.retention_ms


def test_dead_letters_are_kept_at_least_as_long_as_the_records_of_any_topic() -> None:
    kept = [topic.retention_ms for topic in TOPICS if topic.retention_ms is not None]

    assert DEAD_LETTERS.retention_ms == max(kept)


def test_dead_letters_take_bounded_space_however_many_there_are() -> None:
    config = DEAD_LETTERS.config(replication_factor=3)

    assert int(config["segment.bytes"]) * 4 <= int(config["retention.bytes"]) <= 2**30


# Prefixes that the names of an installation may have.

_LEGAL = re.compile(r"[a-zA-Z0-9._-]{1,249}")
prefixes = st.from_regex(r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,98}[a-zA-Z0-9])?", fullmatch=True)


@given(prefixes)
@example("gpuledger")
@example("a" * 100)
def test_every_name_of_an_installation_begins_with_its_prefix_and_is_legal_for_kafka(
    prefix: str,
) -> None:
    assert KafkaSettings(topic_prefix=prefix).topic_prefix == prefix
    table = Topics(prefix)
    for topic, usual in zip(table, Topics(), strict=True):
        assert _LEGAL.fullmatch(topic.name)
        assert topic.name == prefix + usual.name.removeprefix("gpuledger")
        assert replace(topic, name=usual.name) == usual
    assert table.group("gpuledger-join") == f"{prefix}-join"


@pytest.mark.parametrize(
    "prefix",
    ["", "a b", "ü", ".a", "a.", "-a", "..", "a/b", "a\n", "a" * 101],
)
def test_an_invalid_prefix_is_refused_in_one_line(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"^topic_prefix: .*; use ") as refused:
        KafkaSettings(topic_prefix=prefix)
    assert "\n" not in str(refused.value)


def test_a_consumer_group_with_a_custom_name_is_left_unchanged() -> None:
    assert Topics("blue").group("my-join") == "my-join"
    assert Topics("blue").group("gpuledgers") == "gpuledgers"


def test_the_rows_topic_is_that_of_the_installation_unless_the_settings_name_another() -> None:
    assert RowsSettings().in_installation(Topics("blue")).topic == "blue.rows.v1"
    assert RowsSettings().in_installation(Topics()) == RowsSettings()
    assert RowsSettings(topic="mine").in_installation(Topics("blue")).topic == "mine"
