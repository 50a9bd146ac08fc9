"""k8s/rendered: the objects of two presets, for `kubectl apply` and Kustomize.

`python -m tests.real.deployment.rendered` writes them; `make rendered` runs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.real.deployment.chart import CHART, PRODUCTION, written
from tests.real.deployment.rendering import K8S
from tests.real.services.cluster_tools import Helm
from tests.tools import catalogue

FOLDER: Final = K8S / "rendered"
HEAD: Final = """\
# Generated from k8s/chart by `make rendered`. Change the chart, or patch these objects.
"""
NAMESPACE: Final = """\
---
apiVersion: v1
kind: Namespace
metadata:
  name: {name}
  labels:
    app.kubernetes.io/name: gpuledger
    pod-security.kubernetes.io/enforce: {level}
    pod-security.kubernetes.io/audit: {level}
    pod-security.kubernetes.io/warn: {level}
"""
LEVELS: Final = {"gpuledger-agent": "privileged", "gpuledger": "restricted"}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The values and the components of each release of a file."""

    values: Path
    releases: tuple[str, ...]


PRESETS: Final = {
    "exporter": Preset(values=CHART / "values.yaml", releases=("agent",)),
    "production": Preset(values=PRODUCTION, releases=("agent", "central")),
}


def text_of(preset: Preset) -> str:
    """Return the content of a preset's file."""
    helm = Helm(binary=catalogue.named("helm").find())
    parts = [HEAD]
    for components in preset.releases:
        with TemporaryDirectory() as folder:
            file, namespace = written(
                preset.values, {"components": components}, folder=Path(folder)
            )
            printed = helm.text(CHART, f"--values={file}", name="gpuledger", namespace=namespace)
        parts += [NAMESPACE.format(name=namespace, level=LEVELS[namespace]), printed]
    lines = "".join(parts).splitlines()
    # Nothing but Helm may change an object with this label.
    kept = [line.rstrip() for line in lines if "app.kubernetes.io/managed-by: Helm" not in line]
    return re.sub(r"\n+", "\n", "\n".join([*kept, ""]))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, preset in PRESETS.items():
        (FOLDER / f"{name}.yaml").write_text(text_of(preset))
