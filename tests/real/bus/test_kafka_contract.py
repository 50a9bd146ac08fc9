"""The bus on a real Kafka satisfies the contract of every bus."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaProducer

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription
from gpuledger.records import PodRecord
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topic
from tests.bus_contract.gaps import GapLaws
from tests.bus_contract.groups import GroupLaws
from tests.bus_contract.harness import DEADLINE_SECONDS, PARTITIONS, poll_once
from tests.bus_contract.histories import HistoryLaws
from tests.bus_contract.positions import PositionLaws
from tests.bus_contract.records import RecordLaws
from tests.bus_contract.transactions import TransactionLaws
from tests.real.changed_topics import add_partitions, move_offset, recreate, remove_before

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpuledger.bus.protocol import Message, Record, TopicPartition
    from tests.real.services.kafka import KafkaBroker

COMPACTED_AT_ONCE = {
    "segment.ms": "500",
    "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "500",
}


class KafkaHarness:
    def __init__(self, settings: KafkaSettings) -> None:
        name = uuid4().hex[:8]
        self.readings, self.pods, self.states = (f"{kind}-{name}" for kind in ("r", "p", "s"))
        self.group = f"group-{name}"
        self.settings = settings
        self.bus = KafkaBus(settings)

    async def create(self) -> None:
        topics = [
            Topic(name=self.readings, record=PodRecord, key="uid", partitions=PARTITIONS),
            Topic(name=self.pods, record=PodRecord, key="uid", partitions=PARTITIONS),
            Topic(
                name=self.states,
                record=PodRecord,
                key="uid",
                partitions=1,
                cleanup_policy="compact",
                extra=COMPACTED_AT_ONCE,
            ),
        ]
        await create_topics(self.settings, topics)

    async def compact(self, *, last: Message) -> None:
        # Only a closed segment is compacted, and writing a later timestamp closes it.
        async with self.bus.producer() as producer:
            await producer.publish(self.states, 0, [last])
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await self._has_holes():  # noqa: ASYNC110  # Kafka's cleaner sends no event
                await asyncio.sleep(0.2)

    async def remove_before(self, partition: TopicPartition, offset: int) -> None:
        await remove_before(self.settings, partition, offset)

    @asynccontextmanager
    async def open_transaction(self, partition: TopicPartition) -> AsyncIterator[None]:
        anybody = AIOKafkaProducer(
            bootstrap_servers=self.settings.bootstrap_servers, transactional_id=uuid4().hex
        )
        await anybody.start()
        try:
            await anybody.begin_transaction()
            await anybody.send_and_wait(partition.topic, b"open", partition=partition.partition)
            yield
            await anybody.abort_transaction()
        finally:
            await anybody.stop()

    async def move_offset(self, partition: TopicPartition, offset: int) -> None:
        await move_offset(self.settings, self.group, partition, offset)

    async def add_partitions(self, topic: str, total: int) -> None:
        await add_partitions(self.settings, [topic], total)

    async def recreate(self, topic: str) -> None:
        again = Topic(name=topic, record=PodRecord, key="uid", partitions=PARTITIONS)
        await recreate(self.settings, again)

    async def _has_holes(self) -> bool:
        records: list[Record] = []
        requested = Subscription(group=f"look-{uuid4().hex}", topics=[self.states])
        async with self.bus.consumer(requested) as consumer:
            while not records or records[-1].value != b"last":
                records += await poll_once(consumer)
        return records[-1].offset >= len(records)


@pytest.fixture
async def harness(kafka: KafkaBroker) -> KafkaHarness:
    settings = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers,
        request_timeout_seconds=15.0,
        session_timeout_seconds=6.0,
    )
    harness = KafkaHarness(settings)
    await harness.create()
    return harness


class TestRecords(RecordLaws):
    pass


class TestPositions(PositionLaws):
    pass


class TestGroups(GroupLaws):
    pass


class TestHistories(HistoryLaws):
    pass


class TestTransactions(TransactionLaws):
    pass


class TestGaps(GapLaws):
    pass
