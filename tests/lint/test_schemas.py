"""The committed JSON Schemas match the records and describe every field."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuledger.schemas import SUFFIX, printed, schema_of, write_schemas
from gpuledger.topics import Topic
from tests.default_topics import TOPICS

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
each_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def properties_of(topic: Topic) -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    for name, definition in schema_of(topic)["$defs"].items():
        for field, schema in definition.get("properties", {}).items():
            yield name, field, schema, field in definition["required"]


@each_topic
def test_the_committed_schema_is_the_generated_one(topic: Topic) -> None:
    committed = (SCHEMAS / f"{topic.name}{SUFFIX}").read_bytes()

    assert committed == printed(schema_of(topic)), "run `make schemas`"


def test_no_schema_is_left_for_a_topic_that_no_longer_exists(tmp_path: Path) -> None:
    write_schemas(tmp_path)

    assert {path.name for path in SCHEMAS.iterdir()} == {path.name for path in tmp_path.iterdir()}


@each_topic
def test_a_schema_is_valid_and_has_its_own_id(topic: Topic) -> None:
    schema = schema_of(topic)

    jsonschema.Draft202012Validator.check_schema(schema)
    assert (schema["$id"], schema["title"]) == (f"{topic.name}{SUFFIX}", topic.record.__name__)


@each_topic
def test_every_record_and_every_field_is_described(topic: Topic) -> None:
    definitions = schema_of(topic)["$defs"]

    assert [name for name, one in definitions.items() if not one["description"]] == []
    assert [(n, f) for n, f, schema, _ in properties_of(topic) if not schema["description"]] == []


@each_topic
def test_an_optional_field_has_its_plain_type_and_no_null(topic: Topic) -> None:
    for name, field, schema, _ in properties_of(topic):
        assert "null" not in str(schema.get("type")), (name, field)
        assert not {"anyOf", "default"} & set(schema), (name, field)


@each_topic
def test_no_schema_forbids_future_fields(topic: Topic) -> None:
    definitions = schema_of(topic)["$defs"].values()

    assert all(one.get("additionalProperties", True) for one in definitions)


def test_the_command_writes_a_file_for_each_topic(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "gpuledger.schemas", str(tmp_path / "new")], check=True)

    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {f"{topic.name}{SUFFIX}" for topic in TOPICS}


def test_a_directory_that_cannot_be_written_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = subprocess.run(
        [sys.executable, "-m", "gpuledger.schemas", str(tmp_path / "file" / "x")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 2
    assert ended.stderr == f"cannot write schemas to {tmp_path}/file/x: Not a directory\n"
