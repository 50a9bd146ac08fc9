"""An inventory that its topic has lost is published again, and otherwise once an hour."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.keys import NodeId
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import end_tasks
from gpuledger_agent.publish.inventory_repeats import (
    QUERY_SECONDS,
    REPEAT_SECONDS,
    InventoryRepeats,
)
from gpuledger_agent.publish.message_bundle import BundleQueue
from gpuledger_agent.publish.publisher import SamplePublisher
from gpuledger_agent.publish.send_queue import SendQueue
from gpuledger_simulator.clock import ManualClock
from tests.default_topics import INVENTORY
from tests.unit.agent.publish.builders import NODE, FickleBus
from tests.unit.agent.publish.test_inventory import inventory_of

TURNS = 100


class WaitingClock(ManualClock):
    """Wakes sleepers only when a test moves the time."""

    def __init__(self) -> None:
        super().__init__(start_ns=0)
        self._moved = asyncio.Event()

    async def pass_by(self, seconds: float) -> None:
        self.advance(seconds)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        for _ in range(TURNS):
            await asyncio.sleep(0)

    @override
    async def sleep(self, seconds: float) -> None:
        due_ns = self.monotonic_ns() + round(seconds * NS_PER_SECOND)
        while self.monotonic_ns() < due_ns:
            await self._moved.wait()


@asynccontextmanager
async def publishing(bus: Bus, clock: Clock) -> AsyncIterator[SendQueue]:
    """Publish what is put into the queue, and repeat inventories."""
    send_queue = SendQueue(
        queue=BundleQueue(max_bundles=10), spool=None, check=Check(), spill_after_seconds=5
    )
    publisher = SamplePublisher(
        node=NodeId("default", NODE),
        bus=bus,
        send_queue=send_queue,
        check=Check(),
        backoff=Backoff(first_seconds=1e-6, max_seconds=1e-6),
        catch_up_factor=1e12,
    )
    repeats = InventoryRepeats(bus=bus, send_queue=send_queue, clock=clock)
    tasks = [asyncio.create_task(each.run()) for each in (publisher, repeats)]
    try:
        yield send_queue
    finally:
        await end_tasks(*tasks)


def values_in(bus: MemoryBus) -> list[bytes | None]:
    return [record.value for record in bus.kept(INVENTORY.name)]


async def test_a_recreated_topic_has_the_newest_inventory_within_a_minute() -> None:
    bus, clock = MemoryBus(), WaitingClock()
    async with publishing(bus, clock) as send_queue:
        await clock.pass_by(0)
        for number in (1, 2):
            send_queue.put_inventory(inventory_of(number))
            await clock.pass_by(QUERY_SECONDS)
        assert values_in(bus) == [b"1", b"2"]
        bus.recreate(INVENTORY.name)
        assert values_in(bus) == []
        await clock.pass_by(QUERY_SECONDS)
        assert values_in(bus) == [b"2"]


async def test_an_unchanged_inventory_is_published_again_each_hour_as_the_same_record() -> None:
    bus, clock = MemoryBus(), WaitingClock()
    async with publishing(bus, clock) as send_queue:
        await clock.pass_by(0)
        send_queue.put_inventory(inventory_of(7))
        for _ in range(round(2.5 * REPEAT_SECONDS / QUERY_SECONDS)):
            await clock.pass_by(QUERY_SECONDS)
        records = bus.kept(INVENTORY.name)
    assert len(records) == 3
    assert len({(record.key, record.value, record.timestamp_ms) for record in records}) == 1


async def test_a_node_without_an_inventory_repeats_nothing() -> None:
    bus, clock = MemoryBus(), WaitingClock()
    async with publishing(bus, clock):
        await clock.pass_by(0)
        await clock.pass_by(REPEAT_SECONDS)
        bus.recreate(INVENTORY.name)
        await clock.pass_by(QUERY_SECONDS)
        assert values_in(bus) == []


@pytest.mark.parametrize("topic_id", ["second", "first"])
async def test_an_outage_repeats_the_inventory_only_if_the_brokers_have_lost_the_topic(
    topic_id: str,
) -> None:
    bus, clock = FickleBus(), WaitingClock()
    async with publishing(cast("Bus", bus), clock) as send_queue:
        await clock.pass_by(0)
        send_queue.put_inventory(inventory_of(1))
        await clock.pass_by(QUERY_SECONDS)
        bus.is_away = True
        for _ in range(5):
            await clock.pass_by(QUERY_SECONDS)
        bus.is_away, bus.id_of_topics = False, topic_id
        await clock.pass_by(QUERY_SECONDS)
        published = [value for topic, value in bus.published if topic == INVENTORY.name]
    assert published == [b"1"] * (2 if topic_id == "second" else 1)


async def test_a_topic_recreated_before_its_id_was_ever_known_has_the_inventory() -> None:
    bus, clock = FickleBus(), WaitingClock()
    bus.id_of_topics = None  # as before the publisher is connected
    async with publishing(cast("Bus", bus), clock) as send_queue:
        await clock.pass_by(0)
        send_queue.put_inventory(inventory_of(1))
        await clock.pass_by(1)
        bus.published.clear()
        bus.id_of_topics = "second"
        for _ in range(3):
            await clock.pass_by(QUERY_SECONDS)
        published = [value for topic, value in bus.published if topic == INVENTORY.name]
    assert published == [b"1"]
