"""The join's main loop: poll, pass records to the stage, gather results, deliver them.

This module has the loop, and the callbacks for assigned and revoked partitions. For new partitions,
the loop first restores pods and progress. The stage interprets the records; `delivery` publishes
the results, and `restore` reads the state of new partitions.
"""

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Final

import structlog

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
)
from gpuledger.clock import NS_PER_SECOND
from gpuledger.completeness import JOIN
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError, NotAssignedError
from gpuledger.lag import Lag
from gpuledger.runtime import RetryingCaller
from gpuledger.topics import Topics
from gpuledger_enricher.join import join_metrics as metrics
from gpuledger_enricher.join.delivery import CommitBatches, Delivery
from gpuledger_enricher.join.join_settings import JoinTuning
from gpuledger_enricher.join.polling import poll, step_through
from gpuledger_enricher.join.progress.announcing import Announcer
from gpuledger_enricher.join.restore import StalledError, StateRestorer, input_names, state_names
from gpuledger_enricher.join.stage import JoinStage

_LISTENING_SECONDS: Final = 30.0
"""A longer pause between two polls means that the brokers were unavailable or the join hung."""
_log = structlog.get_logger(__name__)


class JoinWorker:
    """One member of the join's consumer group; it processes the records that its consumer polls."""

    def __init__(
        self,
        *,
        lag: Lag,
        stage: JoinStage,
        dead_letters: DeadLetterQueue,
        delivery: Delivery,
        restorer: StateRestorer,
        retry: RetryingCaller[BusError],
        tuning: JoinTuning,
        gaps: GapCheck,
        announcer: Announcer,
        topics: Topics,
    ) -> None:
        self._topics = topics
        self._announcer = announcer
        self._at_end: set[int] = set()
        self._polled_at = time.monotonic()
        self._inputs = input_names(topics)
        self._gaps = gaps
        self._lag = lag
        self._lag.answered()
        metrics.LAG_SECONDS.set_function(self._lag.seconds)
        self._stage = stage
        self._dead_letters = dead_letters
        self._delivery = delivery
        self._restorer = restorer
        self._retry = retry
        self._tuning = tuning
        self._batches = CommitBatches(
            topics=topics,
            max_records=tuning.records_per_commit,
            max_seconds=tuning.commit_interval_seconds,
        )

    async def run(self, *, bus: Bus, group_instance_id: str | None) -> None:
        """Process the group's partitions until cancelled."""
        subscription = Subscription(
            group=self._tuning.group,
            stage=JOIN,
            topics=(*self._inputs, *state_names(self._topics)),
            group_instance_id=group_instance_id,
            # Agents and podwatch do not use transactions. If another program left a transaction
            # open in these topics, all later records would otherwise be hidden until it ends.
            isolation_level=IsolationLevel.READ_UNCOMMITTED,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_gap=self._on_gap,
        )
        while True:
            # Only these two errors end the inner loop; the worker then joins the group again.
            with suppress(StalledError, NotAssignedError):
                async with bus.consumer(subscription) as consumer:
                    while True:
                        await self._step(consumer)

    async def _step(self, consumer: Consumer) -> None:
        # Deliver only between polls, so that no delivery is in progress during a rebalance.
        left_seconds = self._batches.seconds_left(now=time.monotonic())
        if left_seconds == 0:
            await self._deliver()
            left_seconds = None
        max_seconds = math.inf if left_seconds is None else left_seconds
        batch = await poll(
            consumer, retry=self._retry, tuning=self._tuning, max_seconds=max_seconds
        )
        if consumer.is_answered():
            self._lag.answered()
        # A node is unresponsive only if it sent no ticks while this worker polled.
        now, before = time.monotonic(), self._polled_at
        self._polled_at = now
        if now - before > _LISTENING_SECONDS:
            self._stage.restart_listening()
        # The restore seeks back, so records of these partitions from this poll are polled again.
        restored = await self._restorer.run(consumer)
        for partition, offset in self._restorer.take_moved().items():
            self._batches.at(partition.partition, now=now).offsets[partition] = offset
        assigned = consumer.assignment()
        known = {
            partition: records
            for partition, records in batch.items()
            if partition in assigned and partition.partition not in restored
        }
        await self._restorer.take_state(known)  # pods come before the ticks of the same batch
        await self._work(known, at_end=consumer.at_end())
        if due := self._open_due():
            self._at_end = await self._find_at_end(consumer, due)

    def _open_due(self) -> list[int]:
        """Create batches for partitions that have none and whose watermark is due; return these."""
        now = time.monotonic()
        due = [each for each in self._announcer.due(now_seconds=now) if each not in self._batches]
        for partition in due:
            self._batches.at(partition, now=now)
        return due

    async def _find_at_end(self, consumer: Consumer, partitions: Iterable[int]) -> set[int]:
        """Return the partitions with a watermark to compute that have been read to their end.

        Requests the end offsets. During an outage, `consumer.at_end` would use the last known ends,
        and nodes whose records are waiting would count as unresponsive. Without an answer, no
        partition is returned.
        """
        now = time.monotonic()
        samples = [
            TopicPartition(self._topics.samples.name, number)
            for number in partitions
            if self._announcer.is_to_be_drawn(number, now_seconds=now)
        ]
        found: set[int] = set()
        with suppress(TimeoutError, BusError, NotAssignedError):
            async with asyncio.timeout(self._tuning.poll_timeout_seconds):
                ends = await consumer.end_offsets(samples)
                for partition in samples:
                    if await consumer.position(partition) >= ends[partition]:
                        found.add(partition.partition)
        return found

    async def _on_gap(self, gap: Gap) -> None:
        self._gaps.add(gap)

    async def _on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        assigned = sorted(
            partition.partition
            for partition in partitions
            if partition.topic == self._topics.samples.name
        )
        self._restorer.require(assigned)
        if not assigned:
            self._restorer.stand_by()
        metrics.PARTITIONS.set(len(assigned))
        _log.info("partitions_assigned", partitions=assigned)

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        revoked = {partition.partition for partition in partitions}
        await self._restorer.cancel(revoked)
        # Before `give_up` is awaited. Otherwise this worker could still publish the partition's
        # batch although the partition already belongs to another worker.
        self._forget(revoked)
        self._lag.drop(revoked)
        await self._delivery.give_up(revoked)

    def _forget(self, partitions: set[int]) -> None:
        """Forget partitions and their uncommitted results; the records will be polled again."""
        self._batches.drop(partitions)
        self._announcer.forget(partitions)
        for partition in partitions:
            self._stage.forget(partition)
            self._dead_letters.drop(partition)

    async def _work(self, batch: Polled, *, at_end: Collection[TopicPartition]) -> None:
        """Process a poll's records in steps; heartbeats and HTTP requests are served in between."""
        now = time.monotonic()
        self._lag.polled(
            {at: records for at, records in batch.items() if at.topic == self._topics.samples.name},
            at_end=at_end,
        )
        for at, records in batch.items():
            if at.topic not in self._inputs:
                continue
            async for step in step_through(records):
                into = self._batches.at(at.partition, now=now)
                topic, messages = self._make(at, step)
                into.add(TopicPartition(topic, at.partition), messages)
                into.count(at, step)
        # A partition whose records were all rejected has dead letters, but no batch yet.
        for partition in self._dead_letters.waiting():
            self._batches.at(partition, now=now)

    def _make(
        self, partition: TopicPartition, records: Sequence[Record]
    ) -> tuple[str, Sequence[Message]]:
        """Return the topic and the messages to publish for these records."""
        if partition.topic == self._topics.processes.name:
            # Records of processes produce no messages. They are counted, and their offsets are
            # committed.
            self._stage.take_processes(records)
            return self._topics.events.name, ()
        if partition.topic == self._topics.incidents.name:
            return self._topics.attributed_incidents.name, self._stage.take_incidents(records)
        return self._topics.events.name, self._stage.take_samples(records)

    async def _deliver(self) -> None:
        """Deliver the gathered batches; restore the partitions whose transaction was aborted."""
        batches = self._batches.take()
        now, time_ns = time.monotonic(), time.time_ns()
        for made in batches:
            made.progress = self._stage.drain_progress(made.partition)
            # Before `draw`, because the state that is computed now is valid only after this
            # delivery.
            made.watermarks = self._announcer.drain(
                made.partition, now_seconds=now, time_ns=time_ns
            )
            if self._announcer.is_to_be_drawn(made.partition, now_seconds=now):
                is_at_end = made.partition in self._at_end and not made.records
                reached = self._stage.find_complete(made.partition, is_at_end=is_at_end)
                self._announcer.draw(made.partition, reached, now_seconds=now)
        undone = set(await self._delivery.deliver(batches))
        for made in batches:
            if made.partition in undone:
                continue
            if made.events_partition in made.messages:
                self._announcer.published(made.partition, next_offset=made.next_offset)
            self._announcer.committed(made.partition)
            for partition, next_offset in made.offsets.items():
                if partition.topic == self._topics.samples.name:
                    self._lag.done(partition, next_offset, time_ms=made.last_tick_ms)
        if undone:
            self._forget(undone)
            self._lag.forget([TopicPartition(self._topics.samples.name, at) for at in undone])
            self._restorer.require(undone)
        until_ns = self._announcer.published_until_ns.values()
        metrics.WATERMARK_TIMESTAMP.set(min(until_ns, default=0) / NS_PER_SECOND)
