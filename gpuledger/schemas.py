"""Generates JSON Schemas of the topics' records from the record classes.

`python -m gpuledger.schemas DIRECTORY` writes them. The files are for readers in other languages;
this project validates records when it decodes them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
import orjson

from gpuledger.codegen import class_docstring, field_docstrings, generate
from gpuledger.errors import UserError
from gpuledger.records.base import MAX_VALUE_LENGTH, ArrayRecord, BaseRecord, OpenEnum
from gpuledger.topics import Topic, Topics

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
SUFFIX: Final = ".schema.json"


def schema_of(topic: Topic) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a topic's records."""
    made = msgspec.json.schema(topic.record)
    described = _described(made["$defs"], _classes_in(topic.record))
    return {
        "$schema": DIALECT,
        "$id": f"{topic.name}{SUFFIX}",
        "title": topic.record.__name__,
        "description": class_docstring(topic.record),
        "$ref": made["$ref"],
        "$defs": described,
    }


def write_schemas(directory: Path) -> None:
    """Write one file per topic; raise `UserError` if the directory cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for topic in Topics():
            (directory / f"{topic.name}{SUFFIX}").write_bytes(printed(schema_of(topic)))
    except OSError as error:
        raise UserError(f"cannot write schemas to {directory}: {error.strerror}") from error


def printed(schema: Mapping[str, Any]) -> bytes:
    """Return the content of a schema's file."""
    return orjson.dumps(schema, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def _described(made: Mapping[str, Any], classes: Mapping[str, type]) -> dict[str, Any]:
    """Return the definitions with docstrings, and without `null` in optional fields."""
    definitions: dict[str, Any] = {}
    for name, definition in made.items():
        cls = classes[name]
        titled = {"title": definition["title"], "description": class_docstring(cls)}
        definitions[name] = titled | definition
        if issubclass(cls, OpenEnum):
            # Readers must accept other values; the examples are the values of this version.
            known = definitions[name].pop("enum")
            definitions[name] |= {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_VALUE_LENGTH,
                "examples": known,
            }
        if not issubclass(cls, BaseRecord):
            continue
        definitions[name]["description"] = titled["description"]  # msgspec's own has line breaks
        meanings = field_docstrings(cls)
        if issubclass(cls, ArrayRecord):
            # Positions have no names, so the field's name becomes the title.
            positions = zip(meanings.items(), definition["prefixItems"], strict=True)
            definitions[name]["prefixItems"] = [
                {"title": field, "description": meaning}
                | {key: value for key, value in schema.items() if key != "default"}
                for (field, meaning), schema in positions
            ]
            continue
        required = {field.name for field in msgspec.structs.fields(cls) if field.required}
        properties = definition["properties"]
        definitions[name]["properties"] = {
            field: (properties[field] if field in required else _without_null(properties[field]))
            | {"description": meaning}
            for field, meaning in meanings.items()
        }
    return definitions


def _without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optional field's schema without `null`, because an unknown field is absent."""
    (present,) = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
    return dict(present)


def _classes_in(hint: Any) -> dict[str, type]:  # noqa: ANN401  # any type annotation
    """Return the records and enumerations within a type, by name."""
    is_class = isinstance(hint, type)
    is_record = is_class and issubclass(hint, BaseRecord)
    inner = get_type_hints(hint).values() if is_record else get_args(hint)
    found = {hint.__name__: hint} if is_class else {}
    for part in inner:
        found |= _classes_in(part)
    return found


if __name__ == "__main__":
    sys.exit(generate(write_schemas, into="docs/schemas"))
