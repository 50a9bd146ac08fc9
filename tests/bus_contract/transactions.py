"""Laws of transactions: all or nothing, one writer per id, offsets together with messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import IsolationLevel, Message, TopicPartition
from gpuledger.errors import FencedError, MessageTooLargeError, TopicsError
from tests.bus_contract.harness import (
    incompressible,
    messages,
    poll_once,
    poll_until,
    read,
    reading,
    texts,
)

if TYPE_CHECKING:
    from tests.bus_contract.harness import Harness


class TransactionLaws:
    """Each test opens and closes its own clients."""

    async def test_a_transaction_over_several_topics_is_read_in_order(
        self, harness: Harness
    ) -> None:
        requested = reading(harness, topics=[harness.readings, harness.pods])
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(requested) as consumer,
        ):
            for batch in (("a", "b"), ("c",)):
                await transactions.commit(
                    {
                        TopicPartition(harness.readings, 1): messages(*batch),
                        TopicPartition(harness.pods, 2): messages(*batch),
                    },
                    offsets={},
                    group=harness.group,
                )
            records = await read(6, consumer)

        for topic, partition in ((harness.readings, 1), (harness.pods, 2)):
            of_one = [each for each in records if each.topic == topic]
            assert {each.partition for each in of_one} == {partition}
            assert texts(of_one) == ["a", "b", "c"]

    async def test_a_group_continues_after_the_offsets_of_a_transaction(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 1)
        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("done", "to do"))
        async with harness.bus.transactions(f"{harness.group}-1") as transactions:
            await transactions.commit({}, offsets={partition: 1}, group=harness.group)
        async with harness.bus.consumer(reading(harness)) as consumer:
            assert texts(await read(1, consumer)) == ["to do"]
            assert await consumer.committed(partition) == 1

    async def test_the_next_producer_with_the_same_id_sees_the_offsets_of_a_transaction(
        self, harness: Harness
    ) -> None:
        partition, name = TopicPartition(harness.readings, 0), f"{harness.group}-0"
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*partition, messages("x"))
            for offset in (1, 2, 3):
                async with harness.bus.transactions(name) as transactions:
                    held = {TopicPartition(harness.pods, 0): messages(str(offset))}
                    await transactions.commit(
                        held, offsets={partition: offset}, group=harness.group
                    )
                async with harness.bus.transactions(name):
                    assert await consumer.committed(partition) == offset

    async def test_opening_a_transactional_id_fences_its_former_producer(
        self, harness: Harness
    ) -> None:
        partition, name = TopicPartition(harness.readings, 0), f"{harness.group}-0"
        async with (
            harness.bus.transactions(name) as first,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await first.commit(
                {partition: messages("of the first")}, offsets={}, group=harness.group
            )
            async with harness.bus.transactions(name) as second:
                with pytest.raises(FencedError, match=name):
                    await first.commit(
                        {partition: messages("too late")},
                        offsets={partition: 7},
                        group=harness.group,
                    )
                await second.commit(
                    {partition: messages("of the second")}, offsets={}, group=harness.group
                )
                assert texts(await read(2, consumer)) == ["of the first", "of the second"]
                assert await consumer.committed(partition) is None

    async def test_a_fenced_producer_can_open_the_id_again(self, harness: Harness) -> None:
        partition, name = TopicPartition(harness.readings, 0), f"{harness.group}-0"
        async with harness.bus.transactions(name) as shut_out:
            async with harness.bus.transactions(name):
                pass
            with pytest.raises(FencedError):
                await shut_out.commit({partition: messages("a")}, offsets={}, group=harness.group)
        async with (
            harness.bus.transactions(name) as again,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await again.commit({partition: messages("b")}, offsets={}, group=harness.group)
            assert texts(await read(1, consumer)) == ["b"]

    async def test_producers_with_different_ids_do_not_fence_each_other(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.transactions(f"{harness.group}-0") as one,
            harness.bus.transactions(f"{harness.group}-1") as other,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            for writer, text in ((one, "a"), (other, "b"), (one, "c")):
                await writer.commit({partition: messages(text)}, offsets={}, group=harness.group)
            assert texts(await read(3, consumer)) == ["a", "b", "c"]

    async def test_one_message_that_is_too_large_holds_back_the_whole_transaction(
        self, harness: Harness
    ) -> None:
        small, large = (TopicPartition(harness.readings, number) for number in (0, 1))
        too_large = Message(b"node-b", incompressible(MAX_MESSAGE_BYTES), 1)
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            with pytest.raises(MessageTooLargeError, match="node-b"):
                await transactions.commit(
                    {small: messages("kept back"), large: [too_large]},
                    offsets={small: 9},
                    group=harness.group,
                )
            await transactions.commit({small: messages("b")}, offsets={}, group=harness.group)

            assert texts(await read(1, consumer)) == ["b"]
            assert await consumer.committed(small) is None

    @pytest.mark.parametrize(("topic", "partition"), [("absent", 0), (None, 4)])
    async def test_the_error_names_a_missing_topic_or_partition_and_nothing_is_written(
        self, harness: Harness, topic: str | None, partition: int
    ) -> None:
        at = TopicPartition(harness.readings, 0)
        absent = TopicPartition(topic or harness.readings, partition)
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            with pytest.raises(TopicsError, match=absent.topic):
                await transactions.commit(
                    {at: messages("kept back"), absent: messages("x")},
                    offsets={},
                    group=harness.group,
                )
            await transactions.commit({at: messages("b")}, offsets={}, group=harness.group)

            assert texts(await read(1, consumer)) == ["b"]

    async def test_an_empty_transaction_can_be_committed(self, harness: Harness) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await transactions.commit({partition: []}, offsets={}, group=harness.group)

            assert await consumer.end_offsets([partition]) == {partition: 0}

    async def test_a_position_reaches_the_end_of_a_topic_written_by_transactions(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            for text in "abc":
                await transactions.commit(
                    {partition: messages(text)}, offsets={}, group=harness.group
                )
            await read(3, consumer)
            end = (await consumer.end_offsets([partition]))[partition]
            # Kafka writes a marker, which is not a record, at the end of a transaction; polls skip
            # it.
            while await consumer.position(partition) < end:
                assert await poll_once(consumer) == []

    async def test_a_batch_larger_than_the_limit_is_committed_whole(self, harness: Harness) -> None:
        partition = TopicPartition(harness.readings, 0)
        large = [Message(b"k", incompressible(100_000, seed=number), 1) for number in range(15)]
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await transactions.commit({partition: large}, offsets={}, group=harness.group)
            records = await poll_until(lambda found: len(found) >= 15, consumer)

        assert [each.value for each in records] == [each.value for each in large]

    async def test_an_open_transaction_does_not_block_a_reader_of_uncommitted_records(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 1)
        requested = reading(harness, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(requested) as consumer,
            harness.open_transaction(partition),
        ):
            await producer.publish(*partition, messages("behind it"))
            records = await poll_until(lambda found: "behind it" in texts(found), consumer)
            assert await consumer.end_offsets([partition]) == {partition: records[-1].offset + 1}
            assert consumer.withheld_seconds() == 0

    async def test_a_reader_of_uncommitted_records_also_reads_committed_ones(
        self, harness: Harness
    ) -> None:
        partition = TopicPartition(harness.readings, 1)
        requested = reading(harness, isolation_level=IsolationLevel.READ_UNCOMMITTED)
        async with (
            harness.bus.transactions(f"{harness.group}-0") as transactions,
            harness.bus.consumer(requested) as consumer,
        ):
            for text in ("a", "b"):
                await transactions.commit(
                    {partition: messages(text)}, offsets={}, group=harness.group
                )
            assert texts(await read(2, consumer)) == ["a", "b"]
