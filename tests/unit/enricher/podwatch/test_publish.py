"""Publishing to a topic that was recreated or whose brokers are unavailable."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Producer, TopicDescription
from gpuledger.clock import SystemClock
from gpuledger.codec import Decoder
from gpuledger.errors import BusUnavailableError
from gpuledger.records import PodRecord
from gpuledger.records.bounds import MAX_ID_LENGTH, MAX_WORD_LENGTH
from gpuledger.runtime import Readiness
from gpuledger.runtime.readiness import Check
from gpuledger.topics import Topic
from gpuledger_enricher.podwatch.events import Phase
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.publish import RecordPublisher
from gpuledger_enricher.podwatch.table import ObjectTable
from tests.default_topics import PODS, TOPICS, WATERMARKS
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import pod_record, soon
from tests.unit.enricher.podwatch.running import states, topic

KNOWN = {"a": ["Running"], "b": ["Running"]}


class DeadBus(MemoryBus):
    """A bus whose brokers may be unavailable."""

    is_away = False

    @override
    async def describe(self, topic: str) -> TopicDescription:
        if self.is_away:
            raise BusUnavailableError("no broker answers")
        return await super().describe(topic)


@asynccontextmanager
async def publishing(
    bus: MemoryBus, table: ObjectTable, *, topic_id: str | None = None, is_listed: bool = False
) -> AsyncIterator[Check]:
    """Publish from the table, and check the topic every few milliseconds."""
    check = Readiness().check("pods.kafka")
    publisher = RecordPublisher(
        cluster="default",
        kind=POD,
        bus=bus,
        table=table,
        check=check,
        clock=SystemClock(),
        batch_max=10,
        topic_id=topic_id,
        poll_interval_seconds=0.01,
    )
    if is_listed:
        publisher.watermarks.follow(Phase.LISTED)
    task = asyncio.create_task(publisher.run())
    try:
        yield check
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def table_of(*uids: str) -> ObjectTable:
    """Return a table whose pods Kafka does not have."""
    table = ObjectTable(
        node_of=POD.node_of,
        identity_of=POD.identity_of,
        tombstone_after_seconds=60,
        max_tombstones=10,
    )
    for uid in uids:
        table.upsert(pod_record(uid), time_ns=1)
    return table


async def has(bus: MemoryBus, expected: dict[str, list[str]]) -> None:
    """Wait until the topic has these states of each pod."""
    async with asyncio.timeout(HANG_SECONDS):
        while states(await topic(bus)) != expected:  # noqa: ASYNC110  # a topic has no event to wait on
            await asyncio.sleep(0.005)


async def test_a_recreated_topic_gets_all_pods_although_none_of_them_changed() -> None:
    bus = MemoryBus()
    async with publishing(bus, table_of("a", "b")):
        await has(bus, KNOWN)
        bus.recreate(PODS.name)
        await has(bus, KNOWN)


async def test_a_topic_recreated_after_it_was_read_gets_all_known_pods() -> None:
    bus = MemoryBus()
    table = table_of()
    table.restore([pod_record("a"), pod_record("b")])
    async with publishing(bus, table, topic_id="the one that was read"):
        await has(bus, KNOWN)


async def test_an_unchanged_topic_gets_nothing_twice() -> None:
    bus = DeadBus()
    async with publishing(bus, table_of("a", "b")) as check:
        await has(bus, KNOWN)
        bus.is_away = True
        await soon(lambda: check.has_failed)
        bus.is_away = False
        await soon(lambda: check.is_ok)
    assert len(await topic(bus)) == len(KNOWN)


async def test_unavailable_brokers_fail_the_check_even_while_no_pod_changes() -> None:
    bus = DeadBus()
    async with publishing(bus, table_of()) as check:
        await soon(lambda: check.is_ok)
        bus.is_away = True
        await soon(lambda: check.has_failed)
        bus.is_away = False
        await soon(lambda: check.is_ok)


class TurnTakingProducer:
    """Publishes as the bus does, each time a few turns of the loop later than before."""

    def __init__(self, inner: Producer) -> None:
        self._inner = inner
        self._turns = 0
        self.under_way = 0

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish when it is this message's turn."""
        self.under_way += 1
        self._turns += 1
        try:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            return await self._inner.publish(topic, partition, messages)
        finally:
            self.under_way -= 1


class CountingBus(MemoryBus):
    """A bus that records how many publications of each producer were pending when it was closed."""

    def __init__(self, topics: Sequence[Topic]) -> None:
        super().__init__(topics)
        self.left: list[int] = []

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as inner:
            producer = TurnTakingProducer(inner)
            try:
                yield producer
            finally:
                self.left.append(producer.under_way)


async def test_a_producer_is_closed_only_when_nothing_is_being_published_with_it() -> None:
    """Also if the watermarks' topic is missing, which each of its partitions reports."""
    bus = CountingBus([each for each in TOPICS if each != WATERMARKS])
    async with publishing(bus, table_of("a"), is_listed=True) as check:
        await soon(lambda: len(bus.left) > 0)
        await soon(lambda: check.has_failed)
    assert set(bus.left) == {0}


async def test_a_pod_too_large_for_a_message_is_published_without_its_large_parts() -> None:
    """Its identity is still published; the other pods of its batch are complete."""
    bus, table = MemoryBus(), table_of("a", "b")
    annotations = {f"a{number}": "x" * 250_000 for number in range(5)}
    table.upsert(pod_record("large", annotations=annotations), time_ns=2)
    before = value_of("gpuledger_podwatch_records_cut_total")
    with capture_logs() as lines:
        async with publishing(bus, table):
            await has(bus, KNOWN | {"large": ["Running"]})
    pods = {pod.uid: pod for pod in await published(bus)}
    assert (pods["large"].annotations, pods["large"].containers) == (None, [])
    assert (pods["large"].namespace, pods["large"].name) == ("team-red", "pod-large")
    assert pods["a"].containers
    assert value_of("gpuledger_podwatch_records_cut_total") == before + 1
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == [
        "record_shortened"
    ]


async def test_a_pod_with_more_than_a_record_may_contain_is_cut_and_published() -> None:
    """The kubelet writes a status, and anyone can write an owner's kind."""
    bus, table = MemoryBus(), table_of("a")
    table.upsert(pod_record("odd", owner_kind="K" * 100_000, config_hash="h" * 250_000), time_ns=2)
    before = value_of("gpuledger_podwatch_records_cut_total")
    async with publishing(bus, table):
        await has(bus, {"a": ["Running"], "odd": ["Running"]})
    pods = {pod.uid: pod for pod in await published(bus)}
    assert pods["odd"].owner_kind == "K" * MAX_WORD_LENGTH
    assert pods["odd"].config_hash == "h" * MAX_ID_LENGTH
    assert value_of("gpuledger_podwatch_records_cut_total") == before + 1


async def published(bus: MemoryBus) -> list[PodRecord]:
    """Return the pods on the topic."""
    decoder = Decoder(topic=PODS.name, record=PodRecord)
    return [decoder.decode(each.value) for each in await topic(bus)]


def value_of(name: str) -> float:
    """Return the current value of a metric."""
    return REGISTRY.get_sample_value(name, {"kind": "pod"}) or 0.0
