"""The table of permissions names only existing things, and the generated ACLs match it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gpuledger.rights import KAFKA_USERS, USES, grants, strimzi_manifests
from gpuledger.topics import Topics
from gpuledger_cli.__main__ import main
from gpuledger_enricher.join.join_settings import GROUP
from gpuledger_sinks.registry import KINDS, SinkKind
from gpuledger_sinks.store.dimensions import DIMENSIONS
from tests.default_topics import EVENTS, TOPICS

OPERATIONS = {"Read", "Write", "Create", "Describe", "DescribeConfigs"}


def test_each_topic_has_a_row_and_each_row_names_existing_components() -> None:
    assert [getattr(Topics(), use.topic).name for use in USES] == [one.name for one in TOPICS]
    names = {who.name for who in KAFKA_USERS}
    for use in USES:
        assert use.writers
        assert {*use.writers, *use.readers} <= names


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_sink_has_its_own_group_and_reads_its_own_topics(kind: SinkKind) -> None:
    who = next(each for each in KAFKA_USERS if each.name == f"sink {kind.name}")
    found = list(grants(who, Topics()))
    reads = {each.name for each in found if each.resource == "topic" and "Read" in each.operations}
    assert who.group == kind.group
    further = {Topics().watermarks.name} if kind.relays_watermarks else set()
    of_kind = {
        "store": {dimension.topic_of(Topics()).name for dimension in DIMENSIONS},
        "remote_write": {Topics().counters.name},
    }
    further |= of_kind.get(kind.name, set())
    further |= {Topics().replay.name} if kind.takes_replays else set()
    assert reads == {topic.name for topic in kind.topics(Topics())} | further


def test_the_join_has_its_own_group() -> None:
    by_name = {who.name: who for who in KAFKA_USERS}
    assert by_name["join"].group == GROUP


def test_all_names_of_an_installation_begin_with_its_prefix() -> None:
    for who in KAFKA_USERS:
        for grant in grants(who, Topics("blue")):
            assert grant.name.startswith(("blue.", "blue-"))
            assert set(grant.operations) <= OPERATIONS


def test_the_command_prints_topics_and_users_for_strimzi(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULEDGER_KAFKA__TOPIC_PREFIX", "Blue_Team")
    assert main(["topics", "export", "--format=strimzi", "--cluster=main", "--partitions=24"]) == 0
    found = list(yaml.safe_load_all(capsys.readouterr().out))
    topics = Topics("Blue_Team")
    assert found == list(strimzi_manifests(topics, cluster="main", partitions=24))
    assert len(found) == len(topics) + len(KAFKA_USERS)
    by_name = {each["metadata"]["name"]: each for each in found}
    assert by_name["blue-team.samples.v1"]["spec"]["topicName"] == "Blue_Team.samples.v1"
    assert by_name["blue-team.samples.v1"]["spec"]["partitions"] == 24
    assert by_name["blue-team.dead-letters.v1"]["spec"]["partitions"] == 1
    acls = by_name["blue-team-sink-rows"]["spec"]["authorization"]["acls"]
    assert {
        "resource": {
            "type": "transactionalId",
            "name": "Blue_Team-rows-",
            "patternType": "prefix",
        },
        "operations": ["Write"],
    } in acls


def test_the_command_prints_a_command_for_each_acl(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULEDGER_KAFKA__TOPIC_PREFIX", "blue")
    monkeypatch.setenv("GPULEDGER_KAFKA__BOOTSTRAP_SERVERS", "kafka:9092")
    assert main(["topics", "export", "--format", "acls"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert len(lines) == sum(1 for who in KAFKA_USERS for _ in grants(who, Topics("blue")))
    assert (
        "kafka-acls.sh --bootstrap-server kafka:9092 --add --allow-principal User:blue-sink-rows"
        " --operation Write --transactional-id blue-rows- --resource-pattern-type prefixed"
    ) in lines


def test_a_topic_for_strimzi_has_the_configuration_of_the_table() -> None:
    objects: Any = list(strimzi_manifests(Topics(), cluster="main", replicas=3))
    events = next(each for each in objects if each["metadata"]["name"] == EVENTS.name)
    assert events["metadata"]["labels"]["strimzi.io/cluster"] == "main"
    assert events["spec"] == {
        "partitions": EVENTS.partitions,
        "replicas": 3,
        "config": EVENTS.config(replication_factor=3),
    }
