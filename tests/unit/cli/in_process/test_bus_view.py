"""A component's progress in a bus."""

from collections.abc import Iterable

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Message, Subscription, TopicPartition
from gpuledger_cli.in_process.bus_view import BusView
from tests.default_topics import EVENTS

PARTITION = TopicPartition(EVENTS.name, 0)
READ = Subscription(group="read", topics=[EVENTS.name])


async def publish(bus: MemoryBus, values: Iterable[bytes], *, topic: str = EVENTS.name) -> None:
    """Publish records on partition 0."""
    async with bus.producer() as producer:
        await producer.publish(topic, 0, [Message(value, value, 0) for value in values])


async def values_of(consumer: Consumer) -> list[bytes | None]:
    """Read until polls are empty."""
    found: list[bytes | None] = []
    idle = 0
    while idle < 2:
        batch = await consumer.poll(timeout_seconds=0.01, max_records=2)
        found += [record.value for records in batch.values() for record in records]
        idle = 0 if batch else idle + 1
    return found


async def test_records_that_a_component_has_not_taken_or_delivered_are_counted() -> None:
    bus = MemoryBus()
    view = BusView(bus)
    published = [(PARTITION, 0), (PARTITION, 1), (TopicPartition("of.nobody", 0), 0)]
    await publish(bus, [b"a", b"b"])
    async with view.consumer(READ) as consumer:
        assert view.count_behind(view.polled, published) == 2
        await values_of(consumer)
        assert view.count_behind(view.polled, published) == 0
        assert view.count_behind(view.committed, published) == 2
        await consumer.commit({PARTITION: 1})
        assert view.count_behind(view.committed, published) == 1


async def test_records_after_a_seek_must_be_taken_again() -> None:
    """After its first poll, a store seeks to where its table ends."""
    bus = MemoryBus()
    view = BusView(bus)
    await publish(bus, [b"a", b"b"])
    async with view.consumer(READ) as consumer:
        await values_of(consumer)
        await consumer.seek(PARTITION, 1)
        assert view.count_behind(view.polled, [(PARTITION, 0), (PARTITION, 1)]) == 1
