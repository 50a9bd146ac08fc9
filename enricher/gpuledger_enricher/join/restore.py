"""Restores what a worker must know of a partition before it books the first tick of it.

Here lives the order of a restore: shut out who had the partition, read its progress, go to what
is committed, read pods to their end, wait until podwatch has said that they are all, and only then
let ticks through. What the records mean is the stage's business.

Namespaces are everybody's: each worker reads them whole before it joins the group, and follows them
beside it (`NamespaceFollower`).

Progress is written in transactions and read as it is committed, by a reader of their own: the
worker's consumer reads what others write without any, to the end, whatever transaction is open.

The worker polls all the while, for a group gives up a member that does not. So a rebalance may come
at any moment of it: the callbacks within the poll then change what is needed, and the restore
begins anew with that. No question is put to the bus again and again without a poll in between, and
one about a partition that is not assigned any more only means that a rebalance is under way.
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

# What a tick makes has no cycles: to look for them every 700 objects, as Python does, costs 2 %.
_OBJECTS_PER_COLLECTION: Final = 20_000
_STALL_SECONDS: Final = 60.0
"""How long a restore may stand still: a partition has a new leader long before."""
_READING: Final = "reading the pods and watermarks of new partitions"
_log = structlog.get_logger(__name__)


def input_names(topics: Topics) -> tuple[str, ...]:
    """Return the topics that are worked through once, from the committed offset on."""
    return (topics.samples.name, topics.processes.name, topics.incidents.name)


def state_names(topics: Topics) -> tuple[str, ...]:
    """Return the topics that are read from their beginning at each take-over, and followed.

    What is committed of them is how far they have dead letters, where they have any.
    """
    return (topics.pods.name, topics.nodes.name, topics.watermarks.name)


class StalledError(GpuledgerError):
    """A restore stood still for too long: the consumer is to be opened anew."""


class StateRestorer:
    """The partitions that a worker holds and does not know yet."""

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
        self._changes = 0
        self._podwatch_awaited_since_seconds: float | None = None
        self._podwatch_timed_out = tuning.podwatch_timeout_seconds <= 0
        self._seeking: asyncio.Task[Mapping[TopicPartition, int]] | None = None

    def require(self, partitions: Iterable[int]) -> None:
        """Have these partitions restored before anything else is done for them."""
        self._unknown |= set(partitions)
        self._changes += 1

    async def cancel(self, partitions: Iterable[int]) -> None:
        """Stop restoring these partitions, which went to another worker.

        Nothing is under way for them any more.
        """
        self._unknown -= set(partitions)
        self._changes += 1
        await end_tasks(self._seeking)

    def stand_by(self) -> None:
        """Record that the group has more members than partitions, and none for this one."""
        self._check.ok("no partition: the group has members enough")

    async def run(self, consumer: Consumer) -> frozenset[int]:
        """Restore what is needed, and return it; what was polled of it before comes again.

        Raises `StalledError` where nothing comes for a minute although the bus answers.
        """
        done: set[int] = set()
        while self._unknown:
            partitions = frozenset(self._unknown)
            if await self._attempt(consumer, partitions):
                self._unknown -= partitions
                done |= partitions
        return frozenset(done)

    async def take_state(self, batch: Polled) -> None:
        """Apply the records of state from a poll."""
        for partition, records in batch.items():
            if partition.topic in self._takers:
                take = self._takers[partition.topic]
                async for step in step_through(records):
                    take(step)
        metrics.PODS.set(len(self._stage.pods))
        metrics.NODES.set(len(self._stage.cluster_objects.nodes))

    async def _attempt(self, consumer: Consumer, partitions: frozenset[int]) -> bool:
        """Return whether all of it was restored; where not, another attempt is due, if any."""
        changes = self._changes
        if not self._check.has_failed:
            self._check.waits(_READING)
        try:
            await self._restore(consumer, partitions, changes=changes)
        except NotAssignedError:
            # A rebalance is under way, and is no failure: its callbacks come with the next poll.
            await self._poll_for(consumer, self._tuning.poll_timeout_seconds)
            return False
        except BusError as error:
            metrics.RETRIES_TOTAL.inc()
            self._check.failed(f"{_READING}: {error}")
            # Not a `RetryingCaller`: the group takes the partitions of a member that does not poll.
            await self._poll_for(consumer, self._backoff.next_seconds())
            return False
        # What was restored is of partitions that may be gone, or lacks some that have come.
        if changes != self._changes:
            return False
        self._backoff.reset()
        freeze_collector(_OBJECTS_PER_COLLECTION)  # the cache lives long
        # Last of all: a tick that came before its pods would leave without their names, and one
        # before the progress would be booked twice.
        consumer.resume(consumer.assignment())
        self._check.ok(lambda: f"{len(self._stage.pods)} pods")
        _log.info("state_read", count=len(self._stage.pods))
        return True

    async def _restore(
        self, consumer: Consumer, partitions: frozenset[int], *, changes: int
    ) -> None:
        """Read to the end, or stop where a rebalance comes in between."""
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
                detail = f"{_READING}: nothing came for {_STALL_SECONDS:.0f} s, {left:.0f} are left"
                self._check.failed(detail)
                raise StalledError(detail)
            batch = await self._poll(consumer)
            if changes == self._changes:
                await self.take_state(batch)

    async def _seek_beside_polls(
        self, consumer: Consumer, partitions: frozenset[int], *, changes: int
    ) -> Mapping[TopicPartition, int]:
        """Seek, and poll meanwhile where it takes longer than a poll; all is paused until then.

        Returns nothing where a rebalance has ended it.
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
        """Take partitions over and go to where each is read from; return the ends of the state."""
        await self._delivery.take_over(partitions)
        # After the take-over alone: until then whoever had the partitions may write progress.
        async with self._history.reader() as reader:
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
        kept = {
            partition for partition in consumer.assignment() if partition.partition in partitions
        }
        state = {partition for partition in kept if partition.topic in self._takers}
        for partition in kept:
            committed = await consumer.committed(partition) or 0
            if partition in state:
                self._stage.skip_dead_letters(partition, before=committed)
            await consumer.seek(partition, 0 if partition in state else committed)
        ends = await consumer.end_offsets(state)
        consumer.resume(state)
        return ends

    async def _find_positions(
        self, consumer: Consumer, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return where these partitions are read; nothing where that is not known in time."""
        try:
            async with asyncio.timeout(self._tuning.poll_timeout_seconds):
                return {partition: await consumer.position(partition) for partition in partitions}
        except TimeoutError:
            # Without a leader the client waits on, and a member that does not poll is given up.
            return {}

    def _has_podwatch_reported(
        self, partitions: Iterable[int], positions: Mapping[TopicPartition, int]
    ) -> bool:
        """Return whether the pods of these partitions are complete as of this worker's start.

        Or whether that was waited for long enough, once in a worker's life.
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
                self._check.waits("waiting for podwatch to say that the topic of pods is complete")
            return False
        self._podwatch_timed_out = True
        metrics.PODWATCH_TIMEOUTS_TOTAL.inc()
        _log.warning("podwatch_awaited", timeout_seconds=self._tuning.podwatch_timeout_seconds)
        return True

    async def _poll(self, consumer: Consumer, *, max_seconds: float = math.inf) -> Polled:
        return await poll(consumer, retry=self._retry, tuning=self._tuning, max_seconds=max_seconds)

    async def _poll_for(self, consumer: Consumer, seconds: float) -> None:
        """Wait as a member of the group does; what comes is read again by the next attempt."""
        consumer.pause(consumer.assignment())
        end_seconds, changes = self._seconds() + seconds, self._changes
        while (left := end_seconds - self._seconds()) > 0 and changes == self._changes:
            await self._poll(consumer, max_seconds=left)


def _count_left(
    positions: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> float:
    """Return how many offsets are left; infinity where a position is not known."""
    if positions.keys() != ends.keys():
        return math.inf
    return sum(max(0, end - positions[partition]) for partition, end in ends.items())


_FOLLOW_SECONDS: Final = 1.0
"""How often it is looked for news of namespaces: a tick's time."""


class NamespaceDeadLetters(DeadLetterQueue):
    """Puts namespaces aside without their values: each worker has a letter for each at its start.

    The letter says where the record lies.
    """

    @override
    def reject(self, record: Record, *, reason: str, detail: str) -> None:
        super().reject(record._replace(value=None), reason=reason, detail=detail)


class NamespaceFollower:
    """Reads the topic of namespaces whole, beside the group; memory is bounded by what is there."""

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
        """Apply all records that are there by now, retrying until the bus answers."""
        await self._retry(self._read_once)

    async def follow(self) -> None:
        """Apply new records until cancelled."""
        while True:
            # Ends when the bus answers, which is what the check waits for.
            await self.read_up()
            with suppress(BusError):  # one that lasts is told by reading up again
                await self._follow_on()
            await asyncio.sleep(self._wait_seconds)

    async def _read_once(self) -> None:
        async with self._history.reader() as reader:
            await self._take_new(reader)

    async def _follow_on(self) -> None:
        # The same reader for as long as the bus answers: each one opens connections of its own.
        async with self._history.reader() as reader:
            while True:
                await self._take_new(reader)
                await asyncio.sleep(self._wait_seconds)

    async def _take_new(self, reader: HistoryReader) -> None:
        """Apply the records between those that were read and the present end."""
        for partition, span in (await reader.spans(self._history.topics.namespaces.name)).items():
            first = max(span.first, self._next.get(partition, 0))
            if first > span.end:
                first = span.first  # the topic was made anew
            if first < span.end:
                async with aclosing(reader.read(partition, Span(first, span.end))) as chunks:
                    async for records in chunks:
                        async for step in step_through(records):
                            self._stage.take_namespaces(step)
            self._next[partition] = span.end
        metrics.NAMESPACES.set(len(self._stage.cluster_objects.namespaces))
        await self._dead_letters.flush()
