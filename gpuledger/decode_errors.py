"""What is wrong with a value that does not decode: its field, by name, and what stands there.

Pure. Where a record is written as an array, msgspec tells a place in it; here that becomes the name
of the field again.
"""

import re
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

import msgspec
import orjson

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
    if path is None:
        return f"{topic}: not JSON of this topic's record: {what}; value {_shorten(value)}"
    shown = _shorten(_value_at(value, path))
    named, held = follow(record, path)
    if missing := _missing_field(what, held):
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
    said = str(error)
    if unknown := _UNKNOWN.match(said):
        _, held = follow(shape, (_split_path(said)[1] or ""))
        near = get_close_matches(unknown["field"], [name for name, _ in _fields_of(held)], n=1)
        return f"{said}; did you mean `{near[0]}`?" if near else said
    if not said.startswith(_NONE_OF_A_FEW):
        return said
    path = said.rpartition(" - at ")[2]
    _, held = follow(shape, path.removeprefix(_OF_A_KEY).strip("`").removeprefix("$").lstrip("."))
    if path.startswith(_OF_A_KEY):
        held = next(iter(get_args(_plain(held))), None)
    allowed = ", ".join(str(one) for one in get_args(_plain(held)) if one != "")
    return f"{said}; expected one of {allowed}" if allowed else said


def _split_path(message: str) -> tuple[str, str | None]:
    """Take msgspec's message apart: ``Expected `int`, got `str` - at `$.gpus[1].index` ``."""
    what, found, path = message.partition(" - at `")
    if found:
        # A key of a mapping is `key` in `$.labels`: the mapping is what can be named.
        return what, path.removeprefix("key` in `").removeprefix("$").rstrip("`").lstrip(".")
    return what, "" if what.startswith(("Object missing", "Expected `object`")) else None


def follow(record: Any, path: str) -> tuple[str, Any]:  # noqa: ANN401  # any type annotation
    """Return a path by the names of its fields, and the type at its end as far as it is known."""
    named, held = "", record
    for step in _STEP.finditer(path):
        fields = _fields_of(held)
        if fields and step["position"] is not None:
            name, held = fields[int(step["position"])]
        elif fields and step["key"] is not None:
            name, held = step["key"], dict(fields).get(step["key"])
        else:
            name, held = step[0], _inside(held)
        named += name if name.startswith("[") else f".{name}"
    return named.lstrip("."), held


def _fields_of(hint: Any) -> list[tuple[str, Any]]:  # noqa: ANN401  # any type annotation
    """Return the names and types of a record's fields in their order; none of another type."""
    plain = _plain(hint)
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return [(each.name, each.type) for each in msgspec.structs.fields(plain)]
    return []


def _inside(hint: Any) -> Any:  # noqa: ANN401  # any type annotation
    """Return the type of what a list or a mapping holds."""
    return next(reversed(get_args(_plain(hint))), None)


def _plain(hint: Any) -> Any:  # noqa: ANN401  # any type annotation
    """Return a type without its limits, and without that it may be absent."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    present = [part for part in get_args(hint) if part is not NoneType]
    if get_origin(hint) in (Union, UnionType) and len(present) == 1:
        return _plain(present[0])
    return hint


def _missing_field(what: str, held: Any) -> str | None:  # noqa: ANN401  # any type annotation
    """Return the name of the field that a record lacks, where that is what is wrong."""
    if missing := _MISSING.fullmatch(what):
        return missing["field"]
    if short := _TOO_SHORT.fullmatch(what):
        return _fields_of(held)[int(short["length"])][0]
    return None


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


def _shorten(value: object) -> str:
    return shorten(repr(value), _SHOWN_CHARACTERS)


def shorten_middle(text: str, characters: int = 600) -> str:
    """Return a text of about so many characters: its begin, which says where, and its end, the why.

    Nothing may be looked for in what is left that is told by its two ends, such as an address.
    """
    half = characters // 2
    return text if len(text) <= characters else f"{text[:half]}…{text[-half:]}"


def shorten(text: str, characters: int) -> str:
    """Return a text of at most so many characters, and a sign where more was there."""
    return text if len(text) <= characters else f"{text[:characters]}…"
