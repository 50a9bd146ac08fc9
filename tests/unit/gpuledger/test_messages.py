"""Golden messages: old records stay decodable and mean the same to every reader.

A golden message is never changed. A new optional field gets a message with the next number.
"""

import json
from collections.abc import Iterator
from functools import reduce
from itertools import zip_longest
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from gpuledger.codec import Decoder, encode, validate
from gpuledger.errors import UndecodableError
from gpuledger.records.base import ArrayRecord, BaseRecord
from gpuledger.schemas import schema_of
from gpuledger.topics import Topic
from tests.default_topics import BY_NAME, TOPICS
from tests.examples import examples
from tests.tables import for_each
from tests.unit.gpuledger.strategies import records
from tests.unit.record_fields import present_in

ROOT = Path(__file__).parents[3]
MESSAGES = sorted((ROOT / "tests" / "data" / "messages").glob("*/*.json"))
SPARE = {"a_field_of_tomorrow": {"deep": [None, 1]}}

each_message = for_each("message", MESSAGES)
each_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)


def read(message: Path) -> tuple[Topic, Any]:
    return BY_NAME[message.parent.name], json.loads(message.read_text())


def decoder(topic: Topic) -> Decoder[Any]:
    return Decoder(topic=topic.name, record=topic.record)


def objects_in(value: object) -> Iterator[dict[str, object]]:
    """Yield the JSON objects within a value."""
    if isinstance(value, dict):
        yield value
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list):
        for child in children:  # type: ignore[attr-defined]  # a dict's values or a list
            yield from objects_in(child)


def records_in(value: object) -> Iterator[Any]:
    """Yield the records within a record, including itself."""
    if isinstance(value, BaseRecord):
        yield value
        for child in present_in(value).values():
            yield from records_in(child)
    if isinstance(value, list | dict):
        for child in value.values() if isinstance(value, dict) else value:
            yield from records_in(child)


def classes_in(hint: Any) -> Iterator[type[BaseRecord]]:  # noqa: ANN401 - any type annotation
    """Yield the classes of the records within a type, including itself."""
    if isinstance(hint, type) and issubclass(hint, BaseRecord):
        yield hint
        hints: Any = get_type_hints(hint).values()
    else:
        hints = get_args(hint)
    for part in hints:
        yield from classes_in(part)


def without_absence(hint: Any) -> Any:  # noqa: ANN401 - any type annotation
    return next((part for part in get_args(hint) if hint == part | None), hint)


def with_spare_fields(hint: Any, value: Any) -> Any:  # noqa: ANN401 - any type annotation and JSON value
    """Add an unknown field to each record: a new key, or a position after the last one."""
    present = without_absence(hint)
    if value is None or not list(classes_in(present)):
        return value
    if get_origin(present) is list:
        return [with_spare_fields(get_args(present)[0], part) for part in value]
    if get_origin(present) is dict:
        return {k: with_spare_fields(get_args(present)[1], part) for k, part in value.items()}
    hints = get_type_hints(present)
    if issubclass(present, ArrayRecord):
        places = zip_longest(hints.values(), value)
        return [*(with_spare_fields(*place) for place in places), SPARE]
    return {k: with_spare_fields(hints[k], v) for k, v in value.items()} | SPARE


def with_places_of_today(hint: Any, value: Any) -> Any:  # noqa: ANN401 - as above
    """Put null in positions that were added to array records since."""
    present = without_absence(hint)
    if value is None or not list(classes_in(present)):
        return value
    if get_origin(present) is list:
        return [with_places_of_today(get_args(present)[0], part) for part in value]
    if get_origin(present) is dict:
        return {k: with_places_of_today(get_args(present)[1], part) for k, part in value.items()}
    hints = get_type_hints(present)
    if issubclass(present, ArrayRecord):
        return [with_places_of_today(*place) for place in zip_longest(hints.values(), value)]
    return {k: with_places_of_today(hints[k], v) for k, v in value.items()}


def first_version(hint: Any) -> Any:  # noqa: ANN401 - as above
    """Return a type as before any optional field was added to its records."""
    if isinstance(hint, type) and issubclass(hint, BaseRecord):
        hints = get_type_hints(hint, include_extras=True)
        required = [field.name for field in structs.fields(hint) if field.required]
        # Positions up to the last required one have always existed.
        kept = [*hints][: [*hints].index(required[-1]) + 1] if required else []
        shown = kept if issubclass(hint, ArrayRecord) else required
        return msgspec.defstruct(
            hint.__name__,
            [
                (name, first_version(hints[name]), *(() if name in required else (None,)))
                for name in shown
            ],
            bases=(ArrayRecord if issubclass(hint, ArrayRecord) else BaseRecord,),
            frozen=True,
            kw_only=True,
        )
    if not (parts := get_args(hint)):
        return hint
    if get_origin(hint) is Annotated:
        return Annotated[(first_version(parts[0]), *parts[1:])]
    inner = tuple(first_version(part) for part in parts)
    return reduce(or_, inner) if get_origin(hint) is UnionType else get_origin(hint)[inner]


def agrees(old: Any, new: Any) -> bool:  # noqa: ANN401 - any part of two records
    """Return whether the newer record has the older one's values in all fields of the older."""
    if isinstance(old, BaseRecord):
        return all(agrees(value, getattr(new, name)) for name, value in structs.asdict(old).items())
    if isinstance(old, list):
        return len(old) == len(new) and all(map(agrees, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(agrees(old[key], new[key]) for key in old)
    return bool(old == new)


@each_topic
def test_every_topic_has_a_full_and_a_minimal_message(topic: Topic) -> None:
    names = [path.name for path in MESSAGES if path.parent.name == topic.name]

    assert {"1.json", "2.json"} <= set(names)


@each_topic
def test_the_messages_of_a_topic_together_have_every_field_of_its_record(topic: Topic) -> None:
    """Also every field of each nested record, because no other message has it.

    A record that has a topic of its own has its messages there.
    """
    messages = [path for path in MESSAGES if path.parent.name == topic.name]
    written = {
        (type(one), name)
        for path in messages
        for one in records_in(decoder(topic).decode(path.read_bytes()))
        for name in present_in(one)
    }
    inner = {cls for cls in classes_in(topic.record) if cls in {each.record for each in TOPICS}}
    elsewhere = {cls for each in inner - {topic.record} for cls in classes_in(each)}
    known = {
        (cls, name)
        for cls in set(classes_in(topic.record)) - elsewhere
        for name in cls.__struct_fields__
    }

    assert known - written == set()


@each_topic
def test_the_second_message_of_a_topic_has_no_optional_field(topic: Topic) -> None:
    _, second = read(ROOT / "tests" / "data" / "messages" / topic.name / "2.json")
    required = {field.name for field in structs.fields(topic.record) if field.required}

    assert set(second) == required


@each_message
def test_a_golden_message_decodes_and_encodes_to_the_same_json(message: Path) -> None:
    topic, written = read(message)

    record = decoder(topic).decode(message.read_bytes())

    assert isinstance(record, topic.record)
    assert json.loads(encode(record)) == with_places_of_today(topic.record, written)
    assert decoder(topic).decode(encode(record)) == record


@each_message
def test_a_golden_message_is_valid_by_its_json_schema(message: Path) -> None:
    topic, written = read(message)

    assert list(jsonschema.Draft202012Validator(schema_of(topic)).iter_errors(written)) == []


@each_message
def test_unknown_fields_are_ignored_at_any_depth(message: Path) -> None:
    topic, written = read(message)
    grown = json.dumps(with_spare_fields(topic.record, written)).encode()

    assert decoder(topic).decode(grown) == decoder(topic).decode(message.read_bytes())
    jsonschema.Draft202012Validator(schema_of(topic)).validate(json.loads(grown))


@each_message
def test_an_older_and_a_newer_version_read_each_others_messages(message: Path) -> None:
    """The older version is the first one, without any optional field."""
    topic, _ = read(message)
    older = Decoder(topic=topic.name, record=first_version(topic.record))

    new = decoder(topic).decode(message.read_bytes())
    old = older.decode(message.read_bytes())

    assert agrees(old, new)
    assert agrees(old, decoder(topic).decode(encode(old)))


@each_message
def test_each_missing_field_and_each_field_of_a_wrong_type_is_named(message: Path) -> None:
    topic, written = read(message)
    required = {field.name for field in structs.fields(topic.record) if field.required}
    for name, value in written.items():
        wrong = "wrong" if isinstance(value, bool) else True
        with pytest.raises(UndecodableError, match=f"^{topic.name}: field {name}.*; value "):
            decoder(topic).decode(json.dumps(written | {name: wrong}).encode())
    for name in required:
        rest = {key: value for key, value in written.items() if key != name}
        with pytest.raises(UndecodableError, match=f"^{topic.name}: field {name}: missing; value "):
            decoder(topic).decode(json.dumps(rest).encode())


@each_topic
@examples(10)
@given(data=st.data())
def test_any_record_is_valid_for_both_its_decoder_and_the_json_schema(
    topic: Topic, data: st.DataObject
) -> None:
    record = data.draw(records(topic.record))
    encoded = encode(record)

    validate(record)
    assert decoder(topic).decode(encoded) == record
    assert not [one for one in objects_in(json.loads(encoded)) if None in one.values()]
    jsonschema.Draft202012Validator(schema_of(topic)).validate(json.loads(encoded))
