"""The bus in memory: one process, one event loop, nothing kept after it; for the demo and tests.

It behaves as Kafka does where a stage can see it; one test suite holds both to that.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final
from uuid import uuid4

from gpuledger.bus.log_reader import HistoryReader
from gpuledger.bus.memory_consumer import MemoryConsumer
from gpuledger.bus.memory_group import ConsumerGroup
from gpuledger.bus.memory_log import PartitionLog
from gpuledger.bus.memory_producer import MemoryProducer
from gpuledger.bus.memory_reader import MemoryReader
from gpuledger.bus.memory_transactions import MemoryTransactions
from gpuledger.bus.protocol import (
    Consumer,
    Producer,
    Subscription,
    TopicDescription,
    TopicPartition,
    Transactions,
)
from gpuledger.errors import TopicsError
from gpuledger.topics import TOPICS, Topic

MAX_PARTITION_BYTES: Final = 16 * 2**20
MAX_PARTITION_RECORDS: Final = 100_000
SESSION_TIMEOUT_SECONDS: Final = 30.0


class MemoryBus:
    """Topics, partitions and consumer groups in this process's memory.

    A partition keeps at most `max_partition_bytes` and `max_partition_records`, its newest ones; a
    compacted one keeps the last record of each key.
    """

    def __init__(
        self,
        topics: Iterable[Topic] = TOPICS,
        *,
        max_partition_bytes: int = MAX_PARTITION_BYTES,
        max_partition_records: int = MAX_PARTITION_RECORDS,
        session_timeout_seconds: float = SESSION_TIMEOUT_SECONDS,
    ) -> None:
        self._session_timeout_seconds = session_timeout_seconds
        self._groups: dict[str, ConsumerGroup] = {}
        self._owners: dict[str, object] = {}
        self._partitions: dict[str, int] = {}
        self._logs: dict[TopicPartition, PartitionLog] = {}
        self._max_bytes, self._max_records = max_partition_bytes, max_partition_records
        self.create(topics)

    def create(self, topics: Iterable[Topic]) -> None:
        """Make topics."""
        for topic in topics:
            self._partitions[topic.name] = topic.partitions
            topic_id = uuid4().hex
            for number in range(topic.partitions):
                place = TopicPartition(topic.name, number)
                self._logs[place] = PartitionLog(
                    place,
                    topic_id=topic_id,
                    compacted="compact" in topic.cleanup_policy,
                    max_bytes=self._max_bytes,
                    max_records=self._max_records,
                )

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; `TopicsError` where the topic does not exist."""
        return (await self.describe(topic)).partitions

    async def describe(self, topic: str) -> TopicDescription:
        """Return what is known of a topic; `TopicsError` where it does not exist."""
        self._must_exist([topic])
        topic_id = self._logs[TopicPartition(topic, 0)].topic_id
        return TopicDescription(self._partitions[topic], topic_id)

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        """Open a producer."""
        yield MemoryProducer(logs=self._logs)

    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        """Open transactions under an id, and shut out who had it."""
        yield MemoryTransactions(
            transactional_id=transactional_id,
            owners=self._owners,
            logs=self._logs,
            commit_offsets=self._commit_offsets,
        )

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer; `TopicsError` where a topic does not exist."""
        self._must_exist(subscription.topics)
        group = self._group(subscription.group)
        consumer = MemoryConsumer(subscription=subscription, group=group, logs=self._logs)
        try:
            yield consumer
        finally:
            await consumer.close()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[HistoryReader]:
        """Open a reader of what is kept."""
        yield MemoryReader(logs=self._logs)

    def compact(self, topic: str) -> None:
        """Compact a topic now, as Kafka's cleaner would in its own time."""
        self._must_exist([topic])
        for number in range(self._partitions[topic]):
            self._logs[TopicPartition(topic, number)].compact()

    def remove_before(self, partition: TopicPartition, offset: int) -> None:
        """Remove the records before an offset now, as retention would."""
        self._logs[partition].remove_before(offset)

    def recreate(self, topic: str) -> None:
        """Delete a topic and make it anew; what groups have committed of it stays."""
        self._must_exist([topic])
        topic_id = uuid4().hex
        for number in range(self._partitions[topic]):
            self._logs[TopicPartition(topic, number)].begin_anew(topic_id)

    def _group(self, name: str) -> ConsumerGroup:
        seconds = self._session_timeout_seconds
        made = ConsumerGroup(partitions=self._partitions, session_timeout_seconds=seconds)
        return self._groups.setdefault(name, made)

    def _commit_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        self._group(group).commit(offsets)

    def _must_exist(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if topic not in self._partitions:
                raise TopicsError(f"there is no topic {topic!r} on this bus")
