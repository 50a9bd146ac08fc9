"""Parses the parameter `filter`, which selects allocations in OpenCost's syntax. Pure.

Terms such as `namespace:"a","b"` are joined by `+`. An allocation must match all terms. It matches
a term with `:` if its value equals one of the term's values. It matches a term with `!:` if its
value equals none of them. Other parts of OpenCost's syntax are rejected.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from gpuledger.errors import ArgumentError
from gpuledger_reports.api.parameters import shown
from gpuledger_reports.pricing.tenants import ABSENT, UNALLOCATED

MAX_TERMS: Final = 20
_DIMENSIONS: Final = {
    "controllerKind": "owner_kind",
    "controllerName": "owner_name",
    **{name: name for name in ("cluster", "node", "namespace", "pod")},
}
_TERM: Final = re.compile(
    r'(?P<field>\w+)(?:\[(?P<key>[^\]"]+)\])?(?P<not>!?):(?P<values>"[^"]*"(?:\s*,\s*"[^"]*")*)'
)
_VALUE: Final = re.compile(r'"([^"]*)"')
# An unescaped plus sign arrives as a space.
_AND: Final = re.compile(r"\s*\+\s*|\s+")


class FilterTerm(NamedTuple):
    """A condition on a dimension of an allocation."""

    dimension: str
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
            raise ArgumentError(
                "filter",
                f'invalid term {shown(text[at:])}; write terms such as namespace:"a","b" or'
                f' label[app]!:"x", and join up to {MAX_TERMS} of them by +',
            )
        terms.append(_term(match))
        at = joint.end() if joint else match.end()
    return tuple(terms)


def passes(
    values: Mapping[str, str], terms: Sequence[FilterTerm], *, is_absent: Callable[[str], bool]
) -> bool:
    """Return whether dimension values match all terms.

    `values` contains the values by dimension. Dimensions for which `is_absent` returns true count
    as missing.
    """
    for term in terms:
        value = "" if is_absent(term.dimension) else values[term.dimension]
        value = UNALLOCATED if value in ABSENT else value
        if term.dimension == "owner_kind":
            value = value.lower()
        if (value in term.values) == term.is_negated:
            return False
    return True


def _term(match: re.Match[str]) -> FilterTerm:
    name, key = match["field"], match["key"]
    dimension = f"label:{key}" if name == "label" and key else _DIMENSIONS.get(name)
    if dimension is None or (key and name != "label"):
        known = ", ".join((*_DIMENSIONS, "label[KEY]"))
        raise ArgumentError("filter", f"unknown field {shown(name)}; fields are {known}")
    values = _VALUE.findall(match["values"])
    if dimension == "owner_kind":
        values = [value.lower() for value in values]
    return FilterTerm(dimension, tuple(values), bool(match["not"]))
