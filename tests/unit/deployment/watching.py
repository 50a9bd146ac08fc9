"""The shipped rules on components' own metrics, and the selectors in their expressions."""

import re
from typing import Final, NamedTuple

from tests.docs_gen.series_page import rules_by_group
from tests.unit.deployment.components import ROOT

MONITORING: Final = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
_MATCHER: Final = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Row(NamedTuple):
    """A rule: what to alert on."""

    alert: str
    expression: str
    lasts: str
    """How long it must hold, as Prometheus writes it; empty if once is enough."""
    severity: str


class Selector(NamedTuple):
    """A metric, and the required values of its labels."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""

    def selects(self, labels: dict[str, str]) -> bool:
        """Return whether it selects a series with these labels."""
        return all(_holds(labels.get(label, ""), *rest) for label, *rest in self.matchers)


def rows() -> list[Row]:
    """Return the rules."""
    return [
        Row(rule["alert"], rule["expr"], rule.get("for", ""), rule["labels"]["severity"])
        for rule in rules_by_group()["gpuledger"]
    ]


def selectors(expression: str) -> list[Selector]:
    """Return the selectors of an expression."""
    found = re.findall(r"(gpuledger_\w+)(?:\{(.*?)\}(?=[\s\[)]|$))?", expression)
    return [Selector(metric, tuple(_MATCHER.findall(within))) for metric, within in found]


def _holds(value: str, operator: str, wanted: str) -> bool:
    is_same = bool(re.fullmatch(wanted, value)) if "~" in operator else value == wanted
    return is_same != operator.startswith("!")
