"""Deliver batches exactly once: events, progress and offsets in one transaction.

A delivery costs several requests, so the messages made of records are gathered in a `CommitBatch`
per partition until `CommitBatches` reaches its limit of records or time. `Delivery` then writes
each batch with its progress, dead letters and offsets in one transaction. The worker restores a
partition whose transaction was undone.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from gpuledger.bus.protocol import Message, Record, TopicPartition
from gpuledger.bus.transactional_writers import TransactionalWriters, pause_seconds_after
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError, BusUnavailableError, FencedError
from gpuledger.runtime import Backoff, Check
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


class Delivery:
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
        """Open the partitions' ids: from then on nobody else commits for them.

        Raises `BusError` if that failed; whoever tries again polls in between.
        """
        await self._writers.open(partitions)

    async def give_up(self, partitions: Iterable[int]) -> None:
        """Close the partitions' transactions; what is open is aborted."""
        gone = set(partitions)
        await self._writers.close(gone)
        self._undelivered -= gone
        self._pass_check()

    async def deliver(self, batches: Sequence[CommitBatch]) -> Collection[int]:
        """Deliver each batch or undo it as a whole; return the partitions of those undone.

        Those were given up, and are to be begun with anew from what is committed.
        """
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
        made.next_offset = ends.get(made.events_partition)
        metrics.EVENTS_TOTAL.inc(len(made.messages.get(made.events_partition, ())))
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
