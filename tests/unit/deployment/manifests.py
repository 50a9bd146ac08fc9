"""The manifests under k8s/ as the tests read them: files and generated ConfigMaps.

Kustomize itself is not needed: the base has no patches, so it is the sum of the files it lists.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.unit.deployment import deployables
from tests.unit.deployment.deployables import ROOT, Stage

Manifest = dict[str, Any]

FOLDERS: Final = tuple(ROOT / "k8s" / name for name in ("base", "topics", "sink-rows", "sink-otlp"))
BASE: Final = FOLDERS[0]


@cache
def kustomization(folder: Path) -> Manifest:
    """Read a folder's kustomization.yaml."""
    loaded: Manifest = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return loaded


@cache
def load() -> list[Manifest]:
    """Give every object, the ConfigMaps that Kustomize would generate included."""
    files = (folder / name for folder in FOLDERS for name in kustomization(folder)["resources"])
    written = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    generated = kustomization(BASE)["configMapGenerator"]
    return [*written, *map(_generate, generated)]


def _generate(generator: Manifest) -> Manifest:
    literals = dict(literal.split("=", 1) for literal in generator.get("literals", []))
    files = {Path(file).name: (BASE / file).read_text() for file in generator.get("files", [])}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"], "namespace": kustomization(BASE)["namespace"]},
        "data": {**literals, **files},
    }


def of_kind(kind: str) -> list[Manifest]:
    return [manifest for manifest in load() if manifest["kind"] == kind]


def config_map(name: str) -> Mapping[str, str]:
    """Give a ConfigMap's data; fails where there is none of that name."""
    (found,) = [one for one in of_kind("ConfigMap") if one["metadata"]["name"] == name]
    data: Mapping[str, str] = found["data"]
    return data


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A DaemonSet, Deployment or Job of one container."""

    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.manifest["spec"]["template"]["metadata"]["labels"])

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        spec: Manifest = container
        return spec

    @property
    def stage(self) -> Stage:
        return deployables.target_of(self.container["image"])

    def environment(self) -> dict[str, str]:
        """Give the variables that the container sees, the node's name made up."""
        given: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            given |= config_map(source["configMapRef"]["name"])
        for variable in self.container.get("env", []):
            given[variable["name"]] = variable.get("value", "node-1")
        return given

    def settings_files(self) -> Iterator[tuple[str, str]]:
        """Give path and content of each file that a ConfigMap puts into the container."""
        names = {
            volume["name"]: volume["configMap"]["name"]
            for volume in self.pod.get("volumes", [])
            if "configMap" in volume
        }
        for mount in self.container.get("volumeMounts", []):
            for file, content in (
                config_map(names[mount["name"]]).items() if mount["name"] in names else ()
            ):
                yield f"{mount['mountPath']}/{file}", content

    def settings(self, folder: Path) -> dict[str, Any]:
        """Give the settings with which it would start; its files are laid under `folder`."""
        command = [*deployables.entrypoint(self.stage), *self.container["args"]]
        for path, content in self.settings_files():
            source = folder / Path(path).name
            source.write_text(content)
            command = [str(source) if word == path else word for word in command]
        return deployables.settings(command, self.environment())


def workloads() -> list[Workload]:
    kinds = ("DaemonSet", "Deployment", "Job")
    return [Workload(manifest=one) for kind in kinds for one in of_kind(kind)]


def services() -> list[Workload]:
    """Give the workloads that stay: all but the Job."""
    return [workload for workload in workloads() if workload.manifest["kind"] != "Job"]
