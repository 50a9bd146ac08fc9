"""A poll that finds the event loop's current turn used up gets its records in a later turn.

The tests use aiokafka's own fetcher; the test provides the brokers' responses.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiokafka.consumer.fetcher import Fetcher
from aiokafka.consumer.subscription_state import SubscriptionState

from gpuledger.bus.aiokafka_patches.turns import Turn, turn
from gpuledger.bus.aiokafka_patches.unpacking import install_unpacking
from gpuledger.bus.kafka_fetch import named
from gpuledger.bus.limits import MAX_TURN_BYTES
from gpuledger.bus.protocol import TopicPartition
from tests import raw_batches
from tests.hanging import HANG_SECONDS
from tests.raw_batches import ZSTD, Raw

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiokafka.protocol.fetch import FetchRequest

PARTITIONS = [named(TopicPartition("a.topic", partition)) for partition in range(2)]
BATCHES = 6
LONG_SECONDS = 3600.0
"""How long a poll would wait if it mistook available records for none."""


def log() -> bytes:
    """Return a partition's batches, two of which fill a turn."""
    half = raw_batches.pack(raw_batches.body([Raw(b"k", bytes(MAX_TURN_BYTES // 2 + 1))]), ZSTD)
    return b"".join(
        raw_batches.batch(half, count=1, codec=ZSTD, time_ms=1, base_offset=at)
        for at in range(BATCHES)
    )


class Broker:
    """Answers the first request for each partition with all its data, and later ones never."""

    API_VERSION = 4

    def __init__(self, data: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._metadata_max_age_ms = 1_000
        self.cluster = SimpleNamespace(leader_for_partition=lambda _: 1)
        self._data = data
        self._served: set[int] = set()

    async def send(self, node: int, request: FetchRequest) -> SimpleNamespace:
        del node
        ((topic, partitions),) = request.topics
        requested = {partition for partition, *_ in partitions} - self._served
        if not requested:
            await asyncio.Event().wait()
        self._served |= requested
        answers: list[Any] = [
            (each, 0, BATCHES, BATCHES, [], self._data) for each in sorted(requested)
        ]
        return SimpleNamespace(API_VERSION=self.API_VERSION, topics=[(topic, answers)])


@asynccontextmanager
async def consuming(data: bytes) -> AsyncIterator[Fetcher]:
    """Yield a fetcher that reads both partitions from their beginning."""
    install_unpacking()
    subscriptions = SubscriptionState()
    subscriptions.assign_from_user(set(PARTITIONS))
    for partition in PARTITIONS:
        subscriptions.subscription.assignment.state_value(partition).seek(0)
    fetcher = Fetcher(Broker(data), subscriptions)
    try:
        yield fetcher
    finally:
        await fetcher.close()


async def read_all(fetcher: Fetcher, *, max_records: int = 500) -> set[tuple[int, int]]:
    """Poll until each batch has returned a record."""
    seen: set[tuple[int, int]] = set()
    while len(seen) < BATCHES * len(PARTITIONS):
        found = await fetcher.fetched_records(
            PARTITIONS, timeout=LONG_SECONDS, max_records=max_records
        )
        assert found, "a poll returned nothing although records were available"
        seen |= {
            (record.partition, record.offset) for records in found.values() for record in records
        }
    return seen


ALL = {(partition, offset) for partition in range(2) for offset in range(BATCHES)}


async def test_a_poll_that_finds_the_turn_used_up_gets_its_records_in_the_next_turn() -> None:
    async with asyncio.timeout(HANG_SECONDS), consuming(log()) as fetcher:
        assert await read_all(fetcher) == ALL


async def test_several_consumers_that_share_a_turn_each_get_all_records() -> None:
    async with asyncio.timeout(HANG_SECONDS), AsyncExitStack() as stack:
        fetchers = [await stack.enter_async_context(consuming(log())) for _ in range(4)]
        assert await asyncio.gather(*map(read_all, fetchers)) == [ALL] * 4


async def test_a_consumer_with_a_backlog_that_polls_in_every_turn_does_not_starve_another() -> None:
    order: list[str] = []

    async def follow(name: str, fetcher: Fetcher) -> None:
        while order.count(name) < len(ALL):
            found = await fetcher.fetched_records(PARTITIONS, timeout=LONG_SECONDS)
            order.extend(name for records in found.values() for _ in records)
            await asyncio.sleep(0)

    async with (
        asyncio.timeout(HANG_SECONDS),
        consuming(log()) as first,
        consuming(log()) as second,
    ):
        await asyncio.gather(follow("1", first), follow("2", second))

    both = "".join(order)[: len(ALL)]
    assert "1" * 5 not in both
    assert "2" * 5 not in both


async def test_a_poll_without_a_timeout_returns_if_nothing_is_available() -> None:
    async with asyncio.timeout(HANG_SECONDS), consuming(log()) as fetcher:
        await read_all(fetcher)

        assert await fetcher.fetched_records(PARTITIONS, timeout=0) == {}
        assert await fetcher.fetched_records(PARTITIONS, timeout=0.001) == {}


async def test_a_consumer_that_is_abandoned_while_it_waits_for_its_turn_blocks_no_other() -> None:
    async with (
        asyncio.timeout(HANG_SECONDS),
        consuming(log()) as one,
        consuming(log()) as gone,
        consuming(log()) as other,
    ):
        tasks = [asyncio.create_task(read_all(fetcher)) for fetcher in (one, gone, other)]
        await tasks[0]
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)

        assert await tasks[2] == ALL


async def test_each_iteration_of_the_loop_admits_the_first_waiting_task() -> None:
    own, admitted = Turn(), list[str]()

    async def take(name: str) -> None:
        await own.wait()
        admitted.append(name)

    tasks = [asyncio.create_task(take(name)) for name in ("first", "gone", "last")]
    own.begin()
    own.used_bytes = MAX_TURN_BYTES + 1
    let_in = []
    for each in range(6):
        await asyncio.sleep(0)
        let_in.append(len(admitted))
        if each == 0:
            tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert admitted == ["first", "last"]
    assert let_in == [0, 1, 1, 2, 2, 2]


def test_an_event_loop_that_ended_during_a_turn_does_not_affect_the_next_loop() -> None:
    def use_up_and_leave() -> None:
        turn.begin()
        turn.used_bytes = MAX_TURN_BYTES + 1
        left.stop()

    async def read() -> set[tuple[int, int]]:
        async with asyncio.timeout(HANG_SECONDS), consuming(log()) as fetcher:
            return await read_all(fetcher)

    left = asyncio.new_event_loop()
    left.call_soon(use_up_and_leave)
    left.run_forever()
    left.close()

    assert asyncio.run(read()) == ALL
