"""Errors for a user without a permission on a topic, and leftovers of a denied commit."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Message, Subscription, TopicPartition
from gpuledger.errors import GpuledgerError, RefusedError, TopicsError
from gpuledger.records import PodRecord
from gpuledger.settings import KafkaSettings, Secret
from gpuledger.topics import Topic
from tests.real.bus.builders import numbered, settings_of
from tests.real.services.authorizing_kafka import Operation, Resource, Right

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.authorizing_kafka import AuthorizingKafka

SEEN = Topic(name="seen", record=PodRecord, key="uid", partitions=8)
HIDDEN = Topic(name="hidden", record=PodRecord, key="uid", partitions=1)
GROUP = "g"
SETTLE_SECONDS = 1.0


@pytest.fixture
async def kafka(start_authorizing_kafka: Callable[[], AuthorizingKafka]) -> AuthorizingKafka:
    kafka = await asyncio.to_thread(start_authorizing_kafka)
    await create_topics(
        KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers), [SEEN, HIDDEN]
    )
    user = kafka.username
    await kafka.allow(
        [
            Right(user, Operation.Read, Resource.TOPIC, SEEN.name),
            Right(user, Operation.Write, Resource.TOPIC, "own"),
            Right(user, Operation.Describe, Resource.TOPIC, "absent"),
            Right(user, Operation.Read, Resource.GROUP, GROUP),
            Right(user, Operation.Write, Resource.TRANSACTIONAL_ID, GROUP),
        ]
    )
    await asyncio.sleep(SETTLE_SECONDS)
    return kafka


def settings(kafka: AuthorizingKafka) -> KafkaSettings:
    return settings_of(
        kafka.bootstrap_servers,
        security_protocol="SASL_SSL",
        sasl_username=kafka.username,
        sasl_password=Secret(kafka.password),
        ssl_ca_file=kafka.ca_file,
    )


async def raised(doing: Any) -> GpuledgerError:  # noqa: ANN401  # any coroutine
    with pytest.raises(GpuledgerError) as caught:
        await doing
    return caught.value


async def test_a_topic_that_is_denied_is_distinguished_from_a_missing_one(
    kafka: AuthorizingKafka,
) -> None:
    bus = KafkaBus(settings(kafka))
    async with bus.producer() as producer:
        reported = {
            "looked up": await raised(bus.partitions(HIDDEN.name)),
            "written": await raised(producer.publish(HIDDEN.name, 0, [numbered(1)])),
        }
        absent = [
            await raised(bus.partitions("absent")),
            await raised(producer.publish("absent", 0, [numbered(1)])),
        ]
    async with bus.consumer(Subscription(group=GROUP, topics=[HIDDEN.name])) as consumer:
        reported["read"] = await raised(consumer.poll(timeout_seconds=1.0, max_records=1))

    for how, error in reported.items():
        assert isinstance(error, RefusedError), (how, error)
        assert f"denies this user access to the topic {HIDDEN.name}; grant it" in str(error)
        assert "topics create" not in str(error)
    assert str(reported["written"]).endswith("grant it Write")
    assert str(reported["read"]).endswith("grant it Read")
    for error in absent:
        assert isinstance(error, TopicsError)
        assert "there is no topic absent on" in str(error)


async def test_a_commit_without_write_permission_leaves_no_unread_exception(
    kafka: AuthorizingKafka,
) -> None:
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, message: unseen.append(message))
    bus = KafkaBus(settings(kafka))
    partitions = [TopicPartition(SEEN.name, number) for number in range(SEEN.partitions)]
    for _ in range(5):
        async with bus.transactions(GROUP) as transactions:
            batches = {partition: [numbered(1)] for partition in partitions}
            doing = transactions.commit(batches, offsets={partitions[0]: 1}, group=GROUP)
            error = await raised(doing)
            assert isinstance(error, RefusedError), error
            del error, doing
        gc.collect()
        await asyncio.sleep(0.1)

    assert unseen == []


async def test_a_commit_of_many_batches_without_write_permission_names_the_permission(
    kafka: AuthorizingKafka,
) -> None:
    """The client accepts no more batches after the first is denied, without giving a reason."""
    partition = TopicPartition(SEEN.name, 0)
    large = [Message(key=b"k", value=bytes(900_000), timestamp_ms=0) for _ in range(6)]
    async with KafkaBus(settings(kafka)).transactions(GROUP) as transactions:
        error = await raised(transactions.commit({partition: large}, offsets={}, group=GROUP))

    assert isinstance(error, RefusedError)
    assert SEEN.name in str(error)
    assert "AssertionError" not in str(error)
