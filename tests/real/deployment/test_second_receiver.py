"""The overlay for a second receiver: a second sink with its own group."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from gpuledger.bus.administration import create_topics
from gpuledger.codec import Decoder
from gpuledger.records import DeadLetter
from gpuledger.rights import KAFKA_USERS, grants
from gpuledger.settings import KafkaSettings, Option, load_settings
from gpuledger.topics import Topics
from gpuledger_sinks.settings import SinkSettings
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.real.deployment.chart import PRODUCTION, render, with_secrets
from tests.real.deployment.installation import PAGE, eventually, on, with_logins
from tests.real.deployment.rendering import Workload
from tests.real.deployment.test_kafka_rights import RESOURCES, start
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.services.authorizing_kafka import AuthorizingKafka, Operation, Right

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.cluster_tools import Helm
    from tests.real.services.kcat import Kcat

NAME: Final = "gpuledger-sink-remote-write-second"
GROUP: Final = "gpuledger-second-remote-write"
FIRST: Final = "gpuledger-sink-remote-write"
WITHIN_SECONDS: Final = 120.0
decode_dead_letter: Final = Decoder(topic=DEAD_LETTERS.name, record=DeadLetter).decode


def sink_settings(workload: Workload, folder: Path) -> SinkSettings:
    laid_out = workload.lay_out(folder / workload.name)
    return load_settings(
        SinkSettings,
        prog=workload.name,
        description="",
        options=[Option(name="kind", setting="kind", help="which")],
        argv=laid_out.argv[2:],
        environ=laid_out.environment,
    )


def documented_values() -> dict[str, Any]:
    """Return the values by which the page adds the second receiver."""
    section = PAGE.partition("\n## Add a second receiver\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r" *```yaml\n(.*?)```", section, re.DOTALL)
    loaded: dict[str, Any] = yaml.safe_load(dedent(block))
    return loaded


def test_the_second_sink_has_its_own_group_receiver_and_logins(helm: Helm, tmp_path: Path) -> None:
    rendering = with_secrets(render(PRODUCTION, documented_values()))
    second, first = rendering.workload(NAME), rendering.workload(FIRST)
    settings, other = (sink_settings(each, tmp_path) for each in (second, first))

    assert (settings.kind, settings.group) == ("remote_write", GROUP)
    assert other.group == ""
    assert settings.remote_write.url == "https://prometheus-2.example.com/api/v1/write"
    assert settings.remote_write.url != other.remote_write.url
    password = settings.remote_write.password
    assert password
    assert password.read(name="password") == "secret"
    assert settings.kafka.bootstrap_servers == other.kafka.bootstrap_servers


def test_no_settings_file_that_several_kinds_read_names_a_group(helm: Helm) -> None:
    """There it would be the group of all of them."""
    for workload in with_secrets(render(PRODUCTION, documented_values())).workloads():
        for path, content in workload.files().items():
            if path.endswith("sinks.yaml"):
                assert not re.search(rb"^group:", content, re.MULTILINE), workload.name


def test_the_second_sink_changes_nothing_of_an_installation(helm: Helm) -> None:
    there, both = (render(PRODUCTION, over) for over in ({}, documented_values()))
    added = [made for made in both.objects if made not in there.objects]

    assert all(made in both.objects for made in there.objects)
    assert {(made["kind"], made["metadata"]["name"]) for made in added} == {
        ("ConfigMap", f"{NAME}-settings"),
        ("Deployment", NAME),
        ("Service", NAME),
    }


def rights_of_the_second() -> Iterator[Right]:
    """Yield the permissions of the first, with the user and group of the second, as documented."""
    (first,) = [who for who in KAFKA_USERS if who.name == "sink remote_write"]
    for grant in grants(replace(first, group=GROUP), Topics()):
        for operation in grant.operations:
            kind, is_prefix = RESOURCES[grant.resource], grant.is_prefix
            yield Right(NAME, Operation[operation], kind, grant.name, is_prefix=is_prefix)


@pytest.fixture
def installed(
    start_authorizing_kafka: Callable[[], AuthorizingKafka], helm: Helm
) -> tuple[AuthorizingKafka, Workload]:
    """Return brokers with the topics and only these permissions, and the second sink."""
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    asyncio.run(kafka.allow(rights_of_the_second()))
    plain = KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    asyncio.run(create_topics(plain, Topics()))
    rendering = render(PRODUCTION, documented_values(), on(kafka))
    return kafka, with_logins(rendering, kafka).workload(NAME)


def refused(kafka: AuthorizingKafka, kcat: Kcat) -> list[tuple[str, str]]:
    """Return the consumer and the bytes of each dead letter."""
    found = kcat.consume(kafka.plaintext_bootstrap_servers, DEAD_LETTERS.name)
    dead_letters = [decode_dead_letter(message.value or b"") for message in found]
    return [(one.consumer, (one.value_base64 or "")) for one in dead_letters]


@pytest.mark.parametrize("is_set_to_the_end", [False, True])
def test_the_documented_permissions_let_the_second_sink_start_at_the_oldest_or_configured_offset(
    installed: tuple[AuthorizingKafka, Workload],
    kcat: Kcat,
    tmp_path: Path,
    *,
    is_set_to_the_end: bool,
) -> None:
    """Checked by the records that it rejects, because nothing else of these is visible."""
    kafka, workload = installed
    plain = kafka.plaintext_bootstrap_servers
    kcat.produce(plain, EVENTS.name, b"old", partition=0)
    if is_set_to_the_end:
        tool, *arguments = documented_command()
        assert tool == "kafka-consumer-groups.sh"
        of_brokers = arguments.index("--bootstrap-server") + 1
        arguments[of_brokers] = plain
        kafka.run_tool("org.apache.kafka.tools.consumer.group.ConsumerGroupCommand", *arguments)
    kcat.produce(plain, EVENTS.name, b"new", partition=0)
    sink = start(workload, tmp_path / "sink")
    try:
        eventually(lambda: (GROUP, "bmV3") in refused(kafka, kcat), within_seconds=WITHIN_SECONDS)
        sink.wait_until_ready()
    finally:
        status = sink.stop()

    assert status == 0
    assert (GROUP, "b2xk") in refused(kafka, kcat) or is_set_to_the_end
    assert len(refused(kafka, kcat)) == (1 if is_set_to_the_end else 2)


def documented_command() -> list[str]:
    """Return the command that sets a group to the end."""
    section = PAGE.partition("\n## Add a second receiver\n")[2].partition("\n## ")[0]
    found: list[str] = re.findall(
        r"^ *(kafka-consumer-groups\.sh (?:.*\\\n)*.*)$", section, re.MULTILINE
    )
    (command,) = found
    return command.replace("\\\n", " ").split()
