"""The parameter `filter`: which allocations are asked for, in OpenCost's words. Pure.

Terms such as `namespace:"a","b"` are joined by `+`, which means that all of them hold; `!:` is for
what has none of the values. What else OpenCost's language has is refused rather than guessed.
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
# A plus that a client has not escaped arrives as a space.
_AND: Final = re.compile(r"\s*\+\s*|\s+")


class FilterTerm(NamedTuple):
    """What an allocation must have, or must not."""

    dimension: str
    values: tuple[str, ...]
    is_negated: bool


def parse_filter(text: str) -> tuple[FilterTerm, ...]:
    """Return the terms that all must hold; raises `ArgumentError`."""
    terms: list[FilterTerm] = []
    at, text = 0, text.strip()
    while at < len(text):
        match = _TERM.match(text, at)
        joint = _AND.match(text, match.end()) if match else None
        if match is None or not (joint or match.end() == len(text)) or len(terms) == MAX_TERMS:
            raise ArgumentError(
                "filter",
                f'{shown(text[at:])} is no term such as namespace:"a","b" or label[app]!:"x";'
                f" join up to {MAX_TERMS} of them by +",
            )
        terms.append(_term(match))
        at = joint.end() if joint else match.end()
    return tuple(terms)


def passes(
    values: Mapping[str, str], terms: Sequence[FilterTerm], *, is_absent: Callable[[str], bool]
) -> bool:
    """Return whether dimensions with these values are asked for.

    Those of which `is_absent` says so have no value, whatever stands there.
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
        raise ArgumentError("filter", f"{shown(name)} is nothing to filter by; there are {known}")
    values = _VALUE.findall(match["values"])
    if dimension == "owner_kind":
        values = [value.lower() for value in values]
    return FilterTerm(dimension, tuple(values), bool(match["not"]))
