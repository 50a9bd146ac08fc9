"""The overlay for SASL over TLS, filled in: each workload's settings connect to a real broker."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pytest
import yaml

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
from tests.real.deployment.installation import OVERLAY, SECOND_CLUSTER, copy_of_k8s, fill_in
from tests.real.deployment.rendering import K8S, Rendering, Workload, render
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import msgspec

    from tests.real.services.kustomize import Kustomize
    from tests.real.services.secure_kafka import SecureKafka

MODELS: Final[dict[str, type[msgspec.Struct]]] = {
    "agent": AgentSettings,
    "podwatch": PodwatchSettings,
    "join": JoinSettings,
    "sinks": SinkSettings,
    "cli": TopicsSettings,
}
"""The settings class of each image's program."""
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
PAGE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
HASH: Final = re.compile(r"-[bcdfghkmt2456789]{10}$")


@pytest.fixture(autouse=True)
async def _let_connections_end() -> AsyncIterator[None]:
    yield
    # aiokafka does not wait for a connection of a failed start, and TLS ends with a message to the
    # peer; a loop that closes earlier leaves a transport, which is an error here.
    await asyncio.sleep(0.2)


@pytest.fixture
def filled_in(tmp_path: Path, secure_kafka: SecureKafka, kustomize: Kustomize) -> Rendering:
    """Return the overlay as its user applies it, with the topics' Job."""
    overlay = copy_of_k8s(tmp_path) / OVERLAY
    fill_in(overlay, secure_kafka)
    return both(overlay)


def both(overlay: Path) -> Rendering:
    return Rendering(objects=[*render(overlay).objects, *render(overlay / "topics").objects])


def on_kafka(rendering: Rendering) -> list[Workload]:
    """Return the workloads that connect to Kafka; the maintenance of the store does not."""
    return [each for each in rendering.workloads() if each.name != "gpuledger-store-maintain"]


def kafka_settings(workload: Workload, folder: Path) -> KafkaSettings:
    """Load the settings that the workload's program loads, and return the part on Kafka."""
    laid_out = workload.lay_out(folder / workload.name)
    loaded = load_settings(
        MODELS[workload.stage.name],
        prog="p",
        description="",
        options=[Option(name="kind", setting="kind", help="")]
        if workload.stage.name == "sinks"
        else [],
        argv=[] if workload.stage.name == "cli" else laid_out.argv[2:],
        environ=laid_out.environment,
    )
    kafka: KafkaSettings = loaded.kafka  # type: ignore[attr-defined]  # each of them has it
    return kafka


def test_the_overlay_has_every_workload(kustomize: Kustomize) -> None:
    assert {each.name for each in on_kafka(both(K8S / OVERLAY))} == set(WORKLOADS)


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


@pytest.mark.parametrize(
    "name",
    [WORKLOADS[0], *(pytest.param(one, marks=pytest.mark.extended) for one in WORKLOADS[1:])],
)
async def test_a_leftover_placeholder_is_named(
    kustomize: Kustomize, tmp_path: Path, name: str
) -> None:
    settings = kafka_settings(both(K8S / OVERLAY).workload(name), tmp_path)

    with pytest.raises(GpuledgerError, match=rf"ssl_ca_file.*{SECRET}/ca\.crt"):
        await KafkaBus(settings).partitions("any")


async def test_agent_and_podwatch_of_a_second_cluster_log_in_under_its_name_and_nothing_else_runs(
    secure_kafka: SecureKafka, kustomize: Kustomize, tmp_path: Path
) -> None:
    """Each has its own user and password; nothing else is installed."""
    overlay = copy_of_k8s(tmp_path) / SECOND_CLUSTER
    fill_in(overlay, secure_kafka, users=2)
    rendering = render(overlay)
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
        assert workload.settings(tmp_path / "loaded" / name)["cluster"] == "second"


def test_a_second_cluster_has_everything_that_its_two_workloads_have_in_the_base(
    kustomize: Kustomize,
) -> None:
    """The overlay changes only brokers, login and name, not permissions, endpoints or policies."""
    whole = {
        (made["kind"], made["metadata"]["name"]): made
        for made in render("base").objects
        if made["kind"] not in ("ConfigMap", "Secret", "DaemonSet", "Deployment")
    }
    second = {
        (made["kind"], made["metadata"]["name"]): made
        for made in render(SECOND_CLUSTER).objects
        if made["kind"] not in ("ConfigMap", "Secret", "DaemonSet", "Deployment")
    }
    assert second.items() <= whole.items()
    left_out = {name for _, name in whole.keys() - second.keys()}
    assert left_out
    others = ("gpuledger-join", "gpuledger-sink-", "gpuledger-store")
    assert [name for name in left_out if not name.startswith(others)] == []


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


def test_client_certificates_replace_the_users_with_the_commented_lines(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    overlay = copy_of_k8s(tmp_path) / OVERLAY
    env = overlay / "installation" / "kafka.env"
    lines = env.read_text().replace("SASL_SSL", "SSL").replace("#GPULEDGER", "GPULEDGER")
    env.write_text("\n".join(line for line in lines.splitlines() if "__SASL_" not in line))
    for file in overlay.glob("*/kustomization.yaml"):
        (file.parent / "tls.crt").write_text("a certificate")
        (file.parent / "tls.key").write_text("its key")
        of_login = re.compile(r"literals: \[username=.*\]\n    files: \[password.*\]")
        file.write_text(of_login.sub("files: [tls.crt, tls.key]", file.read_text()))
    workloads = on_kafka(both(overlay))

    assert {each.name for each in workloads} == set(WORKLOADS)
    for workload in workloads:
        kafka = kafka_settings(workload, tmp_path / "files")
        assert (kafka.security_protocol, kafka.sasl_username) == ("SSL", "")
        assert kafka.ssl_cert_file
        assert kafka.ssl_key_file
        assert kafka.ssl_cert_file.read_text() == "a certificate"
        assert kafka.ssl_key_file.read_text() == "its key"


def test_brokers_without_a_login_need_one_line_and_no_secret(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    overlay = copy_of_k8s(tmp_path) / OVERLAY
    env = overlay / "installation" / "kafka.env"
    env.write_text("GPULEDGER_KAFKA__BOOTSTRAP_SERVERS=broker-1:9092\n")
    leave_out_secrets(overlay, beginning="gpuledger-kafka-")
    rendering = both(overlay)
    settings = {each.name: kafka_settings(each, tmp_path / "files") for each in on_kafka(rendering)}

    assert mounted_secrets(rendering) <= {
        (made["metadata"]["namespace"], made["metadata"]["name"])
        for made in rendering.of_kind("Secret")
    }
    assert settings.keys() == set(WORKLOADS)
    for kafka in settings.values():
        assert (kafka.bootstrap_servers, kafka.security_protocol) == ("broker-1:9092", "PLAINTEXT")


def test_secrets_that_are_created_elsewhere_are_listed_with_namespace_and_keys(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    generated = {
        (made["metadata"]["namespace"], HASH.sub("", made["metadata"]["name"])): set(made["data"])
        for made in both(K8S / OVERLAY).of_kind("Secret")
    }
    overlay = copy_of_k8s(tmp_path) / OVERLAY
    leave_out_secrets(overlay, beginning="")
    rendering = both(overlay)

    assert rendering.of_kind("Secret") == []
    assert mounted_secrets(rendering) <= generated.keys()
    listed = documented_secrets()
    assert {place: listed.get(place) for place in generated} == generated
    assert mounted_secrets(rendering, optional=True) <= listed.keys()


def leave_out_secrets(overlay: Path, *, beginning: str) -> None:
    """Remove Secrets with this prefix from the generators, as the user of the overlay does."""
    for file in overlay.rglob("kustomization.yaml"):
        written = yaml.safe_load(file.read_text())
        made = written.pop("secretGenerator", [])
        if kept := [one for one in made if not one["name"].startswith(beginning)]:
            written["secretGenerator"] = kept
        file.write_text(yaml.safe_dump(written))


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


def documented_secrets() -> dict[tuple[str, str], set[str]]:
    """Return the required keys of each Secret of the table, by namespace and name."""
    section = PAGE.partition("### Use Secrets from another tool\n")[2].partition("\n### ")[0]
    found: dict[tuple[str, str], set[str]] = {}
    for name, of_which, places, keys in re.findall(
        r"^ *\| `([\w-]+)`([^|]*) \| ([^|]+) \| ([^|;]+)[^|]* \|[^|]+\|$", section, re.MULTILINE
    ):
        names = [name.replace("COMPONENT", one) for one in re.findall(r"`([\w-]+)`", of_which)]
        namespaces = re.findall(r"`([\w-]+)`", places) or ["gpuledger", "gpuledger-agent"]
        expected = set(re.findall(r"`([\w.]+)`", keys))
        for each in names if "COMPONENT" in name else [name]:
            found |= {(place, each): expected for place in namespaces}
    same = found["gpuledger", "gpuledger-prometheus-credentials"]
    return {place: keys or same for place, keys in found.items()}


def test_passwords_are_in_their_workloads_namespaces_and_the_authority_in_both(
    filled_in: Rendering,
) -> None:
    secrets = {
        (made["metadata"]["namespace"], frozenset(made["data"]))
        for made in filled_in.of_kind("Secret")
        if made["metadata"]["name"].startswith("gpuledger-kafka-")
    }

    assert secrets == {
        (namespace, keys)
        for namespace in ("gpuledger", "gpuledger-agent")
        for keys in (frozenset({"username", "password"}), frozenset({"ca.crt"}))
    }


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
    assert settings.password.read(name="password").startswith("PLACEHOLDER")
    assert [each.name for each in filled_in.workloads() if file in each.files()] == [name]
