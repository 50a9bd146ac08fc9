"""The reader of a run's events."""

import asyncio
from collections.abc import Iterable

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Message
from gpuledger.codec import encode
from gpuledger.runtime.tasks import run_tasks
from gpuledger_cli.demo.event_reader import EventReader, subscription
from gpuledger_cli.demo.totals import RunAlerts, Tally
from gpuledger_cli.in_process.bus_view import BusView
from gpuledger_simulator.clock import ManualClock
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS, TOPICS
from tests.hanging import HANG_SECONDS
from tests.unit.cli.demo.events import event


async def publish(bus: MemoryBus, values: Iterable[bytes], *, topic: str = EVENTS.name) -> None:
    """Publish records on partition 0."""
    async with bus.producer() as producer:
        await producer.publish(topic, 0, [Message(value, value, 0) for value in values])


def reader_of(consumer: Consumer, tally: Tally) -> EventReader:
    return EventReader(
        consumer=consumer,
        tally=tally,
        alerts=RunAlerts(settings=AlertsSettings(), clock=ManualClock(start_ns=0)),
        topics=TOPICS,
    )


async def test_each_event_is_counted_once_whatever_happens_to_the_readers_group() -> None:
    """Its partitions are reassigned without a commit, for example after a laptop slept."""
    bus, tally = MemoryBus(), Tally()
    view = BusView(bus)
    await publish(bus, [encode(event(second=second)) for second in range(1, 11)])
    async with (
        view.consumer(subscription(topics=TOPICS)) as consumer,
        run_tasks(reader_of(consumer, tally).follow()),
    ):
        await until_counted(tally, 10)
        async with bus.consumer(subscription(topics=TOPICS)) as other:
            await other.poll(timeout_seconds=0.5, max_records=1)
        await publish(bus, [encode(event(second=11))])
        await until_counted(tally, 11)
    assert tally.events == 11


async def test_records_of_other_topics_than_events_are_waited_for_too() -> None:
    """Otherwise a run could end between an event and the incident that belongs to it."""
    bus = MemoryBus()
    async with bus.consumer(subscription(topics=TOPICS)) as consumer:
        reader = reader_of(consumer, Tally())
        await consumer.poll(timeout_seconds=0, max_records=1)
        assert await reader.has_read_all()
        await publish(bus, [b"an incident"], topic=ATTRIBUTED_INCIDENTS.name)
        assert not await reader.has_read_all()
        async with run_tasks(reader.follow()), asyncio.timeout(HANG_SECONDS):
            while not await reader.has_read_all():  # noqa: ASYNC110  # a bus has no event for this
                await asyncio.sleep(0)
    assert [partition.topic for partition, _ in reader.newest] == [ATTRIBUTED_INCIDENTS.name]


async def until_counted(tally: Tally, events: int) -> None:
    """Wait until this many events are counted."""
    async with asyncio.timeout(HANG_SECONDS):
        while tally.events < events:  # noqa: ASYNC110  # a tally has no event for this
            await asyncio.sleep(0)
