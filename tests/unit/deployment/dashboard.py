"""The Grafana dashboard as the tests read it: its queries, with Grafana's variables filled in."""

import json
import re
from functools import cache
from typing import Any, Final

from tests.unit.deployment.deployables import ROOT

GRAFANA: Final = ROOT / "deploy" / "compose" / "grafana"
_METRIC: Final = re.compile(r"\bgpuledger_\w+")
_BY: Final = re.compile(r"\bby \(([^)]*)\)")
_MATCHERS: Final = re.compile(r"\{([^}]*)\}")
_LABEL: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@cache
def load() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAFANA / "dashboards" / "gpuledger.json").read_text())
    return loaded


def queries() -> list[str]:
    """Give the panels' PromQL with every variable meaning all."""
    written = [target["expr"] for panel in load()["panels"] for target in panel["targets"]]
    return [re.sub(r"\$\w+", ".*", query) for query in written]


def variables() -> list[str]:
    """Give the queries of the dashboard's own variables."""
    return [variable["definition"] for variable in load()["templating"]["list"]]


def metrics(query: str) -> set[str]:
    return set(_METRIC.findall(query))


def labels(query: str) -> set[str]:
    """Give the labels by which a query selects and groups."""
    grouped = [name.strip() for names in _BY.findall(query) for name in names.split(",")]
    selected = [name for inside in _MATCHERS.findall(query) for name in _LABEL.findall(inside)]
    return {*grouped, *selected}
