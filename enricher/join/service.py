"""The join's shell: poll, hand to the stage, publish, commit; pods first.

Here live the loop, the rebuilding of the pod cache after an assignment, and the retries. What the
records mean is the stage's business.
"""

import asyncio
import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import structlog

from enricher.join import metrics
from enricher.join.insistence import Insistence
from enricher.join.settings import JoinSettings, JoinTuning
from enricher.join.stage import JoinStage
from gpuledger.bus.protocol import (
    Bus,
    Consumer,
    Message,
    Producer,
    Record,
    Subscription,
    TopicPartition,
)
from gpuledger.dead_letters import DeadLetterOffice
from gpuledger.errors import BusUnavailableError, TopicsError
from gpuledger.service import Backoff, Check, Readiness
from gpuledger.topics import (
    ATTRIBUTED_INCIDENTS,
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    PODS,
    PROCESSES,
    SAMPLES,
)

GROUP: Final = "gpuledger-join"
_INPUTS: Final = (SAMPLES.name, PROCESSES.name, INCIDENTS.name, PODS.name)
_Batch = Mapping[TopicPartition, Sequence[Record]]
_log = structlog.get_logger(__name__)


async def run_join(*, bus: Bus, settings: JoinSettings, readiness: Readiness) -> None:
    """Join until cancelled; a broker that is away is waited for.

    Raises `TopicsError` where a topic is missing, or input and output differ in partitions.
    """
    insist = Insistence(
        check=readiness.check("bus"), backoff=Backoff(first_seconds=0.2, most_seconds=10.0)
    )
    pods_check = readiness.check("pods")
    partitions = await insist(lambda: _count_partitions(bus))
    async with bus.producer() as producer:
        office = DeadLetterOffice(consumer=GROUP, producer=producer, partitions=partitions)
        worker = JoinWorker(
            stage=JoinStage(office=office),
            office=office,
            producer=producer,
            insist=insist,
            tuning=settings.join,
            pods_check=pods_check,
        )
        await worker.run(bus=bus, member=settings.kafka.group_member or None)


async def _count_partitions(bus: Bus) -> int:
    """Give the number of dead-letter partitions, once input and output are seen to match."""
    counts = {name: await bus.partitions(name) for name in (*_INPUTS, EVENTS.name)}
    if len(set(counts.values())) != 1:
        raise TopicsError(
            f"topics placed by node must have the same number of partitions, found {counts};"
            " `gpuledger topics check` says what each should have"
        )
    return await bus.partitions(DEAD_LETTERS.name)


class JoinWorker:
    """One member of the join's group: its consumer, and what is to be done with a batch."""

    def __init__(
        self,
        *,
        stage: JoinStage,
        office: DeadLetterOffice,
        producer: Producer,
        insist: Insistence,
        tuning: JoinTuning,
        pods_check: Check,
    ) -> None:
        self._stage = stage
        self._office = office
        self._producer = producer
        self._insist = insist
        self._tuning = tuning
        self._pods_check = pods_check
        self._must_rebuild = False
        self._done: dict[TopicPartition, int] = {}

    async def run(self, *, bus: Bus, member: str | None) -> None:
        """Work through the group's partitions until cancelled."""
        subscription = Subscription(
            group=GROUP,
            topics=_INPUTS,
            member=member,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
        )
        async with bus.consumer(subscription) as consumer:
            while True:
                batch = await self._poll(consumer)
                self._take_pods(batch)
                while self._must_rebuild:
                    await self._rebuild(consumer)
                await self._handle(consumer, batch)

    async def _on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self._must_rebuild = True
        held = sorted(each.partition for each in partitions if each.topic == SAMPLES.name)
        metrics.PARTITIONS.set(len(held))
        _log.info("assigned", partitions=held)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        for each in partitions:
            self._stage.forget(each.partition)
            self._done.pop(each, None)

    async def _poll(self, consumer: Consumer) -> _Batch:
        return await self._insist(
            lambda: consumer.poll(
                timeout_seconds=self._tuning.poll_timeout_seconds,
                max_records=self._tuning.records_per_poll,
            )
        )

    async def _rebuild(self, consumer: Consumer) -> None:
        """Read the pods of new partitions to their end before any tick is booked.

        The pods' offsets are never committed, so a new assignment begins at their beginning.
        """
        self._must_rebuild = False
        self._pods_check.failed("reading the pods of new partitions")
        held = consumer.assignment()
        others = {each for each in held if each.topic != PODS.name}
        consumer.pause(others)
        try:
            while not self._must_rebuild and await self._is_behind(consumer, held - others):
                batch = await self._poll(consumer)
                self._take_pods(batch)
                await _put_back(consumer, batch)
        finally:
            consumer.resume(others & consumer.assignment())
        gc.freeze()  # the cache lives long: the collector need not walk it again and again
        self._pods_check.ok(f"{len(self._stage.pods)} pods")
        _log.info("pods_read", pods=len(self._stage.pods))

    async def _is_behind(self, consumer: Consumer, pods: Iterable[TopicPartition]) -> bool:
        held = [each for each in pods if each in consumer.assignment()]
        ends = await self._insist(lambda: consumer.end_offsets(held))
        positions = await self._insist(lambda: _positions(consumer, held))
        return any(positions[each] < ends[each] for each in held)

    def _take_pods(self, batch: _Batch) -> None:
        """Pods come before the ticks of the same batch."""
        for place, records in batch.items():
            if place.topic == PODS.name:
                self._stage.take_pods(records)
        metrics.PODS.set(len(self._stage.pods))

    async def _handle(self, consumer: Consumer, batch: _Batch) -> None:
        """Publish everything, then the dead letters, then commit."""
        rest = {place: each for place, each in batch.items() if each and place.topic != PODS.name}
        made = []
        for place, records in rest.items():
            made.append((place.partition, *self._work(place, records)))
            await asyncio.sleep(0)  # a slice at a time, so that heartbeats live
        await asyncio.gather(
            *(self._publish(topic, partition, messages) for partition, topic, messages in made)
        )
        await self._insist(self._office.flush)
        self._done |= {place: each[-1].offset + 1 for place, each in rest.items()}
        await self._commit(consumer)

    async def _commit(self, consumer: Consumer) -> None:
        """Commit what is done, in one attempt; what is refused is for the next one.

        A member that the group gave up is refused until it has polled, so insisting would be for
        ever.
        """
        held = consumer.assignment()
        self._done = {place: offset for place, offset in self._done.items() if place in held}
        if not self._done:
            return
        try:
            await consumer.commit(self._done)
        except BusUnavailableError as error:
            metrics.RETRIES_TOTAL.inc()
            _log.warning("not_committed", detail=str(error))
        else:
            self._done = {}

    def _work(
        self, place: TopicPartition, records: Sequence[Record]
    ) -> tuple[str, Sequence[Message]]:
        """Give what is to be published for these records, and where."""
        if place.topic == PROCESSES.name:
            self._stage.take_processes(records)
            return EVENTS.name, ()
        if place.topic == INCIDENTS.name:
            return ATTRIBUTED_INCIDENTS.name, self._stage.take_incidents(records)
        metrics.LAG_SECONDS.set(max(0.0, time.time() - records[-1].timestamp_ms / 1e3))
        return EVENTS.name, self._stage.take_samples(records)

    async def _publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if messages:
            await self._insist(lambda: self._producer.publish(topic, partition, messages))
            if topic == EVENTS.name:
                metrics.EVENTS_TOTAL.inc(len(messages))


async def _put_back(consumer: Consumer, batch: _Batch) -> None:
    """Have all but the pods read again: partitions that come within a poll are not paused yet."""
    for place, records in batch.items():
        if place.topic != PODS.name and records:
            await consumer.seek(place, records[0].offset)


async def _positions(
    consumer: Consumer, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, int]:
    return {each: await consumer.position(each) for each in partitions}
