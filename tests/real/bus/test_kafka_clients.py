"""The Kafka bus where a client inside it dies, is far behind, or has the wrong time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import aiokafka
import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_consumer import KafkaConsumer
from gpuledger.bus.kafka_producer import KafkaProducer
from gpuledger.bus.protocol import Message, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.bus_contract.harness import poll_until, texts
from tests.real.bus.given import numbered, settings_of

if TYPE_CHECKING:
    from tests.real.parts.kafka import Kafka


def _inside(client: KafkaProducer | KafkaConsumer) -> Any:  # noqa: ANN401  # aiokafka is untyped
    assert client._client is not None
    return client._client


async def test_a_producer_that_lost_its_sequence_is_replaced(kafka: Kafka) -> None:
    topic = Topic(name=f"sequence-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=2)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    producer = KafkaProducer(KafkaConnection(settings))
    try:
        await producer.publish(topic.name, 0, [numbered(0)])
        # As after a batch that expired without a leader: the brokers wait for a number in between.
        place = aiokafka.TopicPartition(topic.name, 0)
        _inside(producer)._txn_manager.increment_sequence_number(place, 5)
        with pytest.raises(BusUnavailableError, match="OutOfOrderSequenceNumber"):
            await producer.publish(topic.name, 0, [numbered(1)])

        for partition in (0, 1):
            await producer.publish(topic.name, partition, [numbered(1)])
    finally:
        await producer.close()


async def test_a_consumer_whose_inner_task_died_is_replaced_and_told(kafka: Kafka) -> None:
    topic = Topic(name=f"died-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    revoked: list[int] = []

    async def note(partitions: frozenset[TopicPartition]) -> None:
        revoked.append(len(partitions))

    asked = Subscription(group=f"g-{topic.name}", topics=[topic.name], on_revoked=note)
    consumer = KafkaConsumer(connection=KafkaConnection(settings), subscription=asked)
    try:
        async with KafkaBus(settings).producer() as producer:
            await producer.publish(topic.name, 0, [numbered(1)])
            assert texts(await poll_until(bool, consumer)) == ["1"]
            _inside(consumer)._fetcher._fetch_task.cancel()
            await producer.publish(topic.name, 0, [numbered(2)])

            assert texts(await poll_until(lambda found: len(found) >= 2, consumer)) == ["1", "2"]
            assert revoked == [1]
    finally:
        await consumer.close()


async def test_a_consumer_behind_the_first_record_kept_goes_on_with_it(
    kafka: Kafka,
) -> None:
    topic = Topic(name=f"kept-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    bus = KafkaBus(settings)
    place = TopicPartition(topic.name, 0)
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group=f"g-{topic.name}", topics=[topic.name])) as consumer,
    ):
        await producer.publish(*place, [numbered(number) for number in range(10)])
        await poll_until(lambda found: len(found) >= 10, consumer)
        await _delete_before(kafka.bootstrap_servers, place, 7)
        await consumer.seek(place, 2)

        assert texts(await poll_until(lambda found: len(found) >= 3, consumer)) == ["7", "8", "9"]


async def _delete_before(servers: str, place: TopicPartition, offset: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.delete_records({aiokafka.TopicPartition(*place): RecordsToDelete(offset)})
    finally:
        await admin.close()


@pytest.mark.parametrize(("ahead_hours", "is_taken"), [(20, True), (30, False)])
async def test_a_node_may_have_its_clock_hours_ahead(
    kafka: Kafka, ahead_hours: int, *, is_taken: bool
) -> None:
    topic = Topic(name=f"ahead-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    ahead_ms = time.time_ns() // 1_000_000 + ahead_hours * 3_600_000
    ahead = Message(key=b"node-a", value=b"1", timestamp_ms=ahead_ms)

    async with KafkaBus(settings).producer() as producer:
        publishing = producer.publish(topic.name, 0, [ahead])
        if is_taken:
            await publishing
        else:
            with pytest.raises(BusUnavailableError, match="set this machine's clock"):
                await publishing
            await producer.publish(topic.name, 0, [numbered(1)])
