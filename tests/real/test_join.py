"""Two join workers as processes over a real broker: shared partitions, and one that dies."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.ticks import SEQ_PER_TICK, Fleet, node_name
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS, PODS, SAMPLES
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

NODES = 24
TICKS = 30
DEADLINE_SECONDS = 120.0


async def test_a_worker_that_dies_loses_no_tick_and_no_name(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """Every tick becomes an event with all its pods named; most ticks become only one event."""
    refuse_stray_settings()
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings)
    fleet = Fleet(nodes=NODES)
    await publish_pods(settings, fleet)
    workers = [worker(kafka, tmp_path, number) for number in range(2)]
    try:
        for each in workers:
            each.start()
        for each in workers:
            each.wait_until_ready()
        await publish_ticks(settings, fleet, range(TICKS))
        workers[1].kill()
        await publish_ticks(settings, fleet, range(TICKS, 2 * TICKS))
        seen = await_events(kafka, kcat)
        assert workers[0].stop() == 0
    finally:
        for each in workers:
            each.kill()
    assert seen.keys() == {
        (node_name(node), number * SEQ_PER_TICK)
        for node in range(NODES)
        for number in range(2 * TICKS)
    }


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


def await_events(kafka: Kafka, kcat: Kcat) -> Counter[tuple[str, int]]:
    """Read until every tick has its event; each event must name all its pods."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        events = [
            json.loads(each.value or b"")
            for each in kcat.consume(kafka.bootstrap_servers, EVENTS.name)
        ]
        seen = Counter((event["node"], event["seq"]) for event in events)
        if len(seen) == NODES * 2 * TICKS or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert {pod["state"] for event in events for pod in event["pods"]} == {"known"}
    return seen


async def publish_pods(settings: KafkaSettings, fleet: Fleet) -> None:
    """Publish the pods of all nodes."""
    async with KafkaBus(settings).producer() as producer:
        for node in range(NODES):
            pods = [
                Message(key_in("default", pod.uid).encode(), encode(pod), 0)
                for pod in fleet.pods(node)
            ]
            await producer.publish(PODS.name, partition_of(node), pods)


async def publish_ticks(settings: KafkaSettings, fleet: Fleet, numbers: range) -> None:
    """Publish ticks of all nodes, second by second."""
    async with KafkaBus(settings).producer() as producer:
        for number in numbers:
            for node in range(NODES):
                key, value = f"default/{node_name(node)}".encode(), encode(fleet.tick(node, number))
                message = Message(key, value, time.time_ns() // 1_000_000)
                await producer.publish(SAMPLES.name, partition_of(node), [message])


def partition_of(node: int) -> int:
    """Return a node's partition."""
    return partition_of_node(key_in("default", node_name(node)), partitions=SAMPLES.partitions)
