"""`docs/asyncapi.yaml` is valid AsyncAPI 3 and agrees with the topic table."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gpuledger.programs import COMPONENTS
from gpuledger.schemas import schema_of
from gpuledger.topics import Topic, replay_group
from gpuledger_sinks.registry import KINDS
from tests.default_topics import (
    DEAD_LETTERS,
    INVENTORY,
    NAMESPACES,
    NODES,
    PENDING_PODS,
    ROWS,
    TOPICS,
)

ROOT = Path(__file__).parents[2]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "asyncapi.yaml").read_text())
OFFICIAL = ROOT / "tests" / "data" / "asyncapi" / "asyncapi-3.0.0.schema.json"
CHANNELS: dict[str, dict[str, Any]] = {one["address"]: one for one in DOCUMENT["channels"].values()}
OPERATIONS: dict[str, dict[str, Any]] = DOCUMENT["operations"]
# No code of this project reads these topics; people and their programs do.
# Later records describe nodes and namespaces.
FOR_OTHERS = {
    topic.name for topic in (DEAD_LETTERS, INVENTORY, ROWS, PENDING_PODS, NODES, NAMESPACES)
}
GROUP_IN_SOURCE = re.compile(r'^GROUP: Final = "([\w-]+)"', re.MULTILINE)

each_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def references(part: object) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for child in part.values():
            yield from references(child)
    elif isinstance(part, list):
        for child in part:
            yield from references(child)


def resolved(reference: str) -> Any:  # noqa: ANN401 - any part of the document
    file, _, pointer = reference.partition("#")
    found = json.loads((ROOT / "docs" / file).read_text()) if file else DOCUMENT
    for step in filter(None, pointer.split("/")):
        found = found[step]
    return found


def operations_on(topic: Topic, action: str) -> list[dict[str, Any]]:
    return [
        one
        for one in OPERATIONS.values()
        if one["action"] == action and resolved(one["channel"]["$ref"])["address"] == topic.name
    ]


def mistakes_in(document: object) -> list[str]:
    validator = jsonschema.Draft7Validator(json.loads(OFFICIAL.read_text()))
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


def test_the_document_is_valid_by_the_official_schema() -> None:
    assert mistakes_in(DOCUMENT) == []


def test_the_official_schema_rejects_an_invalid_document() -> None:
    channels = DOCUMENT["channels"] | {"samples": {"adress": "a mistake"}}

    assert mistakes_in(DOCUMENT | {"channels": channels}) != []


def test_every_reference_can_be_resolved() -> None:
    assert all(resolved(reference) for reference in references(DOCUMENT))


def test_the_channels_are_the_topics() -> None:
    assert list(CHANNELS) == [topic.name for topic in TOPICS]
    assert len(DOCUMENT["channels"]) == len(CHANNELS)


@each_topic
def test_a_channel_has_the_configuration_of_its_topic(topic: Topic) -> None:
    binding = CHANNELS[topic.name]["bindings"]["kafka"]
    written = {
        name: ",".join(value) if isinstance(value, list) else str(value)
        for name, value in binding["topicConfiguration"].items()
    }

    assert written == topic.config(replication_factor=3)
    assert (binding["topic"], binding["partitions"]) == (topic.name, topic.partitions)


@each_topic
def test_a_channel_has_the_key_and_the_partitioner_of_its_topic(topic: Topic) -> None:
    channel = CHANNELS[topic.name]

    assert (channel["x-key"], channel["x-partitioner"]) == (topic.key, topic.partitioner)


@each_topic
def test_a_channel_carries_only_the_record_of_its_topic(topic: Topic) -> None:
    ((name, message),) = CHANNELS[topic.name]["messages"].items()
    payload = resolved(message["$ref"])["payload"]["$ref"]

    assert name == topic.record.__name__
    assert resolved(payload)["$id"] == schema_of(topic)["$id"]


@each_topic
def test_an_identity_consists_of_fields_of_the_record(topic: Topic) -> None:
    definitions = schema_of(topic)["$defs"]
    message = DOCUMENT["components"]["messages"][topic.record.__name__]
    for path in message["x-identity"]:
        place = definitions[topic.record.__name__]
        for step in path.split("."):
            assert step in place["properties"], path
            field = place["properties"][step]
            place = definitions.get(field.get("$ref", "").rpartition("/")[2], {})


@each_topic
def test_every_topic_has_a_producer_and_every_topic_of_ours_a_consumer(topic: Topic) -> None:
    assert operations_on(topic, "send")
    assert bool(operations_on(topic, "receive")) == (topic.name not in FOR_OTHERS)


def test_every_consumer_names_its_group_and_the_groups_match_the_code() -> None:
    written = {
        group
        for one in OPERATIONS.values()
        if one["action"] == "receive" and not one.get("x-without-group")
        for group in one["bindings"]["kafka"]["groupId"]["enum"]
    }
    sources = [path for folder in ("enricher", "sinks") for path in (ROOT / folder).rglob("*.py")]
    named = {name for path in sources for name in GROUP_IN_SOURCE.findall(path.read_text())}
    named |= {kind.group for kind in KINDS.values()}
    named |= {replay_group(kind.group) for kind in KINDS.values() if kind.takes_replays}

    assert written == named


def test_every_operation_names_a_component_or_the_command() -> None:
    programs = {one["x-component"] for one in OPERATIONS.values()}

    assert programs <= {"gpuledger", *(f"gpuledger {name}" for name in COMPONENTS)}
