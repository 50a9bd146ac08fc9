"""The Kafka operations that a component needs: the protocol that both buses implement.

This module holds the protocol and its value types. Callers publish batches to a partition that they
choose. They consume by polling, and decide themselves when a record is done and its offset is
committed.

Any method may raise a `BusError`: the brokers are unavailable, a topic is missing or a permission
is denied. The caller retries with a back-off. A call for a partition that is not assigned raises
`NotAssignedError`; retrying the call is useless before the next poll, because only `poll` assigns
partitions. By default, consumers receive no uncommitted or aborted records.
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
    """A message to publish."""

    key: bytes | None
    value: bytes | None
    """`None` is a tombstone on a compacted topic."""
    timestamp_ms: int
    """Event time in milliseconds since the epoch: Kafka's CreateTime."""


class UnreadableReason(StrEnum):
    """Why a batch of records cannot be read."""

    CODEC = "codec"
    """The batch is compressed with a codec that gpuledger does not use."""
    TOO_LARGE = "too_large"
    """The unpacked batch is too large."""
    TOO_MANY = "too_many"
    """The batch has too many records."""
    DAMAGED = "damaged"
    """The batch cannot be unpacked, or its content is not a valid batch of records."""


class Unreadable(NamedTuple):
    """A batch that cannot be unpacked; one placeholder record replaces its records."""

    first_offset: int
    """Offset of the batch's first record. The placeholder itself has the last record's offset."""
    reason: UnreadableReason
    detail: str
    """The cause, as part of a sentence."""


# A `Record` is created for each record that is read, and a tuple is the cheapest object to create.
class Record(NamedTuple):
    """A published message as a consumer reads it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    unreadable: Unreadable | None = None
    """Set if this is the placeholder for an unreadable batch; key and value are then `None`."""

    @property
    def first_offset(self) -> int:
        """First offset that the record covers; for a readable record, its own offset."""
        return self.offset if self.unreadable is None else self.unreadable.first_offset


class TopicDescription(NamedTuple):
    """A topic as the brokers describe it."""

    partitions: int
    topic_id: str | None
    """The id that Kafka assigned when the topic was created; `None` if unknown."""


def is_other_topic(before: str | None, now: str | None) -> bool:
    """Return whether two topic ids differ; an unknown id counts as equal."""
    # Brokers older than 2.8 have no topic ids; an upgrade assigns one to each existing topic.
    return before is not None and now is not None and before != now


class GapReason(StrEnum):
    """Why a consumer cannot continue at its position."""

    RETENTION = "retention"
    """Records were removed by age, by size or by hand before they were read."""
    TOPIC_RECREATED = "topic_recreated"
    """The topic was deleted and recreated, so its offsets now belong to other records."""
    TRUNCATED = "truncated"
    """The partition ends before the consumer's position: the elected leader lacks records."""
    MOVED = "moved"
    """Another program set the group's committed offset past records that the group had not read."""
    UNREADABLE = "unreadable"
    """The records exist, but their batch cannot be unpacked. Consumers skip the batch; only code
    that lists missing data reports it as a gap."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Offsets of a partition that a consumer has not read and can no longer read."""

    partition: TopicPartition
    first_offset: int
    """The position at which the consumer would have continued. If another program moved the offset
    and this position is unknown, it equals `next_offset`."""
    next_offset: int
    """The position at which the consumer continues instead; if the topic was recreated, an offset
    in the new topic."""
    reason: GapReason
    time_before_ms: int | None = None
    """Event time of the last record that was read; `None` if this process has read none."""
    time_after_ms: int | None = None
    """Event time of the first remaining record; `None` if there is none."""

    @property
    def missed(self) -> int | None:
        """Number of skipped offsets, transaction markers included; `None` if it is unknown."""
        return self.next_offset - self.first_offset if self.has_end else None

    @property
    def has_end(self) -> bool:
        """Whether the number of missed offsets is known.

        It is known if both offsets belong to the same topic and no record between them was read.
        """
        if self.reason is GapReason.MOVED:
            return self.first_offset < self.next_offset
        return self.reason in (GapReason.RETENTION, GapReason.UNREADABLE)


PartitionsCallback = Callable[[frozenset[TopicPartition]], Awaitable[None]]
GapCallback = Callable[[Gap], Awaitable[None]]


async def ignore_partitions(partitions: frozenset[TopicPartition]) -> None:
    """Do nothing; the default callback for an assignment or a revocation of partitions."""


async def ignore_gap(gap: Gap) -> None:
    """Do nothing; the default callback for a gap. Gaps are logged and counted anyway."""


OTHER_STAGE: Final = (
    "has members of another kind in the group; give this process a group of its own (`group`)"
)
"""Error text for a consumer that may not join a group, because another component uses the group."""


class IsolationLevel(StrEnum):
    """Which records a consumer receives; names and values are Kafka's."""

    READ_COMMITTED = "read_committed"
    """Only committed records, and none after the start of a transaction that is still open."""
    READ_UNCOMMITTED = "read_uncommitted"
    """All records immediately, including those in open or aborted transactions."""


@dataclass(frozen=True, kw_only=True)
class Subscription:
    """The topics that a consumer reads, and how it reads them."""

    group: str
    """The consumer group. Each group reads every record; its members share the partitions."""
    topics: Sequence[str]
    """The topics. Partitions with the same number go to the same member (range assignment)."""
    stage: str = ""
    """Name of the component or sink that reads. All members of a group must have the same name,
    because each component would miss the partitions that are assigned to another component."""
    group_instance_id: str | None = None
    """Kafka's `group.instance.id` (static membership). If the member with this id closes, its
    partitions wait for the member to return."""
    isolation_level: IsolationLevel = IsolationLevel.READ_COMMITTED
    """Whether to withhold uncommitted records. Read topics that are written without transactions
    with `READ_UNCOMMITTED`. With `READ_COMMITTED`, an open transaction of any client, even one
    that should not write there, withholds all later records."""
    on_assigned: PartitionsCallback = ignore_partitions
    """Called with all newly assigned partitions, before any of their records is polled."""
    on_revoked: PartitionsCallback = ignore_partitions
    """Called with the partitions about to be revoked; the last chance to commit their offsets."""
    on_gap: GapCallback = ignore_gap
    """Called within `poll`, before any record after the gap is returned."""


class Producer(Protocol):
    """Publishes batches."""

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> int | None:
        """Publish the messages in order and wait until the bus has acknowledged all of them.

        Returns the offset after the last message, or `None` if the bus did not report it.
        """


class Transactions(Protocol):
    """Publishes messages and commits offsets atomically; no other open writer has the same id."""

    async def commit(
        self,
        messages: Mapping[TopicPartition, Sequence[Message]],
        *,
        offsets: Mapping[TopicPartition, int],
        group: str,
    ) -> Mapping[TopicPartition, int] | None:
        """Publish messages and commit a group's offsets, all or nothing.

        Returns the offset after each partition's last message, if the bus reported it.

        Raises `TopicsError` before anything is written, and `MessageTooLargeError` if a message
        exceeds the maximum of the bus or of its topic; nothing was committed. Raises `FencedError`
        if another writer took over the id; nothing was committed. After `BusUnavailableError`,
        either everything or nothing was committed. After `FencedError` and `BusUnavailableError`,
        the object cannot commit any more: open the id again and compare the committed offsets.
        """


Polled = Mapping[TopicPartition, Sequence[Record]]
"""The records of one poll, in order within each partition."""


class Consumer(Protocol):
    """Reads the partitions that its group assigned to it.

    The consumer never skips unavailable records silently: `bus.gaps` logs and counts them, and the
    consumer calls the subscription's `on_gap`. A batch that cannot be unpacked is returned as one
    `unreadable` record at its position. If a topic is recreated while it is read, its partitions
    are revoked and assigned again, and are read from the beginning.
    """

    async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
        """Wait at most `timeout_seconds` for records; return at most `max_records`, possibly none.

        If the group has no committed offset for a partition, it starts at the beginning.

        Never raises `NotAssignedError`. Raises `TopicsError` if a subscribed topic does not exist;
        once it exists again, a later call rejoins the group.
        """

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets; each is the offset of the next record to read in its partition.

        Raises `NotAssignedError` if a partition is not assigned.
        """

    async def committed(self, partition: TopicPartition) -> int | None:
        """Wait until no open transaction can change the committed offset, then return it.

        Returns `None` if nothing is committed, or if the committed offset belongs to an earlier
        topic of the same name.
        """

    async def report_moved(self, partition: TopicPartition, *, read_before: int | None) -> bool:
        """Report a gap if another program set the committed offset past unread records.

        Refers to the offset that `committed` returned last. `read_before` is the offset before
        which the component has read all records. If it is `None`, it is unknown: every offset above
        0 that another program has set is then reported as a gap of unknown size.

        Returns whether another program has set the offset. The component must then commit it, so
        that the partition's next owner does not report the gap again.
        """

    async def report_recreated(
        self, partition: TopicPartition, *, topic_id: str, read_before: int
    ) -> None:
        """Report a gap: the component has read an earlier topic of the same name.

        `topic_id` is the id of the earlier topic, and `read_before` the offset before which the
        component has read all of its records. A gap that this consumer has found itself is not
        reported again.
        """

    async def topic_id(self, topic: str) -> str | None:
        """Request the topic's id from the brokers and return it.

        Returns `None` if the brokers do not support topic ids. Raises `BusUnavailableError` if the
        topic does not exist.
        """

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that are currently assigned."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `poll` return no records of these partitions until they are resumed."""

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `poll` return records of these partitions again, from the paused position on."""

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue reading at this offset, or at the first kept record if that is later.

        Offset 0 means the current beginning: records that were already removed are not a gap.
        Raises `NotAssignedError` if the partition is not assigned.
        """

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record to poll, past any offsets removed by compaction.

        Raises `NotAssignedError` if the partition is not assigned.
        """

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return, for each partition, the offset after the last record that can be read now."""

    def at_end(self) -> frozenset[TopicPartition]:
        """Return the partitions that are known to have been read to their end.

        The method makes no request: the end is the one that the bus reported with its last answer.
        With `READ_COMMITTED`, it is the offset of the first open transaction, if there is one.
        Paused partitions may be missing.
        """

    def withheld_seconds(self) -> float:
        """Return for how long an open transaction has withheld existing records, in seconds.

        The time is the longest of all partitions. It is 0 if no records are withheld, and always 0
        with `READ_UNCOMMITTED`.
        """

    def is_answered(self) -> bool:
        """Return whether the bus has recently answered for every partition that is being read.

        `poll` does not show this: it returns nothing both without new records and without answers.
        Returns false before the consumer has joined its group.
        """


class Span(NamedTuple):
    """A range of offsets in one partition, from `first` up to but excluding `end`."""

    first: int
    end: int


class HistoryReader(Protocol):
    """Reads the committed records of any partition of any topic, one partition at a time.

    A reader neither joins a group nor commits offsets, so it does not affect any consumer. Any
    method may raise `BusUnavailableError`.
    """

    async def spans(self, topic: str) -> Mapping[TopicPartition, Span]:
        """Return the span of offsets that each partition keeps.

        `first` is above 0 if the bus has removed earlier records. Raises `TopicsError` if the topic
        does not exist.
        """

    async def topic_id(self, topic: str) -> str | None:
        """Request an existing topic's id; return `None` if the topic has no id."""

    async def offsets_at(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int
    ) -> Mapping[TopicPartition, int]:
        """Return the offset of each partition's first record at or after `timestamp_ms`.

        Every record before that offset is older; records after it may be older too. If all records
        of a partition are older, its end offset is returned.
        """

    def read(self, partition: TopicPartition, span: Span) -> AsyncGenerator[Sequence[Record], None]:
        """Yield the records of a span, in order and in batches.

        End one iteration before you start the next one.
        """


class Bus(Protocol):
    """Opens producers, transactions, consumers and readers for one installation."""

    @property
    def topics(self) -> Topics:
        """The topic table of the installation that this bus serves."""

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions; raise `TopicsError` if the topic does not exist."""

    async def describe(self, topic: str) -> TopicDescription:
        """Return the topic's current description; raise `TopicsError` if it does not exist."""

    async def topic_id(self, topic: str) -> str | None:
        """Request the topic's current id over the connection of an open producer.

        Returns `None` if no producer is connected, or if the topic does not exist or has no id.
        Unlike `describe`, it never opens a connection, so many agents may call it often.
        """

    def producer(self) -> AbstractAsyncContextManager[Producer]:
        """Open a producer; leaving the context flushes and closes it."""

    def transactions(self, transactional_id: str) -> AbstractAsyncContextManager[Transactions]:
        """Open a writer with this id; only the writer that opened the id last may use it.

        Entering the context fences the previous writer and ends any transaction that it left open.
        From then on, only the new writer changes the group's committed offsets. Entering raises
        `BusUnavailableError`, or `UserError` if the brokers deny permission.
        """

    def consumer(self, subscription: Subscription) -> AbstractAsyncContextManager[Consumer]:
        """Open a consumer; leaving the context revokes its partitions and leaves the group."""

    def reader(self) -> AbstractAsyncContextManager[HistoryReader]:
        """Open a reader; leaving the context closes it."""
