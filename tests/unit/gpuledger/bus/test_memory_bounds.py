"""The in-memory bus keeps the newest records of a partition and discards older ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import structlog

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.memory_state import FEWEST_TO_COMPACT, OVERHEAD_BYTES
from gpuledger.bus.protocol import Message, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, TopicsError
from gpuledger.records import PodRecord
from gpuledger.topics import Topic
from tests.errors import has_words
from tests.hanging import HANG_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gpuledger.bus.protocol import Consumer, Record

PARTITION = TopicPartition("readings", 0)
READINGS = Topic(name="readings", record=PodRecord, key="uid", partitions=1)
STATES = Topic(name="states", record=PodRecord, key="uid", partitions=1, cleanup_policy="compact")


def numbered(numbers: Iterable[int], *, key: str | None = "k") -> list[Message]:
    return [
        Message(key=key.encode() if key else None, value=str(number).encode(), timestamp_ms=number)
        for number in numbers
    ]


async def read_all(consumer: Consumer) -> list[Record]:
    polled = await consumer.poll(timeout_seconds=0, max_records=10**6)
    return [record for records in polled.values() for record in records]


async def test_a_partition_keeps_its_newest_records_within_the_bound() -> None:
    bus = MemoryBus([READINGS], max_partition_records=80)
    requested = Subscription(group="g", topics=["readings"])
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        for number in range(1000):
            await producer.publish(*PARTITION, numbered([number]))
        kept = [record.offset for record in await read_all(consumer)]

    assert kept == list(range(kept[0], 1000))
    assert 70 <= len(kept) <= 80


async def test_the_bound_counts_bytes_too() -> None:
    bus = MemoryBus([READINGS], max_partition_bytes=8 * (1000 + OVERHEAD_BYTES))
    requested = Subscription(group="g", topics=["readings"])
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        for number in range(100):
            message = Message(key=b"", value=bytes(1000), timestamp_ms=number)
            await producer.publish(*PARTITION, [message])
        kept = [record.offset for record in await read_all(consumer)]

    assert kept[-1] == 99
    assert 7 <= len(kept) <= 8


async def test_a_consumer_that_fell_behind_skips_to_the_first_kept_record_and_logs_it() -> None:
    bus = MemoryBus([READINGS], max_partition_records=80)
    requested = Subscription(group="g", topics=["readings"])
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        await producer.publish(*PARTITION, numbered(range(10)))
        assert len(await read_all(consumer)) == 10
        for number in range(10, 200):
            await producer.publish(*PARTITION, numbered([number]))
        with structlog.testing.capture_logs() as logged:
            behind = await read_all(consumer)

        first = behind[0].offset
        assert first > 10
        assert [(line["event"], line["count"]) for line in logged] == [
            ("records_missed", first - 10)
        ]
        await consumer.seek(PARTITION, 3)
        assert await consumer.position(PARTITION) == first


async def test_a_consumer_beyond_the_end_restarts_at_the_first_kept_record() -> None:
    bus = MemoryBus([READINGS])
    requested = Subscription(group="g", topics=["readings"])
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        await producer.publish(*PARTITION, numbered(range(3)))
        await read_all(consumer)
        await consumer.seek(PARTITION, 99)

        assert [record.offset for record in await read_all(consumer)] == [0, 1, 2]


async def test_a_compacted_topic_is_compacted_as_it_grows_and_loses_no_state() -> None:
    bus = MemoryBus([STATES], max_partition_records=10)
    requested = Subscription(group="g", topics=["states"])
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        for number in range(20 * FEWEST_TO_COMPACT):
            await producer.publish("states", 0, numbered([number], key=f"pod-{number % 50}"))
        kept = await read_all(consumer)

    assert len(kept) <= FEWEST_TO_COMPACT
    assert {record.key for record in kept} == {f"pod-{number}".encode() for number in range(50)}
    assert kept[-1].offset == 20 * FEWEST_TO_COMPACT - 1


async def test_a_tombstone_survives_one_compaction_but_not_the_next() -> None:
    bus = MemoryBus([STATES])
    async with bus.producer() as producer:
        await producer.publish("states", 0, numbered([1], key="pod-a"))
        await producer.publish("states", 0, [Message(b"pod-a", None, 2)])
        for values in ([None], []):
            bus.compact("states")
            requested = Subscription(group=f"g{values}", topics=["states"])
            async with bus.consumer(requested) as consumer:
                assert [record.value for record in await read_all(consumer)] == values
                partition = TopicPartition("states", 0)
                assert await consumer.position(partition) == 2
                assert await consumer.end_offsets([partition]) == {partition: 2}


async def test_a_compacted_topic_refuses_a_message_without_a_key() -> None:
    bus = MemoryBus([STATES])
    async with bus.producer() as producer:
        with pytest.raises(TopicsError, check=has_words("states")):
            await producer.publish("states", 0, numbered([1, 2], key=None))


async def test_the_partitions_of_a_static_member_wait_for_it_and_then_go_to_others() -> None:
    bus = MemoryBus([READINGS], session_timeout_seconds=0.5)
    lost = asyncio.Event()

    async def observe(partitions: frozenset[TopicPartition]) -> None:
        if partitions:
            lost.set()

    named = Subscription(group="g", topics=["readings"], group_instance_id="a")
    other = Subscription(group="g", topics=["readings"], group_instance_id="b", on_assigned=observe)
    async with bus.consumer(named) as first:
        await read_all(first)
        assert len(first.assignment()) == 1
    async with bus.consumer(other) as second:
        await read_all(second)
        assert second.assignment() == frozenset()
        async with asyncio.timeout(HANG_SECONDS):
            while not lost.is_set():
                await second.poll(timeout_seconds=0.05, max_records=1)

        assert len(second.assignment()) == 1


async def test_a_second_consumer_of_the_same_name_takes_over_from_the_first() -> None:
    bus = MemoryBus([READINGS])
    requested = Subscription(group="g", topics=["readings"], group_instance_id="a")
    async with bus.consumer(requested) as first, bus.consumer(requested) as second:
        await read_all(first)
        await read_all(second)

        assert len(second.assignment()) == 1
        with pytest.raises(BusUnavailableError):
            await read_all(first)


async def test_a_busy_partition_does_not_starve_the_others() -> None:
    topic = Topic(name="readings", record=PodRecord, key="uid", partitions=3)
    bus = MemoryBus([topic])
    requested = Subscription(group="g", topics=["readings"])
    async with bus.producer() as producer, bus.consumer(requested) as consumer:
        for partition in range(3):
            await producer.publish("readings", partition, numbered(range(100)))
        served = set()
        for _ in range(3):
            served |= set(await consumer.poll(timeout_seconds=0, max_records=10))

    assert {at.partition for at in served} == {0, 1, 2}
