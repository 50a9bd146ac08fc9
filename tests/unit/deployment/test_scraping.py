"""The examples of docs/guides/kubernetes.md by which Prometheus finds every metrics page."""

import re
from typing import Any, Final

import pytest
import yaml

from tests.unit.deployment import manifests
from tests.unit.deployment.components import ROOT
from tests.unit.deployment.manifests import Manifest

PAGE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
BLOCKS: Final[list[dict[str, Any]]] = [
    yaml.safe_load(block)
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    if "scrape_configs:" in block or "kind: PodMonitor" in block
]
SCRAPE: Final = next(block["scrape_configs"][0] for block in BLOCKS if "scrape_configs" in block)
MONITOR: Final = next(block["spec"] for block in BLOCKS if block.get("kind") == "PodMonitor")
SERVICES: Final = [one for one in manifests.load() if one["kind"] == "Service"]
WORKLOADS: Final = [
    one for one in manifests.load() if one["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
]
BY_DEFAULT: Final = "gpuledger"
"""The namespace that the overlay gives to objects without one."""


def namespace_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("namespace", BY_DEFAULT))


@pytest.mark.parametrize("service", SERVICES, ids=manifests.title)
def test_the_scrape_configuration_keeps_the_port_of_each_service(service: Manifest) -> None:
    (found,) = SCRAPE["kubernetes_sd_configs"]
    keep = next(rule for rule in SCRAPE["relabel_configs"] if rule.get("action") == "keep")
    name = service["metadata"]["labels"]["app.kubernetes.io/name"]
    kept = [
        port
        for port in service["spec"]["ports"]
        if re.fullmatch(keep["regex"], f"{name};{port['name']}")
    ]

    assert namespace_of(service) in found["namespaces"]["names"]
    assert len(kept) == 1


@pytest.mark.parametrize("workload", WORKLOADS, ids=manifests.title)
def test_the_pod_monitor_selects_each_pod_and_its_port(workload: Manifest) -> None:
    template = workload["spec"]["template"]
    ports = [
        port["name"]
        for container in template["spec"]["containers"]
        for port in container.get("ports", [])
    ]

    assert namespace_of(workload) in MONITOR["namespaceSelector"]["matchNames"]
    assert MONITOR["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert MONITOR["podMetricsEndpoints"][0]["port"] in ports
