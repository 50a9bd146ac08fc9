"""Rendered objects of k8s/, and each workload's files and command."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.unit.deployment import components
from tests.unit.deployment.components import ROOT, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Manifest = dict[str, Any]

K8S: Final = ROOT / "k8s"
FIELDS: Final = {"spec.nodeName": "node-1", "status.hostIP": "127.0.0.1"}
"""Values of a pod's variables that come from the pod itself."""
PUBLISHED: Final = {"kube-root-ca.crt": {"ca.crt": "the cluster's authority"}}
"""The ConfigMaps that the controller manager creates in each namespace, and stand-ins for them."""
ACCOUNT_TOKEN: Final = b"the account's token"
"""A stand-in for the token of the pod's service account, which a kubelet would write."""
RBAC: Final = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
_RUN_ONCE: Final = ("Job", "CronJob")
_WORKLOADS: Final = ("DaemonSet", "Deployment", *_RUN_ONCE)


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """A container's command and environment, with its files under a directory."""

    argv: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """The objects of one installation or release."""

    objects: list[Manifest]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        """Return the objects of these kinds, in the order of the kinds."""
        return [found for kind in kinds for found in self.objects if found["kind"] == kind]

    def get(self, kind: str, name: str, namespace: str | None = None) -> Manifest:
        """Return an object; raises LookupError if it does not exist."""
        for found in self.of_kind(kind):
            metadata = found["metadata"]
            if (metadata["name"], metadata.get("namespace")) == (name, namespace):
                return found
        raise LookupError(f"{kind} {namespace}/{name} is not rendered")

    def workloads(self) -> list[Workload]:
        """Return the containers of DaemonSets, Deployments, Jobs and CronJobs."""
        return [
            Workload(manifest=found, rendering=self, index=index)
            for found in self.of_kind(*_WORKLOADS)
            for index in range(len(pod_of(found)["spec"]["containers"]))
        ]

    def services(self) -> list[Workload]:
        """Return the workloads that serve HTTP endpoints."""
        return [found for found in self.workloads() if "ports" in found.container]

    def workload(self, name: str) -> Workload:
        """Return a workload by its name; raises LookupError if it does not exist."""
        for found in self.workloads():
            if found.name == name:
                return found
        raise LookupError(f"no workload {name} is rendered")


def pod_of(manifest: Manifest) -> Manifest:
    """Return the template of a workload's pods."""
    spec = manifest["spec"]
    found: Manifest = spec.get("jobTemplate", {}).get("spec", spec)["template"]
    return found


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A container of a DaemonSet, Deployment, Job or CronJob."""

    manifest: Manifest
    rendering: Rendering
    index: int = 0

    @property
    def name(self) -> str:
        """The name of the object, with the component of this container and without a hash."""
        first, own = self.pod["containers"][0]["name"], self.container["name"]
        return re.sub(rf"-{first}(-[0-9a-f]{{8}})?$", f"-{own}", self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(pod_of(self.manifest)["metadata"]["labels"])

    @property
    def pod(self) -> Manifest:
        spec: Manifest = pod_of(self.manifest)["spec"]
        return spec

    @property
    def container(self) -> Manifest:
        spec: Manifest = self.pod["containers"][self.index]
        return spec

    @property
    def stage(self) -> Stage:
        """The Dockerfile stage that its image is built from, in whatever registry."""
        return components.target_of(self.container["image"].rpartition("/")[2])

    @property
    def command(self) -> list[str]:
        """The container's command."""
        return [*components.entrypoint(self.stage), *self.container["args"]]

    def as_pod(self) -> Manifest:
        """Return the pod that its controller would create."""
        metadata = {"name": f"{self.name}-0", "namespace": self.namespace, "labels": self.labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.pod}

    def environment(self) -> dict[str, str]:
        """Return the container's variables; raises LookupError for a missing source."""
        given: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            if secret := source.get("secretRef"):
                data = self._secret(secret["name"], secret)
                given |= {name: base64.b64decode(text).decode() for name, text in data.items()}
            else:
                given |= self._config_map(source["configMapRef"]["name"])
        for variable in self.container.get("env", []):
            if (value := self._value(variable)) is not None:
                given[variable["name"]] = value
        return given

    def files(self) -> dict[str, bytes]:
        """Return the files that ConfigMaps and Secrets put into the container, by path.

        Raises LookupError for a missing one that is not optional.
        """
        volumes = {volume["name"]: volume for volume in self.pod.get("volumes", [])}
        return {
            f"{mount['mountPath']}/{name}": content
            for mount in self.container.get("volumeMounts", [])
            for name, content in self._content(volumes[mount["name"]])
        }

    def lay_out(self, folder: Path) -> LaidOut:
        """Write its files under a directory, and return the command that finds them there."""
        mounts = [mount["mountPath"] for mount in self.container.get("volumeMounts", [])]

        def moved(text: str) -> str:
            for path in mounts:
                text = re.sub(rf"(?<![\w/]){re.escape(path)}\b", f"{folder}{path}", text)
            return text

        for path, content in self.files().items():
            target = folder / path.removeprefix("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(moved(content.decode()))
        environment = {name: moved(value) for name, value in self.environment().items()}
        return LaidOut(argv=[moved(word) for word in self.command], environment=environment)

    def settings(self, folder: Path) -> dict[str, Any]:
        """Return the settings with which its program would start, as the program prints them."""
        laid_out = self.lay_out(folder / self.name)
        return components.settings(laid_out.argv, laid_out.environment)

    def _content(self, volume: Manifest) -> Iterator[tuple[str, bytes]]:
        if "configMap" in volume:
            for name, text in self._config_map(volume["configMap"]["name"]).items():
                yield name, text.encode()
        if "secret" in volume:
            secret = volume["secret"]
            for name, text in self._secret(secret["secretName"], secret).items():
                yield name, base64.b64decode(text)
        for source in volume.get("projected", {}).get("sources", []):
            yield from self._projected(source)

    def _projected(self, source: Manifest) -> Iterator[tuple[str, bytes]]:
        if secret := source.get("secret"):
            for name, text in self._secret(secret["name"], secret).items():
                yield name, base64.b64decode(text)
        elif token := source.get("serviceAccountToken"):
            yield token["path"], ACCOUNT_TOKEN
        else:
            published = PUBLISHED[source["configMap"]["name"]]
            for item in source["configMap"]["items"]:
                yield item["path"], published[item["key"]].encode()

    def _value(self, variable: Manifest) -> str | None:
        """Return a variable's value; `None` if its optional Secret lacks the key."""
        if "value" in variable:
            return str(variable["value"])
        if reference := variable["valueFrom"].get("secretKeyRef"):
            data = self._secret(reference["name"], reference)
            if reference["key"] not in data and reference.get("optional"):
                return None
            return base64.b64decode(data[reference["key"]]).decode()
        return FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]

    def _config_map(self, name: str) -> Mapping[str, str]:
        data: Mapping[str, str] = self.rendering.get("ConfigMap", name, self.namespace)["data"]
        return data

    def _secret(self, name: str, source: Manifest) -> Mapping[str, str]:
        try:
            found = self.rendering.get("Secret", name, self.namespace)
        except LookupError:
            if source.get("optional"):
                return {}
            raise
        data: Mapping[str, str] = found["data"]
        return data


def strings(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in an object with its path, without list indices."""
    if isinstance(value, str):
        yield path, value
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from strings(inner, f"{path}.{key}" if path else key)
    for inner in value if isinstance(value, list) else ():
        yield from strings(inner, path)
