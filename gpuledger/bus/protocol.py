"""What a stage needs of Kafka, in a few methods: the seam that both buses fill.

Here live the protocol and its value types. Publishing is by batch to a partition that the caller
names; consuming is by poll, with offsets, so that the caller decides when a record is done.
Errors: any method may raise a `BusError` (the brokers are away, lack a topic or refuse a right);
whoever calls retries with a back-off. What is asked of a partition that is not assigned raises
`NotAssignedError`: to ask again is of no use before the next poll, which alone assigns partitions.
What a transaction has not committed yet, or never will, no consumer sees, unless it asks for it.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from gpuledger.topics import Topics


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int


class Message(NamedTuple):
    """What is to be published."""

    key: bytes | None
    value: bytes | None
    """`None` is a tombstone on a compacted topic."""
    timestamp_ms: int
    """Event time in milliseconds since the epoch: Kafka's CreateTime."""


class UnreadableReason(StrEnum):
    """Why records cannot be had of the bytes that are there."""

    CODEC = "codec"
    """Their batch is packed as none of ours is."""
    TOO_LARGE = "too_large"
    """Their batch is larger, unpacked, than one may be."""
    TOO_MANY = "too_many"
    """Their batch has more records than one may have."""
    DAMAGED = "damaged"
    """Their batch cannot be unpacked, or is no batch of records inside."""


class Unreadable(NamedTuple):
    """What a record stands for that is none: those of a batch that cannot be unpacked."""

    first_offset: int
    """The offset of the first of them; the record's own is that of the last."""
    reason: UnreadableReason
    detail: str
    """Why, as part of a sentence."""


# Made for each record that is read: nothing costs less to make than a tuple.
class Record(NamedTuple):
    """What was published, as a consumer reads it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    unreadable: Unreadable | None = None
    """Set where this stands for records that cannot be had; there is no key and no value then."""

    @property
    def first_offset(self) -> int:
        """The first of the offsets that it stands for: of a true record its own."""
        return self.offset if self.unreadable is None else self.unreadable.first_offset


class TopicDescription(NamedTuple):
    """What the brokers say of a topic."""

    partitions: int
    topic_id: str | None
    """The identity that it was given when it was made; `None` where that is not known."""


def is_other_topic(before: str | None, now: str | None) -> bool:
    """Return whether two identities are of different topics; where one is unknown, they are not."""
    # Brokers older than 2.8 give no identity, and an upgrade gives one to a topic that had none.
    return before is not None and now is not None and before != now


class GapReason(StrEnum):
    """Why a consumer cannot go on where it was."""

    RETENTION = "retention"
    """Records were removed before they were read, by age, by size or by hand."""
    TOPIC_RECREATED = "topic_recreated"
    """The topic was deleted and made anew: its offsets are those of other records."""
    TRUNCATED = "truncated"
    """The partition ends before what was read of it: a leader was elected that lacks records."""
    UNREADABLE = "unreadable"
    """The records are there, in a batch that cannot be unpacked: consumers read on behind it, and
    only who keeps a list of what is missing makes a gap of it."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """What a consumer of a partition cannot read any more, and never has."""

    partition: TopicPartition
    first_offset: int
    """Where the consumer would have gone on."""
    next_offset: int
    """Where it goes on instead; of another topic than `first_offset` where it was made anew."""
    reason: GapReason
    time_before_ms: int | None = None
    """Event time of the last record that was read; `None` where this process has read none."""
    time_after_ms: int | None = None
    """Event time of the first record that is left; `None` where there is none."""

    @property
    def missed(self) -> int | None:
        """Offsets passed over, transaction markers included; `None` where nobody can know."""
        return self.next_offset - self.first_offset if self.has_end else None

    @property
    def has_end(self) -> bool:
        """Whether both its ends are offsets of the same topic, with nothing read in between."""
        return self.reason in (GapReason.RETENTION, GapReason.UNREADABLE)


PartitionsCallback = Callable[[frozenset[TopicPartition]], Awaitable[None]]
GapCallback = Callable[[Gap], Awaitable[None]]


async def ignore_partitions(partitions: frozenset[TopicPartition]) -> None:
    """Do nothing on an assignment or a revocation: the default of both callbacks."""


async def ignore_gap(gap: Gap) -> None:
    """Do nothing about a gap, which is logged and counted without it: the default."""


OTHER_STAGE: Final = (
    "has members of another kind in the group; give this process a group of its own (`group`)"
)
"""Why a member is not let into a group, in both buses."""


class IsolationLevel(StrEnum):
    """Which records a consumer is given; Kafka's own names."""

    READ_COMMITTED = "read_committed"
    """Of transactions those that were committed, and nothing behind one that is still open."""
    READ_UNCOMMITTED = "read_uncommitted"
    """All of them, at once: also those of transactions that are open, or were aborted."""


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """What a consumer asks for."""

    group: str
    """The consumer group: each group reads everything, its members share it."""
    topics: Sequence[str]
    """The topics; equally numbered partitions of them go to the same member (range assignment)."""
    stage: str = ""
    """What reads: a group has members of one stage. Those of two would read a part of the topics
    each, and what the other has of them would be nobody's."""
    group_instance_id: str | None = None
    """Kafka's `group.instance.id` (static membership): the partitions wait for who has it."""
    isolation_level: IsolationLevel = IsolationLevel.READ_COMMITTED
    """Whether what transactions write is given once it is committed. Of topics whose writers write
    none it only matters who else may open one: it withholds all that is written behind it."""
    on_assigned: PartitionsCallback = ignore_partitions
    """Called with all partitions newly held, before any of their records is polled."""
    on_revoked: PartitionsCallback = ignore_partitions
    """Called with the partitions about to be given up; the last chance to commit for them."""
    on_gap: GapCallback = ignore_gap
    """Called within `poll`, before any record behind the gap is given."""


class Producer(Protocol):
    """Publishes batches."""

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish the messages in their order; return when the bus has acknowledged all of them.

        Returns the offset behind the last of them, `None` where the bus did not tell it.
        """


class Transactions(Protocol):
    """Publishes and commits all at once or not at all; the one writer under its id."""

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> Mapping[TopicPartition, int] | None:
        """Publish messages and commit a group's offsets, all of it or nothing.

        Returns of each partition the offset behind the last message, where the bus told it.

        Raises `TopicsError` and `MessageTooLargeError` before anything is done. Raises
        `FencedError` where another writer took the id over, with nothing done. After
        `BusUnavailableError` all of it may have been done, or nothing. After these two nothing more
        can be committed: whoever opens the id again finds out by what was committed.
        """


Polled = Mapping[TopicPartition, Sequence[Record]]
"""What one poll brought, in each partition's order."""


class Consumer(Protocol):
    """Reads the partitions that its group gave it.

    What it should have read and cannot is never passed over in silence: `bus.gaps` logs and counts
    it, and the subscription's `on_gap` hears of it. What is there and cannot be unpacked comes as a
    record that is `unreadable`, in its place between the others. A topic that is made anew while it
    is read is revoked and assigned again, and is read from its beginning.
    """

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Wait at most `timeout_seconds` for records; give at most `max_records`, maybe none.

        Never raises `NotAssignedError`. Raises `TopicsError` where a topic of the subscription is
        gone; once it is there again, a later call joins the group anew.
        A group without a committed offset begins at the beginning of a partition.
        """

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit, for each partition, the offset of the next record; `NotAssignedError`."""

    async def committed(self, partition: TopicPartition) -> int | None:
        """Return the committed offset, as soon as no open transaction will move it.

        `None` where nothing was committed, or only of an earlier topic of the same name.
        """

    async def topic_id(self, topic: str) -> str | None:
        """Return the identity that the brokers gave the topic when it was made, asked of them now.

        `None` where they give topics none. Raises `BusUnavailableError` where there is no such
        topic now.
        """

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that are held now."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no records of these partitions until they are resumed."""

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of these partitions again, from where they were paused."""

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from this offset; one before the first record kept means the first one kept.

        Offset 0 means the beginning, wherever that is now: what is not kept of it is no gap.
        Raises `NotAssignedError`.
        """

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record to be polled; it steps over compacted holes too.

        Raises `NotAssignedError`.
        """

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset behind the last record that can be read by now."""

    def withheld_seconds(self) -> float:
        """Return for how long records that are there have been withheld, as of now.

        They lie behind a transaction that is open: of all partitions, the longest; 0 where there
        are none, and always where what is not committed is read as well.
        """


class Span(NamedTuple):
    """Offsets of one partition, from `first` up to and without `end`."""

    first: int
    end: int


class HistoryReader(Protocol):
    """Reads any partition of any topic, one at a time; of transactions what was committed.

    It joins no group and commits nothing, so that it disturbs nobody. Any method may raise
    `BusUnavailableError`.
    """

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return what is kept of each partition; `TopicsError` where the topic does not exist.

        `first` is above 0 where the bus has removed what was before it.
        """

    async def topic_id(self, topic: str) -> str | None:
        """Return the identity of a topic that exists, asked now; `None` where none is known."""

    async def offsets_at(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset before which every record is older than that.

        Younger records may come before older ones; where none is as young, it is the end.
        """

    def read(self, partition: TopicPartition, span: Span) -> AsyncGenerator[Sequence[Record], None]:
        """Return the records of a span in their order, some at a time; one call at a time."""


class Bus(Protocol):
    """Opens producers, transactions, consumers and readers, for one installation."""

    @property
    def topics(self) -> Topics:
        """The table of topics of the installation that this bus is opened for."""

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; `TopicsError` where the topic does not exist."""

    async def describe(self, topic: str) -> TopicDescription:
        """Return what is known of a topic now; `TopicsError` where it does not exist."""

    def producer(self) -> AbstractAsyncContextManager[Producer]:
        """Open a producer; leaving the context flushes and closes it."""

    def transactions(self, transactional_id: str) -> AbstractAsyncContextManager[Transactions]:
        """Open transactions under an id that one writer has at a time: the last to open it.

        Entering the context shuts out who had the id before, and ends what that one left open: from
        then on the offsets that its group committed do not change behind the new writer's back.
        Raises `BusUnavailableError` on entering, and `UserError` where the brokers do not allow it.
        """

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        """Open a consumer; leaving the context revokes its partitions and leaves the group."""

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        """Open a reader; leaving the context closes it."""
