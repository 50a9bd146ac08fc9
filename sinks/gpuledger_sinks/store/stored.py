"""The last stored offset and the topic of each partition, and the write that advances them.

In addition to rows, a table stores numbers, each under the name of a stream (`Streams`). For each
partition, these are the last stored offset and the identity of its topic. An offset is valid only
for its topic: a topic that was recreated or restored has the same name but other records. `Stored`
keeps these numbers between two lookups in the table. It queries neither the table nor the brokers.

A sink has a `Target` for each table with rows of events: `usage`, and `entries` if it is written.
Each table has its own offsets, because a sink may be killed between two commits. The sink resumes
at the end of the table that is behind, and does not add rows again to the table that is ahead.

`Appending` runs one write at a time in a thread. The write continues even if its caller is
cancelled. `store_sink` decides what is written and when.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import structlog

from gpuledger.bus.protocol import TopicPartition
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND, Clock
from gpuledger.errors import UserError
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.store.commits import describe, latest_marks
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.store.buffer import RowBuffer
from gpuledger_sinks.store.minute_sums import Row
from gpuledger_sinks.store.seen import NodeTicks, SeenTable
from gpuledger_sinks.store.table import TimedTable

_PRUNED_AFTER_SECONDS: Final = 600.0
_log = structlog.get_logger(__name__)
_REMEDY = (
    "nothing is written. Check that the topic's records are not stored already, then set"
    " store.generation to a new name to continue after the stored rows"
)


@dataclass(frozen=True, kw_only=True)
class Streams:
    """Makes the names under which a table stores a sink's offsets and topic identities."""

    group: str
    """The common prefix of all stream names."""
    generation: str
    """The setting `store.generation`: a name for the recreated topic, or empty."""

    def of(self, partition: TopicPartition) -> str:
        """Return the name under which a table stores the last offset of a partition."""
        parts = [self.group, self.generation, partition.topic, str(partition.partition)]
        return "|".join(part for part in parts if part)

    def identity_of(self, partition: TopicPartition) -> str:
        """Return the name under which a table stores the identity of a partition's topic."""
        return f"{self.of(partition)}|topic_id"


@dataclass(kw_only=True)
class Stored:
    """The last stored offset of each partition that was looked up in a table."""

    streams: Streams
    topic_id: str | None = None
    """The id of the topic whose rows are collected; `None` if the brokers have no ids."""
    last_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The last stored offset of each partition; partitions without rows are left out."""
    _identified: set[TopicPartition] = field(default_factory=set)
    """Partitions for which the table contains the topic's identity."""
    complete_through: Mapping[str, int] = field(default_factory=dict)
    """The time through which each partition is complete according to the table, in microseconds. It
    includes partitions of other sinks, and is repeated in each commit, so that a partition without
    new rows is not forgotten."""

    def names_of(self, partitions: Collection[TopicPartition]) -> list[str]:
        """Return the names under which a table stores offsets and identities of partitions."""
        names = self.streams
        return [name for at in partitions for name in (names.of(at), names.identity_of(at))]

    def learn(self, partition: TopicPartition, numbers: Mapping[str, int]) -> bool:
        """Remember a partition's last offset and topic identity, which were loaded from the table.

        `numbers` has both by the name of their stream. Returns whether the identity is the identity
        of the current topic, or one of the two is unknown.
        """
        self.last_offsets.pop(partition, None)
        self._identified.discard(partition)
        last_offset = numbers.get(self.streams.of(partition))
        identity = numbers.get(self.streams.identity_of(partition))
        if last_offset is not None:
            self.last_offsets[partition] = last_offset
        if identity is not None:
            self._identified.add(partition)
        return is_same_topic(stored=identity, topic_id=self.topic_id)

    def new_identities(self, partitions: Collection[TopicPartition]) -> dict[str, int]:
        """Return the topic's identity for each partition for which the table does not have it yet.

        The identities are numbers, by the names of their streams.
        """
        if self.topic_id is None:
            return {}
        number = number_of(self.topic_id)
        new = set(partitions) - self._identified
        return {self.streams.identity_of(partition): number for partition in new}

    def advance(self, last_offsets: Mapping[TopicPartition, int]) -> None:
        """Record that rows up to these offsets were written, with the topic's identity."""
        self.last_offsets |= last_offsets
        self._identified |= last_offsets.keys()


def number_of(topic_id: str) -> int:
    """Return the number that identifies a topic in the table: 63 bits of its hash."""
    return int.from_bytes(hashlib.sha256(topic_id.encode()).digest()[:8]) >> 1


def is_same_topic(*, stored: int | None, topic_id: str | None) -> bool:
    """Return whether the table's offsets belong to the topic with this identity.

    True if either identity is unknown: brokers before Kafka 2.8 have no topic ids.
    """
    return stored is None or topic_id is None or stored == number_of(topic_id)


def other_topic(partition: TopicPartition, *, last_offset: int, topic_id: str | None) -> UserError:
    """Return the error for a table with offsets of another topic."""
    return UserError(
        f"the store has {_shown(partition)} up to offset {last_offset} of another topic of that"
        f" name: it was recreated, or is another cluster's (its id is {topic_id} now); {_REMEDY}"
    )


def refuse_shorter_topic(partition: TopicPartition, *, last_offset: int, end: int) -> None:
    """Raise UserError if the partition ends before the table's last offset."""
    if last_offset + 1 > end:
        raise UserError(
            f"the store has {_shown(partition)} up to offset {last_offset}, but that partition ends"
            f" at {end}: the topic was recreated, is another cluster's, or lost records; {_REMEDY}"
        )


def _shown(partition: TopicPartition) -> str:
    return f"{partition.topic}[{partition.partition}]"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A table with rows of events, and the offsets up to which it has them."""

    table: TimedTable
    stored: Stored
    rows_of: Callable[[RowBuffer], Collection[Row]]
    """Returns this table's rows from all pending rows."""
    announces_hours: bool = False
    """Whether its commits record the hours of their rows, for the rollups."""

    def lacks(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether the rows of the record at an offset are not stored in the table yet."""
        return offset > self.stored.last_offsets.get(partition, -1)

    def news_of(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return the offsets that are after the table's last offset of their partition."""
        return {at: last for at, last in offsets.items() if self.lacks(at, last)}


def position_of(targets: Sequence[Target], partition: TopicPartition) -> int:
    """Return the last offset up to which all tables have a partition's rows.

    Returns -1 if a table has none.
    """
    return min(target.stored.last_offsets.get(partition, -1) for target in targets)


class Appending:
    """Runs one write at a time in a thread."""

    def __init__(self, *, targets: Sequence[Target], seen: SeenTable, clock: Clock) -> None:
        self._targets, self._seen, self._clock = targets, seen, clock
        self._writing: asyncio.Task[None] | None = None
        self._pending: RowBuffer | None = None
        """The rows being written."""
        self._done: list[Target] = []
        """The tables to which these rows are already written."""
        self._next_prune_ns = 0
        self._outdated: dict[str, int] = {}
        """The offsets at the last pruning. A repaired table is unlikely to resume before these
        offsets."""

    async def append(
        self,
        pending: RowBuffer,
        *,
        seen: Mapping[TopicPartition, NodeTicks],
        valid_through: Mapping[str, int],
    ) -> None:
        """Write rows in a thread.

        If a call was cancelled, its write continues, and the next call with the same rows waits for
        it. A call with other rows lets it finish before it starts its own write. `seen` contains
        the ticks seen of each partition, including these rows. Raises StaleTableError if another
        sink has written, and ReceiverUnavailableError if the storage fails.
        """
        if self._pending is not pending:
            await self.end()
            self._done = []
        if self._writing is None:
            self._pending = pending
            write = partial(self._write, pending, seen=seen, valid_through=valid_through)
            self._writing = asyncio.create_task(in_daemon_thread(write))
            # Retrieves the exception, so that asyncio logs no warning if no caller waits.
            self._writing.add_done_callback(lambda write: write.cancelled() or write.exception())
        writing = self._writing
        # Even if cancelled, the outcome stays in the task until a caller has read it.
        await asyncio.wait({writing})
        self._writing = None
        # Raises the error of a failed write, so that unwritten rows are not acknowledged.
        writing.result()

    def _write(
        self,
        pending: RowBuffer,
        *,
        seen: Mapping[TopicPartition, NodeTicks],
        valid_through: Mapping[str, int],
    ) -> None:
        """Write the ticks seen, then each table's rows with its offsets, one commit per table."""
        time_ms = self._clock.time_ns() // NS_PER_MS
        streams = self._targets[0].stored.streams
        # The ticks seen are written before any commit, so that a sink killed in between has them.
        # If a later table's commit is retried, they are already written.
        if not self._done:
            self._seen.record(
                {streams.of(at): (pending.last_offsets[at], ticks) for at, ticks in seen.items()},
                written_us=time_ms * 1000,
            )
        for target in self._targets:
            rows, news = target.rows_of(pending), target.news_of(pending.last_offsets)
            # A table that is ahead already has these rows, and its offsets must not be lowered.
            if target in self._done or not rows or not news:
                continue
            hours = {minute // 60 for minute in pending.sums.minutes}
            target.table.append(
                list(rows),
                {target.stored.streams.of(at): last for at, last in news.items()},
                time_ms=time_ms,
                facts=target.stored.new_identities(news),
                commit_info=describe(
                    hours=hours if target.announces_hours else None,
                    valid_through=latest_marks(target.stored.complete_through, valid_through),
                ),
            )
            # If the next table fails, this table must not be written again.
            self._done.append(target)
            target.stored.advance(news)
        self._prune(pending.last_offsets)

    def _prune(self, partitions: Collection[TopicPartition]) -> None:
        """Remove the ticks seen before the offsets of the last pruning; run every ten minutes."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_prune_ns:
            return
        self._next_prune_ns = now_ns + round(_PRUNED_AFTER_SECONDS * NS_PER_SECOND)
        try:
            self._seen.prune(self._outdated)
        except ReceiverUnavailableError as error:
            # The rows of events are stored, so pruning can wait.
            _log.info("seen_samples_not_pruned", error=str(error))
        streams = self._targets[0].stored.streams
        self._outdated = {streams.of(at): position_of(self._targets, at) for at in partitions}

    async def end(self) -> None:
        """Wait until a running write has ended; ignore its error."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing = None
