"""Parses the parameter `filter`, which selects allocations in OpenCost's syntax. Pure.

Terms such as `namespace:"a","b"` are joined by `+`. An allocation must match all terms. It matches
a term with `:` if its value equals one of the term's values. It matches a term with `!:` if its
value equals none of them. Other parts of OpenCost's syntax are rejected.

OpenCost writes the key of a label in brackets; its UI writes it after a colon, as in `aggregate`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from gpuledger.errors import ArgumentError
from gpuledger_reports.api.fields import (
    WITHOUT_VALUE,
    Values,
    dimensions_of,
    field_names,
    value_of,
)
from gpuledger_reports.api.parameters import shown

MAX_TERMS: Final = 20
_ALIASES: Final = {
    # A filter's value is a name, without the kind that allocations by controller have.
    "controller": "controllerName",
    "namespacelabel": "namespace-label",
    "namespaceLabel": "namespace-label",
}
_FIELD: Final = r'(?P<field>[\w-]+)(?:\[(?P<key>[^\]"]+)\]|:(?P<after_colon>[^":!]+))?'
_TERM: Final = re.compile(_FIELD + r'(?P<not>!?):(?P<values>"[^"]*"(?:\s*,\s*"[^"]*")*)')
_VALUE: Final = re.compile(r'"([^"]*)"')
# An unescaped plus sign arrives as a space.
_AND: Final = re.compile(r"\s*\+\s*|\s+")


class FilterTerm(NamedTuple):
    """A condition on a field of an allocation."""

    field: str
    values: tuple[str, ...]
    is_negated: bool


def parse_filter(text: str) -> tuple[FilterTerm, ...]:
    """Return the terms of a filter; raises `ArgumentError` if it is invalid."""
    terms: list[FilterTerm] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _TERM.match(text, at)
        joint = _AND.match(text, match.end()) if match else None
        if match is None or not (joint or match.end() == len(text)) or len(terms) == MAX_TERMS:
            if text[match.end() if match else at :].lstrip().startswith("|"):
                problem = '`|` is not supported; write several values as namespace:"a","b"'
                raise ArgumentError("filter", problem)
            raise ArgumentError(
                "filter",
                f'invalid term {shown(text[at:])}; write terms such as namespace:"a","b" or'
                f' label[app]!:"x", and join up to {MAX_TERMS} of them by +',
            )
        terms.append(_term(match))
        at = joint.end() if joint else match.end()
    return tuple(terms)


def parse_field(text: str, *, option: str) -> str:
    """Return the field that a filter or a parameter names; raises `ArgumentError` if unknown."""
    match = re.fullmatch(_FIELD, text)
    name, key = (match["field"], match["key"] or match["after_colon"]) if match else (text, None)
    name = _ALIASES.get(name, name)
    field = f"{name}:{key}" if key else name
    if not match or not (field in WITHOUT_VALUE or dimensions_of(field)):
        raise ArgumentError(option, f"unknown field {shown(text)}; fields are {field_names()}")
    return field


def passes(
    values: Values, terms: Sequence[FilterTerm], *, is_absent: Callable[[str], bool]
) -> bool:
    """Return whether dimension values match all terms.

    `values` contains the values by dimension. Fields for which `is_absent` returns true count as
    missing.
    """
    for term in terms:
        value = "" if is_absent(term.field) else value_of(term.field, values)
        if (value in term.values) == term.is_negated:
            return False
    return True


def _term(match: re.Match[str]) -> FilterTerm:
    field = parse_field(match[0][: match.start("not") - match.start()], option="filter")
    values = _VALUE.findall(match["values"])
    if field == "controllerKind":
        values = [value.lower() for value in values]
    return FilterTerm(field, tuple(values), bool(match["not"]))
