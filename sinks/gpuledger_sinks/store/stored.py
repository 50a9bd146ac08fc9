"""What the table has of each partition, of which topic, and the write that adds to it.

Beside its rows the table keeps numbers, each under the name of a stream (`Streams`): of each
partition the last offset that is stored, and the identity of its topic. An offset means nothing
without its topic: one that is deleted and made anew, or restored from elsewhere, has the same name
and other records. `Stored` is what is remembered of these numbers between a look into the table and
the next; it queries neither the table nor the brokers.

A sink has a `Target` for each table that has rows of events: `usage`, and `entries` where these are
stored. Each has offsets of its own, as a sink may be killed between their commits; it goes on where
the one that is behind ends, and what another has already is not added to that one again.

`Appending` is the write that is under way: in a thread, one at a time, whoever stops waiting for
it. What is written and when is `store_sink`'s.
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
    "nothing is written. See that what it holds is not stored already, then set store.generation"
    " to a new name to go on behind what is stored"
)


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The names of a sink's streams in the table."""

    group: str
    """What all of them begin with."""
    generation: str
    """What the user has set after a topic was made anew; empty for the first."""

    def of(self, partition: TopicPartition) -> str:
        """Return the stream of the last offset that is stored."""
        parts = [self.group, self.generation, partition.topic, str(partition.partition)]
        return "|".join(part for part in parts if part)

    def identity_of(self, partition: TopicPartition) -> str:
        """Return the stream of the topic's identity."""
        return f"{self.of(partition)}|topic_id"


@dataclass(kw_only=True)
class Stored:
    """How far the table has each partition that was sought."""

    streams: Streams
    topic_id: str | None = None
    """The identity of the topic of which rows are collected."""
    last_offsets: dict[TopicPartition, int] = field(default_factory=dict)
    """The last offset that the table has of each partition; none where it has nothing."""
    _identified: set[TopicPartition] = field(default_factory=set)
    """Partitions of which the table knows the topic's identity."""
    complete_through: Mapping[str, int] = field(default_factory=dict)
    """Up to when the table said that partitions are complete, in microseconds, others' too: it is
    said again with each commit, so that one that falls silent is not forgotten."""

    def names_of(self, partitions: Collection[TopicPartition]) -> list[str]:
        """Return the streams in which the table has what is to be known of partitions."""
        names = self.streams
        return [name for at in partitions for name in (names.of(at), names.identity_of(at))]

    def learn(self, partition: TopicPartition, numbers: Mapping[str, int]) -> bool:
        """Take what the table's streams say of a partition; return whether it is of our topic."""
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
        """Return the topic's identity for each partition of which the table does not know it."""
        if self.topic_id is None:
            return {}
        number = number_of(self.topic_id)
        new = set(partitions) - self._identified
        return {self.streams.identity_of(partition): number for partition in new}

    def advance(self, last_offsets: Mapping[TopicPartition, int]) -> None:
        """Record that rows were written up to these offsets, with the topic's identity."""
        self.last_offsets |= last_offsets
        self._identified |= last_offsets.keys()


def number_of(topic_id: str) -> int:
    """Return the number under which the table keeps a topic's identity: 63 bits of its hash."""
    return int.from_bytes(hashlib.sha256(topic_id.encode()).digest()[:8]) >> 1


def is_same_topic(*, stored: int | None, topic_id: str | None) -> bool:
    """Return whether the table's offsets are those of the topic with this identity.

    Brokers before Kafka 2.8 give no identity, nor has the table one then; these are trusted.
    """
    return stored is None or topic_id is None or stored == number_of(topic_id)


def other_topic(partition: TopicPartition, *, last_offset: int, topic_id: str | None) -> UserError:
    """Return the error for a table whose offsets are another topic's."""
    return UserError(
        f"the store has {_shown(partition)} up to offset {last_offset} of another topic of that"
        f" name: it was made anew, or is another cluster's (its id is {topic_id} now); {_REMEDY}"
    )


def refuse_shorter_topic(partition: TopicPartition, *, last_offset: int, end: int) -> None:
    """Raise UserError where the partition ends before what the table has of it."""
    if last_offset + 1 > end:
        raise UserError(
            f"the store has {_shown(partition)} up to offset {last_offset}, but that partition ends"
            f" at {end}: the topic was made anew, is another cluster's, or lost records; {_REMEDY}"
        )


def _shown(partition: TopicPartition) -> str:
    return f"{partition.topic}[{partition.partition}]"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A table that has rows of events, and how far it has them."""

    table: TimedTable
    stored: Stored
    rows_of: Callable[[RowBuffer], Collection[Row]]
    """What of all that waits is this table's."""
    announces_hours: bool = False
    """Whether its commits say of which hours they have rows, for what is made of them."""

    def lacks(self, partition: TopicPartition, offset: int) -> bool:
        """Return whether the table has not got what a record brings."""
        return offset > self.stored.last_offsets.get(partition, -1)

    def news_of(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return those offsets that are beyond what the table has."""
        return {at: last for at, last in offsets.items() if self.lacks(at, last)}


def position_of(targets: Sequence[Target], partition: TopicPartition) -> int:
    """Return the offset up to which all of a sink's tables have a partition; -1 for nothing."""
    return min(target.stored.last_offsets.get(partition, -1) for target in targets)


class Appending:
    """The write that is under way, if any."""

    def __init__(self, *, targets: Sequence[Target], seen: SeenTable, clock: Clock) -> None:
        self._targets, self._seen, self._clock = targets, seen, clock
        self._writing: asyncio.Task[None] | None = None
        self._pending: RowBuffer | None = None
        """What is being written."""
        self._done: list[Target] = []
        """The tables that have what is being written."""
        self._next_prune_ns = 0
        self._outdated: dict[str, int] = {}
        """Offsets of a while ago, behind which nobody goes on who repairs a table today."""

    async def append(
        self,
        pending: RowBuffer,
        *,
        seen: Mapping[TopicPartition, NodeTicks],
        valid_through: Mapping[str, int],
    ) -> None:
        """Write in a thread; where the waiting is cancelled, the next call waits for the same.

        What was given up since then is let end first: the rows of now are others. `seen` is what
        ticks were seen of each partition with what is written.
        """
        if self._pending is not pending:
            await self.end()
            self._done = []
        if self._writing is None:
            self._pending = pending
            write = partial(self._write, pending, seen=seen, valid_through=valid_through)
            self._writing = asyncio.create_task(in_daemon_thread(write))
            # Looked at, so that asyncio does not complain where nobody waits any more.
            self._writing.add_done_callback(lambda write: write.cancelled() or write.exception())
        writing = self._writing
        # Cancelled or not, the outcome stays where it is until somebody has seen it.
        await asyncio.wait({writing})
        self._writing = None
        # Only where it succeeded: else the offsets of what is not stored would be taken for stored.
        writing.result()

    def _write(
        self,
        pending: RowBuffer,
        *,
        seen: Mapping[TopicPartition, NodeTicks],
        valid_through: Mapping[str, int],
    ) -> None:
        """Write what was seen, then the rows of each table with its offsets, a commit each."""
        time_ms = self._clock.time_ns() // NS_PER_MS
        streams = self._targets[0].stored.streams
        # Before any commit, or who is killed between the two would go on without it. Where a later
        # table's commit is tried again, it is there already.
        if not self._done:
            self._seen.record(
                {streams.of(at): (pending.last_offsets[at], ticks) for at, ticks in seen.items()},
                written_us=time_ms * 1000,
            )
        for target in self._targets:
            rows, news = target.rows_of(pending), target.news_of(pending.last_offsets)
            # A table that is ahead of another has had these rows: its offsets must not go back.
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
            # From here on a failure of the next table repeats nothing of this one.
            self._done.append(target)
            target.stored.advance(news)
        self._prune(pending.last_offsets)

    def _prune(self, partitions: Collection[TopicPartition]) -> None:
        """Remove from time to time what was seen before where all tables are."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_prune_ns:
            return
        self._next_prune_ns = now_ns + round(_PRUNED_AFTER_SECONDS * NS_PER_SECOND)
        try:
            self._seen.prune(self._outdated)
        except ReceiverUnavailableError as error:
            # The rows are stored: next time will do.
            _log.info("seen_samples_not_pruned", error=str(error))
        streams = self._targets[0].stored.streams
        self._outdated = {streams.of(at): position_of(self._targets, at) for at in partitions}

    async def end(self) -> None:
        """Wait until nothing is being written; how that ended, the table shows."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing = None
