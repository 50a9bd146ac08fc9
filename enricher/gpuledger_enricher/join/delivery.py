"""Delivers batches exactly once: events, progress and offsets in one transaction.

A delivery takes several requests, so messages are gathered in one `CommitBatch` per partition until
`CommitBatches` reaches its limit of records or of time. `Delivery` then writes each batch with its
progress, dead letters and offsets in one transaction. If a transaction was aborted, the worker
restores the partition.
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
    """The results for one partition number, which are published and committed together.

    A node's records have the same partition number in all input topics.
    """

    topics: Topics
    partition: int
    begun_seconds: float
    """Time when its first record was processed, in seconds of the worker's monotonic clock."""
    records: int = 0
    """Number of input records that the batch covers."""
    messages: dict[TopicPartition, list[Message]] = field(default_factory=dict)
    """Messages to publish, in the order of their creation."""
    progress: Sequence[Message] = ()
    """Progress of the nodes including this batch; must not become visible before the batch."""
    watermarks: Sequence[Message] = ()
    """Watermarks of an earlier batch, whose events are already acknowledged."""
    next_offset: int | None = None
    """After delivery, the offset after the last event; `None` if the bus did not report it."""
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """For each input partition, the next offset to read after this batch."""
    last_tick_ms: int | None = None
    """Event time of the batch's last tick; `None` if the batch has only records of other inputs."""

    @property
    def progress_partition(self) -> TopicPartition:
        """The partition of the progress topic for the nodes of this batch."""
        return TopicPartition(self.topics.progress.name, self.partition)

    @property
    def watermarks_partition(self) -> TopicPartition:
        """The partition of the watermarks topic for this batch."""
        return TopicPartition(self.topics.watermarks.name, self.partition)

    @property
    def events_partition(self) -> TopicPartition:
        """The partition of the events topic for this batch."""
        return TopicPartition(self.topics.events.name, self.partition)

    def count(self, partition: TopicPartition, records: Sequence[Record]) -> None:
        """Count one or more records of an input partition whose results are in this batch."""
        self.records += len(records)
        self.offsets[partition] = records[-1].offset + 1
        if partition.topic == self.topics.samples.name:
            self.last_tick_ms = records[-1].timestamp_ms

    def add(self, partition: TopicPartition, messages: Sequence[Message]) -> None:
        """Append messages for a partition."""
        if messages:
            self.messages.setdefault(partition, []).extend(messages)


class CommitBatches:
    """A worker's batches between two deliveries, limited in records and in time."""

    def __init__(self, *, topics: Topics, max_records: int, max_seconds: float) -> None:
        self._topics = topics
        self._max_records = max_records
        self._max_seconds = max_seconds
        self._batches: dict[int, CommitBatch] = {}

    def __contains__(self, partition: object) -> bool:
        """Return whether a partition has a batch."""
        return partition in self._batches

    def at(self, partition: int, *, now: float) -> CommitBatch:
        """Return the batch of a partition; create it if there is none."""
        made = CommitBatch(topics=self._topics, partition=partition, begun_seconds=now)
        return self._batches.setdefault(partition, made)

    def seconds_left(self, *, now: float) -> float | None:
        """Return the seconds until the next delivery is due, at least 0; `None` without a batch."""
        if not self._batches:
            return None
        if sum(batch.records for batch in self._batches.values()) >= self._max_records:
            return 0.0
        begun_seconds = min(batch.begun_seconds for batch in self._batches.values())
        return max(0.0, begun_seconds + self._max_seconds - now)

    def take(self) -> list[CommitBatch]:
        """Remove and return all batches."""
        taken, self._batches = list(self._batches.values()), {}
        return taken

    def drop(self, partitions: Iterable[int]) -> None:
        """Drop the batches of these partitions; the records are processed again."""
        for partition in partitions:
            self._batches.pop(partition, None)


class Delivery:
    """Writes each batch in a transaction, with one transactional id per partition.

    If a worker returns after it was considered dead, its transactional ids are fenced and its
    writes are rejected.
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
        # Not a `RetryingCaller`: the records of an aborted batch are polled and processed again.
        self._backoff = Backoff(first_seconds=0.1, max_seconds=10.0)
        self._undelivered: set[int] = set()

    async def take_over(self, partitions: Iterable[int]) -> None:
        """Open the partitions' transactional ids; other workers can then no longer commit for them.

        Raise `BusError` on failure; the caller polls before it tries again.
        """
        await self._writers.open(partitions)

    async def give_up(self, partitions: Iterable[int]) -> None:
        """Close the partitions' transactional ids; abort open transactions."""
        gone = set(partitions)
        await self._writers.close(gone)
        self._undelivered -= gone
        self._pass_check()

    async def deliver(self, batches: Sequence[CommitBatch]) -> Collection[int]:
        """Deliver each batch in one transaction; return the partitions of aborted transactions.

        The transactional ids of these partitions are closed; the caller must restore the partitions
        from the last commit.
        """
        failures = await asyncio.gather(*map(self._commit, batches))
        undone = {
            made.partition: error for made, error in zip(batches, failures, strict=True) if error
        }
        self._remember(batches, undone)
        if not undone:
            self._backoff.reset()
            return _NONE_UNDONE
        # A failed id cannot be used again. Restoring the partition opens the id again.
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
        # Not earlier: after an abort, the records are read again and produce new dead letters.
        self._dead_letters.acknowledge(drained)
        made.next_offset = ends.get(made.events_partition)
        metrics.EVENTS_TOTAL.inc(len(made.messages.get(made.events_partition, ())))
        return None

    def _remember(self, batches: Sequence[CommitBatch], undone: Mapping[int, Exception]) -> None:
        """Record which partitions could not be delivered, and update the check.

        `undone` has the error of each partition whose transaction was aborted. The check fails,
        unless the worker was fenced: then another worker has taken over the partition.
        """
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
