"""Queries of dashboards, OpenCost and autoscalers for dcgm-exporter, answered by the agent.

A Prometheus scrapes the agent as a process, which plays a node of GPUs: one pod with two of them,
two pods on a shared one, a process of the host, and a MIG-partitioned GPU. The queries are other
projects' queries, unchanged; the answers are compared with the simulator's truth. Pods on a shared
GPU have their own series here (`exposition.pod_series`), as autoscalers and OpenCost need them.
"""

from __future__ import annotations

import subprocess
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from gpuledger_simulator.simulation import open_simulation
from tests.real.end_to_end.components import Component
from tests.real.services import web
from tests.real.services.process import Process
from tests.real.services.prometheus import Prometheus
from tests.real.services.starter import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gpuledger_simulator.device import SimulatedGpu
    from gpuledger_simulator.simulation import Simulation

ROOT = Path(__file__).parents[2]
NODE = "gpu-a"
TICK_NS = 1_000_000_000
MIB = 1 << 20
SETTLE_SECONDS = 22.0
"""Long enough for ranges of 15 s, and for the temperature, which follows the last 20 s."""
SCENARIO = """
name: exposition
seed: 5
nodes:
  - name: gpu-a
    gpus:
      - {model: NVIDIA H100 80GB HBM3, count: 4}
      - {model: NVIDIA H100 80GB HBM3, mig: [{instances: [3g.40gb, 1g.10gb]}]}
pods:
  - namespace: research
    name: finetune-worker-0
    node: gpu-a
    containers:
      - name: pytorch
        processes:
          - command: python finetune.py
            gpus: [0, 1]
            load: {busy_ratio: 0.9, kernel_seconds: 0.01, mix: {tensor_ratio: 0.4}}
            memory_bytes: 60_129_542_144
  - namespace: serving
    name: chat-7c9d8b6f5d-x2x9z
    node: gpu-a
    containers:
      - name: server
        devices: [{gpu: 2, replica: 0}]
        processes:
          - command: python3 -m vllm.entrypoints.openai.api_server
            gpus: [2]
            load: {busy_ratio: 0.42, kernel_seconds: 0.008}
            memory_bytes: 37_580_963_840
  - namespace: serving
    name: embeddings-0
    node: gpu-a
    containers:
      - name: server
        devices: [{gpu: 2, replica: 1}]
        processes:
          - command: text-embeddings-router --port 8080
            gpus: [2]
            load: {busy_ratio: 0.33, kernel_seconds: 0.006}
            memory_bytes: 12_884_901_888
  - namespace: research
    name: notebook-0
    node: gpu-a
    containers:
      - name: jupyter
        devices: [{gpu: 4, instance: 0}]
        processes:
          - command: jupyter-lab
            gpus: [4]
            instance: 0
            load: {busy_ratio: 0.5, kernel_seconds: 0.01}
            memory_bytes: 10_737_418_240
host_processes:
  - command: /usr/bin/gpu-burn
    node: gpu-a
    gpus: [3]
    load: {busy_ratio: 0.3}
    memory_bytes: 1_073_741_824
"""
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: dcgm-exporter
    static_configs: [{{targets: ["{target}"]}}]
"""
PODS_OF_2 = {"chat-7c9d8b6f5d-x2x9z": "chat", "embeddings-0": "embeddings"}


@dataclass(frozen=True)
class Cluster:
    """A Prometheus that scrapes the agent, and the truth about the node that the agent plays."""

    agent: Component
    prometheus: Prometheus
    simulation: Simulation
    at_seconds: float
    """The time of all queries, so that they see the same scrape."""

    @property
    def instance(self) -> str:
        return self.agent.health.removeprefix("http://")

    def query(self, promql: str) -> list[dict[str, Any]]:
        requested = promql.replace("$instance", self.instance).replace("$gpu", ".*")
        parameters = urllib.parse.urlencode({"query": requested, "time": self.at_seconds})
        answer = web.fetch(f"{self.prometheus.url}/api/v1/query?{parameters}").json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def values(self, promql: str, *labels: str) -> dict[tuple[str, ...], float]:
        found = [
            (tuple(one["metric"].get(label, "") for label in labels), float(one["value"][1]))
            for one in self.query(promql)
        ]
        assert len({key for key, _ in found}) == len(found), f"{promql}: {found}"
        return dict(found)

    @property
    def gpus(self) -> list[SimulatedGpu]:
        return self.simulation.node(NODE).gpus

    @property
    def tick_ns(self) -> int:
        """The end of the tick of that scrape, since the scenario's start."""
        ((_, value),) = self.values("gpuledger_node_sample_timestamp_seconds", "node").items()
        return round(value * 1e9) - self.simulation.epoch_ns

    def busy(self, gpu: int, seconds: float = 1.0, pod: str = "") -> float:
        """Return the ratio of the time before the tick's end in which kernels ran."""
        end_ns, length_ns = self.tick_ns, round(seconds * 1e9)
        device = self.gpus[gpu]
        of = [one for one in device.processes if not pod or _pod_of(one) == pod]
        return sum(device.busy_ns(one, end_ns - length_ns, end_ns) for one in of) / length_ns

    def watts(self, gpu: int, seconds: float = 1.0) -> float:
        end_ns, length_ns = self.tick_ns, round(seconds * 1e9)
        return self.gpus[gpu].joules(end_ns - length_ns, end_ns) / seconds


def _pod_of(process: Any) -> str:  # noqa: ANN401  # a planned process
    return process.pod.spec.name if process.pod else ""


@pytest.fixture(scope="module")
def cluster(prometheus_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("exposition")
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO)
    epoch_ns = time.time_ns()
    agent = Component(
        name="agent",
        command=[
            "gpuledger",
            "agent",
            *("--no-kafka", "--process-series", "--source", f"simulated:{scenario}"),
        ],
        folder=folder,
        environment={
            "NODE_NAME": NODE,
            "SIMULATOR__EPOCH_NS": str(epoch_ns),
            "EXPOSITION__POD_SERIES": "true",
        },
    )
    target = agent.health.removeprefix("http://")
    server = Prometheus(
        binary=prometheus_binary,
        folder=folder / "prometheus",
        config=CONFIG.format(target=target),
    )
    agent.start()
    try:
        agent.wait_until_ready()
        with running(server):
            time.sleep(SETTLE_SECONDS)
            simulation = open_simulation(scenario, epoch_ns=epoch_ns)
            yield Cluster(agent, server, simulation, at_seconds=time.time() - 0.2)
    finally:
        assert agent.stop() == 0, agent.log_tail()


def whole_gpus(cluster: Cluster, of: Callable[[int], float]) -> dict[tuple[str, ...], float]:
    return {(str(gpu),): of(gpu) for gpu in range(len(cluster.gpus))}


def test_only_the_agent_is_scraped_and_it_identifies_itself(cluster: Cluster) -> None:
    assert cluster.values("up", "job") == {("dcgm-exporter",): 1}


# The eight panels and the two variables of the dashboard 12239.


def test_the_dashboards_variables_find_instances_and_gpus(cluster: Cluster) -> None:
    found = cluster.values("group(DCGM_FI_DEV_GPU_TEMP) by (instance, gpu)", "instance", "gpu")
    assert found.keys() == {(cluster.instance, str(gpu)) for gpu in range(5)}


def test_the_panel_gpu_temperature_shows_a_busy_gpu_as_the_hottest_and_the_average(
    cluster: Cluster,
) -> None:
    found = cluster.values('DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"}', "gpu")
    # The simulator's die follows the last 20 s of work, from 34 degrees on.
    hottest = max(found, key=lambda gpu: found[gpu])
    assert hottest in {("0",), ("1",)}
    average = cluster.values('avg(DCGM_FI_DEV_GPU_TEMP{instance=~"$instance", gpu=~"$gpu"})')
    assert average[()] == pytest.approx(sum(found.values()) / 5)


def test_the_panels_gpu_power_usage_and_gpu_power_total_show_the_true_draw_and_its_sum(
    cluster: Cluster,
) -> None:
    found = cluster.values('DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"}', "gpu")
    assert found == pytest.approx(whole_gpus(cluster, cluster.watts), abs=90)
    total = cluster.values('sum(DCGM_FI_DEV_POWER_USAGE{instance=~"$instance", gpu=~"$gpu"})')
    assert total[()] == pytest.approx(sum(found.values()))


def test_the_panel_gpu_sm_clocks_shows_the_clock_of_each_gpu(cluster: Cluster) -> None:
    promql = 'DCGM_FI_DEV_SM_CLOCK{instance=~"$instance", gpu=~"$gpu"} * 1000000'
    assert cluster.values(promql, "gpu") == whole_gpus(cluster, lambda _: 1.98e9)


def test_the_panel_gpu_utilization_shows_each_gpu_and_the_parts_of_its_pods(
    cluster: Cluster,
) -> None:
    promql = 'DCGM_FI_DEV_GPU_UTIL{instance=~"$instance", gpu=~"$gpu"}'
    found = cluster.values(promql, "gpu", "pod")
    assert found == pytest.approx(
        {
            ("0", "finetune-worker-0"): 100 * cluster.busy(0),
            ("1", "finetune-worker-0"): 100 * cluster.busy(1),
            ("2", ""): 100 * cluster.busy(2),
            **{("2", pod): 100 * cluster.busy(2, pod=pod) for pod in PODS_OF_2},
            ("3", ""): 100 * cluster.busy(3),
            ("4", "notebook-0"): 100 * cluster.busy(4),
            ("4", ""): 0,
        },
        abs=4,
    )


def test_the_panel_gpu_framebuffer_mem_used_shows_each_gpu_and_the_parts_of_its_pods(
    cluster: Cluster,
) -> None:
    promql = 'DCGM_FI_DEV_FB_USED{instance=~"$instance", gpu=~"$gpu"}'
    assert cluster.values(promql, "gpu", "GPU_I_ID", "pod") == {
        ("0", "", "finetune-worker-0"): 57344,
        ("1", "", "finetune-worker-0"): 57344,
        ("2", "", ""): 48128,
        ("2", "", "chat-7c9d8b6f5d-x2x9z"): 35840,
        ("2", "", "embeddings-0"): 12288,
        ("3", "", ""): 1024,
        **{("4", instance, pod): value for instance, pod, value in _instances(cluster)},
    }


def _instances(cluster: Cluster) -> list[tuple[str, str, float]]:
    cut = cluster.gpus[4].cut(0)
    assert cut is not None
    held = {0: ("notebook-0", 10240.0)}
    return [
        (str(one.gpu_instance), *held.get(place, ("", 0.0)))
        for place, one in enumerate(cut.instances)
    ]


def test_the_panel_tensor_core_utilization_shows_the_true_tensor_use(cluster: Cluster) -> None:
    promql = 'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{instance=~"$instance", gpu=~"$gpu"}'
    found = cluster.values(promql, "gpu", "GPU_I_ID")
    expected = {("0", ""): 0.4, ("1", ""): 0.4, ("2", ""): 0.3, ("3", ""): 0.3}
    for (gpu, instance), share in expected.items():
        assert found[gpu, instance] == pytest.approx(share * cluster.busy(int(gpu)), abs=0.05)


# OpenCost's query; `uid` and `cluster_id` group by nothing here.
OPENCOST = (
    'avg(avg_over_time(DCGM_FI_PROF_GR_ENGINE_ACTIVE{container!=""}[15s]))'
    " by (container, pod, namespace, uid, cluster_id)"
)


def test_opencosts_query_returns_each_containers_use(cluster: Cluster) -> None:
    found = cluster.values(OPENCOST, "namespace", "pod", "container")
    instance = found.pop(("research", "notebook-0", "jupyter"))
    assert found == pytest.approx(
        {
            ("research", "finetune-worker-0", "pytorch"): (
                cluster.busy(0, 15) + cluster.busy(1, 15)
            )
            / 2,
            **{("serving", pod, "server"): cluster.busy(2, 15, pod=pod) for pod in PODS_OF_2},
        },
        abs=0.04,
    )
    assert instance == pytest.approx(cluster.busy(4, 15), abs=0.04)


# Common recipes for KEDA and for the adapter of the horizontal pod autoscaler.


@pytest.mark.parametrize(
    "promql",
    [
        "sum(DCGM_FI_DEV_GPU_UTIL) by (pod)",
        'sum by (pod) (DCGM_FI_DEV_GPU_UTIL{namespace="serving", pod!=""})',
        'avg by (namespace, pod) (DCGM_FI_DEV_GPU_UTIL{pod=~"chat-.*|embeddings-.*"})',
        'max(avg_over_time(DCGM_FI_DEV_GPU_UTIL{namespace="serving"}[2s])) by (pod, container)',
    ],
)
def test_a_recipe_by_pod_returns_the_use_of_that_pod(cluster: Cluster, promql: str) -> None:
    found = cluster.values(promql, "pod")
    for pod in PODS_OF_2:
        assert found[pod,] == pytest.approx(100 * cluster.busy(2, pod=pod), abs=8)


def test_a_recipe_for_a_deployment_returns_one_number(cluster: Cluster) -> None:
    found = cluster.values('avg(DCGM_FI_DEV_GPU_UTIL{pod=~"chat-.*"})')
    assert found == {(): pytest.approx(100 * cluster.busy(2, pod="chat-7c9d8b6f5d-x2x9z"), abs=4)}


def test_a_recipe_for_memory_pressure_returns_a_gpus_ratio(cluster: Cluster) -> None:
    used = 'DCGM_FI_DEV_FB_USED{pod=~"finetune-.*",namespace="research"}'
    free = used.replace("USED", "FREE")
    facts = cluster.gpus[0].facts
    room = facts.memory_bytes - facts.model.reserved_bytes
    assert cluster.values(f"avg({used} / ({used} + {free}))")[()] == pytest.approx(
        60_129_542_144 / room, abs=0.001
    )


def test_a_sum_over_devices_counts_each_gpu_once(cluster: Cluster) -> None:
    promql = 'sum(DCGM_FI_DEV_FB_USED{gpuledger_share=""}) by (gpu)'
    held = whole_gpus(cluster, lambda gpu: cluster.gpus[gpu].used_bytes(cluster.tick_ns) // MIB)
    assert cluster.values(promql, "gpu") == held
    power = cluster.values("count(DCGM_FI_DEV_POWER_USAGE) by (gpu)", "gpu")
    assert set(power.values()) == {1}


def test_processes_are_shown_with_their_pods(cluster: Cluster) -> None:
    found = cluster.values("sum(nvidia_pid_pod) by (pod_name, process_name)", "pod_name")
    assert found == {
        ("finetune-worker-0",): 2 * 57344,
        ("chat-7c9d8b6f5d-x2x9z",): 35840,
        ("embeddings-0",): 12288,
        ("notebook-0",): 10240,
    }


def test_containers_have_their_own_metrics_in_base_units(cluster: Cluster) -> None:
    promql = "avg_over_time(gpuledger_container_gpu_busy_ratio[15s])"
    found = cluster.values(f"sum({promql}) by (pod)", "pod")
    for pod in PODS_OF_2:
        assert found[pod,] == pytest.approx(cluster.busy(2, 15, pod=pod), abs=0.04)
    energy = cluster.values("rate(gpuledger_node_gpu_energy_joules_total[15s])", "gpu_index")
    watts = whole_gpus(cluster, lambda gpu: cluster.watts(gpu, 15))
    assert {key: energy[key] for key in watts} == pytest.approx(watts, rel=0.08)


def test_counters_of_dcgm_work_with_rate(cluster: Cluster) -> None:
    promql = "rate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[15s]) / 1000"
    watts = whole_gpus(cluster, lambda gpu: cluster.watts(gpu, 15))
    assert cluster.values(promql, "gpu") == pytest.approx(watts, rel=0.08)


def test_promtool_parses_the_page_and_accepts_our_own_names(
    cluster: Cluster, promtool: Path
) -> None:
    page = cluster.agent.metrics().encode()
    done = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, check=False, timeout=30
    )
    message = (done.stdout + done.stderr).decode().splitlines()
    # DCGM's names, labels and types are given.
    lints = [line for line in message if line and not line.startswith("DCGM_")]
    assert not lints
    assert done.returncode in (0, 3), message[:5]


def documented_collector(cluster: Cluster) -> dict[str, Any]:
    """Return the documented configuration of the collector, scraping the test's agent."""
    page = (ROOT / "docs" / "guides" / "prometheus.md").read_text()
    text = page.partition("collector:begin -->\n```yaml\n")[2].partition("```")[0]
    config: dict[str, Any] = yaml.safe_load(text)
    (scraped,) = config["receivers"]["prometheus"]["config"]["scrape_configs"]
    (target,) = scraped["static_configs"][0]["targets"]
    assert target.endswith(":9820")
    scraped["static_configs"][0]["targets"] = [cluster.instance]
    scraped["scrape_interval"] = "1s"
    return config


def test_the_documented_scrape_of_the_collector_keeps_the_labels_of_pods(
    cluster: Cluster, start_prometheus: Callable[..., Prometheus]
) -> None:
    config = documented_collector(cluster)["receivers"]["prometheus"]["config"]
    scraping = start_prometheus(config=yaml.safe_dump(config))
    assert scraping.await_query('{job="gpuledger-agent", pod="finetune-worker-0"}')


@pytest.mark.extended
def test_the_documented_collector_scrapes_the_series_of_pods(
    cluster: Cluster, otel_collector: Path, tmp_path: Path
) -> None:
    """The documented exporter's backend does not exist here, so another one prints the scrape."""
    config = documented_collector(cluster)
    (pipeline,) = config["service"]["pipelines"].values()
    pipeline["exporters"].append("debug")
    config["exporters"]["debug"] = {"verbosity": "detailed"}
    config["service"]["telemetry"] = {"metrics": {"level": "none"}}
    (tmp_path / "collector.yaml").write_text(yaml.safe_dump(config))
    collector = Process(
        name="collector",
        argv=[otel_collector, "--config", tmp_path / "collector.yaml"],
        folder=tmp_path,
    )
    collector.start()
    try:
        collector.wait_until(
            lambda: "pod: Str(finetune-worker-0)" in collector.log.read_text(),
            deadline_seconds=60,
        )
    finally:
        collector.kill()
