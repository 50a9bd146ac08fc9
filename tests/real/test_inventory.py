"""A node's inventory on a real broker whose topic is deleted and recreated."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.clock import SystemClock
from gpuledger.settings import KafkaSettings
from tests.default_topics import INVENTORY
from tests.real.changed_topics import recreate
from tests.unit.agent.publish.builders import bundle_of
from tests.unit.agent.publish.test_inventory import inventory_of
from tests.unit.agent.publish.test_inventory_repeats import publishing

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka

DEADLINE_SECONDS = 60


class HastyClock(SystemClock):
    """Sleeps for a shorter time."""

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 200)


async def values_in(bus: KafkaBus) -> list[bytes | None]:
    async with bus.reader() as reader:
        return [
            record.value
            for partition, span in (await reader.spans(INVENTORY.name)).items()
            async for records in reader.read(partition, span)
            for record in records
        ]


async def wait_until_published(bus: KafkaBus, value: bytes) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while value not in await values_in(bus):  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.2)


async def test_a_recreated_topic_has_the_inventory_again(
    start_kafka: Callable[[], Kafka],
) -> None:
    settings = KafkaSettings(bootstrap_servers=start_kafka().bootstrap_servers)
    await create_topics(settings)
    bus = KafkaBus(settings)
    async with publishing(bus, HastyClock()) as send_queue:
        send_queue.put_inventory(inventory_of(1))
        send_queue.put(bundle_of(2))
        await wait_until_published(bus, b"1")
        # The id is known by now.
        await asyncio.sleep(1)
        before = (await bus.describe(INVENTORY.name)).topic_id
        await recreate(settings, INVENTORY)
        assert (await bus.describe(INVENTORY.name)).topic_id != before
        await wait_until_published(bus, b"1")
