"""docker-compose.yml is valid, and everything that it names exists."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from jsonschema import Draft202012Validator

from gpuledger.programs import COMPONENTS
from gpuledger.settings import load_settings
from gpuledger_cli.kafka_options import TopicsSettings
from tests.unit.deployment import components, compose_file
from tests.unit.deployment.components import ROOT
from tests.unit.deployment.compose_file import Service

COMPOSE = ROOT / "deploy" / "compose"
SERVICES = {service.name: service for service in compose_file.services()}
DEPLOYED = {service.name: service for service in compose_file.deployed()}
OPTIONAL = {name for name, service in SERVICES.items() if "profiles" in service.spec}
SettingsOf = Callable[[str], dict[str, Any]]
EPOCH = re.compile(r"simulator:\n  epoch_ns: \d{19}\n")


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the simulated cluster's input for agents, without its server."""
    folder, commands = tmp_path_factory.mktemp("simulation"), tmp_path_factory.mktemp("commands")
    stub = commands / "python"
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)
    command, environment = SERVICES["kube-api"].on_this_machine({"simulation": folder})
    done = subprocess.run(
        command,
        env={"PATH": f"{commands}:{os.environ['PATH']}", **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    started = r"-m gpuledger_simulator kube-api --scenario .* --epoch-ns \d{19}$"
    assert re.match(started, done.stdout)
    return folder


@pytest.fixture
def settings_of(simulation: Path) -> SettingsOf:
    def settings(name: str) -> dict[str, Any]:
        command, environment = DEPLOYED[name].on_this_machine({"simulation": simulation})
        return components.settings(command, environment)

    return settings


def test_the_compose_file_follows_the_compose_specification() -> None:
    schema = json.loads((ROOT / "tests/data/compose/compose-spec.json").read_text())
    errors = Draft202012Validator(schema).iter_errors(compose_file.load())

    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_every_component_has_a_service() -> None:
    assert {service.command()[1] for service in DEPLOYED.values()} == set(COMPONENTS)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_an_image_is_either_built_here_or_has_a_fixed_version(service: Service) -> None:
    build = service.spec.get("build")

    if service.is_ours:
        assert build == {"context": ".", "target": service.stage.name}
    else:
        assert build is None
        assert re.search(r":v?\d+\.\d+\.\d+$", service.image)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_drops_its_privileges(service: Service) -> None:
    assert service.spec["cap_drop"] == ["ALL"]
    assert service.spec["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "user", "pid", "network_mode"} & set(service.spec)
    # Kafka's image writes its configuration next to its programs.
    assert service.spec.get("read_only", False) == (service.name != "kafka")


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_ports_are_published_only_on_this_machine(service: Service) -> None:
    for port in service.spec.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_every_mounted_file_exists_and_is_read_only(service: Service) -> None:
    for mount in service.mounts:
        if mount.is_file_of_the_repository:
            assert (ROOT / mount.source).exists(), mount.source
            assert mount.mode == "ro", mount.source


def test_the_services_use_exactly_the_named_volumes() -> None:
    used = {
        mount.source
        for service in SERVICES.values()
        for mount in service.mounts
        if not mount.is_file_of_the_repository
    }

    assert used == set(compose_file.load()["volumes"])


def test_our_volumes_cover_the_directories_that_the_image_makes_writable() -> None:
    (command,) = components.stages()["runtime"].values("RUN")
    writable = {word for word in json.loads(command) if word.startswith("/")}
    covered = {
        mount.target
        for service in SERVICES.values()
        for mount in service.mounts
        if service.is_ours and not mount.is_file_of_the_repository
    }

    assert covered == writable


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_a_service_waits_only_for_existing_services(service: Service) -> None:
    waited_for = service.spec.get("depends_on", {})

    assert set(waited_for) <= set(SERVICES)
    for name, how in waited_for.items() if isinstance(waited_for, dict) else ():
        is_healthy = how["condition"] == "service_healthy"
        assert is_healthy == ("healthcheck" in SERVICES[name].spec), name


@pytest.mark.parametrize("name", DEPLOYED)
def test_a_component_accepts_its_command_and_its_environment(
    settings_of: SettingsOf, name: str
) -> None:
    loaded = settings_of(name)

    if name == "reports":
        assert "kafka" not in loaded
    else:
        assert loaded["kafka"]["bootstrap_servers"] == "kafka:9092"
    assert components.listen_port(loaded) == components.port_of(DEPLOYED[name].command()[1])


@pytest.mark.parametrize("name", DEPLOYED)
def test_every_url_in_the_settings_is_a_service_and_its_port(
    settings_of: SettingsOf, name: str
) -> None:
    ports = {"prometheus": 9090, "alertmanager": 9093}
    given = [url for url in compose_file.urls(settings_of(name)) if "localhost" not in url]

    for url in given:
        assert ports[str(urlsplit(url).hostname)] == urlsplit(url).port
    assert len(given) == (2 if name.startswith("sink") else 0)


def test_every_node_of_the_scenario_has_an_agent() -> None:
    agents = [service for service in DEPLOYED.values() if service.stage.name == "agent"]
    (source,) = {agent.environment["GPULEDGER_SOURCE"] for agent in agents}
    scenario = yaml.safe_load((ROOT / "scenarios" / Path(source).name).read_text())

    assert [agent.environment["NODE_NAME"] for agent in agents] == [
        node["name"] for node in scenario["nodes"]
    ]
    _, environment = SERVICES["kube-api"].on_this_machine({})
    assert environment["SCENARIO"] == str(ROOT / "scenarios" / Path(source).name)


def test_the_agents_read_the_start_time_of_the_simulated_cluster(
    simulation: Path, settings_of: SettingsOf
) -> None:
    assert EPOCH.fullmatch((simulation / "agent.yaml").read_text())
    assert settings_of("agent-1")["simulator"]["epoch_ns"] > 1_700_000_000_000_000_000


def test_podwatch_finds_the_simulated_api_server(settings_of: SettingsOf) -> None:
    path = settings_of("podwatch")["kubernetes"]["kubeconfig"]
    (cluster,) = yaml.safe_load(Path(path).read_text())["clusters"]
    listen = SERVICES["kube-api"].environment["LISTEN"]

    assert cluster["cluster"]["server"] == f"http://kube-api:{listen.rpartition(':')[2]}"


def test_the_topics_are_created_by_an_existing_command() -> None:
    service = SERVICES["topics"]
    loaded = load_settings(
        TopicsSettings, prog="topics", description="", argv=[], environ=service.environment
    )

    assert "partitions" in components.run([*service.command(), "--help"], {})
    assert loaded.kafka.bootstrap_servers == "kafka:9092"


def test_the_broker_listens_where_its_clients_connect() -> None:
    environment = SERVICES["kafka"].environment
    listeners = dict(item.split("://") for item in environment["KAFKA_LISTENERS"].split(","))
    advertised = dict(
        item.split("://") for item in environment["KAFKA_ADVERTISED_LISTENERS"].split(",")
    )

    assert advertised == {"INSIDE": "kafka:9092", "HOST": "localhost:19092"}
    assert all(address.endswith(listeners[name]) for name, address in advertised.items())
    assert environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"] == "false"


def test_prometheus_scrapes_every_always_running_component_on_its_port(
    settings_of: SettingsOf,
) -> None:
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    scraped = {target for group in job["static_configs"] for target in group["targets"]}
    always = DEPLOYED.keys() - OPTIONAL

    assert scraped == {f"{name}:{components.listen_port(settings_of(name))}" for name in always}


def test_no_service_waits_for_an_optional_one() -> None:
    for service in SERVICES.values():
        assert not OPTIONAL & set(service.spec.get("depends_on", {})), service.name
