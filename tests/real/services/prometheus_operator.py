"""The Prometheus Operator on a real API server, and the targets of the configuration it writes.

The Prometheus of the tests has no service discovery, so its configuration lists the targets with
the labels that Kubernetes' service discovery would give them.
"""

from __future__ import annotations

import base64
import gzip
import re
from typing import TYPE_CHECKING, Any, Final

import yaml
from typing_extensions import override

from tests.real.services import web
from tests.real.services.autoscaling import ClusterPart, apply_definitions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.real.services.kube_client import KubeApiClient

DEFINITIONS: Final = ("prometheuses", "prometheusrules", "servicemonitors", "podmonitors", "probes")


class PrometheusOperator(ClusterPart):
    """The operator, which turns monitors and rules into the configuration of a Prometheus."""

    name = "prometheus-operator"

    @override
    def start(self) -> None:
        folder = self.binary.parent / "prometheus-operator-crd"
        apply_definitions(
            self.kube, [folder / f"monitoring.coreos.com_{plural}.yaml" for plural in DEFINITIONS]
        )
        # The operator ends if its kinds are not served yet.
        web.await_some(self._is_served, what="the operator's kinds", deadline_seconds=60)
        super().start()

    def _is_served(self) -> list[str]:
        _, found = self.kube.request("GET", "/apis/monitoring.coreos.com/v1")
        served = {resource["name"] for resource in found.get("resources", [])}
        return [*DEFINITIONS] if served.issuperset(DEFINITIONS) else []

    @override
    def argv(self) -> list[str | Path]:
        return [
            self.binary,
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    @override
    def is_ready(self) -> bool:
        return web.fetch(f"http://127.0.0.1:{self.port}/healthz").status == 200


def configuration_of(
    kube: KubeApiClient, name: str, namespace: str, *, folder: Path, addresses: Mapping[str, str]
) -> str:
    """Return the configuration that the operator wrote for a Prometheus; empty if there is none.

    `addresses` maps the addresses of pods to those on which their processes listen. Rule files are
    written to `folder`.
    """
    _, secret = kube.request("GET", f"/api/v1/namespaces/{namespace}/secrets/prometheus-{name}")
    if "data" not in secret:
        return ""
    written = gzip.decompress(base64.b64decode(secret["data"]["prometheus.yaml.gz"])).decode()
    # The operator's sidecar replaces the variable.
    config: dict[str, Any] = yaml.safe_load(written.replace("$(SHARD)", "0"))
    for job in config["scrape_configs"]:
        job["static_configs"] = [
            found
            for discovery in job.pop("kubernetes_sd_configs", [])
            for where in discovery["namespaces"]["names"]
            for found in discovered(kube, discovery["role"], where, addresses)
        ]
    config["rule_files"] = [str(file) for file in _rule_files(kube, name, namespace, folder)]
    config["global"] |= {
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "evaluation_interval": "1s",
    }
    for section in ("alerting", "storage"):
        config.pop(section, None)
    return yaml.safe_dump(config)


def _rule_files(kube: KubeApiClient, name: str, namespace: str, folder: Path) -> Iterator[Path]:
    path = f"/api/v1/namespaces/{namespace}/configmaps/prometheus-{name}-rulefiles-0"
    _, found = kube.request("GET", path)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in found.get("data", {}).items():
        (folder / file).write_text(text)
        yield folder / file


def discovered(
    kube: KubeApiClient, role: str, namespace: str, addresses: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the targets of a namespace with the labels of Kubernetes' service discovery."""
    _, found = kube.request("GET", f"/api/v1/namespaces/{namespace}/pods")
    pods = {pod["metadata"]["name"]: pod for pod in found["items"]}
    if role == "pod":
        for pod in pods.values():
            yield from _ports_of(pod, {}, addresses)
        return
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    _, found = kube.request("GET", path)
    for part in found["items"]:
        (owner,) = part["metadata"]["ownerReferences"]
        _, service = kube.request("GET", f"/api/v1/namespaces/{namespace}/services/{owner['name']}")
        for port in part["ports"]:
            labels = {
                **_labels("service", service),
                "__meta_kubernetes_endpoint_port_name": port["name"],
                "__meta_kubernetes_endpointslice_port_name": port["name"],
            }
            for endpoint in part["endpoints"]:
                reference = endpoint["targetRef"]
                of_target = {
                    f"__meta_kubernetes_{kind}_address_target_{key}": reference[key]
                    for kind in ("endpoint", "endpointslice")
                    for key in ("kind", "name")
                }
                for target in _ports_of(pods[reference["name"]], labels | of_target, addresses):
                    if (
                        target["labels"]["__meta_kubernetes_pod_container_port_name"]
                        == port["name"]
                    ):
                        yield target


def _ports_of(
    pod: Mapping[str, Any], labels: Mapping[str, str], addresses: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    address = addresses.get(pod["status"].get("podIP", ""))
    if address is None:
        return
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            yield {
                "targets": [address],
                "labels": {
                    **labels,
                    **_labels("pod", pod),
                    "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
                    "__meta_kubernetes_pod_node_name": pod["spec"]["nodeName"],
                    "__meta_kubernetes_pod_ip": pod["status"]["podIP"],
                    "__meta_kubernetes_pod_phase": pod["status"]["phase"],
                    "__meta_kubernetes_pod_ready": "true",
                    "__meta_kubernetes_pod_container_name": container["name"],
                    "__meta_kubernetes_pod_container_port_name": port["name"],
                    "__meta_kubernetes_pod_container_port_number": str(port["containerPort"]),
                },
            }


def _labels(kind: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the name and the labels of a pod or Service as labels of its targets."""
    made = {f"__meta_kubernetes_{kind}_name": found["metadata"]["name"]}
    for key, value in found["metadata"].get("labels", {}).items():
        name = re.sub(r"\W", "_", key)
        made[f"__meta_kubernetes_{kind}_label_{name}"] = value
        made[f"__meta_kubernetes_{kind}_labelpresent_{name}"] = "true"
    return made
