"""The join's service while its group rebalances: nothing is lost, and nothing stalls."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Message, Record, Subscription, TopicPartition
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError
from gpuledger_enricher.join.join_settings import JoinTuning
from tests.default_topics import INCIDENTS, PODS, PROCESSES, SAMPLES
from tests.unit.enricher.join.joining import (
    PARTITION,
    joining,
    publish,
    read_events,
    tick,
    until,
)
from tests.unit.enricher.join.ticks import UIDS, pod

GROUP = JoinTuning().group
INPUTS = [SAMPLES.name, PROCESSES.name, INCIDENTS.name, PODS.name]


class WatchedConsumer:
    """A consumer that reports each of its polls and commits."""

    def __init__(self, consumer: Consumer, report: Callable[[str], Awaitable[None]]) -> None:
        self._consumer, self._report = consumer, report

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any other method of a consumer
        return getattr(self._consumer, name)

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Poll, and report before and after."""
        await self._report("poll")
        try:
            return await self._consumer.poll(
                timeout_seconds=timeout_seconds, max_records=max_records
            )
        finally:
            await self._report("polled")

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Report, so that the test may refuse, and commit."""
        await self._report("commit")
        await self._consumer.commit(offsets)


class WatchedBus(MemoryBus):
    """An in-memory bus that reports the calls of its join to the test."""

    calls: Sequence[str] = ()

    async def follow(self, call: str) -> None:
        """Do what the test requires at this call."""

    async def _report(self, call: str) -> None:
        self.calls = (*self.calls, call)
        await self.follow(call)

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            watched = cast("Consumer", WatchedConsumer(consumer, self._report))
            yield watched if subscription.group == GROUP else consumer


class ForgetfulBus(WatchedBus):
    """A bus whose group has expelled its member, which must poll before it may commit again."""

    @override
    async def follow(self, call: str) -> None:
        first = self.calls.index("commit") if "commit" in self.calls else 0
        if call == "commit" and "poll" not in self.calls[first:]:
            raise BusUnavailableError("the group has already rebalanced")


class CrowdedBus(WatchedBus):
    """A bus on which a second member joins the group while the first one reads its pods."""

    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__()
        self._stack = stack

    @override
    async def follow(self, call: str) -> None:
        if self.calls == ("poll", "polled"):
            await publish(self, PODS, pod(), key=f"default/{UIDS[0]}")
        elif self.calls == ("poll", "polled", "poll"):
            subscription = Subscription(group=GROUP, stage="join", topics=INPUTS)
            other = await self._stack.enter_async_context(MemoryBus.consumer(self, subscription))
            await other.poll(timeout_seconds=0, max_records=1)
            await self._publish_in_both_halves()

    async def _publish_in_both_halves(self) -> None:
        async with self.producer() as producer:
            for partition in (PARTITION, (PARTITION + 6) % 12):
                message = Message(b"default/node-a", encode(tick(1)), 0)
                await producer.publish(SAMPLES.name, partition, [message])


async def test_a_commit_that_is_rejected_until_the_next_poll_does_not_stop_the_join() -> None:
    """Kafka rejects a member that it considers dead until that member has joined again."""
    bus = ForgetfulBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus):
        await read_events(bus, 1)
        await publish(bus, SAMPLES, tick(2))
        assert [event.seq for event in await read_events(bus, 2)] == [1, 2]


async def test_ticks_that_come_with_a_rebalance_while_pods_are_read_are_booked() -> None:
    """Partitions assigned within a poll are not paused, and their records must not be lost."""
    async with AsyncExitStack() as stack:
        bus = CrowdedBus(stack)
        async with joining(bus):
            assert [event.seq for event in await read_events(bus, 1)] == [1]


class SlowGroupBus(WatchedBus):
    """A bus whose group revokes the join's partitions while it reads pods, and then pauses."""

    def __init__(self) -> None:
        super().__init__()
        self._others = AsyncExitStack()

    @override
    async def follow(self, call: str) -> None:
        polls = self.calls.count("poll")
        if self.calls == ("poll", "polled"):
            await publish(self, PODS, pod(), key=f"default/{UIDS[0]}")
        elif (call, polls) == ("poll", 2):
            subscription = Subscription(group=GROUP, stage="join", topics=INPUTS)
            for _ in range(2):  # the first member does not poll again, so the group waits for it
                other = await self._others.enter_async_context(
                    MemoryBus.consumer(self, subscription)
                )
                await other.poll(timeout_seconds=0, max_records=1)
        elif (call, polls) == ("poll", 4):
            await self._others.aclose()


async def test_a_worker_whose_partitions_are_revoked_while_it_reads_keeps_polling() -> None:
    """It has no partitions then, and only a poll can bring the next assignment."""
    bus = SlowGroupBus()
    await publish(bus, SAMPLES, tick(1))
    async with joining(bus) as readiness:
        assert [event.seq for event in await read_events(bus, 1)] == [1]
        await until(readiness.is_ready)
