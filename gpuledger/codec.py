"""Converts records to bytes and back, and explains why bytes are not a valid record.

This module encodes and decodes records, and validates records before they are written. Unknown
fields are ignored, so that old readers can read the records of new writers. Errors name the field
and its value; for a record that is written as an array, msgspec reports a position, which is
converted back to the field's name. `gpuledger.dead_letter_queue` decides what happens to a bad
record.
"""

import re
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Generic, TypeVar, Union, get_args, get_origin

import msgspec
import orjson

from gpuledger.errors import UndecodableError
from gpuledger.texts import find_near, shorten

T = TypeVar("T")
# RecursionError: thousands of brackets, even in an unused field, must not stop a component.
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)
# Types that `to_builtins` must leave unchanged: converted to texts, they would look valid.
_NOT_IN_JSON: Final = (bytes, bytearray, memoryview)

encode: Final = msgspec.json.Encoder().encode
"""Encode a record as JSON. Absent fields are omitted; in records that are encoded as arrays, they
are `null`."""


def validate(record: object) -> None:
    """Raise `msgspec.ValidationError`, which names the field, if a field's value is invalid.

    Components that write data from other sources call this function; it costs about as much as
    decoding. msgspec does not check values when it constructs a Struct, and `convert` returns
    objects of the right class unchanged, so the record is first converted to built-in types.
    """
    try:
        parts = msgspec.to_builtins(record, builtin_types=_NOT_IN_JSON)
    except TypeError as error:  # a value of a class that msgspec does not support
        raise msgspec.ValidationError(str(error)) from error
    try:
        msgspec.convert(parts, type(record))
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(name_fields(type(record), error)) from error


class Decoder(Generic[T]):
    """Decodes and validates the records of one topic."""

    def __init__(self, *, topic: str, record: type[T]) -> None:
        self.topic = topic
        self._record = record
        self._decode = msgspec.json.Decoder(record).decode

    def decode(self, value: bytes | None) -> T:
        """Return the record, or raise `UndecodableError` naming topic, field and value."""
        try:
            return self._decode(value)  # type: ignore[arg-type]  # None raises TypeError, handled below
        except _UNDECODABLE as error:
            problem = explain(self._record, self.topic, value, error)
            raise UndecodableError(problem) from error


@cache
def decoder_of(topic: str, record: type[T]) -> Decoder[T]:
    """Return the decoder of a topic's records; cached, because building a decoder is expensive."""
    return Decoder(topic=topic, record=record)


_SHOWN_CHARACTERS: Final = 120
_STEP: Final = re.compile(r"(?P<key>[^.\[\]]+)(?!\])|\[(?P<position>\d+)\]|\[\.\.\.\]")
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>[^`]+)`")
_NONE_OF_A_FEW: Final = "Invalid enum value "
_OF_A_KEY: Final = "`key` in "
_TOO_SHORT: Final = re.compile(r"Expected `array` of at least length \d+, got (?P<length>\d+)")


def explain(record: type, topic: str, value: bytes | None, error: Exception) -> str:
    """Return an explanation of why a value is not a valid record of a topic."""
    if value is None:
        return f"{topic}: unexpected tombstone (no value)"
    what, path = _split_path(str(error))
    what = shorten(what, _SHOWN_CHARACTERS)  # msgspec may quote the whole value
    stands_there = value if path is None else _value_at(value, path)
    shown = shorten(repr(stands_there), _SHOWN_CHARACTERS)
    if path is None:
        return f"{topic}: not JSON of this topic's record: {what}; value {shown}"
    named, type_hint = follow(record, path)
    missing = None
    if found := _MISSING.fullmatch(what):
        missing = found["field"]
    elif found := _TOO_SHORT.fullmatch(what):  # an array record that ends before this field
        missing = _fields_of(type_hint)[int(found["length"])][0]
    if missing:
        where = ".".join(filter(None, [named, missing]))
        return f"{topic}: field {where}: missing; value {shown}"
    return f"{topic}: field {named or '(the record)'}: {what}; value {shown}"


def name_fields(record: type, error: Exception) -> str:
    """Return msgspec's error message about a record, with field names instead of positions."""
    what, path = _split_path(str(error))
    return f"{what} - at `$.{follow(record, path)[0]}`" if path else what


def explain_invalid(shape: Any, error: Exception) -> str:  # noqa: ANN401  # any type annotation
    """Return msgspec's error message about a value of the wrong shape, with a hint at valid values.

    The hint lists the allowed values of an enumeration or of a mapping's keys, or suggests a known
    field for an unknown one.
    """
    problem = str(error)
    if unknown := _UNKNOWN.match(problem):
        _, type_hint = follow(shape, (_split_path(problem)[1] or ""))
        near = find_near(unknown["field"], (name for name, _ in _fields_of(type_hint)))
        return f"{problem}; did you mean `{near}`?" if near else problem
    if not problem.startswith(_NONE_OF_A_FEW):
        return problem
    path = problem.rpartition(" - at ")[2]
    _, type_hint = follow(
        shape, path.removeprefix(_OF_A_KEY).strip("`").removeprefix("$").lstrip(".")
    )
    if path.startswith(_OF_A_KEY):
        type_hint = next(iter(get_args(_plain(type_hint))), None)
    allowed = ", ".join(str(value) for value in get_args(_plain(type_hint)) if value != "")
    return f"{problem}; expected one of {allowed}" if allowed else problem


def _split_path(message: str) -> tuple[str, str | None]:
    """Split a message such as ``Expected `int`, got `str` - at `$.gpus[1].index` `` at the path.

    Returns the problem and the path. The path is empty if the problem concerns the record itself,
    and `None` if the message contains no path.
    """
    what, found, path = message.partition(" - at `")
    if found:
        # For an invalid key, the message contains only the mapping: `key` in `$.labels`.
        return what, path.removeprefix("key` in `").removeprefix("$").rstrip("`").lstrip(".")
    return what, "" if what.startswith(("Object missing", "Expected `object`")) else None


def follow(record: Any, path: str) -> tuple[str, Any]:  # noqa: ANN401  # any type annotation
    """Return the path with field names instead of positions, and the type at its end, if known."""
    named, type_hint = "", record
    for step in _STEP.finditer(path):
        fields = _fields_of(type_hint)
        if fields and step["position"] is not None:
            name, type_hint = fields[int(step["position"])]
        elif fields and step["key"] is not None:
            name, type_hint = step["key"], dict(fields).get(step["key"])
        else:
            # The last type argument of a list or mapping is the type of its items.
            name, type_hint = step[0], next(reversed(get_args(_plain(type_hint))), None)
        named += name if name.startswith("[") else f".{name}"
    return named.lstrip("."), type_hint


def _fields_of(hint: Any) -> list[tuple[str, Any]]:  # noqa: ANN401  # any type annotation
    """Return names and types of a record's fields in order; empty for other types."""
    plain = _plain(hint)
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(plain)]
    return []


def _plain(hint: Any) -> Any:  # noqa: ANN401  # any type annotation
    """Return a type without its constraints and without `None`."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    present = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) in (Union, UnionType) and len(present) == 1:
        return _plain(present[0])
    return hint


def _value_at(value: bytes, path: str) -> Any:  # noqa: ANN401  # any JSON value
    """Return the value at the path, or the nearest value that contains it.

    msgspec writes `[...]` for any key of a mapping; the whole mapping is then returned.
    """
    try:
        found: Any = orjson.loads(value)
        for step in _STEP.finditer(path):
            if step["key"] is not None:
                found = found[step["key"]]
            elif step["position"] is not None:
                found = found[int(step["position"])]
            else:
                break
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return value
    return found
