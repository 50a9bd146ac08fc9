"""A worker that loses a partition forgets the results of its records, which come again."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

from prometheus_client import REGISTRY
from typing_extensions import override

from gpuledger.bus.gaps import GapCheck
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Bus, Polled, Subscription, TopicPartition
from gpuledger.errors import BusError
from gpuledger.lag import Lag
from gpuledger.runtime import Backoff, Check, RetryingCaller
from gpuledger_enricher.join.delivery import CommitBatch, Delivery
from gpuledger_enricher.join.join_settings import JoinTuning
from gpuledger_enricher.join.progress.announcing import Announcer
from gpuledger_enricher.join.restore import StateRestorer
from gpuledger_enricher.join.worker import JoinWorker
from tests.default_topics import EVENTS, PROCESSES, SAMPLES, TOPICS
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import record
from tests.unit.sinks.builders import ManualClock

ANNOUNCER = Announcer(topic=EVENTS.name, publisher="test")
PARTITION = TopicPartition(SAMPLES.name, 3)
BAD: Polled = {PARTITION: [record(b"{")]}
PROCESSES_AT = TopicPartition(PROCESSES.name, PARTITION.partition)


class Undelivered:
    """Takes partitions over and gives them up; nothing is due to be delivered."""

    async def take_over(self, numbers: Iterable[int]) -> None:
        """Do nothing."""

    give_up = take_over

    async def deliver(self, batches: Sequence[CommitBatch]) -> Collection[int]:
        """Fail the test."""
        raise AssertionError(batches)


class Delivered(Undelivered):
    """Delivers everything."""

    @override
    async def deliver(self, batches: Sequence[CommitBatch]) -> Collection[int]:
        return ()


class Member:
    """A bus with its only consumer: each step is a poll's records or a rebalance."""

    subscription: Subscription

    def __init__(self, *steps: str) -> None:
        self._steps = list(steps)
        self._held: frozenset[TopicPartition] = frozenset()
        self.has_ended = asyncio.Event()
        self.is_reachable = self.is_at_end = True
        self.clock = ManualClock()

    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator["Member"]:
        """Return itself."""
        self.subscription = subscription
        yield self

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Do the next step; after the last one nothing comes any more."""
        await asyncio.sleep(0)
        match self._steps.pop(0) if self._steps else "ends":
            case "gains":
                self._held = frozenset({PARTITION, PROCESSES_AT})
                await self.subscription.on_assigned(self._held)
            case "loses":
                await self.subscription.on_revoked(self._held)
                self._held = frozenset()
            case "brings":
                return BAD
            case "brings some ticks":
                self.clock.advance(500)
                self.is_at_end = False
                return BAD
            case "brings processes":
                return {PROCESSES_AT: [record(b"{")]}
            case "brings the last ticks":
                self.is_at_end = True
                return {PARTITION: [record(b"{", offset=1)]}
            case "brings nothing":
                pass
            case "is unreachable for a minute":
                self.is_reachable = False
                self.clock.advance(60)
            case "is reachable":
                self.is_reachable = True
            case _:
                self.has_ended.set()
                await asyncio.Event().wait()
        return {}

    def assignment(self) -> frozenset[TopicPartition]:
        return self._held

    def is_answered(self) -> bool:
        return self.is_reachable

    def at_end(self) -> frozenset[TopicPartition]:
        return self._held if self.is_at_end else frozenset()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    resume = pause

    async def committed(self, partition: TopicPartition) -> None:
        """Return that nothing was committed."""

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Do nothing."""

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return that the partitions are empty."""
        return dict.fromkeys(partitions, 0)

    async def position(self, partition: TopicPartition) -> int:
        """Return that nothing was read."""
        return 0


async def dead_letters_after(*steps: str) -> int:
    """Run a worker through the steps; return how many dead letters it has to publish."""
    given = Given()
    await run_through(given, *steps)
    return len(await given.rejected_records())


async def lag_after(*steps: str) -> float | None:
    """Run a worker through the steps; return the lag that it shows."""
    await run_through(Given(), *steps)
    return REGISTRY.get_sample_value("gpuledger_join_lag_seconds")


async def lag_of_deliveries_after(*steps: str) -> float | None:
    """Run a worker that delivers before each poll; return the lag that it shows."""
    await run_through(Given(), *steps, delivery=Delivered(), commit_interval_seconds=0)
    return REGISTRY.get_sample_value("gpuledger_join_lag_seconds")


async def run_through(
    given: Given,
    *steps: str,
    delivery: Undelivered | None = None,
    commit_interval_seconds: float = 60,
) -> None:
    member = Member(*steps)
    retry = RetryingCaller(on=BusError, check=Check())
    tuning = JoinTuning(
        poll_timeout_seconds=0.01,
        commit_interval_seconds=commit_interval_seconds,
        podwatch_timeout_seconds=0,
    )
    delivering = cast("Delivery", delivery or Undelivered())
    worker = JoinWorker(
        lag=Lag(clock=member.clock),
        stage=given.stage,
        dead_letters=given.dead_letters,
        delivery=delivering,
        restorer=StateRestorer(
            stage=given.stage,
            delivery=delivering,
            retry=retry,
            tuning=tuning,
            check=Check(),
            backoff=Backoff(),
            history=MemoryBus(),
            announcer=ANNOUNCER,
        ),
        announcer=ANNOUNCER,
        retry=retry,
        tuning=tuning,
        gaps=GapCheck(Check()),
        topics=TOPICS,
    )
    running = asyncio.create_task(worker.run(bus=cast("Bus", member), group_instance_id=None))
    await asyncio.wait_for(member.has_ended.wait(), HANG_SECONDS)
    running.cancel()
    await asyncio.wait({running})


async def test_dead_letters_of_a_lost_partition_are_left_to_its_next_owner() -> None:
    assert await dead_letters_after("gains", "brings") == 1
    assert await dead_letters_after("gains", "brings", "loses") == 0


async def test_dead_letters_of_a_partition_that_came_back_are_published_once() -> None:
    assert await dead_letters_after("gains", "brings", "loses", "gains", "brings") == 1


async def test_the_lag_of_a_worker_grows_while_its_polls_are_not_answered() -> None:
    outage = ["is unreachable for a minute"] * 9
    assert await lag_after("gains") == 0
    assert await lag_after("gains", *outage) == 540
    assert await lag_after("gains", *outage, "is reachable") == 0


async def test_polls_of_other_topics_do_not_end_the_lag_of_a_backlog_of_samples() -> None:
    backlog = ("gains", "brings some ticks")
    assert await lag_of_deliveries_after(*backlog) == 500
    assert await lag_of_deliveries_after(*backlog, "brings processes", "brings nothing") == 500
    assert await lag_of_deliveries_after(*backlog, "brings the last ticks") == 0
