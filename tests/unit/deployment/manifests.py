"""The files under k8s/rendered: the chart's objects, without Helm."""

from functools import cache
from typing import Any, Final

import yaml

from tests.unit.deployment.components import ROOT

Manifest = dict[str, Any]

RENDERED: Final = ROOT / "k8s" / "rendered"


@cache
def load() -> list[Manifest]:
    """Return every object of every preset."""
    files = sorted(RENDERED.glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"
