"""k8s/chart/values.schema.json: its definitions of settings and prices, from their classes.

Descriptions of values are the comments of values.yaml. The rest of the file is written by hand.
`python -m tests.docs_gen.chart_schema` writes the file; `make schemas` runs it.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from gpuledger.settings.explain_command import SETTINGS_CLASSES
from gpuledger.settings.secret import Secret
from gpuledger.settings.sources import FILE_SUFFIX, alternatives, is_group
from gpuledger_reports.pricing.policy import BillPolicy
from tests.docs_gen.chart_values_page import VALUES, description_of, entries

SCHEMA: Final = Path(__file__).parents[2] / "k8s" / "chart" / "values.schema.json"
COMPONENTS: Final = ("agent", "podwatch", "join", "sink", "reports")
_MAX_WIDTH: Final = 120
_TEXT: Final = {"type": "string"}
_DECIMAL: Final = {"$ref": "#/definitions/decimal"}
"""Numbers of price files, which may be texts."""
_NULL: Final = {"type": "null"}
_OMITTED: Final = frozenset({"title", "description", "default"})
_Schema = dict[str, Any]


def chart_schema(present: str) -> str:
    """Return the file with new definitions; those written by hand begin with a small letter."""
    schema = json.loads(present)
    made: dict[str, _Schema] = {}
    for component in COMPONENTS:
        module, name = SETTINGS_CLASSES[component]
        _define(getattr(import_module(module), name), made)
    _schema_of(BillPolicy, made)
    by_hand = {name: each for name, each in schema["definitions"].items() if name[0].islower()}
    schema["definitions"] = by_hand | dict(sorted(made.items()))
    values = VALUES.read_text(encoding="utf-8")
    _describe(schema, yaml.compose(values), lines=values.splitlines(), by_hand=by_hand)
    return "\n".join([*_lines(schema), ""])


def _describe(
    schema: _Schema, values: yaml.Node | None, *, lines: list[str], by_hand: dict[str, _Schema]
) -> None:
    """Add the comments of values to their properties, except within generated definitions."""
    for key, value in entries(values):
        if key.value not in schema.get("properties", {}):
            continue
        described = schema["properties"][key.value]
        described.pop("description", None)
        if description := description_of(lines, key):
            described["description"] = description
        _, _, name = described.get("$ref", "").rpartition("/")
        inner = by_hand.get(name, {}) if name else described
        _describe(inner, value, lines=lines, by_hand=by_hand)


def _define(group: type[msgspec.Struct], made: dict[str, _Schema]) -> _Schema:
    """Add the definition of a group of settings, and return a reference to it."""
    fields: dict[str, _Schema] = {}
    for field in msgspec.structs.fields(group):
        if is_group(field.type):
            fields[field.name] = _define(field.type, made)
            continue
        hint = field.type | None if field.default == "" else field.type
        fields[field.name] = _schema_of(hint, made)
        if Secret in alternatives(field.type):
            fields[f"{field.name}{FILE_SUFFIX}"] = _TEXT
    # Null is the same as an absent group. No setting is required, because variables may set it.
    made[group.__name__] = {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": fields,
    }
    return {"$ref": f"#/definitions/{group.__name__}"}


def _schema_of(hint: Any, made: dict[str, _Schema]) -> _Schema:  # noqa: ANN401  # any annotation
    """Return the schema of a type's values, and add the definitions that it refers to."""
    (schema,), definitions = msgspec.json.schema_components(
        [hint],
        schema_hook=lambda _: _TEXT,  # paths and secrets
        ref_template="#/definitions/{name}",
    )
    made |= {name: _plain(each) for name, each in definitions.items()}
    return dict(_plain(schema))


def _plain(schema: Any) -> Any:  # noqa: ANN401  # any part of a schema
    """Return a schema without texts and defaults, which the reference has, in a short form."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "decimal":
        return _DECIMAL
    choices = _plain(schema.get("anyOf", []))
    if len(choices) == 2 and choices[1] == _NULL and "type" in choices[0]:
        kinds = choices[0]["type"]
        return choices[0] | {"type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
    properties = {name: _plain(each) for name, each in schema.get("properties", {}).items()}
    kept = {key: _plain(each) for key, each in schema.items() if key not in _OMITTED and each != []}
    return kept | {"properties": properties} if properties else kept


def _lines(
    value: Any,  # noqa: ANN401  # any JSON
    *,
    key: str = "",
    end: str = "",
    indent: str = "",
) -> Iterator[str]:
    """Yield the lines of a JSON text. A part is on one line if it fits, but the whole never is."""
    line = f"{indent}{key}{json.dumps(value)}{end}"
    if not isinstance(value, dict | list) or (indent and len(line) <= _MAX_WIDTH):
        yield line
        return
    is_object = isinstance(value, dict)
    inner = [(f"{json.dumps(each)}: ", value[each]) if is_object else ("", each) for each in value]
    yield f"{indent}{key}{'{' if is_object else '['}"
    for left, (name, each) in enumerate(inner, start=1 - len(inner)):
        yield from _lines(each, key=name, end="," if left else "", indent=f"{indent}  ")
    yield f"{indent}{'}' if is_object else ']'}{end}"


if __name__ == "__main__":
    SCHEMA.write_text(chart_schema(SCHEMA.read_text()))
