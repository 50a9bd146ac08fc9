"""The parameters of a request: read strictly, each mistake with the parameter's name. Pure."""

import re
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Final
from urllib.parse import parse_qsl

from gpuledger.errors import UserError
from gpuledger.texts import shorten_middle

MAX_FIELDS: Final = 64
LATEST_SECONDS: Final = 7_258_118_400
"""The year 2200: what is later is no time that anybody means."""
_SHOWN: Final = 60
_MOMENT: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_SECONDS: Final = re.compile(r"\d{1,11}", re.ASCII)
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False", ""})
_WHOLE: Final = re.compile(r"\d{1,9}", re.ASCII)


class ParameterError(UserError):
    """A parameter that means nothing here; its text begins with the parameter's name."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter


def shown(value: str) -> str:
    """Return a client's text as messages show it: quoted, and short."""
    return shorten_middle(repr(value), _SHOWN)


def read_query(query: str, *, known: Collection[str]) -> dict[str, str]:
    """Return the parameters of what follows the question mark.

    Raises `ParameterError` for one that is not known or stands twice, and for what is none.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except ValueError as error:  # no UTF-8, or too many
        raise ParameterError("query", f"at most {MAX_FIELDS} parameters, in UTF-8") from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ParameterError(shown(name), f"is no parameter here; there are {listed}")
        if name in found:
            raise ParameterError(name, "stands twice; give it once")
        found[name] = value
    return found


def flag(given: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    """Return whether a parameter says true; raises `ParameterError` where it says neither."""
    value = given.get(name)
    if value is None:
        return default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ParameterError(name, f"{shown(value)} is neither true nor false")


def listed(given: Mapping[str, str], name: str, *, maximum: int) -> tuple[str, ...]:
    """Return the parts between commas, each once; raises `ParameterError` beyond `maximum`."""
    parts = [part.strip() for part in given.get(name, "").split(",")]
    found = tuple(dict.fromkeys(part for part in parts if part))
    if len(found) > maximum:
        raise ParameterError(name, f"{len(found)} are too many; give at most {maximum}")
    return found


def whole_number(given: Mapping[str, str], name: str, *, default: int, maximum: int) -> int:
    """Return a whole number from 0 up to `maximum`; raises `ParameterError` for anything else."""
    value = given.get(name)
    if value is None:
        return default
    if not _WHOLE.fullmatch(value) or int(value) > maximum:
        raise ParameterError(name, f"{shown(value)} is no whole number from 0 to {maximum}")
    return int(value)


def moment_us(value: str, name: str) -> int:
    """Return a time in microseconds: 2026-10-01T14:00:00Z, or seconds since 1970.

    Raises `ParameterError`.
    """
    if _SECONDS.fullmatch(value):
        seconds = int(value)
    elif _MOMENT.fullmatch(value):
        try:
            # By ourselves: `fromisoformat` takes forms that clients should not come to rely on.
            moment = datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        except ValueError as error:
            raise ParameterError(name, f"{shown(value)} is no time: {error}") from error
        seconds = int(moment.timestamp())
    else:
        raise ParameterError(
            name, f"{shown(value)} is no time; give 2026-10-01T14:00:00Z or seconds since 1970"
        )
    if not 0 <= seconds <= LATEST_SECONDS:
        raise ParameterError(name, f"{shown(value)} is not between the years 1970 and 2200")
    return seconds * 10**6
