"""Each permission of the table is needed: without it a component names the denied operation."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

import orjson
import pytest
import yaml
from aiokafka import AIOKafkaConsumer, TopicPartition

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.rights import KAFKA_USERS, Grant, KafkaUser, grants
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, Topics
from tests.real.deployment.test_kafka_rights import RESOURCES
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.real.services.authorizing_kafka import Operation, Right, allow_on
from tests.real.services.oauth_kafka import OauthKafka
from tests.real.services.starter import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.real.services.kafka import KafkaDistribution
    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.prometheus import PrometheusApi

# It has an incident on this node.
SCENARIO: Final = Path(__file__).parents[2] / "cli" / "gpuledger_cli" / "demo" / "demo.yaml"
NODE: Final = "gpu-node-2"
WITHIN_SECONDS: Final = 120.0
SESSION_SECONDS: Final = "6"
"""Kafka's minimum; the next case waits for it, because the previous member was killed."""
GONE: Final = Message(key=b"gone", value=None, timestamp_ms=1)
OWN: Final = {
    "agent": {"NODE_NAME": NODE, "SOURCE": f"simulated:{SCENARIO}"},
    "podwatch": {"LEASE__ENABLED": "false"},
    "join": {"JOIN__PODWATCH_TIMEOUT_SECONDS": "0"},  # there is none on this machine
    "sink remote_write": {"REMOTE_WRITE__URL": "http://127.0.0.1:9/"},
    "sink alerts": {"ALERTS__URLS": "http://127.0.0.1:9"},
}
"""Settings of a component in addition to its brokers."""


class Case(NamedTuple):
    """One operation of one grant, which a component must do without."""

    who: KafkaUser
    missing: Grant
    operation: str


COMMANDS: Final = {
    "watermarks",
    "inspect",
    "cluster retire",
    "replay",
    "dead letters list",
    "dead letters replay",
}
"""For users, who see it at once: test_retire_rights, test_replay, test_dead_letter_rights."""
CASES: Final = [
    Case(who, grant, operation)
    for who in KAFKA_USERS
    for grant in grants(who, Topics())
    for operation in grant.operations
    if not who.on_all_topics and who.name not in COMMANDS
]

FIRST_OF: Final = {case.who: case for case in reversed(CASES)}


@pytest.fixture(scope="module")
def brokers(
    kafka_distribution: KafkaDistribution, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OauthKafka]:
    """Yield brokers that accept any user that a token names and deny everything to them.

    They have records of every component, and ticks keep coming: some permissions need a record.
    """
    refuse_stray_settings()
    folder = tmp_path_factory.mktemp("oauth-kafka")
    with running(OauthKafka(distribution=kafka_distribution, folder=folder)) as part:
        settings = KafkaSettings(bootstrap_servers=part.plaintext_bootstrap_servers)
        asyncio.run(create_topics(settings, partitions=1))
        plain = {"KAFKA__BOOTSTRAP_SERVERS": part.plaintext_bootstrap_servers}
        with ExitStack() as stack:
            folder = tmp_path_factory.mktemp("stages")
            own = {"agent": {"SPOOL__DIRECTORY": str(folder / "spool")}, "join": {}}
            stages = {
                name: Component(
                    name=name,
                    command=["gpuledger", name],
                    folder=folder / name,
                    environment={**plain, **OWN.get(name, {}), **others},
                )
                for name, others in own.items()
            }
            for stage in stages.values():
                stack.callback(stage.kill)
                stage.start()
            for topic in (Topics().events, Topics().watermarks):
                await_records(part.plaintext_bootstrap_servers, topic.name)
            stages["join"].stop()  # the examined joins use that group
            yield part


def await_records(servers: str, topic: str) -> None:
    async def count() -> int:
        client = AIOKafkaConsumer(bootstrap_servers=servers)
        await client.start()
        try:
            place = TopicPartition(topic, 0)
            return int((await client.end_offsets([place]))[place])
        finally:
            await client.stop()

    deadline = time.monotonic() + WITHIN_SECONDS
    while not asyncio.run(count()):
        assert time.monotonic() < deadline, topic
        time.sleep(0.5)


@pytest.fixture
def pod(kube_api: KubeApiClient, brokers: OauthKafka) -> None:
    """Create one of each kind that no earlier test had, to publish, and pods to read back."""
    namespace = f"rights-{uuid4().hex[:8]}"
    kube_api.create_namespace(namespace)
    kube_api.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": namespace}})
    container = {"name": "c", "image": "i"}
    waiting = {**container, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    specs = {
        "one": {"nodeName": NODE, "containers": [container]},
        "waiting": {"containers": [waiting]},
    }
    for name, spec in specs.items():
        metadata = {"name": name, "namespace": namespace}
        kube_api.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    async def publish() -> None:
        settings = KafkaSettings(bootstrap_servers=brokers.plaintext_bootstrap_servers)
        async with KafkaBus(settings).producer() as producer:
            for topic in (Topics().pods, Topics().pending_pods):
                await producer.publish(topic.name, 0, [GONE])

    asyncio.run(publish())


def write(brokers: OauthKafka, topic: Topic, message: Message) -> None:
    """Write a record to a topic: nothing is read from an empty one."""

    async def publish() -> None:
        settings = KafkaSettings(bootstrap_servers=brokers.plaintext_bootstrap_servers)
        async with KafkaBus(settings).producer() as producer:
            await producer.publish(topic.name, 0, [message])

    asyncio.run(publish())


def write_hasty_scenario(file: Path) -> Path:
    """Write the scenario with its incidents in the first second instead of the eighth."""
    scenario = yaml.safe_load(SCENARIO.read_text())
    assert [incident["node"] for incident in scenario["incidents"]] == [NODE]
    for incident in scenario["incidents"]:
        incident["at_seconds"] = 1
    file.write_text(yaml.safe_dump(scenario))
    return file


def rights_without(case: Case | None, who: KafkaUser, user: str) -> list[Right]:
    return [
        Right(user, Operation[operation], RESOURCES[grant.resource], grant.name, grant.is_prefix)
        for grant in grants(who, Topics())
        for operation in grant.operations
        if case is None or (grant, operation) != (case.missing, case.operation)
    ]


def login(brokers: OauthKafka, user: str, folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text(brokers.keys.sign(user, for_seconds=600.0))
    return {
        "KAFKA__BOOTSTRAP_SERVERS": brokers.bootstrap_servers,
        "KAFKA__SECURITY_PROTOCOL": "SASL_SSL",
        "KAFKA__SASL_MECHANISM": "OAUTHBEARER",
        "KAFKA__OAUTH__TOKEN_FILE": str(token),
        "KAFKA__SSL_CA_FILE": str(brokers.ca_file),
        "KAFKA__SESSION_TIMEOUT_SECONDS": SESSION_SECONDS,
    }


def shown(component: Component) -> str:
    try:
        return orjson.dumps(component.readyz()).decode()
    except OSError:
        return ""


@pytest.mark.parametrize(
    "case",
    [
        # One of each account; all others in the extended run.
        case if case is FIRST_OF[case.who] else pytest.param(case, marks=pytest.mark.extended)
        for case in CASES
    ],
    ids=lambda case: f"{case.who.name} {case.operation} {case.missing.name}".replace(" ", "-"),
)
def test_a_missing_permission_is_named(
    brokers: OauthKafka,
    kube_api: KubeApiClient,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    case: Case,
) -> None:
    who, missing = case.who, case.missing
    user = f"{who.user}-{CASES.index(case)}"
    asyncio.run(allow_on(brokers.plaintext_bootstrap_servers, rights_without(case, who, user)))
    name, _, kind = who.name.partition(" ")
    own = dict(OWN.get(who.name, {}))
    if name == "agent":
        own["SPOOL__DIRECTORY"] = str(tmp_path / "spool")
        own["SOURCE"] = f"simulated:{write_hasty_scenario(tmp_path / 'scenario.yaml')}"
    if name == "podwatch":
        request.getfixturevalue("pod")
        own["KUBERNETES__KUBECONFIG"] = str(kube_api.kubeconfig)
    if kind == "remote_write" and missing.name == Topics().counters.name:
        write(brokers, Topics().counters, GONE)
        prometheus: PrometheusApi = request.getfixturevalue("prometheus")
        own["REMOTE_WRITE__URL"] = prometheus.remote_write_url
    if kind == "store":
        own["STORE__URI"] = str(tmp_path / "store")
        # A watermark is written once it covers rows.
        own["STORE__FLUSH_SECONDS"] = "1"
    made = Component(
        name=f"{user}",
        command=["gpuledger", name, *([kind] if kind else [])],
        folder=tmp_path / "run",
        environment={**login(brokers, user, tmp_path), **own},
    )
    made.start()
    try:
        deadline = time.monotonic() + WITHIN_SECONDS
        wanted = missing.name if missing.resource != "transactionalId" else "transactional id"
        while not (wanted in (output := shown(made)) and "denies this user" in output):
            assert made.exit_status() is None, made.log_tail()
            assert time.monotonic() < deadline, output
            time.sleep(0.2)
    finally:
        made.kill()
