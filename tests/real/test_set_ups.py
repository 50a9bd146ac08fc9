"""The guides of the setups, followed from start to end on a real control plane.

Helm, the API server, its controllers and scheduler, the Prometheus Operator and Prometheus are
real. Nodes are played: agents run as processes with simulated GPUs, other pods only exist.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from gpuledger_simulator.identities import write_uids
from tests.real.deployment.installation import Installation, eventually
from tests.real.deployment.test_cluster import MAY, MAY_NOT
from tests.real.end_to_end.components import BIN
from tests.real.played_nodes import NODE_LABELS, PlayedNodes, pod_of
from tests.real.services.autoscaling import ControllerManager
from tests.real.services.cluster_tools import Helm, Kubectl
from tests.real.services.kube_client import KubeApiError
from tests.real.services.kubelet_node import Scheduler
from tests.real.services.page import serving
from tests.real.services.prometheus import CONFIG, Prometheus
from tests.real.services.prometheus_operator import PrometheusOperator, configuration_of
from tests.real.services.starter import Starter, running
from tests.real.test_dcgm_deployments import PANELS, TOTALS
from tests.tables import for_each
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.real.end_to_end.components import Component
    from tests.real.services.kafka import Kafka
    from tests.real.services.kubernetes import KubeApi

pytestmark = pytest.mark.extended

NODES: Final = ("gpu-a", "gpu-b")
SCENARIO: Final = """
name: set-ups
seed: 5
nodes:
  - {name: gpu-a, gpus: [{model: NVIDIA H100 80GB HBM3, count: 2}]}
  - {name: gpu-b, gpus: [{model: NVIDIA H100 80GB HBM3, count: 2}]}
pods:
  - namespace: research
    name: train-0
    node: gpu-a
    containers:
      - name: main
        processes:
          - {command: train, gpus: [0], load: {busy_ratio: 0.9}, memory_bytes: 60_129_542_144}
  - namespace: serving
    name: chat-0
    node: gpu-b
    containers:
      - name: main
        devices: [{gpu: 0, replica: 0}]
        processes:
          - {command: chat, gpus: [0], load: {busy_ratio: 0.4}, memory_bytes: 37_580_963_840}
"""
SHARED: Final = """
name: shared
seed: 5
nodes:
  - {name: gpu-a, gpus: [{model: NVIDIA L4, count: 2}]}
  - name: gpu-b
    gpus:
      - {model: NVIDIA H100 80GB HBM3, count: 2}
      - {model: NVIDIA H100 80GB HBM3, mig: [{instances: [3g.40gb, 1g.10gb]}]}
pods:
  # cGPU. The first pod uses more than its share.
  - namespace: serving
    name: greedy-0
    node: gpu-a
    annotations: {scheduler.framework.gpushare.allocation: '{"0":{"1":6}}'}
    containers:
      - name: main
        devices: [{gpu: 0, replica: 0, resource: aliyun.com/gpu-mem, ids: gpu-mem}]
        processes:
          - {command: greedy, gpus: [1], load: {busy_ratio: 0.3}, memory_bytes: 8_589_934_592}
  - namespace: serving
    name: modest-0
    node: gpu-a
    annotations: {scheduler.framework.gpushare.allocation: '{"0":{"1":12}}'}
    containers:
      - name: main
        devices: [{gpu: 0, replica: 1, resource: aliyun.com/gpu-mem, ids: gpu-mem}]
        processes:
          - {command: modest, gpus: [1], load: {busy_ratio: 0.2}, memory_bytes: 4_294_967_296}
  # KAI Scheduler.
  - namespace: kai-resource-reservation
    name: gpu-reservation-1
    node: gpu-b
    labels: {runai-gpu-group: one}
    containers: [{name: resource-reservation, devices: [{gpu: 0}]}]
  - namespace: research
    name: half-0
    node: gpu-b
    labels: {runai-gpu-group: one}
    annotations: {gpu-fraction: "0.5"}
    containers:
      - name: main
        devices: []
        processes:
          - {command: half, gpus: [0], load: {busy_ratio: 0.4}, memory_bytes: 21_474_836_480}
  # Time-slicing.
  - namespace: serving
    name: sliced-0
    node: gpu-b
    containers:
      - name: main
        devices: [{gpu: 1, replica: 0}]
        processes:
          - {command: sliced, gpus: [1], load: {busy_ratio: 0.4}, memory_bytes: 17_179_869_184}
  - namespace: serving
    name: sliced-1
    node: gpu-b
    containers: [{name: main, devices: [{gpu: 1, replica: 1}]}]
  # MIG.
  - namespace: research
    name: instance-0
    node: gpu-b
    containers:
      - name: main
        devices: [{gpu: 2, instance: 0}]
        processes:
          - command: instance
            gpus: [2]
            instance: 0
            load: {busy_ratio: 0.5}
            memory_bytes: 10_737_418_240
"""
USERS: Final = {
    "gpu-a": {"serving/greedy-0": ("6.0/8.0", 30), "serving/modest-0": ("12.0/4.0", 20)},
    "gpu-b": {
        "research/half-0": ("39.8/20.0", 40),
        "research/instance-0": ("39.5/10.0", 50),
        "serving/sliced-0": ("39.8/16.0", 40),
        "serving/sliced-1": ("39.8/0.0", 0),
    },
}
"""GiB allocated and used by each pod of that scenario, and the percentage of busy time."""
CONTROLLERS: Final = (
    "daemonset-controller",
    "deployment-controller",
    "replicaset-controller",
    "endpointslice-controller",
    "serviceaccount-controller",
    "garbage-collector-controller",
    "namespace-controller",
)
RELEASE: Final = "kube-prometheus-stack"
MONITORING: Final = "monitoring"
AGENTS: Final = "gpuledger-agent"
REGISTRY: Final = "export REGISTRY=registry.example.com\n"
RUNTIME: Final = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "nvidia",
}
SELECTED: Final = {"matchLabels": {"release": RELEASE}}
SERVER: Final = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "Prometheus",
    "metadata": {"name": "k8s", "namespace": MONITORING},
    "spec": {
        f"{kind}{of}Selector": SELECTED if of == "" else {}
        for kind in ("podMonitor", "serviceMonitor", "rule")
        for of in ("", "Namespace")
    },
}
"""kube-prometheus-stack's Prometheus, which selects by the label of its release."""
OPERAND: Final = "nvidia.com/gpu.deploy.dcgm-exporter"
INSTALL: Final = ("start/replace-dcgm-exporter.md", "Install the agent with Helm")
SCRAPE: Final = ("guides/kubernetes.md", "Scrape the metrics")
GPUS: Final = {(node, gpu) for node in NODES for gpu in ("0", "1")}
OF_NODE: Final = " * on (pod, namespace) group_left (node) kube_pod_info)"
WITHOUT: Final = (
    "sum without (Hostname, UUID, service, endpoint, container, job, pod, instance, namespace) ("
)
KUBESPHERE: Final = [
    "DCGM_FI_DEV_GPU_TEMP",
    *(
        f"{WITHOUT}{field}{OF_NODE}"
        for field in (
            "DCGM_FI_DEV_POWER_USAGE",
            "DCGM_FI_DEV_SM_CLOCK",
            "DCGM_FI_DEV_GPU_UTIL",
            "DCGM_FI_DEV_FB_USED",
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        )
    ),
]
"""The panels of KubeSphere's dashboard for dcgm-exporter with a value per GPU."""


def page(path: str) -> str:
    return (ROOT / "docs" / path).read_text()


def section(path: str, heading: str) -> str:
    return re.split(r"\n#+ ", page(path).partition(f"# {heading}\n")[2])[0]


def blocks(path: str, heading: str, language: str = "console") -> list[str]:
    """Return the blocks of a section in a language, in order."""
    pattern = rf"^ *```{language}\n(.*?)^ *```"
    found = re.findall(pattern, section(path, heading), re.DOTALL | re.MULTILINE)
    return [dedent(block) for block in found]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A control plane with two GPU nodes and the Prometheus Operator."""

    installation: Installation
    nodes: PlayedNodes
    folder: Path

    def run(self, *scripts: str) -> None:
        for script in scripts:
            self.installation.run(REGISTRY + script)

    def gpuledger(self, command: str, kafka: Kafka) -> str:
        """Return what a command of gpuledger prints, with these brokers."""
        program, *arguments = command.split()
        servers = {"GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers}
        return subprocess.run(
            [BIN / program, *arguments],
            env={**os.environ, **servers},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout

    def remove(self) -> None:
        """Remove all releases, and wait until nothing of them runs."""
        for namespace in (AGENTS, "gpuledger"):
            self.run(f"helm uninstall --ignore-not-found --namespace {namespace} gpuledger")
        eventually(lambda: not self.nodes.components)

    def install(self, *scripts: str) -> None:
        """Run commands in a cluster without agents, until all agents run as told."""
        self.remove()
        self.run("kubectl delete namespace --ignore-not-found gpuledger-agent", *scripts)
        self.run("kubectl rollout status --namespace gpuledger-agent daemonset/gpuledger-agent")

    def play(self, scenario: str) -> None:
        """Create a scenario's pods, and let agents that start from now on simulate it."""
        kube, file = self.installation.api, self.folder / "scenario.yaml"
        file.write_text(scenario)
        uids = {}
        for pod in yaml.safe_load(scenario)["pods"]:
            kube.create_namespace(pod["namespace"])
            made = pod_of(pod)
            eventually(lambda made=made: is_applied(kube, made))  # type: ignore[misc]  # a default is how a loop's value is bound
            _, found = kube.request("GET", kube.path_of(made))
            uids[f"{pod['namespace']}/{pod['name']}"] = found["metadata"]["uid"]
        now_ns = time.time_ns()
        write_uids(self.folder / "uids.json", epoch_ns=now_ns, uids=uids)
        self.nodes.overridden = {
            "GPULEDGER_SOURCE": f"simulated:{file}",
            "GPULEDGER_SIMULATOR__EPOCH_NS": str(now_ns),
            "GPULEDGER_SIMULATOR__UIDS_FILE": str(self.folder / "uids.json"),
        }

    def configuration(self, *, agents: int, rules: int, namespace: str = MONITORING) -> str:
        """Return the operator's configuration once it has this many targets and files of rules."""
        made: list[str] = []

        def is_complete() -> bool:
            text = configuration_of(
                self.installation.api,
                "k8s",
                namespace,
                folder=self.folder / "rules",
                addresses=self.nodes.addresses,
            )
            made.append(text)
            config = yaml.safe_load(text) or {"scrape_configs": [], "rule_files": []}
            targets = [one for job in config["scrape_configs"] for one in job["static_configs"]]
            return (len(targets), len(config["rule_files"])) == (agents, rules)

        eventually(is_complete)
        return made[-1]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
    own_kube_api: Callable[..., KubeApi],
    kubectl: Kubectl,
    helm: Helm,
    monitoring_programs: Mapping[str, Path],
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("set-ups")
    starter = Starter(folder)
    try:
        kube = starter.start(own_kube_api(folder=folder / "kubernetes", demands_accounts=True))
        programs = monitoring_programs
        starter.start(
            ControllerManager(
                binary=programs["kube-controller-manager"],
                folder=folder / "controllers",
                kube=kube,
                controllers=CONTROLLERS,
            )
        )
        starter.start(
            Scheduler(binary=programs["kube-scheduler"], folder=folder / "scheduler", kube_api=kube)
        )
        starter.start(
            PrometheusOperator(
                binary=programs["prometheus-operator"], folder=folder / "operator", kube=kube
            )
        )
        installation = Installation(
            api=kube,
            kubectl=Kubectl(binary=kubectl.binary, kubeconfig=kube.kubeconfig),
            helm=Helm(binary=helm.binary, kubeconfig=kube.kubeconfig),
            folder=folder,
            values={},
        )
        with PlayedNodes(installation) as nodes:
            nodes.add(*NODES, labels=NODE_LABELS)
            kube.create_namespace(MONITORING)
            kube.apply(RUNTIME)
            kube.apply(SERVER)
            made = Cluster(installation=installation, nodes=nodes, folder=folder)
            made.play(SCENARIO)
            yield made
    finally:
        starter.end()


def is_applied(kube: KubeApi, manifest: dict[str, Any]) -> bool:
    """Return whether an object exists now; a namespace has no account for pods at first."""
    try:
        kube.apply(manifest)
    except KubeApiError:
        return False
    return True


def kube_pod_info(cluster: Cluster) -> str:
    """Return the series of kube-state-metrics for the running pods."""
    return "".join(
        f'kube_pod_info{{namespace="{pod["metadata"]["namespace"]}",pod="{pod["metadata"]["name"]}"'
        f',node="{pod["spec"]["nodeName"]}"}} 1\n'
        for pod in cluster.nodes.pods()
    )


def page_job(name: str, address: str) -> dict[str, Any]:
    """Return a job that scrapes a page."""
    return {
        "job_name": name,
        "honor_labels": True,
        "static_configs": [{"targets": [address]}],
    }


def dcgm_exporter(agent: Component) -> str:
    """Return the page that dcgm-exporter would have beside an agent."""
    lines = agent.metrics().splitlines()
    return "\n".join([*(line for line in lines if not line.startswith("gpuledger_")), ""])


def all_selected(query: str) -> str:
    return query.replace("$instance", ".*").replace("$gpu", ".*")


def label_of(prometheus: Prometheus, query: str, label: str) -> set[str]:
    return {one["metric"].get(label, "") for one in prometheus.query(query)}


def name_of(pod: Mapping[str, Any]) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def nodes_of(cluster: Cluster) -> list[str]:
    """Return the nodes with an agent."""
    return sorted(pod["spec"]["nodeName"] for pod in cluster.nodes.pods(AGENTS))


def admitted(kube: KubeApi, pod: Mapping[str, Any]) -> set[str]:
    """Return the namespaces from which the NetworkPolicies of a pod admit connections."""
    _, found = kube.request(
        "GET",
        f"/apis/networking.k8s.io/v1/namespaces/{pod['metadata']['namespace']}/networkpolicies",
    )
    _, spaces = kube.request("GET", "/api/v1/namespaces")
    rules = [
        rule
        for policy in found["items"]
        if has(pod, policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]
    ]
    assert rules
    return {
        space["metadata"]["name"]
        for space in spaces["items"]
        for rule in rules
        for peer in rule["from"]
        if has(space, peer["namespaceSelector"]["matchLabels"])
    }


def has(made: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return bool(labels.items() <= made["metadata"]["labels"].items())


def gpus_of(prometheus: Prometheus, query: str) -> Counter[tuple[str, str]]:
    """Return the number of series of each GPU that a query returns."""
    return Counter((one["metric"]["node"], one["metric"]["gpu"]) for one in prometheus.query(query))


@for_each("kind", ["podMonitor", "serviceMonitor"])
def test_a_cluster_is_monitored_with_the_prometheus_operator(
    kind: str, cluster: Cluster, start_prometheus: Callable[..., Prometheus]
) -> None:
    install, upgrade = blocks(*INSTALL)
    options = re.findall(r"`(--set (?:podMonitor|prometheusRule)\S+)`", section(*SCRAPE))
    command = " ".join([upgrade.rstrip(), *options]).replace("=NAME", f"={RELEASE}")
    cluster.install(install, command.replace("podMonitor", kind))
    config = yaml.safe_load(cluster.configuration(agents=len(NODES), rules=1))
    with serving(lambda: kube_pod_info(cluster)) as address:
        config["scrape_configs"].append(page_job("kube-state-metrics", address))
        prometheus = start_prometheus(config=yaml.safe_dump(config))
        prometheus.await_query(f"count({KUBESPHERE[-1]}) == {len(GPUS)}", deadline_seconds=60)
        one_each = Counter(GPUS)
        for query in (*map(all_selected, PANELS), *KUBESPHERE):
            assert gpus_of(prometheus, query) == one_each, query
        for query in map(all_selected, TOTALS):
            assert len(prometheus.query(query)) == 1, query
        (documented,) = blocks(*INSTALL, "promql")
        shown = {one["metric"]["pod"]: one["value"][1] for one in prometheus.query(documented)}
        assert {pod: float(value) for pod, value in shown.items()} == {
            "train-0": pytest.approx(0.9, abs=0.1),
            "chat-0": pytest.approx(0.4, abs=0.1),
        }
        assert label_of(prometheus, "up", "job") == {"gpuledger", "kube-state-metrics"}
        loaded = prometheus.fetch("/api/v1/rules").json()["data"]["groups"]
        assert {group["name"] for group in loaded} == {"gpuledger", "gpuledger-scrapes"}


def test_a_pid_is_found_with_its_pod_from_a_namespace_of_choice(
    cluster: Cluster, start_prometheus: Callable[..., Prometheus]
) -> None:
    kube, guide = cluster.installation.api, ("guides/processes.md", "Show processes")
    install, _ = blocks(*INSTALL)
    (values,) = blocks(*guide, "yaml")
    (cluster.folder / "my-values.yaml").write_text(values)
    chosen = "observability"
    kube.create_namespace(chosen)
    server = {**SERVER, "metadata": {"name": "k8s", "namespace": chosen}}
    kube.apply({**server, "spec": {selector: {} for selector in SERVER["spec"]}})
    cluster.install(install, *blocks(*guide))
    config = cluster.configuration(namespace=chosen, agents=len(NODES), rules=0)
    prometheus = start_prometheus(config=config)
    prometheus.await_query("count(nvidia_pid_pod) == 2", deadline_seconds=60)

    by_pid, by_pod = blocks(*guide, "promql")
    for series in prometheus.query("nvidia_pid_pod"):
        labels = series["metric"]
        query = by_pid.replace("gpu-node-1", labels["node_name"]).replace("4711", labels["pid"])
        (found,) = prometheus.query(query)
        assert found["metric"] == labels
        pod = (labels["namespace"], labels["pod_name"])
        (running,) = [one for one in cluster.nodes.pods() if name_of(one) == pod]
        assert labels["node_name"] == running["spec"]["nodeName"]
    memory = {
        (one["metric"]["namespace"], one["metric"]["pod_name"]): int(one["value"][1])
        for one in prometheus.query(by_pod)
    }
    assert memory == {("research", "train-0"): 57_344, ("serving", "chat-0"): 35_840}

    agents = cluster.nodes.pods(AGENTS)
    assert len(agents) == len(NODES)
    for agent in agents:
        assert admitted(kube, agent) == {chosen}
        spec = agent["spec"]
        assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == (
            "default",
            False,
        )
        assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    account = f"system:serviceaccount:{AGENTS}:default"
    assert [one for one in (*MAY, *MAY_NOT) if cluster.installation.may(account, one)] == []


def test_the_agent_runs_next_to_the_gpu_operators_exporter(
    cluster: Cluster, start_prometheus: Callable[..., Prometheus]
) -> None:
    install, upgrade = blocks(*INSTALL)
    (platform,) = re.findall(r"`(--values k8s/chart/platforms\S+)`", section(*INSTALL))
    (relabelings,) = blocks("start/replace-dcgm-exporter.md", "Check your metrics", "yaml")
    (cluster.folder / "relabelings.yaml").write_text(relabelings)
    for node in NODES:
        cluster.nodes.label(node, {OPERAND: "true"})
    options = f"{platform} --values relabelings.yaml --set podMonitor.additionalLabels.release="
    cluster.install(f"{install.rstrip()} {platform}", f"{upgrade.rstrip()} {options}{RELEASE}")
    config = yaml.safe_load(cluster.configuration(agents=len(NODES), rules=0))

    with ExitStack() as pages:
        for agent in cluster.nodes.components.values():
            address = pages.enter_context(serving(lambda agent=agent: dcgm_exporter(agent)))  # type: ignore[misc]  # as above
            job = page_job(f"nvidia-dcgm-exporter-{address}", address)
            config["scrape_configs"].append(job)
        prometheus = start_prometheus(config=yaml.safe_dump(config))
        both = f"count(DCGM_FI_DEV_POWER_USAGE) == {2 * len(GPUS)}"
        prometheus.await_query(both, deadline_seconds=60)
        (selector,) = re.findall(
            r"`(job=\S+)`", section("start/replace-dcgm-exporter.md", "Compare both exporters")
        )
        assert gpus_of(prometheus, f"DCGM_FI_DEV_POWER_USAGE{{{selector}}}") == Counter(GPUS)
        unused = f'DCGM_FI_DEV_GPU_UTIL{{{selector}, pod=""}}'
        assert gpus_of(prometheus, unused).keys() == GPUS - {("gpu-a", "0")}

    # A driver upgrade takes the agent off its node.
    first, second = NODES
    cluster.nodes.label(first, {OPERAND: "paused-for-driver-upgrade"})
    eventually(lambda: nodes_of(cluster) == [second])
    cluster.nodes.label(first, {OPERAND: "true"})
    eventually(lambda: nodes_of(cluster) == [*NODES])


@pytest.fixture(scope="module")
def shared(
    cluster: Cluster, kafka_of_this_run: Kafka, prometheus_binary: Path
) -> Iterator[Prometheus]:
    """All components on shared GPUs, and a Prometheus with their series and an alert on them."""
    rules = yaml.safe_load((ROOT / "k8s/chart/rules/gpuledger.rules.yaml").read_text())
    (rule,) = (
        one
        for group in rules["groups"]
        for one in group["rules"]
        if one.get("alert") == "GpuMemoryOverShare"
    )
    file = cluster.folder / "over-share.rules.yaml"
    group = {"name": "gpuledger-gpus", "rules": [{**rule, "for": "1s"}]}
    file.write_text(yaml.safe_dump({"groups": [group]}))
    server = Prometheus(
        binary=prometheus_binary,
        folder=cluster.folder / "prometheus",
        config=f"{CONFIG}rule_files: [{file}]\n",
    )
    one = {"replicas": 1}
    cluster.installation.values = {
        "kafka": {"bootstrapServers": kafka_of_this_run.bootstrap_servers},
        "agent": {"readKubelet": True},
        "join": one,
        "podwatch": one,
        "sinks": {"settings": {"remote_write": {"url": server.remote_write_url}}},
        "sinkStore": {"enabled": False},
        "sinkAlerts": {"enabled": False},
    }
    assert "`agent.readKubelet: true`" in section("guides/sharing.md", "Share GPUs by annotations")
    with running(server):
        cluster.remove()
        cluster.play(SHARED)
        try:
            cluster.installation.install()
            cluster.installation.run_topics_job()
            of_both = "count(group by (node) (gpuledger_allocation_gpu_ratio)) == 2"
            server.await_query(of_both, deadline_seconds=100)
            yield server
        finally:
            cluster.remove()


def test_shares_of_gpus_are_shown_beside_their_use_and_a_pod_above_its_share_fires(
    cluster: Cluster, shared: Prometheus, kafka_of_this_run: Kafka
) -> None:
    firing = shared.await_query('ALERTS{alertstate="firing"}', deadline_seconds=100)
    assert [one["metric"]["pod"] for one in firing] == ["greedy-0"]

    *_, details = blocks("guides/sharing.md", "Check the result")
    for node, users in USERS.items():
        shown = cluster.gpuledger(details.replace("gpu-node-7", node), kafka_of_this_run)
        rows = re.findall(r"^(\w+/\S+) .*?(\d\S+), (\d+)%", shown, re.MULTILINE)
        assert {pod: memory for pod, memory, _ in rows} == {
            pod: memory for pod, (memory, _) in users.items()
        }
        assert {pod: int(busy) for pod, _, busy in rows} == {
            pod: pytest.approx(busy, abs=20) for pod, (_, busy) in users.items()
        }
    summary = cluster.gpuledger("gpuledger inspect", kafka_of_this_run).splitlines()
    assert [line.split() for line in summary[1:3]] == [
        ["gpu-a", "0.0/0.6/22.5", "18.0/12.6/22.5", "-", "18.0/13.1/45.0"],
        ["gpu-b", "39.8/20.6/79.6", "79.6/16.6/79.6", "39.5/10.0/49.4", "159.0/47.1/208.7"],
    ]
    stated = {
        component.readyz()["checks"]["allocations"]["detail"]
        for component in cluster.nodes.components.values()
        if component.name == AGENTS
    }
    assert stated == {f"{count} allocations are stated by annotations of pods" for count in (1, 2)}


def test_the_panels_of_kubespheres_dashboard_show_the_series_of_the_sink(
    cluster: Cluster, shared: Prometheus
) -> None:
    """Except for the delays of components, which are not among them, and incidents."""
    kube = cluster.installation.api
    definition = (ROOT / "tests/data/kubernetes/clusterdashboards.yaml").read_text()
    kube.apply(yaml.safe_load(definition))
    boards = "/apis/monitoring.kubesphere.io/v1alpha2/clusterdashboards"
    eventually(lambda: kube.request("GET", boards)[0] == HTTPStatus.OK)
    cluster.run(*blocks("guides/dashboards.md", "Add the dashboard to KubeSphere"))
    _, found = kube.request("GET", boards)
    (board,) = found["items"]

    def empty() -> set[str]:
        return {
            panel["title"]
            for panel in board["spec"]["panels"]
            if not any(shared.query(target["expr"]) for target in panel["targets"])
        }

    eventually(lambda: empty() == {"Event delay", "Incidents, by kind"})
