"""A join worker that is disturbed while it reads pods and marks back: no partition is left alone.

A worker takes few records at once here, so that reading back takes seconds with few pods; that is
the setting of any worker with more pods.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiokafka
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient, CoordinationType

from benchmarks.ticks import SEQ_PER_TICK, Fleet, node_name
from enricher.join.settings import GROUP
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.settings import KafkaSettings
from gpuledger.topics import EVENTS, PODS, SAMPLES, partition_of_node
from tests.real.end_to_end.deployables import Deployable, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.parts.kafka import Kafka
    from tests.real.parts.kafka_cluster import KafkaCluster

NODES = 24
PODS_PER_NODE = 500
STOPPED_SECONDS = 12.0
"""Twice the session: the group gives the worker up."""
LOOK_SECONDS = 45.0
PLACES = [aiokafka.TopicPartition(EVENTS.name, number) for number in range(EVENTS.partitions)]


class Workers:
    """Workers of one join, which end with the test."""

    def __init__(
        self, *, servers: str, folder: Path, guarantee: str, pods_per_node: int = PODS_PER_NODE
    ) -> None:
        self.settings = KafkaSettings(bootstrap_servers=servers)
        self._pods_per_node = pods_per_node
        self._folder = folder
        self._guarantee = guarantee
        self._started: list[Deployable] = []
        self._fleet = Fleet(nodes=NODES)

    def start(self) -> Deployable:
        """Start one more worker."""
        name = f"join-{len(self._started)}"
        worker = Deployable(
            name=name,
            command=["gpuledger-join"],
            folder=self._folder / name,
            environment={
                "KAFKA__BOOTSTRAP_SERVERS": self.settings.bootstrap_servers,
                "KAFKA__SESSION_TIMEOUT_SECONDS": "6",
                "KAFKA__REQUEST_TIMEOUT_SECONDS": "10",
                "JOIN__PROCESSING_GUARANTEE": self._guarantee,
                "JOIN__RECORDS_PER_POLL": "2",
            },
        )
        self._started.append(worker)
        worker.start()
        return worker

    def end(self) -> None:
        """End all, a stopped one too."""
        for worker in self._started:
            worker.kill()

    async def publish_pods(self) -> None:
        """Publish many pods for each node."""
        async with KafkaBus(self.settings).producer() as producer:
            for node in range(NODES):
                (first, *_) = self._fleet.pods(node)
                pods = [
                    Message(f"{first.uid}-{number}".encode(), encode(first), 0)
                    for number in range(self._pods_per_node)
                ]
                await producer.publish(PODS.name, place_of(node), pods)

    async def publish_ticks(self, number: int) -> None:
        """Publish one tick of each node."""
        async with KafkaBus(self.settings).producer() as producer:
            for node in range(NODES):
                tick = encode(self._fleet.tick(node, number))
                message = Message(node_name(node).encode(), tick, time.time_ns() // 1_000_000)
                await producer.publish(SAMPLES.name, place_of(node), [message])

    async def nodes_with_events(self, *, number: int) -> set[str]:
        """Return the nodes that have an event of this tick, once all have or the time is over."""
        found: set[str] = set()
        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.settings.bootstrap_servers,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
        )
        await consumer.start()
        consumer.assign(PLACES)
        end = time.monotonic() + LOOK_SECONDS
        try:
            while len(found) < NODES and time.monotonic() < end:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    events = (json.loads(record.value) for record in records)
                    found |= {
                        event["node"] for event in events if event["seq"] == number * SEQ_PER_TICK
                    }
        finally:
            await consumer.stop()
        return found


def place_of(node: int) -> int:
    """Return a node's partition."""
    return partition_of_node(node_name(node), partitions=SAMPLES.partitions)


async def coordinator_of(servers: str) -> int:
    """Return the broker that coordinates the join's group."""
    client = AIOKafkaClient(bootstrap_servers=servers)
    await client.bootstrap()
    try:
        found: int = await client.coordinator_lookup(CoordinationType.GROUP, GROUP)
    finally:
        await client.close()
    return found


async def reading_back(*workers: Deployable) -> None:
    """Wait until each worker has partitions that it has not read back yet."""
    async with asyncio.timeout(LOOK_SECONDS):
        while not all(map(is_reading_back, workers)):  # noqa: ASYNC110  # a log tells nobody
            await asyncio.sleep(0.02)


def is_reading_back(worker: Deployable) -> bool:
    log = worker.log_tail()
    return log.rfind('"partitions_assigned"') > log.rfind('"state_read"')


EVERYBODY = {node_name(node) for node in range(NODES)}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    refuse_stray_settings()
    made: list[Workers] = []

    def make(**given: Any) -> Workers:  # noqa: ANN401  # the keywords of Workers
        made.append(Workers(folder=tmp_path, **given))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_a_worker_that_loses_partitions_while_it_reads_them_back_goes_on(
    start_kafka: Callable[[], Kafka], workers: Callable[..., Workers], guarantee: str
) -> None:
    """It is stopped for longer than its session while another one joins, then woken."""
    it = workers(servers=start_kafka().bootstrap_servers, guarantee=guarantee)
    await create_topics(it.settings)
    await it.publish_pods()
    stopped = it.start()
    await reading_back(stopped)
    stopped.pause()
    it.start()
    await asyncio.sleep(STOPPED_SECONDS)
    stopped.resume()
    stopped.wait_until_ready()
    assert stopped.metric("gpuledger_join_partitions") == EVENTS.partitions / 2
    await it.publish_ticks(1)

    assert await it.nodes_with_events(number=1) == EVERYBODY


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_a_broker_that_dies_while_pods_are_read_back_leaves_no_partition_alone(
    start_kafka_cluster: Callable[[], KafkaCluster],
    workers: Callable[..., Workers],
    guarantee: str,
) -> None:
    kafka = await asyncio.to_thread(start_kafka_cluster)
    it = workers(servers=kafka.bootstrap_servers, guarantee=guarantee, pods_per_node=1500)
    await create_topics(it.settings)
    await it.publish_pods()
    await reading_back(it.start(), it.start())
    coordinator = await coordinator_of(kafka.bootstrap_servers)
    killed = next(broker for broker in kafka.brokers if broker.node_id == coordinator)
    killed.kill()
    await it.publish_ticks(1)

    assert await it.nodes_with_events(number=1) == EVERYBODY
    await asyncio.to_thread(killed.start)
    await it.publish_ticks(2)
    assert await it.nodes_with_events(number=2) == EVERYBODY
