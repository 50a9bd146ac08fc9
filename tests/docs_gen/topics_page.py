"""Writes the tables of docs/reference/topics.md: the topics, and the fields of their records.

Topics, permissions and JSON Schemas have the content; this module only prints them.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from gpuledger.rights import KAFKA_USERS, USES
from gpuledger.schemas import schema_of
from gpuledger.topics import Topic, Topics
from tests.docs_gen.markdown import code, put_between_marks, table

_TOPICS: Final = ("topic", "record", "written by", "read by", "key", "partitions", "retention")
_FIELDS: Final = ("field", "type", "absent", "meaning")
_POSITIONS: Final = ("position", "field", "type", "null", "meaning")
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_PLACES: Final = {
    "node": "by node",
    "same": "like the topic that the record is about",
    "source": "number of the rejected record's partition, modulo",
    "none": "",
}
_Definition = Mapping[str, Any]


def topics_page(standing: str) -> str:
    """Return the page with new tables; raises `UserError` if the tables' marks are missing."""
    page = put_between_marks(standing, "topics", table(_TOPICS, map(_row_of, Topics())))
    return put_between_marks(page, "records", _records())


def _row_of(topic: Topic) -> tuple[str, ...]:
    (use,) = [use for use in USES if getattr(Topics(), use.topic).name == topic.name]
    place = _PLACES[topic.partitioner]
    return (
        code(topic.name),
        _link(topic.record.__name__),
        _shown(use.writers),
        _shown(use.readers),
        code(topic.key),
        f"{topic.partitions}, {place}" if place else str(topic.partitions),
        _retention_of(topic),
    )


def _shown(users: Iterable[str]) -> str:
    names = {one.name: one.shown or one.name for one in KAFKA_USERS}
    return ", ".join(names[user] for user in users)


def _retention_of(topic: Topic) -> str:
    """Return how long records are kept, in words."""
    if topic.retention_ms is None:
        lag = int(topic.extra.get("min.compaction.lag.ms", 0)) // _HOUR_MS
        return f"compacted after {lag} h" if lag else "compacted"
    days, hours = divmod(topic.retention_ms // _HOUR_MS, _DAY_MS // _HOUR_MS)
    age = f"{hours} h" if not days else f"{days} day{'s' if days > 1 else ''}"
    size = topic.extra.get("retention.bytes")
    return f"{age}, {int(size) // 2**30} GiB" if size else age


def _records() -> Iterator[str]:
    """Yield a section for each topic's record, and one for each record within it."""
    described = set[str]()
    for topic in Topics():
        schema = schema_of(topic)
        for name, definition in schema["$defs"].items():
            if name in described:
                continue
            described.add(name)
            is_own = name == topic.record.__name__
            yield from (f"{'###' if is_own else '####'} {name}", "")
            if is_own:
                yield from (f"Topic {code(topic.name)}.", "")
            yield from (definition["description"], "")
            yield from _body_of(definition)


def _body_of(definition: _Definition) -> Iterator[str]:
    if "properties" in definition:
        required = definition["required"]
        rows = (
            (
                code(field),
                _type_of(value),
                "" if field in required else "yes",
                value["description"],
            )
            for field, value in definition["properties"].items()
        )
        yield from (*table(_FIELDS, rows), "")
    elif "prefixItems" in definition:
        positions = (
            (
                str(position),
                code(value["title"]),
                _type_of(value),
                "yes" if _NULL in value.get("anyOf", ()) else "",
                value["description"],
            )
            for position, value in enumerate(definition["prefixItems"])
        )
        yield from (*table(_POSITIONS, positions), "")
    else:
        yield from (f"Values: {', '.join(map(code, definition['examples']))}.", "")


_NULL: Final = {"type": "null"}


def _type_of(value: _Definition) -> str:
    """Return the type of a field in words, with links to other records."""
    if "anyOf" in value:
        return " or ".join(_type_of(choice) for choice in value["anyOf"] if choice != _NULL)
    if "$ref" in value:
        return _link(value["$ref"].rpartition("/")[2])
    if value["type"] == "array":
        return f"list of {_type_of(value['items'])}"
    if value["type"] == "object":
        return f"object of {_type_of(value['additionalProperties'])}"
    kind: str = value["type"]
    return kind


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"
