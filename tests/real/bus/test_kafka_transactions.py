"""Transactions on a real Kafka: writers that stop half-way, break internally, find no broker."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING
from uuid import uuid4

import aiokafka
import pytest
from prometheus_client import REGISTRY

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_consumer import GIVE_UP_SECONDS
from gpuledger.bus.kafka_producer import KafkaTransactions
from gpuledger.bus.protocol import Subscription, TopicPartition
from gpuledger.bus.transactional_writers import TransactionalWriters
from gpuledger.errors import BusUnavailableError
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.bus_contract.harness import DEADLINE_SECONDS, poll_once, poll_until, texts
from tests.real.bus.builders import numbered, settings_of
from tests.real.bus.inner_clients import client_of, is_in_transaction, lose_sequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gpuledger.settings import KafkaSettings
    from tests.real.services.kafka import Kafka

GROUP = "writers"


@pytest.fixture
def settings(kafka: Kafka) -> KafkaSettings:
    return settings_of(kafka.bootstrap_servers)


@pytest.fixture
async def partition(settings: KafkaSettings) -> TopicPartition:
    topic = Topic(name=f"written-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=2)
    await create_topics(settings, [topic])
    return TopicPartition(topic.name, 0)


@pytest.fixture
async def stuck(
    settings: KafkaSettings, partition: TopicPartition
) -> AsyncIterator[KafkaTransactions]:
    """Yield a writer in an open transaction that already has one record."""
    stuck = KafkaTransactions(KafkaConnection(settings), partition.topic)
    await stuck.open()
    client = client_of(stuck)
    await client.begin_transaction()
    batch = client.create_batch()
    batch.append(key=b"node-a", value=b"left open", timestamp=1)
    await (await client.send_batch(batch, partition.topic, partition=partition.partition))
    yield stuck
    await stuck.close()


async def test_a_transaction_that_a_writer_left_open_is_aborted_by_the_next_one(
    settings: KafkaSettings, partition: TopicPartition, stuck: KafkaTransactions
) -> None:
    """Immediately, not after the transaction timeout."""
    assert is_in_transaction(stuck)
    requested = Subscription(group=f"g-{partition.topic}", topics=[partition.topic])
    bus = KafkaBus(settings)
    async with bus.transactions(partition.topic) as next_one, bus.consumer(requested) as consumer:
        begun = time.monotonic()
        await next_one.commit({partition: [numbered(1)]}, offsets={}, group=GROUP)

        assert texts(await poll_until(bool, consumer)) == ["1"]
        assert time.monotonic() - begun < 30


async def test_a_writer_that_closes_during_a_transaction_blocks_no_reader(
    settings: KafkaSettings, partition: TopicPartition, stuck: KafkaTransactions
) -> None:
    requested = Subscription(group=f"g-{partition.topic}", topics=[partition.topic])
    bus = KafkaBus(settings)
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        await producer.publish(*partition, [numbered(1)])
        assert await consumer.end_offsets([partition]) == {partition: 0}
        await stuck.close()

        assert texts(await poll_until(bool, consumer)) == ["1"]


async def test_an_open_transaction_is_shown_as_the_time_for_which_it_withholds_records(
    settings: KafkaSettings, partition: TopicPartition, stuck: KafkaTransactions
) -> None:
    """Otherwise a consumer would be stuck while everything shows it to be at the end."""
    requested = Subscription(group=f"g-{partition.topic}", topics=[partition.topic])
    bus = KafkaBus(settings)
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        await producer.publish(*partition, [numbered(1)])
        async with asyncio.timeout(DEADLINE_SECONDS):
            while consumer.withheld_seconds() <= 1:
                assert await poll_once(consumer) == []
        labels = {"topic": partition.topic, "consumer": requested.group}
        shown = REGISTRY.get_sample_value("gpuledger_open_transaction_seconds", labels)
        assert shown is not None
        assert shown > 1
        await stuck.close()

        assert texts(await poll_until(bool, consumer)) == ["1"]
        assert consumer.withheld_seconds() == 0


async def test_a_committed_offset_is_returned_once_no_transaction_can_move_it(
    settings: KafkaSettings, partition: TopicPartition, stuck: KafkaTransactions
) -> None:
    """A worker that continued from the earlier offset would repeat output."""
    bus, client, group = KafkaBus(settings), client_of(stuck), f"g-{partition.topic}"
    async with bus.consumer(Subscription(group=group, topics=[partition.topic])) as consumer:
        offsets = {aiokafka.TopicPartition(*partition): 1}
        await client.send_offsets_to_transaction(offsets, group)
        request = asyncio.create_task(consumer.committed(partition))
        await asyncio.wait({request}, timeout=1)
        assert not request.done()
        await client.commit_transaction()
        assert await request == 1


async def test_an_offset_in_a_transaction_that_does_not_end_is_named_with_its_remedy(
    kafka: Kafka, partition: TopicPartition, stuck: KafkaTransactions
) -> None:
    """Brokers keep such a transaction forever if they lose its marker."""
    bus = KafkaBus(settings_of(kafka.bootstrap_servers, request_timeout_seconds=2.0))
    client, group = client_of(stuck), f"g-{partition.topic}"
    async with bus.consumer(Subscription(group=group, topics=[partition.topic])) as consumer:
        await client.send_offsets_to_transaction({aiokafka.TopicPartition(*partition): 1}, group)
        with pytest.raises(BusUnavailableError, match=r"has not ended; .* find-hanging"):
            await consumer.committed(partition)


async def test_a_writer_that_lost_its_sequence_fails_and_the_next_one_continues(
    settings: KafkaSettings, partition: TopicPartition
) -> None:
    bus = KafkaBus(settings)
    requested = Subscription(group=f"g-{partition.topic}", topics=[partition.topic])
    async with bus.transactions(partition.topic) as writer:
        await writer.commit({partition: [numbered(1)]}, offsets={}, group=GROUP)
        assert isinstance(writer, KafkaTransactions)
        lose_sequence(writer, partition)
        for _ in range(2):
            with pytest.raises(BusUnavailableError, match="OutOfOrderSequenceNumber"):
                await writer.commit({partition: [numbered(2)]}, offsets={partition: 9}, group=GROUP)
    async with bus.transactions(partition.topic) as writer, bus.consumer(requested) as consumer:
        await writer.commit({partition: [numbered(3)]}, offsets={}, group=GROUP)
        assert texts(await poll_until(lambda found: len(found) >= 2, consumer)) == ["1", "3"]


async def test_a_commit_without_a_broker_fails_in_time_and_works_once_the_broker_is_back(
    start_kafka: Callable[[], Kafka],
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers, request_timeout_seconds=3.0)
    topic = Topic(name="written", record=PodRecord, key="uid", partitions=2)
    await create_topics(settings, [topic])
    bus, partition = KafkaBus(settings), TopicPartition(topic.name, 0)
    async with bus.transactions("w") as writer:
        await writer.commit({partition: [numbered(1)]}, offsets={partition: 1}, group=GROUP)
        kafka.kill()
        with pytest.raises(BusUnavailableError, match="did not answer within 3 s"):
            await writer.commit({partition: [numbered(2)]}, offsets={partition: 2}, group=GROUP)
    with pytest.raises(BusUnavailableError):
        async with bus.transactions("w"):
            pass
    kafka.start()
    requested = Subscription(group="g", topics=[topic.name])
    async with bus.transactions("w") as writer, bus.consumer(requested) as consumer:
        await writer.commit({partition: [numbered(3)]}, offsets={partition: 3}, group=GROUP)
        assert texts(await poll_until(lambda found: len(found) >= 2, consumer)) == ["1", "3"]


async def test_a_writer_that_is_closed_during_a_stalled_commit_does_not_abort_it(
    start_kafka: Callable[[], Kafka],
) -> None:
    """As at a rebalance while a broker is suspended; it resumes while the writer is closed."""
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers)
    topic = Topic(name="written", record=PodRecord, key="uid", partitions=2)
    await create_topics(settings, [topic])
    bus, partition = KafkaBus(settings), TopicPartition(topic.name, 0)
    async with bus.transactions("w") as writer:
        await writer.commit({partition: [numbered(1)]}, offsets={partition: 1}, group=GROUP)
        kafka.process.send(signal.SIGSTOP)
        committing = asyncio.create_task(
            writer.commit({partition: [numbered(2)]}, offsets={partition: 2}, group=GROUP)
        )
        await asyncio.sleep(0.3)
        assert isinstance(writer, KafkaTransactions)
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0.3)
        kafka.process.send(signal.SIGCONT)
        await closing
        assert committing.done()
        with pytest.raises(BusUnavailableError, match="was closed during a commit"):
            await committing
    requested = Subscription(group="g", topics=[topic.name])
    async with bus.transactions("w") as writer, bus.consumer(requested) as consumer:
        await writer.commit({partition: [numbered(3)]}, offsets={partition: 3}, group=GROUP)
        found = texts(
            await poll_until(lambda read: any(each.value == b"3" for each in read), consumer)
        )
        assert found[0] == "1"
        assert found[-1] == "3"


async def test_an_id_that_is_revoked_while_it_is_opened_belongs_to_its_next_owner(
    start_kafka: Callable[[], Kafka],
) -> None:
    """As at a rebalance while a broker is suspended: the opening would be answered afterwards."""
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers)
    topic = Topic(name="written", record=PodRecord, key="uid", partitions=2)
    await create_topics(settings, [topic])
    bus, partition = KafkaBus(settings), TopicPartition(topic.name, 0)
    async with (
        TransactionalWriters(bus=bus, group=GROUP, finish_seconds=1.0) as before,
        TransactionalWriters(bus=bus, group=GROUP, finish_seconds=1.0) as after,
    ):
        await before.open([0])
        kafka.process.send(signal.SIGSTOP)
        opening = asyncio.create_task(before.open([0]))
        await asyncio.sleep(0.3)
        async with asyncio.timeout(GIVE_UP_SECONDS):
            await before.close([0])
        await opening
        assert 0 not in before
        kafka.process.send(signal.SIGCONT)
        await after.open([0])
        for offset in range(3):
            await after.commit(0, {partition: [numbered(offset)]}, offsets={partition: offset + 1})
