"""The Kafka bus while its broker is unavailable, and when it comes back."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
from aiokafka.client import AIOKafkaClient, CoordinationType

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.bus.kafka_consumer import KafkaConsumer
from gpuledger.bus.protocol import Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, UnavailableError
from gpuledger.settings import KafkaSettings
from tests.bus_contract.harness import DEADLINE_SECONDS, poll_once, poll_until
from tests.hanging import HANG_SECONDS
from tests.real.bus.builders import TOPIC, numbered, settings_of
from tests.real.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuledger.bus.protocol import Consumer, Message, Producer, Record
    from tests.real.services.kafka import Kafka
    from tests.real.services.kafka_cluster import KafkaCluster


async def publish_numbers(
    producer: Producer, *, partition: int, until: asyncio.Event
) -> tuple[list[int], int]:
    """Publish 0, 1, 2… like an agent: again after a failure, the next after a success."""
    acknowledged: list[int] = []
    failures = 0
    while not until.is_set():
        try:
            await producer.publish(TOPIC.name, partition, [numbered(len(acknowledged))])
            acknowledged.append(len(acknowledged))
            await asyncio.sleep(0.002)
        except BusUnavailableError:
            failures += 1
            await asyncio.sleep(0.1)
    return acknowledged, failures


async def publish_again_until_it_works(producer: Producer, message: Message) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                await producer.publish(TOPIC.name, 0, [message])
            except BusUnavailableError:
                await asyncio.sleep(0.1)
            else:
                return


async def collect(consumer: Consumer, into: list[Record], *, until: asyncio.Event) -> None:
    while not until.is_set():
        try:
            into += await poll_once(consumer)
        except BusUnavailableError:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.extended), "kill"])
async def test_nothing_acknowledged_is_lost_or_reordered_by_a_broker_restart(
    start_kafka: Callable[[], Kafka], how: str
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [TOPIC])
    bus = KafkaBus(settings)
    published, read = asyncio.Event(), asyncio.Event()
    records: list[Record] = []
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[TOPIC.name])) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        publishing = [
            tasks.create_task(publish_numbers(producer, partition=number, until=published))
            for number in (0, 1)
        ]
        tasks.create_task(collect(consumer, records, until=read))
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not records:  # noqa: ASYNC110  # filled by a poll
                await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(getattr(kafka, how))
        await asyncio.sleep(1.5)
        before_restart = len(records)
        await asyncio.to_thread(kafka.start)
        await asyncio.sleep(1.5)
        published.set()
        acknowledged = [(await task)[0] for task in publishing]
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not _is_complete(records, acknowledged):  # noqa: ASYNC110  # filled by a poll
                await asyncio.sleep(0.1)
        read.set()

    assert len(records) > before_restart > 0
    for partition, expected in enumerate(acknowledged):
        # Idempotent within one producer; a replaced producer may write its last batch twice.
        found = [int(r.value or b"") for r in records if r.partition == partition]
        assert sorted(set(found)) == list(range(max(found) + 1))
        assert found == sorted(found)
        assert set(expected) <= set(found)
        offsets = [record.offset for record in records if record.partition == partition]
        assert offsets == sorted(set(offsets))


def _is_complete(records: list[Record], acknowledged: list[list[int]]) -> bool:
    found = {(record.partition, int(record.value or b"")) for record in records}
    wanted = {
        (partition, number) for partition, numbers in enumerate(acknowledged) for number in numbers
    }
    return wanted <= found


async def test_a_publish_does_not_exceed_its_deadline_and_a_later_one_works(
    start_kafka: Callable[[], Kafka],
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers, request_timeout_seconds=2.0)
    await create_topics(settings, [TOPIC])
    async with KafkaBus(settings).producer() as producer:
        await publish_again_until_it_works(producer, numbered(0))
        kafka.kill()
        with pytest.raises(BusUnavailableError, match=f"{TOPIC.name}-0.*within 2 s"):
            await producer.publish(TOPIC.name, 0, [numbered(1)])

        with pytest.raises(
            BusUnavailableError, match=f"cannot connect to Kafka at {kafka.bootstrap_servers}"
        ):
            await producer.publish(TOPIC.name, 0, [numbered(1)])
        await asyncio.to_thread(kafka.start)
        await publish_again_until_it_works(producer, numbered(1))


async def test_a_bus_closes_in_time_while_its_broker_is_unavailable(
    start_kafka: Callable[[], Kafka],
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers, request_timeout_seconds=300.0)
    await create_topics(settings, [TOPIC])
    bus = KafkaBus(settings)

    async def commit(partitions: frozenset[TopicPartition]) -> None:
        await consumer.commit(dict.fromkeys(partitions, 1))

    requested = Subscription(group="g", topics=[TOPIC.name], on_revoked=commit)
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        await producer.publish(TOPIC.name, 0, [numbered(0)])
        await poll_until(bool, consumer)
        kafka.kill()
        waiting = asyncio.create_task(producer.publish(TOPIC.name, 0, [numbered(1)]))
        await asyncio.sleep(0.5)
        waiting.cancel()
        began = time.monotonic()
    # Far less than a request may take.
    assert time.monotonic() - began < 100


async def test_a_poll_reports_unavailable_brokers_and_continues_when_they_are_back(
    start_kafka: Callable[[], Kafka],
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [TOPIC])
    consumer = KafkaConsumer(
        connection=KafkaConnection(settings),
        subscription=Subscription(group="g", topics=[TOPIC.name]),
        max_unanswered_seconds=2.0,
    )
    async with KafkaBus(settings).producer() as producer, AsyncExitStack() as stack:
        stack.push_async_callback(consumer.close)
        await producer.publish(TOPIC.name, 0, [numbered(0)])
        await poll_until(bool, consumer)
        assert consumer.is_answered()
        kafka.kill()
        with pytest.raises(BusUnavailableError, match=kafka.bootstrap_servers):
            await poll_until(lambda _: False, consumer)
        assert not consumer.is_answered()
        await asyncio.to_thread(kafka.start)
        await producer.publish(TOPIC.name, 0, [numbered(1)])
        found: list[Record] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not found or found[-1].value != b"1":
                try:
                    found += await poll_once(consumer)
                except BusUnavailableError:
                    await asyncio.sleep(0.2)
            while not consumer.is_answered():
                await poll_once(consumer)


async def test_committed_offsets_come_from_the_next_coordinator_if_the_first_one_hangs(
    start_kafka_cluster: Callable[[], KafkaCluster],
) -> None:
    """A broker that hangs, for example because of its disk, does not close its connections."""
    kafka = await asyncio.to_thread(start_kafka_cluster)
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await create_topics(settings, [TOPIC])
    at = TopicPartition(TOPIC.name, 0)
    requested = Subscription(group="g", topics=[TOPIC.name])
    # A request that waited for the hanging broker would wait this long, and fail.
    patient = KafkaSettings(
        bootstrap_servers=kafka.bootstrap_servers, request_timeout_seconds=HANG_SECONDS
    )
    async with KafkaBus(patient).consumer(requested) as consumer:
        await poll_until(lambda _: bool(consumer.assignment()), consumer)
        await consumer.commit({at: 7})
        coordinator = await coordinator_of(kafka.bootstrap_servers, "g")
        hanging = next(broker for broker in kafka.brokers if broker.node_id == coordinator)
        hanging.process.send(signal.SIGSTOP)
        try:
            assert await consumer.committed(at) == 7
        finally:
            hanging.process.send(signal.SIGCONT)


async def coordinator_of(servers: str, group: str) -> int:
    client = AIOKafkaClient(bootstrap_servers=servers)
    await client.bootstrap()
    try:
        found: int = await client.coordinator_lookup(CoordinationType.GROUP, group)
    finally:
        await client.close()
    return found


async def test_an_unreachable_broker_is_reported_in_one_clear_line() -> None:
    servers = f"127.0.0.1:{free_ports(1)[0]}"
    bus = KafkaBus(settings_of(servers, request_timeout_seconds=3.0))
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[TOPIC.name])) as consumer,
    ):
        for request in (
            producer.publish(TOPIC.name, 0, [numbered(0)]),
            consumer.poll(timeout_seconds=0.1, max_records=1),
            bus.partitions(TOPIC.name),
            create_topics(settings_of(servers), [TOPIC]),
        ):
            with pytest.raises(UnavailableError) as raised:
                await request
            assert f"cannot connect to Kafka at {servers}" in str(raised.value)
            assert "\n" not in str(raised.value)
