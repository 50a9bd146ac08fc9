"""Unannounced changes: records removed, offsets moved, a topic recreated, partitions added."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, RecordsToDelete
from aiokafka.errors import CommitFailedError

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.kafka_fetch import named
from gpuledger.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from gpuledger.bus.protocol import Span, TopicPartition
    from gpuledger.topics import Topic

DEADLINE_SECONDS = 120.0


async def remove_before(settings: KafkaSettings, place: TopicPartition, offset: int) -> None:
    """Remove a partition's records before an offset, as retention eventually does."""
    async with _admin(settings) as admin:
        await admin.delete_records({named(place): RecordsToDelete(before_offset=offset)})


async def move_offset(
    settings: KafkaSettings, group: str, partition: TopicPartition, offset: int
) -> None:
    """Set a group's committed offset, as `kafka-consumer-groups.sh --reset-offsets` does.

    Waits until the group has no members.
    """
    client = AIOKafkaConsumer(
        bootstrap_servers=settings.bootstrap_servers, group_id=group, enable_auto_commit=False
    )
    await client.start()
    try:
        client.assign([named(partition)])
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                try:
                    await client.commit({named(partition): offset})
                except CommitFailedError:
                    await asyncio.sleep(0.1)
                else:
                    break
    finally:
        await client.stop()


async def add_partitions(settings: KafkaSettings, topics: Iterable[str], total: int) -> None:
    """Raise the number of partitions of topics, as `kafka-topics.sh --alter` does."""
    async with _admin(settings) as admin:
        await admin.create_partitions({topic: NewPartitions(total) for topic in topics})


async def delete(settings: KafkaSettings, *topics: Topic) -> None:
    """Delete topics."""
    async with _admin(settings) as admin:
        await admin.delete_topics([topic.name for topic in topics])


async def recreate(settings: KafkaSettings, topic: Topic) -> None:
    """Delete and recreate a topic."""
    await delete(settings, topic)
    async with asyncio.timeout(DEADLINE_SECONDS):
        # Kafka deletes asynchronously.
        while (await create_topics(settings, [topic]))[0].status != "created":  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.1)


async def spans(settings: KafkaSettings, topic: str) -> dict[TopicPartition, Span]:
    """Return the range of available offsets of each partition."""
    async with KafkaBus(settings).reader() as reader:
        return dict(await reader.spans(topic))


@asynccontextmanager
async def _admin(settings: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap_servers)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()
