"""An installation of k8s/ on a real API server: applied, and its programs run as rendered.

No controller runs, so a Deployment creates no pods. The tests play the controllers, and start the
containers' programs as processes on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.real.deployment.rendering import K8S, Rendering, Workload, render
from tests.real.end_to_end.components import BIN, Component
from tests.real.services.kustomize import KustomizeError
from tests.real.services.secure_kafka import WORKLOADS
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.real.services.kubernetes import KubeApi
    from tests.real.services.kustomize import Kubectl
    from tests.real.services.secure_kafka import SecureKafka

OVERLAY: Final = "overlays/sasl-ssl"
SECOND_CLUSTER: Final = "overlays/second-cluster"
COPY: Final = "overlays/my-cluster"
NAMESPACE: Final = "gpuledger"
PODWATCH: Final = "gpuledger-podwatch"
SETTLED_SECONDS: Final = 120.0
PAGE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
_COMMAND: Final = re.compile(r"^(?:cp|kubectl (?:apply|wait)) .*$", re.MULTILINE)
_AUTH_QUERY: Final = re.compile(r"^\$ kubectl (auth can-i .*)\n(yes|no)$", re.MULTILINE)


def documented_commands() -> list[list[str]]:
    """Return the commands that install, in order, without their comments."""
    return [line.split("#")[0].split() for line in _COMMAND.findall(PAGE)]


def documented_questions(account: str) -> list[tuple[list[str], str]]:
    """Return each documented `kubectl auth can-i` about an account with its answer."""
    requested = [(question.split(), answer) for question, answer in _AUTH_QUERY.findall(PAGE)]
    return [(words, answer) for words, answer in requested if words[-1] == f"--as={account}"]


def can_i(kubectl: Kubectl, question: list[str]) -> str:
    """Return kubectl's answer; kubectl ends with an error if it is no."""
    try:
        return kubectl(*question).splitlines()[-1]
    except KustomizeError as error:
        return str(error).splitlines()[-1].rpartition(" ")[2]


def copy_of_k8s(folder: Path) -> Path:
    """Return a copy of the checkout's `k8s`."""
    return shutil.copytree(K8S, folder / "k8s")


def fill_in(overlay: Path, kafka: SecureKafka, *, users: int = len(WORKLOADS)) -> None:
    """Replace the placeholders of a copied overlay with this many users, as its user does."""
    place = overlay / "installation"
    (place / "ca.crt").write_text(kafka.ca_file.read_text())
    env = (place / "kafka.env").read_text()
    servers = rf"\g<1>{kafka.bootstrap_servers}"
    env, replaced = re.subn(r"(?m)^(GPULEDGER_KAFKA__BOOTSTRAP_SERVERS=).*$", servers, env)
    assert replaced == 1
    (place / "kafka.env").write_text(env)
    passwords = [*overlay.glob("*/password"), *overlay.glob("central/passwords/*")]
    for file in passwords:
        user = file.read_text().split()[-1]
        file.write_text(f"{kafka.users[user]}\n")
    assert len(passwords) == users


@dataclass(kw_only=True)
class Installation:
    """The objects applied to an API server, and their brokers."""

    api: KubeApi
    kubectl: Kubectl
    folder: Path
    """The directory with the copy of k8s/."""
    root: str
    """The kustomization that is applied as a whole, under k8s/."""
    topics: str
    """The kustomization of the Job that creates the topics."""
    plain_servers: str = ""
    """The brokers, for clients without a login."""
    overridden: Mapping[str, str] = field(default_factory=dict)
    """Variables that differ from the rendered ones, because their values do not exist here."""
    printed: list[str] = field(default_factory=list)
    """kubectl's output."""

    def rendering(self) -> Rendering:
        """Return all its objects."""
        folders = [self.folder / "k8s" / name for name in (self.topics, self.root)]
        return Rendering(objects=[made for folder in folders for made in render(folder).objects])

    def run(self, command: list[str]) -> None:
        """Run a command of the documentation in the place of the checkout."""
        if command[0] == "kubectl":
            if command[1] == "wait":
                self.run_topics_job()
            self.printed.append(self.kubectl(*command[1:], folder=self.folder))
        else:
            subprocess.run(command, cwd=self.folder, check=True)

    def run_topics_job(self) -> None:
        """Run the Job's program as rendered, and set its status to complete."""
        job = self.rendering().workload("gpuledger-topics")
        laid_out = job.lay_out(self.folder / "topics-job")
        done = subprocess.run(
            [BIN / laid_out.argv[0], *laid_out.argv[1:]],
            env={"PATH": os.environ["PATH"], **laid_out.environment, **self.overridden},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [
            {"type": name, "status": "True", "lastTransitionTime": now}
            for name in ("SuccessCriteriaMet", "Complete")
        ]
        status = {
            "startTime": now,
            "completionTime": now,
            "succeeded": 1,
            "conditions": conditions,
        }
        code, found = self.api.request(
            "PATCH",
            f"{self.api.path_of(job.manifest)}/status",
            {"status": status},
            content_type="application/merge-patch+json",
        )
        assert code == 200, found

    def play_controllers(self) -> None:
        """Create the objects that a controller manager and the GPU operator create in a cluster."""
        self._create("/apis/node.k8s.io/v1/runtimeclasses", "nvidia", handler="nvidia")
        for made in self.rendering().of_kind("Namespace"):
            self.create_default_account(made["metadata"]["name"])

    def create_default_account(self, namespace: str) -> None:
        """Create the default account of a namespace's pods."""
        self.api.create_namespace(namespace)
        self._create(f"/api/v1/namespaces/{namespace}/serviceaccounts", "default")

    def admits(self, pod: Mapping[str, Any]) -> str:
        """Return why a pod would be rejected; empty if it would not."""
        path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods"
        status, found = self.api.request(
            "POST", f"{path}?dryRun=All&fieldValidation=Strict", dict(pod)
        )
        return "" if status == 201 else f"{status} {found['message']}"

    def may(self, user: str, attributes: Mapping[str, str]) -> bool:
        """Return whether a user may do something."""
        spec = {"user": user, "resourceAttributes": dict(attributes)}
        status, found = self.api.request(
            "POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", {"spec": spec}
        )
        assert status == 201, found
        return bool(found["status"]["allowed"])

    def start(self, workload: Workload) -> Component:
        """Start a workload's program as rendered, on a free port.

        In a pod, podwatch finds the token of its service account and its namespace under
        /var/run/secrets/kubernetes.io. Here a kubeconfig and a variable provide them.
        """
        folder = self.folder / workload.name
        laid_out = workload.lay_out(folder)
        environment = {**laid_out.environment, **self.overridden}
        if workload.pod["automountServiceAccountToken"]:
            account, namespace = workload.pod["serviceAccountName"], workload.namespace
            kubeconfig = self.api.kubeconfig_of(namespace=namespace, name=account)
            environment["GPULEDGER_KUBERNETES__KUBECONFIG"] = str(kubeconfig)
            environment["GPULEDGER_LEASE__NAMESPACE"] = namespace
        # A `Component` gets only variables with our prefix, so the node's name is set as a
        # setting.
        environment["GPULEDGER_NODE_NAME"] = environment.pop("NODE_NAME", "")
        ours = {
            name.removeprefix("GPULEDGER_"): value
            for name, value in environment.items()
            if name.startswith("GPULEDGER_") and value
        }
        made = Component(name=workload.name, command=laid_out.argv, folder=folder, environment=ours)
        made.start()
        return made

    def create_pod(self, namespace: str, name: str) -> str:
        """Create a pod on a node, and return its UID."""
        self.create_default_account(namespace)
        body = {
            "metadata": {"name": name},
            "spec": {"nodeName": "node-1", "containers": [{"name": "main", "image": "cuda"}]},
        }
        pods = f"/api/v1/namespaces/{namespace}/pods"
        eventually(lambda: self.api.request("POST", pods, body)[0] in {201, 409})
        _, found = self.api.request("GET", f"{pods}/{name}")
        uid: str = found["metadata"]["uid"]
        return uid

    def _create(self, path: str, name: str, **others: object) -> None:
        status, found = self.api.request("POST", path, {"metadata": {"name": name}, **others})
        assert status in {201, 409}, found


def eventually(condition: Callable[[], bool], *, within_seconds: float = SETTLED_SECONDS) -> None:
    """Wait until a condition holds; the API server learns of its own objects with a delay."""
    end_seconds = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < end_seconds, "not in time"
        time.sleep(0.1)
