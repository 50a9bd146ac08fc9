"""Dashboards for dcgm-exporter on a real Prometheus 3 with remote-write and the shipped rules.

The queries are from NVIDIA's dashboard 12239 (the revision that selects by `instance` and the one
that selects by `Hostname`), from KubeSphere's dashboard, and from common rules.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Final

import yaml

from gpuledger.records import Category
from gpuledger_sinks.registry import REMOTE_WRITE
from tests.real.services.prometheus import CONFIG
from tests.real.sinks.running_sinks import make_topics, publish
from tests.unit.deployment.components import ROOT
from tests.unit.sinks.builders import SECOND_NS, books, entry, event, holder, reading

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuledger.records import GpuEvent
    from tests.real.services.kafka import Kafka
    from tests.real.services.prometheus import Prometheus, PrometheusApi
    from tests.real.sinks.running_sinks import Sink

RULES: Final = ROOT / "k8s" / "chart" / "rules" / "gpuledger.dcgm.rules.yaml"
HOSTS: Final = ("node-a", "node-b", "node-c")
GPUS: Final = [(host, gpu) for host in HOSTS for gpu in ("0", "1")]
INTERVAL_SECONDS: Final = 5
TICKS: Final = 20
BY_INSTANCE: Final = '{instance=~"node-a|node-b|node-c", gpu=~"0|1"}'
BY_HOST: Final = '{Hostname=~"node-a|node-b|node-c", gpu=~"0|1"}'
OF_INSTANCES: Final = "(Hostname, gpu, GPU_I_ID, GPU_I_PROFILE)"
VALUES: Final = {
    "DCGM_FI_DEV_SM_CLOCK": 1980,
    "DCGM_FI_DEV_MEM_CLOCK": 2619,
    "DCGM_FI_DEV_GPU_TEMP": 61,
    # The mean of 200, 400, 200, 400 and 200, and the counter's value at the end.
    "DCGM_FI_DEV_POWER_USAGE": 280,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 7_000_000,
    "DCGM_FI_DEV_GPU_UTIL": 75,
    "DCGM_FI_DEV_MEM_COPY_UTIL": 25,
    "DCGM_FI_DEV_FB_FREE": 60_416,
    "DCGM_FI_DEV_FB_USED": 20_480,
    "DCGM_FI_DEV_FB_RESERVED": 1024,
    "DCGM_FI_DEV_FB_TOTAL": 81_920,
    "DCGM_FI_PROF_SM_ACTIVE": 0.5,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.125,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.0625,
}
"""All recorded series, in dcgm-exporter's units: MHz, degrees, W, mJ, percent, MiB."""
OF_ALL: Final = [
    (f"DCGM_FI_DEV_GPU_TEMP{BY_INSTANCE}", 61),
    (f"DCGM_FI_DEV_POWER_USAGE{BY_INSTANCE}", 280),
    (f"DCGM_FI_DEV_SM_CLOCK{BY_INSTANCE} * 1000000", 1_980_000_000),
    (f"DCGM_FI_DEV_GPU_UTIL{BY_INSTANCE}", 75),
    (f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{BY_INSTANCE}", 0.125),
    (f"DCGM_FI_DEV_FB_USED{BY_INSTANCE}", 20_480),
    (f"max(DCGM_FI_DEV_GPU_TEMP{BY_HOST}) by (Hostname, gpu, uuid)", 61),
    (f"max(DCGM_FI_DEV_POWER_USAGE{BY_HOST}) by (Hostname, gpu, uuid)", 280),
    (f"max(DCGM_FI_DEV_SM_CLOCK{BY_HOST} * 1000000) by (Hostname, UUID, gpu)", 1_980_000_000),
    (f"max(DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{BY_HOST}) by {OF_INSTANCES}", 0.125),
    (f"max(DCGM_FI_DEV_FB_USED{BY_HOST}) by {OF_INSTANCES}", 20_480),
    ("DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE) > 0.2", 20_480 / 80_896),
    ("DCGM_FI_DEV_GPU_TEMP > 60", 61),
    # KubeSphere's queries; their legends show `node`, `device` and `gpu`.
    ("max by (node, device, gpu) (DCGM_FI_DEV_GPU_TEMP)", 61),
    ("max by (node, device, gpu) (DCGM_FI_DEV_POWER_USAGE)", 280),
    ("max by (node, device, gpu) (DCGM_FI_DEV_SM_CLOCK)", 1980),
    ("max by (node, device, gpu) (DCGM_FI_DEV_MEM_CLOCK)", 2619),
    ("max by (node, device, gpu) (DCGM_FI_DEV_GPU_UTIL)", 75),
    ("max by (node, device, gpu) (DCGM_FI_DEV_MEM_COPY_UTIL)", 25),
]
"""Queries with a value per GPU, and the values."""
OF_ONE: Final = [
    (f"avg(DCGM_FI_DEV_GPU_TEMP{BY_INSTANCE})", 61),
    (f"sum(DCGM_FI_DEV_POWER_USAGE{BY_INSTANCE})", 6 * 280),
    # That dashboard shows, for each index, the host with the highest power.
    (f"sum(max(DCGM_FI_DEV_POWER_USAGE{BY_HOST}) by (gpu))", 2 * 280),
    # One container has one GPU of each host; a shared GPU has no container's labels.
    ('count(DCGM_FI_DEV_GPU_UTIL{namespace="research", pod=~"train-.*"})', 3),
    ('avg(DCGM_FI_DEV_GPU_UTIL{namespace="research"})', 75),
    ('count(DCGM_FI_DEV_GPU_UTIL{pod=""})', 3),
]


def tick_of(number: int, node: str, start_ns: int) -> GpuEvent:
    """Return a tick of two GPUs: one container has the first, two namespaces share the other."""
    gpus = [
        reading(
            uuid=f"GPU-{node}-{index}",
            index=index,
            power_milliwatts=400_000 if number % 2 else 200_000,
            energy_total_millijoules=1_000_000 + 300_000 * number,
            memory_clock_hertz=2_619_000_000,
            memory_reserved_bytes=2**30,
            memory_utilization_ratio=0.25,
            sm_active_ratio=0.5,
            tensor_active_ratio=0.125,
            dram_active_ratio=0.0625,
        )
        for index in range(2)
    ]
    whole = entry(Category.IDLE, allocation=0, allocated_ns=SECOND_NS)
    halves = [entry(Category.IDLE, allocation=at, allocated_ns=SECOND_NS // 2) for at in (0, 1)]
    return event(
        number,
        node=node,
        time_ns=start_ns + number * SECOND_NS,
        gpus=[books(gpus[0], whole), books(gpus[1], *halves)],
        pods=[],
        allocated_to=[holder(f"train-{node}"), holder(f"chat-{node}", namespace="serving")],
    )


def labels_of(host: str, gpu: str) -> dict[str, str]:
    """Return the labels of a recorded series: dcgm-exporter's and the sink's."""
    of_pod = {"namespace": "research", "pod": f"train-{host}", "container": "jupyter"}
    return {
        "gpu": gpu,
        "UUID": f"GPU-{host}-{gpu}",
        "device": f"nvidia{gpu}",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": host,
        "hostname": host,
        "instance": host,
        "cluster": "default",
        "node": host,
        "gpu_uuid": f"GPU-{host}-{gpu}",
        **(of_pod if gpu == "0" else {}),
    }


def values_of(prometheus: PrometheusApi, query: str) -> list[float]:
    return [float(one["value"][1]) for one in prometheus.query(query)]


def label_values(prometheus: PrometheusApi, metric: str, label: str) -> list[str]:
    """Return the options of a dashboard's variable."""
    match = urllib.parse.urlencode({"match[]": metric})
    found: list[str] = prometheus.fetch(f"/api/v1/label/{label}/values?{match}").json()["data"]
    return found


async def test_dashboards_and_rules_of_dcgm_exporter_have_their_series_with_only_remote_write(
    broker: Kafka,
    start_prometheus: Callable[..., Prometheus],
    start_sink: Callable[..., Sink],
) -> None:
    await make_topics(broker)
    prometheus = start_prometheus(config=f"{CONFIG}rule_files: [{RULES}]\n")
    # The second to last tick ends an interval, and is the current one.
    now_seconds = time.time_ns() // SECOND_NS // INTERVAL_SECONDS * INTERVAL_SECONDS
    start_ns = (now_seconds - TICKS) * SECOND_NS
    await publish(
        broker,
        [tick_of(number, host, start_ns) for number in range(1, TICKS + 2) for host in HOSTS],
    )
    sink = start_sink(
        REMOTE_WRITE.name,
        broker,
        remote_write__url=prometheus.remote_write_url,
        remote_write__interval_seconds=str(INTERVAL_SECONDS),
        remote_write__stale_after_seconds="600",
    )
    all_sent = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION == 7e6 and DCGM_FI_DEV_FB_FREE > 0"
    await asyncio.to_thread(
        sink.wait_until,
        lambda: len(prometheus.query(all_sent)) == len(GPUS),
        deadline_seconds=120,
    )

    found: list[dict[str, Any]] = prometheus.query('{__name__=~"DCGM_.*"}')
    by_name: dict[str, dict[str, float]] = {}
    for one in found:
        of_metric = by_name.setdefault(one["metric"].pop("__name__"), {})
        of_metric[one["metric"]["UUID"]] = float(one["value"][1])
        assert one["metric"] == labels_of(one["metric"]["Hostname"], one["metric"]["gpu"])
    uuids = {f"GPU-{host}-{gpu}" for host, gpu in GPUS}
    assert by_name == {name: dict.fromkeys(uuids, value) for name, value in VALUES.items()}
    requested = {query: values_of(prometheus, query) for query, _ in (*OF_ALL, *OF_ONE)}
    expected = {query: [value] * len(GPUS) for query, value in OF_ALL}
    assert requested == expected | {query: [value] for query, value in OF_ONE}
    for label in ("instance", "Hostname"):
        assert label_values(prometheus, "DCGM_FI_DEV_FB_FREE", label) == list(HOSTS)
    assert label_values(prometheus, f"DCGM_FI_DEV_FB_FREE{BY_HOST}", "gpu") == ["0", "1"]
    assert sink.stop(deadline_seconds=120) == 0


PARTS: Final = {
    'gpuledger_gpu_info{gpu_uuid="GPU", gpu_index="0"}': "1x10",
    'gpuledger_gpu_info{gpu_uuid="MIG", parent_uuid="GPU", gpu_instance="7"}': "1x10",
    'gpuledger_gpu_memory_used_bytes{gpu_uuid="GPU"}': "2097152x10",
    'gpuledger_mig_instance_memory_used_bytes{gpu_uuid="MIG"}': "1048576x10",
    'gpuledger_mig_instance_utilization_ratio{gpu_uuid="MIG"}': "0.5x10",
    'gpuledger_gpu_energy_counter_joules_total{gpu_uuid="GPU"}': "0+60x10",
    'gpuledger_gpu_link_bytes_total{gpu_uuid="GPU", link="pcie", direction="sent"}': "0+120x10",
    'gpuledger_gpu_link_bytes_total{gpu_uuid="GPU", link="pcie", direction="received"}': "0+60x10",
}
"""Series of a partitioned GPU, one sample per minute."""
RECORDED: Final = {
    "DCGM_FI_DEV_FB_USED": ("MIG", 1),
    "DCGM_FI_DEV_GPU_UTIL": ("MIG", 50),
    "irate(DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION[5m])": ("GPU", 1000),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("GPU", 2),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("GPU", 1),
}
"""Queries with a single value, the device that it belongs to, and the value."""


def test_rules_count_a_partitioned_gpu_once_and_rates_match_those_of_counters(
    promtool: Path, tmp_path: Path
) -> None:
    tests = [
        {
            "expr": f"sum by (gpu_uuid, UUID, GPU_I_ID) ({query})",
            "eval_time": "10m",
            "exp_samples": [{"labels": labels(device), "value": value}],
        }
        for query, (device, value) in RECORDED.items()
    ]
    series = [
        {"series": name.replace("{", '{cluster="c", node="n", '), "values": values}
        for name, values in PARTS.items()
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    (tmp_path / "test.yml").write_text(yaml.dump({"rule_files": [str(RULES)], "tests": [test]}))
    command = [str(promtool), "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stdout + done.stderr


def labels(device: str) -> str:
    instance = ', GPU_I_ID="7"' if device == "MIG" else ""
    return f'{{gpu_uuid="{device}", UUID="GPU"{instance}}}'
