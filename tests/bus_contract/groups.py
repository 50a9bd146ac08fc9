"""Laws of groups: which member has which partitions, and the callbacks when that changes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.protocol import TopicPartition
from gpuledger.errors import BusUnavailableError, RefusedError
from tests.bus_contract.harness import (
    PARTITIONS,
    messages,
    noting,
    poll_once,
    poll_until,
    read,
    reading,
    settle,
    texts,
)

if TYPE_CHECKING:
    from tests.bus_contract.harness import Harness


class GroupLaws:
    """Each test opens and closes its own clients."""

    async def test_members_share_partitions_and_each_gets_the_same_numbers_of_all_topics(
        self, harness: Harness
    ) -> None:
        requested = reading(harness, topics=[harness.readings, harness.pods])
        async with (
            harness.bus.consumer(requested) as first,
            harness.bus.consumer(requested) as second,
        ):
            await settle(first, second, topics=2)

            held = [consumer.assignment() for consumer in (first, second)]
        assert not held[0] & held[1]
        for partitions in held:
            of_readings = {
                partition.partition for partition in partitions if partition[0] == harness.readings
            }
            of_pods = {
                partition.partition for partition in partitions if partition[0] == harness.pods
            }
            assert of_readings == of_pods
            assert len(of_readings) == PARTITIONS // 2

    async def test_members_together_read_every_record_once(self, harness: Harness) -> None:
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

    async def test_the_partitions_of_a_member_that_leaves_go_to_the_others(
        self, harness: Harness
    ) -> None:
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

    async def test_partitions_are_assigned_before_their_records_arrive(
        self, harness: Harness
    ) -> None:
        notes: list[str] = []
        requested = reading(harness, on_assigned=noting(notes, "assigned"))
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(requested) as consumer,
        ):
            await producer.publish(harness.readings, 0, messages("a"))
            assert consumer.assignment() == frozenset()
            while not await poll_once(consumer):
                pass

            assert notes == [f"assigned {PARTITIONS}"]
            assert len(consumer.assignment()) == PARTITIONS

    async def test_callbacks_report_a_rebalance_on_both_sides(self, harness: Harness) -> None:
        notes: list[str] = []
        requested = reading(
            harness,
            on_assigned=noting(notes, "assigned"),
            on_revoked=noting(notes, "revoked"),
        )
        async with harness.bus.consumer(requested) as staying:
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

    async def test_a_rebalance_waits_for_a_busy_member_which_can_still_commit(
        self, harness: Harness
    ) -> None:
        partitions = [TopicPartition(harness.readings, number) for number in range(PARTITIONS)]
        async with (
            harness.bus.producer() as producer,
            harness.bus.consumer(reading(harness)) as working,
            harness.bus.consumer(reading(harness)) as joining,
        ):
            for partition in partitions:
                await producer.publish(*partition, messages("done", "to do"))
            await read(2 * PARTITIONS, working)
            for _ in range(10):
                assert await poll_once(joining) == []
            assert joining.assignment() == frozenset()
            assert len(working.assignment()) == PARTITIONS
            await working.commit(dict.fromkeys(partitions, 1))
            records = await settle(working, joining)
            records += await read(PARTITIONS - len(records), working, joining)

        assert texts(records) == ["to do"] * PARTITIONS

    async def test_the_next_member_begins_at_the_offset_committed_on_revocation(
        self, harness: Harness
    ) -> None:
        them = [TopicPartition(harness.readings, number) for number in range(PARTITIONS)]

        async def commit(partitions: frozenset[TopicPartition]) -> None:
            await first.commit(dict.fromkeys(partitions, 1))

        async with AsyncExitStack() as opened:
            producer = await opened.enter_async_context(harness.bus.producer())
            for partition in them:
                await producer.publish(*partition, messages("done", "to do"))
            requested = reading(harness, on_revoked=commit)
            first = await opened.enter_async_context(harness.bus.consumer(requested))
            await read(2 * PARTITIONS, first)
            second = await opened.enter_async_context(harness.bus.consumer(reading(harness)))
            records = await settle(first, second)
            records += await read(PARTITIONS - len(records), first, second)

            assert set(texts(records)) == {"to do"}

    async def test_a_consumer_can_commit_while_it_closes(self, harness: Harness) -> None:
        partition = TopicPartition(harness.readings, 0)

        async def commit(_: frozenset[TopicPartition]) -> None:
            await closing.commit({partition: 1})

        async with harness.bus.producer() as producer:
            await producer.publish(*partition, messages("a", "b"))
        async with harness.bus.consumer(reading(harness, on_revoked=commit)) as closing:
            await read(2, closing)
        async with harness.bus.consumer(reading(harness)) as reopened:
            assert texts(await read(1, reopened)) == ["b"]

    async def test_an_assignment_whose_callback_failed_is_reported_again(
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
            with pytest.raises(BusUnavailableError):
                await read(1, consumer)

            assert texts(await read(1, consumer)) == ["a"]
            assert notes == ["told", "told"]

    async def test_a_static_member_gets_its_partitions_back_without_a_rebalance(
        self, harness: Harness
    ) -> None:
        notes: list[str] = []
        named = reading(harness, group_instance_id="join-1")
        noted = reading(
            harness,
            group_instance_id="join-0",
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
            reported_before = list(notes)
            for number in range(PARTITIONS):
                await producer.publish(harness.readings, number, messages("x"))
            async with harness.bus.consumer(named) as returned:
                await settle(staying, returned)
                assert returned.assignment() == before
                assert notes == reported_before

    async def test_a_member_of_another_component_is_rejected_and_gets_no_partitions(
        self, harness: Harness
    ) -> None:
        own = reading(harness, stage="alerts")
        other = reading(harness, stage="rows", topics=[harness.readings, harness.pods])
        async with harness.bus.producer() as producer, harness.bus.consumer(own) as member:
            await settle(member)
            before = member.assignment()
            async with harness.bus.consumer(other) as stranger:
                with pytest.raises(RefusedError, match="another kind in the group"):
                    await poll_until(lambda _: False, stranger)
                assert not stranger.assignment()
            for number in range(PARTITIONS):
                await producer.publish(harness.readings, number, messages("x"))
            assert len(await read(PARTITIONS, member)) == PARTITIONS
            assert member.assignment() == before
