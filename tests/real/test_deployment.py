"""The files of Compose, taken by the programs that they are written for."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from typing_extensions import override

from tests.real.parts import web
from tests.real.parts.kafka import Kafka
from tests.real.parts.ports import free_ports
from tests.real.parts.process import Process
from tests.tools import catalogue
from tests.unit.deployment import compose_file, dashboard
from tests.unit.deployment.deployables import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.parts.alertmanager import Alertmanager
    from tests.real.parts.prometheus import Prometheus
    from tests.real.parts.starter import Starter

COMPOSE = ROOT / "deploy" / "compose"
SERVICES = {service.name: service for service in compose_file.services()}
BIN = Path(sys.executable).parent


class ComposeKafka(Kafka):
    """A broker with the settings that docker-compose.yml gives to its own, on free ports."""

    @override
    def listeners(self) -> dict[str, str]:
        (outside,) = free_ports(1)
        ports = {"9092": self.port, "9093": self.controller_port, "19092": outside}
        return {
            name.removeprefix("KAFKA_").lower().replace("_", "."): self._moved(value, ports)
            for name, value in SERVICES["kafka"].environment.items()
            if name.startswith("KAFKA_")
        }

    @staticmethod
    def _moved(value: str, ports: dict[str, int]) -> str:
        for name, port in ports.items():
            value = value.replace(f"://:{name}", f"://127.0.0.1:{port}")
            value = value.replace(f"://kafka:{name}", f"://127.0.0.1:{port}")
            value = value.replace(f"://localhost:{name}", f"://127.0.0.1:{port}")
        return value


@pytest.fixture
def compose_kafka(starter: Starter, start_kafka: object) -> Kafka:
    """Start it; `start_kafka` is asked for because it says what to do where Kafka is missing."""
    distribution = catalogue.KAFKA.distribution()
    part = ComposeKafka(distribution=distribution, folder=starter.new_folder("kafka"))
    return starter.start(part)


def test_the_broker_of_the_compose_file_takes_the_topics(compose_kafka: Kafka) -> None:
    environment = {"GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": compose_kafka.bootstrap_servers}
    script = SERVICES["topics"].command()[0]

    for arguments in (SERVICES["topics"].command()[1:], ["topics", "check"]):
        command = [str(BIN / script), *arguments]
        done = subprocess.run(
            command,
            env={"PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_its_configuration(promtool: Path) -> None:
    command = [str(promtool), "check", "config", str(COMPOSE / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 0, done.stdout + done.stderr


def test_alertmanager_takes_its_configuration(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    alertmanager = start_alertmanager(config=(COMPOSE / "alertmanager.yml").read_text())

    assert alertmanager.alerts() == []


def test_prometheus_understands_every_query_of_the_dashboard(prometheus: Prometheus) -> None:
    for query in dashboard.queries():
        asked = urllib.parse.urlencode({"query": query})
        answer = web.fetch(f"{prometheus.url}/api/v1/query?{asked}")
        assert answer.json()["status"] == "success", query


@pytest.fixture
def simulated_cluster(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Start the simulated API server as Compose does; give its URL and the agents' settings."""
    (port,) = free_ports(1)
    command, environment = SERVICES["kube-api"].on_this_machine({"simulation": tmp_path})
    process = Process(
        name="kube-api",
        argv=command,
        folder=tmp_path,
        environment={
            **environment,
            "LISTEN": f"127.0.0.1:{port}",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
    )
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        process.wait_until(lambda: _answers(url), deadline_seconds=30)
        yield url, tmp_path / "agent.yaml"
    finally:
        process.stop()


def _answers(url: str) -> bool:
    try:
        return web.fetch(f"{url}/api/v1/nodes").status == 200
    except OSError:
        return False


def test_the_simulated_cluster_begins_when_its_agents_are_told(
    simulated_cluster: tuple[str, Path],
) -> None:
    url, file = simulated_cluster
    settings = yaml.safe_load(file.read_text())
    pods = web.fetch(f"{url}/api/v1/pods").json()["items"]
    log = (file.parent / "kube-api.log").read_text()

    assert f'"epoch_ns":{settings["simulator"]["epoch_ns"]}' in log
    assert pods
