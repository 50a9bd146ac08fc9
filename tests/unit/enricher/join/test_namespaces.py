"""Each worker reads all namespaces before its first tick, outside its group, and follows them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import HistoryReader, Message
from gpuledger.codec import Decoder, encode
from gpuledger.errors import BusError, BusUnavailableError
from gpuledger.keys import key_in
from gpuledger.records import DeadLetter, NamespaceRecord
from gpuledger.runtime import Backoff, Check, RetryingCaller
from gpuledger_enricher.join.restore import NamespaceDeadLetters, NamespaceFollower
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import DEAD_LETTERS, NAMESPACES, NODES, PODS, SAMPLES, TOPICS
from tests.fakes.producer import KeepingProducer
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.join.builders import T_NS
from tests.unit.enricher.join.joining import joining, publish, read_events, tick, until
from tests.unit.enricher.join.pods.test_places import KNOWN_NODE, namespace, node
from tests.unit.enricher.join.ticks import UIDS, anywhere, pod

KEY = "default/research"
DEAD_LETTER = Decoder(topic=DEAD_LETTERS.name, record=DeadLetter)


async def publish_namespace(
    bus: MemoryBus, value: NamespaceRecord | bytes | None, *, key: str = KEY
) -> None:
    """Publish a namespace, or an invalid one."""
    data = encode(value) if isinstance(value, NamespaceRecord) else value
    async with bus.producer() as producer:
        await producer.publish(NAMESPACES.name, 0, [Message(key.encode(), data, T_NS // 10**6)])


async def test_existing_namespaces_and_nodes_are_in_the_first_event() -> None:
    """The namespaces are in another partition than the ticks."""
    bus = MemoryBus()
    await publish(bus, SAMPLES, tick(1))
    await publish(bus, PODS, pod(), key=key_in("default", UIDS[0]))
    await publish(bus, NODES, node(), key="default/node-a")
    await publish_namespace(bus, namespace())
    async with joining(bus) as readiness:
        (event,) = await read_events(bus, 1)
        await until(readiness.is_ready)
    assert [each.labels for each in event.namespaces or []] == [{"team": "vision"}]
    assert event.node_description == KNOWN_NODE


class FailingBus(MemoryBus):
    """A bus that fails to open readers a given number of times."""

    failures = 0

    @override
    @asynccontextmanager
    async def reader(self) -> AsyncIterator[HistoryReader]:
        if self.failures:
            self.failures -= 1
            raise BusUnavailableError("no broker answers")
        async with super().reader() as reader:
            yield reader


class Followed:
    """A stage, and the follower of namespaces for it."""

    def __init__(self, bus: MemoryBus) -> None:
        self.producer, self.check = KeepingProducer(), Check()
        dead_letters = NamespaceDeadLetters(
            consumer="test", producer=self.producer, partitions=1, topic=DEAD_LETTERS
        )
        self.stage = JoinStage(
            dead_letters=dead_letters,
            namespace_dead_letters=dead_letters,
            is_placed=anywhere,
            topics=TOPICS,
        )
        retry = RetryingCaller(
            on=BusError,
            check=self.check,
            backoff=lambda: Backoff(first_seconds=0.001, max_seconds=0.001),
        )
        self.follower = NamespaceFollower(
            stage=self.stage, dead_letters=dead_letters, history=bus, retry=retry, seconds=0.001
        )

    def team(self) -> str | None:
        """Return the namespace's team."""
        found = self.stage.cluster_objects.namespaces.at(KEY, T_NS)
        return (found.labels or {}).get("team") if found else None

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow while the context is open."""
        task = asyncio.create_task(self.follower.follow())
        try:
            async with asyncio.timeout(HANG_SECONDS):
                yield
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.mark.parametrize("failures", [0, 3])
async def test_changes_are_read_and_an_outage_is_waited_out(failures: int) -> None:
    bus = FailingBus()
    await publish_namespace(bus, namespace())
    bus.failures = failures
    followed = Followed(bus)
    await followed.follower.read_up()
    assert followed.team() == "vision"
    assert followed.check.is_ok
    bus.failures = failures
    async with followed.following():
        await publish_namespace(bus, namespace("8", labels={"team": "speech"}))
        await until(lambda: followed.team() == "speech")
        assert followed.check.is_ok
        await publish_namespace(bus, None)
        await until(lambda: not len(followed.stage.cluster_objects.namespaces))


async def test_records_are_not_read_twice() -> None:
    bus = MemoryBus()
    await publish_namespace(bus, b"{")
    followed = Followed(bus)
    for _ in range(3):
        await followed.follower.read_up()
    assert len(followed.producer.messages()) == 1


async def test_a_recreated_topic_is_read_from_its_beginning() -> None:
    bus = MemoryBus()
    for version in ("7", "8"):
        await publish_namespace(bus, namespace(version))
    followed = Followed(bus)
    await followed.follower.read_up()
    bus.recreate(NAMESPACES.name)
    await publish_namespace(bus, namespace("9", labels={"team": "speech"}))
    await followed.follower.read_up()
    assert followed.team() == "speech"


async def test_the_dead_letter_of_an_invalid_namespace_is_small_and_has_its_position() -> None:
    """Each worker publishes one, and labels and annotations may be long."""
    bus = MemoryBus()
    await publish_namespace(bus, namespace())
    await publish_namespace(bus, b"{" + b" " * 500_000)
    await publish_namespace(bus, replace(namespace("9"), name="other", labels={}))
    followed = Followed(bus)
    await followed.follower.read_up()
    dead_letters = [DEAD_LETTER.decode(message.value) for message in followed.producer.messages()]
    assert [(dead_letter.reason, dead_letter.offset) for dead_letter in dead_letters] == [
        ("undecodable", 1),
        ("misplaced", 2),
    ]
    assert all(len(each.value or b"") < 2_000 for each in followed.producer.messages())
    assert followed.team() == "vision"
