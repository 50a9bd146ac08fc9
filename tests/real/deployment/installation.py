"""An installation by the chart on a real API server, with its programs run as rendered.

No controller runs, so a Deployment creates no pods. The tests play the controllers, and start the
containers' programs as processes on this machine.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import time
from dataclasses import dataclass, field
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

import yaml

from tests.real.deployment.chart import PRODUCTION, merged, render, with_secrets
from tests.real.deployment.rendering import K8S, Rendering, Workload, strings
from tests.real.end_to_end.components import BIN, Component
from tests.real.services.cluster_tools import ToolError
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.real.services.cluster_tools import Helm, Kubectl
    from tests.real.services.kubernetes import KubeApi
    from tests.real.services.secure_kafka import SecureKafka

NAMESPACE: Final = "gpuledger"
PODWATCH: Final = "gpuledger-podwatch"
CA_SECRET: Final = "gpuledger-kafka-credentials"
LOGIN_PREFIX: Final = "gpuledger-kafka-login-"
SETTLED_SECONDS: Final = 120.0
PAGE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
_AUTH_QUERY: Final = re.compile(r"^\$ kubectl (auth can-i .*)\n(yes|no)$", re.MULTILINE)


def documented_commands() -> list[str]:
    """Return the blocks of commands that install, in order."""
    section = PAGE.partition("\n## Install\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"( *)```console\n(.*?)```", section, re.DOTALL)
    return [dedent(block) for _, block in blocks]


def documented_questions(account: str) -> list[tuple[list[str], str]]:
    """Return each documented `kubectl auth can-i` about an account with its answer."""
    requested = [(question.split(), answer) for question, answer in _AUTH_QUERY.findall(PAGE)]
    return [(words, answer) for words, answer in requested if words[-1] == f"--as={account}"]


def can_i(kubectl: Kubectl, question: list[str]) -> str:
    """Return kubectl's answer; kubectl ends with an error if it is no."""
    try:
        return kubectl(*question).splitlines()[-1]
    except ToolError as error:
        return str(error).splitlines()[-1].rpartition(" ")[2]


def on(kafka: SecureKafka) -> dict[str, Any]:
    """Return the values that an installation with these brokers needs."""
    return {
        "kafka": {
            "bootstrapServers": kafka.bootstrap_servers,
            "securityProtocol": "SASL_SSL",
            "caSecret": CA_SECRET,
        }
    }


def with_logins(rendering: Rendering, kafka: SecureKafka) -> Rendering:
    """Return a rendering with every Secret that its pods name; those for the brokers are right."""
    users = {LOGIN_PREFIX + name.removeprefix("gpuledger-"): name for name in kafka.users}
    made = []
    for found in with_secrets(rendering).of_kind("Secret"):
        name = found["metadata"]["name"]
        data = {}
        if name == CA_SECRET:
            data = {"ca.crt": kafka.ca_file.read_text()}
        elif name in users:
            data = {"username": users[name], "password": kafka.users[users[name]]}
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
        made.append({**found, "data": encoded or found["data"]})
    return Rendering(objects=[*rendering.objects, *made])


def fill_in(folder: Path, kafka: SecureKafka) -> dict[str, Any]:
    """Write the files that the documented commands read, as the user does; return the values.

    The store is on a volume, because there is no object store.
    """
    values = merged(yaml.safe_load(PRODUCTION.read_text()), {**on(kafka), "store": {"uri": ""}})
    (folder / "my-values.yaml").write_text(yaml.safe_dump(values))
    (folder / "ca.crt").write_text(kafka.ca_file.read_text())
    (folder / "store.env").write_text("AWS_ACCESS_KEY_ID=id\nAWS_SECRET_ACCESS_KEY=secret\n")
    for name in ("prometheus", "alertmanager"):
        (folder / f"{name}.password").write_text("secret")
    for user, password in kafka.users.items():
        (folder / f"{user.removeprefix('gpuledger-')}.password").write_text(password)
    return values


@dataclass(kw_only=True)
class Installation:
    """The objects applied to an API server, and their brokers."""

    api: KubeApi
    kubectl: Kubectl
    helm: Helm
    folder: Path
    """The directory in which commands run; it has `k8s`."""
    values: Mapping[str, Any]
    """The values of both releases, except their components."""
    plain_servers: str = ""
    """The brokers, for clients without a login."""
    overridden: Mapping[str, str] = field(default_factory=dict)
    """Variables that differ from the rendered ones, because their values do not exist here."""
    printed: list[str] = field(default_factory=list)
    """The output of the commands."""

    def rendering(self) -> Rendering:
        """Return all its objects, and the Secrets of its pods from the API server."""
        rendered = render(self.values)
        named = {
            (text, each.namespace)
            for each in rendered.workloads()
            for path, text in strings(each.pod)
            if re.search(r"secret\.(secretN|n)ame$|[sS]ecret(Key)?Ref\.name$", path)
        }
        found = [
            self.api.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
            for name, namespace in sorted(named)
        ]
        secrets = [{**secret, "kind": "Secret"} for status, secret in found if status == 200]
        return Rendering(objects=[*rendered.objects, *secrets])

    def install(self) -> None:
        """Install both releases with these values, without the documented commands."""
        (self.folder / "my-values.yaml").write_text(yaml.safe_dump(dict(self.values)))
        for namespace in ("gpuledger-agent", NAMESPACE):
            self.api.create_namespace(namespace)
        self.run(documented_commands()[-1])

    def run(self, script: str) -> None:
        """Run a block of documented commands in the place of the checkout."""
        tools = self.folder / "bin"
        tools.mkdir(exist_ok=True)
        for name, binary in (("kubectl", self.kubectl.binary), ("helm", self.helm.binary)):
            (tools / name).unlink(missing_ok=True)
            (tools / name).symlink_to(binary)
        if not (self.folder / "k8s").exists():
            (self.folder / "k8s").symlink_to(K8S)
        done = subprocess.run(
            ["/bin/bash", "-e", "-c", script],
            cwd=self.folder,
            env={
                "PATH": f"{tools}:{os.environ['PATH']}",
                "HOME": str(self.folder),
                "KUBECONFIG": str(self.api.kubeconfig),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=SETTLED_SECONDS,
        )
        self.printed.append(done.stdout + done.stderr)
        assert done.returncode == 0, self.printed[-1]

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
        for namespace in ("gpuledger-agent", NAMESPACE):
            self.create_default_account(namespace)

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
