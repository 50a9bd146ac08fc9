"""The golden messages: what was once written decodes for ever, and reads the same everywhere.

A golden message is never changed. A new optional field gets a message with the next number; one
that has left its record is named in `GONE`, and read by nobody.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.schemas import schema_of
from gpuledger.topics import BY_NAME, TOPICS, Topic
from gpuledger.twins import encode_twin, twin_of
from tests.unit.gpuledger.strategies import records

ROOT = Path(__file__).parents[3]
MESSAGES = sorted((ROOT / "tests" / "data" / "messages").glob("*/*.json"))
GONE_FROM_READINGS = (
    "encoder_utilization_ratio", "decoder_utilization_ratio", "power_instant_watts",
    "memory_temperature_celsius", "performance_state", "profiling", "traffic", "throttling",
    "health", "limits", "resets",
)  # fmt: skip
GONE = {
    "gpuledger.samples.v1": {
        "processes.memory_utilization_ratio",
        *(f"gpus.{name}" for name in GONE_FROM_READINGS),
    },
    "gpuledger.events.v1": {
        "gpus.entries.sm_active_seconds",
        "gpus.entries.tensor_active_seconds",
        "gpus.entries.dram_active_seconds",
        *(f"gpus.reading.{name}" for name in GONE_FROM_READINGS),
    },
}
"""By topic, the paths of fields that were written once; places in lists are not in them."""
SPARE = {"a_field_of_tomorrow": {"deep": [None, 1]}}

each_message = pytest.mark.parametrize(
    "message", MESSAGES, ids=lambda path: f"{path.parent.name}/{path.stem}"
)
each_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def read(message: Path) -> tuple[Topic, Any]:
    return BY_NAME[message.parent.name], json.loads(message.read_text())


def decoder(topic: Topic) -> Decoder[Any]:
    return Decoder(topic=topic.name, record=topic.record)


def twin_decoder(topic: Topic) -> Decoder[Any]:
    return Decoder(topic=topic.name, record=twin_of(topic.record))


def without(value: Any, gone: Collection[str], path: str = "") -> Any:  # noqa: ANN401 - any JSON value
    """Leave out the fields at these paths."""
    if isinstance(value, list):
        return [without(part, gone, path) for part in value]
    if not isinstance(value, dict):
        return value
    paths = {key: f"{path}.{key}".lstrip(".") for key in value}
    return {k: without(v, gone, paths[k]) for k, v in value.items() if paths[k] not in gone}


def parts_of(value: object) -> Iterator[object]:
    yield value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for child in children:  # type: ignore[attr-defined]  # a dict's values or a list
            yield from parts_of(child)


def with_spare_fields(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Put an unknown field into each object that has fields (and leave mappings alone)."""
    if isinstance(value, list):
        return [with_spare_fields(part) for part in value]
    if not isinstance(value, dict):
        return value
    mappings = (
        "labels", "annotations", "container_names", "gpus_requested", "nvlink_peers",
        "nvlink_link_sent_bytes_totals", "nvlink_link_received_bytes_totals",
    )  # fmt: skip
    grown = {k: v if k in mappings else with_spare_fields(v) for k, v in value.items()}
    return grown | SPARE


@each_topic
def test_every_topic_has_a_full_and_a_minimal_message(topic: Topic) -> None:
    names = [path.name for path in MESSAGES if path.parent.name == topic.name]

    assert {"1.json", "2.json"} <= set(names)


@each_topic
def test_the_messages_of_a_topic_have_every_field_of_its_record_between_them(topic: Topic) -> None:
    """Of each record inside it too: else no message would hold it. A new field has a new one."""
    messages = [read(path)[1] for path in MESSAGES if path.parent.name == topic.name]
    written = {key for part in parts_of(messages) if isinstance(part, dict) for key in part}
    definitions = schema_of(topic)["$defs"].values()

    known = {name for definition in definitions for name in definition.get("properties", {})}
    assert known - written == set()


@each_topic
def test_the_second_message_of_a_topic_has_no_optional_field(topic: Topic) -> None:
    _, second = read(ROOT / "tests" / "data" / "messages" / topic.name / "2.json")
    required = {
        f.name for f in dataclasses.fields(topic.record) if f.default is dataclasses.MISSING
    }

    assert set(second) == required


@each_message
def test_a_golden_message_decodes_and_encodes_to_the_same_json_less_what_is_gone(
    message: Path,
) -> None:
    topic, written = read(message)

    record = decoder(topic).decode(message.read_bytes())

    assert isinstance(record, topic.record)
    assert json.loads(encode(record)) == without(written, GONE.get(topic.name, ()))
    assert decoder(topic).decode(encode(record)) == record


@pytest.mark.parametrize("name", GONE)
def test_what_is_gone_was_written_once_and_is_in_the_record_no_more(name: str) -> None:
    messages = [(path, read(path)[1]) for path in MESSAGES if path.parent.name == name]
    for path in GONE[name]:
        holds = [file for file, written in messages if without(written, {path}) != written]
        assert holds, path
        encoded = [json.loads(encode(decoder(BY_NAME[name]).decode(f.read_bytes()))) for f in holds]
        assert without(encoded, {path}) == encoded, path


@each_message
def test_a_golden_message_is_valid_by_its_json_schema(message: Path) -> None:
    topic, written = read(message)

    jsonschema.Draft202012Validator(schema_of(topic)).validate(written)


@each_message
def test_unknown_fields_are_ignored_wherever_they_stand(message: Path) -> None:
    topic, written = read(message)
    grown = json.dumps(with_spare_fields(written)).encode()

    assert decoder(topic).decode(grown) == decoder(topic).decode(message.read_bytes())
    jsonschema.Draft202012Validator(schema_of(topic)).validate(json.loads(grown))


@each_message
def test_a_twin_writes_the_same_bytes_as_the_record(message: Path) -> None:
    topic, _ = read(message)
    twin = twin_decoder(topic).decode(message.read_bytes())

    assert encode_twin(twin) == encode(decoder(topic).decode(message.read_bytes()))


@each_message
def test_each_field_that_is_missing_or_of_a_wrong_type_is_named(message: Path) -> None:
    topic, written = read(message)
    required = {
        f.name for f in dataclasses.fields(topic.record) if f.default is dataclasses.MISSING
    }
    for name, value in written.items():
        wrong = "wrong" if isinstance(value, bool) else True
        with pytest.raises(UndecodableError, match=f"^{topic.name}: field {name}.*; value "):
            decoder(topic).decode(json.dumps(written | {name: wrong}).encode())
    for name in required:
        rest = {key: value for key, value in written.items() if key != name}
        with pytest.raises(UndecodableError, match=f"^{topic.name}: field {name}: missing; value "):
            decoder(topic).decode(json.dumps(rest).encode())


@each_topic
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_record_reads_the_same_for_records_twins_and_the_json_schema(
    topic: Topic, data: st.DataObject
) -> None:
    record = data.draw(records(topic.record))
    encoded = encode(record)
    twin = twin_decoder(topic).decode(encoded)

    assert decoder(topic).decode(encoded) == record
    assert decoder(topic).decode(encode_twin(twin)) == record
    assert None not in parts_of(json.loads(encoded))
    jsonschema.Draft202012Validator(schema_of(topic)).validate(json.loads(encoded))
