"""k8s/chart as Helm renders it, and values for its tests."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tests.real.deployment.rendering import K8S, Rendering
from tests.real.services.kustomize import Helm
from tests.tools import catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping

CHART: Final = K8S / "chart"
CASES: Final = {
    file.stem.removesuffix("-values"): file for file in sorted((CHART / "ci").glob("*.yaml"))
}
NAMESPACES: Final = {"agent": "gpuledger-agent", "central": "gpuledger"}
"""The namespace of each release, by its components."""

CENTRAL: Final = {"components": "central", "kafka": {"bootstrapServers": "broker:9092"}}
"""The least values of a release of the central components."""


@cache
def defaults() -> dict[str, Any]:
    """Return the chart's values."""
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return values merged key by key, as Helm merges them."""
    made = dict(deepcopy(values))
    for key, value in over.items():
        mine = made.get(key)
        both = isinstance(mine, dict) and isinstance(value, dict)
        made[key] = merged(mine, value) if both and mine is not None else value
    return made


def render_chart(
    *values: Path | Mapping[str, Any], folder: Path, chart: Path = CHART, name: str = "gpuledger"
) -> Rendering:
    """Return a release's objects in its namespace.

    Raises KustomizeError if Helm rejects the values, and MissingToolError if Helm is missing.
    """
    helm = Helm(binary=catalogue.named("helm").find())
    given: dict[str, Any] = {}
    for each in values:
        given = merged(given, yaml.safe_load(each.read_text()) if isinstance(each, Path) else each)
    file = folder / "values.json"
    file.write_text(json.dumps(given))
    namespace = NAMESPACES.get(given.get("components", "agent"), "default")
    objects = helm.template(chart, f"--values={file}", name=name, namespace=namespace)
    return Rendering(objects=objects)
