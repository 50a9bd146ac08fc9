"""What is published when the topic is not what it was, or its brokers are away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from typing_extensions import override

from enricher.podwatch.publish import Publisher
from enricher.podwatch.table import PodTable
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import TopicDescription
from gpuledger.clock import SystemClock
from gpuledger.errors import BusUnavailableError
from gpuledger.service import Readiness
from gpuledger.service.readiness import Check
from gpuledger.topics import PODS
from tests.unit.enricher.podwatch.given import pod_record, soon
from tests.unit.enricher.podwatch.test_restart import states, topic

KNOWN = {"a": ["Running"], "b": ["Running"]}


class DeadBus(MemoryBus):
    """A bus whose brokers may be away."""

    is_away = False

    @override
    async def describe(self, topic: str) -> TopicDescription:
        if self.is_away:
            raise BusUnavailableError("no broker answers")
        return await super().describe(topic)


@asynccontextmanager
async def publishing(
    bus: MemoryBus, table: PodTable, *, topic_id: str | None = None
) -> AsyncIterator[Check]:
    """Publish from the table, with a look at the topic every few milliseconds."""
    check = Readiness().check("kafka")
    publisher = Publisher(
        bus=bus,
        table=table,
        check=check,
        clock=SystemClock(),
        batch_most=10,
        topic_id=topic_id,
        look_seconds=0.01,
    )
    task = asyncio.create_task(publisher.forever())
    try:
        yield check
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def table_of(*uids: str) -> PodTable:
    """Give a table that Kafka knows nothing of."""
    table = PodTable(tombstone_after_seconds=60, tombstones_most=10)
    for uid in uids:
        table.see(pod_record(uid), time_ns=1)
    return table


async def has(bus: MemoryBus, expected: dict[str, list[str]]) -> None:
    """Wait until the topic says that of each pod."""
    async with asyncio.timeout(5):
        while states(await topic(bus)) != expected:  # noqa: ASYNC110  # a topic has no event to wait on
            await asyncio.sleep(0.005)


async def test_a_topic_that_is_made_anew_gets_all_pods_though_none_of_them_changed() -> None:
    bus = MemoryBus()
    async with publishing(bus, table_of("a", "b")):
        await has(bus, KNOWN)
        bus.recreate(PODS.name)
        await has(bus, KNOWN)


async def test_a_topic_made_anew_after_it_was_read_gets_all_that_was_known() -> None:
    bus = MemoryBus()
    table = table_of()
    table.restore([pod_record("a"), pod_record("b")])
    async with publishing(bus, table, topic_id="the one that was read"):
        await has(bus, KNOWN)


async def test_a_topic_that_stays_gets_nothing_twice() -> None:
    bus = DeadBus()
    async with publishing(bus, table_of("a", "b")) as check:
        await has(bus, KNOWN)
        bus.is_away = True
        await soon(lambda: check.has_failed)
        bus.is_away = False
        await soon(lambda: check.is_ok)
    assert len(await topic(bus)) == len(KNOWN)


async def test_brokers_that_are_away_fail_the_check_while_no_pod_changes() -> None:
    bus = DeadBus()
    async with publishing(bus, table_of()) as check:
        await soon(lambda: check.is_ok)
        bus.is_away = True
        await soon(lambda: check.has_failed)
        bus.is_away = False
        await soon(lambda: check.is_ok)
