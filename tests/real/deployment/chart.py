"""k8s/chart as Helm renders it, and values for its tests."""

from __future__ import annotations

import base64
import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import yaml

from tests.real.deployment.rendering import K8S, Rendering, strings
from tests.real.services.cluster_tools import Helm
from tests.tools import catalogue

if TYPE_CHECKING:
    from collections.abc import Mapping

CHART: Final = K8S / "chart"
CASES: Final = {
    file.stem.removesuffix("-values"): file for file in sorted((CHART / "ci").glob("*.yaml"))
}
PRODUCTION: Final = CHART / "values-production.yaml"
TRIAL: Final = CHART / "values-trial.yaml"
EDGE: Final = CHART / "values-edge.yaml"
PLATFORMS: Final = {file.stem: file for file in sorted((CHART / "platforms").glob("*.yaml"))}
NAMESPACES: Final = {
    "agent": "gpuledger-agent",
    "podwatch": "gpuledger",
    "central": "gpuledger",
    "all": "gpuledger-trial",
}
"""The namespace of each release, by its components."""
OPERATORS: Final = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "grafana.integreatly.org/v1beta1",
    "monitoring.kubesphere.io/v1alpha2",
)
"""The kinds of other projects that a cluster may have."""

CENTRAL: Final = {"components": "central", "kafka": {"bootstrapServers": "broker:9092"}}
"""The least values of a release of the central components."""
BROKERS: Final = {
    "kafka": {
        "bootstrapServers": "kafka.kafka.svc:9092",
        "caSecret": "gpuledger-kafka-credentials",
    },
    "agent": {"port": 9820},
}
PRICES: Final = {
    "prices": {
        "currency": "USD",
        "prices": [{"name": "h100", "product": "H100", "per_gpu_hour": 2.5}],
    }
}
ROOTLESS: Final = {"agent": {"runAsRoot": False}}
POD_LABELS: Final = {
    "agent": {"readKubelet": True, "settings": {"exposition": {"pod_labels": ["team"]}}}
}
MIG: Final = {"agent": {"migMonitor": True}}
BILL: Final = {"bill": {"enabled": True}, **PRICES}
REPORTS: Final = {"reports": {"enabled": True}, **PRICES}
ROWS: Final = {"sinkRows": {"enabled": True}}
SCALER: Final = {"sinkScaler": {"enabled": True}}
SECOND: Final = {
    "receivers": {"second": {"settings": {"url": "https://prometheus-2.example.com/api/v1/write"}}}
}
WEB: Final = {"http": {"webConfigSecret": "gpuledger-web"}}
BUCKET: Final = {
    "store": {
        "uri": "s3://ledger/gpuledger",
        "options": {"aws_region": "eu-central-1"},
        "credentialsSecret": "gpuledger-store-credentials",
    }
}


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


def written(*values: Path | Mapping[str, Any], folder: Path) -> tuple[Path, str]:
    """Write values into a file; return it, and the namespace of their release."""
    given: dict[str, Any] = {}
    for each in values:
        given = merged(given, yaml.safe_load(each.read_text()) if isinstance(each, Path) else each)
    file = folder / "values.json"
    file.write_text(json.dumps(given))
    return file, NAMESPACES.get(given.get("components", "agent"), "default")


def render_chart(
    *values: Path | Mapping[str, Any],
    folder: Path,
    chart: Path = CHART,
    name: str = "gpuledger",
    kinds: tuple[str, ...] = OPERATORS,
) -> Rendering:
    """Return a release's objects in its namespace, in a cluster with these further kinds.

    Raises ToolError if Helm rejects the values, and MissingToolError if Helm is missing.
    """
    helm = Helm(binary=catalogue.named("helm").find())
    file, namespace = written(*values, folder=folder)
    known = [f"--api-versions={kind}" for kind in kinds]
    objects = helm.template(chart, f"--values={file}", *known, name=name, namespace=namespace)
    return Rendering(objects=objects)


def render(*values: Path | Mapping[str, Any], central: str = "central") -> Rendering:
    """Return an installation in two releases: the agents, and the central components.

    Without values it has brokers, and the chart's defaults otherwise.
    """
    with TemporaryDirectory() as folder:
        releases = [
            render_chart(*(values or [BROKERS]), {"components": part}, folder=Path(folder))
            for part in ("agent", central)
        ]
    return Rendering(objects=[made for one in releases for made in one.objects])


def with_secrets(rendering: Rendering) -> Rendering:
    """Return a rendering with every Secret that its pods name."""
    files = ("username", "password", "token", "ca.crt", "tls.crt", "tls.key", "web.yml")
    variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    named = {
        (text, each.namespace): variables if path.endswith("secretRef.name") else files
        for each in rendering.workloads()
        for path, text in strings(each.pod)
        if re.search(r"secret\.(secretN|n)ame$|[sS]ecret(Key)?Ref\.name$", path)
    }
    made = [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": namespace},
            "data": dict.fromkeys(keys, base64.b64encode(b"secret").decode()),
        }
        for (name, namespace), keys in named.items()
    ]
    return Rendering(objects=[*rendering.objects, *made])
