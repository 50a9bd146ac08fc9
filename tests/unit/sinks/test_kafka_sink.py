"""The common part of the sinks that write to Kafka: each event's values there exactly once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Subscription, TopicPartition, Transactions
from gpuledger.clock import Clock
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError
from gpuledger.keys import key_in, node_key
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness
from gpuledger.topics import Topic, partition_of_node
from gpuledger_sinks.kafka_sink import MAX_TRANSACTION_BYTES, open_kafka_sink
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.protocol import OpenSink
from gpuledger_sinks.registry import KINDS, SinkKind
from tests.default_topics import DEAD_LETTERS, EVENTS, ROWS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    place_of,
    publish,
    running,
)

GROUP = "gpuledger-test"
AT, TO = place_of(NODE), place_of(NODE, ROWS.name)
NODES = [f"node-{number}" for number in range(6)]


def two_of(given: GpuEvent) -> list[bytes]:
    """Return two values of an event, so that a half-written event would show."""
    if given.node == "node-broken":
        raise ValueError("holder: position 9 is not one of the event's holders")
    if given.node == "node-large":
        return [b"small", b"x" * MAX_MESSAGE_BYTES]
    return [f"{given.node} {given.seq} {part}".encode() for part in "ab"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    topic: str = ROWS.name
    commit_interval_seconds: float = 0.0
    max_future_seconds: float = 300.0
    max_poll_records: int = 7


@dataclass(frozen=True, kw_only=True)
class Kind(SinkKind):
    """A kind that writes the values given here."""

    values_of: Callable[[GpuEvent], Sequence[bytes]]

    @override
    def load(self) -> OpenSink:
        return partial(open_kafka_sink, self, values_of=self.values_of)


def republishing(
    on: MemoryBus,
    *,
    clock: Clock | None = None,
    readiness: Readiness | None = None,
    values_of: Callable[[GpuEvent], Sequence[bytes]] = two_of,
    **changes: Any,  # noqa: ANN401  # as Settings takes them
) -> asyncio.Future[None]:
    kind = Kind(
        name="rows",
        group=GROUP,
        module="",
        summary="",
        drop_reasons=KINDS["rows"].drop_reasons,
        values_of=values_of,
    )
    return asyncio.ensure_future(
        run_sink(
            kind,
            bus=on,
            settings=Settings(**changes),
            readiness=readiness or Readiness(),
            clock=clock or ManualClock(),
        )
    )


def texts(on: MemoryBus, topic: str = ROWS.name) -> list[str]:
    return [(record.value or b"").decode() for record in on.kept(topic)]


def expected(events: Sequence[GpuEvent]) -> list[str]:
    return [value.decode() for one in events for value in two_of(one)]


def ticks(count: int, *, first: int = 0) -> list[GpuEvent]:
    return [event(tick, node=node) for tick in range(first, first + count) for node in NODES]


async def test_values_are_in_the_partition_of_their_event_with_its_key_and_its_time() -> None:
    on = bus()
    await publish(on, event(0, node="node-1"), event(1, node="node-1"))
    async with running(republishing(on)):
        await eventually(lambda: len(on.kept(ROWS.name)) == 4)

    partition = place_of("node-1", ROWS.name)
    assert {(record.topic, record.partition) for record in on.kept(ROWS.name)} == {partition}
    assert {record.key for record in on.kept(ROWS.name)} == {b"default/node-1"}
    assert [record.timestamp_ms for record in on.kept(ROWS.name)] == [
        (START_NS + tick * SECOND_NS) // 1_000_000 for tick in (0, 0, 1, 1)
    ]
    assert texts(on) == expected([event(0, node="node-1"), event(1, node="node-1")])


async def test_offsets_are_committed_with_the_values_and_a_restart_repeats_nothing() -> None:
    on = bus()
    await publish(on, event(0), event(1))
    async with running(republishing(on)):
        await eventually(lambda: on.kept(ROWS.name))
        assert committed(on, GROUP, AT) == 2
    await publish(on, event(2))
    async with running(republishing(on)):
        await eventually(lambda: committed(on, GROUP, AT) == 3)

    assert texts(on) == expected([event(tick) for tick in range(3)])


async def test_a_tick_published_twice_is_written_once() -> None:
    on = bus()
    await publish(on, event(0), event(1), event(1), event(0), event(2))
    async with running(republishing(on)):
        await eventually(lambda: committed(on, GROUP, AT) == 5)

    assert texts(on) == expected([event(tick) for tick in range(3)])


AHEAD_NS = START_NS + 400 * SECOND_NS
UNFIT: list[tuple[str, GpuEvent | bytes, str]] = [
    ("undecodable", b"no event", "not JSON"),
    ("invalid", event(node="node-broken"), "holder: position 9"),
    ("too_large", event(node="node-large"), "node-large"),
    ("future", event(node="node-ahead", time_ns=AHEAD_NS), "100 s beyond the allowed future"),
]


@pytest.mark.parametrize(("reason", "unfit", "detail"), UNFIT, ids=[row[0] for row in UNFIT])
async def test_an_event_that_cannot_be_written_is_a_dead_letter_as_a_whole(
    reason: str, unfit: GpuEvent | bytes, detail: str
) -> None:
    on = bus()
    node = NODE if isinstance(unfit, bytes) else unfit.node
    await publish(on, unfit, node=node)
    at = place_of(node)
    async with running(republishing(on)):
        await eventually(lambda: committed(on, GROUP, at) == 1)
        await publish(on, event(1, node="node-1"))
        await eventually(lambda: on.kept(ROWS.name))

    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.reason, dead_letter.offset, dead_letter.consumer) == (reason, 0, GROUP)
    assert detail in dead_letter.detail
    assert texts(on) == expected([event(1, node="node-1")])


class Shaken(MemoryBus):
    """A bus whose commits fail by a plan: before they start, or after they are complete."""

    plan: list[str]

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        async with super().transactions(transactional_id) as inner:
            yield ShakenTransactions(inner, self.plan)


class ShakenTransactions:
    def __init__(self, inner: Transactions, plan: list[str]) -> None:
        self._inner, self._plan, self._is_over = inner, plan, False

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> None:
        assert not self._is_over, "a writer that failed is not to be used again"
        step = self._plan.pop(0) if self._plan else "well"
        self._is_over = step != "well"
        if step != "before":
            await self._inner.commit(messages, offsets=offsets, group=group)
        if self._is_over:
            raise BusUnavailableError(f"failed {step} the commit")


def shaken(*plan: str) -> Shaken:
    made = Shaken()
    made.plan = list(plan)
    made.create(BUS_TOPICS)
    return made


@pytest.mark.parametrize(
    "plan",
    [("before",), ("after",), ("before", "before", "after"), ("well", "after", "before", "well")],
    ids=" ".join,
)
async def test_a_failing_commit_omits_nothing_and_repeats_nothing(
    plan: tuple[str, ...],
) -> None:
    on, clock, readiness = shaken(*plan), ManualClock(), Readiness()
    events = ticks(4)
    await publish(on, *events, b"no event")
    async with running(republishing(on, clock=clock, readiness=readiness)):
        await eventually(lambda: len(texts(on)) >= 2 * len(events) and not on.plan)
        await eventually(readiness.is_ready)

    assert sorted(texts(on)) == sorted(expected(events))
    assert [dead_letter.value_base64 for dead_letter in await dead_letters(on)] == ["bm8gZXZlbnQ="]
    assert sum(clock.slept) > 0


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_a_dead_letter_is_counted_once_however_often_its_record_is_read_again() -> None:
    def so_far() -> tuple[float, float]:
        found_dead_letters = counted(
            "gpuledger_dead_letters_total", topic=EVENTS.name, reason="future"
        )
        return found_dead_letters, counted(
            "gpuledger_sink_dropped_total", sink="rows", reason="future"
        )

    on, clock, readiness, before = shaken("before", "before"), PausedClock(), Readiness(), so_far()
    check = readiness.check("rows.receiver")
    await publish(on, event(0, time_ns=AHEAD_NS))
    async with running(republishing(on, clock=clock, readiness=readiness)):
        for _ in range(2):
            await eventually(lambda: clock.waiting)
            waiting = "1 dead-letter record waits to be published: failed before"
            assert check.detail.startswith(waiting)
            assert so_far() == before
            clock.go_on()
        await eventually(lambda: committed(on, GROUP, AT) == 1)

    assert so_far() == (before[0] + 1, before[1] + 1)


class PausedClock(ManualClock):
    """A clock whose waits end when the test ends them."""

    def __init__(self) -> None:
        super().__init__()
        self._goes_on = asyncio.Event()
        self.waiting = False

    @override
    async def sleep(self, seconds: float) -> None:
        if seconds:
            self.waiting = True
            await self._goes_on.wait()

    def go_on(self) -> None:
        """End the current wait."""
        self.waiting = False
        self._goes_on.set()
        self._goes_on = asyncio.Event()


class Deaf(MemoryBus):
    """A bus that does not commit one of its partitions."""

    number: int | None

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        plan = ["before"] if transactional_id.endswith(f"-{self.number}") else []
        async with super().transactions(transactional_id) as inner:
            yield ShakenTransactions(inner, plan)


async def test_the_check_fails_while_one_of_several_partitions_is_not_delivered() -> None:
    on, readiness = Deaf(), Readiness()
    on.number = AT.partition
    on.create(BUS_TOPICS)
    other = next(node for node in NODES if place_of(node) != AT)
    check = readiness.check("rows.receiver")
    with capture_logs() as logged:
        async with running(republishing(on, readiness=readiness)):
            await publish(on, event(0))
            await eventually(lambda: check.has_failed)
            for tick in range(1, 8):
                await publish(on, event(tick, node=other))
                await eventually(lambda: len(texts(on)) == 2 * tick)  # noqa: B023  # called at once
                assert check.has_failed
            on.number = None
            await eventually(lambda: check.is_ok and committed(on, GROUP, AT) == 1)

    changes = [line["event"] for line in logged if line["event"].startswith("check_")]
    assert changes.count("check_failed") == 1


class Endless(MemoryBus):
    """A bus that does not commit one partition, and fails once its writer is closed."""

    number: int

    @override
    @asynccontextmanager
    async def transactions(self, transactional_id: str) -> AsyncIterator[Transactions]:
        async with super().transactions(transactional_id) as inner:
            if not transactional_id.endswith(f"-{self.number}"):
                yield inner
                return
            endless = EndlessTransactions()
            yield endless
            await endless.close()


class EndlessTransactions:
    def __init__(self) -> None:
        self._closing, self._ended = asyncio.Event(), asyncio.Event()

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> None:
        await self._closing.wait()
        self._ended.set()
        raise BusUnavailableError("closed while it was committed")

    async def close(self) -> None:
        self._closing.set()
        await self._ended.wait()


async def test_the_check_does_not_fail_for_a_partition_of_another_member() -> None:
    on, readiness = Endless(), Readiness()
    on.create(BUS_TOPICS)
    stays, goes = (next(node for node in NODES if place_of(node)[1] == at) for at in (0, 1))
    on.number = place_of(goes).partition
    await publish(on, event(0, node=goes))

    async def polls() -> None:
        async with on.consumer(
            Subscription(group=GROUP, stage="rows", topics=[EVENTS.name])
        ) as consumer:
            while True:
                await consumer.poll(timeout_seconds=0.01, max_records=1)

    with capture_logs() as logged:
        async with running(republishing(on, readiness=readiness)):
            await eventually(lambda: "partitions_assigned" in {line["event"] for line in logged})
            async with running(polls()):
                await publish(on, event(0, node=stays))
                await eventually(lambda: committed(on, GROUP, place_of(stays)) == 1)
                assert readiness.check("rows.receiver").is_ok


async def test_a_fenced_sink_waits_and_then_continues_from_the_committed_offset() -> None:
    on, clock = bus(), ManualClock()
    await publish(on, event(0))
    async with running(republishing(on, clock=clock)):
        await eventually(lambda: committed(on, GROUP, AT) == 1)
        async with on.transactions(f"{GROUP}-{AT.partition}") as other:
            # Another owner writes the next event of the partition, before this sink owns it again.
            await other.commit(
                {TO: [Message(None, b"the other's", 0)]}, offsets={AT: 2}, group=GROUP
            )
        await publish(on, event(1), event(2))
        await eventually(lambda: committed(on, GROUP, AT) == 3)

    assert texts(on) == [*expected([event(0)]), "the other's", *expected([event(2)])]
    assert max(clock.slept) >= 3


async def test_two_sinks_share_the_partitions_and_write_each_event_once() -> None:
    on = bus()
    events = [*ticks(3), *ticks(6, first=3)]
    await publish(on, *events[:12])
    async with running(republishing(on)):
        await eventually(lambda: texts(on))
        async with running(republishing(on)):
            await publish(on, *events[12:40])
            await eventually(lambda: len(texts(on)) >= 80)
        await publish(on, *events[40:])
        await eventually(lambda: len(texts(on)) >= 2 * len(events))

    assert sorted(texts(on)) == sorted(expected(events))


@pytest.mark.parametrize(
    ("topic", "remedy"),
    [(ROWS.name, "no topic 'gpuledger.rows.v1'"), ("others", "kafka-topics.sh --create")],
)
async def test_a_sink_waits_for_a_missing_topic_and_reports_the_remedy(
    topic: str, remedy: str
) -> None:
    on, readiness = MemoryBus([EVENTS, DEAD_LETTERS]), Readiness()
    await publish(on, *ticks(3))
    async with running(republishing(on, topic=topic, readiness=readiness)):
        await eventually(lambda: remedy in str(readiness.report()))
        assert not readiness.is_ready()
        on.create([Topic(name=topic, record=GpuEvent, key="node", partitions=EVENTS.partitions)])
        await eventually(readiness.is_ready)


async def test_a_topic_with_fewer_partitions_has_each_node_in_one_of_them() -> None:
    narrow = Topic(name="others", record=GpuEvent, key="node", partitions=3)
    on, events = MemoryBus([EVENTS, DEAD_LETTERS, narrow]), ticks(3)
    async with on.producer() as producer:
        for one in events:
            at = partition_of_node(key_in("default", one.node), partitions=EVENTS.partitions)
            await producer.publish(
                EVENTS.name, at, [Message(node_key(one).encode(), encode(one), 0)]
            )
    async with running(republishing(on, topic=narrow.name)):
        await eventually(lambda: len(on.kept(narrow.name)) == 2 * len(events))

    for node in NODES:
        of_node = [
            one for one in on.kept(narrow.name) if one.key == key_in("default", node).encode()
        ]
        assert [(one.value or b"").decode() for one in of_node] == expected(
            [one for one in events if one.node == node]
        )
        (partition,) = {one.partition for one in of_node}
        assert (
            partition
            == partition_of_node(key_in("default", node), partitions=EVENTS.partitions) % 3
        )


async def test_a_sink_waits_for_more_records_after_a_poll_that_was_not_full() -> None:
    on, clock = bus(), ManualClock()
    await publish(on, *(event(tick) for tick in range(14)))
    async with running(republishing(on, clock=clock, commit_interval_seconds=0.25)):
        await eventually(lambda: committed(on, GROUP, AT) == 14)
        assert clock.slept == []
        await publish(on, event(14))
        await eventually(lambda: clock.slept)

    assert clock.slept == [0.25]


async def test_a_large_batch_is_written_in_several_transactions_each_with_its_offset() -> None:
    """No transaction keeps values of a later one in memory."""
    on = bus()
    events = [event(tick) for tick in range(5)]
    value = b"x" * 900_000
    each = MAX_TRANSACTION_BYTES // len(value) + 1
    sent = REGISTRY.get_sample_value("gpuledger_sink_sent_total", {"sink": "rows"}) or 0.0
    await publish(on, *events[:3], b"{", *events[3:])
    async with running(republishing(on, values_of=lambda _: [value] * each)):
        await eventually(lambda: committed(on, GROUP, AT) == 6)

    now = REGISTRY.get_sample_value("gpuledger_sink_sent_total", {"sink": "rows"})
    assert now == sent + 5 * each
    assert [dead_letter.offset for dead_letter in await dead_letters(on)] == [3]
