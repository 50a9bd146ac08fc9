"""SASL over TLS: the settings of each component connect to a real broker."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.errors import GpuledgerError
from gpuledger.records import PodRecord
from gpuledger.settings import KafkaSettings, Option, load_settings
from gpuledger.topics import Topic
from gpuledger_agent.settings import AgentSettings
from gpuledger_cli.kafka_options import TopicsSettings
from gpuledger_enricher.join.join_settings import JoinSettings
from gpuledger_enricher.podwatch.pod_settings import PodwatchSettings
from gpuledger_sinks.settings import SinkSettings
from tests.real.deployment.chart import BROKERS, EDGE, PRODUCTION, ROWS, render, with_secrets
from tests.real.deployment.installation import LOGIN_PREFIX, PAGE, on, with_logins
from tests.real.deployment.rendering import Rendering, Workload
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import msgspec

    from tests.real.services.cluster_tools import Helm
    from tests.real.services.secure_kafka import SecureKafka

MODELS: Final[dict[str, type[msgspec.Struct]]] = {
    "agent": AgentSettings,
    "podwatch": PodwatchSettings,
    "join": JoinSettings,
    "sink": SinkSettings,
    "topics": TopicsSettings,
}
"""The settings class of each subcommand."""
WORKLOADS: Final = (
    "gpuledger-agent",
    "gpuledger-podwatch",
    "gpuledger-join",
    "gpuledger-sink-remote-write",
    "gpuledger-sink-alerts",
    "gpuledger-sink-store",
    "gpuledger-sink-rows",
    "gpuledger-topics",
)
SECRET: Final = "/run/secrets/kafka"
USER: Final = ("GPULEDGER_KAFKA__SASL_USERNAME", "GPULEDGER_KAFKA__OAUTH__CLIENT_ID")
TOKENS: Final = {"securityProtocol": "SASL_SSL", "saslMechanism": "OAUTHBEARER"}
TOKEN_URL: Final = "https://login.example.com/oauth2/token"
WITHOUT_KAFKA: Final = ("store-maintain", "reports", "bill")


@pytest.fixture(autouse=True)
async def _let_connections_end() -> AsyncIterator[None]:
    yield
    # aiokafka does not wait for a connection of a failed start, and TLS ends with a message to the
    # peer; a loop that closes earlier leaves a transport, which is an error here.
    await asyncio.sleep(0.2)


@pytest.fixture
def filled_in(secure_kafka: SecureKafka, helm: Helm) -> Rendering:
    """Return the production preset with all sinks, as its user installs it."""
    return with_logins(render(PRODUCTION, ROWS, on(secure_kafka)), secure_kafka)


def on_kafka(rendering: Rendering) -> list[Workload]:
    """Return the workloads that connect to Kafka."""
    return [each for each in rendering.workloads() if not each.name.endswith(WITHOUT_KAFKA)]


def kafka_settings(workload: Workload, folder: Path) -> KafkaSettings:
    """Load the settings that the workload's program loads, and return the part on Kafka."""
    laid_out = workload.lay_out(folder / workload.name)
    subcommand = laid_out.argv[1]
    loaded = load_settings(
        MODELS[subcommand],
        prog="p",
        description="",
        options=[Option(name="kind", setting="kind", help="")] if subcommand == "sink" else [],
        argv=[] if subcommand == "topics" else laid_out.argv[2:],
        environ=laid_out.environment,
    )
    kafka: KafkaSettings = loaded.kafka  # type: ignore[attr-defined]  # each of them has it
    return kafka


def test_every_workload_on_kafka_is_tested(filled_in: Rendering) -> None:
    assert {each.name for each in on_kafka(filled_in)} == set(WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
async def test_a_workload_logs_in_with_the_mounted_files(
    filled_in: Rendering, secure_kafka: SecureKafka, tmp_path: Path, name: str
) -> None:
    workload = filled_in.workload(name)
    settings = kafka_settings(workload, tmp_path)
    topic = Topic(name=f"login-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=3)
    await create_topics(settings, [topic])

    assert settings.bootstrap_servers == secure_kafka.bootstrap_servers
    assert await KafkaBus(settings).partitions(topic.name) == 3
    assert set(workload.files()) >= {f"{SECRET}/password", f"{SECRET}/ca.crt"}
    assert settings.sasl_username == name
    assert secure_kafka.users[name] not in "".join(workload.environment().values())


async def test_a_broken_certificate_is_named(helm: Helm, tmp_path: Path) -> None:
    agent = with_secrets(render(PRODUCTION)).workload(WORKLOADS[0])

    with pytest.raises(GpuledgerError, match=rf"ssl_ca_file.*{SECRET}/ca\.crt"):
        await KafkaBus(kafka_settings(agent, tmp_path)).partitions("any")


async def test_agent_and_podwatch_of_a_further_cluster_log_in_under_its_name_and_nothing_else_runs(
    secure_kafka: SecureKafka, helm: Helm, tmp_path: Path
) -> None:
    """Each has its own user and password; nothing else is installed."""
    rendering = with_logins(render(EDGE, on(secure_kafka), central="podwatch"), secure_kafka)
    workloads = {each.name: each for each in rendering.workloads()}
    assert set(workloads) == {"gpuledger-agent", "gpuledger-podwatch"}
    for name, workload in workloads.items():
        settings = kafka_settings(workload, tmp_path)
        topic = Topic(name=f"login-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=3)
        await create_topics(settings, [topic])
        assert await KafkaBus(settings).partitions(topic.name) == 3
        assert settings.sasl_username == name
        mounted = b"".join(workload.files().values()).decode()
        assert [user for user, password in secure_kafka.users.items() if password in mounted] == [
            name
        ]
        assert workload.settings(tmp_path / "loaded" / name)["cluster"] == "eu-west-1"


def test_each_workload_has_its_own_user_and_no_other_users_password(
    filled_in: Rendering, secure_kafka: SecureKafka, tmp_path: Path
) -> None:
    found = {each.name: kafka_settings(each, tmp_path) for each in on_kafka(filled_in)}

    assert {name: kafka.sasl_username for name, kafka in found.items()} == {
        name: name for name in WORKLOADS
    }
    for workload in on_kafka(filled_in):
        mounted = b"".join(workload.files().values()).decode()
        assert [user for user, password in secure_kafka.users.items() if password in mounted] == [
            workload.name
        ]


def test_client_certificates_replace_the_users(helm: Helm, tmp_path: Path) -> None:
    values = {"kafka": {"securityProtocol": "SSL", "clientCertificates": True}}
    rendering = with_secrets(render(PRODUCTION, ROWS, values))

    for workload in on_kafka(rendering):
        kafka = kafka_settings(workload, tmp_path / "files")
        environment = workload.environment()
        assert kafka.security_protocol == "SSL"
        assert not [name for name in environment if "SASL_PASSWORD" in name]
        assert kafka.ssl_cert_file
        assert kafka.ssl_key_file
        assert kafka.ssl_cert_file.read_text() == kafka.ssl_key_file.read_text() == "secret"


def test_brokers_without_authentication_need_only_their_addresses(
    helm: Helm, tmp_path: Path
) -> None:
    rendering = render({"kafka": {"bootstrapServers": "broker-1:9092"}})
    settings = {each.name: kafka_settings(each, tmp_path / "files") for each in on_kafka(rendering)}

    assert mounted_secrets(rendering) == set()
    assert settings
    for kafka in settings.values():
        assert (kafka.bootstrap_servers, kafka.security_protocol) == ("broker-1:9092", "PLAINTEXT")


@for_each("url", ["", TOKEN_URL])
def test_tokens_replace_the_users(url: str, helm: Helm, tmp_path: Path) -> None:
    """A token in the Secret, or the credentials with which the component gets tokens."""
    rendering = with_secrets(render(PRODUCTION, ROWS, {"kafka": {**TOKENS, "tokenUrl": url}}))

    for workload in on_kafka(rendering):
        kafka = kafka_settings(workload, tmp_path / "files")
        oauth = kafka.oauth
        assert kafka.uses_tokens
        assert oauth.token_url == url
        given = oauth.client_secret if url else oauth.token
        assert given is not None
        assert given.read(name="secret") == "secret"
        assert (oauth.client_id == "secret") or not url


@for_each(
    "kafka,needed",
    [
        ({}, set()),
        ({"securityProtocol": "SSL"}, {"ca"}),
        ({"securityProtocol": "SSL", "clientCertificates": True}, {"ca", "files"}),
        ({"securityProtocol": "SASL_PLAINTEXT"}, {"files", "user"}),
        ({"securityProtocol": "SASL_SSL"}, {"ca", "files", "user"}),
        ({**TOKENS, "tokenUrl": TOKEN_URL}, {"ca", "files", "user"}),
        (TOKENS, {"ca", "files"}),
    ],
)
def test_a_secret_that_the_protocol_needs_is_not_optional(
    kafka: dict[str, object], needed: set[str], helm: Helm
) -> None:
    """So the pod does not start without it, and its events name it."""
    for workload in on_kafka(render(BROKERS, ROWS, {"kafka": kafka})):
        (sources,) = [
            volume["projected"]["sources"]
            for volume in workload.pod["volumes"]
            if volume["name"] == "kafka"
        ]
        (user,) = [
            one["valueFrom"]["secretKeyRef"]
            for one in workload.container["env"]
            if one["name"] in USER
        ]
        secrets = dict(zip(("ca", "files"), [one["secret"] for one in sources], strict=True))

        assert {
            part for part, one in {**secrets, "user": user}.items() if not one["optional"]
        } == needed, workload.name


def test_every_secret_is_created_by_the_documented_commands(filled_in: Rendering) -> None:
    section = PAGE.partition("\n## Install\n")[2].partition("\n### ")[0]
    created = set(re.findall(r"kubectl create secret generic -n (\S+) (\S+)", section))
    loops = dict(re.findall(r"for (\w+) in ([\w -]+); do", section))
    named = {
        (namespace.replace("$namespace", one), name.replace(f"${variable}", one))
        for namespace, name in created
        for variable, values in loops.items()
        for one in values.split()
    }
    needed = mounted_secrets(filled_in) | mounted_secrets(filled_in, optional=True)

    # The sink for rows is not part of the preset.
    assert needed - {("gpuledger", f"{LOGIN_PREFIX}sink-rows")} <= named


def mounted_secrets(rendering: Rendering, *, optional: bool = False) -> set[tuple[str, str]]:
    """Return namespace and name of the Secrets without which a pod does not start.

    With `optional`, return the other ones.
    """
    found: set[tuple[str, str]] = set()
    for workload in rendering.workloads():
        volumes = workload.pod.get("volumes", [])
        projected = [
            one for volume in volumes for one in volume.get("projected", {}).get("sources", [])
        ]
        for each in [*volumes, *projected]:
            if (secret := each.get("secret")) and secret.get("optional", False) == optional:
                found.add((workload.namespace, secret.get("secretName") or secret["name"]))
    return found


RECEIVERS: Final = {
    "remote_write": ("gpuledger-sink-remote-write", "/run/secrets/prometheus/password"),
    "alerts": ("gpuledger-sink-alerts", "/run/secrets/alertmanager/password"),
}


@pytest.mark.parametrize("section", RECEIVERS)
def test_a_receivers_password_is_mounted_only_by_its_own_sink(
    filled_in: Rendering, tmp_path: Path, section: str
) -> None:
    name, file = RECEIVERS[section]
    workload = filled_in.workload(name)
    laid_out = workload.lay_out(tmp_path)
    kind = Option(name="kind", setting="kind", help="which")
    loaded = load_settings(
        SinkSettings,
        prog=name,
        description="",
        options=[kind],
        argv=laid_out.argv[2:],
        environ=laid_out.environment,
    )
    settings = getattr(loaded, section)

    assert settings.username == "gpuledger"
    assert settings.password.read(name="password").startswith("secret")
    assert [each.name for each in filled_in.workloads() if file in each.files()] == [name]
