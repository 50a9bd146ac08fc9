"""The Kafka bus if a client inside it dies, falls far behind, or has the wrong time."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from uuid import uuid4

import aiokafka
import pytest
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_consumer import KafkaConsumer
from gpuledger.bus.kafka_positions import TOPIC_CHECK_SECONDS
from gpuledger.bus.kafka_producer import KafkaProducer
from gpuledger.bus.protocol import Message, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.bus_contract.harness import poll_until, texts
from tests.real.bus.builders import numbered, settings_of
from tests.real.bus.inner_clients import (
    client_of,
    coordinator_of,
    end_fetching,
    listener_of,
    lose_sequence,
)
from tests.real.changed_topics import recreate

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.kafka_cluster import KafkaCluster


async def test_a_producer_that_lost_its_sequence_is_replaced(kafka: Kafka) -> None:
    topic = Topic(name=f"sequence-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=2)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    producer = KafkaProducer(KafkaConnection(settings))
    try:
        await producer.publish(topic.name, 0, [numbered(0)])
        lose_sequence(producer, TopicPartition(topic.name, 0))
        with pytest.raises(BusUnavailableError, match="OutOfOrderSequenceNumber"):
            await producer.publish(topic.name, 0, [numbered(1)])

        for partition in (0, 1):
            await producer.publish(topic.name, partition, [numbered(1)])
    finally:
        await producer.close()


async def test_a_consumer_whose_inner_task_died_is_replaced_and_logged(kafka: Kafka) -> None:
    topic = Topic(name=f"died-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    revoked: list[int] = []

    async def note(partitions: frozenset[TopicPartition]) -> None:
        revoked.append(len(partitions))

    requested = Subscription(group=f"g-{topic.name}", topics=[topic.name], on_revoked=note)
    consumer = KafkaConsumer(connection=KafkaConnection(settings), subscription=requested)
    try:
        async with KafkaBus(settings).producer() as producer:
            await producer.publish(topic.name, 0, [numbered(1)])
            assert texts(await poll_until(bool, consumer)) == ["1"]
            end_fetching(consumer)
            await producer.publish(topic.name, 0, [numbered(2)])

            assert texts(await poll_until(lambda found: len(found) >= 2, consumer)) == ["1", "2"]
            assert revoked == [1]
    finally:
        await consumer.close()


async def test_a_consumer_behind_the_first_retained_record_continues_with_that_record(
    kafka: Kafka,
) -> None:
    topic = Topic(name=f"kept-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [topic])
    bus = KafkaBus(settings)
    partition = TopicPartition(topic.name, 0)
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group=f"g-{topic.name}", topics=[topic.name])) as consumer,
    ):
        await producer.publish(*partition, [numbered(number) for number in range(10)])
        await poll_until(lambda found: len(found) >= 10, consumer)
        await _delete_before(kafka.bootstrap_servers, partition, 7)
        await consumer.seek(partition, 2)

        assert texts(await poll_until(lambda found: len(found) >= 3, consumer)) == ["7", "8", "9"]


async def _delete_before(servers: str, partition: TopicPartition, offset: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=servers)
    await admin.start()
    try:
        await admin.delete_records({aiokafka.TopicPartition(*partition): RecordsToDelete(offset)})
    finally:
        await admin.close()


@pytest.mark.parametrize(("ahead_hours", "is_taken"), [(20, True), (30, False)])
async def test_a_nodes_clock_may_be_hours_ahead(
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
            with pytest.raises(BusUnavailableError, match="correct this machine's clock"):
                await publishing
            await producer.publish(topic.name, 0, [numbered(1)])


async def test_a_coordinator_that_moved_is_not_mistaken_for_a_group_without_commits(
    start_kafka_cluster: Callable[[], KafkaCluster],
) -> None:
    """Offsets seem missing while it moves; a member that relied on that would reread everything."""
    cluster = start_kafka_cluster()
    topic = Topic(name="moved", record=PodRecord, key="uid", partitions=1)
    settings = settings_of(cluster.bootstrap_servers)
    await create_topics(settings, [topic])
    partition = TopicPartition(topic.name, 0)
    requested = Subscription(group="g", topics=[topic.name])
    consumer = KafkaConsumer(connection=KafkaConnection(settings), subscription=requested)
    try:
        async with KafkaBus(settings).producer() as producer:
            await producer.publish(topic.name, 0, [numbered(1), numbered(2)])
        await poll_until(lambda found: len(found) >= 2, consumer)
        await consumer.commit({partition: 2})
        coordinator = coordinator_of(consumer)
        others = {broker.node_id for broker in cluster.brokers} - {coordinator.coordinator_id}
        for other in others:
            coordinator.coordinator_id = other
            assert await consumer.committed(partition) == 2
    finally:
        await consumer.close()


async def test_an_assignment_to_a_closing_client_is_not_used_by_the_next_client(
    kafka: Kafka,
) -> None:
    """As if a topic is recreated, so that the client is replaced while its group rebalances."""
    topics = [
        Topic(name=f"{what}-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=2)
        for what in ("recreated", "kept")
    ]
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, topics)

    async def offer_while_it_ends(partitions: frozenset[TopicPartition]) -> None:
        client, listener = client_of(consumer), listener_of(consumer)
        end = client.stop

        async def offer_and_end() -> None:
            await listener.on_partitions_assigned(partitions)
            await end()

        client.stop = offer_and_end

    names = [topic.name for topic in topics]
    requested = Subscription(group=f"g-{names[0]}", topics=names, on_revoked=offer_while_it_ends)
    consumer = KafkaConsumer(connection=KafkaConnection(settings), subscription=requested)
    try:
        await poll_until(lambda _: len(consumer.assignment()) == 4, consumer)
        await consumer.commit(dict.fromkeys(consumer.assignment(), 0))
        before = client_of(consumer)
        # The process is suspended meanwhile, as by SIGSTOP: its client receives nothing.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, recreate(settings, topics[0])).result()
        time.sleep(TOPIC_CHECK_SECONDS)  # noqa: ASYNC251  # as above
        await poll_until(lambda _: client_of(consumer) is not before, consumer)
        await poll_until(lambda _: len(consumer.assignment()) == 4, consumer)
    finally:
        await consumer.close()
