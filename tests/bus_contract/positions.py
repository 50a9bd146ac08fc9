"""Laws of positions: commit, seek, pause, and reading after compaction."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.errors import NotAssignedError
from tests.bus_contract.harness import (
    DEADLINE_SECONDS,
    PARTITIONS,
    message,
    messages,
    poll_once,
    poll_until,
    read,
    reading,
    settle,
    texts,
)

if TYPE_CHECKING:
    from tests.bus_contract.harness import Harness


class PositionLaws:
    """Each test opens and closes its own clients."""

    async def test_each_group_reads_everything(self, harness: Harness) -> None:
        async with AsyncExitStack() as opened:
            producer = await opened.enter_async_context(harness.bus.producer())
            await producer.publish(harness.readings, 0, messages("a", "b"))
            for group in ("one", "two"):
                requested = reading(harness, group=f"{harness.group}-{group}")
                consumer = await opened.enter_async_context(harness.bus.consumer(requested))
                assert texts(await read(2, consumer)) == ["a", "b"]

    async def test_a_reopened_consumer_continues_after_the_committed_offset(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 1)
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b", "c"))
        async with harness.bus.consumer(reading(harness)) as consumer:
            await read(3, consumer)
            assert await consumer.committed(partition) is None
            await consumer.commit({partition: 2})
            assert await consumer.committed(partition) == 2
        async with harness.bus.consumer(reading(harness)) as reopened:
            assert texts(await read(1, reopened)) == ["c"]

    async def test_records_that_were_not_committed_are_read_again(self, harness: Harness) -> None:
        async with harness.bus.producer() as producer:
            await producer.publish(harness.readings, 1, messages("a", "b"))
        for _ in range(2):
            async with harness.bus.consumer(reading(harness)) as consumer:
                assert texts(await read(2, consumer)) == ["a", "b"]

    async def test_using_a_partition_that_is_not_assigned_raises_its_own_error(
        self, harness: Harness
    ) -> None:
        """It must differ from an unavailable bus: a retry does not help, only a poll does."""
        partition = TopicPartition(harness.pods, 3)
        async with harness.bus.consumer(reading(harness)) as consumer:
            await settle(consumer)

            for asking in (consumer.commit({partition: 1}), consumer.seek(partition, 1)):
                with pytest.raises(NotAssignedError):
                    await asking
            with pytest.raises(NotAssignedError):
                await consumer.position(partition)

    async def test_a_partition_that_a_rebalance_took_away_is_no_longer_assigned(
        self, harness: Harness
    ) -> None:
        partitions = [TopicPartition(harness.readings, number) for number in range(PARTITIONS)]
        async with (
            harness.bus.consumer(reading(harness)) as staying,
            harness.bus.consumer(reading(harness)) as joining,
        ):
            await settle(staying)
            assert [await staying.position(partition) for partition in partitions] == [
                0
            ] * PARTITIONS
            await settle(staying, joining)
            for partition in joining.assignment():
                with pytest.raises(NotAssignedError):
                    await staying.position(partition)

    async def test_a_paused_partition_waits_and_loses_no_record(self, harness: Harness) -> None:
        paused, other = (TopicPartition(harness.readings, number) for number in (0, 1))
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*paused, messages("a", "b"))
            await poll_until(lambda found: len(found) >= 1, consumer, max_records=1)
            consumer.pause([paused])
            await producer.publish(*paused, messages("c"))
            await producer.publish(*other, messages("of another"))

            assert texts(await read(1, consumer)) == ["of another"]
            assert await poll_once(consumer) == []
            consumer.resume([paused])
            assert texts(await read(2, consumer)) == ["b", "c"]

    async def test_a_partition_is_at_its_end_once_its_last_record_was_polled(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.producer() as producer,
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            assert consumer.at_end() == frozenset()
            await producer.publish(*partition, messages("a", "b"))
            await poll_until(lambda found: len(found) >= 1, consumer, max_records=1)
            assert partition not in consumer.at_end()
            assert texts(await poll_once(consumer)) == ["b"]
            assert partition in consumer.at_end()
            await consumer.seek(partition, 1)
            assert partition not in consumer.at_end()
            await read(1, consumer)

            await transactions.commit({partition: messages("c")}, offsets={}, group=harness.group)
            await read(1, consumer)
            async with asyncio.timeout(DEADLINE_SECONDS):
                # On Kafka, the end of a transaction is a record that no poll returns.
                while partition not in consumer.at_end():
                    assert await poll_once(consumer) == []

    async def test_seek_reads_again_from_its_offset(self, harness: Harness) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*partition, messages("a", "b", "c"))
            await read(3, consumer)
            assert await consumer.position(partition) == 3
            await consumer.seek(partition, 1)
            assert await consumer.position(partition) == 1
            assert texts(await read(2, consumer)) == ["b", "c"]

    async def test_end_offsets_are_the_offsets_of_the_next_records(self, harness: Harness) -> None:
        filled, empty = (TopicPartition(harness.readings, number) for number in (0, 1))
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*filled, messages("a", "b"))

            assert await consumer.end_offsets([filled, empty]) == {filled: 2, empty: 0}

    async def test_compaction_keeps_the_last_record_of_each_key_and_its_offset(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.states, 0)
        written = [message(str(number), key="pod-a") for number in range(10)]
        written += [message("gone soon", key="pod-b"), Message(b"pod-b", None, 5)]
        requested = reading(harness, topics=[harness.states])
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, written)
        # Later than the others by event time, because Kafka closes segments by event time.
        await harness.compact(last=message("last", key="pod-c", at_ms=1_790_000_010_000))
        async with harness.bus.consumer(requested) as consumer:
            records = await read(3, consumer)

            assert [(record.offset, record.key, record.value) for record in records] == [
                (9, b"pod-a", b"9"),
                (11, b"pod-b", None),
                (12, b"pod-c", b"last"),
            ]
            assert await consumer.position(partition) == 13
            assert (await consumer.end_offsets([partition]))[partition] == 13
            await consumer.seek(partition, 3)
            assert texts(await read(3, consumer))[0] == "9"

    async def test_a_poll_returns_at_most_max_records_and_the_rest_later(
        self, harness: Harness
    ) -> None:
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            for number in range(PARTITIONS):
                await producer.publish(harness.readings, number, messages("a", "b", "c"))
            sizes: list[int] = []
            while sum(sizes) < 3 * PARTITIONS:
                sizes.append(len(await poll_once(consumer, max_records=5)))

            assert max(sizes) <= 5
            assert sum(sizes) == 3 * PARTITIONS
