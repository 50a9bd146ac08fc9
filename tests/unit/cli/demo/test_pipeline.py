"""The end of a run: all samples reach the sinks first."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.memory_consumer import MemoryConsumer
from gpuledger.bus.protocol import (
    Consumer,
    Message,
    Producer,
    Record,
    Subscription,
    TopicPartition,
)
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import key_in
from gpuledger.store.query import count_rows
from gpuledger.store.schema import GAPS
from gpuledger_cli.demo.pipeline import drain, running
from gpuledger_cli.demo.plan import DEMO_SCENARIO, DemoPlan
from gpuledger_cli.demo.source import SimulatedMachine
from gpuledger_cli.demo.totals import Tally
from gpuledger_sinks.registry import STORE
from tests.default_topics import SAMPLES
from tests.hanging import HANG_SECONDS

Batch = Mapping[TopicPartition, Sequence[Record]]


class LateBus(MemoryBus):
    """Keeps the store's records back until released, like a slow broker."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = True

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            assert isinstance(consumer, MemoryConsumer)
            if subscription.group == STORE.group:
                self._keep_back(consumer)
            yield consumer

    def _keep_back(self, consumer: MemoryConsumer) -> None:
        poll = consumer.poll

        async def late(*, timeout_seconds: float, max_records: int) -> Batch:
            if self.is_late and consumer.assignment():
                await asyncio.sleep(timeout_seconds)
                return {}
            return await poll(timeout_seconds=timeout_seconds, max_records=max_records)

        consumer.poll = late  # type: ignore[method-assign]  # the bus makes it itself


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(HANG_SECONDS):
        while not is_so():  # noqa: ASYNC110  # the condition has no event
            await asyncio.sleep(0.01)


async def test_a_run_ends_only_after_each_sink_has_read_the_last_events(tmp_path: Path) -> None:
    plan = DemoPlan(
        scenario=DEMO_SCENARIO, source="simulated", kafka=None, store=tmp_path, seconds=None
    )
    bus = LateBus()
    async with running(
        plan, bus=bus, machine=SimulatedMachine(plan.scenario, cluster="default")
    ) as run:
        await until(lambda: run.tally.events >= 2)
        draining = asyncio.create_task(drain(run))
        await until(lambda: run.ending.ticks is not None and run.tally.events >= run.ending.ticks)
        bus.is_late = False
        await draining
    assert [sink.line(run.reader.newest).missing for sink in run.sinks] == [0, 0, 0]
    assert count_rows(str(plan.store)) >= run.tally.entries > 0


async def test_a_second_run_stores_its_events_after_those_of_the_first(tmp_path: Path) -> None:
    plan = DemoPlan(
        scenario=DEMO_SCENARIO, source="simulated", kafka=None, store=tmp_path, seconds=None
    )
    entries = 0
    for _ in range(2):
        machine = SimulatedMachine(plan.scenario, cluster="default")
        async with running(plan, bus=MemoryBus(), machine=machine) as run:
            await until(lambda: run.tally.events >= 2)  # ends within this run
            await drain(run)
        entries += run.tally.entries
    assert count_rows(str(tmp_path)) >= entries
    assert count_rows(str(tmp_path), name=GAPS.name) == 0


async def test_events_that_a_sink_has_not_read_at_the_end_are_counted(tmp_path: Path) -> None:
    plan = DemoPlan(
        scenario=DEMO_SCENARIO, source="simulated", kafka=None, store=tmp_path, seconds=None
    )
    async with running(
        plan, bus=LateBus(), machine=SimulatedMachine(plan.scenario, cluster="default")
    ) as run:
        await until(lambda: run.tally.events >= 2)
    missing = {sink.sink: sink.line(run.reader.newest).missing for sink in run.sinks}
    assert missing["store"] >= 2


class ForgettingBus(MemoryBus):
    """Does not acknowledge the first batch of samples, although it has stored it."""

    forgets = True

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as inner:
            publish = inner.publish

            async def forget(topic: str, partition: int, messages: Sequence[Message]) -> int | None:
                end = await publish(topic, partition, messages)
                if topic == self.topics.samples.name and self.forgets:
                    self.forgets = False
                    raise BusUnavailableError("no acknowledgement")
                return end

            inner.publish = forget  # type: ignore[method-assign]  # the bus makes it itself
            yield inner


async def test_a_sample_that_was_published_again_counts_once(tmp_path: Path) -> None:
    plan = DemoPlan(
        scenario=DEMO_SCENARIO, source="simulated", kafka=None, store=tmp_path, seconds=None
    )
    bus = ForgettingBus()
    async with running(
        plan, bus=bus, machine=SimulatedMachine(plan.scenario, cluster="default")
    ) as run:
        await until(lambda: run.tally.events >= 4)
        await drain(run)
    assert run.tally.events == run.ending.ticks
    assert len(bus.kept(SAMPLES.name)) > run.tally.events


async def test_the_scenario_begins_when_its_agents_start(tmp_path: Path) -> None:
    plan = DemoPlan(
        scenario=DEMO_SCENARIO, source="simulated", kafka=None, store=tmp_path, seconds=None
    )
    machine = SimulatedMachine(plan.scenario, cluster="default")
    made_ns = machine.clock.time_ns()
    await asyncio.sleep(0.5)  # the time that brokers need to create topics
    started_ns = machine.clock.time_ns()
    async with running(plan, bus=MemoryBus(), machine=machine) as run:
        await until(lambda: run.tally.events >= 2)
    before = Tally(covered_ns={key_in("default", "gpu-node-1"): [(made_ns, started_ns)]})
    assert sum(machine.truth(before).values()) == 0
    assert sum(machine.truth(run.tally).values()) > 0
