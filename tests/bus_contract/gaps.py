"""Laws of gaps: a consumer reports the offsets that it can no longer read, and only those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.protocol import Gap, GapReason, TopicPartition
from gpuledger.errors import TopicsError
from tests.bus_contract.harness import (
    PARTITIONS,
    message,
    messages,
    poll_until,
    read,
    reading,
    settle,
    texts,
)
from tests.errors import has_words

if TYPE_CHECKING:
    from gpuledger.bus.protocol import GapCallback
    from tests.bus_contract.harness import Harness

BEFORE_MS, AFTER_MS = 1_790_000_001_000, 1_790_000_009_000


def keeping(gaps: list[Gap]) -> GapCallback:
    async def keep(gap: Gap) -> None:
        gaps.append(gap)

    return keep


class GapLaws:
    """Each test opens and closes its own clients."""

    async def test_a_new_group_reports_no_gap_for_records_removed_before_it(
        self, harness: Harness
    ) -> None:
        partition, gaps = TopicPartition(harness.readings, 0), list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b", "c"))
        await harness.remove_before(partition, 2)

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            assert texts(await read(1, consumer)) == ["c"]
            await consumer.seek(partition, 0)
            assert texts(await read(1, consumer)) == ["c"]

        assert gaps == []

    async def test_records_removed_while_the_group_is_not_running_are_a_gap(
        self, harness: Harness
    ) -> None:
        partition, gaps = TopicPartition(harness.readings, 1), list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b", "c"))
            async with harness.bus.consumer(reading(harness)) as consumer:
                await read(3, consumer)
                await consumer.commit({partition: 1})
            await producer.publish(*partition, [message("d", at_ms=AFTER_MS)])
        await harness.remove_before(partition, 3)

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            assert texts(await read(1, consumer)) == ["d"]

        assert gaps == [
            Gap(
                partition=partition,
                first_offset=1,
                next_offset=3,
                reason=GapReason.RETENTION,
                time_after_ms=AFTER_MS,
            )
        ]
        assert gaps[0].missed == 2

    async def test_records_removed_while_a_consumer_waits_are_a_gap(self, harness: Harness) -> None:
        partition, gaps = TopicPartition(harness.readings, 2), list[Gap]()
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer,
        ):
            await producer.publish(*partition, [message("a", at_ms=BEFORE_MS)])
            await read(1, consumer)
            consumer.pause([partition])
            await producer.publish(*partition, messages("b", "c", "d"))
            await producer.publish(*partition, [message("e", at_ms=AFTER_MS)])
            await harness.remove_before(partition, 4)
            # The client would still return records that it had fetched before their removal.
            await consumer.seek(partition, 1)
            consumer.resume([partition])

            assert texts(await read(1, consumer)) == ["e"]

        assert gaps == [
            Gap(
                partition=partition,
                first_offset=1,
                next_offset=4,
                reason=GapReason.RETENTION,
                time_before_ms=BEFORE_MS,
                time_after_ms=AFTER_MS,
            )
        ]

    async def test_a_gap_is_reported_once_even_if_the_consumer_seeks_back_to_it(
        self, harness: Harness
    ) -> None:
        """A component seeks to its own transaction's or table's offset, maybe after a poll."""
        partition, gaps = TopicPartition(harness.readings, 3), list[Gap]()
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer,
        ):
            await producer.publish(*partition, messages(*"abcdef"))
            await read(6, consumer)
            await harness.remove_before(partition, 3)
            for _ in range(2):
                await consumer.seek(partition, 1)
                assert texts(await read(3, consumer)) == ["d", "e", "f"]
            await harness.remove_before(partition, 5)
            await consumer.seek(partition, 1)
            assert texts(await read(1, consumer)) == ["f"]

        assert [(gap.first_offset, gap.next_offset) for gap in gaps] == [(1, 3), (3, 5)]

    async def test_a_gap_is_reported_even_if_no_record_follows_it(self, harness: Harness) -> None:
        partition, gaps = TopicPartition(harness.readings, 0), list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b", "c"))
        async with harness.bus.consumer(reading(harness)) as consumer:
            await settle(consumer)
            await consumer.commit({partition: 1})
        await harness.remove_before(partition, 3)

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            await poll_until(lambda _: bool(gaps), consumer)

        assert [(gap.first_offset, gap.next_offset, gap.time_after_ms) for gap in gaps] == [
            (1, 3, None)
        ]

    async def test_a_recreated_topic_is_read_from_its_beginning(self, harness: Harness) -> None:
        """Even if it has more records than the offset that was committed for the old one."""
        partition, gaps = TopicPartition(harness.readings, 0), list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b"))
        async with harness.bus.consumer(reading(harness)) as consumer:
            await read(2, consumer)
            before = await consumer.topic_id(harness.readings)
            await consumer.commit({partition: 2})
        await harness.recreate(harness.readings)
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("A", "B", "C", "D"))

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            assert texts(await read(4, consumer)) == ["A", "B", "C", "D"]
            assert await consumer.topic_id(harness.readings) != before
            assert await consumer.committed(partition) is None
            for _ in range(2):
                await consumer.report_recreated(partition, topic_id=str(before), read_before=2)

        # Kafka deletes the group's offsets with the topic, so only the component knows the gap.
        (gap,) = [gap for gap in gaps if gap.partition == partition]
        assert (gap.first_offset, gap.next_offset) == (2, 0)
        assert (gap.reason, gap.missed) == (GapReason.TOPIC_RECREATED, None)

    async def test_recreating_a_topic_during_reading_reassigns_its_partitions_and_reports_the_gap(
        self, harness: Harness
    ) -> None:
        partition, gaps, notes = TopicPartition(harness.readings, 0), list[Gap](), list[str]()

        async def revoked(_: frozenset[TopicPartition]) -> None:
            notes.append("revoked")

        requested = reading(harness, on_gap=keeping(gaps), on_revoked=revoked)
        async with harness.bus.consumer(requested) as consumer:
            async with harness.bus.producer() as producer:
                await producer.publish(*partition, [message("a", at_ms=BEFORE_MS), message("b")])
            await read(2, consumer)
            before = await consumer.topic_id(harness.readings)
            await consumer.commit({partition: 1})
            await harness.recreate(harness.readings)
            async with harness.bus.producer() as producer:
                await producer.publish(*partition, messages("A", "B", "C", "D"))

            found = await poll_until(lambda got: len(texts(got)) >= 4, consumer)

            assert texts(found)[-4:] == ["A", "B", "C", "D"]
            assert notes == ["revoked"]
            await consumer.report_recreated(partition, topic_id=str(before), read_before=2)
        (gap,) = [gap for gap in gaps if gap.partition == partition]
        assert (gap.first_offset, gap.next_offset) == (2, 0)
        assert (gap.reason, gap.missed) == (GapReason.TOPIC_RECREATED, None)

    async def test_a_commit_for_the_old_topic_has_no_effect_on_the_recreated_one(
        self, harness: Harness
    ) -> None:
        """A worker that has not noticed the change yet commits what it read from the old topic."""
        partition, other = (TopicPartition(harness.readings, number) for number in (0, 1))
        async with (
            harness.bus.producer() as producer,
            harness.bus.transactions(f"{harness.group}-writer") as transactions,
        ):
            for each in (partition, other):
                await producer.publish(*each, messages("a", "b"))
            async with harness.bus.consumer(reading(harness)) as consumer:
                await read(4, consumer)
                await harness.recreate(harness.readings)
                await transactions.commit({}, offsets={partition: 2}, group=harness.group)
                await consumer.commit({other: 2})
        async with harness.bus.producer() as producer:
            for each in (partition, other):
                await producer.publish(*each, messages("A", "B", "C"))

        async with harness.bus.consumer(reading(harness)) as consumer:
            assert sorted(texts(await read(6, consumer))) == ["A", "A", "B", "B", "C", "C"]
            assert await consumer.committed(partition) is None
            assert await consumer.committed(other) is None

    async def test_an_offset_that_another_program_moved_forward_is_a_gap_until_it_is_committed(
        self, harness: Harness
    ) -> None:
        partition, gaps = TopicPartition(harness.readings, 0), list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages(*"abcdef"))
        await commit_one(harness, partition)
        await harness.move_offset(partition, 4)

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            assert texts(await read(2, consumer)) == ["e", "f"]
            for _ in range(2):
                assert await consumer.committed(partition) == 4
                assert await consumer.report_moved(partition, read_before=1)
            await consumer.commit({partition: 4})
            assert await consumer.committed(partition) == 4
            assert not await consumer.report_moved(partition, read_before=1)

        (gap,) = gaps
        assert (gap.reason, gap.first_offset, gap.next_offset) == (GapReason.MOVED, 1, 4)
        assert gap.missed == 3

    async def test_the_size_of_a_gap_is_unknown_if_the_component_does_not_know_what_it_read(
        self, harness: Harness
    ) -> None:
        moved, first = (TopicPartition(harness.readings, number) for number in (0, 1))
        gaps = list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*moved, messages(*"abcd"))
        await harness.move_offset(moved, 4)
        await harness.move_offset(first, 0)

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            await settle(consumer)
            for partition in (moved, first):
                await consumer.committed(partition)
                assert await consumer.report_moved(partition, read_before=None)

        assert [(gap.partition, gap.next_offset, gap.missed) for gap in gaps] == [(moved, 4, None)]

    async def test_an_offset_that_another_program_moved_back_is_no_gap(
        self, harness: Harness
    ) -> None:
        partition, gaps = TopicPartition(harness.readings, 0), list[Gap]()
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b"))
        await commit_one(harness, partition)
        await harness.move_offset(partition, 0)

        async with harness.bus.consumer(reading(harness, on_gap=keeping(gaps))) as consumer:
            assert texts(await read(2, consumer)) == ["a", "b"]
            await consumer.committed(partition)
            assert await consumer.report_moved(partition, read_before=1)

        assert gaps == []

    async def test_commits_of_the_group_itself_are_not_moved(self, harness: Harness) -> None:
        partitions = [TopicPartition(harness.readings, number) for number in (0, 1, 2)]
        by_consumer, by_writer, without = partitions
        async with (
            harness.bus.consumer(reading(harness)) as consumer,
            harness.bus.transactions(f"{harness.group}-writer") as transactions,
        ):
            await settle(consumer)
            await consumer.commit({by_consumer: 1})
            await transactions.commit({}, offsets={by_writer: 1}, group=harness.group)
            for partition, offset in ((by_consumer, 1), (by_writer, 1), (without, None)):
                assert await consumer.committed(partition) == offset
                assert not await consumer.report_moved(partition, read_before=None)

    async def test_a_group_that_has_read_a_topic_refuses_added_partitions(
        self, harness: Harness
    ) -> None:
        """While it reads and when it starts; a new group reads them."""
        partition = TopicPartition(harness.readings, 0)
        words = has_words(harness.readings, f"has {2 * PARTITIONS}", f"had {PARTITIONS}")
        async with harness.bus.consumer(reading(harness)) as consumer:
            await settle(consumer)
            await consumer.commit({partition: 0})
            await harness.add_partitions(harness.readings, 2 * PARTITIONS)
            with pytest.raises(TopicsError, check=words):
                await poll_until(lambda _: False, consumer)
        async with harness.bus.consumer(reading(harness)) as consumer:
            with pytest.raises(TopicsError, check=words):
                await poll_until(lambda _: False, consumer)

        new = reading(harness, group=f"{harness.group}-new")
        async with harness.bus.consumer(new) as consumer:
            await poll_until(lambda _: len(consumer.assignment()) == 2 * PARTITIONS, consumer)


async def commit_one(harness: Harness, partition: TopicPartition) -> None:
    async with harness.bus.consumer(reading(harness)) as consumer:
        await settle(consumer)
        await consumer.commit({partition: 1})
