"""Installations with different prefixes are isolated, from the agents to the sinks."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import (
    Consumer,
    HistoryReader,
    Producer,
    Subscription,
    TopicDescription,
    Transactions,
)
from gpuledger.topics import Topic, Topics
from gpuledger_cli.demo.pipeline import Run, drain, running
from gpuledger_cli.demo.plan import DEMO_SCENARIO, DemoPlan
from gpuledger_cli.demo.source import SimulatedMachine
from tests.unit.cli.demo.test_pipeline import until


class SharedBus:
    """One installation's client of a bus that others use too, like its own client of Kafka."""

    def __init__(self, inner: MemoryBus, topics: Topics) -> None:
        self._inner = inner
        self.topics = topics
        self.groups: set[str] = set()
        """The consumer groups that were joined."""
        self.transactional_ids: set[str] = set()
        """The transactional ids that were opened."""
        inner.create(topics)

    def producer(self) -> AbstractAsyncContextManager[Producer]:
        return self._inner.producer()

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        self.groups.add(subscription.group)
        return self._inner.consumer(subscription)

    def transactions(self, transactional_id: str) -> AbstractAsyncContextManager[Transactions]:
        self.transactional_ids.add(transactional_id)
        return self._inner.transactions(transactional_id)

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        return self._inner.reader()

    async def partitions(self, topic: str) -> int:
        return await self._inner.partitions(topic)

    async def describe(self, topic: str) -> TopicDescription:
        return await self._inner.describe(topic)

    async def topic_id(self, topic: str) -> str | None:
        return await self._inner.topic_id(topic)

    async def count(self, topic: Topic) -> int:
        """Return how many records were written to a topic."""
        async with self.reader() as reader:
            return sum(span.end for span in (await reader.spans(topic.name)).values())


def installed(bus: SharedBus, store: Path) -> AbstractAsyncContextManager[Run]:
    """Run agents, podwatch, join and sinks on simulated nodes, which have the same names."""
    plan = DemoPlan(
        scenario=DEMO_SCENARIO, source="simulated", kafka=None, store=store, seconds=None
    )
    return running(plan, bus=bus, machine=SimulatedMachine(plan.scenario, cluster="default"))


async def test_two_prefixes_on_one_bus_are_isolated(tmp_path: Path) -> None:
    """No topic with a default name exists: a component that used one would end the run."""
    shared = MemoryBus([])
    buses = [SharedBus(shared, Topics(prefix)) for prefix in ("blue", "green.b")]
    async with (
        installed(buses[0], tmp_path / "blue") as blue,
        installed(buses[1], tmp_path / "green") as green,
    ):
        await until(lambda: min(blue.tally.events, green.tally.events) >= 4)
        for run in (blue, green):
            await drain(run)
        for bus, run in zip(buses, (blue, green), strict=True):
            ticks = await bus.count(bus.topics.samples)
            # Nodes and GPUs have the same names: a tick of the other one would be booked too.
            assert await bus.count(bus.topics.events) == run.tally.events == ticks
            assert await bus.count(bus.topics.pods) > 0
            assert await bus.count(bus.topics.dead_letters) == run.reader.dead_letters == 0
    for bus, run in zip(buses, (blue, green), strict=True):
        assert [sink.line(run.reader.newest).missing for sink in run.sinks] == [0, 0, 0]
        names = bus.groups | bus.transactional_ids
        assert all(name.startswith(f"{bus.topics.prefix}-") for name in names)
        assert bus.transactional_ids
