"""Finds all mistakes in the fields of a price file: the path and the remedy of each.

msgspec stops at the first mistake, and its messages contain Python types and no remedy. Each field
is therefore converted separately. Pure. `policy` checks the parts of a file against each other.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from typing_extensions import override

from gpuledger.texts import find_near, shorten

Steps = tuple[str | int, ...]
Mistake = tuple[Steps, str]
_COMMA: Final = re.compile(r"(?P<whole>\d+),(?P<part>\d+)")
_NAMED: Final = re.compile(r"`(?P<field>\w+)`")
_SHOWN: Final = 60


@dataclass(frozen=True)
class MisreadValue:
    """A value that YAML interprets differently than people, with the reason why it is invalid."""

    text: str
    why: str

    @override
    def __str__(self) -> str:
        return self.text


def mistakes_in(content: object, kind: Any, path: Steps = ()) -> Iterator[Mistake]:  # noqa: ANN401  # a type, as annotations have it
    """Yield the mistakes in a part of a file that must have the type `kind`.

    `path` is the path of the part within the file.
    """
    kinds = _alternatives(kind)
    struct = next((each for each in kinds if isinstance(each, type(msgspec.Struct))), None)
    listed, mapped = (
        next((get_args(each) for each in kinds if get_origin(each) is of), None)
        for of in (list, dict)
    )
    if struct and isinstance(content, dict):
        yield from _of_struct(content, struct, path)
    elif listed and isinstance(content, list):
        for at, item in enumerate(content):
            yield from mistakes_in(item, listed[0], (*path, at))
    elif mapped and isinstance(content, dict):
        for key, item in content.items():
            yield from mistakes_in(key, mapped[0], (*path, str(key)))
            yield from mistakes_in(item, mapped[1], (*path, str(key)))
    else:
        try:
            msgspec.convert(content, kind)
        except msgspec.ValidationError:
            yield path, _remedy(content, kinds)


def _of_struct(content: Mapping[Any, Any], struct: Any, path: Steps) -> Iterator[Mistake]:  # noqa: ANN401  # a class of policy
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    found: list[Mistake] = []
    before: tuple[Any, Any] = (None, None)
    for key, item in content.items():
        if key in fields:
            found += mistakes_in(item, fields[key].type, (*path, key))
        elif item is None and isinstance(before[1], int | Decimal) and not isinstance(key, str):
            # YAML interprets {per_gpu_hour: 1,5} as a price of 1 and a field named 5.
            part = key.text if isinstance(key, MisreadValue) else key
            remedy = f"invalid number {before[1]},{part}; write {before[1]}.{part}"
            found.append(((*path, before[0]), remedy))
        else:
            near = find_near(str(key), fields)
            remedy = f"did you mean {near}?" if near else f"fields are {', '.join(sorted(fields))}"
            found.append(((*path, str(key)), f"unknown field; {remedy}"))
        before = (key, item)
    found += [
        (path, f"{name} is missing; add it")
        for name, field in fields.items()
        if field.required and name not in content
    ]
    yield from found
    if found:
        return
    # Each field is valid; the classes of policy check the fields against each other.
    try:
        msgspec.convert(content, struct)
    except msgspec.ValidationError as error:
        message = str(error).partition(" - at `$")[0]
        named = _NAMED.match(message)
        is_there = named is not None and named["field"] in content
        yield (*path, named["field"]) if named and is_there else path, message


def _remedy(content: object, kinds: Sequence[Any]) -> str:
    """Return why a value is invalid for all of these types, and what to write instead."""
    if isinstance(content, MisreadValue):
        return content.why
    if content is None:
        return "has no value; give one, or remove the field"
    shown = shorten(str(content), _SHOWN)
    if choices := [
        name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)
    ]:
        near = find_near(shown, choices)
        return (
            f"invalid value {shown!r}; use one of {', '.join(choices)}"
            f"{f'; did you mean {near}?' * bool(near)}"
        )
    comma = _COMMA.fullmatch(shown)
    decimal = f"{comma['whole']}.{comma['part']}" if comma else "one such as 1.5"
    of_dates = "a time" if isinstance(content, datetime) else "not a day"
    is_plain = isinstance(content, int | Decimal | date)
    message = {
        date: f"{shown} is {of_dates}; give a day such as 2026-10-01",
        Decimal: f"invalid number {shown}; write {decimal}",
        str: f"{shown} is not text; put it in quotes" if is_plain else "must be text",
        list: "must be a list, with - before each row",
        int: f"invalid number {shown}; write a whole number such as 8",
    }
    wanted = (get_origin(kind) or kind for kind in kinds)
    return next(
        (message[each] for each in wanted if each in message), "must be an object with fields"
    )


def _alternatives(kind: Any) -> list[Any]:  # noqa: ANN401  # a type, as annotations have it
    """Return the types that a value may have, without None and without bounds."""
    all_of = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    plain = (get_args(each)[0] if get_origin(each) is Annotated else each for each in all_of)
    return [each for each in plain if each is not NoneType]
