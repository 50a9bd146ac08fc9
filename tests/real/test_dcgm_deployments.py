"""The agent replaces dcgm-exporter in NVIDIA's charts and in the GPU operator.

Each deployment is an agent with the arguments and the environment that its pod has, and with its
list of metrics. A Prometheus scrapes all agents and answers the queries of dashboard 12239.
"""

from __future__ import annotations

import json
import time
import urllib.parse
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.real.end_to_end.components import BIN
from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Process
from tests.real.services.prometheus import Prometheus
from tests.real.services.starter import running
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

# The metrics of the chart's ConfigMap `exporter-metrics-config-map`, without driver version.
GAUGES: Final = """
DCGM_FI_DEV_SM_CLOCK DCGM_FI_DEV_MEM_CLOCK DCGM_FI_DEV_MEMORY_TEMP DCGM_FI_DEV_GPU_TEMP
DCGM_FI_DEV_POWER_USAGE DCGM_FI_DEV_GPU_UTIL DCGM_FI_DEV_MEM_COPY_UTIL DCGM_FI_DEV_ENC_UTIL
DCGM_FI_DEV_DEC_UTIL DCGM_FI_DEV_XID_ERRORS DCGM_FI_DEV_FB_FREE DCGM_FI_DEV_FB_USED
DCGM_FI_DEV_VGPU_LICENSE_STATUS DCGM_FI_DEV_ROW_REMAP_FAILURE DCGM_FI_PROF_GR_ENGINE_ACTIVE
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE DCGM_FI_PROF_DRAM_ACTIVE DCGM_FI_PROF_PCIE_TX_BYTES
DCGM_FI_PROF_PCIE_RX_BYTES
"""
COUNTERS: Final = """
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION DCGM_FI_DEV_PCIE_REPLAY_COUNTER
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS
DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS
"""
NAMES: Final = [*GAUGES.split(), *COUNTERS.split()]
LIST: Final = "\n".join(
    [
        "# Format",
        *(f"{name},  gauge, Help (in units)." for name in GAUGES.split()),
        "",
        *(f"{name} , counter, Help" for name in COUNTERS.split()),
        "# DCGM_FI_PROF_SM_ACTIVE,          gauge, Off.",
    ]
)
HOST: Final = "GPU_Node-1"


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A pod of dcgm-exporter; `LIST` in its arguments and variables is the mounted list."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str]
    labels: set[str] = field(default_factory=set)
    """The labels of a GPU in a pod, in addition to those of all deployments."""
    pod: str = "pod"
    """The label with the pod's name."""
    ignored: Sequence[str] = ()
    """The settings that the agent names as without effect."""


KUBERNETES: Final = {"DCGM_EXPORTER_KUBERNETES": "true", "NODE_NAME": "gpu-node-1"}
NAMED: Final = {"hostname", "pod", "namespace", "container"}
VERSION: Final = "DCGM_FI_DRIVER_VERSION"
ALL_OF_POD: Final = {"app_kubernetes_io_name", "team"}
DEPLOYMENTS: Final = {
    "the manifest of dcgm-exporter": Deployment(environment=KUBERNETES, labels=NAMED | {VERSION}),
    "the chart": Deployment(arguments=["-f", "LIST"], environment=KUBERNETES, labels=NAMED),
    "the chart with many values": Deployment(
        arguments=[
            *("-f", "LIST", "-c", "500", "-d", "g:0-1", "-rbmn"),
            *("--dump-enabled", "--dump-directory=/tmp/dcgm-exporter-debug"),
            *("--dump-retention=24", "--dump-compression"),
        ],
        environment={
            **KUBERNETES,
            "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS": "true",
            "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID": "true",
            "DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX": "^team$,^tier$",
            "KUBERNETES_ENABLE_DRA": "true",
        },
        labels=NAMED | {"pod_uid", "team"},
        ignored=["--dump-compression", "--dump-directory", "--dump-enabled", "--dump-retention"],
    ),
    "the GPU operator": Deployment(
        environment={
            **KUBERNETES,
            "DCGM_EXPORTER_COLLECTORS": "/etc/dcgm-exporter/dcp-metrics-included.csv",
        },
        labels=NAMED | {VERSION},
    ),
    "the GPU operator with a ConfigMap, its own engine and pod metadata": Deployment(
        environment={
            **KUBERNETES,
            "DCGM_EXPORTER_COLLECTORS": "LIST",
            "DCGM_REMOTE_HOSTENGINE_INFO": "nvidia-dcgm:5555",
            "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS": "true",
            "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_UID": "true",
        },
        labels=NAMED | {"pod_uid"} | ALL_OF_POD,
        ignored=["DCGM_REMOTE_HOSTENGINE_INFO"],
    ),
    "a service outside Kubernetes with the names of 1.x": Deployment(
        arguments=["-f", "LIST", "-o", "-k", "-d", "f", "--kubernetes-gpu-id-type", "device-name"],
        environment={"NODE_NAME": HOST},
        labels={"hostname", "pod_name", "pod_namespace", "container_name"},
        pod="pod_name",
    ),
}
SCENARIO: Final = """
name: deployments
seed: 5
nodes:
  - name: gpu-node-1
    gpus: [{model: NVIDIA H100 80GB HBM3, count: 2}]
pods:
  - namespace: research
    name: train-0
    node: gpu-node-1
    labels: {app.kubernetes.io/name: train, team: vision}
    containers:
      - name: pytorch
        processes:
          - {command: python train.py, gpus: [0], load: {busy_ratio: 0.9}, memory_bytes: 1073741824}
"""
PANELS: Final = [
    'DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_DEV_SM_CLOCK{instance=~"$instance", gpu=~"$gpu"} * 1000000',
    'DCGM_FI_DEV_GPU_UTIL{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_DEV_FB_USED{instance=~"$instance", gpu=~"$gpu"}',
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~"$instance", gpu=~"$gpu"}',
]
TOTALS: Final = [
    'avg(DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"})',
    'sum(DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"})',
]
CONFIG: Final = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs: [{job_name: dcgm-exporter, static_configs: [{targets: TARGETS}]}]
"""


@dataclass(frozen=True)
class Cluster:
    """An agent for each deployment, and a Prometheus that scrapes all agents."""

    agents: Mapping[str, Process]
    instances: Mapping[str, str]
    prometheus: Prometheus

    def series(self, query: str, of: str) -> list[dict[str, str]]:
        """Return the labels of a query's series, with the dashboard's variables filled in."""
        query = query.replace("$instance", self.instances[of]).replace("$gpu", "0|1")
        parameters = urllib.parse.urlencode({"query": query})
        answer = web.fetch(f"{self.prometheus.url}/api/v1/query?{parameters}").json()
        assert answer["status"] == "success", answer
        return [one["metric"] for one in answer["data"]["result"]]


def start(deployment: Deployment, folder: Path, *, port: int) -> Process:
    folder.mkdir()
    counters, scenario = folder / "default-counters.csv", folder / "scenario.yaml"
    counters.write_text(LIST)
    environment = {"DCGM_EXPORTER_LISTEN": f":{port}", **deployment.environment}
    node = environment["NODE_NAME"]
    # A scenario's nodes have names of Kubernetes, and a node of the default scenario has any name.
    scenario.write_text(SCENARIO)
    source = f"simulated:{scenario}" if node == "gpu-node-1" else "simulated"

    def fill_in(text: str) -> str:
        return str(counters) if text == "LIST" else text

    agent = Process(
        name="agent",
        argv=[BIN / "gpuledger", "agent", *map(fill_in, deployment.arguments), "--source", source],
        folder=folder,
        environment={name: fill_in(value) for name, value in environment.items()},
    )
    agent.start()
    return agent


def is_healthy(instance: str) -> bool:
    return web.fetch(f"http://{instance}/health").status == 200


@pytest.fixture(scope="module")
def cluster(prometheus_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("deployments")
    ports = dict(zip(DEPLOYMENTS, free_ports(len(DEPLOYMENTS)), strict=True))
    instances = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    server = Prometheus(
        binary=prometheus_binary,
        folder=folder / "prometheus",
        config=CONFIG.replace("TARGETS", json.dumps([*instances.values()])),
    )
    agents: dict[str, Process] = {}
    try:
        for number, (name, deployment) in enumerate(DEPLOYMENTS.items()):
            agents[name] = start(deployment, folder / str(number), port=ports[name])
        for name, agent in agents.items():
            agent.wait_until(partial(is_healthy, instances[name]), deadline_seconds=120)
        with running(server):
            # Health is read once in ten seconds, and labels of pods after the first sample.
            time.sleep(15.0)
            yield Cluster(agents, instances, server)
    finally:
        codes = {name: agent.stop(deadline_seconds=120) for name, agent in agents.items()}
    assert set(codes.values()) == {0}, codes


@for_each("name", DEPLOYMENTS)
def test_each_listed_metric_has_series_with_the_labels_of_the_deployment(
    name: str, cluster: Cluster
) -> None:
    deployment = DEPLOYMENTS[name]
    for metric in NAMES:
        found = cluster.series(f'{metric}{{instance="$instance", gpu="0"}}', name)
        assert len(found) == 1, metric
    (labels,) = cluster.series('DCGM_FI_DEV_GPU_TEMP{instance="$instance", gpu="0"}', name)
    uuid = "uuid" if "-o" in deployment.arguments else "UUID"
    identity = {"gpu", uuid, "pci_bus_id", "device", "modelName"}
    assert labels.keys() - {"__name__", "instance", "job"} == identity | deployment.labels
    assert labels["hostname"] == deployment.environment["NODE_NAME"]
    assert labels[deployment.pod]
    assert (" " in labels["modelName"]) == ("-rbmn" not in deployment.arguments)


@for_each("name", DEPLOYMENTS)
def test_the_panels_of_dashboard_12239_show_each_gpu(name: str, cluster: Cluster) -> None:
    for query in PANELS:
        found = [one["gpu"] for one in cluster.series(query, name)]
        assert sorted(found) == ["0", "1"], query
    for query in TOTALS:
        assert cluster.series(query, name) == [{}]
    temperature = cluster.series('DCGM_FI_DEV_GPU_TEMP{instance=~".*"}', name)
    assert {one["instance"] for one in temperature} == set(cluster.instances.values())


@for_each("name", DEPLOYMENTS)
def test_the_agent_warns_only_of_settings_without_effect(name: str, cluster: Cluster) -> None:
    lines = [json.loads(line) for line in cluster.agents[name].log.read_text().splitlines()]
    warnings = [line for line in lines if line["level"] in {"warning", "error", "critical"}]
    ignored: list[Any] = [line["settings"] for line in warnings]
    assert [line["event"] for line in warnings] == ["dcgm_settings_ignored"] * len(ignored)
    assert [sorted(one) for one in ignored] == ([[*DEPLOYMENTS[name].ignored]] if ignored else [])
    assert bool(ignored) == bool(DEPLOYMENTS[name].ignored)
