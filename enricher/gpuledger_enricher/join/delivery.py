"""Deliver batches: events and progress published, offsets committed, at least or exactly once.

A delivery costs several requests, so what came of records is gathered in a `CommitBatch` for each
partition, until `CommitBatches` says that it is enough. Then one of two guarantees delivers it:

- `AtLeastOnce` publishes and then commits. After a crash in between, events come again under the
  same ids, unless their progress was published too.
- `ExactlyOnce` puts events, progress, dead letters and offsets into a transaction for each batch.

In both, nobody may see progress before the events that it speaks of: whoever takes the partition
over would leave them out. What to do for a partition whose delivery was undone is the worker's
business.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from gpuledger.bus.protocol import Consumer, Message, Producer, Record, TopicPartition
from gpuledger.bus.transactional_writers import TransactionalWriters, pause_seconds_after
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError, BusUnavailableError, FencedError, NotAssignedError
from gpuledger.runtime import Backoff, Check, RetryingCaller
from gpuledger.topics import Topics
from gpuledger_enricher.join import join_metrics as metrics

_NONE_UNDONE: Final[frozenset[int]] = frozenset()
_log = structlog.get_logger(__name__)


@dataclass(kw_only=True, eq=False)
class CommitBatch:
    """What came of one partition: in all inputs it has the same nodes."""

    topics: Topics
    partition: int
    begun_seconds: float
    """When the first of it came, by the worker's monotonic clock."""
    records: int = 0
    """How many records came into it."""
    messages: dict[TopicPartition, list[Message]] = field(default_factory=dict)
    """What is to be published, in the order in which it was made."""
    progress: Sequence[Message] = ()
    """How far the nodes are booked with that, never to be seen before it."""
    watermarks: Sequence[Message] = ()
    """How far the partition was complete with a batch that was acknowledged before."""
    next_offset: int | None = None
    """Once it is delivered, the offset behind its events; `None` where the bus did not tell it."""
    is_committed: bool = False
    """Whether it is delivered, its offsets included."""
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """How far the inputs are read with that."""
    last_tick_ms: int | None = None
    """Event time of the last tick in it; `None` where other inputs alone came into it."""

    @property
    def progress_partition(self) -> TopicPartition:
        """Where the progress of its nodes goes."""
        return TopicPartition(self.topics.progress.name, self.partition)

    @property
    def watermarks_partition(self) -> TopicPartition:
        """The partition of the watermarks' topic for this partition."""
        return TopicPartition(self.topics.watermarks.name, self.partition)

    @property
    def events_partition(self) -> TopicPartition:
        """Where its events go."""
        return TopicPartition(self.topics.events.name, self.partition)

    def count(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        """Count records of an input, at least one, whose work is in this batch."""
        self.records += len(records)
        self.offsets[partition] = records[-1].offset + 1
        if partition.topic == self.topics.samples.name:
            self.last_tick_ms = records[-1].timestamp_ms

    def add(self, partition: TopicPartition, messages: Sequence[Message]) -> None:
        """Add messages behind those that are there."""
        if messages:
            self.messages.setdefault(partition, []).extend(messages)


class CommitBatches:
    """The batches of a worker, from one delivery to the next; bounded by records and by time."""

    def __init__(self, *, topics: Topics, max_records: int, max_seconds: float) -> None:
        self._topics = topics
        self._max_records = max_records
        self._max_seconds = max_seconds
        self._batches: dict[int, CommitBatch] = {}

    def __contains__(self, partition: object) -> bool:
        """Return whether a partition has a batch."""
        return partition in self._batches

    def at(self, partition: int, *, now: float) -> CommitBatch:
        """Return the batch of a partition, which begins now where there is none."""
        made = CommitBatch(topics=self._topics, partition=partition, begun_seconds=now)
        return self._batches.setdefault(partition, made)

    def seconds_left(self, *, now: float) -> float | None:
        """Return how long more may be gathered, at least 0; `None` where nothing waits."""
        if not self._batches:
            return None
        if sum(batch.records for batch in self._batches.values()) >= self._max_records:
            return 0.0
        begun_seconds = min(batch.begun_seconds for batch in self._batches.values())
        return max(0.0, begun_seconds + self._max_seconds - now)

    def take(self) -> list[CommitBatch]:
        """Return all batches, and begin anew."""
        taken, self._batches = list(self._batches.values()), {}
        return taken

    def drop(self, partitions: Iterable[int]) -> None:
        """Drop what came of these partitions: whoever has them next does it again."""
        for partition in partitions:
            self._batches.pop(partition, None)


class Delivery(Protocol):
    """One guarantee: what it takes to begin with partitions, to deliver, and to end with them."""

    async def take_over(self, partitions: Iterable[int]) -> None:
        """Begin with partitions, before it is looked up how far they are committed.

        Raises `BusError` where that failed; whoever tries again polls in between.
        """

    async def deliver(self, consumer: Consumer, batches: Sequence[CommitBatch]) -> Collection[int]:
        """Deliver; return the partitions whose delivery failed or is unknown, or that another has.

        Those were given up, and are to be begun with anew from what is committed.
        """

    async def give_up(self, partitions: Iterable[int]) -> None:
        """End with partitions."""


class AtLeastOnce:
    """Publishes until acknowledged: events, then progress, then dead letters; then commits.

    After a crash what was published and not committed is published again, under the same ids,
    unless its progress was published too.
    """

    def __init__(
        self,
        *,
        producer: Producer,
        dead_letters: DeadLetterQueue,
        retry: RetryingCaller[BusError],
        check: Check,
    ) -> None:
        """Take what publishes; `retry` fails the check, and only a commit passes it."""
        self._producer = producer
        self._dead_letters = dead_letters
        self._retry = retry
        self._check = check
        self._done: dict[TopicPartition, int] = {}

    async def take_over(self, partitions: Iterable[int]) -> None:
        """Do nothing: there is no id to be taken."""

    async def give_up(self, partitions: Iterable[int]) -> None:
        """Forget what could not be committed; whoever comes next reads it again."""
        gone = set(partitions)
        self._done = {at: next_ for at, next_ in self._done.items() if at.partition not in gone}
        self._pass_check()

    async def deliver(self, consumer: Consumer, batches: Sequence[CommitBatch]) -> Collection[int]:
        """Deliver everything, however long it takes."""
        published = [
            (made, partition, messages)
            for made in batches
            for partition, messages in made.messages.items()
        ]
        ends = await asyncio.gather(*(self._publish(*batch[1:]) for batch in published))
        for (made, partition, _), end in zip(published, ends, strict=True):
            if partition == made.events_partition:
                made.next_offset = end
        # A watermark without its events would be a promise to leave them out.
        await asyncio.gather(
            *(self._publish(made.progress_partition, made.progress) for made in batches)
        )
        letters = self._dead_letters.next_offsets()
        await self._retry(self._dead_letters.flush)
        self._done |= letters
        for made in batches:
            count_events(made)
            self._done |= made.offsets
        await self._commit(consumer)
        # What could not be committed comes again, and what is published behind it with that.
        uncommitted = {partition.partition for partition in self._done}
        for made in batches:
            made.is_committed = made.partition not in uncommitted
        await asyncio.gather(
            *(self._publish(made.watermarks_partition, made.watermarks) for made in batches)
        )
        return _NONE_UNDONE

    async def _publish(self, partition: TopicPartition, messages: Sequence[Message]) -> int | None:
        if not messages:
            return None
        return await self._retry(lambda: self._producer.publish(*partition, messages))

    async def _commit(self, consumer: Consumer) -> None:
        """Commit what is done, in one attempt; what is refused is for the next one.

        A member that the group gave up is refused until it has polled, so trying again would be
        for ever.
        """
        # What was taken from this worker meanwhile is another's to commit; Kafka would refuse all.
        held = consumer.assignment()
        self._done = {
            partition: offset for partition, offset in self._done.items() if partition in held
        }
        if self._done:
            try:
                await consumer.commit(self._done)
            except (BusError, NotAssignedError) as error:
                metrics.RETRIES_TOTAL.inc()
                self._check.failed(f"published, but not committed: {error}")
                return
            self._done = {}
        self._pass_check()

    def _pass_check(self) -> None:
        if not self._done:
            self._check.ok()


class ExactlyOnce:
    """One transaction for each batch, under an id for each partition: whoever has it, delivers.

    A worker that was taken for dead, and comes back, finds its ids taken and its work refused.
    """

    def __init__(
        self,
        *,
        writers: TransactionalWriters,
        dead_letters: DeadLetterQueue,
        check: Check,
        fenced_seconds: float,
    ) -> None:
        self._writers = writers
        self._dead_letters = dead_letters
        self._check = check
        self._fenced_seconds = fenced_seconds
        # Not a `RetryingCaller`: what was undone is polled again, not sent again.
        self._backoff = Backoff(first_seconds=0.1, max_seconds=10.0)
        self._undelivered: set[int] = set()

    async def take_over(self, partitions: Iterable[int]) -> None:
        """Open the partitions' ids: from then on nobody else commits for them."""
        await self._writers.open(partitions)

    async def give_up(self, partitions: Iterable[int]) -> None:
        """Close the partitions' transactions; what is open is aborted."""
        gone = set(partitions)
        await self._writers.close(gone)
        self._undelivered -= gone
        self._pass_check()

    async def deliver(self, consumer: Consumer, batches: Sequence[CommitBatch]) -> Collection[int]:  # noqa: ARG002  # the transactions commit
        """Deliver each batch or undo it as a whole; those undone are given up."""
        failures = await asyncio.gather(*map(self._commit, batches))
        undone = {
            made.partition: error for made, error in zip(batches, failures, strict=True) if error
        }
        self._remember(batches, undone)
        if not undone:
            self._backoff.reset()
            return _NONE_UNDONE
        # An id that failed is of no more use: it is opened anew when the partition is read back.
        await self._writers.close(undone)
        pause_seconds = pause_seconds_after(
            undone.values(),
            backoff_seconds=self._backoff.next_seconds(),
            fenced_seconds=self._fenced_seconds,
        )
        await asyncio.sleep(pause_seconds)
        return undone.keys()

    async def _commit(self, made: CommitBatch) -> Exception | None:
        drained = self._dead_letters.drain(made.partition)
        messages = {
            **made.messages,
            made.progress_partition: made.progress,
            made.watermarks_partition: made.watermarks,
            **drained.messages,
        }
        try:
            ends = await self._writers.commit(
                made.partition, messages, offsets={**drained.next_offsets, **made.offsets}
            )
        except (FencedError, BusError) as error:
            if isinstance(error, FencedError):
                cause = "fenced"
            else:
                cause = "unavailable" if isinstance(error, BusUnavailableError) else "refused"
            metrics.TRANSACTIONS_ABORTED_TOTAL.labels(cause=cause).inc()
            _log.debug(
                "transaction_undone", partition=made.partition, reason=cause, error=str(error)
            )
            return drained.explain(error) if isinstance(error, BusError) else error
        # Only now: dead letters of what was aborted are made anew when the records come again.
        self._dead_letters.acknowledge(drained)
        made.next_offset, made.is_committed = ends.get(made.events_partition), True
        count_events(made)
        return None

    def _remember(self, batches: Sequence[CommitBatch], undone: Mapping[int, Exception]) -> None:
        """Fail the check, but where another worker has the partition: that is no failure."""
        self._undelivered -= {made.partition for made in batches}
        for partition, error in undone.items():
            if isinstance(error, FencedError):
                _log.warning("worker_fenced", partition=partition, error=str(error))
            else:
                self._undelivered.add(partition)
                self._check.failed(str(error))
        self._pass_check()

    def _pass_check(self) -> None:
        if not self._undelivered:
            self._check.ok()


def count_events(made: CommitBatch) -> None:
    """Count the events of a batch that was delivered."""
    metrics.EVENTS_TOTAL.inc(len(made.messages.get(made.events_partition, ())))
