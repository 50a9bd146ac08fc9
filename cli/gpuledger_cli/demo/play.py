"""Writes days of a fleet into a store, as if its pipeline had run all that time.

The fleet's records pass through the join's stage and the store sink on a bus in memory, day by day,
and the store's maintainer sums them up. So the tables have the rows that a real fleet would have
left, and the days can be billed and closed. All clocks show the played time.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Producer, Record, TopicPartition
from gpuledger.clock import NS_PER_US
from gpuledger.completeness import JOIN, message_of
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import UserError
from gpuledger.placement import placement_rule
from gpuledger.records import Watermark
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks, in_daemon_thread
from gpuledger.topics import Topic
from gpuledger_cli.in_process.store_directory import mark_finished
from gpuledger_enricher.join.stage import JoinStage
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.fleet.plan import MINUTES_A_DAY, FleetPlan
from gpuledger_simulator.fleet.records import FleetRecord, FleetRecords
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.dimensions import open_followed
from gpuledger_sinks.store.maintainer import Maintainer, MaintenanceSettings
from gpuledger_sinks.store.store_sink import StoreTables
from gpuledger_sinks.store.stored import Streams

_POLL_SECONDS: Final = 0.005
_MAINTAINED_DAYS: Final = 7


async def play(plan: FleetPlan, store: str, *, advance: Callable[[int], None]) -> None:
    """Write the days of a plan into an empty store; call `advance` after each of them.

    Raises `UserError` if the store cannot be written.
    """
    clock = ManualClock(start_ns=plan.begin_ns)
    maintainer = Maintainer(MaintenanceSettings(uri=store), clock=clock)
    # Rows are written after each poll, so that a day is stored before the next one is made.
    settings = StoreSettings(uri=store, flush_rows=1, max_poll_records=10_000)
    bus, readiness = MemoryBus(), Readiness()
    receiver = readiness.check("store.receiver", severity=CheckSeverity.WARNING)
    records = FleetRecords(plan, topics=bus.topics)
    async with bus.producer() as producer:
        await _announce(plan, bus, producer)
        join = _Join(bus, producer)
        sink = asyncio.create_task(
            run_sink(STORE, bus=bus, settings=settings, readiness=readiness, clock=clock)
        )
        try:
            for day in range(1, plan.days + 1):
                for record in records.of_day(day - 1):
                    await join.take(record)
                clock.advance_to(plan.time_ns(day * MINUTES_A_DAY))
                await _wait_until_stored(bus, sink, receiver)
                if day % _MAINTAINED_DAYS == 0:
                    await in_daemon_thread(maintainer.run)
                advance(1)
        finally:
            await end_tasks(sink)
    await _complete_versions(bus, settings, clock=clock)
    mark_finished(store, now_us=clock.time_ns() // NS_PER_US)
    await in_daemon_thread(maintainer.run)


async def _announce(plan: FleetPlan, bus: MemoryBus, producer: Producer) -> None:
    """Publish watermarks of the period's start, so that the sink marks all partitions."""
    for cluster in sorted({pool.cluster for pool in plan.fleet.pools}):
        for partition in range(bus.topics.events.partitions):
            watermark = Watermark(
                component=JOIN,
                cluster=cluster,
                partition=partition,
                complete_until_ns=plan.begin_ns,
                topic=bus.topics.events.name,
                next_offset=0,
                publisher="gpuledger-demo",
            )
            message = message_of(watermark, time_ns=plan.begin_ns)
            await producer.publish(bus.topics.watermarks.name, partition, [message])


class _Join:
    """Publishes records of a fleet, and the events and incidents that the join makes of them."""

    def __init__(self, bus: MemoryBus, producer: Producer) -> None:
        self._topics, self._producer = bus.topics, producer
        self._now_ns = 0
        self._next_offsets: dict[TopicPartition, int] = {}
        self._stage = JoinStage(
            dead_letters=DeadLetterQueue(
                consumer=JOIN,
                producer=producer,
                topic=bus.topics.dead_letters,
                partitions=bus.topics.dead_letters.partitions,
            ),
            is_placed=placement_rule(partitions=bus.topics.samples.partitions),
            topics=bus.topics,
            time_ns=lambda: self._now_ns,
        )

    async def take(self, made: FleetRecord) -> None:
        """Take the next record in order of time."""
        self._now_ns = made.time_ns
        topics, topic = self._topics, made.topic
        at = TopicPartition(topic.name, made.partition)
        offset = self._next_offsets.get(at, 0)
        self._next_offsets[at] = offset + 1
        message = made.message
        record = Record(*at, offset, message.timestamp_ms, message.key, message.value)
        output, messages = topic, [message]
        if topic is topics.samples:
            output, messages = topics.events, self._stage.take_samples([record])
        elif topic is topics.incidents:
            output, messages = topics.attributed_incidents, self._stage.take_incidents([record])
        elif topic is topics.pods:
            self._stage.take_pods([record])
        elif topic is topics.nodes:
            self._stage.take_nodes([record])
        elif topic is topics.namespaces:
            self._stage.take_namespaces([record])
        await self._publish(output, made.partition, messages)

    async def _publish(self, topic: Topic, partition: int, messages: Sequence[Message]) -> None:
        if messages:
            await self._producer.publish(topic.name, partition, messages)


async def _wait_until_stored(bus: MemoryBus, sink: "asyncio.Task[None]", receiver: Check) -> None:
    """Wait until the sink has stored all events; raise an error if it cannot."""
    async with bus.reader() as reader:
        spans = await reader.spans(bus.topics.events.name)
    waits = {at: span.end for at, span in spans.items() if span.end}
    while any(bus.committed(STORE.group, at) != end for at, end in waits.items()):
        if sink.done():
            sink.result()
        if receiver.has_failed:
            raise UserError(f"--store: {receiver.detail}")
        await asyncio.sleep(_POLL_SECONDS)


async def _complete_versions(
    bus: MemoryBus, settings: StoreSettings, *, clock: ManualClock
) -> None:
    """Append records of pods, nodes and incidents that the sink did not store before it ended."""
    async with open_followed(
        StoreTables.of(settings).dimensions,
        bus=bus,
        streams=Streams(group=bus.topics.group(STORE.group), generation=settings.generation),
        readiness=Readiness(),
        clock=clock,
        settings=settings,
    ) as followed:
        events = bus.topics.events
        partitions = [TopicPartition(events.name, each) for each in range(events.partitions)]
        for topic in followed:
            topic.follow(partitions)
            await topic.update()
            # Again, because a write that the sink left behind makes a concurrent one fail.
            await topic.update()
