"""Parses a request's parameters; each error names its parameter. Pure."""

import re
from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import parse_qsl

from gpuledger.errors import ArgumentError
from gpuledger.texts import shorten_middle

MAX_FIELDS: Final = 64
_SHOWN: Final = 60
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False", ""})
_WHOLE: Final = re.compile(r"\d{1,9}", re.ASCII)


def shown(value: str) -> str:
    """Return a client's text in quotes and shortened, for error messages."""
    return shorten_middle(repr(value), _SHOWN)


def read_query(query: str, *, known: Collection[str]) -> dict[str, str]:
    """Return the parameters of a query string.

    Raises `ArgumentError` for unknown or repeated parameters, or if the query is invalid.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:  # not UTF-8, or too many
        raise ArgumentError("query", f"give at most {MAX_FIELDS} parameters, in UTF-8") from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ArgumentError(shown(name)[1:-1], f"unknown parameter; parameters are {listed}")
        if name in found:
            raise ArgumentError(name, "is given twice; give it once")
        found[name] = value
    return found


def flag(given: Mapping[str, str], name: str) -> bool:
    """Return a parameter's boolean value, false if it is missing.

    Raises `ArgumentError` if it is invalid.
    """
    value = given.get(name)
    if value is None:
        return False
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ArgumentError(name, f"invalid value {shown(value)}; use true or false")


def listed(given: Mapping[str, str], name: str, *, maximum: int) -> tuple[str, ...]:
    """Return the distinct values of a parameter, which are separated by commas.

    Raises `ArgumentError` if there are more than `maximum`.
    """
    parts = [part.strip() for part in given.get(name, "").split(",")]
    found = tuple(dict.fromkeys(part for part in parts if part))
    if len(found) > maximum:
        raise ArgumentError(name, f"has {len(found)} values; give at most {maximum}")
    return found


def whole_number(given: Mapping[str, str], name: str, *, default: int, maximum: int) -> int:
    """Return a parameter's whole number, or `default` if it is missing.

    Raises `ArgumentError` if it is not a number from 0 to `maximum`.
    """
    value = given.get(name)
    if value is None:
        return default
    if not _WHOLE.fullmatch(value) or int(value) > maximum:
        raise ArgumentError(name, f"invalid number {shown(value)}; give one from 0 to {maximum}")
    return int(value)
