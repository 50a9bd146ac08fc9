"""The join's service on the in-memory bus: order, rebuilding, commits, retries."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Consumer,
    Message,
    Polled,
    Subscription,
    TopicPartition,
    Transactions,
)
from gpuledger.codec import Decoder, encode
from gpuledger.records import DeadLetter, GpuEvent, PodState
from gpuledger.topics import Topic
from tests.default_topics import (
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    NODES,
    PODS,
    PROCESSES,
    SAMPLES,
    TOPICS,
    WATERMARKS,
)
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.join.joining import (
    GROUP,
    PARTITION,
    committed,
    joining,
    publish,
    read,
    read_events,
    tick,
    until,
)
from tests.unit.enricher.join.ticks import UIDS, pod


async def test_existing_pods_are_known_to_the_first_event() -> None:
    """The pods of new partitions are read to their end before a tick is booked."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    await publish(bus, PODS, pod(), key=f"default/{UIDS[0]}")
    async with joining(bus):
        (event,) = await read_events(bus, 1)
    assert event.pods[0].state is PodState.KNOWN


class HeldBus(MemoryBus):
    """A bus whose consumers get nothing while `is_held` is set."""

    is_held = False

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            poll = consumer.poll

            async def held(*, timeout_seconds: float, max_records: int) -> Polled:
                if self.is_held and subscription.group == GROUP:
                    await asyncio.sleep(0)
                    return {}
                return await poll(timeout_seconds=timeout_seconds, max_records=max_records)

            consumer.poll = held  # type: ignore[method-assign]  # a pause, put in by hand
            yield consumer


async def test_a_pod_that_comes_in_one_poll_with_its_tick_is_known_to_its_event() -> None:
    bus = HeldBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus):
        await committed(bus, 1)
        bus.is_held = True
        await publish(bus, SAMPLES, tick(2))
        await publish(bus, PODS, pod(), key=f"default/{UIDS[0]}")
        bus.is_held = False
        events = await read_events(bus, 2)
    assert [event.pods[0].state for event in events] == [PodState.PENDING, PodState.KNOWN]


async def test_an_event_goes_to_the_partition_of_its_tick() -> None:
    """Order is kept for each node, and sinks are co-partitioned."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2), tick(3))
    async with joining(bus):
        events = await read_events(bus, 3)
    assert [event.seq for event in events] == [1, 2, 3]
    async with bus.consumer(Subscription(group="ends", topics=[EVENTS.name])) as consumer:
        partition = TopicPartition(EVENTS.name, PARTITION)
        assert (await consumer.end_offsets([partition]))[partition] == 3


async def test_a_restarted_join_continues_where_it_stopped() -> None:
    """Committed ticks are not booked again."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus):
        await read_events(bus, 1)
        await committed(bus, 1)
    await publish(bus, SAMPLES, tick(2))
    async with joining(bus):
        events = await read_events(bus, 2)
    assert [event.seq for event in events] == [1, 2]


@pytest.mark.parametrize("topic", [SAMPLES, PROCESSES, INCIDENTS, PODS], ids=lambda each: each.name)
async def test_a_record_that_cannot_be_decoded_becomes_a_dead_letter(topic: Topic) -> None:
    """On each input topic; ticks are still processed."""
    bus = MemoryBus()
    await publish(bus, topic, b"no json")
    async with joining(bus):
        (value,) = await read(bus, DEAD_LETTERS, 1)
        await publish(bus, SAMPLES, tick(1))
        assert len(await read_events(bus, 1)) == 1
    dead_letter = Decoder(topic=DEAD_LETTERS.name, record=DeadLetter).decode(value)
    assert (dead_letter.topic, dead_letter.partition, dead_letter.offset) == (
        topic.name,
        PARTITION,
        0,
    )
    assert dead_letter.value_base64 == "bm8ganNvbg=="


@pytest.mark.parametrize("topic", [PODS, NODES, WATERMARKS], ids=lambda each: each.name)
async def test_a_record_of_a_compacted_topic_has_one_dead_letter_however_often_it_is_read(
    topic: Topic,
) -> None:
    """Each start reads such a topic from its beginning; only new records get a dead letter."""
    bus = MemoryBus()
    for number in range(3):
        await publish(bus, topic, b"no json", b"nor this", encode(pod()) + b"}")
        async with joining(bus) as readiness:
            await read(bus, DEAD_LETTERS, 3 * (number + 1))
            await until(readiness.is_ready)
            await publish(bus, SAMPLES, tick(number + 1))
            await committed(bus, number + 1)
    dead_letters = [
        Decoder(topic=DEAD_LETTERS.name, record=DeadLetter).decode(each.value)
        for each in bus.kept(DEAD_LETTERS.name)
    ]
    assert len({dead_letter.offset for dead_letter in dead_letters}) == len(dead_letters) == 9


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Topic(name=EVENTS.name, record=GpuEvent, key="node", partitions=3), "the same number"),
        (None, "there is no topic 'gpuledger.events.v1'"),
    ],
)
async def test_missing_or_wrong_topics_are_waited_for(wrong: Topic | None, message: str) -> None:
    """Otherwise the output partition could not equal the input partition."""
    bus = MemoryBus([topic for topic in [*TOPICS, wrong] if topic not in (EVENTS, None)])
    async with joining(bus) as readiness:
        await until(lambda: message in str(readiness.report()))
        assert not readiness.is_ready()
        bus.create([EVENTS])
        await publish(bus, SAMPLES, tick(1))
        assert [event.seq for event in await read_events(bus, 1)] == [1]
        await until(readiness.is_ready)


async def test_the_detail_of_a_check_is_computed_when_it_is_read() -> None:
    bus = MemoryBus()
    async with joining(bus) as readiness:
        await until(readiness.is_ready)
        assert "0 pods" in str(readiness.report())
        await publish(bus, PODS, pod(), key=f"default/{UIDS[0]}")
        await until(lambda: "1 pods" in str(readiness.report()))


async def test_the_join_is_ready_once_the_pods_are_read() -> None:
    """Both checks are ok after the first event."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus) as readiness:
        await read_events(bus, 1)
        assert readiness.is_ready()


async def test_ticks_that_were_removed_unread_are_reported_and_the_others_are_joined() -> None:
    """The join stays ready because it does what can be done."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus):
        await read_events(bus, 1)
        await committed(bus, 1)
    await publish(bus, SAMPLES, tick(2), tick(3), tick(4))
    bus.remove_before(TopicPartition(SAMPLES.name, PARTITION), 3)
    async with joining(bus) as readiness:
        events = await read_events(bus, 2)
        gaps = readiness.check("gaps")
        assert readiness.is_ready()
        assert not gaps.is_ok
        assert f"{SAMPLES.name}[{PARTITION}] from offset 1: 2 offsets (retention)" in gaps.detail
    assert [event.seq for event in events] == [1, 4]


async def test_ticks_that_were_removed_before_the_group_existed_are_not_a_gap() -> None:
    """Neither is state removed by compaction or retention, which is read from its beginning."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2))
    await publish(bus, PODS, pod(), pod(), key=f"default/{UIDS[0]}")
    for topic in (SAMPLES, PODS):
        bus.remove_before(TopicPartition(topic.name, PARTITION), 1)
    async with joining(bus) as readiness:
        events = await read_events(bus, 1)
        assert readiness.check("gaps").is_ok
    assert events[0].pods[0].state is PodState.KNOWN


async def test_ticks_of_a_recreated_topic_are_joined_from_its_beginning() -> None:
    """Even if it has grown beyond the offset committed for the old one."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1), tick(2))
    async with joining(bus):
        await read_events(bus, 2)
        await committed(bus, 2)
        bus.recreate(SAMPLES.name)
        await publish(bus, SAMPLES, *map(tick, range(3, 8)))
        events = await read_events(bus, 7)
    assert [event.seq for event in events] == [1, 2, 3, 4, 5, 6, 7]


class StuckTransactions:
    """Transactions with events that Kafka does not answer for a while; others succeed."""

    def __init__(self, inner: Transactions, answers: asyncio.Event) -> None:
        self._inner, self._answers = inner, answers

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> None:
        if any(messages[to] for to in messages if to.topic == EVENTS.name):
            await self._answers.wait()
        await self._inner.commit(messages, offsets=offsets, group=group)


class StuckBus(MemoryBus):
    """A bus that reads but cannot write events."""

    answers: asyncio.Event

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        async with super().transactions(transactional_id) as inner:
            yield StuckTransactions(inner, self.answers)


def lag_seconds() -> float:
    return REGISTRY.get_sample_value("gpuledger_join_lag_seconds") or 0.0


async def test_the_lag_is_the_age_of_the_waiting_tick_and_zero_if_none_waits() -> None:
    """At the time of the scrape: it grows while nothing moves."""
    bus = StuckBus()
    bus.answers = asyncio.Event()
    async with joining(bus), asyncio.timeout(HANG_SECONDS):
        await publish(bus, SAMPLES, tick(1))
        while lag_seconds() == 0:  # noqa: ASYNC110  # a scrape has no event
            await asyncio.sleep(0.01)
        before = lag_seconds()
        await asyncio.sleep(0)
        assert lag_seconds() > before
        bus.answers.set()
        while lag_seconds() > 0:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)
