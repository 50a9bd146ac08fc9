"""Restores the state of a partition before the worker books the partition's first tick.

The order is: fence the previous worker, read the partition's progress, seek to the committed
offsets, read the pods to their end, wait until podwatch reports that they are complete, and only
then process ticks. The stage interprets the records.

Every worker needs all namespaces. It reads them before it joins the consumer group, and then
follows the topic independently of the group (`NamespaceFollower`).

Progress is written in transactions, so a separate reader reads only committed records. The worker's
consumer reads topics that are written without transactions, so it reads to the end even if a
transaction is open.

The worker keeps polling during a restore, because a group removes a member that does not poll. So
a rebalance may come at any time. The callbacks in the poll then change the set of partitions to
restore, and the restore starts again. There is always a poll between two queries of the bus. An
error about a partition that is no longer assigned only means that a rebalance is in progress.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Final

import structlog
from typing_extensions import override

from gpuledger.bus.protocol import (
    Bus,
    Consumer,
    HistoryReader,
    Polled,
    Record,
    Span,
    TopicPartition,
)
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError, GpuledgerError, NotAssignedError
from gpuledger.programs import freeze_collector
from gpuledger.runtime import Backoff, Check, RetryingCaller
from gpuledger.runtime.tasks import end_tasks
from gpuledger.topics import Topics
from gpuledger_enricher.join import join_metrics as metrics
from gpuledger_enricher.join.delivery import Delivery
from gpuledger_enricher.join.join_settings import JoinTuning
from gpuledger_enricher.join.polling import poll, step_through
from gpuledger_enricher.join.progress.announcing import Announcer
from gpuledger_enricher.join.stage import JoinStage

# The objects of a tick have no cycles. The default, a search every 700 objects, costs 2 % of time.
_OBJECTS_PER_COLLECTION: Final = 20_000
_STALL_SECONDS: Final = 60.0
"""Maximum time without progress in a restore; electing a new partition leader takes far less."""
_READING: Final = "reading the pods and watermarks of new partitions"
_log = structlog.get_logger(__name__)


def input_names(topics: Topics) -> tuple[str, ...]:
    """Return the topics whose records are processed once, starting at the committed offset."""
    return (topics.samples.name, topics.processes.name, topics.incidents.name)


def state_names(topics: Topics) -> tuple[str, ...]:
    """Return the topics that are read from the beginning for each new partition, then followed.

    Invalid records before the committed offsets of these topics already have dead letters.
    """
    return (topics.pods.name, topics.nodes.name, topics.watermarks.name)


class StalledError(GpuledgerError):
    """A restore made no progress for a minute; the consumer must be opened again."""


class StateRestorer:
    """Restores the partitions that are assigned to a worker but have not been read yet."""

    def __init__(
        self,
        *,
        stage: JoinStage,
        delivery: Delivery,
        retry: RetryingCaller[BusError],
        tuning: JoinTuning,
        check: Check,
        backoff: Backoff,
        history: Bus,
        announcer: Announcer,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._delivery = delivery
        self._retry = retry
        self._tuning = tuning
        self._check = check
        self._backoff = backoff
        self._history = history
        self._announcer = announcer
        self._takers = dict(
            zip(
                state_names(history.topics),
                (stage.take_pods, stage.take_nodes, stage.take_watermarks),
                strict=True,
            )
        )
        self._seconds = seconds
        self._unknown: set[int] = set()
        self._moved: dict[TopicPartition, int] = {}
        self._changes = 0
        self._podwatch_awaited_since_seconds: float | None = None
        self._podwatch_timed_out = tuning.podwatch_timeout_seconds <= 0
        self._seeking: asyncio.Task[Mapping[TopicPartition, int]] | None = None

    def require(self, partitions: Iterable[int]) -> None:
        """Add partitions to restore; their ticks are processed only after that."""
        self._unknown |= set(partitions)
        self._changes += 1

    async def cancel(self, partitions: Iterable[int]) -> None:
        """Stop restoring these revoked partitions, and wait until their calls have ended."""
        revoked = set(partitions)
        self._unknown -= revoked
        self._changes += 1
        await end_tasks(self._seeking)
        for partition in [at for at in self._moved if at.partition in revoked]:
            del self._moved[partition]

    def stand_by(self) -> None:
        """Set the check to ok: no partition is assigned, because the group has more members."""
        self._check.ok("no partition assigned: the group has more members than partitions")

    async def run(self, consumer: Consumer) -> frozenset[int]:
        """Restore the required partitions and return them; records polled before are polled again.

        Raise `StalledError` if no records come for a minute although the bus answers.
        """
        done: set[int] = set()
        while self._unknown:
            partitions = frozenset(self._unknown)
            if await self._attempt(consumer, partitions):
                self._unknown -= partitions
                done |= partitions
        return frozenset(done)

    def take_moved(self) -> Mapping[TopicPartition, int]:
        """Return and forget the offsets that another program has committed.

        The worker commits them, so that a gap is not reported at each start.
        """
        moved, self._moved = self._moved, {}
        return moved

    async def take_state(self, batch: Polled) -> None:
        """Apply the records of state topics in a poll's result."""
        for partition, records in batch.items():
            if partition.topic in self._takers:
                take = self._takers[partition.topic]
                async for step in step_through(records):
                    take(step)
        metrics.PODS.set(len(self._stage.pods))
        metrics.NODES.set(len(self._stage.cluster_objects.nodes))

    async def _attempt(self, consumer: Consumer, partitions: frozenset[int]) -> bool:
        """Try to restore the partitions; return whether all of them were restored."""
        changes = self._changes
        if not self._check.has_failed:
            self._check.waits(_READING)
        try:
            await self._restore(consumer, partitions, changes=changes)
        except NotAssignedError:
            # A rebalance is in progress, which is not a failure: the next poll runs its callbacks.
            await self._poll_for(consumer, self._tuning.poll_timeout_seconds)
            return False
        except BusError as error:
            metrics.RETRIES_TOTAL.inc()
            self._check.failed(f"{_READING}: {error}")
            # Not a `RetryingCaller`: a member that does not poll loses its partitions.
            await self._poll_for(consumer, self._backoff.next_seconds())
            return False
        # Partitions may have been revoked or added in the meantime.
        if changes != self._changes:
            return False
        self._backoff.reset()
        freeze_collector(_OBJECTS_PER_COLLECTION)  # the cached objects live long
        # Ticks are read last: before their pods, they would be published without names, and before
        # the progress, they would be booked twice.
        consumer.resume(consumer.assignment())
        start = "; started without a report from podwatch" if self._podwatch_timed_out else ""
        self._check.ok(lambda: f"{len(self._stage.pods)} pods{start}")
        _log.info("state_read", count=len(self._stage.pods))
        return True

    async def _restore(
        self, consumer: Consumer, partitions: frozenset[int], *, changes: int
    ) -> None:
        """Read the state to its end; return early if a rebalance comes.

        Raise `StalledError` after a minute without progress.
        """
        consumer.pause(consumer.assignment())
        ends = await self._seek_beside_polls(consumer, partitions, changes=changes)
        left, moved_seconds = math.inf, self._seconds()
        while changes == self._changes:
            positions = await self._find_positions(consumer, ends)
            before, left = left, _count_left(positions, ends)
            if not left and self._has_podwatch_reported(partitions, positions):
                return
            if left < before or not left:
                moved_seconds = self._seconds()
            elif self._seconds() - moved_seconds > _STALL_SECONDS:
                detail = (
                    f"{_READING}: no record for {_STALL_SECONDS:.0f} s, {left:.0f} offsets left"
                )
                self._check.failed(detail)
                raise StalledError(detail)
            batch = await self._poll(consumer)
            if changes == self._changes:
                await self.take_state(batch)

    async def _seek_beside_polls(
        self, consumer: Consumer, partitions: frozenset[int], *, changes: int
    ) -> Mapping[TopicPartition, int]:
        """Call `_take_over`, and keep polling if it takes long; all partitions must be paused.

        Return its result, or an empty mapping if a rebalance interrupts the call.
        """
        task = self._seeking = asyncio.create_task(self._take_over(consumer, partitions))
        try:
            await asyncio.wait({task}, timeout=self._tuning.poll_timeout_seconds)
            while not task.done() and changes == self._changes:
                batch = await self._poll(consumer)
                if changes == self._changes:
                    await self.take_state(batch)
            return {} if task.cancelled() or changes != self._changes else task.result()
        finally:
            self._seeking = None
            await end_tasks(task)

    async def _take_over(
        self, consumer: Consumer, partitions: frozenset[int]
    ) -> Mapping[TopicPartition, int]:
        """Fence the previous worker, restore the progress and seek; return the state topics' ends.

        State topics are read from their beginning, input topics from the committed offsets.
        """
        await self._delivery.take_over(partitions)
        # Not earlier, because the previous worker can write progress until it is fenced.
        async with self._history.reader() as reader:
            topic_id = await reader.topic_id(self._history.topics.samples.name)
            for number in partitions:
                self._stage.set_topic_id(number, topic_id)
            for partition, span in (await reader.spans(self._history.topics.events.name)).items():
                if partition.partition in partitions:
                    now = self._seconds()
                    self._announcer.begin(
                        partition.partition, next_offset=span.end, now_seconds=now
                    )
            for partition, span in (await reader.spans(self._history.topics.progress.name)).items():
                if partition.partition in partitions and span.first < span.end:
                    async for records in reader.read(partition, span):
                        self._stage.restore_progress(records)
        assigned = {
            partition for partition in consumer.assignment() if partition.partition in partitions
        }
        state = {partition for partition in assigned if partition.topic in self._takers}
        for partition in assigned:
            offset = await consumer.committed(partition)
            committed = offset or 0
            if partition in state:
                self._stage.skip_dead_letters(partition, before=committed)
            elif await self._report_skipped(consumer, partition, has_offset=offset is not None):
                self._moved[partition] = committed
            await consumer.seek(partition, 0 if partition in state else committed)
        ends = await consumer.end_offsets(state)
        consumer.resume(state)
        return ends

    async def _report_skipped(
        self, consumer: Consumer, partition: TopicPartition, *, has_offset: bool
    ) -> bool:
        """Report a gap if the topic was recreated, or if another program moved the offset.

        Returns whether the worker must commit the offset, so that the gap is reported once. Nothing
        is reported if no tick of the partition was booked before, because the group then starts
        where an operator wants it to. Kafka deletes the group's offsets with the topic, so only the
        progress shows that the samples topic was recreated.
        """
        topics, read_before = self._history.topics, self._stage.read_before(partition.partition)
        if read_before is None or partition.topic == topics.processes.name:
            return False
        # The progress has no offsets of incidents.
        if partition.topic != topics.samples.name:
            return await consumer.report_moved(partition, read_before=None)
        is_moved = await consumer.report_moved(partition, read_before=read_before)
        earlier = self._stage.earlier_topic(partition.partition)
        if earlier is None or (has_offset and not is_moved):
            return is_moved
        topic_id, offset = earlier
        await consumer.report_recreated(partition, topic_id=topic_id, read_before=offset)
        return True

    async def _find_positions(
        self, consumer: Consumer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return the current positions; empty if they are not known within a poll's timeout."""
        try:
            async with asyncio.timeout(self._tuning.poll_timeout_seconds):
                return {partition: await consumer.position(partition) for partition in partitions}
        except TimeoutError:
            # While a partition has no leader, the client waits. Meanwhile this member would not
            # poll, and the group would remove it.
            return {}

    def _has_podwatch_reported(
        self, partitions: Iterable[int], positions: Mapping[TopicPartition, int]
    ) -> bool:
        """Return whether the pods of these partitions are complete, or the wait has timed out.

        Complete means up to this worker's start. A worker waits at most once.
        """
        if self._podwatch_timed_out:
            return True
        for partition, position in positions.items():
            if partition.topic == self._history.topics.pods.name:
                self._stage.pods_completeness.read_to(partition.partition, position)
        if self._stage.pods_completeness.complete_until_ns(partitions) is not None:
            return True
        now = self._seconds()
        if self._podwatch_awaited_since_seconds is None:
            self._podwatch_awaited_since_seconds = now
        if now - self._podwatch_awaited_since_seconds < self._tuning.podwatch_timeout_seconds:
            if not self._check.has_failed:
                self._check.waits("waiting for podwatch to report that the pods topic is complete")
            return False
        self._podwatch_timed_out = True
        metrics.PODWATCH_TIMEOUTS_TOTAL.inc()
        _log.warning("podwatch_awaited", timeout_seconds=self._tuning.podwatch_timeout_seconds)
        return True

    async def _poll(self, consumer: Consumer, *, max_seconds: float = math.inf) -> Polled:
        return await poll(consumer, retry=self._retry, tuning=self._tuning, max_seconds=max_seconds)

    async def _poll_for(self, consumer: Consumer, seconds: float) -> None:
        """Keep polling for some time; the next attempt reads the records of these polls again."""
        consumer.pause(consumer.assignment())
        end_seconds, changes = self._seconds() + seconds, self._changes
        while (left := end_seconds - self._seconds()) > 0 and changes == self._changes:
            await self._poll(consumer, max_seconds=left)


def _count_left(
    positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> float:
    """Return the number of offsets left to read; infinity if a position is unknown."""
    if positions.keys() != ends.keys():
        return math.inf
    return sum(max(0, end - positions[partition]) for partition, end in ends.items())


_FOLLOW_SECONDS: Final = 1.0
"""Interval between two checks for new namespace records, about as long as a tick."""


class NamespaceDeadLetters(DeadLetterQueue):
    """Rejects namespace records; the dead letter has the record's position, but not its value.

    Each worker reads all namespace records at each start, and would write the values each time.
    """

    @override
    def reject(self, record: Record, *, reason: str, detail: str) -> None:
        super().reject(record._replace(value=None), reason=reason, detail=detail)


class NamespaceFollower:
    """Reads the whole namespaces topic without the consumer group.

    Memory is bounded by the size of the topic.
    """

    def __init__(
        self,
        *,
        stage: JoinStage,
        dead_letters: DeadLetterQueue,
        history: Bus,
        retry: RetryingCaller[BusError],
        seconds: float = _FOLLOW_SECONDS,
    ) -> None:
        self._stage = stage
        self._dead_letters = dead_letters
        self._history = history
        self._retry = retry
        self._wait_seconds = seconds
        self._next: dict[TopicPartition, int] = {}

    async def read_up(self) -> None:
        """Apply all records up to the current end, and retry until the bus answers."""
        await self._retry(self._read_once)

    async def follow(self) -> None:
        """Apply new records until cancelled."""
        while True:
            # `read_up` updates the check, and returns once the bus answers.
            await self.read_up()
            with suppress(BusError):  # `read_up` reports an error that persists
                await self._follow_on()
            await asyncio.sleep(self._wait_seconds)

    async def _read_once(self) -> None:
        async with self._history.reader() as reader:
            await self._take_new(reader)

    async def _follow_on(self) -> None:
        # Uses one reader while the bus answers, because each reader opens its own connections.
        async with self._history.reader() as reader:
            while True:
                await self._take_new(reader)
                await asyncio.sleep(self._wait_seconds)

    async def _take_new(self, reader: HistoryReader) -> None:
        """Apply the records between the last position and the current end."""
        for partition, span in (await reader.spans(self._history.topics.namespaces.name)).items():
            first = max(span.first, self._next.get(partition, 0))
            if first > span.end:
                first = span.first  # the topic was recreated
            if first < span.end:
                async with aclosing(reader.read(partition, Span(first, span.end))) as chunks:
                    async for records in chunks:
                        async for step in step_through(records):
                            self._stage.take_namespaces(step)
            self._next[partition] = span.end
        metrics.NAMESPACES.set(len(self._stage.cluster_objects.namespaces))
        await self._dead_letters.flush()
