"""What a run is given of topics that hold records of earlier ones, and how far its stages are."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Message, Subscription, TopicPartition
from gpuledger.codec import encode
from gpuledger_cli.demo.run_bus import EventReader, Offsets, RunBus, find_beginning, subscription
from gpuledger_cli.demo.totals import RunAlerts, Tally
from gpuledger_simulator.clock import ManualClock
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS, PODS, TOPICS
from tests.hanging import HANG_SECONDS
from tests.unit.cli.demo.events import event

PARTITION = TopicPartition(EVENTS.name, 0)
READ = Subscription(group="read", topics=[EVENTS.name])


async def publish(bus: MemoryBus, values: Iterable[bytes], *, topic: str = EVENTS.name) -> None:
    """Publish records on partition 0."""
    async with bus.producer() as producer:
        await producer.publish(topic, 0, [Message(value, value, 0) for value in values])


async def values_of(consumer: Consumer) -> list[bytes | None]:
    """Read until a poll brings nothing."""
    found: list[bytes | None] = []
    idle = 0
    while idle < 2:
        batch = await consumer.poll(timeout_seconds=0.01, max_records=2)
        found += [record.value for records in batch.values() for record in records]
        idle = 0 if batch else idle + 1
    return found


@asynccontextmanager
async def rebalanced(
    bus: MemoryBus, consumer: Consumer, subscribed: Subscription
) -> AsyncIterator[None]:
    """Have another member come into the group and go again, while the context is open."""
    async with bus.consumer(subscribed) as other:
        joining = asyncio.create_task(other.poll(timeout_seconds=0.01, max_records=1))
        while not joining.done():
            await consumer.poll(timeout_seconds=0.01, max_records=1)
        yield


async def test_nothing_from_before_the_run_is_given_not_even_where_it_is_sought() -> None:
    """A new store seeks the beginning of its partitions."""
    bus = MemoryBus()
    await publish(bus, [b"a", b"b", b"c"])
    view = RunBus(bus, beginning=await find_beginning(bus))
    await publish(bus, [b"d"])
    async with view.consumer(READ) as consumer:
        assert await values_of(consumer) == [b"d"]
        await consumer.seek(PARTITION, 0)
        assert await values_of(consumer) == [b"d"]
        await consumer.seek(PARTITION, 4)
        assert await values_of(consumer) == []


async def test_states_are_read_whole() -> None:
    bus = MemoryBus()
    await publish(bus, [b"pod"], topic=PODS.name)
    view = RunBus(bus, beginning=await find_beginning(bus))
    async with view.consumer(Subscription(group="read", topics=[PODS.name])) as consumer:
        assert await values_of(consumer) == [b"pod"]


async def test_all_of_a_topic_that_is_made_anew_is_the_run_s() -> None:
    bus = MemoryBus()
    await publish(bus, [b"a", b"b", b"c"])
    view = RunBus(bus, beginning=await find_beginning(bus), once=True)
    async with view.consumer(READ) as consumer:
        assert await values_of(consumer) == []
        bus.recreate(EVENTS.name)
        await publish(bus, [b"d"])
        assert await values_of(consumer) == [b"d"]


async def test_it_is_known_what_a_stage_has_not_taken_and_not_delivered() -> None:
    bus = MemoryBus()
    view = RunBus(bus, beginning=await find_beginning(bus))
    published = [(PARTITION, 0), (PARTITION, 1), (TopicPartition("of.nobody", 0), 0)]
    await publish(bus, [b"a", b"b"])
    async with view.consumer(READ) as consumer:
        assert view.count_behind(view.taken, published) == 2
        await values_of(consumer)
        assert view.count_behind(view.taken, published) == 0
        assert view.count_behind(view.delivered, published) == 2
        await consumer.commit({PARTITION: 1})
        assert view.count_behind(view.delivered, published) == 1


async def test_what_was_set_back_has_to_be_taken_again() -> None:
    """A store sets a partition to where its table ends after the first poll of it."""
    bus = MemoryBus()
    view = RunBus(bus, beginning=await find_beginning(bus))
    await publish(bus, [b"a", b"b"])
    async with view.consumer(READ) as consumer:
        await values_of(consumer)
        await consumer.seek(PARTITION, 1)
        assert view.count_behind(view.taken, [(PARTITION, 0), (PARTITION, 1)]) == 1


async def test_it_is_known_whether_the_group_has_another_member() -> None:
    bus = MemoryBus()
    view = RunBus(bus, beginning=await find_beginning(bus))
    async with view.consumer(READ) as consumer:
        assert not view.holds_all()
        await values_of(consumer)
        assert view.holds_all()
        async with rebalanced(bus, consumer, READ):
            assert not view.holds_all()


def reader_of(consumer: Consumer, tally: Tally, beginning: Offsets) -> EventReader:
    return EventReader(
        consumer=consumer,
        tally=tally,
        alerts=RunAlerts(settings=AlertsSettings(), clock=ManualClock(start_ns=0)),
        beginning=beginning,
        nodes={"default/node-a"},
        topics=TOPICS,
    )


async def test_each_event_is_counted_once_whatever_becomes_of_the_reader_s_group() -> None:
    """Its partitions are assigned anew, without a commit; so does a lid that was closed."""
    bus, tally = MemoryBus(), Tally()
    beginning = await find_beginning(bus)
    view = RunBus(bus, beginning=beginning, once=True)
    await publish(bus, [encode(event(second=second)) for second in range(1, 11)])
    async with (
        view.consumer(subscription(topics=TOPICS)) as consumer,
        following(reader_of(consumer, tally, beginning)),
    ):
        await until_counted(tally, 10)
        async with bus.consumer(subscription(topics=TOPICS)) as other:
            await other.poll(timeout_seconds=0.5, max_records=1)
        await publish(bus, [encode(event(second=11))])
        await until_counted(tally, 11)
    assert tally.events == 11


async def test_what_lies_in_another_topic_than_the_events_is_waited_for_too() -> None:
    """Else a run could end between an event and the incident that came with it."""
    bus = MemoryBus()
    beginning = await find_beginning(bus)
    async with bus.consumer(subscription(topics=TOPICS)) as consumer:
        reader = reader_of(consumer, Tally(), beginning)
        await consumer.poll(timeout_seconds=0, max_records=1)
        assert await reader.has_read_all()
        await publish(bus, [b"an incident"], topic=ATTRIBUTED_INCIDENTS.name)
        assert not await reader.has_read_all()
        async with following(reader), asyncio.timeout(HANG_SECONDS):
            while not await reader.has_read_all():  # noqa: ASYNC110  # a bus has no event for this
                await asyncio.sleep(0)
    assert [partition.topic for partition, _ in reader.newest] == [ATTRIBUTED_INCIDENTS.name]


@asynccontextmanager
async def following(reader: EventReader) -> AsyncIterator[None]:
    task = asyncio.create_task(reader.follow())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until_counted(tally: Tally, events: int) -> None:
    """Wait for so many events."""
    async with asyncio.timeout(HANG_SECONDS):
        while tally.events < events:  # noqa: ASYNC110  # a tally has no event for this
            await asyncio.sleep(0)
