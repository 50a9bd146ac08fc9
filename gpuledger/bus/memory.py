"""The in-memory bus for the demo and tests: one process, one event loop, no persistence.

A component sees no difference from Kafka; the same test suite verifies both buses.
"""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import Final
from uuid import uuid4

from gpuledger.bus.limits import refuse_too_large
from gpuledger.bus.memory_consumer import MemoryConsumer
from gpuledger.bus.memory_state import ConsumerGroup, PartitionLog
from gpuledger.bus.protocol import (
    Consumer,
    HistoryReader,
    Message,
    Producer,
    Record,
    Span,
    Subscription,
    TopicDescription,
    TopicPartition,
    Transactions,
)
from gpuledger.errors import FencedError, TopicsError
from gpuledger.topics import Topic, Topics

MAX_PARTITION_BYTES: Final = 16 * 2**20
MAX_PARTITION_RECORDS: Final = 100_000
SESSION_TIMEOUT_SECONDS: Final = 30.0


class MemoryBus:
    """A bus whose topics, partitions and consumer groups are in this process's memory.

    A partition keeps its newest records, at most `max_partition_bytes` and `max_partition_records`.
    A compacted partition keeps the last record of each key. `topics` defaults to all of `Topics`.
    """

    def __init__(
        self,
        topics: Iterable[Topic] | None = None,
        *,
        max_partition_bytes: int = MAX_PARTITION_BYTES,
        max_partition_records: int = MAX_PARTITION_RECORDS,
        session_timeout_seconds: float = SESSION_TIMEOUT_SECONDS,
    ) -> None:
        self.topics = Topics()
        self._session_timeout_seconds = session_timeout_seconds
        self._groups: dict[str, ConsumerGroup] = {}
        self._owners: dict[str, object] = {}
        self._partitions: dict[str, int] = {}
        self._compacted: dict[str, bool] = {}
        self._logs: dict[TopicPartition, PartitionLog] = {}
        self._max_bytes, self._max_records = max_partition_bytes, max_partition_records
        self.create(self.topics if topics is None else topics)

    def create(self, topics: Iterable[Topic]) -> None:
        """Create topics."""
        for topic in topics:
            self._compacted[topic.name] = "compact" in topic.cleanup_policy
            # As in Kafka, one id for the whole topic; a recreated topic gets a new one.
            self._add_logs(topic.name, range(topic.partitions), topic_id=uuid4().hex)

    def add_partitions(self, topic: str, total: int) -> None:
        """Add partitions, as `kafka-topics.sh --alter` does; consumers then reject the topic."""
        topic_id = self._logs[TopicPartition(topic, 0)].topic_id
        self._add_logs(topic, range(self._partitions[topic], total), topic_id=topic_id)

    def _add_logs(self, topic: str, numbers: range, *, topic_id: str) -> None:
        self._partitions[topic] = numbers.stop
        for number in numbers:
            partition = TopicPartition(topic, number)
            self._logs[partition] = PartitionLog(
                partition,
                topic_id=topic_id,
                compacted=self._compacted[topic],
                max_bytes=self._max_bytes,
                max_records=self._max_records,
            )

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; raise `TopicsError` if the topic does not exist."""
        return (await self.describe(topic)).partitions

    async def describe(self, topic: str) -> TopicDescription:
        """Return a topic's description; raise `TopicsError` if it does not exist."""
        self._must_exist([topic])
        topic_id = self._logs[TopicPartition(topic, 0)].topic_id
        return TopicDescription(self._partitions[topic], topic_id)

    async def topic_id(self, topic: str) -> str | None:
        """Return the topic's current id; `None` if the topic does not exist."""
        log = self._logs.get(TopicPartition(topic, 0))
        return None if log is None else log.topic_id

    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        """Open a producer."""
        yield MemoryProducer(logs=self._logs)

    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        """Open a writer with this id, and fence the id's previous writer."""
        yield MemoryTransactions(
            transactional_id=transactional_id,
            owners=self._owners,
            logs=self._logs,
            commit_offsets=lambda group, offsets: self._group(group).commit(offsets),
        )

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        """Open a consumer; raise `TopicsError` if a topic does not exist."""
        self._must_exist(subscription.topics)
        group = self._group(subscription.group)
        consumer = MemoryConsumer(subscription=subscription, group=group, logs=self._logs)
        try:
            yield consumer
        finally:
            await consumer.close()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[HistoryReader]:
        """Open a reader."""
        yield MemoryReader(logs=self._logs)

    def kept(self, topic: str) -> list[Record]:
        """Return the records that a topic keeps, one partition after the other."""
        self._must_exist([topic])
        partitions = (TopicPartition(topic, number) for number in range(self._partitions[topic]))
        logs = (self._logs[partition] for partition in partitions)
        return [record for log in logs for record in log.read(0, max_records=log.end_offset)]

    def committed(self, group: str, partition: TopicPartition) -> int | None:
        """Return a group's committed offset, or `None` if nothing is committed."""
        found = self._groups.get(group)
        return None if found is None else found.committed.get(partition)

    def compact(self, topic: str) -> None:
        """Compact a topic now, as Kafka's log cleaner would do later."""
        self._must_exist([topic])
        for number in range(self._partitions[topic]):
            self._logs[TopicPartition(topic, number)].compact()

    def remove_before(self, partition: TopicPartition, offset: int) -> None:
        """Remove the records before an offset now, as retention would do later."""
        self._logs[partition].remove_before(offset)

    def move_offset(self, group: str, partition: TopicPartition, offset: int) -> None:
        """Set a group's committed offset, as `kafka-consumer-groups.sh --reset-offsets` does."""
        self._group(group).move(partition, offset)

    def is_moved(self, group: str, partition: TopicPartition) -> bool:
        """Return whether the group's committed offset was set with `move_offset`."""
        return partition in self._group(group).moved

    def recreate(self, topic: str) -> None:
        """Delete and recreate a topic; the groups' committed offsets are deleted with the topic."""
        self._must_exist([topic])
        for group in self._groups.values():
            group.delete_offsets(topic)
        topic_id = uuid4().hex
        for number in range(self._partitions[topic]):
            self._logs[TopicPartition(topic, number)].recreate(topic_id)

    def _group(self, name: str) -> ConsumerGroup:
        seconds = self._session_timeout_seconds
        made = ConsumerGroup(partitions=self._partitions, session_timeout_seconds=seconds)
        return self._groups.setdefault(name, made)

    def _must_exist(self, topics: Sequence[str]) -> None:
        for topic in topics:
            if topic not in self._partitions:
                raise TopicsError(f"there is no topic {topic!r} on this bus")


class MemoryProducer:
    """Appends each batch to its partition as a whole or not at all."""

    def __init__(self, *, logs: Mapping[TopicPartition, PartitionLog]) -> None:
        self._logs = logs

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish the messages; return the offset after the last one, or `None` if there is none.

        Raises `TopicsError` if the topic or partition does not exist, or if a message for a
        compacted topic has no key. Raises `MessageTooLargeError` if a message is too large.
        """
        log = check_batch(self._logs, TopicPartition(topic, partition), messages)
        log.append(messages)
        next_offset = log.end_offset if messages else None
        # Lets consumers run, which a busy publisher would otherwise prevent.
        await asyncio.sleep(0)
        return next_offset


def check_batch(
    logs: Mapping[TopicPartition, PartitionLog],
    partition: TopicPartition,
    messages: Sequence[Message],
) -> PartitionLog:
    """Return the partition's log if it accepts the messages.

    Raises `TopicsError` or `MessageTooLargeError` if it does not.
    """
    log = logs.get(partition)
    if log is None:
        raise TopicsError(
            f"there is no partition {partition.partition} of topic {partition.topic!r} on this bus"
        )
    refuse_too_large(partition.topic, messages)
    if log.compacted and any(message.key is None for message in messages):
        raise TopicsError(f"{partition.topic}: message without a key on a compacted topic")
    return log


Owners = MutableMapping[str, object]
CommitOffsets = Callable[[str, Mapping[TopicPartition, int]], None]


class MemoryTransactions:
    """A writer with a transactional id, until another writer opens the same id."""

    def __init__(
        self,
        *,
        transactional_id: str,
        owners: Owners,
        logs: Mapping[TopicPartition, PartitionLog],
        commit_offsets: CommitOffsets,
    ) -> None:
        self._id = transactional_id
        self._owners = owners
        self._logs = logs
        self._commit_offsets = commit_offsets
        owners[transactional_id] = self

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> Mapping[TopicPartition, int]:
        """Publish messages and commit the group's offsets atomically.

        Returns the offset after each partition's last message. Raises `FencedError` if another
        writer has opened the id, and the errors of `check_batch`.
        """
        # All checks come before the first append: if one fails, nothing becomes visible.
        checked = [
            (check_batch(self._logs, partition, batch), batch)
            for partition, batch in messages.items()
        ]
        if self._owners[self._id] is not self:
            raise FencedError(f"another writer took over the transactional id {self._id!r}")
        for log, batch in checked:
            log.append(batch)
        self._commit_offsets(group, offsets)
        published = {log.partition: log.end_offset for log, batch in checked if batch}
        # Lets consumers run, which a busy publisher would otherwise prevent.
        await asyncio.sleep(0)
        return published


MAX_RECORDS: Final = 500


class MemoryReader:
    """Reads any partition of any topic; skips records that are no longer kept."""

    def __init__(self, *, logs: Mapping[TopicPartition, PartitionLog]) -> None:
        self._logs = logs

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return the available offsets of each partition.

        Raises `TopicsError` if the topic does not exist.
        """
        found = {
            partition: Span(log.first_offset, log.end_offset)
            for partition, log in self._logs.items()
            if partition.topic == topic
        }
        if not found:
            raise TopicsError(f"there is no topic {topic!r} on this bus")
        return found

    async def topic_id(self, topic: str) -> str | None:
        """Return the topic's id."""
        return self._logs[TopicPartition(topic, 0)].topic_id

    async def offsets_at(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return the offset of each partition's first record at or after `timestamp_ms`.

        If all records of a partition are older, its end offset is returned.
        """
        return {
            partition: self._logs[partition].offset_at(timestamp_ms) for partition in partitions
        }

    async def read(
        self, partition: TopicPartition, span: Span
    ) -> AsyncGenerator[Sequence[Record], None]:
        """Yield the records of a span in order, at most `MAX_RECORDS` at a time."""
        position = span.first
        while records := self._logs[partition].read(position, max_records=MAX_RECORDS):
            # Records published after the span was requested lie beyond its end.
            wanted = [record for record in records if record.offset < span.end]
            if not wanted:
                return
            # Lets other tasks run, which this loop would otherwise prevent.
            await asyncio.sleep(0)
            yield wanted
            position = records[-1].offset + 1
