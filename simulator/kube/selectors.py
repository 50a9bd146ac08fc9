"""Field and label selectors: which objects a list or a watch is about.

Here lives the small language of `fieldSelector` (equality alone) and `labelSelector` (equality and
presence), as far as a reader of pods uses it.
"""

import re
from collections.abc import Callable
from typing import Any, Final

from simulator.kube import failures

Json = dict[str, Any]
Selector = Callable[[Json], bool]

_TERM: Final = re.compile(r"^\s*([^=!\s]+)\s*(==|!=|=)\s*([^=!]*?)\s*$")
_FIELDS: Final[dict[str, Callable[[Json], str]]] = {
    "metadata.name": lambda item: str(item["metadata"]["name"]),
    "metadata.namespace": lambda item: str(item["metadata"].get("namespace", "")),
    "spec.nodeName": lambda item: str(item.get("spec", {}).get("nodeName", "")),
    "status.phase": lambda item: str(item.get("status", {}).get("phase", "")),
}


def parse_selectors(*, fields: str, labels: str, namespace: str = "") -> Selector:
    """Make one test of both selectors and the namespace; raises ApiError 400."""
    tests = [_field_test(term) for term in fields.split(",") if term]
    tests += [_label_test(term) for term in labels.split(",") if term]
    if namespace:
        tests.append(lambda item: item["metadata"].get("namespace") == namespace)
    return lambda item: all(test(item) for test in tests)


def _field_test(term: str) -> Selector:
    match = _TERM.match(term)
    if not match:
        raise failures.bad_request(f"invalid selector: '{term}'; can't understand '{term}'")
    name, operator, wanted = match.groups()
    if name not in _FIELDS:
        raise failures.bad_request(f"field label not supported: {name}")
    read = _FIELDS[name]
    return lambda item: (read(item) == wanted) is (operator != "!=")


def _label_test(term: str) -> Selector:
    match = _TERM.match(term)
    if not match:
        name = term.strip()
        if name.startswith("!"):
            return lambda item: name[1:] not in _labels(item)
        return lambda item: name in _labels(item)
    name, operator, wanted = match.groups()
    return lambda item: (_labels(item).get(name) == wanted) is (operator != "!=")


def _labels(item: Json) -> dict[str, str]:
    return item["metadata"].get("labels") or {}
