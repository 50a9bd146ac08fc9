"""Reading back while a rebalance or an outage comes in between."""

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import pytest
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Polled, Record, TopicPartition
from gpuledger.errors import BusError, BusUnavailableError
from gpuledger.runtime import Backoff, Check, RetryingCaller
from gpuledger_enricher.join.delivery import Delivery
from gpuledger_enricher.join.join_settings import JoinTuning
from gpuledger_enricher.join.progress.announcing import Announcer
from gpuledger_enricher.join.restore import StalledError, StateRestorer
from tests.default_topics import EVENTS, PODS, SAMPLES
from tests.errors import has_words
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import pod, record

ANNOUNCER = Announcer(topic=EVENTS.name, publisher="test")


class FailingDelivery:
    """Cannot take partitions over, and fails while the worker polls."""

    def __init__(self) -> None:
        self.failed = asyncio.Event()
        self.polled = asyncio.Event()

    async def take_over(self, numbers: Iterable[int]) -> None:
        """Fail during a poll."""
        await self.polled.wait()
        self.failed.set()
        raise BusUnavailableError(f"the coordinator of {sorted(numbers)} is away")


class RebalancingConsumer:
    """Loses its partition at the end of its first poll, after the take-over has failed."""

    restorer: StateRestorer

    def __init__(self, delivery: FailingDelivery) -> None:
        self._delivery = delivery

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Revoke the partition."""
        self._delivery.polled.set()
        await self._delivery.failed.wait()
        await asyncio.sleep(0)
        await self.restorer.cancel([0])
        return {}


async def test_a_take_over_that_fails_just_before_a_rebalance_logs_nothing_through_asyncio() -> (
    None
):
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["message"])
    )
    delivery, check, backoff = FailingDelivery(), Check(), Backoff()
    consumer = RebalancingConsumer(delivery)
    consumer.restorer = StateRestorer(
        stage=Given().stage,
        delivery=cast("Delivery", delivery),
        retry=RetryingCaller(on=BusError, check=check, backoff=lambda: backoff),
        tuning=JoinTuning(poll_timeout_seconds=0.01, podwatch_timeout_seconds=0),
        check=check,
        backoff=backoff,
        history=MemoryBus(),
        announcer=ANNOUNCER,
    )
    consumer.restorer.require([0])

    async with asyncio.timeout(HANG_SECONDS):
        done = await consumer.restorer.run(cast("Consumer", consumer))

    gc.collect()
    assert done == frozenset()
    assert reported == []


class ReadyDelivery:
    """Takes partitions over, after a number of failures."""

    def __init__(self, *, failures: int = 0) -> None:
        self._failures = failures

    async def take_over(self, numbers: Iterable[int]) -> None:
        """Fail, or do nothing."""
        if self._failures:
            self._failures -= 1
            raise BusUnavailableError(f"the coordinator of {sorted(numbers)} is away")


class TwoPartitions:
    """Has two partitions of pods to be read; its first poll may lose one of them."""

    restorer: StateRestorer

    def __init__(self, *, loses: int | None = None) -> None:
        self._loses = loses
        self._held = {TopicPartition(PODS.name, number) for number in (0, 1)}
        self._polls = 0

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._held)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    resume = pause

    async def committed(self, partition: TopicPartition) -> int | None:
        """Return that nothing is committed."""
        return None

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Do nothing."""

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return an end after some records."""
        return dict.fromkeys(partitions, 3)

    async def position(self, partition: TopicPartition) -> int:
        """Return one more after each poll."""
        return self._polls

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Advance by one record, which is omitted; a rebalance may come with it."""
        self._polls += 1
        if self._loses is not None:
            self._held -= {TopicPartition(PODS.name, self._loses)}
            number, self._loses = self._loses, None
            await self.restorer.cancel([number])
        await asyncio.sleep(0)
        return {}


def restorer(
    consumer: TwoPartitions, *, check: Check, delivery: ReadyDelivery | None = None
) -> StateRestorer:
    made = StateRestorer(
        stage=Given().stage,
        delivery=cast("Delivery", delivery or ReadyDelivery()),
        retry=RetryingCaller(on=BusError, check=Check()),
        tuning=JoinTuning(poll_timeout_seconds=0.01, podwatch_timeout_seconds=0),
        check=check,
        backoff=Backoff(first_seconds=0.001, max_seconds=0.001),
        history=MemoryBus(),
        announcer=ANNOUNCER,
    )
    consumer.restorer = made
    made.require([0, 1])
    return made


async def test_a_partition_that_is_revoked_during_read_back_does_not_count_as_read_back() -> None:
    consumer, check = TwoPartitions(loses=0), Check()

    async with asyncio.timeout(HANG_SECONDS):
        done = await restorer(consumer, check=check).run(cast("Consumer", consumer))

    assert done == frozenset({1})
    assert check.is_ok


async def test_an_outage_while_partitions_are_read_back_is_one_failure_of_the_check() -> None:
    reported: list[bool] = []
    check = Check(on_change=lambda each: reported.append(each.is_ok))
    consumer, delivery = TwoPartitions(), ReadyDelivery(failures=3)

    async with asyncio.timeout(HANG_SECONDS):
        await restorer(consumer, check=check, delivery=delivery).run(cast("Consumer", consumer))

    assert reported == [False, True]


async def test_a_ready_worker_is_not_ready_while_it_reads_new_partitions_back() -> None:
    reported: list[tuple[bool, bool]] = []
    check = Check(on_change=lambda each: reported.append((each.is_ok, each.has_failed)))
    check.ok("9 pods")
    consumer = TwoPartitions()

    async with asyncio.timeout(HANG_SECONDS):
        await restorer(consumer, check=check).run(cast("Consumer", consumer))

    assert reported == [(True, False), (False, False), (True, False)]


POD_PARTITION, TICK_PARTITION = (TopicPartition(topic.name, 3) for topic in (PODS, SAMPLES))
PODS_POLLED: Polled = {POD_PARTITION: [record(pod(), topic=PODS.name)]}


class Clock:
    """A clock that polls advance."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class OnePartition(TwoPartitions):
    """Has one partition of each topic; each poll is a step of the test and takes some time."""

    def __init__(
        self,
        *,
        clock: Clock,
        poll_seconds: float = 1.0,
        per_poll: float = 1.0,
        brings: Polled | None = None,
    ) -> None:
        super().__init__()
        self._held = {POD_PARTITION, TICK_PARTITION}
        self.paused: set[TopicPartition] = set()
        self.polls = 0
        self.is_mute = False
        self._clock, self._poll_seconds, self._per_poll = clock, poll_seconds, per_poll
        self._brings = brings or {}

    @override
    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self.paused |= set(partitions)

    @override
    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self.paused -= set(partitions)

    @override
    async def committed(self, partition: TopicPartition) -> int | None:
        """Return that some ticks were booked."""
        return 7

    @override
    async def position(self, partition: TopicPartition) -> int:
        if self.is_mute:
            await asyncio.Event().wait()
        return int(self.polls * self._per_poll)

    @override
    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        await asyncio.sleep(0)
        self.polls += 1
        self._clock.seconds += self._poll_seconds
        return self.on_poll()

    def on_poll(self) -> Polled:
        """Return the records of a poll."""
        return self._brings


class SlowDelivery(ReadyDelivery):
    """Takes partitions over only when its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = asyncio.Event(), asyncio.Event()
        self.was_cut = False

    @override
    async def take_over(self, numbers: Iterable[int]) -> None:
        self.begun.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.was_cut = True
            raise


class Reading:
    """The reading back of one partition, with its parts."""

    def __init__(
        self, consumer: OnePartition, *, clock: Clock, delivery: ReadyDelivery | None = None
    ) -> None:
        self.given, self.check, self.consumer = Given(), Check(), consumer
        self.restorer = StateRestorer(
            stage=self.given.stage,
            delivery=cast("Delivery", delivery or ReadyDelivery()),
            retry=RetryingCaller(on=BusError, check=Check()),
            tuning=JoinTuning(poll_timeout_seconds=0.01, podwatch_timeout_seconds=0),
            check=self.check,
            backoff=Backoff(first_seconds=10, max_seconds=10, jitter=lambda: 1.0),
            seconds=clock,
            history=MemoryBus(),
            announcer=ANNOUNCER,
        )
        self.restorer.require([3])
        consumer.restorer = self.restorer

    async def run(self) -> frozenset[int]:
        async with asyncio.timeout(HANG_SECONDS):
            return await self.restorer.run(cast("Consumer", self.consumer))


async def test_a_partition_whose_position_is_unknown_does_not_count_as_read() -> None:
    class MuteAtFirst(OnePartition):
        @override
        def on_poll(self) -> Polled:
            self.is_mute = self.polls < 2
            return {}

    consumer = MuteAtFirst(clock=(clock := Clock()))
    consumer.is_mute = True

    assert await Reading(consumer, clock=clock).run() == {3}
    assert consumer.polls >= 3


async def test_reading_back_without_progress_for_a_minute_is_a_stall() -> None:
    consumer = OnePartition(clock=(clock := Clock()), poll_seconds=25, per_poll=0)
    reading = Reading(consumer, clock=clock)

    with pytest.raises(StalledError, check=has_words("60 s", "3 offsets left")):
        await reading.run()
    assert reading.check.has_failed
    assert clock.seconds == 75


async def test_slow_progress_in_reading_back_is_not_a_stall_however_long_it_takes() -> None:
    consumer = OnePartition(clock=(clock := Clock()), poll_seconds=50, per_poll=0.5)

    assert await Reading(consumer, clock=clock).run() == {3}
    assert clock.seconds > 200


async def test_pods_that_a_poll_brings_while_partitions_are_taken_over_are_kept() -> None:
    delivery = SlowDelivery()

    class BringsOnce(OnePartition):
        @override
        def on_poll(self) -> Polled:
            if delivery.gate.is_set():
                return {}
            delivery.gate.set()
            return PODS_POLLED

    reading = Reading(BringsOnce(clock=(clock := Clock())), clock=clock, delivery=delivery)
    await reading.run()

    assert len(reading.given.stage.pods) == 1


@pytest.mark.parametrize("loses_at", [1, 2])
async def test_pods_that_arrive_with_the_loss_of_their_partition_are_left_to_its_next_owner(
    loses_at: int,
) -> None:
    class Loses(OnePartition):
        @override
        async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
            polled = await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)
            if self.polls == loses_at:
                await self.restorer.cancel([3])
                return PODS_POLLED
            return polled

    reading = Reading(Loses(clock=(clock := Clock())), clock=clock)

    assert await reading.run() == frozenset()
    assert len(reading.given.stage.pods) == 0


async def test_after_reading_back_no_partition_stays_paused() -> None:
    consumer = OnePartition(clock=(clock := Clock()))
    await Reading(consumer, clock=clock).run()

    assert consumer.paused == set()


async def test_while_a_partition_is_read_back_none_of_its_ticks_are_delivered() -> None:
    paused: list[set[TopicPartition]] = []

    class Watched(OnePartition):
        @override
        def on_poll(self) -> Polled:
            paused.append(set(self.paused))
            return {}

    await Reading(Watched(clock=(clock := Clock())), clock=clock).run()

    assert paused == [{TICK_PARTITION}] * 3


async def test_the_take_over_of_a_partition_that_is_revoked_is_cancelled() -> None:
    delivery = SlowDelivery()
    reading = Reading(OnePartition(clock=(clock := Clock())), clock=clock, delivery=delivery)
    running = asyncio.create_task(reading.run())
    await delivery.begun.wait()

    await reading.restorer.cancel([3])
    assert delivery.was_cut
    assert await running == frozenset()


async def test_between_two_attempts_polling_continues_for_the_time_of_the_backoff() -> None:
    consumer = OnePartition(clock=(clock := Clock()))
    reading = Reading(consumer, clock=clock, delivery=ReadyDelivery(failures=2))
    await reading.run()

    assert clock.seconds >= 20
