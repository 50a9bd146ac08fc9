"""Laws of publishing: a message is read as it was published, or it is rejected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import MessageTooLargeError, TopicsError
from tests.bus_contract.harness import (
    DEADLINE_SECONDS,
    PARTITIONS,
    incompressible,
    message,
    messages,
    poll_once,
    read,
    reading,
    settle,
    texts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuledger.bus.protocol import Record
    from tests.bus_contract.harness import Harness


class RecordLaws:
    """Each test opens and closes its own clients."""

    async def test_a_partition_is_read_in_the_order_of_publishing(self, harness: Harness) -> None:
        numbered = [str(number) for number in range(50)]
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            for start in range(0, 50, 10):
                batch = messages(*numbered[start : start + 10])
                await producer.publish(harness.readings, 2, batch)
            records = await read(50, consumer)

        assert texts(records) == numbered
        assert [record.offset for record in records] == list(range(50))
        assert {(record.topic, record.partition) for record in records} == {(harness.readings, 2)}

    async def test_publishing_wakes_a_waiting_poll(self, harness: Harness) -> None:
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await settle(consumer)
            waiting = asyncio.create_task(
                consumer.poll(timeout_seconds=DEADLINE_SECONDS, max_records=10)
            )
            await producer.publish(harness.readings, 0, messages("a"))
            async with asyncio.timeout(DEADLINE_SECONDS / 3):
                polled = await waiting

        assert list(polled) == [TopicPartition(harness.readings, 0)]

    async def test_key_value_time_and_tombstone_arrive_as_published(self, harness: Harness) -> None:
        published = [
            Message(key=b"pod-a", value=b'{"uid":1}', timestamp_ms=1_790_000_000_123),
            Message(key=None, value=b"\x00\xff", timestamp_ms=1_790_000_000_122),
            Message(key=b"pod-a", value=None, timestamp_ms=1_790_000_009_999),
        ]
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(harness.readings, 0, published)
            records = await read(3, consumer)

        assert [Message(r.key, r.value, r.timestamp_ms) for r in records] == published

    async def test_a_batch_larger_than_the_limit_arrives_whole_and_in_order(
        self, harness: Harness
    ) -> None:
        large = [incompressible(100_000, seed=number) for number in range(35)]
        published = [Message(b"k", value, 1) for value in large]
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(harness.readings, 0, published)
            records = await read(35, consumer)

        assert [record.value for record in records] == [sent.value for sent in published]

    async def test_a_message_up_to_the_limit_is_accepted_and_a_larger_one_rejected(
        self, harness: Harness
    ) -> None:
        value = incompressible(MAX_MESSAGE_BYTES - len(b"node-b"))
        largest, too_large = Message(b"node-b", value, 1), Message(b"node-b", value + b"x", 1)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            with pytest.raises(MessageTooLargeError, match="node-b"):
                await producer.publish(harness.readings, 0, [message("small"), too_large])
            await producer.publish(harness.readings, 0, [largest])
            records = await read(1, consumer)

        assert [record.value for record in records] == [value]

    @pytest.mark.parametrize(("topic", "partition"), [("absent", 0), (None, 4), (None, -1)])
    async def test_the_error_names_a_topic_or_partition_that_does_not_exist(
        self, harness: Harness, topic: str | None, partition: int
    ) -> None:
        name = topic or harness.readings
        async with harness.bus.producer() as producer:
            with pytest.raises(TopicsError, match=name):
                await producer.publish(name, partition, messages("a"))

    async def test_consuming_a_topic_that_does_not_exist_raises_an_error(
        self, harness: Harness
    ) -> None:
        with pytest.raises(TopicsError, match="absent"):
            async with harness.bus.consumer(reading(harness, topics=["absent"])) as consumer:
                await poll_once(consumer)

    async def test_publishing_an_empty_batch_does_nothing(self, harness: Harness) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*partition, [])

            assert await consumer.end_offsets([partition]) == {partition: 0}

    async def test_the_bus_returns_the_number_of_partitions(self, harness: Harness) -> None:
        assert await harness.bus.partitions(harness.readings) == PARTITIONS
        with pytest.raises(TopicsError, match="absent"):
            await harness.bus.partitions("absent")

    async def test_an_open_producer_finds_the_id_of_a_recreated_topic(
        self, harness: Harness
    ) -> None:
        async with harness.bus.producer() as producer:
            await producer.publish(harness.readings, 0, messages("a"))
            before = await harness.bus.topic_id(harness.readings)
            assert before
            assert before == (await harness.bus.describe(harness.readings)).topic_id
            await harness.recreate(harness.readings)
            async with asyncio.timeout(DEADLINE_SECONDS):
                # The broker may not know the new topic at once.
                while await harness.bus.topic_id(harness.readings) in (before, None):  # noqa: ASYNC110 - the bus has no event for this
                    await asyncio.sleep(0.05)
            assert await harness.bus.topic_id("absent") is None

    async def test_concurrent_publishers_each_keep_their_own_order(self, harness: Harness) -> None:
        async def publish(name: str) -> None:
            for number in range(10):
                batch: Sequence[Message] = messages(f"{name} {number}")
                await producer.publish(harness.readings, 0, batch)

        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await asyncio.gather(*(publish(name) for name in "abc"))
            found = texts(await read(30, consumer))

        for name in "abc":
            of_one = [text for text in found if text.startswith(name)]
            assert of_one == [f"{name} {number}" for number in range(10)]

    async def test_partitions_take_turns_whatever_the_backlog_of_one_of_them(
        self, harness: Harness
    ) -> None:
        """Otherwise a batch of many small records would delay all other partitions by minutes."""
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            for partition in range(PARTITIONS):
                await producer.publish(harness.readings, partition, messages(*"x" * 5_000))
            first = await read(1, consumer)
            polled: list[Record] = []
            while len(polled) < 20 * 100:
                polled += await poll_once(consumer, max_records=100)

        assert len({record.partition for record in [*first[:100], *polled]}) == PARTITIONS
