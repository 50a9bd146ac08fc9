"""The configuration files next to docker-compose.yml, checked by the programs that read them."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.alertmanager import Alertmanager

COMPOSE = ROOT / "deploy" / "compose"


def test_prometheus_accepts_its_configuration(promtool: Path) -> None:
    command = [str(promtool), "check", "config", str(COMPOSE / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr


def test_alertmanager_accepts_its_configuration(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    alertmanager = start_alertmanager(config=(COMPOSE / "alertmanager.yml").read_text())

    assert alertmanager.alerts() == []


def test_alertmanager_accepts_the_shipped_grouping_and_inhibition(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    config = (ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text()

    assert start_alertmanager(config=config).alerts() == []


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    rules = map(str, (ROOT / "k8s" / "chart" / "rules").glob("*.rules.yaml"))
    command = [str(promtool), "check", "rules", "--lint=all", "--lint-fatal", *rules]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_documented_scrape_configuration(
    promtool: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(block)
    rules = ROOT / "k8s" / "chart" / "rules" / "gpuledger.rules.yaml"
    (tmp_path / "gpuledger.rules.yaml").write_text(rules.read_text())
    command = [str(promtool), "check", "config", "--syntax-only", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr


META = {
    "__meta_kubernetes_service_label_app_kubernetes_io_name": "gpuledger",
    "__meta_kubernetes_service_label_app_kubernetes_io_component": "{component}",
    "__meta_kubernetes_endpointslice_port_name": "http",
    "__meta_kubernetes_pod_name": "gpuledger-{component}-x",
    "__meta_kubernetes_pod_node_name": "gpu-node-7",
}
"""Labels that Kubernetes' service discovery gives to a component's target."""


def documented_relabelings() -> list[dict[str, Any]]:
    """Return the relabelings of the documented scrape job; the chart's monitors have the same."""
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(one) for one in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (job,) = (one["scrape_configs"][0] for one in blocks if "scrape_configs" in one)
    assert job["job_name"] == "gpuledger"
    relabelings: list[dict[str, Any]] = job["relabel_configs"]
    return relabelings


@pytest.mark.parametrize("component", ["agent", "join", "sink-store"])
def test_a_documented_target_has_the_labels_that_the_rules_need(
    component: str, promtool: Path, tmp_path: Path
) -> None:
    meta = {name: value.format(component=component) for name, value in META.items()}
    config = {
        "scrape_configs": [
            {
                "job_name": "gpuledger",
                "static_configs": [{"targets": ["10.0.0.1:9820"], "labels": meta}],
                "relabel_configs": documented_relabelings(),
            }
        ]
    }
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [str(promtool), "check", "service-discovery", str(file), "gpuledger"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    (target,) = json.loads(done.stdout)
    place = {"node": "gpu-node-7", "instance": "gpu-node-7"}

    shown = {name: value for name, value in target["labels"].items() if not name.startswith("__")}
    assert shown == {
        "job": "gpuledger",
        "component": component,
        "cluster": "default",
        "kubernetes_node": "gpu-node-7",
        "instance": f"gpuledger-{component}-x",
    } | (place if component == "agent" else {})
