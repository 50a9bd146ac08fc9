"""Workers of one join as processes, ticks for them, and consumers of their events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import aiokafka
from aiokafka import AIOKafkaConsumer

from benchmarks.ticks import Fleet, node_name
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.settings import KafkaSettings
from gpuledger.topics import partition_of_node
from tests.default_topics import EVENTS, SAMPLES
from tests.real.end_to_end.components import Component, refuse_stray_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

PARTITIONS = [aiokafka.TopicPartition(EVENTS.name, number) for number in range(EVENTS.partitions)]
"""Every partition of the events."""


class JoinWorkers:
    """A test's workers, all with the same settings, on their own broker."""

    def __init__(
        self,
        *,
        servers: str,
        folder: Path,
        nodes: int,
        environment: Mapping[str, str],
    ) -> None:
        refuse_stray_settings()
        self.settings = KafkaSettings(bootstrap_servers=servers)
        self.fleet = Fleet(nodes=nodes)
        self.started: list[Component] = []
        self._folder, self._nodes = folder, nodes
        self._environment = {
            "KAFKA__BOOTSTRAP_SERVERS": servers,
            "KAFKA__SESSION_TIMEOUT_SECONDS": "6",
            # These tests run no podwatch.
            "JOIN__PODWATCH_TIMEOUT_SECONDS": "0",
            **environment,
        }

    def start(self) -> Component:
        """Start one more worker."""
        name = f"join-{len(self.started)}"
        worker = Component(
            name=name,
            command=["gpuledger", "join"],
            folder=self._folder / name,
            environment=self._environment,
        )
        self.started.append(worker)
        worker.start()
        return worker

    def end(self) -> None:
        """End all, including a stopped one."""
        for worker in self.started:
            worker.kill()

    async def publish_ticks(self, numbers: Iterable[int]) -> None:
        """Publish these ticks of each node."""
        wanted = list(numbers)
        async with KafkaBus(self.settings).producer() as producer:
            for node in range(self._nodes):
                now_ms, key = time.time_ns() // 1_000_000, f"default/{node_name(node)}".encode()
                ticks = [encode(self.fleet.tick(node, number)) for number in wanted]
                messages = [Message(key, tick, now_ms) for tick in ticks]
                await producer.publish(SAMPLES.name, partition_of(node), messages)


def partition_of(node: int) -> int:
    """Return a node's partition."""
    return partition_of_node(key_in("default", node_name(node)), partitions=SAMPLES.partitions)


def committed_consumer(servers: str) -> AIOKafkaConsumer:
    """Return an unstarted consumer of committed events from the beginning."""
    return AIOKafkaConsumer(
        bootstrap_servers=servers,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
    )
