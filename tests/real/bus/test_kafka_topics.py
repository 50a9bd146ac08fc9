"""The Kafka bus if a consumer's topic is deleted, and recreated."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription, TopicPartition
from gpuledger.errors import BusError, BusUnavailableError, TopicsError
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.bus_contract.harness import DEADLINE_SECONDS, poll_once, poll_until, texts
from tests.real.bus.builders import numbered, settings_of

if TYPE_CHECKING:
    from gpuledger.bus.protocol import Record
    from tests.real.services.kafka import Kafka


async def _delete(servers: str, topic: Topic) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.delete_topics([topic.name])
    finally:
        await admin.close()


async def test_an_output_topic_that_is_deleted_is_named_and_no_broker_is_blamed(
    kafka: Kafka,
) -> None:
    name = uuid4().hex[:8]
    topic = Topic(name=f"output-{name}", record=PodRecord, key="uid", partitions=2)
    partition = TopicPartition(topic.name, 0)
    bus = KafkaBus(settings_of(kafka.bootstrap_servers))
    await create_topics(settings_of(kafka.bootstrap_servers), [topic])
    async with bus.producer() as producer, bus.transactions(f"w-{name}") as writer:
        await producer.publish(*partition, [numbered(1)])
        await writer.commit({partition: [numbered(2)]}, offsets={}, group="g")
        await _delete(kafka.bootstrap_servers, topic)
        # The broker accepts records for a moment after it has reported the topic as deleted.
        async with asyncio.timeout(DEADLINE_SECONDS):
            with suppress(TopicsError):
                while True:
                    await producer.publish(*partition, [numbered(3)])
        with pytest.raises(TopicsError, match=f"no topic {topic.name}"):
            await producer.publish(*partition, [numbered(3)])
        with pytest.raises(BusUnavailableError, match=f"no topic {topic.name}"):
            await writer.commit({partition: [numbered(4)]}, offsets={}, group="g")
        await create_topics(settings_of(kafka.bootstrap_servers), [topic])
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                with suppress(BusError):
                    await producer.publish(*partition, [numbered(5)])
                    break
    async with bus.transactions(f"w-{name}") as writer:
        await writer.commit({partition: [numbered(6)]}, offsets={}, group="g")
    requested = Subscription(group=f"g-{name}", topics=[topic.name])
    async with bus.consumer(requested) as consumer:
        found = await poll_until(lambda read: len(read) >= 2, consumer)
    assert texts(found) == ["5", "6"]


async def test_a_poll_names_a_deleted_topic_and_reads_it_again_once_it_exists(
    kafka: Kafka,
) -> None:
    """Its partitions just disappear, which looks the same as a group with too many members."""
    name = uuid4().hex[:8]
    goes, stays = (
        Topic(name=f"{kind}-{name}", record=PodRecord, key="uid", partitions=2)
        for kind in ("goes", "stays")
    )
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [goes, stays])
    bus = KafkaBus(settings)
    requested = Subscription(group=f"g-{name}", topics=[goes.name, stays.name])
    async with bus.consumer(requested) as consumer:
        await poll_until(lambda _: len(consumer.assignment()) == 4, consumer)
        await _delete(kafka.bootstrap_servers, goes)
        for _ in range(2):
            with pytest.raises(TopicsError, match=goes.name):
                await poll_until(lambda _: False, consumer)
        assert consumer.assignment() == frozenset()

        await create_topics(settings, [goes])
        async with bus.producer() as producer:
            await producer.publish(goes.name, 0, [numbered(1)])
        found: list[Record] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not found:
                with suppress(BusError):
                    found += await poll_once(consumer)
        assert texts(found) == ["1"]
