"""The join's guarantee over a real broker, with workers stopped and killed during their work.

Workers gather for a second, and few nodes have many ticks. So each partition gets several batches
in turn, and a transaction is long enough to be interrupted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self

import aiokafka
import pytest
from aiokafka import AIOKafkaConsumer

from benchmarks.ticks import SEQ_PER_TICK, node_name
from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message, Subscription
from tests.default_topics import DEAD_LETTERS, SAMPLES
from tests.real.join_workers import PARTITIONS, JoinWorkers, committed_consumer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.end_to_end.components import Component
    from tests.real.services.kafka import Kafka

NODES = 2
TICKS = 800
MORE = 50
ROUND_SECONDS = 10.0
STEP_SECONDS = 0.01
DEADLINE_SECONDS = 120.0
FENCED = 'gpuledger_join_transactions_aborted_total{cause="fenced"}'
Id = tuple[str, int]
Event = dict[str, Any]
Ends = dict[aiokafka.TopicPartition, int]


class Scene(JoinWorkers):
    """A broker with ticks to join, and the workers of a test."""

    def __init__(self, *, kafka: Kafka, folder: Path) -> None:
        super().__init__(
            servers=kafka.bootstrap_servers,
            folder=folder,
            nodes=NODES,
            environment={
                "JOIN__COMMIT_INTERVAL_SECONDS": "1",
                "JOIN__RECORDS_PER_COMMIT": "100000",
            },
        )

    async def publish_poison(self) -> None:
        """Publish a record that can only be rejected."""
        async with KafkaBus(self.settings).producer() as producer:
            # Retention would remove an older record before it is read.
            message = Message(b"x", b"no json", time.time_ns() // 1_000_000)
            await producer.publish(SAMPLES.name, 0, [message])

    async def await_events(self, ticks: int) -> dict[Id, list[Event]]:
        """Read until every tick has its event, and everything else that is there by then."""
        wanted = {
            (node_name(node), number * SEQ_PER_TICK)
            for node in range(NODES)
            for number in range(ticks)
        }
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not (self._found.keys() >= wanted and await self._is_at_end()):
                for records in (await self._committed.getmany(timeout_ms=200)).values():
                    for record in records:
                        event = json.loads(record.value)
                        self._found[event["node"], event["seq"]].append(event)
        assert self._found.keys() == wanted
        return self._found

    async def count_dead_letters(self) -> int:
        """Count the dead letters, once there is one."""
        found = 0
        requested = Subscription(group="letters", topics=[DEAD_LETTERS.name])
        async with (
            asyncio.timeout(DEADLINE_SECONDS),
            KafkaBus(self.settings).consumer(requested) as consumer,
        ):
            while True:
                polled = await consumer.poll(timeout_seconds=1, max_records=10)
                if found and not polled:
                    return found
                found += sum(map(len, polled.values()))

    async def _is_at_end(self) -> bool:
        _, ends = await self.end_offsets()
        return all(
            [
                await self._committed.position(partition) >= ends[partition]
                for partition in PARTITIONS
            ]
        )

    async def pause_in_transaction(self, worker: Component) -> int:
        """Stop a worker in an open transaction; return how many ticks per node were published."""
        published = 0
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                await self.publish_ticks(range(published, published + TICKS))
                published += TICKS
                if await self._is_paused_in_transaction(worker):
                    return published

    async def _is_paused_in_transaction(self, worker: Component) -> bool:
        """Stop a worker repeatedly, because transactions are short; leave it stopped in one."""
        end = time.monotonic() + ROUND_SECONDS
        while time.monotonic() < end:
            worker.pause()
            if is_in_transaction(*await self.end_offsets()):
                # A request in flight when it stopped may have ended the transaction.
                await asyncio.sleep(1)
                if is_in_transaction(*await self.end_offsets()):
                    return True
            worker.resume()
            await asyncio.sleep(STEP_SECONDS)
        return False

    async def end_offsets(self) -> tuple[Ends, Ends]:
        """Return the end offsets of all and of committed events, by partition."""
        every = await self._every.end_offsets(PARTITIONS)
        return every, await self._ends.end_offsets(PARTITIONS)

    async def __aenter__(self) -> Self:
        servers = self.settings.bootstrap_servers
        await create_topics(self.settings)
        self._found: dict[Id, list[Event]] = defaultdict(list)
        self._every = AIOKafkaConsumer(bootstrap_servers=servers)
        # On separate connections: a response waits behind a fetch that waits for records.
        self._ends, self._committed = [committed_consumer(servers) for _ in range(2)]
        for consumer in (self._every, self._ends, self._committed):
            await consumer.start()
        self._committed.assign(PARTITIONS)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        for consumer in (self._every, self._ends, self._committed):
            await consumer.stop()


@pytest.fixture
def scene(start_kafka: Callable[[], Kafka], tmp_path: Path) -> Scene:
    return Scene(kafka=start_kafka(), folder=tmp_path)


def is_in_transaction(every: Ends, committed: Ends) -> bool:
    return any(every[partition] > committed[partition] for partition in PARTITIONS)


def max_often(found: dict[Id, list[Event]]) -> int:
    return max(map(len, found.values()))


async def test_a_worker_stopped_in_a_transaction_is_fenced_when_it_wakes(
    scene: Scene,
) -> None:
    async with scene as it:
        await it.publish_poison()
        zombie = it.start()
        ticks = await it.pause_in_transaction(zombie)
        it.start().wait_until_ready()
        assert max_often(await it.await_events(ticks)) == 1

        zombie.resume()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while FENCED not in zombie.metrics():  # noqa: ASYNC110  # a metric has no event
                await asyncio.sleep(0.1)
        await it.publish_ticks(range(ticks, ticks + MORE))
        assert max_often(await it.await_events(ticks + MORE)) == 1
        assert await it.count_dead_letters() == 1
        assert [worker.stop() for worker in it.started] == [0, 0]


async def test_a_worker_killed_in_a_transaction_loses_and_doubles_nothing(
    scene: Scene,
) -> None:
    async with scene as it:
        worker = it.start()
        ticks = await it.pause_in_transaction(worker)
        worker.kill()
        it.start()

        assert max_often(await it.await_events(ticks)) == 1
