"""The agent as a replacement for dcgm-exporter: started as its chart starts it, with its settings.

The agent is a process that plays a node. The content of a scrape is compared with dcgm-exporter's
own list and with the simulator's truth, including a lost GPU.
"""

from __future__ import annotations

import gzip
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuledger_agent.exposition.dcgm_fields import all_fields
from tests.real.end_to_end.components import BIN
from tests.real.services import web
from tests.real.services.ports import free_ports
from tests.real.services.process import Process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from prometheus_client.metrics_core import Metric
    from prometheus_client.samples import Sample

LOST_AT_SECONDS = 5.0
GONE_AT_SECONDS = 5.5
SCRAPE_SECONDS = 30.0
"""How long after its loss a GPU is examined: as dcgm-exporter's users scrape."""
SCENARIO = f"""
name: swap
seed: 5
nodes:
  - name: gpu-a
    gpus:
      - {{model: NVIDIA H100 80GB HBM3, count: 3}}
pods:
  - namespace: research
    name: finetune-worker-0
    node: gpu-a
    containers:
      - name: pytorch
        processes:
          - command: python finetune.py
            gpus: [0]
            load: {{busy_ratio: 0.9, kernel_seconds: 0.01}}
            memory_bytes: 60_129_542_144
  - namespace: serving
    name: chat-0
    node: gpu-a
    containers:
      - name: server
        devices: [{{gpu: 1, replica: 0}}]
        processes:
          - {{command: python3 -m chat, gpus: [1], memory_bytes: 37_580_963_840}}
  - namespace: serving
    name: embeddings-0
    node: gpu-a
    containers:
      - name: server
        devices: [{{gpu: 1, replica: 1}}]
        processes:
          - {{command: embeddings, gpus: [1], memory_bytes: 12_884_901_888}}
incidents:
  - {{node: gpu-a, gpu: 2, at_seconds: {LOST_AT_SECONDS}, xid: 79}}
faults:
  - {{node: gpu-a, kind: lost, gpus: [2], start_seconds: {GONE_AT_SECONDS}, end_seconds: 3600}}
"""
# The container arguments of dcgm-exporter's chart, and further metrics in its users' lists.
CHART_ARGS = ["-f", "/etc/dcgm-exporter/dcp-metrics-included.csv"]
ALERTS = """\
DCGM_FI_DEV_GPU_TEMP, gauge, Temperature
DCGM_FI_DEV_XID_ERRORS, gauge, Last XID
DCGM_EXP_XID_ERRORS_COUNT, counter, XIDs
DCGM_EXP_GPU_HEALTH_STATUS, gauge, Health
DCGM_FI_DEV_CPU_UTIL_TOTAL, gauge, A field that this agent does not have
"""


@dataclass
class Exporter:
    """The agent, started as a replacement for dcgm-exporter."""

    process: Process
    url: str
    scenario: Path

    def fetch(self, page: str) -> web.Answer:
        return web.fetch(f"{self.url}{page}")

    def is_healthy(self) -> bool:
        return self.fetch("/health").status == 200 and bool(self.families())

    def families(self) -> dict[str, Metric]:
        """Return DCGM's families; the parser removes the suffix of counters' names."""
        text = self.fetch("/metrics").body.decode()
        found = text_string_to_metric_families(text)
        return {one.name: one for one in found if one.name.startswith("DCGM_")}

    def samples(self, name: str) -> list[Sample]:
        families = self.families()
        return list(families[name].samples) if name in families else []


def start(folder: Path, *argv: str) -> Exporter:
    (port,) = free_ports(1)
    scenario = folder / "scenario.yaml"
    scenario.write_text(SCENARIO)
    process = Process(
        name="dcgm-exporter",
        argv=[BIN / "gpuledger", "agent", *argv, "--source", f"simulated:{scenario}"],
        folder=folder,
        environment={
            "DCGM_EXPORTER_KUBERNETES": "true",
            "DCGM_EXPORTER_LISTEN": f":{port}",
            "NODE_NAME": "gpu-a",
            # Set by Kubernetes if there is a Service with this name.
            "DCGM_EXPORTER_PORT": "tcp://10.96.0.1:9400",
            "DCGM_EXPORTER_SERVICE_HOST": "10.96.0.1",
        },
    )
    process.start()
    exporter = Exporter(process, f"http://127.0.0.1:{port}", scenario)
    process.wait_until(exporter.is_healthy, deadline_seconds=120.0)
    return exporter


@pytest.fixture(scope="module")
def swapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    exporter = start(tmp_path_factory.mktemp("swapped"), *CHART_ARGS)
    try:
        # Health is read once in ten seconds.
        time.sleep(12.0)
        yield exporter
    finally:
        assert exporter.process.stop(deadline_seconds=120) == 0, exporter.process.log_tail()


def test_the_page_has_the_families_of_dcgm_exporters_list_with_their_types(
    swapped: Exporter,
) -> None:
    wanted = {
        field.old.removesuffix("_total"): field.kind
        for field in all_fields()
        if field.is_default and field.kind != "label"
    }
    assert {name: one.type for name, one in swapped.families().items()} == wanted


def test_a_series_has_the_labels_of_dcgm_exporter(swapped: Exporter) -> None:
    by_gpu = {one.labels["gpu"]: one.labels for one in swapped.samples("DCGM_FI_DEV_GPU_TEMP")}
    identity = {"gpu", "UUID", "pci_bus_id", "device", "modelName", "hostname"}
    version = {"DCGM_FI_DRIVER_VERSION"}
    assert by_gpu["0"].keys() == identity | version | {"namespace", "pod", "container"}
    assert by_gpu["0"]["pod"] == "finetune-worker-0"
    assert by_gpu["1"].keys() == identity | version
    assert by_gpu["0"]["hostname"] == "gpu-a"


def test_a_sum_over_a_shared_gpu_is_its_used_memory(swapped: Exporter) -> None:
    used = swapped.samples("DCGM_FI_DEV_FB_USED")
    assert sum(one.value for one in used if one.labels["gpu"] == "1") == 35840 + 12288
    assert len([one for one in used if one.labels["gpu"] == "1"]) == 1


def test_no_vgpu_license_is_reported(swapped: Exporter) -> None:
    values = {one.value for one in swapped.samples("DCGM_FI_DEV_VGPU_LICENSE_STATUS")}
    assert values == {0}


def test_a_compressed_scrape_is_small(swapped: Exporter) -> None:
    url = f"{swapped.url}/metrics"
    packed = web.fetch(url, headers={"Accept-Encoding": "gzip"}).body
    text = gzip.decompress(packed)
    assert b"DCGM_FI_DEV_GPU_TEMP{" in text
    assert len(packed) < len(text) / 5
    assert b"_created" not in text


def test_the_agent_logs_that_it_replaces_dcgm_exporter_and_logs_no_warning(
    swapped: Exporter,
) -> None:
    log = swapped.process.log.read_text()
    assert '"event":"dcgm_exporter_replaced"' in log
    assert "dcgm_settings_ignored" not in log
    assert '"publishes":false' in log


def test_a_lost_gpu_is_reported_at_the_usual_scrape_interval(tmp_path: Path) -> None:
    counters = tmp_path / "alerts.csv"
    counters.write_text(ALERTS)
    exporter = start(tmp_path, "-f", str(counters), "-c", "30000")
    try:
        time.sleep(LOST_AT_SECONDS + SCRAPE_SECONDS)
        (xid,) = [
            one for one in exporter.samples("DCGM_FI_DEV_XID_ERRORS") if one.labels["gpu"] == "2"
        ]
        assert (xid.value, xid.labels["err_code"]) == (79, "79")
        counts = exporter.samples("DCGM_EXP_XID_ERRORS_COUNT")
        assert [one.value for one in counts if one.labels.get("xid") == "79"] == [1]
        health = {
            (one.labels["gpu"], one.labels["health_error_code"]): one.value
            for one in exporter.samples("DCGM_EXP_GPU_HEALTH_STATUS")
            if one.labels["health_watch"] == "ALL"
        }
        assert health["2", "DCGM_FR_FALLEN_OFF_BUS"] == 20
        assert health["0", "DCGM_FR_OK"] == 0
        hot = {one.labels["gpu"] for one in exporter.samples("DCGM_FI_DEV_GPU_TEMP")}
        assert hot == {"0", "1"}
        log = exporter.process.log.read_text()
        assert '"lines":["5: DCGM_FI_DEV_CPU_UTIL_TOTAL: not supported"]' in log
        assert "dcgm_settings_ignored" not in log
    finally:
        assert exporter.process.stop(deadline_seconds=120) == 0, exporter.process.log_tail()
