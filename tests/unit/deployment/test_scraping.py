"""The example of docs/guides/kubernetes.md by which Prometheus finds every metrics endpoint."""

import re
from typing import Any, Final

import pytest
import yaml

from tests.unit.deployment import manifests
from tests.unit.deployment.components import ROOT
from tests.unit.deployment.manifests import Manifest

PAGE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
(_JOB,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", PAGE, re.DOTALL)
SCRAPE: Final[dict[str, Any]] = yaml.safe_load(_JOB)["scrape_configs"][0]
SERVICES: Final = [one for one in manifests.load() if one["kind"] == "Service"]


def namespace_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["namespace"])


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
