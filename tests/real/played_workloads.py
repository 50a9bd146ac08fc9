"""Pods of Deployments on a real API server, and their GPU use in Prometheus.

A thread plays the scheduler and the kubelet: it runs new pods and removes deleted ones. It also
answers Prometheus with the series of running pods, among which it divides each workload's load.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import override

from tests.real.played import Played
from tests.real.services.page import serving

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from tests.real.services.kube_client import KubeApiClient

NAMESPACE = "serving"
NODE = "gpu-0"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_PERIOD_SECONDS = 0.25


class Use(NamedTuple):
    """A running pod and the part of its GPU that it uses."""

    name: str
    uid: str
    owner: str
    busy: float


@dataclass
class PlayedWorkloads(Played):
    """Deployments whose pods use GPUs according to a load in GPUs."""

    kube: KubeApiClient
    loads: dict[str, float] = field(default_factory=dict)
    """Number of GPUs that each Deployment could use; a pod uses at most one."""
    waiting: float = 0
    """Number of requests that wait in the gateway."""
    is_silent: bool = False
    """Whether the series of GPUs are missing."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._running: list[dict[str, Any]] = []
        self._page = ExitStack()

    @override
    def __enter__(self) -> Self:
        self.kube.create_namespace(NAMESPACE)
        self._address = self._page.enter_context(serving(self.series))
        return super().__enter__()

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._page.close()

    @property
    def scrape_config(self) -> str:
        """A Prometheus configuration that scrapes the series each second."""
        return (
            "global: {scrape_interval: 1s}\nscrape_configs:\n  - job_name: played\n"
            f'    static_configs: [{{targets: ["{self._address}"]}}]\n'
        )

    def deploy(self, name: str, *, replicas: int, load: float) -> None:
        """Create a Deployment whose pods share a load."""
        self.loads[name] = load
        labels = {"app": name}
        container = {
            "name": "server",
            "image": "server",
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        }
        self.kube.apply(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {
                    "replicas": replicas,
                    "selector": {"matchLabels": labels},
                    "template": {
                        "metadata": {"labels": labels},
                        # Without a scheduler, pods are bound from the start.
                        "spec": {"nodeName": NODE, "containers": [container]},
                    },
                },
            }
        )

    def replicas(self, name: str) -> int:
        """Return the number of replicas that a Deployment should have."""
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}"
        _, found = self.kube.request("GET", path)
        replicas: int = found["spec"]["replicas"]
        return replicas

    @override
    def _play(self) -> None:
        while not self._end.wait(_PERIOD_SECONDS):
            _, found = self.kube.request("GET", _PODS)
            pods = found.get("items", [])
            for pod in pods:
                self._run(pod)
            self._running = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def _run(self, pod: dict[str, Any]) -> None:
        path = f"{_PODS}/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self.kube.request("DELETE", path, {"gracePeriodSeconds": 0})
        elif pod["status"].get("phase") != "Running":
            condition = {
                "type": "Ready",
                "status": "True",
                "lastTransitionTime": pod["metadata"]["creationTimestamp"],
            }
            status = {
                "phase": "Running",
                "conditions": [condition],
                "startTime": pod["metadata"]["creationTimestamp"],
            }
            content_type = "application/merge-patch+json"
            self.kube.request(
                "PATCH", f"{path}/status", {"status": status}, content_type=content_type
            )

    def uses(self) -> list[Use]:
        """Return the use of the running pods."""
        running = [] if self.is_silent else self._running
        owners = Counter(pod["metadata"]["labels"]["app"] for pod in running)
        return [
            Use(
                name=pod["metadata"]["name"],
                uid=pod["metadata"]["uid"],
                owner=(owner := pod["metadata"]["labels"]["app"]),
                busy=min(1, self.loads[owner] / owners[owner]),
            )
            for pod in running
        ]

    def series(self) -> str:
        """Return the series of the running pods and of the gateway in Prometheus's text format."""
        lines = [
            f'gateway_requests_waiting{{namespace="{NAMESPACE}",service="chat"}} {self.waiting}'
        ]
        if not self.is_silent:
            lines.append(f'gpuledger_gpu_up{{cluster="default",node="{NODE}"}} 1')
        for use in self.uses():
            labels = (
                f'cluster="default",node="{NODE}",namespace="{NAMESPACE}",'
                f'pod="{use.name}",pod_uid="{use.uid}"'
            )
            owner = f'owner_kind="Deployment",owner_name="{use.owner}"'
            lines += [
                f'gpuledger_pod_gpu_busy_ratio{{{labels},container="server"}} {use.busy}',
                f"gpuledger_pod_info{{{labels},{owner}}} 1",
            ]
        return "\n".join(lines) + "\n"
