"""The rows of "What to watch" in docs/operations.md, as values."""

import re
from typing import Final, NamedTuple

from tests.unit.deployment.deployables import ROOT

PAGE: Final = (ROOT / "docs" / "operations.md").read_text()
_SECTION: Final = PAGE.partition("## What to watch")[2]
_ROW: Final = re.compile(
    r"^\| `(\w+)` \| `([^`]+)` \| (\w*) \| (\w+) \| (.+?) \| (.+?) \|$", re.MULTILINE
)
_LINK: Final = re.compile(r"(?P<begin>\()?\[(?P<text>[^\]]+)\]\((?P<target>[^)]+)\)(?(begin)\))")
_MATCHER: Final = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


class Row(NamedTuple):
    """A row: what to alert on, and what it means."""

    alert: str
    expression: str
    lasts: str
    """How long it must hold, as Prometheus writes it; empty if once is enough."""
    severity: str
    meaning: str
    remedy: str


class Selector(NamedTuple):
    """A metric, and the required values of its labels."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""

    def selects(self, labels: dict[str, str]) -> bool:
        """Return whether it selects a series with these labels."""
        return all(_holds(labels.get(label, ""), *rest) for label, *rest in self.matchers)


def rows() -> list[Row]:
    """Return the rows of the table."""
    return [Row(*found) for found in _ROW.findall(_SECTION)]


def plain(cell: str) -> str:
    """Return a cell as an annotation has it: a link becomes its target."""
    return _LINK.sub(_place_of, cell).replace("`", "")


def _place_of(link: re.Match[str]) -> str:
    page = "operations.md" if link["target"].startswith("#") else ""
    place = f"(docs/{page}{link['target']})"
    return place if link["begin"] else f"{link['text']} {place}"


def selectors(expression: str) -> list[Selector]:
    """Return the selectors of an expression."""
    found = re.findall(r"(gpuledger_\w+)(?:\{(.*?)\}(?=[\s\[)]|$))?", expression)
    return [Selector(metric, tuple(_MATCHER.findall(within))) for metric, within in found]


def _holds(value: str, operator: str, wanted: str) -> bool:
    is_same = bool(re.fullmatch(wanted, value)) if "~" in operator else value == wanted
    return is_same != operator.startswith("!")
