"""Start positions of a Kafka consumer, and the gaps that it finds.

An offset is only meaningful for one incarnation of a topic. Kafka stores committed offsets by topic
name, so a recreated topic inherits the offsets of its predecessor; once it has grown beyond them, a
consumer would skip its first records unnoticed. Therefore each commit carries the topic id as
metadata. The ids are compared when partitions are assigned and every `TOPIC_CHECK_SECONDS` after.

Each commit also carries the topic's number of partitions. This number determines the partition of a
node's records and states, so a group never continues after partitions were added.

The metadata also distinguishes the group's own commits from those of other programs, such as
`kafka-consumer-groups.sh --reset-offsets`, which commit without it.

If retention has removed records, the broker rejects the fetch. By default, aiokafka would silently
continue at the first remaining record. With `auto_offset_reset` "none" it raises an error instead,
which becomes a `Gap` before the consumer continues.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from gpuledger.bus.aiokafka_patches import consumers
from gpuledger.bus.aiokafka_patches.requests import (
    FetchedTopic,
    committed_offsets,
    fetch_topics,
    stable_offsets,
)
from gpuledger.bus.gaps import (
    ReportedGaps,
    count_from_zero,
    known_time_ms,
    moved_gap,
    report_gap,
)
from gpuledger.bus.kafka_connection import ABSENT_ANSWERS, KafkaConnection
from gpuledger.bus.kafka_fetch import named
from gpuledger.bus.protocol import (
    Gap,
    GapReason,
    Polled,
    Subscription,
    TopicPartition,
    is_other_topic,
)
from gpuledger.bus.topic_ids import TopicIds
from gpuledger.topics import refuse_added_partitions

TOPIC_CHECK_SECONDS: Final = 10.0
"""Interval at which topic ids and numbers of partitions are requested during reading."""
TOPIC_CHECK_TIMEOUT_SECONDS: Final = 2.0
"""Timeout of this request. After a timeout, the topics count as unchanged until the next check."""
_IDENTITY: Final = "topic_id="
_PARTITIONS: Final = " partitions="


class CommitMetadata(NamedTuple):
    """The metadata of a commit.

    Even if all facts are unknown, the text shows that the group itself has committed.
    """

    topic_id: str | None
    """The id of the topic; `None` if it is unknown."""
    partitions: int | None
    """The number of partitions of the topic; `None` if it is unknown."""
    is_own: bool = True
    """Whether the group itself has committed, and not another program."""

    @property
    def text(self) -> str:
        """The text that a commit contains, which `parse` reads."""
        count = "" if self.partitions is None else f"{_PARTITIONS}{self.partitions}"
        return f"{_IDENTITY}{self.topic_id or ''}{count}"

    @classmethod
    def parse(cls, text: str) -> "CommitMetadata":
        """Return the contents of a commit's metadata."""
        if not text.startswith(_IDENTITY):
            return cls(None, None, is_own=False)
        topic_id, _, count = text.removeprefix(_IDENTITY).partition(_PARTITIONS)
        return cls(topic_id or None, int(count) if count.isdecimal() else None)


def _ids_of(topics: Mapping[str, FetchedTopic] | None) -> dict[str, str | None] | None:
    return None if topics is None else {topic: each.topic_id for topic, each in topics.items()}


def _counts_of(topics: Mapping[str, FetchedTopic] | None) -> dict[str, int]:
    # A broker that has just started may not know the partitions yet.
    return {topic: each.partitions for topic, each in (topics or {}).items() if each.partitions}


class _LastRead(NamedTuple):
    topic_id: str | None
    next_offset: int
    time_ms: int | None


class Positions:
    """The topic ids and read positions of one consumer, and the gaps it reported."""

    def __init__(self, *, connection: KafkaConnection, subscription: Subscription) -> None:
        self._connection = connection
        self._subscription = subscription
        self._topic_ids = TopicIds({})
        """The topic ids at the last assignment, and ids that became known since then."""
        self._counts: Mapping[str, int] = {}
        """The topics' numbers of partitions at the last assignment; empty if unknown."""
        self._last_read: dict[TopicPartition, _LastRead] = {}
        self._reported: set[tuple[TopicPartition, str | None]] = set()
        self._gaps = ReportedGaps()
        self._moved_to: dict[TopicPartition, int] = {}
        """Offsets that another program has committed, as `committed` found them."""
        count_from_zero(subscription.topics, group=subscription.group)
        self._checked_at = 0.0
        self._absent_checks = 0
        self._has_begun = False
        self._is_out_of_date = False

    async def begin(self, client: AIOKafkaConsumer, partitions: Iterable[TopicPartition]) -> None:
        """Set newly assigned partitions to the group's committed offsets.

        A partition starts at its beginning if nothing is committed, or if the offset belongs to an
        earlier topic of the same name. Raises `TopicsError` if partitions were added.
        """
        wanted = list(partitions)
        async with self._connection.requesting("looking up the group's committed offsets"):
            topics = await self._fetch_topics(client)
            self._topic_ids = TopicIds(_ids_of(topics))
            self._counts = _counts_of(topics)
            # Added partitions have no commits, so the commits of all partitions are requested.
            asked = {
                TopicPartition(topic, number)
                for topic, count in self._counts.items()
                for number in range(count)
            }
            committed = await committed_offsets(client, map(named, sorted(asked | set(wanted))))
        self._refuse_added_partitions(committed)
        # Reported before commits carry the new ids, because the records read so far belong to
        # topics with the former ids.
        await self._report_read_of_other_topics()
        self._connection.topic_ids[self._subscription.group] = self._topic_ids.by_topic
        self._connection.partition_counts[self._subscription.group] = self._counts
        self._checked_at, self._absent_checks = asyncio.get_running_loop().time(), 0
        self._has_begun, self._is_out_of_date = True, False
        for partition in wanted:
            offset, metadata = committed.get(named(partition), (None, ""))
            # No committed offset: a new group, or the commits were deleted with their topic.
            if offset is None:
                consumers.seek_or_leave(client, named(partition), None)
            elif self._is_of_other_topic(partition, metadata):
                topic_id = CommitMetadata.parse(metadata).topic_id
                await self.report_recreated(partition, offset, topic_id)
                consumers.seek_or_leave(client, named(partition), None)
            else:
                consumers.seek_or_leave(client, named(partition), offset)

    def close(self) -> None:
        """Record that the client is closed; keep the read positions for the next client."""
        self._has_begun = self._is_out_of_date = False

    def note(self, records: Polled) -> None:
        """Record how far the partitions were read."""
        for partition, read in records.items():
            if read:
                self._last_read[partition] = _LastRead(
                    topic_id=self._topic_ids.by_topic.get(partition.topic),
                    next_offset=read[-1].offset + 1,
                    time_ms=known_time_ms(read[-1].timestamp_ms),
                )

    async def committed(
        self,
        client: AIOKafkaConsumer,
        partition: TopicPartition,
        *,
        on_pending: Callable[[], None],
    ) -> int | None:
        """Return the committed offset, or `None` if it belongs to an earlier topic of this name.

        Also returns `None` if nothing is committed. Calls `on_pending` while a transaction may
        still change the offset.
        """
        found = await stable_offsets(client, [named(partition)], on_pending=on_pending)
        offset, metadata = found.get(named(partition), (None, ""))
        self._moved_to.pop(partition, None)
        if offset is not None and not CommitMetadata.parse(metadata).is_own:
            self._moved_to[partition] = offset
        return None if self._is_of_other_topic(partition, metadata) else offset

    async def report_moved(self, partition: TopicPartition, *, read_before: int | None) -> bool:
        """Report a gap if another program set the committed offset past unread records.

        Returns whether another program has set the offset.
        """
        offset = self._moved_to.get(partition)
        if offset is None:
            return False
        if gap := moved_gap(partition, offset=offset, read_before=read_before):
            await self._report(gap)
        return True

    async def report_recreated(
        self,
        partition: TopicPartition,
        offset: int,
        topic_id: str | None,
        *,
        time_ms: int | None = None,
    ) -> None:
        """Report a gap: the topic with this id was recreated, so its unread records are lost.

        Each partition of a recreated topic is reported only once.
        """
        # An assignment, the regular check and a rejected fetch may all find the same change.
        if (partition, topic_id) not in self._reported:
            self._reported.add((partition, topic_id))
            await self._report(
                Gap(
                    partition=partition,
                    first_offset=offset,
                    next_offset=0,
                    reason=GapReason.TOPIC_RECREATED,
                    time_before_ms=time_ms,
                )
            )

    def metadata(self, partition: TopicPartition) -> str:
        """Return the metadata of a commit for this partition."""
        topic = partition.topic
        return CommitMetadata(self._topic_ids.by_topic.get(topic), self._counts.get(topic)).text

    async def must_begin_again(
        self, client: AIOKafkaConsumer, held: Iterable[TopicPartition]
    ) -> bool:
        """Return whether to reopen the client, because topics or partitions have changed.

        Queries the brokers every `TOPIC_CHECK_SECONDS`. Reports a gap for each held partition of a
        recreated topic.
        """
        now = asyncio.get_running_loop().time()
        if self._has_begun and now - self._checked_at >= TOPIC_CHECK_SECONDS:
            self._checked_at = now
            await self._compare_topics(client, held)
        return self._is_out_of_date

    async def _compare_topics(
        self, client: AIOKafkaConsumer, held: Iterable[TopicPartition]
    ) -> None:
        try:
            async with asyncio.timeout(TOPIC_CHECK_TIMEOUT_SECONDS):
                topics = await self._fetch_topics(client)
        # Without an answer nothing is known about the topics; the poll reports the outage.
        except (KafkaError, OSError, TimeoutError):
            return
        if topics is None:
            return
        found = _ids_of(topics) or {}
        # One absent answer is not enough: a broker that has just started may not know a topic.
        is_absent = not found.keys() >= set(self._subscription.topics)
        self._absent_checks = self._absent_checks + 1 if is_absent else 0
        others = self._topic_ids.update(found)
        for partition in sorted(held):
            if partition.topic in others:
                last = self._last_read.get(partition)
                # `by_topic` still has the former id: `update` keeps it if a topic was recreated.
                await self.report_recreated(
                    partition,
                    consumers.position_or_none(client, named(partition)) or 0,
                    self._topic_ids.by_topic.get(partition.topic),
                    time_ms=last and last.time_ms,
                )
        counts = _counts_of(topics)
        has_grown = any(count > self._counts.get(topic, count) for topic, count in counts.items())
        self._is_out_of_date = bool(others) or has_grown or self._absent_checks >= ABSENT_ANSWERS

    async def skip_to_available(
        self, client: AIOKafkaConsumer, error: OffsetOutOfRangeError
    ) -> None:
        """Report the gap after a rejected offset, and seek to the first available offset."""
        (refused,) = error.args
        for at, offset in refused.items():
            partition = TopicPartition(*at)
            async with self._connection.requesting("looking up the first offset"):
                first = (await client.beginning_offsets([at]))[at]
                end = (await client.end_offsets([at]))[at]
            # The broker lagged, for example as a new leader: no record is missing.
            if first <= offset <= end:
                consumers.seek_or_leave(client, named(partition), offset)
                continue
            # An offset that is out of range may belong to a topic that was recreated.
            await self._compare_topics(client, [partition])
            if self._is_out_of_date:
                continue  # the next poll reopens the client
            reason = GapReason.RETENTION if offset < first else GapReason.TRUNCATED
            last = self._last_read.get(partition)
            await self._report(
                Gap(
                    partition=partition,
                    first_offset=offset,
                    next_offset=first,
                    reason=reason,
                    time_before_ms=last and last.time_ms,
                    time_after_ms=await self._first_time_ms(client, partition),
                )
            )
            consumers.seek_or_leave(client, named(partition), first)

    async def _fetch_topics(self, client: AIOKafkaConsumer) -> dict[str, FetchedTopic] | None:
        inner = consumers.inner_client(client)
        return await fetch_topics(inner, list(self._subscription.topics))

    def _refuse_added_partitions(self, committed: Mapping[Any, tuple[int, str]]) -> None:
        """Raise `TopicsError` if partitions were added to a topic since the group's commits."""
        group = self._subscription.group
        for (topic, _), (_, metadata) in sorted(committed.items()):
            found, commit = self._counts.get(topic), CommitMetadata.parse(metadata)
            # A recreated topic may have any number.
            is_same = commit.topic_id and commit.topic_id == self._topic_ids.by_topic.get(topic)
            if is_same and found is not None:
                refuse_added_partitions(topic, before=commit.partitions, found=found, group=group)

    def _is_of_other_topic(self, partition: TopicPartition, metadata: str) -> bool:
        topic_id = CommitMetadata.parse(metadata).topic_id
        return is_other_topic(topic_id, self._topic_ids.by_topic.get(partition.topic))

    async def _report_read_of_other_topics(self) -> None:
        """Report a gap for each partition of a recreated topic, then forget the read positions.

        The committed offsets do not always show that a topic was recreated: aiokafka may have
        switched to the new topic before, and deleting a topic deletes the group's commits.
        Positions in a topic that does not exist are kept, because it may be created again.
        """
        for partition, last in sorted(self._last_read.items()):
            if partition.topic not in self._topic_ids.by_topic:
                continue
            del self._last_read[partition]
            if is_other_topic(last.topic_id, self._topic_ids.by_topic[partition.topic]):
                await self.report_recreated(
                    partition, last.next_offset, last.topic_id, time_ms=last.time_ms
                )

    async def _report(self, gap: Gap) -> None:
        if rest := self._gaps.rest_of(gap):
            report_gap(rest, group=self._subscription.group)
            await self._subscription.on_gap(rest)

    async def _first_time_ms(
        self, client: AIOKafkaConsumer, partition: TopicPartition
    ) -> int | None:
        at = named(partition)
        async with self._connection.requesting("looking up the time of the first record"):
            # Timestamp 0 finds the first record, because all valid timestamps are at or after 0.
            found: Any = (await client.offsets_for_times({at: 0})).get(at)
        return None if found is None else known_time_ms(int(found.timestamp))
