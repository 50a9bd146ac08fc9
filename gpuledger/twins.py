"""A fast twin for each record: the same fields, for the wire and for loops that run per tick.

A twin is a msgspec Struct built from the record's own fields, so the two cannot drift apart. It is
built 8 times faster than the dataclass and the garbage collector never looks at it. Typed as the
record, because it reads the same. What records are on the wire, their twins are: `gpuledger.codec`
goes through them.
"""

from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from gpuledger.records.base import is_array

T = TypeVar("T")

encode_twin: Final = msgspec.json.Encoder().encode


def twin_of(record: type[T]) -> type[T]:
    """Return the twin of a record class: keyword-only, frozen, its absent fields left out."""
    return cast("type[T]", _build(cast("Any", record)))


@cache
def _build(record: Any) -> type:  # noqa: ANN401  # mypy takes a class for unhashable
    hints = get_type_hints(record, include_extras=True)
    spec: list[Any] = [
        (field.name, _with_twins(hints[field.name]))
        if field.default is MISSING
        else (field.name, _with_twins(hints[field.name]), field.default)
        for field in fields(cast("Any", record))
    ]
    return msgspec.defstruct(
        record.__name__,
        spec,
        frozen=True,
        kw_only=True,
        gc=False,
        omit_defaults=True,
        array_like=is_array(record),
    )


def _with_twins(hint: Any) -> Any:  # noqa: ANN401  # any type annotation
    """Put the twin in the place of each record inside a type annotation."""
    if is_dataclass(hint):
        return twin_of(cast("type", hint))
    inner = tuple(_with_twins(part) for part in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return Union[inner]  # noqa: UP007  # built at run time
    return get_origin(hint)[inner] if inner else hint
