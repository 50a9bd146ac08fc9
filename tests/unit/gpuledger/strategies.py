"""Records of any type, for laws that hold for all of them."""

from enum import Enum
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from gpuledger.records.base import BaseRecord

T = TypeVar("T")


def records(record: type[T]) -> st.SearchStrategy[T]:
    """Return a strategy for records whose fields take any value of their type or are absent."""
    hints = get_type_hints(record, include_extras=True)
    return st.builds(record, **{name: _values(hint) for name, hint in hints.items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:  # noqa: ANN401 - any type annotation
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of(*map(_values, inner))
    if origin is Annotated:
        return _bounded(*inner)
    if origin is list:
        return st.lists(_values(inner[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(_values(inner[0]), _values(inner[1]), max_size=3)
    return _plain(hint)


def _bounded(kind: Any, limits: msgspec.Meta) -> st.SearchStrategy[Any]:  # noqa: ANN401 - any type annotation
    if get_origin(kind) in (list, dict):
        return _values(kind)
    if kind is float:
        return st.floats(min_value=cast("float", limits.ge), max_value=cast("float", limits.le))
    if kind is int:
        return st.integers(min_value=cast("int", limits.ge), max_value=cast("int", limits.le))
    if limits.pattern:
        return st.from_regex(limits.pattern).filter(
            lambda made: len(made) <= cast("int", limits.max_length)
        )
    return st.text(min_size=limits.min_length or 0, max_size=limits.max_length)


def _plain(hint: type) -> st.SearchStrategy[Any]:
    if issubclass(hint, BaseRecord):
        return records(hint)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    return {
        type(None): st.none(),
        bool: st.booleans(),
        str: st.text(),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }[hint]
