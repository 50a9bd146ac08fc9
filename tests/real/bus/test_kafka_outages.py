"""The Kafka bus where a broker is away, comes back, is far behind, or wants a login."""

from __future__ import annotations

import asyncio
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
from gpuledger.errors import BusUnavailableError, UnavailableError
from gpuledger.records import PodRecord
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.topics import Topic
from tests.bus_contract.harness import DEADLINE_SECONDS, poll_once, poll_until, texts
from tests.real.parts.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gpuledger.bus.protocol import Consumer, Producer, Record
    from tests.real.parts.kafka import Kafka
    from tests.real.parts.secure_kafka import SecureKafka

TOPIC = Topic(name="readings", record=PodRecord, key="uid", partitions=2)


def settings_of(servers: str, **others: object) -> KafkaSettings:
    given = {"request_timeout_seconds": 10.0, "session_timeout_seconds": 6.0, **others}
    return KafkaSettings(bootstrap_servers=servers, **given)  # type: ignore[arg-type]  # keywords of KafkaSettings


def numbered(number: int) -> Message:
    return Message(key=b"node-a", value=str(number).encode(), timestamp_ms=number)


async def publish_numbers(
    producer: Producer, *, partition: int, until: asyncio.Event
) -> tuple[list[int], int]:
    """Publish 0, 1, 2… as an agent would: again after a failure, the next after its success."""
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


async def collect(consumer: Consumer, into: list[Record], *, until: asyncio.Event) -> None:
    while not until.is_set():
        try:
            into += await poll_once(consumer)
        except BusUnavailableError:
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_nothing_acknowledged_is_lost_or_out_of_order_over_a_restart(
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
        await asyncio.sleep(1.5)
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
        # Idempotent within one producer; one that was replaced may write its last batch twice.
        found = [int(r.value or b"") for r in records if r.partition == partition]
        assert sorted(set(found)) == list(range(max(found) + 1))
        assert found == sorted(found)
        assert set(expected) <= set(found)
        offsets = [record.offset for record in records if record.partition == partition]
        assert offsets == sorted(set(offsets))


def _is_complete(records: list[Record], acknowledged: list[list[int]]) -> bool:
    found = {(record.partition, int(record.value or b"")) for record in records}
    wanted = {(place, number) for place, numbers in enumerate(acknowledged) for number in numbers}
    return wanted <= found


async def test_a_publish_does_not_outlast_its_deadline_and_the_next_one_works(
    start_kafka: Callable[[], Kafka],
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers, request_timeout_seconds=2.0)
    await create_topics(settings, [TOPIC])
    async with KafkaBus(settings).producer() as producer:
        await producer.publish(TOPIC.name, 0, [numbered(0)])
        kafka.kill()
        began = time.monotonic()
        with pytest.raises(BusUnavailableError, match=f"{TOPIC.name}-0.*within 2 s"):
            await producer.publish(TOPIC.name, 0, [numbered(1)])
        assert time.monotonic() - began < 4

        with pytest.raises(BusUnavailableError, match=f"no broker of {kafka.bootstrap_servers}"):
            await producer.publish(TOPIC.name, 0, [numbered(1)])
        await asyncio.to_thread(kafka.start)
        await producer.publish(TOPIC.name, 0, [numbered(1)])


async def test_a_bus_closes_in_time_while_its_broker_is_away(
    start_kafka: Callable[[], Kafka],
) -> None:
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [TOPIC])
    bus = KafkaBus(settings)
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[TOPIC.name])) as consumer,
    ):
        await producer.publish(TOPIC.name, 0, [numbered(0)])
        await poll_until(bool, consumer)
        kafka.kill()
        waiting = asyncio.create_task(producer.publish(TOPIC.name, 0, [numbered(1)]))
        await asyncio.sleep(0.5)
        waiting.cancel()
        began = time.monotonic()
    # Of the 10 s that a process has after SIGTERM.
    assert time.monotonic() - began < 8


async def test_a_poll_says_that_the_brokers_are_away_and_goes_on_when_they_are_back(
    start_kafka: Callable[[], Kafka], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuledger.bus.kafka_consumer.SILENCE_SECONDS", 2.0)
    kafka = start_kafka()
    settings = settings_of(kafka.bootstrap_servers)
    await create_topics(settings, [TOPIC])
    bus = KafkaBus(settings)
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[TOPIC.name])) as consumer,
    ):
        await producer.publish(TOPIC.name, 0, [numbered(0)])
        await poll_until(bool, consumer)
        kafka.kill()
        with pytest.raises(BusUnavailableError, match=kafka.bootstrap_servers):
            await poll_until(lambda _: False, consumer)
        await asyncio.to_thread(kafka.start)
        await producer.publish(TOPIC.name, 0, [numbered(1)])
        found: list[Record] = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not found or found[-1].value != b"1":
                try:
                    found += await poll_once(consumer)
                except BusUnavailableError:
                    await asyncio.sleep(0.2)


async def test_an_unreachable_broker_is_one_clear_line() -> None:
    servers = f"127.0.0.1:{free_ports(1)[0]}"
    bus = KafkaBus(settings_of(servers, request_timeout_seconds=3.0))
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[TOPIC.name])) as consumer,
    ):
        for asking in (
            producer.publish(TOPIC.name, 0, [numbered(0)]),
            consumer.poll(timeout_seconds=0.1, max_records=1),
            bus.partitions(TOPIC.name),
            create_topics(settings_of(servers), [TOPIC]),
        ):
            with pytest.raises(UnavailableError) as raised:
                await asking
            assert f"no broker of {servers} can be used" in str(raised.value)
            assert "\n" not in str(raised.value)


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


def secured(kafka: SecureKafka, **others: object) -> KafkaSettings:
    given: dict[str, object] = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": kafka.username,
        "sasl_password": Secret(kafka.password),
        "ssl_ca_file": kafka.ca_file,
        "request_timeout_seconds": 5.0,
    }
    return settings_of(kafka.bootstrap_servers, **(given | others))


async def test_records_pass_over_tls_with_a_login(secure_kafka: SecureKafka) -> None:
    topic = Topic(name=f"secure-{uuid4().hex[:8]}", record=PodRecord, key="uid", partitions=1)
    settings = secured(secure_kafka)
    await create_topics(settings, [topic])
    bus = KafkaBus(settings)
    async with (
        bus.producer() as producer,
        bus.consumer(Subscription(group="g", topics=[topic.name])) as consumer,
    ):
        await producer.publish(topic.name, 0, [numbered(1)])
        records = await poll_until(bool, consumer)
        await consumer.commit({TopicPartition(topic.name, 0): 1})

    assert texts(records) == ["1"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"sasl_password": Secret("wrong")}, "SaslAuthenticationFailed"),
        ({"sasl_mechanism": "SCRAM-SHA-256"}, "UnsupportedSaslMechanism"),
        ({"ssl_ca_file": None}, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
async def test_a_refused_login_or_certificate_says_why_and_shows_no_password(
    secure_kafka: SecureKafka, other: dict[str, object], reason: str
) -> None:
    bus = KafkaBus(secured(secure_kafka, **other))

    with pytest.raises(BusUnavailableError, match=reason) as raised:
        await bus.partitions("any")

    assert "refused the protocol, the certificate or the login" in str(raised.value)
    assert "wrong" not in str(raised.value)


async def test_an_unreadable_certificate_names_its_setting(tmp_path: Path) -> None:
    absent = tmp_path / "ca.pem"
    bus = KafkaBus(settings_of("localhost:9", security_protocol="SSL", ssl_ca_file=absent))

    with pytest.raises(Exception, match=r"kafka\.ssl_ca_file.*ca\.pem"):
        await bus.partitions("any")


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


def _inside(client: KafkaProducer | KafkaConsumer) -> Any:  # noqa: ANN401  # aiokafka is untyped
    assert client._client is not None
    return client._client


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
