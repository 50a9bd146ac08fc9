"""A replay over a real broker: it books the same as the first run, to the byte, on any worker."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.ticks import Fleet, node_name
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import GpuEvent
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic, partition_of_node
from tests.default_topics import EVENTS, PODS, SAMPLES, TOPICS
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.real.services.kafka import Kafka

ROOT = Path(__file__).parents[2]
NODES = 12
TICKS = 30
DEADLINE_SECONDS = 120.0
AGAIN = Topic(name="again", record=GpuEvent, key="node")
IDENTITY = ("cluster", "node", "boot_id", "seq")


async def test_a_replay_books_the_same_amounts_as_the_first_run(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    """Half of the pods came late, and partitions moved twice, once because a worker died."""
    refuse_stray_settings()
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings, [*TOPICS, AGAIN])
    await run_first(kafka, settings, tmp_path)

    compared = replay(kafka, "--compare", "--output", tmp_path / "events.jsonl.gz")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    counts = [int(word) for word in compared.stdout.split() if word.isdigit()]
    total, equal, more_complete, *rest = counts
    assert (total, rest) == (NODES * 3 * TICKS, [0, 0, 0])
    assert equal > 0
    assert more_complete > 0

    assert replay(kafka, "--topic", AGAIN.name).returncode == 0
    first = await read_events(settings, EVENTS)
    again = await read_events(settings, AGAIN)
    packed = (tmp_path / "events.jsonl.gz").read_bytes()
    in_file = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert by_identity(again) == by_identity(in_file)
    assert without_pods(again) == without_pods(first)
    assert {pod["state"] for event in again for pod in event["pods"]} == {"known"}
    await refuse_a_forged_event(kafka, settings)


async def refuse_a_forged_event(kafka: Kafka, settings: KafkaSettings) -> None:
    """An event without a matching tick is reported, with exit code 1."""
    forged = {"cluster": "default", "node": node_name(0), "boot_id": "forged", "seq": 1, "pods": []}
    await publish(settings, EVENTS, 0, [(node_name(0), encode(forged))])
    compared = replay(kafka, "--compare")

    assert compared.returncode == 1
    *_, reported, verdict = compared.stdout.splitlines()
    assert (
        reported == f"node {node_name(0)} boot forged seq 1 (event): first there, replayed absent"
    )
    assert "0 differ, 1 missing, 0 extra" in verdict


def test_a_replay_ends_on_ctrl_c_and_leaves_no_file(tmp_path: Path) -> None:
    """Here while it waits for a broker that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as broker:
        address = f"127.0.0.1:{broker.getsockname()[1]}"
        process = subprocess.Popen(
            command("--output", tmp_path / "events.jsonl", address=address),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = broker.accept()
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=120)
        connection.close()

    assert process.returncode == 130
    assert "Traceback" not in message
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("missing", [SAMPLES, PODS])
async def test_a_broker_without_the_topics_is_reported_in_one_line(
    start_kafka: Callable[[], Kafka], missing: Topic
) -> None:
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings, [topic for topic in TOPICS if topic is not missing])
    done = replay(kafka, "--compare")

    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"there is no topic {missing.name}" in done.stderr


async def run_first(kafka: Kafka, settings: KafkaSettings, folder: Path) -> None:
    """Join with one worker, then two, then only the second; late pods come after all ticks."""
    fleet = Fleet(nodes=NODES)
    await publish_pods(settings, fleet, range(0, NODES, 2))
    workers = [worker(kafka, folder, number) for number in range(2)]
    try:
        for round_, each in enumerate(workers):
            each.start()
            each.wait_until_ready()
            await publish_ticks(settings, fleet, range(round_ * TICKS, (round_ + 1) * TICKS))
            await await_events(settings, NODES * (round_ + 1) * TICKS)
        workers[0].kill()
        await publish_ticks(settings, fleet, range(2 * TICKS, 3 * TICKS))
        await await_events(settings, NODES * 3 * TICKS)
        await publish_pods(settings, fleet, range(1, NODES, 2))
        assert workers[1].stop() == 0
    finally:
        for each in workers:
            each.kill()


def worker(kafka: Kafka, folder: Path, number: int) -> Component:
    """Return a worker that is not started yet."""
    return Component(
        name=f"join-{number}",
        command=["gpuledger", "join"],
        folder=folder / f"join-{number}",
        environment={
            "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "KAFKA__SESSION_TIMEOUT_SECONDS": "6",
            "JOIN__PODWATCH_TIMEOUT_SECONDS": "0",
        },
    )


def command(*options: str | Path, address: str) -> list[str | Path]:
    """Return the command line of a replay of the last hour."""
    head = [
        sys.executable,
        "-m",
        "gpuledger_cli",
        "replay",
        "--from",
        "-1h",
        "--bootstrap-servers",
        address,
    ]
    return [*head, *options]


def replay(kafka: Kafka, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """Replay the last hour."""
    return subprocess.run(
        command(*options, address=kafka.bootstrap_servers),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


async def await_events(settings: KafkaSettings, count: int) -> None:
    """Wait for this many different events."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(by_identity(await read_events(settings, EVENTS))) < count:
        assert time.monotonic() < deadline, "the join has not reached this point"
        time.sleep(0.5)  # noqa: ASYNC251  # nothing else should run meanwhile


async def read_events(settings: KafkaSettings, topic: Topic) -> list[dict[str, Any]]:
    """Return the content of a topic."""
    async with KafkaBus(settings).reader() as reader:
        return [
            json.loads(record.value or b"")
            for partition, span in (await reader.spans(topic.name)).items()
            async for some in reader.read(partition, span)
            for record in some
        ]


def by_identity(events: Iterable[dict[str, Any]]) -> dict[tuple[object, ...], object]:
    """Return events by identity."""
    return {tuple(event[name] for name in IDENTITY): event for event in events}


def without_pods(events: Iterable[dict[str, Any]]) -> dict[tuple[object, ...], object]:
    """Return the events by identity, without what pods, nodes and namespaces add to them."""
    described = {"pods", "late", "namespaces", "node_description"}
    kept = [
        {name: value for name, value in event.items() if name not in described}
        | {
            "containers": [container_id for container_id, *_ in event["containers"]],
            "allocations": [allocated for _, *allocated in event["allocations"]],
        }
        for event in events
    ]
    return by_identity(kept)


async def publish_pods(settings: KafkaSettings, fleet: Fleet, nodes: Iterable[int]) -> None:
    """Publish the pods of some nodes."""
    for node in nodes:
        await publish(settings, PODS, node, [(pod.uid, encode(pod)) for pod in fleet.pods(node)])


async def publish_ticks(settings: KafkaSettings, fleet: Fleet, numbers: range) -> None:
    """Publish ticks of all nodes."""
    for node in range(NODES):
        ticks = [(node_name(node), encode(fleet.tick(node, number))) for number in numbers]
        await publish(settings, SAMPLES, node, ticks)


async def publish(
    settings: KafkaSettings, topic: Topic, node: int, records: Iterable[tuple[str, bytes]]
) -> None:
    """Publish to the node's partitions, with the current time."""
    now_ms = time.time_ns() // 10**6
    partition = partition_of_node(key_in("default", node_name(node)), partitions=topic.partitions)
    async with KafkaBus(settings).producer() as producer:
        messages = [Message(f"default/{key}".encode(), value, now_ms) for key, value in records]
        await producer.publish(topic.name, partition, messages)
