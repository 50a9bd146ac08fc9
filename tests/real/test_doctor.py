"""`gpuledger doctor` on a running installation: it passes, and names each fault with its remedy."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Final

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import GpuFacts, Inventory
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_cli.__main__ import main
from tests.default_topics import INVENTORY, REPLAY, TOPICS
from tests.real.changed_topics import delete
from tests.real.deployment.test_kafka_rights import granted_rights
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.alertmanager import AlertmanagerApi
    from tests.real.services.authorizing_kafka import AuthorizingKafka
    from tests.real.services.kafka import Kafka
    from tests.real.services.prometheus import PrometheusApi

WITHIN_SECONDS: Final = 120.0
DOCTOR, JOIN = "gpuledger-doctor", "gpuledger-join"
OWN: Final = {
    "agent": {"NODE_NAME": "gpu-node-1", "SOURCE": "simulated"},
    "join": {"JOIN__PODWATCH_TIMEOUT_SECONDS": "0"},
    "sink rows": {},
}


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Return a function that runs the command; it returns the exit code and the findings."""

    def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        capsys.readouterr()
        code = main(["doctor", "--format", "json", *arguments])
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def until(
    doctor: Callable[..., tuple[int, list[dict[str, Any]]]], code: int, *arguments: str
) -> list[dict[str, Any]]:
    """Run the command until it returns this code; return its findings."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while True:
        found, findings = doctor(*arguments)
        if found == code:
            return findings
        assert time.monotonic() < deadline, [one for one in findings if one["status"] != "ok"]


def of(check: str, findings: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first finding of a check that is not ok, otherwise its first finding."""
    found = [one for one in findings if one["check"] == check]
    return next((one for one in found if one["status"] != "ok"), found[0])


@pytest.fixture
def running(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> Iterator[tuple[str, dict[str, Component]]]:
    """Start an agent, a join and a sink, and return the brokers' address and the components."""
    refuse_stray_settings()
    servers = start_kafka().bootstrap_servers
    asyncio.run(create_topics(KafkaSettings(bootstrap_servers=servers), partitions=2))
    (tmp_path / "spool").mkdir()
    components = {
        name: Component(
            name=name,
            command=["gpuledger", *name.split()],
            folder=tmp_path / name.replace(" ", "-"),
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": servers,
                "SPOOL__DIRECTORY": str(tmp_path / "spool"),
                **own,
            }
            if name == "agent"
            else {"KAFKA__BOOTSTRAP_SERVERS": servers, **own},
        )
        for name, own in OWN.items()
    }
    try:
        for component in components.values():
            component.start()
        for component in components.values():
            component.wait_until_ready()
        yield servers, components
    finally:
        for component in components.values():
            component.kill()


async def publish_inventory(servers: str, node: str) -> None:
    """Publish the inventory of a node that sends no samples."""
    bus = KafkaBus(KafkaSettings(bootstrap_servers=servers))
    gpu = GpuFacts(uuid="GPU-gone", index=0, model="H100", instances=[], capabilities=[])
    inventory = Inventory(
        cluster="default", node=node, boot_id="b", time_ns=time.time_ns(), gpus=[gpu]
    )
    key = key_in("default", node)
    home = partition_of_node(key, partitions=await bus.partitions(INVENTORY.name))
    async with bus.producer() as producer:
        await producer.publish(INVENTORY.name, home, [Message(key.encode(), encode(inventory), 1)])


def test_a_running_installation_passes_and_each_fault_is_named_with_its_remedy(
    running: tuple[str, dict[str, Component]],
    doctor: Callable[..., tuple[int, list[dict[str, Any]]]],
) -> None:
    servers, components = running
    arguments = ("--bootstrap-servers", servers, "--skip", "podwatch")
    healthy = until(doctor, 0, *arguments, *(one.health for one in components.values()))
    assert {one["check"] for one in healthy if one["status"] == "ok"} == {
        *("brokers", "topics", "permissions", "groups", "nodes", "clocks", "coverage"),
        "components",
    }
    assert of("coverage", healthy)["finding"].startswith("100.0% of the GPUs' time")

    assert (
        "podwatch has published nothing"
        in of("podwatch", until(doctor, 1, "--bootstrap-servers", servers))["finding"]
    )

    components["sink rows"].stop()
    asyncio.run(publish_inventory(servers, "gpu-node-gone"))
    asyncio.run(delete(KafkaSettings(bootstrap_servers=servers), REPLAY))
    findings = until(doctor, 1, *arguments, components["sink rows"].health)
    faults = {
        "topics": ("gpuledger.replay.v1 is missing", "gpuledger topics create"),
        "groups": ("rows: 0 members", "gpuledger-rows"),
        "nodes": ("gpu-node-gone", "cluster retire default --node gpu-node-gone"),
        "coverage": ("gpu-node-gone 0%", "nvml"),
        "components": ("cannot connect", "Start the component"),
    }
    for check, (finding, action) in faults.items():
        assert finding in of(check, findings)["finding"]
        assert action in of(check, findings)["action"]
    assert of("clocks", findings)["status"] == "ok"


def test_the_doctors_permissions_suffice_and_a_components_missing_permissions_are_named(
    start_authorizing_kafka: Callable[[], AuthorizingKafka],
    doctor: Callable[..., tuple[int, list[dict[str, Any]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    asyncio.run(
        create_topics(KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers), TOPICS)
    )
    asyncio.run(kafka.allow(right for right in granted_rights() if right.user == DOCTOR))
    for name, value in {
        "BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "SECURITY_PROTOCOL": "SASL_SSL",
        "SSL_CA_FILE": str(kafka.ca_file),
    }.items():
        monkeypatch.setenv(f"GPULEDGER_KAFKA__{name}", value)

    def log_in(user: str) -> None:
        monkeypatch.setenv("GPULEDGER_KAFKA__SASL_USERNAME", user)
        monkeypatch.setenv("GPULEDGER_KAFKA__SASL_PASSWORD", kafka.users[user])

    log_in(DOCTOR)
    # Nothing runs here, so the exit code is 1; but every check of Kafka could run.
    deadline = time.monotonic() + WITHIN_SECONDS
    while True:
        _, findings = doctor()
        by_status = {one["check"]: one["status"] for one in findings}
        if by_status["topics"] == "ok" and by_status["groups"] == "skipped":
            break
        assert time.monotonic() < deadline, [one for one in findings if one["status"] != "ok"]
    assert by_status["permissions"] == "skipped"
    assert by_status["podwatch"] == by_status["nodes"] == by_status["coverage"] == "problem"

    log_in(JOIN)
    of_join = [right for right in granted_rights() if right.user == JOIN]
    missing = next(right for right in of_join if right.name == "gpuledger.progress.v1")
    asyncio.run(kafka.allow(right for right in of_join if right != missing))
    while True:
        _, findings = doctor("--as", "join")
        rights = of("permissions", findings)
        if rights["finding"] == (
            f"as join, this user lacks {missing.operation.name} on topic {missing.name}"
        ):
            break
        assert time.monotonic() < deadline, rights
    asyncio.run(kafka.allow([missing]))
    while of("permissions", doctor("--as", "join")[1])["status"] != "ok":
        assert time.monotonic() < deadline


def test_the_receivers_of_sinks_are_tried_without_samples_and_alerts(
    prometheus: PrometheusApi,
    alertmanager: AlertmanagerApi,
    doctor: Callable[..., tuple[int, list[dict[str, Any]]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ("--skip", "brokers", "--receiver", "remote_write", "--receiver", "alerts")
    monkeypatch.setenv("GPULEDGER_REMOTE_WRITE__URL", f"{prometheus.url}/api/v1/write")
    monkeypatch.setenv("GPULEDGER_ALERTS__URLS", json.dumps([alertmanager.url]))
    code, findings = doctor(*arguments)
    assert code == 0, findings
    assert [one["status"] for one in findings if one["check"] == "receivers"] == ["ok", "ok"]

    monkeypatch.setenv("GPULEDGER_REMOTE_WRITE__URL", f"{prometheus.url}/absent")
    monkeypatch.setenv("GPULEDGER_ALERTS__URLS", '["http://127.0.0.1:9"]')
    code, findings = doctor(*arguments)
    assert code == 1
    faults = [one["finding"] for one in findings if one["check"] == "receivers"]
    assert "404" in faults[0]
    assert "127.0.0.1:9" in faults[1]
