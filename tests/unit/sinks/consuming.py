"""The consume loop over a bus in memory, with failing consumers and scripted sinks."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, cast

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.memory_consumer import MemoryConsumer
from gpuledger.bus.protocol import (
    Consumer,
    Gap,
    Polled,
    Record,
    Subscription,
    TopicPartition,
    Unreadable,
    UnreadableReason,
)
from gpuledger.codec import Decoder, encode
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check
from gpuledger_sinks.loop import consume
from gpuledger_sinks.protocol import Batch, ConsumerConfig, Partitions, Sink, SinkContext
from tests.default_topics import EVENTS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    NODE,
    ManualClock,
    committed,
    event,
    place_of,
)

GROUP = "test"


AT = place_of(NODE)


class Recorder(Sink):
    """A sink that accepts everything while its gate is open."""

    name = "recorder"

    def __init__(self, receiver: str = "") -> None:
        self.receiver = receiver
        self.gaps: list[tuple[Gap, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = 0
        self.taken: list[tuple[TopicPartition, int]] = []
        self.released: list[Partitions] = []
        self.acknowledges = True

    @override
    async def assign(self, partitions: Partitions) -> None:
        pass

    @override
    async def handle_gap(self, gap: Gap) -> None:
        self.gaps.append((gap, len(self.taken)))

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        self.entered += len(batches)
        for batch in batches:
            await self.gate.wait()
            self.taken += [(batch.partition, record.offset) for record, _ in batch.items]
            if self.acknowledges:
                context.acknowledge(batch.partition, batch.next_offset)

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        self.released.append(partitions)


def consuming(on: Any, sink: Recorder, **how: Any) -> asyncio.Future[None]:  # noqa: ANN401  # any bus
    values: dict[str, Any] = {"group": GROUP, "poll_seconds": 0.01, **how}
    decoders = {EVENTS.name: Decoder(topic=EVENTS.name, record=GpuEvent)}
    check = values.pop("check", Check())
    clock = values.pop("clock", ManualClock())
    gaps = values.pop("gaps", None)
    return asyncio.ensure_future(
        consume(
            bus=on,
            sink=sink,
            config=ConsumerConfig(decoders=decoders, **values),
            check=check,
            clock=clock,
            gaps=gaps,
        )
    )


def is_committed(on: MemoryBus, offset: int | None) -> Callable[[], bool]:
    return lambda: committed(on, GROUP, AT) == offset


class Flaky(MemoryConsumer):
    """A consumer whose first calls of one kind fail."""

    failures: Mapping[str, int]

    def _maybe_fail(self, what: str) -> None:
        left = dict(self.failures)
        if left.get(what, 0) > 0:
            left[what] -= 1
            self.failures = left
            raise BusUnavailableError(f"no broker for {what}")

    @override
    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        self._maybe_fail("poll")
        return await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)

    @override
    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._maybe_fail("commit")
        await super().commit(offsets)


class FlakyBus(MemoryBus):
    """A bus that opens flaky consumers, and fails to open some."""

    failures: Mapping[str, int] = {}
    opened = 0
    newest: "Flaky"

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            assert isinstance(consumer, MemoryConsumer)
            consumer.__class__ = Flaky
            consumer.failures = self.failures if self.opened == 0 else {}  # type: ignore[attr-defined]  # it is flaky now
            self.opened += 1
            self.newest = cast("Flaky", consumer)
            yield consumer


class Spoiled(MemoryConsumer):
    """A consumer that cannot unpack invalid JSON, as if it were in a batch of ten."""

    @override
    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        polled = await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)
        return {at: [self._spoil(record) for record in records] for at, records in polled.items()}

    def _spoil(self, record: Record) -> Record:
        if record.value != b"spoiled":
            return record
        why = Unreadable(record.offset - 1, UnreadableReason.CODEC, "it is packed with gzip")
        return record._replace(key=None, value=None, unreadable=why)


class SpoiledBus(MemoryBus):
    """A bus whose consumers cannot unpack some batches."""

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            consumer.__class__ = Spoiled
            yield consumer


def flaky(**failures: int) -> FlakyBus:
    made = FlakyBus()
    made.failures = failures
    made.create(BUS_TOPICS)
    return made


class ScriptedConsumer:
    """A consumer whose polls are the test's steps; after the last one they are empty."""

    def __init__(self, subscription: Subscription, script: "Script") -> None:
        self._subscription, self._script = subscription, script
        self._held: Partitions = frozenset()
        self._paused: set[TopicPartition] = set()
        self.commits: list[Mapping[TopicPartition, int]] = []

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        await asyncio.sleep(0)
        step = next(self._script, None)
        brought = {} if step is None else await step(self)
        given = {at: records for at, records in brought.items() if at not in self._paused}
        self._script.given += [(at, one.offset) for at in given for one in given[at]]
        return given

    async def gain(self, partition: TopicPartition) -> None:
        self._held |= {partition}
        await self._subscription.on_assigned(frozenset({partition}))

    async def lose(self, partition: TopicPartition) -> None:
        await self._subscription.on_revoked(frozenset({partition}))
        self._held -= {partition}
        self._paused -= {partition}

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        assert offsets.keys() <= self._held
        self.commits.append(offsets)

    def at_end(self) -> Partitions:
        return self._held

    def withheld_seconds(self) -> float:
        return 0.0

    def is_answered(self) -> bool:
        return True

    def assignment(self) -> Partitions:
        return self._held

    def pause(self, partitions: Partitions) -> None:
        self._paused |= partitions & self._held

    def resume(self, partitions: Partitions) -> None:
        self._paused -= partitions


Step = Callable[[ScriptedConsumer], Awaitable[Mapping[TopicPartition, Sequence[Record]]]]


class Script:
    """The remaining steps, and the records returned by the completed ones."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self.given: list[tuple[TopicPartition, int]] = []

    def __next__(self) -> Step:
        return next(self._steps)


class ScriptedBus(MemoryBus):
    script: Script

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        yield cast("Consumer", ScriptedConsumer(subscription, self.script))


def scripted(*steps: Step) -> ScriptedBus:
    made = ScriptedBus(BUS_TOPICS)
    made.script = Script(steps)
    return made


def first_of(partition: TopicPartition, *, offset: int = 0) -> Polled:
    nodes = (f"node-{number}" for number in count())
    made = event(0, node=next(each for each in nodes if place_of(each) == partition))
    at, key = (*partition, offset), node_key(made).encode()
    return {partition: [Record(*at, made.time_ns // 1_000_000, key, encode(made))]}
