"""The files under k8s/ as they are written, as far as they can be checked without Kustomize.

What a cluster gets is checked in tests/real/deployment.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.unit.deployment.components import ROOT

Manifest = dict[str, Any]

K8S: Final = ROOT / "k8s"
FOLDERS: Final = tuple(sorted(file.parent for file in K8S.rglob("kustomization.yaml")))


@cache
def kustomization(folder: Path) -> Manifest:
    """Read a directory's kustomization.yaml."""
    loaded: Manifest = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return loaded


def generators(folder: Path) -> list[Manifest]:
    """Return the sources of the ConfigMaps and Secrets that a directory generates."""
    read = kustomization(folder)
    return [*read.get("configMapGenerator", []), *read.get("secretGenerator", [])]


@cache
def load() -> list[Manifest]:
    """Return every object that is written in a file."""
    files = (
        folder / name
        for folder in FOLDERS
        for name in kustomization(folder).get("resources", [])
        if name.endswith(".yaml")
    )
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"
