"""The documented Kafka permissions suffice for every workload, as rendered, as its own user."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from typing import TYPE_CHECKING, Final

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.codec import Decoder
from gpuledger.records import DeadLetter, GpuEvent
from gpuledger.rights import KAFKA_USERS, grants
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, Topics
from tests.default_topics import DEAD_LETTERS, EVENTS, INVENTORY, PROCESSES, READINGS, ROWS, SAMPLES
from tests.lint.test_security_page import GROUPS
from tests.real.deployment import chart
from tests.real.deployment.chart import PRODUCTION, render
from tests.real.deployment.installation import eventually, on, with_logins
from tests.real.end_to_end.components import BIN, Component, refuse_stray_settings
from tests.real.services.authorizing_kafka import AuthorizingKafka, Operation, Resource, Right

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.real.deployment.rendering import Rendering, Workload
    from tests.real.services.cluster_tools import Helm
    from tests.real.services.kcat import Kcat
    from tests.real.services.kube_client import KubeApiClient

WITHIN_SECONDS: Final = 120.0
_decode_dead_letter: Final = Decoder(topic=DEAD_LETTERS.name, record=DeadLetter).decode


RESOURCES: Final = {
    "topic": Resource.TOPIC,
    "group": Resource.GROUP,
    "transactionalId": Resource.TRANSACTIONAL_ID,
}


def granted_rights() -> Iterator[Right]:
    """Yield the access list entries of the permissions table."""
    for who in KAFKA_USERS:
        for grant in grants(who, Topics()):
            for operation in grant.operations:
                kind, name = RESOURCES[grant.resource], grant.name
                yield Right(who.user, Operation[operation], kind, name, is_prefix=grant.is_prefix)


def start(
    workload: Workload, folder: Path, overridden: Mapping[str, str] | None = None
) -> Component:
    laid_out = workload.lay_out(folder)
    environment = {**laid_out.environment, **(overridden or {})}
    ours = {
        name.removeprefix("GPULEDGER_"): value
        for name, value in environment.items()
        if name.startswith("GPULEDGER_")
    }
    made = Component(name=workload.name, command=laid_out.argv, folder=folder, environment=ours)
    made.start()
    return made


def run(command: list[str], kafka: AuthorizingKafka, name: str) -> str:
    """Run a command as a user, and return its output; it must succeed."""
    user = f"gpuledger-{name}"
    environment = {
        "PATH": os.environ["PATH"],
        "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
        "GPULEDGER_KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "GPULEDGER_KAFKA__SSL_CA_FILE": str(kafka.ca_file),
        "GPULEDGER_KAFKA__SASL_USERNAME": user,
        "GPULEDGER_KAFKA__SASL_PASSWORD": kafka.users[user],
    }
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(
    start_authorizing_kafka: Callable[[], AuthorizingKafka], helm: Helm, tmp_path: Path
) -> tuple[AuthorizingKafka, Rendering]:
    """Return brokers with the permissions of the table, and an installation for them."""
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    asyncio.run(kafka.allow(granted_rights()))
    volume = {"store": {"uri": "", "options": None, "credentialsSecret": ""}}
    return kafka, with_logins(
        render(PRODUCTION, chart.ROWS, chart.SCALER, volume, on(kafka)), kafka
    )


def test_the_documented_permissions_suffice_for_every_workload_and_command(
    installed: tuple[AuthorizingKafka, Rendering],
    kube_api: KubeApiClient,
    kcat: Kcat,
    tmp_path: Path,
) -> None:
    kafka, rendering = installed
    plain = kafka.plaintext_bootstrap_servers
    again = Topic(name="again", record=GpuEvent, key="node")
    asyncio.run(create_topics(KafkaSettings(bootstrap_servers=plain), [again]))
    named_by_option = Right("gpuledger-replay", Operation.Write, Resource.TOPIC, again.name)
    asyncio.run(kafka.allow([named_by_option]))
    assert "config differs" not in run(["gpuledger", "topics", "create"], kafka, "topics")
    assert "differs" not in run(["gpuledger", "topics", "check"], kafka, "topics-check")
    for topic in (SAMPLES, EVENTS):
        kcat.produce(plain, topic.name, b"no record", partition=0)
    started: dict[str, Component] = {}
    podwatch = {
        "GPULEDGER_KUBERNETES__KUBECONFIG": str(kube_api.kubeconfig),
        "GPULEDGER_LEASE__ENABLED": "false",
    }
    agent = {
        "GPULEDGER_NODE_NAME": "node-1",
        "GPULEDGER_SOURCE": "simulated",
        "GPULEDGER_SPOOL__DIRECTORY": str(tmp_path / "spool"),
    }

    def count(topic: Topic) -> int:
        return len(kcat.consume(plain, topic.name))

    def dead_letter_writers() -> set[str]:
        found = kcat.consume(plain, DEAD_LETTERS.name)
        return {_decode_dead_letter(message.value or b"").consumer for message in found}

    try:
        for workload in rendering.services():
            if workload.name in {"gpuledger-agent", "gpuledger-reports"}:
                continue
            own = podwatch if workload.name == "gpuledger-podwatch" else None
            started[workload.name] = start(workload, tmp_path / workload.name, own)
        eventually(
            lambda: dead_letter_writers() == set(GROUPS.values()), within_seconds=WITHIN_SECONDS
        )
        started["gpuledger-agent"] = start(
            rendering.workload("gpuledger-agent"), tmp_path / "agent", agent
        )
        for topic in (SAMPLES, READINGS, PROCESSES, INVENTORY, EVENTS, ROWS):
            eventually(lambda topic=topic: count(topic) > 0, within_seconds=WITHIN_SECONDS)  # type: ignore[misc]  # a default is how a loop's value is bound
        started["gpuledger-podwatch"].wait_until_ready()
        for name in ("gpuledger-join", "gpuledger-sink-rows", "gpuledger-sink-scaler"):
            started[name].wait_until_ready()
        replay = ["gpuledger", "replay", "--from", "-1h", "--to", "-1s"]
        assert "compared" in run([*replay, "--compare"], kafka, "replay")
        run([*replay, "--topic", again.name], kafka, "replay")
        assert count(again) > 0
    finally:
        statuses = {name: component.stop() for name, component in started.items()}

    assert statuses == dict.fromkeys(statuses, 0)
    denied = re.compile(r"[Nn]ot authorized|[Aa]uthorizationFailed")
    assert [name for name, each in started.items() if denied.search(each.log.read_text())] == []
