"""The join's shell: poll, hand to the stage, gather, deliver; pods and progress first.

Here live the loop and what changes with the group's assignments. What the records mean is the
stage's business; how their work is delivered, and read back, stands in modules of their own.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog

from enricher.join import metrics
from enricher.join.delivery import AtLeastOnce, CommitBatch, CommitBatches, Delivery, ExactlyOnce
from enricher.join.restore import INPUTS, STATE, StalledError, StateRestorer, poll
from enricher.join.settings import JoinSettings, JoinTuning
from enricher.join.stage import JoinStage
from enricher.join.steps import step_through
from enricher.join.validation import placement_rule
from gpuledger.bus.gaps import GapCheck
from gpuledger.bus.protocol import (
    Bus,
    Consumer,
    Gap,
    IsolationLevel,
    Message,
    Polled,
    Record,
    Subscription,
    TopicPartition,
    TransactionalBus,
    WholeBus,
)
from gpuledger.bus.transactional_writers import TransactionalWriters
from gpuledger.clock import SystemClock
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError, NotAssignedError, TopicsError
from gpuledger.lag import Lag
from gpuledger.runtime import (
    Backoff,
    Check,
    CheckSeverity,
    Readiness,
    RetryingCaller,
    end_where_stalled,
)
from gpuledger.topics import (
    ATTRIBUTED_INCIDENTS,
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    PROCESSES,
    PROGRESS,
    SAMPLES,
)

_FINISH_SECONDS: Final = 0.0
"""The group takes partitions back between deliveries: no commit is under way that could end."""
_log = structlog.get_logger(__name__)


async def run_join(*, bus: WholeBus, settings: JoinSettings, readiness: Readiness) -> None:
    """Join until cancelled; brokers, topics and rights that are missing are waited for.

    Raises `FreshStartError` where nothing has gone round for ten minutes. The checks are `bus`, ok
    while the brokers answer, `pods`, ok once those of the assigned partitions are read back, and
    `delivery`, ok while what is made can be published.
    """
    stage_check, delivery_check = readiness.check("pods"), readiness.check("delivery")
    insist = _retry(readiness.check("bus"))
    # What was published and cannot be committed is not delivered: the delivery passes the check.
    publishing = _retry(delivery_check, passes_check=False)

    def rounds() -> int:
        return insist.attempts + publishing.attempts

    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(end_where_stalled(rounds, what="the join"))
        inputs, letters = await insist(lambda: _count_partitions(bus))
        stage_check.waits("joining the group")
        delivery_check.ok("nothing to deliver yet")
        async with bus.producer() as producer:
            office = DeadLetterQueue(
                consumer=settings.join.group, producer=producer, partitions=letters
            )
            stage = JoinStage(
                office=office,
                is_placed=placement_rule(partitions=inputs),
                pending_pod_timeout_seconds=settings.join.pending_pod_timeout_seconds,
            )
            opening = _open_delivery(
                AtLeastOnce(
                    producer=producer, office=office, insist=publishing, check=delivery_check
                ),
                bus=bus,
                office=office,
                check=delivery_check,
                settings=settings,
            )
            async with opening as delivery:
                worker = JoinWorker(
                    stage=stage,
                    office=office,
                    delivery=delivery,
                    restorer=StateRestorer(
                        stage=stage,
                        delivery=delivery,
                        insist=insist,
                        tuning=settings.join,
                        check=stage_check,
                        backoff=_backoff(),
                        history=bus,
                    ),
                    insist=insist,
                    tuning=settings.join,
                    gaps=GapCheck(readiness.check("gaps", severity=CheckSeverity.WARNING)),
                )
                await worker.run(bus=bus, member=settings.kafka.group_instance_id or None)
        watch.cancel()


def _backoff() -> Backoff:
    return Backoff(first_seconds=0.2, max_seconds=10.0)


def _retry(check: Check, *, passes_check: bool = True) -> RetryingCaller[BusError]:
    """Return how the join tries again whatever it asks of the bus."""
    return RetryingCaller(
        on=BusError,
        check=check,
        passes_check=passes_check,
        counter=metrics.RETRIES_TOTAL,
        backoff=_backoff,
    )


@asynccontextmanager
async def _open_delivery(
    at_least_once: AtLeastOnce,
    *,
    bus: TransactionalBus,
    office: DeadLetterQueue,
    check: Check,
    settings: JoinSettings,
) -> AsyncIterator[Delivery]:
    if settings.join.processing_guarantee == "at_least_once":
        yield at_least_once
        return
    group = settings.join.group
    async with TransactionalWriters(
        bus=bus, group=group, finish_seconds=_FINISH_SECONDS
    ) as writers:
        yield ExactlyOnce(
            writers=writers,
            office=office,
            check=check,
            fenced_seconds=settings.kafka.heartbeat_seconds,
        )


async def _count_partitions(bus: Bus) -> tuple[int, int]:
    """Return the numbers of input and of dead-letter partitions; input and output must match.

    Raises `TopicsError` where a topic is missing, or input and output differ in partitions.
    """
    by_node = (*INPUTS, *STATE, PROGRESS.name, EVENTS.name, ATTRIBUTED_INCIDENTS.name)
    counts = {name: await bus.partitions(name) for name in by_node}
    if len(set(counts.values())) != 1:
        raise TopicsError(
            f"topics placed by node must have the same number of partitions, found {counts};"
            " `gpuledger topics check` says what each should have"
        )
    return counts[SAMPLES.name], await bus.partitions(DEAD_LETTERS.name)


class JoinWorker:
    """One member of the join's group: its consumer, and what is to be done with a batch."""

    def __init__(
        self,
        *,
        stage: JoinStage,
        office: DeadLetterQueue,
        delivery: Delivery,
        restorer: StateRestorer,
        insist: RetryingCaller[BusError],
        tuning: JoinTuning,
        gaps: GapCheck,
    ) -> None:
        self._gaps = gaps
        self._lag = Lag(clock=SystemClock())
        metrics.LAG_SECONDS.set_function(self._lag.seconds)
        self._stage = stage
        self._office = office
        self._delivery = delivery
        self._restorer = restorer
        self._insist = insist
        self._tuning = tuning
        self._slices = CommitBatches(
            max_records=tuning.records_per_commit, max_seconds=tuning.commit_interval_seconds
        )

    async def run(self, *, bus: Bus, member: str | None) -> None:
        """Work through the group's partitions until cancelled."""
        subscription = Subscription(
            group=self._tuning.group,
            topics=(*INPUTS, *STATE),
            member=member,
            # Agents and podwatch write no transactions: one that is open there is somebody else's,
            # and would withhold from us what lies behind it for as long as it pleases him.
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_gap=self._on_gap,
        )
        while True:
            # Left only by the two errors after which the group is joined anew.
            with suppress(StalledError, NotAssignedError):
                async with bus.consumer(subscription) as consumer:
                    while True:
                        await self._step(consumer)

    async def _step(self, consumer: Consumer) -> None:
        left_seconds = self._seconds_left()
        if left_seconds == 0:
            await self._deliver(consumer)
            left_seconds = None
        maximum = self._tuning.poll_timeout_seconds if left_seconds is None else left_seconds
        batch = await poll(consumer, insist=self._insist, tuning=self._tuning, maximum=maximum)
        rebuilt = await self._restorer.run(consumer)
        held = consumer.assignment()
        known = {
            place: records
            for place, records in batch.items()
            if place in held and place.partition not in rebuilt
        }
        await self._restorer.take_state(known)  # pods come before the ticks of the same batch
        await self._work(known)

    async def _on_gap(self, gap: Gap) -> None:
        self._gaps.add(gap)

    async def _on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        held = sorted(each.partition for each in partitions if each.topic == SAMPLES.name)
        self._restorer.require(held)
        if not held:
            self._restorer.stand_by()
        metrics.PARTITIONS.set(len(held))
        _log.info("partitions_assigned", partitions=held)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        numbers = {each.partition for each in partitions}
        await self._restorer.cancel(numbers)
        self._forget(numbers)
        await self._delivery.give_up(numbers)

    def _forget(self, numbers: set[int]) -> None:
        """Forget partitions with what came of their records: it comes again from the commit on."""
        self._slices.drop(numbers)
        self._lag.drop(numbers)
        for number in numbers:
            self._stage.forget(number)
            self._office.drop(number)

    async def _work(self, batch: Polled) -> None:
        """Work through what was polled, step by step, so that heartbeats and pages live."""
        now = time.monotonic()
        self._lag.polled({at: each for at, each in batch.items() if at.topic == SAMPLES.name})
        for place, records in batch.items():
            if place.topic not in INPUTS:
                continue
            async for step in step_through(records):
                into = self._slices.at(place.partition, now=now)
                topic, messages = self._make(place, step)
                into.add(TopicPartition(topic, place.partition), messages)
                into.count(place, step)
        for number in self._office.waiting():
            self._slices.at(number, now=now)

    def _make(
        self, place: TopicPartition, records: Sequence[Record]
    ) -> tuple[str, Sequence[Message]]:
        """Return what is to be published for these records, and where."""
        if place.topic == PROCESSES.name:
            self._stage.take_processes(records)
            return EVENTS.name, ()
        if place.topic == INCIDENTS.name:
            return ATTRIBUTED_INCIDENTS.name, self._stage.take_incidents(records)
        return EVENTS.name, self._stage.take_samples(records)

    def _seconds_left(self) -> float | None:
        return self._slices.seconds_left(now=time.monotonic())

    async def _deliver(self, consumer: Consumer) -> None:
        """Deliver what is gathered; partitions whose delivery was undone are begun with anew."""
        slices = self._slices.take()
        for made in slices:
            made.progress = self._stage.drain_progress(made.number)
        undone = set(await self._delivery.deliver(consumer, slices))
        for made in slices:
            if made.number not in undone:
                self._finish(made)
        if undone:
            self._forget(undone)
            self._restorer.require(undone)

    def _finish(self, made: CommitBatch) -> None:
        for place, next_offset in made.offsets.items():
            if place.topic == SAMPLES.name:
                self._lag.done(place, next_offset, time_ms=made.last_tick_ms)
