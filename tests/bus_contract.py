"""What every bus promises. Each bus has one test class that inherits these laws.

Its module gives a `harness` fixture: the bus, with topics and a group of this test alone.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, MessageTooLargeError, TopicsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gpuledger.bus.protocol import Bus, Consumer, PartitionsCallback, Record

PARTITIONS = 4
DEADLINE_SECONDS = 30.0
IDLE_SECONDS = 0.05


class Harness(Protocol):
    """A bus with topics of this test alone."""

    bus: Bus
    readings: str
    """A topic with 4 partitions."""
    pods: str
    """Another topic with 4 partitions."""
    states: str
    """A compacted topic with 1 partition."""
    group: str

    async def compact(self, *, last: Message) -> None:
        """Publish one more message to `states`, and see that everything before it is compacted."""


def message(text: str, *, key: str = "node-a", at_ms: int = 1_790_000_000_000) -> Message:
    return Message(key=key.encode(), value=text.encode(), timestamp_ms=at_ms)


def messages(*texts: str) -> list[Message]:
    return [message(text) for text in texts]


def texts(records: Iterable[Record]) -> list[str]:
    return [(record.value or b"(tombstone)").decode() for record in records]


def reading(harness: Harness, **settings: object) -> Subscription:
    asked = {"group": harness.group, "topics": [harness.readings], **settings}
    return Subscription(**asked)  # type: ignore[arg-type]  # the keywords of a Subscription


async def poll_once(consumer: Consumer, *, max_records: int = 1000) -> list[Record]:
    polled = await consumer.poll(timeout_seconds=IDLE_SECONDS, max_records=max_records)
    return [record for records in polled.values() for record in records]


async def poll_until(
    is_enough: Callable[[list[Record]], bool], *consumers: Consumer, max_records: int = 1000
) -> list[Record]:
    """Poll all consumers together, as processes of their own would, until it is enough."""
    found: list[Record] = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not is_enough(found):
            polls = (poll_once(consumer, max_records=max_records) for consumer in consumers)
            for records in await asyncio.gather(*polls):
                found += records
    return found


async def read(count: int, *consumers: Consumer) -> list[Record]:
    return await poll_until(lambda found: len(found) >= count, *consumers)


async def settle(*consumers: Consumer, topics: int = 1) -> list[Record]:
    """Poll until the consumers hold all partitions between them; give what came meanwhile."""

    def is_settled(_: list[Record]) -> bool:
        held = [consumer.assignment() for consumer in consumers]
        return all(held) and sum(map(len, held)) == topics * PARTITIONS

    return await poll_until(is_settled, *consumers)


def noting(notes: list[str], what: str) -> PartitionsCallback:
    async def note(partitions: frozenset[TopicPartition]) -> None:
        notes.append(f"{what} {len(partitions)}")

    return note


class BusContract:
    """The laws. Each test opens what it needs and leaves nothing open."""

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

    async def test_each_group_reads_everything(self, harness: Harness) -> None:
        async with AsyncExitStack() as opened:
            producer = await opened.enter_async_context(harness.bus.producer())
            await producer.publish(harness.readings, 0, messages("a", "b"))
            for group in ("one", "two"):
                asked = reading(harness, group=f"{harness.group}-{group}")
                consumer = await opened.enter_async_context(harness.bus.consumer(asked))
                assert texts(await read(2, consumer)) == ["a", "b"]

    async def test_members_share_partitions_and_equal_numbers_stay_together(
        self, harness: Harness
    ) -> None:
        asked = reading(harness, topics=[harness.readings, harness.pods])
        async with (
            harness.bus.consumer(asked) as first,
            harness.bus.consumer(asked) as second,
        ):
            await settle(first, second, topics=2)

            held = [consumer.assignment() for consumer in (first, second)]
        assert not held[0] & held[1]
        for partitions in held:
            of_readings = {place.partition for place in partitions if place[0] == harness.readings}
            of_pods = {place.partition for place in partitions if place[0] == harness.pods}
            assert of_readings == of_pods
            assert len(of_readings) == PARTITIONS // 2

    async def test_members_read_everything_once_between_them(self, harness: Harness) -> None:
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as first,
            harness.bus.consumer(reading(harness)) as second,
        ):
            await settle(first, second)
            for partition in range(PARTITIONS):
                await producer.publish(harness.readings, partition, messages(f"of {partition}"))
            records = await read(PARTITIONS, first, second)
            records += await poll_once(first) + await poll_once(second)

        assert sorted(texts(records)) == [f"of {number}" for number in range(PARTITIONS)]

    async def test_a_member_that_leaves_hands_its_partitions_on(self, harness: Harness) -> None:
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as staying,
        ):
            async with harness.bus.consumer(reading(harness)) as leaving:
                await settle(staying, leaving)
            await settle(staying)
            for partition in range(PARTITIONS):
                await producer.publish(harness.readings, partition, messages("x"))

            assert len(await read(PARTITIONS, staying)) == PARTITIONS

    async def test_a_reopened_consumer_goes_on_after_what_was_committed(
        self, harness: Harness
    ) -> None:
        place = TopicPartition(harness.readings, 1)
        async with harness.bus.producer() as producer:
            await producer.publish(*place, messages("a", "b", "c"))
        async with harness.bus.consumer(reading(harness)) as consumer:
            await read(3, consumer)
            assert await consumer.committed(place) is None
            await consumer.commit({place: 2})
            assert await consumer.committed(place) == 2
        async with harness.bus.consumer(reading(harness)) as reopened:
            assert texts(await read(1, reopened)) == ["c"]

    async def test_what_was_not_committed_is_read_again(self, harness: Harness) -> None:
        async with harness.bus.producer() as producer:
            await producer.publish(harness.readings, 1, messages("a", "b"))
        for _ in range(2):
            async with harness.bus.consumer(reading(harness)) as consumer:
                assert texts(await read(2, consumer)) == ["a", "b"]

    async def test_a_partition_that_is_not_held_cannot_be_committed(self, harness: Harness) -> None:
        async with harness.bus.consumer(reading(harness)) as consumer:
            await settle(consumer)

            with pytest.raises(BusUnavailableError, match=f"{harness.pods}-3 is not held"):
                await consumer.commit({TopicPartition(harness.pods, 3): 1})

    async def test_a_paused_partition_waits_and_loses_nothing(self, harness: Harness) -> None:
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

    async def test_seek_reads_again_from_there(self, harness: Harness) -> None:
        place = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*place, messages("a", "b", "c"))
            await read(3, consumer)
            assert await consumer.position(place) == 3
            await consumer.seek(place, 1)
            assert await consumer.position(place) == 1
            assert texts(await read(2, consumer)) == ["b", "c"]

    async def test_end_offsets_are_those_of_the_next_records(self, harness: Harness) -> None:
        filled, empty = (TopicPartition(harness.readings, number) for number in (0, 1))
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*filled, messages("a", "b"))

            assert await consumer.end_offsets([filled, empty]) == {filled: 2, empty: 0}

    async def test_compaction_keeps_the_last_of_each_key_and_its_offset(
        self, harness: Harness
    ) -> None:
        place = TopicPartition(harness.states, 0)
        written = [message(str(number), key="pod-a") for number in range(10)]
        written += [message("gone soon", key="pod-b"), Message(b"pod-b", None, 5)]
        asked = reading(harness, topics=[harness.states])
        async with harness.bus.producer() as producer:
            await producer.publish(*place, written)
        # Later than the others by event time, which is what Kafka closes a segment by.
        await harness.compact(last=message("last", key="pod-c", at_ms=1_790_000_010_000))
        async with harness.bus.consumer(asked) as consumer:
            records = await read(3, consumer)

            assert [(record.offset, record.key, record.value) for record in records] == [
                (9, b"pod-a", b"9"),
                (11, b"pod-b", None),
                (12, b"pod-c", b"last"),
            ]
            assert await consumer.position(place) == 13
            assert (await consumer.end_offsets([place]))[place] == 13
            await consumer.seek(place, 3)
            assert texts(await read(3, consumer))[0] == "9"

    async def test_partitions_are_assigned_before_their_records_come(
        self, harness: Harness
    ) -> None:
        notes: list[str] = []
        asked = reading(harness, on_assigned=noting(notes, "assigned"))
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(asked) as consumer,
        ):
            await producer.publish(harness.readings, 0, messages("a"))
            assert consumer.assignment() == frozenset()
            while not await poll_once(consumer):
                pass

            assert notes == [f"assigned {PARTITIONS}"]
            assert len(consumer.assignment()) == PARTITIONS

    async def test_callbacks_tell_of_a_rebalance_on_both_sides(self, harness: Harness) -> None:
        notes: list[str] = []
        asked = reading(
            harness,
            on_assigned=noting(notes, "assigned"),
            on_revoked=noting(notes, "revoked"),
        )
        async with harness.bus.consumer(asked) as staying:
            await settle(staying)
            async with harness.bus.consumer(reading(harness)) as joining:
                await settle(staying, joining)
            await settle(staying)

        half = PARTITIONS // 2
        assert notes == [
            f"assigned {PARTITIONS}",
            f"revoked {PARTITIONS}",
            f"assigned {half}",
            f"revoked {half}",
            f"assigned {PARTITIONS}",
            f"revoked {PARTITIONS}",
        ]

    async def test_what_is_committed_on_revocation_is_where_the_next_member_begins(
        self, harness: Harness
    ) -> None:
        places = [TopicPartition(harness.readings, number) for number in range(PARTITIONS)]

        async def commit(partitions: frozenset[TopicPartition]) -> None:
            await first.commit(dict.fromkeys(partitions, 1))

        async with AsyncExitStack() as opened:
            producer = await opened.enter_async_context(harness.bus.producer())
            for place in places:
                await producer.publish(*place, messages("done", "to do"))
            asked = reading(harness, on_revoked=commit)
            first = await opened.enter_async_context(harness.bus.consumer(asked))
            await read(2 * PARTITIONS, first)
            second = await opened.enter_async_context(harness.bus.consumer(reading(harness)))
            records = await settle(first, second)
            records += await read(PARTITIONS - len(records), first, second)

            assert set(texts(records)) == {"to do"}

    async def test_a_consumer_can_commit_while_it_closes(self, harness: Harness) -> None:
        place = TopicPartition(harness.readings, 0)

        async def commit(_: frozenset[TopicPartition]) -> None:
            await closing.commit({place: 1})

        async with harness.bus.producer() as producer:
            await producer.publish(*place, messages("a", "b"))
        async with harness.bus.consumer(reading(harness, on_revoked=commit)) as closing:
            await read(2, closing)
        async with harness.bus.consumer(reading(harness)) as reopened:
            assert texts(await read(1, reopened)) == ["b"]

    async def test_an_assignment_whose_callback_failed_is_told_again(
        self, harness: Harness
    ) -> None:
        notes: list[str] = []

        async def fail_once(_: frozenset[TopicPartition]) -> None:
            notes.append("told")
            if len(notes) == 1:
                raise BusUnavailableError("could not load the state")

        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness, on_assigned=fail_once)) as consumer,
        ):
            await producer.publish(harness.readings, 0, messages("a"))
            with pytest.raises(BusUnavailableError, match="could not load"):
                await read(1, consumer)

            assert texts(await read(1, consumer)) == ["a"]
            assert notes == ["told", "told"]

    async def test_a_named_member_returns_to_its_partitions_and_moves_nobody(
        self, harness: Harness
    ) -> None:
        notes: list[str] = []
        named = reading(harness, member="join-1")
        noted = reading(
            harness,
            member="join-0",
            on_assigned=noting(notes, "assigned"),
            on_revoked=noting(notes, "revoked"),
        )
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(noted) as staying,
        ):
            async with harness.bus.consumer(named) as returning:
                await settle(staying, returning)
                before = returning.assignment()
            told_before = list(notes)
            for number in range(PARTITIONS):
                await producer.publish(harness.readings, number, messages("x"))
            async with harness.bus.consumer(named) as returned:
                await settle(staying, returned)
                assert returned.assignment() == before
                assert notes == told_before

    async def test_publishing_wakes_a_poll_that_waits(self, harness: Harness) -> None:
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

    async def test_a_poll_gives_at_most_so_many_and_the_rest_later(self, harness: Harness) -> None:
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
        # Random bytes, so that compression does not make it small.
        source = random.Random(1)  # noqa: S311
        published = [Message(b"k", source.randbytes(100_000), 1) for _ in range(35)]
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(harness.readings, 0, published)
            records = await read(35, consumer)

        assert [record.value for record in records] == [sent.value for sent in published]

    async def test_a_message_is_taken_up_to_the_limit_and_refused_above_it(
        self, harness: Harness
    ) -> None:
        source = random.Random(2)  # noqa: S311
        largest = Message(b"node-b", source.randbytes(MAX_MESSAGE_BYTES - 6), 1)
        too_large = Message(b"node-b", largest.value + b"x" if largest.value else None, 1)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            with pytest.raises(MessageTooLargeError, match="node-b"):
                await producer.publish(harness.readings, 0, [message("small"), too_large])
            await producer.publish(harness.readings, 0, [largest])
            records = await read(1, consumer)

        assert [record.value for record in records] == [largest.value]

    @pytest.mark.parametrize(("topic", "partition"), [("absent", 0), (None, 4), (None, -1)])
    async def test_a_topic_or_partition_that_is_not_there_is_named(
        self, harness: Harness, topic: str | None, partition: int
    ) -> None:
        name = topic or harness.readings
        async with harness.bus.producer() as producer:
            with pytest.raises(TopicsError, match=name):
                await producer.publish(name, partition, messages("a"))

    async def test_a_consumer_of_an_absent_topic_is_told_so(self, harness: Harness) -> None:
        with pytest.raises(TopicsError, match="absent"):
            async with harness.bus.consumer(reading(harness, topics=["absent"])) as consumer:
                await poll_once(consumer)

    async def test_an_empty_batch_is_nothing(self, harness: Harness) -> None:
        place = TopicPartition(harness.readings, 0)
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as consumer,
        ):
            await producer.publish(*place, [])

            assert await consumer.end_offsets([place]) == {place: 0}

    async def test_the_bus_knows_the_number_of_partitions(self, harness: Harness) -> None:
        assert await harness.bus.partitions(harness.readings) == PARTITIONS
        with pytest.raises(TopicsError, match="absent"):
            await harness.bus.partitions("absent")

    async def test_publishers_at_once_keep_each_its_own_order(self, harness: Harness) -> None:
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
