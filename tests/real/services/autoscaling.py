"""KEDA, prometheus-adapter, and the controllers that scale Deployments, on a real API server.

All of them act as the administrator, because their permissions are not under test.
"""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from typing_extensions import override

from tests.real.services.certificates import Authority
from tests.real.services.kube_client import KubeApiError
from tests.real.services.ports import free_ports
from tests.real.services.process import Part, Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tests.real.services.kubernetes import KubeApi

NAMESPACE = "keda"
_SCALING = (
    "deployment-controller",
    "replicaset-controller",
    "horizontal-pod-autoscaler-controller",
)
# Without these, the controllers wait for minutes before they trust a new pod or scale down.
_QUICK_AUTOSCALING = (
    "--horizontal-pod-autoscaler-sync-period=2s",
    "--horizontal-pod-autoscaler-downscale-stabilization=0s",
    "--horizontal-pod-autoscaler-initial-readiness-delay=1s",
    "--horizontal-pod-autoscaler-cpu-initialization-period=1s",
)


def aggregation_arguments(folder: Path) -> list[str]:
    """Return the API server's arguments for aggregated APIs, such as those of metrics."""
    authority = Authority(folder=folder)
    client = authority.issue("front-proxy-client")
    return [
        f"--requestheader-client-ca-file={authority.certificate}",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={client.certificate}",
        f"--proxy-client-key-file={client.key}",
    ]


def apply_definitions(kube: KubeApi, files: Iterable[Path]) -> None:
    """Apply files of one definition each, named `<group>_<plural>.yaml`."""
    for file in sorted(files):
        group, _, plural = file.stem.partition("_")
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        answer = kube.fetch(
            "PATCH",
            f"{path}/{plural}.{group}?fieldManager=tests&force=true",
            file.read_bytes(),
            content_type="application/apply-patch+yaml",
        )
        if answer.status >= 400:
            raise KubeApiError(f"{file.name}: {answer.status} {answer.body!r}")


class ClusterPart(Part):
    """A client of the API server that is ready when its port answers."""

    def __init__(self, *, binary: Path, folder: Path, kube: KubeApi) -> None:
        super().__init__(folder=folder)
        self.binary, self.kube = binary, kube
        self.port = free_ports(1)[0]

    @override
    def is_ready(self) -> bool:
        with socket.socket() as probe:
            probe.connect(("127.0.0.1", self.port))
        return True

    @property
    @override
    def process(self) -> Process:
        if self._process is None:
            self._process = Process(
                name=self.name, argv=self.argv(), folder=self.folder, environment=self.environment()
            )
        return self._process

    def environment(self) -> Mapping[str, str]:
        """Return the variables of the process."""
        return {"KUBECONFIG": str(self.kube.kubeconfig)}


class ControllerManager(ClusterPart):
    """Some of Kubernetes' controllers; by default those that scale Deployments."""

    name = "kube-controller-manager"

    def __init__(
        self, *, binary: Path, folder: Path, kube: KubeApi, controllers: Sequence[str] = _SCALING
    ) -> None:
        super().__init__(binary=binary, folder=folder, kube=kube)
        self._controllers = controllers

    @override
    def argv(self) -> list[str | Path]:
        kubeconfig = self.kube.kubeconfig
        return [
            self.binary,
            f"--kubeconfig={kubeconfig}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            "--leader-elect=false",
            f"--controllers={','.join(self._controllers)}",
            *_QUICK_AUTOSCALING,
        ]


class KedaOperator(ClusterPart):
    """KEDA's operator, which activates workloads and answers the adapter's queries."""

    name = "keda-operator"

    def __init__(self, *, binary: Path, folder: Path, kube: KubeApi) -> None:
        super().__init__(binary=binary, folder=folder, kube=kube)
        self.other_ports = free_ports(2)
        self.certificates = folder / "certificates"
        authority = Authority(folder=folder / "authority")
        pair = authority.issue("localhost")
        self.certificates.mkdir(parents=True)
        shutil.copy(authority.certificate, self.certificates / "ca.crt")
        shutil.copy(pair.certificate, self.certificates / "tls.crt")
        shutil.copy(pair.key, self.certificates / "tls.key")

    @override
    def start(self) -> None:
        self.kube.create_namespace(NAMESPACE)
        apply_definitions(self.kube, (self.binary.parent / "bases").glob("*.yaml"))
        super().start()

    @override
    def environment(self) -> Mapping[str, str]:
        return {
            **super().environment(),
            "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
            "POD_NAMESPACE": NAMESPACE,
            "WATCH_NAMESPACE": "",
        }

    @override
    def argv(self) -> list[str | Path]:
        metrics, health = self.other_ports
        return [
            self.binary,
            f"--metrics-bind-address=127.0.0.1:{metrics}",
            f"--health-probe-bind-address=127.0.0.1:{health}",
            f"--metrics-service-bind-address=127.0.0.1:{self.port}",
            f"--cert-dir={self.certificates}",
            "--enable-cert-rotation=false",
            "--enable-webhook-patching=false",
            "--enable-apiservice-patching=false",
            "--leader-elect=false",
        ]


class _MetricsAdapter(ClusterPart):
    """A server for a Kubernetes metrics API."""

    group: str
    version: str

    def __init__(self, *, binary: Path, folder: Path, kube: KubeApi) -> None:
        super().__init__(binary=binary, folder=folder, kube=kube)
        self.pair = Authority(folder=folder / "serving").issue(self.name)

    def aggregate(self) -> None:
        """Let the API server forward requests for the API, and wait until it is available."""
        # A Service cannot have endpoints on loopback, but it can name localhost.
        self.kube.create_namespace(NAMESPACE)
        self.kube.apply(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": self.name, "namespace": NAMESPACE},
                "spec": {
                    "type": "ExternalName",
                    "externalName": "localhost",
                    "ports": [{"port": self.port}],
                },
            }
        )
        name = f"{self.version}.{self.group}"
        manifest = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": name},
            "spec": {
                "group": self.group,
                "version": self.version,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {"name": self.name, "namespace": NAMESPACE, "port": self.port},
            },
        }
        self.kube.apply(manifest)
        path = f"/apis/{self.group}/{self.version}"
        self.process.wait_until(
            lambda: self.kube.fetch("GET", path).status == 200, deadline_seconds=self.ready_seconds
        )

    @override
    def start(self) -> None:
        super().start()
        self.aggregate()

    @override
    def argv(self) -> list[str | Path]:
        kubeconfig = self.kube.kubeconfig
        return [
            self.binary,
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self.pair.certificate}",
            f"--tls-private-key-file={self.pair.key}",
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            f"--lister-kubeconfig={kubeconfig}",
        ]


class KedaAdapter(_MetricsAdapter):
    """KEDA's server of external metrics."""

    name = "keda-adapter"
    group, version = "external.metrics.k8s.io", "v1beta1"

    def __init__(
        self, *, binary: Path, folder: Path, kube: KubeApi, operator: KedaOperator
    ) -> None:
        super().__init__(binary=binary, folder=folder, kube=kube)
        self.operator = operator
        self.client_port = free_ports(1)[0]

    @override
    def environment(self) -> Mapping[str, str]:
        return self.operator.environment()

    @override
    def argv(self) -> list[str | Path]:
        return [
            *super().argv(),
            f"--port={self.client_port}",
            f"--metrics-service-address=localhost:{self.operator.port}",
            f"--cert-dir={self.operator.certificates}",
        ]


class PrometheusAdapter(_MetricsAdapter):
    """prometheus-adapter, which serves custom metrics by rules."""

    name = "prometheus-adapter"
    group, version = "custom.metrics.k8s.io", "v1beta1"

    def __init__(
        self, *, binary: Path, folder: Path, kube: KubeApi, prometheus_url: str, rules: list[object]
    ) -> None:
        super().__init__(binary=binary, folder=folder, kube=kube)
        self.prometheus_url = prometheus_url
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "rules.yaml"
        self.config.write_text(yaml.safe_dump({"rules": rules}))

    @override
    def argv(self) -> list[str | Path]:
        return [
            *super().argv(),
            f"--prometheus-url={self.prometheus_url}",
            "--metrics-relist-interval=5s",
            f"--config={self.config}",
        ]
