"""All the real parts there are, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tests.tools.debian import DebianTool
from tests.tools.errors import MissingToolError
from tests.tools.go_modules import GoTool
from tests.tools.kafka_jars import KafkaTool

if TYPE_CHECKING:
    from collections.abc import Sequence

KUBERNETES_VERSION = "1.36.3"
# Without these the API server would call itself v0.0.0.
KUBERNETES_LINKER_FLAGS = " ".join(
    [
        "-s -w",
        f"-X k8s.io/component-base/version.gitVersion=v{KUBERNETES_VERSION}",
        "-X k8s.io/component-base/version.gitMajor=1",
        "-X k8s.io/component-base/version.gitMinor=36",
    ]
)
# k8s.io/kubelet, whose pod-resources API the server beside its go.mod serves.
KUBELET_API_VERSION = "0.36.3"
HELM_VERSION = "3.22.0"
# Without these Helm would call itself v3.22, and render for Kubernetes 1.20.
HELM_LINKER_FLAGS = " ".join(
    [
        "-s -w",
        f"-X helm.sh/helm/v3/internal/version.version=v{HELM_VERSION}",
        "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor=1",
        "-X helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor=36",
        "-X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor=1",
        "-X helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor=36",
    ]
)
PROMETHEUS_VERSION = "0.315.0"
# Prometheus' suite for senders of remote-write 2.0, a Go package; that of 1.0 is in no module that
# can be fetched, and tests/real/sinks/test_sender_suites.py has its cases.
COMPLIANCE_VERSION = "0.0.0-20260223092825-818283e1171e"
PROMETHEUS_TAGS = "netgo,remove_all_sd"
OTEL_COLLECTOR_VERSION = "0.165.0"
KEDA_VERSION = "2.21.0"
PROMETHEUS_ADAPTER_VERSION = "0.12.0"
PROMETHEUS_OPERATOR_VERSION = "0.85.0"


class Tool(Protocol):
    """A real part: found where it lies, or provided by fetching and building."""

    @property
    def name(self) -> str:
        """What the part is called on the command line."""

    @property
    def version(self) -> str:
        """The version that is fetched."""

    @property
    def given_by(self) -> str | None:
        """The environment variable that names one already running."""

    def find(self) -> Path:
        """Return its program or folder; raises MissingToolError."""

    def provide(self) -> Path:
        """Return its program or folder, fetched and built first; raises MissingToolError."""


KAFKA = KafkaTool()

# The quick ones first: a run that is broken off leaves most of them.
TOOLS: tuple[Tool, ...] = (
    DebianTool(name="kcat", program="kcat", package="kcat"),
    DebianTool(
        name="alertmanager",
        program="prometheus-alertmanager",
        package="prometheus-alertmanager",
        given_by="ALERTMANAGER_URL",
    ),
    # Debian's is of before remote-write 2.0, and takes what it cannot read for an empty request.
    DebianTool(name="prometheus-2", program="prometheus", package="prometheus"),
    DebianTool(
        name="victoria-metrics",
        program="victoria-metrics",
        package="victoria-metrics",
        given_by="VICTORIAMETRICS_URL",
    ),
    KAFKA,
    GoTool(name="kubelet", version=KUBELET_API_VERSION, module="kubelet"),
    GoTool(
        name="versitygw",
        version="1.8.0",
        module="versitygw",
        package="github.com/versity/versitygw/cmd/versitygw",
    ),
    GoTool(
        name="remote-write-sender-suite",
        version=COMPLIANCE_VERSION,
        module="remote_write_compliance",
        is_test=True,
    ),
    GoTool(
        name="etcd",
        version="3.6.5",
        module="etcd",
        package="go.etcd.io/etcd/server/v3",
        given_by="TESTS_KUBECONFIG",
    ),
    GoTool(
        name="prometheus",
        version=PROMETHEUS_VERSION,
        module="prometheus",
        package="github.com/prometheus/prometheus/cmd/prometheus",
        tags=PROMETHEUS_TAGS,
        given_by="PROMETHEUS_URL",
    ),
    GoTool(
        name="promtool",
        version=PROMETHEUS_VERSION,
        module="prometheus",
        package="github.com/prometheus/prometheus/cmd/promtool",
        tags=PROMETHEUS_TAGS,
    ),
    GoTool(
        name="kube-apiserver",
        version=KUBERNETES_VERSION,
        module="kube_apiserver",
        linker_flags=KUBERNETES_LINKER_FLAGS,
        given_by="TESTS_KUBECONFIG",
    ),
    # After the API server, with which it shares a module and so most of what is compiled.
    GoTool(
        name="kubectl",
        version=KUBERNETES_VERSION,
        module="kube_apiserver",
        package="k8s.io/kubernetes/cmd/kubectl",
        linker_flags=KUBERNETES_LINKER_FLAGS,
    ),
    GoTool(
        name="helm",
        version=HELM_VERSION,
        module="helm",
        package="helm.sh/helm/v3/cmd/helm",
        linker_flags=HELM_LINKER_FLAGS,
    ),
)

# Built only when they are named, as `make test-extended` does.
EXTENDED_TOOLS: tuple[Tool, ...] = (
    GoTool(
        name="otel-collector",
        version=OTEL_COLLECTOR_VERSION,
        module="otel_collector",
        tags=PROMETHEUS_TAGS,
    ),
    DebianTool(name="munged", program="munged", package="munge"),
    DebianTool(name="slurmctld", program="slurmctld", package="slurmctld"),
    DebianTool(name="slurmd", program="slurmd", package="slurmd"),
    DebianTool(name="sbatch", program="sbatch", package="slurm-client"),
    *(
        DebianTool(name=name, program=name, package="slurm-client")
        for name in ("sinfo", "sacct", "scancel")
    ),
    DebianTool(name="slurmdbd", program="slurmdbd", package="slurmdbd"),
    DebianTool(name="mariadbd", program="mariadbd", package="mariadb-server-core"),
    DebianTool(name="containerd", program="containerd", package="containerd"),
    DebianTool(name="ctr", program="ctr", package="containerd"),
    DebianTool(name="runc", program="runc", package="runc"),
    DebianTool(name="busybox", program="busybox", package="busybox-static"),
    # These three are of the API server's module, as kubectl.
    GoTool(
        name="node-kubelet",
        version=KUBERNETES_VERSION,
        module="kube_apiserver",
        package="k8s.io/kubernetes/cmd/kubelet",
        linker_flags=KUBERNETES_LINKER_FLAGS,
    ),
    GoTool(
        name="kube-scheduler",
        version=KUBERNETES_VERSION,
        module="kube_apiserver",
        package="k8s.io/kubernetes/cmd/kube-scheduler",
        linker_flags=KUBERNETES_LINKER_FLAGS,
    ),
    GoTool(
        name="kube-controller-manager",
        version=KUBERNETES_VERSION,
        module="kube_apiserver",
        package="k8s.io/kubernetes/cmd/kube-controller-manager",
        linker_flags=KUBERNETES_LINKER_FLAGS,
    ),
    GoTool(
        name="device-plugin",
        version=KUBELET_API_VERSION,
        module="kubelet",
        package="./device_plugin",
    ),
    GoTool(
        name="dra-driver",
        version=KUBELET_API_VERSION,
        module="kubelet",
        package="./dra_driver",
    ),
    GoTool(
        name="prometheus-adapter",
        version=PROMETHEUS_ADAPTER_VERSION,
        module="prometheus_adapter",
        package="sigs.k8s.io/prometheus-adapter/cmd/adapter",
    ),
    GoTool(
        name="prometheus-operator",
        version=PROMETHEUS_OPERATOR_VERSION,
        module="prometheus_operator",
        package="github.com/prometheus-operator/prometheus-operator/cmd/operator",
        files="example/prometheus-operator-crd",
    ),
    # The SDKs of all clouds took 24 minutes to build on two idle cores, and 57 on busy ones.
    GoTool(
        name="keda-operator",
        version=KEDA_VERSION,
        module="keda",
        package="github.com/kedacore/keda/v2/cmd/operator",
        files="config/crd/bases",
        limit_seconds=5400,
    ),
    GoTool(
        name="keda-adapter",
        version=KEDA_VERSION,
        module="keda",
        package="github.com/kedacore/keda/v2/cmd/adapter",
        limit_seconds=5400,
    ),
)

NODE_PROGRAMS = (
    "containerd",
    "ctr",
    "runc",
    "busybox",
    "node-kubelet",
    "kube-scheduler",
    "device-plugin",
    "dra-driver",
)
AUTOSCALING_PROGRAMS = (
    "kube-controller-manager",
    "prometheus-adapter",
    "keda-operator",
    "keda-adapter",
)
MONITORING_PROGRAMS = (
    "kube-controller-manager",
    "kube-scheduler",
    "prometheus",
    "prometheus-operator",
)
SLURM_PROGRAMS = (
    "munged",
    "mariadbd",
    "slurmdbd",
    "slurmctld",
    "slurmd",
    "sbatch",
    "sinfo",
    "sacct",
    "scancel",
)


def named(name: str, known: Sequence[Tool] = (*TOOLS, *EXTENDED_TOOLS)) -> Tool:
    """Return the tool of that name; raises MissingToolError that lists the names there are."""
    for tool in known:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in known)
    raise MissingToolError(name, f"no such part; there are {names}")


def given(tool: Tool) -> str | None:
    """Return the address of a part that already runs elsewhere, as its variable says."""
    return os.environ.get(tool.given_by) if tool.given_by else None
