"""Records to bytes and back, and what is wrong with bytes that are no record.

Here live encoding, decoding, and the validation of what is to be written. Unknown fields are
ignored, so that old readers follow new writers. A mistake is explained by the field's name and the
value that stands there; where a record is written as an array, msgspec reports a position in it,
which becomes the name of the field again. What happens to a bad record is decided elsewhere
(`gpuledger.dead_letter_queue`).
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
# RecursionError: thousands of brackets, also in a field that nobody reads, must not stop a stage.
_UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError)
# Left as they are by `to_builtins`, which would make texts of them, and texts are valid.
_NOT_IN_JSON: Final = (bytes, bytearray, memoryview)

encode: Final = msgspec.json.Encoder().encode
"""Return a record as JSON; absent fields get no key, and `null` in records that are arrays."""


def validate(record: object) -> None:
    """Raise `msgspec.ValidationError`, naming the field, where a value is none that it may have.

    For writers of what others reported; costs about as much as decoding it. msgspec constructs
    Structs without looking at the values, and `convert` returns what is of the right class already
    as it is, so the record is taken apart first.
    """
    try:
        parts = msgspec.to_builtins(record, builtin_types=_NOT_IN_JSON)
    except TypeError as error:  # of a class that msgspec does not know
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
            return self._decode(value)  # type: ignore[arg-type]  # None is refused below, with the others
        except _UNDECODABLE as error:
            problem = explain(self._record, self.topic, value, error)
            raise UndecodableError(problem) from error


@cache
def decoder_of(topic: str, record: type[T]) -> Decoder[T]:
    """Return the decoder of a topic's records; one for each pair, as building one is not cheap."""
    return Decoder(topic=topic, record=record)


_SHOWN_CHARACTERS: Final = 120
_STEP: Final = re.compile(r"(?P<key>[^.\[\]]+)(?!\])|\[(?P<position>\d+)\]|\[\.\.\.\]")
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>[^`]+)`")
_NONE_OF_A_FEW: Final = "Invalid enum value "
_OF_A_KEY: Final = "`key` in "
_TOO_SHORT: Final = re.compile(r"Expected `array` of at least length \d+, got (?P<length>\d+)")


def explain(record: type, topic: str, value: bytes | None, error: Exception) -> str:
    """Return what is wrong with a value that is no record of a topic."""
    if value is None:
        return f"{topic}: no value (a tombstone), but this topic has none"
    what, path = _split_path(str(error))
    what = shorten(what, _SHOWN_CHARACTERS)  # it may quote the value, all of it
    stands_there = value if path is None else _value_at(value, path)
    shown = shorten(repr(stands_there), _SHOWN_CHARACTERS)
    if path is None:
        return f"{topic}: not JSON of this topic's record: {what}; value {shown}"
    named, type_hint = follow(record, path)
    missing = None
    if found := _MISSING.fullmatch(what):
        missing = found["field"]
    elif found := _TOO_SHORT.fullmatch(what):  # a record that is an array ends before this field
        missing = _fields_of(type_hint)[int(found["length"])][0]
    if missing:
        where = ".".join(filter(None, [named, missing]))
        return f"{topic}: field {where}: missing; value {shown}"
    return f"{topic}: field {named or '(the record)'}: {what}; value {shown}"


def name_fields(record: type, error: Exception) -> str:
    """Return what msgspec says is wrong in a record, with its fields by their names."""
    what, path = _split_path(str(error))
    return f"{what} - at `$.{follow(record, path)[0]}`" if path else what


def explain_invalid(shape: Any, error: Exception) -> str:  # noqa: ANN401  # any type annotation
    """Return what msgspec says of a value that is not of this shape, with what it may be instead.

    Of a value, or of a mapping's key, that is one of a few, these are named; of a field that there
    is not, the one that was probably meant.
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
    """Take msgspec's message apart: ``Expected `int`, got `str` - at `$.gpus[1].index` ``."""
    what, found, path = message.partition(" - at `")
    if found:
        # A key of a mapping is `key` in `$.labels`: the mapping is what can be named.
        return what, path.removeprefix("key` in `").removeprefix("$").rstrip("`").lstrip(".")
    return what, "" if what.startswith(("Object missing", "Expected `object`")) else None


def follow(record: Any, path: str) -> tuple[str, Any]:  # noqa: ANN401  # any type annotation
    """Return a path by the names of its fields, and the type at its end as far as it is known."""
    named, type_hint = "", record
    for step in _STEP.finditer(path):
        fields = _fields_of(type_hint)
        if fields and step["position"] is not None:
            name, type_hint = fields[int(step["position"])]
        elif fields and step["key"] is not None:
            name, type_hint = step["key"], dict(fields).get(step["key"])
        else:
            # Of a list or a mapping: the type of what it holds is the last that it names.
            name, type_hint = step[0], next(reversed(get_args(_plain(type_hint))), None)
        named += name if name.startswith("[") else f".{name}"
    return named.lstrip("."), type_hint


def _fields_of(hint: Any) -> list[tuple[str, Any]]:  # noqa: ANN401  # any type annotation
    """Return the names and types of a record's fields in their order; none of another type."""
    plain = _plain(hint)
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return [(field.name, field.type) for field in msgspec.structs.fields(plain)]
    return []


def _plain(hint: Any) -> Any:  # noqa: ANN401  # any type annotation
    """Return a type without its limits, and without that it may be absent."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    present = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) in (Union, UnionType) and len(present) == 1:
        return _plain(present[0])
    return hint


def _value_at(value: bytes, path: str) -> Any:  # noqa: ANN401  # any JSON value
    """Look up what stands at the path, or the nearest whole around it.

    msgspec writes `[...]` for any key of a mapping: there the mapping is the nearest.
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
