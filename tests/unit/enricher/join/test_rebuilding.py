"""What a read-back leaves behind when a rebalance ends it."""

import asyncio
import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from enricher.join.delivery import Delivery
from enricher.join.insistence import Insistence
from enricher.join.rebuilding import Rebuilding
from enricher.join.settings import JoinTuning
from gpuledger.bus.protocol import Consumer, Record, TopicPartition
from gpuledger.errors import BusUnavailableError
from gpuledger.service import Backoff, Check
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
    )
    consumer.rebuilding.need([0])

    async with asyncio.timeout(5):
        done = await consumer.rebuilding.run(cast("Consumer", consumer))

    gc.collect()
    assert done == frozenset()
    assert told == []
