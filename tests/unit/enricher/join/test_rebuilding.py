"""What a read-back says and leaves behind when a rebalance or an outage comes in between."""

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from enricher.join.delivery import Delivery
from enricher.join.insistence import Insistence
from enricher.join.rebuilding import Rebuilding
from enricher.join.settings import JoinTuning
from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Consumer, Record, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.service import Backoff, Check
from gpuledger.topics import PODS
from tests.unit.enricher.join.given import Given


class FailingDelivery:
    """Cannot take partitions over, and says so while the worker polls."""

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

    rebuilding: Rebuilding

    def __init__(self, delivery: FailingDelivery) -> None:
        self._delivery = delivery

    def assignment(self) -> frozenset[TopicPartition]:
        """Hold nothing."""
        return frozenset()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Give up the partition."""
        self._delivery.polled.set()
        await self._delivery.failed.wait()
        await asyncio.sleep(0)
        await self.rebuilding.need_not([0])
        return {}


async def test_a_take_over_that_fails_just_before_a_rebalance_leaves_nothing_for_asyncio() -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: told.append(context["message"])
    )
    delivery, check, backoff = FailingDelivery(), Check(), Backoff()
    consumer = RebalancingConsumer(delivery)
    consumer.rebuilding = Rebuilding(
        stage=Given().stage,
        delivery=cast("Delivery", delivery),
        insist=Insistence(check=check, backoff=backoff),
        tuning=JoinTuning(poll_timeout_seconds=0.01),
        check=check,
        backoff=backoff,
        history=MemoryBus(),
    )
    consumer.rebuilding.need([0])

    async with asyncio.timeout(5):
        done = await consumer.rebuilding.run(cast("Consumer", consumer))

    gc.collect()
    assert done == frozenset()
    assert told == []


class ReadyDelivery:
    """Takes partitions over, after so many failures."""

    def __init__(self, *, failures: int = 0) -> None:
        self._failures = failures

    async def take_over(self, numbers: Iterable[int]) -> None:
        """Fail, or do nothing."""
        if self._failures:
            self._failures -= 1
            raise BusUnavailableError(f"the coordinator of {sorted(numbers)} is away")


class TwoPartitions:
    """Has two partitions of pods to be read; its first poll may lose one of them."""

    rebuilding: Rebuilding

    def __init__(self, *, loses: int | None = None) -> None:
        self._loses = loses
        self._held = {TopicPartition(PODS.name, number) for number in (0, 1)}
        self._polls = 0

    def assignment(self) -> frozenset[TopicPartition]:
        """Return what is left."""
        return frozenset(self._held)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Do nothing."""

    resume = pause

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Do nothing."""

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return that there are some records."""
        return dict.fromkeys(partitions, 3)

    async def position(self, partition: TopicPartition) -> int:
        """Return one more after each poll."""
        return self._polls

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Go on by one record, which is left out; a rebalance may come with it."""
        self._polls += 1
        if self._loses is not None:
            self._held -= {TopicPartition(PODS.name, self._loses)}
            number, self._loses = self._loses, None
            await self.rebuilding.need_not([number])
        await asyncio.sleep(0)
        return {}


def rebuilding(
    consumer: TwoPartitions, *, check: Check, delivery: ReadyDelivery | None = None
) -> Rebuilding:
    made = Rebuilding(
        stage=Given().stage,
        delivery=cast("Delivery", delivery or ReadyDelivery()),
        insist=Insistence(check=Check(), backoff=Backoff()),
        tuning=JoinTuning(poll_timeout_seconds=0.01),
        check=check,
        backoff=Backoff(first_seconds=0.001, most_seconds=0.001),
        history=MemoryBus(),
    )
    consumer.rebuilding = made
    made.need([0, 1])
    return made


async def test_a_partition_that_is_given_up_while_it_is_read_back_was_not_read_back() -> None:
    consumer, check = TwoPartitions(loses=0), Check()

    async with asyncio.timeout(5):
        done = await rebuilding(consumer, check=check).run(cast("Consumer", consumer))

    assert done == frozenset({1})
    assert check.is_ok


async def test_an_outage_while_partitions_are_read_back_is_one_failure_of_the_check() -> None:
    told: list[bool] = []
    check = Check(on_change=lambda each: told.append(each.is_ok))
    consumer, delivery = TwoPartitions(), ReadyDelivery(failures=3)

    async with asyncio.timeout(5):
        await rebuilding(consumer, check=check, delivery=delivery).run(cast("Consumer", consumer))

    assert told == [False, True]


async def test_a_worker_that_was_ready_is_not_while_it_reads_new_partitions_back() -> None:
    told: list[tuple[bool, bool]] = []
    check = Check(on_change=lambda each: told.append((each.is_ok, each.has_failed)))
    check.ok("9 pods")
    consumer = TwoPartitions()

    async with asyncio.timeout(5):
        await rebuilding(consumer, check=check).run(cast("Consumer", consumer))

    assert told == [(True, False), (False, False), (True, False)]
