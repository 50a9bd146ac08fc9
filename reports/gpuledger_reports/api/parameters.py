"""The parameters of a request: read strictly, each mistake with the parameter's name. Pure."""

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
    """Return a client's text as messages show it: quoted, and short."""
    return shorten_middle(repr(value), _SHOWN)


def read_query(query: str, *, known: Collection[str]) -> dict[str, str]:
    """Return the parameters of what follows the question mark.

    Raises `ArgumentError` for one that is not known or stands twice, and for what is none.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:  # no UTF-8, or too many
        raise ArgumentError("query", f"at most {MAX_FIELDS} parameters, in UTF-8") from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ArgumentError(shown(name), f"is no parameter here; there are {listed}")
        if name in found:
            raise ArgumentError(name, "stands twice; give it once")
        found[name] = value
    return found


def flag(given: Mapping[str, str], name: str) -> bool:
    """Return whether a parameter says true; raises `ArgumentError` where it says neither."""
    value = given.get(name)
    if value is None:
        return False
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ArgumentError(name, f"{shown(value)} is neither true nor false")


def listed(given: Mapping[str, str], name: str, *, maximum: int) -> tuple[str, ...]:
    """Return the parts between commas, each once; raises `ArgumentError` beyond `maximum`."""
    parts = [part.strip() for part in given.get(name, "").split(",")]
    found = tuple(dict.fromkeys(part for part in parts if part))
    if len(found) > maximum:
        raise ArgumentError(name, f"{len(found)} are too many; give at most {maximum}")
    return found


def whole_number(given: Mapping[str, str], name: str, *, default: int, maximum: int) -> int:
    """Return a whole number from 0 up to `maximum`; raises `ArgumentError` for anything else."""
    value = given.get(name)
    if value is None:
        return default
    if not _WHOLE.fullmatch(value) or int(value) > maximum:
        raise ArgumentError(name, f"{shown(value)} is no whole number from 0 to {maximum}")
    return int(value)
