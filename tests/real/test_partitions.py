"""The number of partitions is chosen at creation; every component reads it from the brokers."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.keys import key_in
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from gpuledger_cli.__main__ import main
from tests.default_topics import (
    DEAD_LETTERS,
    EVENTS,
    INVENTORY,
    PODS,
    READINGS,
    ROWS,
    SAMPLES,
    TOPICS,
)
from tests.real.changed_topics import add_partitions
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat
    from tests.real.services.kube_client import KubeApiClient

SCENARIO = Path(__file__).parents[2] / "scenarios" / "quickstart.yaml"
NODE = "gpu-node-1"
WITHIN_SECONDS = 120.0


def start(stack: ExitStack, servers: str, folder: Path, *command: str, **own: str) -> Component:
    made = Component(
        name="-".join(command),
        command=["gpuledger", *command],
        folder=folder / "-".join(command),
        environment={"KAFKA__BOOTSTRAP_SERVERS": servers, **own},
    )
    stack.callback(made.kill)
    made.start()
    return made


@pytest.mark.parametrize("partitions", [3, pytest.param(24, marks=pytest.mark.extended)])
def test_every_component_works_with_the_chosen_number_of_partitions(
    start_kafka: Callable[[], Kafka],
    kube_api: KubeApiClient,
    kcat: Kcat,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    partitions: int,
) -> None:
    refuse_stray_settings()
    servers = start_kafka().bootstrap_servers
    at = ["--bootstrap-servers", servers]
    assert main(["topics", "create", *at, "--partitions", str(partitions)]) == 0
    # Without an explicit number the existing one is used; a different one is rejected.
    assert main(["topics", "create", *at]) == main(["topics", "check", *at]) == 0
    assert main(["topics", "create", *at, "--partitions", "5"]) == 2
    assert f"has partitions={partitions}, wanted partitions=5" in capsys.readouterr().err
    listed = {one["topic"]: len(one["partitions"]) for one in kcat.metadata(servers)["topics"]}
    assert (listed[SAMPLES.name], listed[PODS.name]) == (partitions, partitions)
    assert listed[DEAD_LETTERS.name] == 1

    with ExitStack() as stack:
        agent = {"NODE_NAME": NODE, "SOURCE": f"simulated:{SCENARIO}"}
        start(stack, servers, tmp_path, "agent", SPOOL__DIRECTORY=str(tmp_path / "spool"), **agent)
        kubernetes = {"KUBERNETES__KUBECONFIG": str(kube_api.kubeconfig), "LEASE__ENABLED": "false"}
        podwatch = start(stack, servers, tmp_path, "podwatch", **kubernetes)
        join = start(stack, servers, tmp_path, "join")
        start(stack, servers, tmp_path, "sink", "rows")
        podwatch.wait_until_ready()
        join.wait_until_ready()
        assert join.metric("gpuledger_join_partitions") == partitions
        home = partition_of_node(key_in("default", NODE), partitions=partitions)
        for topic in (SAMPLES, READINGS, INVENTORY, EVENTS, ROWS):
            deadline = time.monotonic() + WITHIN_SECONDS
            while not (found := kcat.consume(servers, topic.name)):
                assert time.monotonic() < deadline, topic.name
                time.sleep(0.5)
            assert {message.partition for message in found} == {home}
        replay = ["replay", *at, "--from", "-1h", "--to", "-1s", "--compare"]
        assert main(replay) == 0, capsys.readouterr()
    assert kcat.consume(servers, DEAD_LETTERS.name) == []


def test_topics_with_different_numbers_of_partitions_are_named_with_both_numbers(
    start_kafka: Callable[[], Kafka], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse_stray_settings()
    servers = start_kafka().bootstrap_servers
    wrong = {READINGS.name, EVENTS.name}
    table = [
        replace(topic, partitions=6 if topic.name in wrong else 3)
        if topic.is_placed_by_node
        else topic
        for topic in TOPICS
    ]
    asyncio.run(create_topics(KafkaSettings(bootstrap_servers=servers), table))
    at = ["--bootstrap-servers", servers]
    assert main(["topics", "check", *at]) == 1
    assert capsys.readouterr().out.count("partitions differ") == len(wrong)
    assert main(["topics", "create", *at]) == 2
    output = capsys.readouterr().err
    assert all(f"{name} has partitions=6, wanted partitions=3" in output for name in wrong)
    with ExitStack() as stack:
        agent = {"NODE_NAME": NODE, "SOURCE": f"simulated:{SCENARIO}"}
        spool = {"SPOOL__DIRECTORY": str(tmp_path / "spool")}
        running = {
            READINGS.name: start(stack, servers, tmp_path, "agent", **spool, **agent),
            EVENTS.name: start(stack, servers, tmp_path, "join"),
        }
        for name, component in running.items():
            deadline = time.monotonic() + WITHIN_SECONDS
            while f"{name} 6" not in (output := detail_of(component)):
                assert time.monotonic() < deadline, output
                time.sleep(0.2)
            assert f"{SAMPLES.name} 3" in output


def test_added_partitions_are_refused_by_running_and_restarted_components_and_by_the_check(
    start_kafka: Callable[[], Kafka],
    kcat: Kcat,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All topics of nodes get the same number, so that no two topics differ."""
    refuse_stray_settings()
    servers = start_kafka().bootstrap_servers
    settings, at = KafkaSettings(bootstrap_servers=servers), ["--bootstrap-servers", servers]
    assert main(["topics", "create", *at, "--partitions", "3"]) == 0
    with ExitStack() as stack:
        agent = {"NODE_NAME": NODE, "SOURCE": f"simulated:{SCENARIO}"}
        start(stack, servers, tmp_path, "agent", SPOOL__DIRECTORY=str(tmp_path / "spool"), **agent)
        without_pods = {"JOIN__PODWATCH_TIMEOUT_SECONDS": "0"}
        join = start(stack, servers, tmp_path, "join", **without_pods)
        rows = start(stack, servers, tmp_path, "sink", "rows")
        wait_until(lambda: bool(kcat.consume(servers, ROWS.name)))

        placed = [topic.name for topic in TOPICS if topic.is_placed_by_node]
        asyncio.run(add_partitions(settings, placed, 6))

        refusal = "has 6 partitions, but had 3"
        wait_until(lambda: refusal in detail_of(join))
        wait_until(lambda: f"{EVENTS.name} {refusal}" in detail_of(rows, "rows.kafka"))
        assert join.stop() == 0
        join.start()
        wait_until(lambda: refusal in detail_of(join))
    capsys.readouterr()
    assert main(["topics", "check", *at]) == 1
    output = capsys.readouterr().out
    assert output.count("partitions=6") == output.count("partitions=3") == len(placed)
    assert "never changed in place" in output


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def detail_of(component: Component, check: str = "kafka") -> str:
    try:
        return str(component.readyz()["checks"][check]["detail"])
    except (OSError, KeyError):
        return ""
