"""The deployment files, taken by the programs that they are written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typing_extensions import override

from tests.data.kubernetes.subset import subset
from tests.real.parts import web
from tests.real.parts.kafka import Kafka
from tests.real.parts.kube_client import KubeApiClient
from tests.real.parts.kubeconfig import read_kubeconfig
from tests.real.parts.ports import free_ports
from tests.real.parts.process import Process
from tests.tools import catalogue
from tests.unit.deployment import compose_file, dashboard, manifests
from tests.unit.deployment.deployables import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.parts.alertmanager import Alertmanager
    from tests.real.parts.prometheus import Prometheus
    from tests.real.parts.starter import Starter

COMPOSE = ROOT / "deploy" / "compose"
SERVICES = {service.name: service for service in compose_file.services()}
BIN = Path(sys.executable).parent
NAMESPACE = "gpuledger"


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


def _path_of(manifest: dict[str, Any], plurals: dict[tuple[str, str], str]) -> str:
    version, kind = manifest["apiVersion"], manifest["kind"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    namespace = manifest["metadata"].get("namespace")
    inside = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{inside}/{plurals[version, kind]}"


@pytest.fixture
def plurals(kube_api: KubeApiClient) -> dict[tuple[str, str], str]:
    """Ask the API server by which word each kind is known."""
    found = {}
    for version in {manifest["apiVersion"] for manifest in manifests.load()}:
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"
        _, listing = kube_api.request("GET", root)
        for resource in listing["resources"]:
            if "/" not in resource["name"]:
                found[version, resource["kind"]] = resource["name"]
    return found


def test_the_schemas_of_the_unit_tests_are_those_of_the_api_server(
    kube_api: KubeApiClient,
) -> None:
    (file,) = (ROOT / "tests" / "data" / "kubernetes").glob("v*.json")
    _, version = kube_api.request("GET", "/version")
    if version["gitVersion"] != file.stem:
        pytest.skip(f"the given API server is {version['gitVersion']}, the schemas {file.stem}")
    _, document = kube_api.request("GET", "/openapi/v2")

    assert subset(document["definitions"]) == json.loads(file.read_text())["definitions"]


@pytest.mark.parametrize("manifest", manifests.load(), ids=manifests.title)
def test_the_api_server_takes_a_manifest(
    kube_api: KubeApiClient, plurals: dict[tuple[str, str], str], manifest: dict[str, Any]
) -> None:
    if manifest["kind"] != "Namespace":
        kube_api.create_namespace(NAMESPACE)
    # Applied rather than created: another test may have put the object there in earnest.
    path = f"{_path_of(manifest, plurals)}/{manifest['metadata']['name']}"
    asked = "dryRun=All&fieldValidation=Strict&fieldManager=tests&force=true"

    answer = kube_api.fetch(
        "PATCH", f"{path}?{asked}", manifest, content_type="application/apply-patch+yaml"
    )

    assert answer.status in {200, 201}, answer.json()["message"]


def test_podwatch_s_account_may_list_and_watch_pods_and_keep_its_lease_and_nothing_else(
    kube_api: KubeApiClient, tmp_path: Path
) -> None:
    kube_api.create_namespace(NAMESPACE)
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"):
        for manifest in manifests.of_kind(kind):
            kube_api.apply(manifest)
    file = kube_api.service_account_kubeconfig(namespace=NAMESPACE, name="gpuledger-podwatch")
    cluster, login = read_kubeconfig(file, folder=tmp_path)
    account = KubeApiClient(cluster=cluster, login=login, kubeconfig=file, folder=tmp_path)

    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    allowed = [
        account.fetch(method, path, body).status
        for method, path, body in (
            ("GET", "/api/v1/pods", None),
            ("GET", "/api/v1/pods?watch=true&timeoutSeconds=1", None),
            ("POST", f"{leases}?dryRun=All", {"metadata": {"name": "gpuledger-podwatch"}}),
        )
    ]
    refused = [
        account.fetch(method, path, body).status
        for method, path, body in (
            ("GET", "/api/v1/secrets", None),
            ("GET", "/api/v1/nodes", None),
            ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods", {"metadata": {"name": "intruder"}}),
            ("GET", leases, None),
            ("GET", f"{leases}/another", None),
            ("DELETE", f"{leases}/gpuledger-podwatch", None),
            ("GET", leases.replace(NAMESPACE, "kube-system") + "/gpuledger-podwatch", None),
        )
    ]

    assert allowed == [200, 200, 201]
    assert set(refused) == {403}
