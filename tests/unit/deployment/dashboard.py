"""The Grafana dashboard as the tests read it: its queries, with Grafana's variables filled in."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tests.unit.deployment.components import ROOT

GRAFANA: Final = ROOT / "deploy" / "compose" / "grafana"
_METRIC: Final = re.compile(r"\bgpuledger_\w+")
_BY: Final = re.compile(r"\bby \(([^)]*)\)")
_MATCHERS: Final = re.compile(r"\{([^}]*)\}")
_SELECTED: Final = re.compile(r"\b(gpuledger_\w+)(\{[^}]*\})?")
_JOINED: Final = re.compile(r"\bon \(([^)]*)\) group_left ?\(([^)]*)\) (gpuledger_\w+_info)\b")
_LABEL: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
# `$1` is a group of a PromQL regular expression.
_VARIABLE: Final = re.compile(r"\$(?:\{([a-z_]\w*)\}|([a-z_]\w*))")
_NAME_OF_LABEL: Final = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A query of a panel."""

    panel: str
    """The panel's title."""
    ref_id: str
    """The query's letter within the panel."""
    written: str
    """The query as written in the file."""
    legend: str
    """The pattern for the names of its series."""
    is_instant: bool
    """Whether Grafana queries an instant and not a range."""
    is_table: bool
    """Whether its series become rows, which have no names."""
    data_source: Any
    """Its data source."""

    @property
    def query(self) -> str:
        """The query with every variable meaning all."""
        return fill_in(self.written)

    def name_of(self, labels: Mapping[str, str]) -> str:
        """Return the name of a series as Grafana shows it; a missing label is empty."""
        return _NAME_OF_LABEL.sub(lambda found: labels.get(found[1], ""), self.legend)


@cache
def load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (ROOT / "k8s" / "chart" / "dashboards" / "gpuledger.json").read_text()
    )
    return loaded


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = load()["panels"]
    return found


def targets() -> list[Target]:
    """Return the queries of all panels."""
    return [
        Target(
            panel=panel["title"],
            ref_id=target["refId"],
            written=target["expr"],
            legend=target["legendFormat"],
            is_instant=target.get("instant", False),
            is_table=target.get("format") == "table",
            data_source=target["datasource"],
        )
        for panel in panels()
        for target in panel["targets"]
    ]


def variables() -> list[dict[str, Any]]:
    """Return the dashboard's variables that query the data source."""
    return [one for one in load()["templating"]["list"] if one["type"] == "query"]


def data_source_variables() -> list[dict[str, Any]]:
    return [one for one in load()["templating"]["list"] if one["type"] == "datasource"]


def fill_in(query: str) -> str:
    """Replace the variables in a query by what they mean if all is selected, as Grafana does."""
    all_values = {one["name"]: one["allValue"] for one in variables()}
    return _VARIABLE.sub(lambda found: all_values[found[1] or found[2]], query)


def variables_in(query: str) -> set[str]:
    return {found[1] or found[2] for found in _VARIABLE.finditer(query)}


def metrics(query: str) -> set[str]:
    return set(_METRIC.findall(query))


def labels_in(legend: str) -> set[str]:
    return set(_NAME_OF_LABEL.findall(legend))


def selections(query: str) -> list[tuple[str, set[str]]]:
    """Return each metric that a query selects, with the labels by which it does."""
    found = _SELECTED.findall(query)
    return [(metric, set(_LABEL.findall(matchers))) for metric, matchers in found]


def joined_labels(query: str) -> list[tuple[str, set[str]]]:
    """Return each info series that a query joins, with the labels joined on and copied from it."""
    found = _JOINED.findall(query)
    return [
        (metric, {name.strip() for name in f"{on},{copied}".split(",")})
        for on, copied, metric in found
    ]


def labels(query: str) -> set[str]:
    """Return the labels by which a query selects and groups."""
    grouped = [name.strip() for names in _BY.findall(query) for name in names.split(",")]
    selected = [name for inside in _MATCHERS.findall(query) for name in _LABEL.findall(inside)]
    return {*grouped, *selected}
