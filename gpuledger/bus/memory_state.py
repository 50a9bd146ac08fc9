"""State of the in-memory bus: the records of each partition, and the consumer groups.

A partition has offsets, compaction and a limit on the records it keeps. A group has members, their
assignments and committed offsets. A rebalance follows Kafka's eager protocol: every member gives up
all its partitions in its own poll, then all receive their new shares. Nothing here blocks.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Final

from gpuledger.bus.protocol import OTHER_STAGE, Message, Record, TopicPartition
from gpuledger.errors import RefusedError
from gpuledger.topics import refuse_added_partitions

OVERHEAD_BYTES: Final = 200
"""Memory that CPython uses for a record in addition to the bytes of its key and value."""
KEPT_AFTER_DROPPING: Final = 0.875
"""Fraction of its limit that a partition still uses after it has dropped its oldest records.
Dropping an eighth at a time keeps the cost of drops proportional to the appended records."""
FEWEST_TO_COMPACT: Final = 1000

_offset = attrgetter("offset")


class PartitionLog:
    """The records of one partition, ordered by offset; offsets may have holes."""

    def __init__(
        self,
        partition: TopicPartition,
        *,
        topic_id: str,
        compacted: bool,
        max_bytes: int,
        max_records: int,
    ) -> None:
        self.partition = partition
        self.end_offset = 0
        """The offset that the next record gets."""
        self.expired_before = 0
        """Records before this offset were removed by age or size, not by compaction."""
        self.topic_id = topic_id
        """The topic's id; it changes when the topic is recreated."""
        self.compacted = compacted
        self.readers: set[Callable[[], None]] = set()
        """Called after each append."""
        self._records: list[Record] = []
        self._bytes = 0
        self._max_bytes = max_bytes
        self._max_records = max_records
        self._compact_at = FEWEST_TO_COMPACT
        self._tombstones_before = 0

    @property
    def first_offset(self) -> int:
        """Return the offset of the first kept record, or the end offset if none is kept."""
        return self._records[0].offset if self._records else self.end_offset

    def append(self, messages: Sequence[Message]) -> None:
        """Append all messages at once and wake the readers."""
        for offset, message in enumerate(messages, start=self.end_offset):
            record = Record(
                *self.partition, offset, message.timestamp_ms, message.key, message.value
            )
            self._records.append(record)
            self._bytes += _size_bytes(record)
        self.end_offset += len(messages)
        if self.compacted:
            # A compacted log holds the current state, so none of its records is dropped by size.
            if len(self._records) >= self._compact_at:
                self.compact()
        elif len(self._records) > self._max_records or self._bytes > self._max_bytes:
            max_records = int(self._max_records * KEPT_AFTER_DROPPING)
            max_bytes = int(self._max_bytes * KEPT_AFTER_DROPPING)
            dropped = 0
            while len(self._records) - dropped > max_records or self._bytes > max_bytes:
                self._bytes -= _size_bytes(self._records[dropped])
                dropped += 1
            del self._records[:dropped]
            # A consumer whose position is before this offset reports a gap at its next poll.
            self.expired_before = self.first_offset
        for wake in self.readers:
            wake()

    def read(self, offset: int, *, max_records: int) -> list[Record]:
        """Return at most `max_records` records, beginning with the first at or after `offset`."""
        start = bisect_left(self._records, offset, key=_offset)
        return self._records[start : start + max_records]

    def next_offset(self, offset: int) -> int:
        """Return the offset of the first record at or after an offset, or the end offset."""
        found = self.read(offset, max_records=1)
        return found[0].offset if found else self.end_offset

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the offset of the first record at or after this time, or the end offset."""
        return next(
            (record.offset for record in self._records if record.timestamp_ms >= timestamp_ms),
            self.end_offset,
        )

    def remove_before(self, offset: int) -> None:
        """Remove the records before an offset, as retention does."""
        del self._records[: bisect_left(self._records, offset, key=_offset)]
        self._bytes = sum(map(_size_bytes, self._records))
        self.expired_before = max(self.expired_before, min(offset, self.end_offset))

    def recreate(self, topic_id: str) -> None:
        """Remove all records and start at offset 0, as in a new topic with the same name."""
        self._records.clear()
        self._bytes = self.end_offset = self.expired_before = self._tombstones_before = 0
        self.topic_id = topic_id
        for wake in self.readers:
            wake()

    def compact(self) -> None:
        """Keep only the last record of each key; remove tombstones of an earlier compaction."""
        # Like Kafka's log cleaner, this considers only keys, not timestamps.
        last = {record.key: record.offset for record in self._records}
        self._records = [
            record
            for record in self._records
            if last[record.key] == record.offset
            and (record.value is not None or record.offset >= self._tombstones_before)
        ]
        self._bytes = sum(map(_size_bytes, self._records))
        self._tombstones_before = self.end_offset
        self._compact_at = max(FEWEST_TO_COMPACT, 2 * len(self._records))


def _size_bytes(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"") + OVERHEAD_BYTES


Assignment = frozenset[TopicPartition]


@dataclass(kw_only=True, eq=False)
class Member:
    """A group member: its topics, its share of their partitions, and its state in a rebalance."""

    name: str
    static: bool
    topics: Sequence[str]
    wake: Callable[[], None]
    share: Assignment = frozenset()
    """The partitions that the group assigned; the member may not have started to read them yet."""
    generation: int = 0
    """Number of the rebalance that assigned the share."""
    ready: bool = False
    """Whether the member has given up its partitions and waits for a new share."""
    away: bool = False
    """Whether this is a static member that closed; its share waits for its return."""
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)


class ConsumerGroup:
    """A consumer group: members that share their topics' partitions, and committed offsets."""

    def __init__(self, *, partitions: Mapping[str, int], session_timeout_seconds: float) -> None:
        self.committed: dict[TopicPartition, int] = {}
        self.topic_ids: dict[str, str] = {}
        """The topics' ids at the time when the members started to read them."""
        self.counts: dict[str, int] = {}
        """The topics' numbers of partitions at that time."""
        self._committed_counts: dict[TopicPartition, int] = {}
        self.moved: set[TopicPartition] = set()
        """Partitions whose committed offset another program has set."""
        self._committed_ids: dict[TopicPartition, str] = {}
        self._partitions = partitions
        self._session_timeout_seconds = session_timeout_seconds
        self._members: dict[str, Member] = {}
        self._stage = ""
        self._names = count(1)
        self._generation = 0
        self._rebalancing = False

    def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of the topics that the members read."""
        self.committed.update(offsets)
        self.moved.difference_update(offsets)
        for partition in offsets:
            if identity := self.topic_ids.get(partition.topic):
                self._committed_ids[partition] = identity
                self._committed_counts[partition] = self.counts[partition.topic]

    def move(self, partition: TopicPartition, offset: int) -> None:
        """Commit an offset in the name of another program."""
        self.committed[partition] = offset
        self.moved.add(partition)
        self._committed_ids.pop(partition, None)

    def delete_offsets(self, topic: str) -> None:
        """Delete the committed offsets of a topic, as Kafka does when the topic is deleted."""
        for partition in [partition for partition in self.committed if partition.topic == topic]:
            del self.committed[partition]
            self.moved.discard(partition)
            self._committed_ids.pop(partition, None)
            self._committed_counts.pop(partition, None)

    def count_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the topics' numbers of partitions."""
        return {topic: self._partitions[topic] for topic in topics}

    def refuse_added_partitions(self, name: str, topics: Iterable[str]) -> None:
        """Raise `TopicsError` if partitions were added to a topic since the group's commits."""
        for partition, before in self._committed_counts.items():
            if partition.topic in topics and partition in self._committed_ids:
                found = self._partitions[partition.topic]
                refuse_added_partitions(partition.topic, before=before, found=found, group=name)

    def committed_of(self, partition: TopicPartition, topic_id: str) -> int | None:
        """Return the committed offset; `None` if it belongs to an earlier topic of this name."""
        if self._committed_ids.get(partition, topic_id) != topic_id:
            return None
        return self.committed.get(partition)

    def join(
        self,
        *,
        name: str | None,
        topics: Sequence[str],
        wake: Callable[[], None],
        stage: str = "",
    ) -> Member:
        """Add a member; a returning static member gets its share back without a rebalance.

        Raises `RefusedError` if the group has members with another `stage`.
        """
        if self._members and stage != self._stage:
            raise RefusedError(f"joining the group: the bus {OTHER_STAGE}")
        self._stage = stage
        returning = self._members.get(name) if name else None
        member = Member(
            name=name or f"member-{next(self._names):06d}",
            static=name is not None,
            topics=topics,
            wake=wake,
        )
        self._members[member.name] = member
        if returning is None or set(returning.topics) != set(topics):
            self._start_rebalance()
            return member
        if returning.expiry is not None:
            returning.expiry.cancel()
        # The previous member with this name finds at its next poll that it was replaced.
        returning.wake()
        member.share, member.generation = returning.share, returning.generation
        member.ready = True
        self._finish_rebalance()
        return member

    def leave(self, member: Member) -> None:
        """Remove a member; a static member's share stays reserved for the session timeout."""
        if self.is_replaced(member):
            return
        # A static member that restarts within the session timeout gets the same share again.
        if not member.static:
            del self._members[member.name]
            self._start_rebalance()
            return
        member.away = True
        loop = asyncio.get_running_loop()
        member.expiry = loop.call_later(self._session_timeout_seconds, self._expire, member)
        self._finish_rebalance()

    def is_replaced(self, member: Member) -> bool:
        """Return whether another consumer joined with the same static name."""
        return self._members.get(member.name) is not member

    def must_give_up(self, member: Member) -> bool:
        """Return whether a rebalance waits until this member gives up its partitions."""
        return self._rebalancing and not member.ready

    def give_up(self, member: Member) -> None:
        """Record that a member gave up its partitions; when all have, the rebalance ends."""
        member.ready = True
        self._finish_rebalance()

    def _expire(self, member: Member) -> None:
        if not self.is_replaced(member):
            del self._members[member.name]
            self._start_rebalance()

    def _start_rebalance(self) -> None:
        self._rebalancing = True
        for member in self._members.values():
            member.ready = False
            member.wake()
        self._finish_rebalance()

    def _finish_rebalance(self) -> None:
        present = [member for member in self._members.values() if not member.away]
        # Members that are away have already given up their partitions.
        if not self._rebalancing or not all(member.ready for member in present):
            return
        self._rebalancing = False
        self._generation += 1
        shares = assign_ranges(
            {member.name: member.topics for member in self._members.values()}, self._partitions
        )
        for member in self._members.values():
            member.share, member.generation = shares[member.name], self._generation
            member.wake()


def assign_ranges(
    topics_of: Mapping[str, Iterable[str]], partitions: Mapping[str, int]
) -> dict[str, Assignment]:
    """Return each member's share: a contiguous range of each topic's partitions.

    The ranges are the same for all topics with the same number of partitions.
    """
    shares: dict[str, set[TopicPartition]] = {member: set() for member in topics_of}
    for topic in {topic for topics in topics_of.values() for topic in topics}:
        members = sorted(member for member, topics in topics_of.items() if topic in set(topics))
        each, over = divmod(partitions[topic], len(members))
        start = 0
        for index, member in enumerate(members):
            end = start + each + (index < over)
            shares[member] |= {TopicPartition(topic, number) for number in range(start, end)}
            start = end
    return {member: frozenset(share) for member, share in shares.items()}
