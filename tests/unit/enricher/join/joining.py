"""Runs the join on the in-memory bus and reads what it writes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Message,
    Subscription,
    TopicPartition,
)
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import Decoder, encode
from gpuledger.keys import key_in
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger.topics import Topic, partition_of_node
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from tests.default_topics import EVENTS, SAMPLES
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.join.ticks import process, sample

PARTITION = partition_of_node(key_in("default", "node-a"), partitions=12)
SETTINGS = JoinSettings(
    join=JoinTuning(
        poll_timeout_seconds=0.05, commit_interval_seconds=0.001, podwatch_timeout_seconds=0
    )
)
GROUP = SETTINGS.join.group


@asynccontextmanager
async def joining(bus: MemoryBus, *, settings: JoinSettings = SETTINGS) -> AsyncIterator[Readiness]:
    """Run a join on the bus while the context is open."""
    readiness = Readiness()
    task = asyncio.create_task(run_join(bus=bus, settings=settings, readiness=readiness))
    try:
        yield readiness
    finally:
        task.cancel()
        await asyncio.wait({task})


async def publish(
    bus: MemoryBus, topic: Topic, *values: object, key: str = "default/node-a"
) -> None:
    """Publish values, or raw bytes, to the partition of the node."""
    data = [value if isinstance(value, bytes) else encode(value) for value in values]
    async with bus.producer() as producer:
        messages = [Message(key.encode(), value, 1_790_000_000_000) for value in data]
        await producer.publish(topic.name, PARTITION, messages)


async def read(bus: MemoryBus, topic: Topic, count: int) -> Sequence[bytes]:
    """Read `count` records of a topic from its beginning, within a timeout."""
    found: list[bytes] = []
    subscription = Subscription(group="reader", topics=[topic.name])
    async with asyncio.timeout(HANG_SECONDS), bus.consumer(subscription) as consumer:
        while len(found) < count:
            batch = await consumer.poll(timeout_seconds=1, max_records=100)
            found += [record.value or b"" for records in batch.values() for record in records]
    return found


async def read_events(bus: MemoryBus, count: int) -> list[GpuEvent]:
    """Read `count` events."""
    decoder = Decoder(topic=EVENTS.name, record=GpuEvent)
    return [decoder.decode(value) for value in await read(bus, EVENTS, count)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the join has fulfilled a condition."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110  # checks send no event
            await asyncio.sleep(0.01)


def tick(seq: int) -> object:
    """Return a tick in which the first pod was busy."""
    used = process(container=0, sm_utilization_ratio=0.5)
    return sample(seq=seq, interval_ns=NS_PER_MS, processes=[used])


async def committed(bus: MemoryBus, offset: int) -> None:
    """Wait until the join has committed this offset of its ticks."""
    partition = TopicPartition(SAMPLES.name, PARTITION)
    async with (
        asyncio.timeout(HANG_SECONDS),
        bus.consumer(Subscription(group=GROUP, stage="join", topics=[])) as consumer,
    ):
        while await consumer.committed(partition) != offset:  # noqa: ASYNC110 - the bus has no event for commits
            await asyncio.sleep(0)
