"""Nodes with GPUs on a real control plane; a thread plays their kubelets.

It runs gpuledger's containers as processes, with the commands of their pods on the API server, and
reports all other pods as running. Scheduler and controllers are real.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from tests.real.deployment.rendering import Rendering
from tests.real.played import Played
from tests.real.services import web

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tests.real.deployment.installation import Installation
    from tests.real.end_to_end.components import Component

NODE_LABELS: Final = {"nvidia.com/gpu.present": "true"}
_PERIOD_SECONDS: Final = 0.2
_PATCH: Final = "application/merge-patch+json"
_OBJECTS: Final = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "DaemonSet": ("/apis/apps/v1", "daemonsets"),
    "Deployment": ("/apis/apps/v1", "deployments"),
}


@dataclass
class PlayedNodes(Played):
    """Nodes whose pods run, those of gpuledger as processes."""

    installation: Installation
    overridden: Mapping[str, str] = field(default_factory=dict)
    """Variables of agents with other values than the rendered ones, for a machine without a GPU."""
    addresses: dict[str, str] = field(default_factory=dict)
    """The addresses on which processes listen, by the addresses of their pods."""
    components: dict[str, Component] = field(default_factory=dict)
    """The processes that run, by the names of their pods."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self._errors: list[BaseException] = []
        self._pods = 0

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for component in self.components.values():
            component.kill()
        if self._errors:
            raise self._errors[0]

    def add(self, *names: str, labels: Mapping[str, str]) -> None:
        """Create ready nodes."""
        for name in names:
            resources = {"cpu": "64", "memory": "512Gi", "pods": "110"}
            metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}}
            self._request("POST", "/api/v1/nodes", {"metadata": metadata})
            status = {
                "capacity": resources,
                "allocatable": resources,
                "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
            }
            self._patch(f"/api/v1/nodes/{name}/status", {"status": status})
            # The API server taints a new node, and a controller removes the taint later.
            self._patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    def label(self, node: str, labels: Mapping[str, str]) -> None:
        """Change labels of a node."""
        self._patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": dict(labels)}})

    def pods(self, namespace: str = "") -> list[dict[str, Any]]:
        """Return the pods that run, of one namespace or of all."""
        where = f"/namespaces/{namespace}" if namespace else ""
        found = self._request("GET", f"/api/v1{where}/pods")["items"]
        return [
            pod for pod in found if pod["status"].get("phase") == "Running" and not _is_deleted(pod)
        ]

    @override
    def _play(self) -> None:
        try:
            while not self._end.wait(_PERIOD_SECONDS):
                for pod in self._request("GET", "/api/v1/pods")["items"]:
                    self._play_pod(pod)
        except BaseException as error:  # noqa: BLE001  # raised again when the block ends
            self._errors.append(error)

    def _play_pod(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if _is_deleted(pod):
            if component := self.components.get(metadata["name"]):
                component.stop()
                del self.components[metadata["name"]]
            self.installation.api.request("DELETE", path, {"gracePeriodSeconds": 0})
        elif "nodeName" in pod["spec"] and pod["status"].get("phase") != "Running":
            if metadata.get("labels", {}).get("app.kubernetes.io/name") == "gpuledger":
                if metadata["name"] not in self.components:
                    self.components[metadata["name"]] = self._start(pod)
                if not _is_ready(pod, self.components[metadata["name"]]):
                    return
            self._set_running(pod, path)

    def _set_running(self, pod: Mapping[str, Any], path: str) -> None:
        self._pods += 1
        address = f"10.0.1.{self._pods}"
        if component := self.components.get(pod["metadata"]["name"]):
            self.addresses[address] = component.health.removeprefix("http://")
        now = pod["metadata"]["creationTimestamp"]
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
            "startTime": now,
        }
        self.installation.api.request(
            "PATCH", f"{path}/status", {"status": status}, content_type=_PATCH
        )

    def _start(self, pod: Mapping[str, Any]) -> Component:
        """Start the container of a pod, with the files of its namespace."""
        namespace, node = pod["metadata"]["namespace"], pod["spec"]["nodeName"]
        component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
        here = replace(
            self.installation,
            folder=self.installation.folder / pod["metadata"]["name"],
            overridden={**self.overridden, "NODE_NAME": node} if component == "agent" else {},
        )
        return here.start(self._objects(namespace).workload(f"gpuledger-{component}"))

    def _objects(self, namespace: str) -> Rendering:
        """Return the objects of a namespace from the API server that a container reads."""
        objects = []
        for kind, (group, plural) in _OBJECTS.items():
            found = self._request("GET", f"{group}/namespaces/{namespace}/{plural}")["items"]
            objects += [{**one, "kind": kind} for one in found]
        return Rendering(objects=objects)

    def _patch(self, path: str, body: object) -> None:
        status, found = self.installation.api.request("PATCH", path, body, content_type=_PATCH)
        assert status == 200, found

    def _request(self, method: str, path: str, body: object = None) -> Any:  # noqa: ANN401 - any kind of object
        status, found = self.installation.api.request(method, path, body)
        assert status in {200, 201}, found
        return found


def _is_deleted(pod: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_ready(pod: Mapping[str, Any], component: Component) -> bool:
    probe = pod["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"]
    try:
        return web.fetch(component.health + probe).status == HTTPStatus.OK
    except OSError:
        return False


def pod_of(played: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pod of a scenario as an object, which its scheduler binds to its node."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": played["name"], "namespace": played["namespace"]},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": played["node"]},
            "containers": [{"name": one["name"], "image": "cuda"} for one in played["containers"]],
        },
    }
