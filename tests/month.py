"""A month of agents, join and store sink, played as fast as possible.

The agents, the join's stage, the store sink and the maintainer are the real ones, on an in-memory
bus. A month has thirty days, and the test sets a day's length. A month with days of one hour has
all the events; a pod's start and end, which are uncertain by a tick, weigh 24 times as much as in a
real month.

The input is difficult on purpose: pod records arrive half a minute late, an agent restarts every
week, the join publishes some ticks twice, and one node's last hour arrives after the month is
closed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Final

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Message, Record, Subscription, TopicPartition
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.codec import encode
from gpuledger.keys import key_in
from gpuledger.records import ContainerRequest, PodContainer, PodRecord
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import end_tasks
from gpuledger.topics import Topic, partition_of_node
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.settings import AgentSettings, SpoolSettings
from gpuledger_agent.source_selection import play
from gpuledger_reports.pricing.billing import Bill, BillMaker
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.plan import NEVER_NS
from gpuledger_simulator.simulation import Simulation
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import STORE
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.maintainer import Maintainer, MaintenanceSettings
from tests.default_topics import EVENTS, INVENTORY, PODS, SAMPLES
from tests.hanging import HANG_SECONDS
from tests.month_scenario import (
    DAYS,
    EPOCH_NS,
    LATE_NODE,
    POLICY,
    TenantTruth,
    scenario_of,
    truth_of,
)
from tests.unit.enricher.join.builders import Given

HOUR_NS: Final = 3600 * NS_PER_SECOND
LATE_NS: Final = HOUR_NS
"""One node's ticks from this last part of the month arrive only after the month is closed."""
_RECORD_LATE_NS: Final = 30 * NS_PER_SECOND
_REPEATED: Final = 3
"""Events that the join publishes twice, out of every 100."""
_RESTART_DAYS: Final = 7
_MORE_NS: Final = 40 * NS_PER_SECOND


class GatedClock(ManualClock):
    """A clock that advances as fast as an agent sleeps, up to a gate."""

    def __init__(self, *, start_ns: int) -> None:
        super().__init__(start_ns=start_ns)
        self._gate_ns = start_ns
        self._arrived, self._opened = asyncio.Event(), asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        while self.time_ns() >= self._gate_ns:
            self._arrived.set()
            await self._opened.wait()
        await super().sleep(seconds)

    async def run_to(self, until_ns: int) -> None:
        """Move the gate, and wait until the clock reaches it."""
        self._gate_ns = until_ns
        self._arrived.clear()
        opened, self._opened = self._opened, asyncio.Event()
        opened.set()
        await self._arrived.wait()


@dataclass(kw_only=True)
class PlayedNode:
    """A node with its agent; its records are read as the agent publishes them."""

    simulation: Simulation
    clock: GatedClock
    bus: MemoryBus
    consumer: Consumer
    settings: AgentSettings
    change_host: Callable[[Host], Host] = lambda host: host
    """Changes the interfaces through which the agent reads the node."""
    agent: "asyncio.Task[None] | None" = None

    async def run_to(self, until_ns: int) -> list[Record]:
        """Return what the agent publishes up to a time: ticks and inventories."""
        if self.agent is None:
            host = self.change_host(play(self.simulation.node(self.settings.node_name)))
            running = run_agent(
                host=host, bus=self.bus, settings=self.settings, readiness=Readiness()
            )
            self.agent = asyncio.create_task(running)
        await self.clock.run_to(until_ns)
        # A tick ends some windows before it is made, and a clock may have been set back.
        expected_ns = until_ns - round(3 * self.settings.sampling_interval_seconds * NS_PER_SECOND)
        found, newest_ns = list[Record](), 0
        async with asyncio.timeout(HANG_SECONDS):
            while newest_ns < expected_ns:
                batches = await self.consumer.poll(timeout_seconds=0.05, max_records=500)
                found += [one for records in batches.values() for one in records]
                ticks = (one for one in found if one.topic == SAMPLES.name)
                newest_ns = NS_PER_MS * max((one.timestamp_ms for one in ticks), default=0)
        return found

    async def end(self) -> None:
        """Stop the agent; `run_to` starts another one."""
        if self.agent is not None:
            self.agent.cancel()
            await asyncio.wait({self.agent})
            self.agent = None


@dataclass(kw_only=True)
class Centre:
    """The readers of the agents' records: the join's stage, and the store sink behind it."""

    bus: MemoryBus
    pods: list[PodRecord]
    """Pods whose records have not arrived yet, the earliest first."""
    given: Given = field(default_factory=Given)
    _taken: int = 0

    async def take(self, records: Iterable[Record]) -> None:
        """Attribute the agents' records, and wait until the events are stored."""
        for one in sorted(records, key=attrgetter("timestamp_ms")):
            if one.topic == INVENTORY.name:
                await self._publish(INVENTORY, [Message(one.key, one.value, one.timestamp_ms)])
                continue
            await self._take_pods(one.timestamp_ms * NS_PER_MS)
            self._taken += 1
            numbered = one._replace(offset=self._taken)
            events = self.given.stage.take_samples([numbered])
            # Like a join that was killed: the repeats follow the originals, and keep the node's
            # order.
            again = events if self._taken % 100 < _REPEATED else []
            await self._publish(EVENTS, [*events, *again])
        await self.settle()

    async def _take_pods(self, now_ns: int) -> None:
        self.given.now_ns = now_ns
        while self.pods and self.pods[0].created_time_ns + _RECORD_LATE_NS <= now_ns:
            pod = self.pods.pop(0)
            self.given.read_pod(pod)
            key = key_in(pod.cluster, pod.uid).encode()
            at = key_in(pod.cluster, pod.node)
            await self._publish(PODS, [Message(key, encode(pod), now_ns // NS_PER_MS)], at=at)

    async def _publish(
        self, topic: Topic, messages: Sequence[Message], *, at: str | None = None
    ) -> None:
        async with self.bus.producer() as producer:
            for message in messages:
                node = at or (message.key or b"").decode()
                partition = partition_of_node(node, partitions=topic.partitions)
                await producer.publish(topic.name, partition, [message])

    async def settle(self) -> None:
        """Wait until all events are stored."""
        async with asyncio.timeout(HANG_SECONDS):
            while not self._is_settled():  # noqa: ASYNC110  # the bus has no event for commits
                await asyncio.sleep(0.01)

    def _is_settled(self) -> bool:
        newest = {one.partition: one.offset for one in self.bus.kept(EVENTS.name)}
        return all(
            self.bus.committed(STORE.group, TopicPartition(EVENTS.name, partition)) == offset + 1
            for partition, offset in newest.items()
        )


@dataclass(frozen=True, kw_only=True)
class Month:
    """A month that is played into a store."""

    store: Path
    day_seconds: int = 86_400
    sampling_interval_seconds: float = 10.0

    @property
    def end_ns(self) -> int:
        """Return the end of the month."""
        return EPOCH_NS + DAYS * self.day_seconds * NS_PER_SECOND

    async def play(self, *, before_late: Callable[[], None]) -> dict[str, TenantTruth]:
        """Play the month; return the true usage of each namespace.

        `before_late` is called when everything except one node's last hour is in the store.
        """
        week_ns = _RESTART_DAYS * self.day_seconds * NS_PER_SECOND
        late: list[Record] = []
        async with AsyncExitStack() as stack:
            nodes = await self._nodes(stack)
            centre = await self._centre(stack, nodes[0].simulation)
            # Also the beginning of the next month, because the last ticks end there.
            gates_ns = [
                *range(EPOCH_NS + HOUR_NS, self.end_ns + 1, HOUR_NS),
                self.end_ns + _MORE_NS,
            ]
            for until_ns in gates_ns:
                for node in nodes:
                    output = await node.run_to(until_ns)
                    away = [one for one in output if self._comes_late(node, one)]
                    late += away
                    await centre.take(one for one in output if one not in away)
                if (until_ns - EPOCH_NS) % week_ns < HOUR_NS:
                    await nodes[0].end()
            self.maintain()
            before_late()
            await centre.take(late)
            self.maintain()
        by_name = {node.settings.node_name: node.simulation for node in nodes}
        return truth_of(by_name, until_seconds=DAYS * self.day_seconds)

    def _comes_late(self, node: PlayedNode, one: Record) -> bool:
        is_last_hour = one.timestamp_ms * NS_PER_MS > self.end_ns - LATE_NS
        return is_last_hour and (node.settings.node_name, one.topic) == (LATE_NODE, SAMPLES.name)

    def maintain(self) -> None:
        """Aggregate hours and days with the store's maintainer."""
        clock = ManualClock(start_ns=self.end_ns)
        Maintainer(MaintenanceSettings(uri=str(self.store)), clock=clock).run()

    def bill(self) -> Bill:
        """Return the month's bill by namespace, from the store's current content."""
        read = ReadPolicy(parse_policy(POLICY), "0" * 64, "month")
        maker = BillMaker(UsageReader(str(self.store)), read, by=["namespace"])
        return maker.make(Window(EPOCH_NS // 1000, self.end_ns // 1000))

    async def _nodes(self, stack: AsyncExitStack) -> list[PlayedNode]:
        scenario, nodes = scenario_of(self.day_seconds), list[PlayedNode]()
        for spec in scenario.nodes:
            clock, bus = GatedClock(start_ns=EPOCH_NS), MemoryBus()
            reading = Subscription(group="month", topics=[SAMPLES.name, INVENTORY.name])
            settings = AgentSettings(
                node_name=spec.name,
                sampling_interval_seconds=self.sampling_interval_seconds,
                # In the machine's time, not the played one: threads answer late on a busy machine.
                gpu_timeout_seconds=60.0,
                queue_samples=10_000,
                # An hour is played within seconds, and the backlog is sent no faster than this.
                spool=SpoolSettings(catch_up_factor=1000),
            )
            node = PlayedNode(
                simulation=Simulation(scenario, epoch_ns=EPOCH_NS, clock=clock),
                clock=clock,
                bus=bus,
                consumer=await stack.enter_async_context(bus.consumer(reading)),
                settings=settings,
            )
            stack.push_async_callback(node.end)
            nodes.append(node)
        return nodes

    async def _centre(self, stack: AsyncExitStack, simulation: Simulation) -> Centre:
        bus = MemoryBus()
        pods = sorted(pod_records_of(simulation), key=attrgetter("created_time_ns"))
        await stack.enter_async_context(storing(bus, self.store))
        return Centre(bus=bus, pods=pods)


@asynccontextmanager
async def storing(bus: MemoryBus, store: Path) -> AsyncIterator[None]:
    """Run the store sink while the context is open."""
    settings = StoreSettings(
        uri=str(store),
        flush_seconds=0.2,
        # The events may be of any year.
        max_age_seconds=1e10,
        max_future_seconds=1e10,
    )
    sink = run_sink(STORE, bus=bus, settings=settings, readiness=Readiness())
    task = asyncio.create_task(sink)
    try:
        yield
    finally:
        await end_tasks(task)


def pod_records_of(simulation: Simulation, cluster: str = "default") -> Iterator[PodRecord]:
    """Yield the records of a scenario's pods, as podwatch would publish them."""
    for one in simulation.pods:
        owner = one.spec.owner
        ended_ns = None if one.end_ns == NEVER_NS else simulation.epoch_ns + one.end_ns
        yield PodRecord(
            cluster=cluster,
            uid=simulation.uid(one),
            namespace=one.spec.namespace,
            name=one.spec.name,
            node=one.spec.node,
            owner_kind=owner.kind if owner else None,
            owner_name=owner.name if owner else None,
            labels=one.spec.labels,
            containers=[
                PodContainer(
                    name=name,
                    container_id=container_id,
                    restarts=0,
                    requested=ContainerRequest(resources={"nvidia.com/gpu": 1}),
                )
                for name, container_id in one.container_ids.items()
            ],
            phase="Running",
            created_time_ns=simulation.epoch_ns + one.start_ns - NS_PER_SECOND,
            deleted_time_ns=None if ended_ns is None else ended_ns + NS_PER_SECOND,
            resource_version="1",
        )
