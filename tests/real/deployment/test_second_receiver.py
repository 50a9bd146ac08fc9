"""The overlay for a second receiver: a second sink with its own group."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.codec import Decoder
from gpuledger.records import DeadLetter
from gpuledger.rights import KAFKA_USERS, grants
from gpuledger.settings import KafkaSettings, Option, load_settings
from gpuledger.topics import Topics
from gpuledger_sinks.settings import SinkSettings
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.real.deployment.installation import OVERLAY, copy_of_k8s, eventually, fill_in
from tests.real.deployment.rendering import Rendering, Workload, render
from tests.real.deployment.test_kafka_rights import RESOURCES, start
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.services.authorizing_kafka import AuthorizingKafka, Operation, Right
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.kcat import Kcat
    from tests.real.services.kustomize import Kustomize

SECOND: Final = "overlays/second-receiver"
NAME: Final = "gpuledger-sink-remote-write-second"
GROUP: Final = "gpuledger-second-remote-write"
FIRST: Final = "gpuledger-sink-remote-write"
PAGE: Final = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
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


def test_the_second_sink_has_its_own_group_receiver_and_logins(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    (second,) = render(SECOND).workloads()
    sinks = [each for each in render(OVERLAY).workloads() if each.stage.name == "sinks"]
    first = {each.name: sink_settings(each, tmp_path) for each in sinks}
    settings = sink_settings(second, tmp_path)

    assert (second.name, settings.kind, settings.group) == (NAME, "remote_write", GROUP)
    assert NAME not in first
    assert {each.group for each in first.values()} == {""}
    assert settings.remote_write.url != first[FIRST].remote_write.url
    password = settings.remote_write.password
    assert password
    assert password.read(name="password").startswith("PLACEHOLDER")
    assert settings.kafka.sasl_username == NAME
    assert settings.kafka.bootstrap_servers == first[FIRST].kafka.bootstrap_servers


def test_no_settings_file_that_several_kinds_read_names_a_group(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    """There it would be the group of all of them."""
    for folder in ("base", OVERLAY, SECOND):
        for workload in render(folder).workloads():
            for path, content in workload.files().items():
                if path.endswith("sinks.yaml"):
                    assert not re.search(rb"^group:", content, re.MULTILINE), (folder, path)


def test_the_second_sink_equals_the_first_except_for_its_names_its_group_and_its_login(
    kustomize: Kustomize,
) -> None:
    """So the tests of the base's Deployment and Service apply to these as well."""
    rendering, base = render(SECOND), render("base")
    first, second = base.workload(FIRST), rendering.workload(NAME)
    expected: dict[str, Any] = {**first.pod, **first.container}
    found: dict[str, Any] = {**second.pod, **second.container}
    changed = {"containers", "volumes", "volumeMounts", "env", "envFrom", "name", "image"}

    assert {key: value for key, value in found.items() if key not in changed} == {
        key: value for key, value in expected.items() if key not in changed
    }
    mounted = {mount["name"] for mount in second.container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in second.pod["volumes"]}
    assert mounted - {mount["name"] for mount in first.container["volumeMounts"]} == {"receiver"}
    assert second.labels == first.labels | {
        "app.kubernetes.io/component": NAME.removeprefix("gpuledger-")
    }
    assert second.manifest["spec"]["selector"]["matchLabels"] == second.labels
    (service,) = rendering.of_kind("Service")
    assert service["spec"] == {
        **base.get("Service", FIRST, "gpuledger")["spec"],
        "selector": second.labels,
    }


def test_the_second_sink_changes_nothing_of_an_installation(kustomize: Kustomize) -> None:
    """Objects that both have, such as the brokers, are the same under the same name."""

    def by_name(rendering: Rendering) -> dict[tuple[str, ...], object]:
        return {
            (made["kind"], made["metadata"].get("namespace", ""), made["metadata"]["name"]): made
            for made in rendering.objects
        }

    there, beside = by_name(render(OVERLAY)), by_name(render(SECOND))
    both = there.keys() & beside.keys()

    assert {kind for kind, _, _ in both} == {"ConfigMap", "Secret"}
    assert {key: there[key] for key in both} == {key: beside[key] for key in both}


def rights_of_the_second() -> Iterator[Right]:
    """Yield the permissions of the first, with the user and group of the second, as documented."""
    (first,) = [who for who in KAFKA_USERS if who.name == "sink remote_write"]
    for grant in grants(replace(first, group=GROUP), Topics()):
        for operation in grant.operations:
            kind, is_prefix = RESOURCES[grant.resource], grant.is_prefix
            yield Right(NAME, Operation[operation], kind, grant.name, is_prefix=is_prefix)


@pytest.fixture
def installed(
    start_authorizing_kafka: Callable[[], AuthorizingKafka], kustomize: Kustomize, tmp_path: Path
) -> tuple[AuthorizingKafka, Workload]:
    """Return brokers with the topics and only these permissions, and the filled-in sink."""
    refuse_stray_settings()
    kafka = start_authorizing_kafka()
    asyncio.run(kafka.allow(rights_of_the_second()))
    plain = KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    asyncio.run(create_topics(plain, Topics()))
    k8s = copy_of_k8s(tmp_path)
    fill_in(k8s / OVERLAY, kafka)
    (k8s / SECOND / "passwords" / "kafka").write_text(f"{kafka.users[NAME]}\n")
    return kafka, render(k8s / SECOND).workload(NAME)


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
