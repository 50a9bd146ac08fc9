"""The in-memory bus keeps the laws of every bus."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.bus_contract.gaps import GapLaws
from tests.bus_contract.groups import GroupLaws
from tests.bus_contract.harness import PARTITIONS
from tests.bus_contract.histories import HistoryLaws
from tests.bus_contract.positions import PositionLaws
from tests.bus_contract.records import RecordLaws
from tests.bus_contract.transactions import TransactionLaws

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpuledger.bus.protocol import Message, TopicPartition


class MemoryHarness:
    def __init__(self) -> None:
        self.readings, self.pods, self.states, self.group = "readings", "pods", "states", "join"
        topics = [
            Topic(name="readings", record=PodRecord, key="uid", partitions=PARTITIONS),
            Topic(name="pods", record=PodRecord, key="uid", partitions=PARTITIONS),
            Topic(
                name="states", record=PodRecord, key="uid", partitions=1, cleanup_policy="compact"
            ),
        ]
        self.bus = MemoryBus(topics)

    async def compact(self, *, last: Message) -> None:
        async with self.bus.producer() as producer:
            await producer.publish(self.states, 0, [last])
        self.bus.compact(self.states)

    async def remove_before(self, partition: TopicPartition, offset: int) -> None:
        self.bus.remove_before(partition, offset)

    @asynccontextmanager
    async def open_transaction(self, partition: TopicPartition) -> AsyncIterator[None]:
        yield

    async def move_offset(self, partition: TopicPartition, offset: int) -> None:
        self.bus.move_offset(self.group, partition, offset)

    async def add_partitions(self, topic: str, total: int) -> None:
        self.bus.add_partitions(topic, total)

    async def recreate(self, topic: str) -> None:
        self.bus.recreate(topic)


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()


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
