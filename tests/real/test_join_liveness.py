"""A join worker disturbed while it reads pods and watermarks: no partition stays unprocessed.

A worker takes few records at once here, so that reading back takes seconds with few pods, as it
does for a default worker with more pods.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka.client import AIOKafkaClient, CoordinationType

from benchmarks.ticks import SEQ_PER_TICK, node_name
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger_enricher.join.join_settings import GROUP
from tests.default_topics import EVENTS, PODS
from tests.real.join_workers import PARTITIONS, JoinWorkers, committed_consumer, partition_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.end_to_end.components import Component
    from tests.real.services.kafka import Kafka
    from tests.real.services.kafka_cluster import KafkaCluster

NODES = 24
PODS_PER_NODE = 500
STOPPED_SECONDS = 12.0
"""Twice the session timeout: the group removes the worker."""
DEADLINE_SECONDS = 120.0


class Workers(JoinWorkers):
    """Workers that read few pods and watermarks at once."""

    def __init__(self, *, servers: str, folder: Path, pods_per_node: int = PODS_PER_NODE) -> None:
        self._pods_per_node = pods_per_node
        super().__init__(
            servers=servers,
            folder=folder,
            nodes=NODES,
            environment={"KAFKA__REQUEST_TIMEOUT_SECONDS": "10", "JOIN__MAX_POLL_RECORDS": "2"},
        )

    async def publish_pods(self) -> None:
        """Publish many pods for each node."""
        async with KafkaBus(self.settings).producer() as producer:
            for node in range(NODES):
                (first, *_) = self.fleet.pods(node)
                pods = [
                    Message(f"default/{first.uid}-{number}".encode(), encode(first), 0)
                    for number in range(self._pods_per_node)
                ]
                await producer.publish(PODS.name, partition_of(node), pods)

    async def nodes_with_events(self, *, number: int) -> set[str]:
        """Return the nodes that have an event of this tick, once all have or the time is over."""
        found: set[str] = set()
        consumer = committed_consumer(self.settings.bootstrap_servers)
        await consumer.start()
        consumer.assign(PARTITIONS)
        end = time.monotonic() + DEADLINE_SECONDS
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


async def coordinator_of(servers: str) -> int:
    """Return the broker that coordinates the join's group."""
    client = AIOKafkaClient(bootstrap_servers=servers)
    await client.bootstrap()
    try:
        found: int = await client.coordinator_lookup(CoordinationType.GROUP, GROUP)
    finally:
        await client.close()
    return found


async def reading_back(*workers: Component) -> None:
    """Wait until each worker has partitions that it has not read back yet."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not all(map(is_reading_back, workers)):  # noqa: ASYNC110  # a log has no event
            await asyncio.sleep(0.02)


def is_reading_back(worker: Component) -> bool:
    log = worker.log_tail()
    return log.rfind('"partitions_assigned"') > log.rfind('"state_read"')


EVERYBODY = {node_name(node) for node in range(NODES)}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def make(**given: Any) -> Workers:  # noqa: ANN401  # the keywords of Workers
        made.append(Workers(folder=tmp_path, **given))
        return made[-1]

    yield make
    for each in made:
        each.end()


async def test_a_worker_that_loses_partitions_while_it_reads_them_back_continues(
    start_kafka: Callable[[], Kafka], workers: Callable[..., Workers]
) -> None:
    """It is suspended for longer than its session while another one joins, then resumed."""
    it = workers(servers=start_kafka().bootstrap_servers)
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
    await it.publish_ticks([1])

    assert await it.nodes_with_events(number=1) == EVERYBODY


async def test_a_broker_that_dies_while_pods_are_read_back_leaves_no_partition_unprocessed(
    start_kafka_cluster: Callable[[], KafkaCluster],
    workers: Callable[..., Workers],
) -> None:
    kafka = await asyncio.to_thread(start_kafka_cluster)
    it = workers(servers=kafka.bootstrap_servers, pods_per_node=1500)
    await create_topics(it.settings)
    await it.publish_pods()
    await reading_back(it.start(), it.start())
    coordinator = await coordinator_of(kafka.bootstrap_servers)
    killed = next(broker for broker in kafka.brokers if broker.node_id == coordinator)
    killed.kill()
    await it.publish_ticks([1])

    assert await it.nodes_with_events(number=1) == EVERYBODY
    await asyncio.to_thread(killed.start)
    await it.publish_ticks([2])
    assert await it.nodes_with_events(number=2) == EVERYBODY
