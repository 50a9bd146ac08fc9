"""Reads back what a worker must know of a partition before it books the first tick of it.

Here lives the order of a take-over: shut out who had the partition, go to what is committed, read
pods and marks to their end, and only then let ticks through. What the records mean is the stage's
business.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from enricher.join import metrics
from enricher.join.delivery import Delivery
from enricher.join.insistence import Insistence
from enricher.join.settings import JoinTuning
from enricher.join.stage import JoinStage
from gpuledger.bus.protocol import Consumer, Record, TopicPartition
from gpuledger.service import Check
from gpuledger.topics import INCIDENTS, MARKS, PODS, PROCESSES, SAMPLES

INPUTS: Final = (SAMPLES.name, PROCESSES.name, INCIDENTS.name)
"""What is worked through once, from the committed offset on."""
STATE: Final = (PODS.name, MARKS.name)
"""What is read from the beginning at each take-over, and never committed."""
Batch = Mapping[TopicPartition, Sequence[Record]]
# What a tick makes has no cycles: to look for them every 700 objects, as Python does, costs 2 %.
_OBJECTS_PER_COLLECTION: Final = 20_000
_log = structlog.get_logger(__name__)


async def poll(consumer: Consumer, *, insist: Insistence, tuning: JoinTuning, most: float) -> Batch:
    """Poll for at most so many seconds, however often the bus must be asked."""
    seconds = min(most, tuning.poll_timeout_seconds)
    return await insist(
        lambda: consumer.poll(timeout_seconds=seconds, max_records=tuning.records_per_poll)
    )


class Rebuilding:
    """The partitions that a worker holds and does not know yet."""

    def __init__(
        self,
        *,
        stage: JoinStage,
        delivery: Delivery,
        insist: Insistence,
        tuning: JoinTuning,
        check: Check,
    ) -> None:
        self._stage = stage
        self._delivery = delivery
        self._insist = insist
        self._tuning = tuning
        self._check = check
        self._unknown: set[int] = set()

    def need(self, numbers: Iterable[int]) -> None:
        """Have these partitions read back before anything else is done for them."""
        self._unknown |= set(numbers)

    def need_not(self, numbers: Iterable[int]) -> None:
        """Leave these partitions to whoever has them."""
        self._unknown -= set(numbers)

    async def run(self, consumer: Consumer) -> frozenset[int]:
        """Read back what is needed, and give it; what was polled of it before comes again."""
        done: set[int] = set()
        while self._unknown:
            numbers, self._unknown = self._unknown, set()
            await self._read_back(consumer, numbers)
            done |= numbers
        return frozenset(done)

    def take_state(self, batch: Batch) -> None:
        """Take in what a poll brought of the state."""
        for place, records in batch.items():
            if place.topic == PODS.name:
                self._stage.take_pods(records)
            elif place.topic == MARKS.name:
                self._stage.take_marks(records)
        metrics.PODS.set(len(self._stage.pods))

    async def _read_back(self, consumer: Consumer, numbers: set[int]) -> None:
        """Give way where a rebalance comes in between: it makes everything anew."""
        self._check.waits("reading the pods and marks of new partitions")
        consumer.pause(consumer.assignment())
        await self._delivery.take_over(numbers)
        held = {place for place in consumer.assignment() if place.partition in numbers}
        state = {place for place in held if place.topic in STATE}
        for place in held:
            await self._go_to(consumer, place, from_beginning=place in state)
        consumer.resume(state)
        ends = await self._insist(lambda: consumer.end_offsets(state))
        while not self._unknown and await self._is_behind(consumer, ends):
            self.take_state(
                await poll(
                    consumer,
                    insist=self._insist,
                    tuning=self._tuning,
                    most=self._tuning.poll_timeout_seconds,
                )
            )
        if not self._unknown:
            self._let_through(consumer)

    async def _go_to(
        self, consumer: Consumer, place: TopicPartition, *, from_beginning: bool
    ) -> None:
        offset = 0 if from_beginning else await self._insist(lambda: consumer.committed(place))
        await self._insist(lambda: consumer.seek(place, offset or 0))

    async def _is_behind(self, consumer: Consumer, ends: Mapping[TopicPartition, int]) -> bool:
        for place, end in ends.items():
            if await self._insist(partial(consumer.position, place)) < end:
                return True
        return False

    def _let_through(self, consumer: Consumer) -> None:
        """Let everything through but marks, of which a worker knows more than the topic."""
        held = consumer.assignment()
        marks = {place for place in held if place.topic == MARKS.name}
        consumer.pause(marks)
        consumer.resume(held - marks)
        gc.freeze()  # the cache lives long: the collector need not walk it again and again
        gc.set_threshold(_OBJECTS_PER_COLLECTION)
        self._check.ok(lambda: f"{len(self._stage.pods)} pods")
        _log.info("state_read", count=len(self._stage.pods))
