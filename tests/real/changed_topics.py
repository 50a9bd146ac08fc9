"""Unannounced changes of topics: records removed, a topic deleted and recreated."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.kafka_fetch import named
from gpuledger.settings import KafkaSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gpuledger.bus.protocol import Span, TopicPartition
    from gpuledger.topics import Topic

DEADLINE_SECONDS = 120.0


async def remove_before(settings: KafkaSettings, place: TopicPartition, offset: int) -> None:
    """Remove a partition's records before an offset, as retention eventually does."""
    async with _admin(settings) as admin:
        await admin.delete_records({named(place): RecordsToDelete(before_offset=offset)})


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
