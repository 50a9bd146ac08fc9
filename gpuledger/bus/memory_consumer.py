"""The consumer of the in-memory bus: its positions, polls and gaps."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from gpuledger.bus.gaps import ReportedGaps, count_from_zero, moved_gap, report_gap
from gpuledger.bus.memory_state import ConsumerGroup, Member, PartitionLog
from gpuledger.bus.protocol import Gap, GapReason, Record, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, NotAssignedError, TopicsError
from gpuledger.runtime.tasks import wait_event


class MemoryConsumer:
    """Reads the partitions that its group assigned to it.

    The first `poll` joins the group. Callbacks run within `poll`; only `close` also calls
    `on_revoked`.
    """

    def __init__(
        self,
        *,
        subscription: Subscription,
        group: ConsumerGroup,
        logs: Mapping[TopicPartition, PartitionLog],
    ) -> None:
        self._subscription = subscription
        self._group = group
        self._logs = logs
        self._positions: dict[TopicPartition, int] = {}
        self._last_ms: dict[TopicPartition, int] = {}
        self._topic_ids: dict[TopicPartition, str] = {}
        self._gaps: list[Gap] = []
        self._reported = ReportedGaps()
        count_from_zero(subscription.topics, group=subscription.group)
        self._left: set[tuple[TopicPartition, str]] = set()
        """Partitions whose topic was recreated, with the new topic's id; their gap was already
        reported."""
        self._turns: list[TopicPartition] = []
        self._paused: set[TopicPartition] = set()
        self._generation = 0
        self._woken = asyncio.Event()
        self._wake = self._woken.set
        self._joined: Member | None = None

    async def close(self) -> None:
        """Give up the partitions and leave the group."""
        member = self._joined
        if member is None:
            return
        try:
            # A replaced member holds no partitions, so it has nothing to commit.
            if not self._group.is_replaced(member):
                await self._give_up()
        finally:
            self._hold(frozenset())
            self._group.leave(member)

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Return records, or nothing after `timeout_seconds`; take part in a rebalance if due."""
        # Lets other tasks run, which a busy consumer would otherwise prevent.
        await asyncio.sleep(0)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while True:
            self._woken.clear()
            await self._follow_group()
            records = self._take(max_records)
            await self._report_gaps()
            if records:
                return records
            if not await wait_event(self._woken, deadline - asyncio.get_running_loop().time()):
                return records

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of assigned partitions."""
        for partition in offsets:
            self._must_hold(partition)
        self._group.commit(offsets)

    async def committed(self, partition: TopicPartition) -> int | None:
        """Return the partition's committed offset, or `None` if nothing is committed."""
        return self._group.committed_of(partition, self._logs[partition].topic_id)

    async def report_moved(self, partition: TopicPartition, *, read_before: int | None) -> bool:
        """Report a gap if another program moved the committed offset."""
        if partition not in self._group.moved:
            return False
        offset = self._group.committed[partition]
        if gap := moved_gap(partition, offset=offset, read_before=read_before):
            self._gaps.append(gap)
            await self._report_gaps()
        return True

    async def report_recreated(
        self, partition: TopicPartition, *, topic_id: str, read_before: int
    ) -> None:
        """Report a gap: the component has read an earlier topic of the same name."""
        if topic_id != self._logs[partition].topic_id:
            self._add_recreated(partition, read_before)
        await self._report_gaps()

    async def topic_id(self, topic: str) -> str | None:
        """Return the topic's id."""
        log = self._logs.get(TopicPartition(topic, 0))
        if log is None:
            raise BusUnavailableError(f"there is no topic {topic} on this bus")
        return log.topic_id

    def assignment(self) -> frozenset[TopicPartition]:
        """Return the partitions that are currently assigned."""
        return frozenset(self._positions)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `poll` return no records of these partitions until they are resumed."""
        self._paused |= self.assignment() & set(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Make `poll` return records of these partitions again."""
        self._paused -= set(partitions)
        self._wake()

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Continue reading at this offset."""
        self._must_hold(partition)
        log = self._logs[partition]
        self._positions[partition] = offset if offset > 0 else log.first_offset
        self._wake()

    async def position(self, partition: TopicPartition) -> int:
        """Return the offset of the next record to poll."""
        self._must_hold(partition)
        return self._logs[partition].next_offset(self._positions[partition])

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Return for each partition the offset that the next published record will get.

        Raises `TopicsError` if a partition does not exist.
        """
        wanted = list(partitions)
        for partition in wanted:
            if partition not in self._logs:
                raise TopicsError(f"there is no partition {partition} on this bus")
        return {partition: self._logs[partition].end_offset for partition in wanted}

    def at_end(self) -> frozenset[TopicPartition]:
        """Return the partitions that have no record at or after the position."""
        return frozenset(
            partition
            for partition, position in self._positions.items()
            if position >= self._logs[partition].end_offset
        )

    def withheld_seconds(self) -> float:
        """Return 0, because transactions on this bus are never open."""
        return 0.0

    def is_answered(self) -> bool:
        """Return `True`, because this bus always answers."""
        return True

    async def _follow_group(self) -> None:
        topics = self._subscription.topics
        self._group.refuse_added_partitions(self._subscription.group, topics)
        if self._joined is None:
            # The first poll joins, as on Kafka: opening a consumer never waits for other members.
            self._joined = self._group.join(
                name=self._subscription.group_instance_id,
                topics=self._subscription.topics,
                wake=self._wake,
                stage=self._subscription.stage,
            )
        member = self._joined
        if self._group.is_replaced(member):
            raise BusUnavailableError(
                f"another consumer took over the name {member.name!r} "
                f"in the group {self._subscription.group!r}"
            )
        # Done first, because the group waits until this member gives up its partitions.
        if self._group.must_give_up(member):
            await self._give_up()
            self._group.give_up(member)
        elif any(self._logs[at].topic_id != own for at, own in self._topic_ids.items()):
            await self._leave_old_topics()
        if self._generation != member.generation:
            generation, share = member.generation, member.share
            self._hold(share)
            await self._report_gaps()
            # If the callback fails, the next poll calls it again.
            await self._subscription.on_assigned(share)
            self._generation = generation

    async def _leave_old_topics(self) -> None:
        """Report a gap for each partition of a recreated topic, and give up all partitions.

        Afterwards, `_follow_group` starts to read the partitions again.
        """
        for partition, own in self._topic_ids.items():
            if self._logs[partition].topic_id != own:
                self._add_recreated(partition, self._positions[partition])
        await self._report_gaps()
        await self._give_up()
        self._generation = 0

    async def _give_up(self) -> None:
        try:
            if held := self.assignment():
                await self._subscription.on_revoked(held)
        finally:
            self._hold(frozenset())

    def _hold(self, partitions: frozenset[TopicPartition]) -> None:
        for partition in self._positions:
            self._logs[partition].readers.discard(self._wake)
        for partition in partitions:
            self._logs[partition].readers.add(self._wake)
        self._turns = sorted(partitions)
        self._topic_ids = {partition: self._logs[partition].topic_id for partition in self._turns}
        self._group.topic_ids |= {
            partition.topic: own for partition, own in self._topic_ids.items()
        }
        self._group.counts |= self._group.count_partitions(self._subscription.topics)
        self._positions = {}
        for partition in self._turns:
            log, committed = self._logs[partition], self._group.committed.get(partition)
            valid = self._group.committed_of(partition, log.topic_id)
            # If the committed offset belongs to an earlier topic, that topic's remaining records
            # are lost.
            if committed is not None and valid is None:
                self._add_recreated(partition, committed)
            self._positions[partition] = log.first_offset if valid is None else valid
        self._last_ms.clear()
        self._paused.clear()

    def _take(self, max_records: int) -> dict[TopicPartition, Sequence[Record]]:
        taken: dict[TopicPartition, Sequence[Record]] = {}
        left = max_records
        for partition in tuple(self._turns):
            if not left:
                break
            if partition in self._paused:
                continue
            log, position = self._logs[partition], self._positions[partition]
            if position < log.expired_before:
                self._add_gap(partition, position, log.expired_before, GapReason.RETENTION)
                position = log.expired_before
            # If the position is past the end, the log was truncated, for example by an unclean
            # election.
            if position > log.end_offset:
                self._add_gap(partition, position, log.first_offset, GapReason.TRUNCATED)
                position = log.first_offset
            records = log.read(position, max_records=left)
            # If compaction left no records before the end, the position moves to the end.
            self._positions[partition] = records[-1].offset + 1 if records else log.end_offset
            if records:
                self._last_ms[partition] = records[-1].timestamp_ms
                taken[partition] = records
                left -= len(records)
                # A served partition goes last, so that a busy one does not starve the others.
                self._turns.remove(partition)
                self._turns.append(partition)
        return taken

    def _add_recreated(self, partition: TopicPartition, read_before: int) -> None:
        # The gap was already reported if this consumer has read the earlier topic.
        if (at := (partition, self._logs[partition].topic_id)) not in self._left:
            self._left.add(at)
            self._add_gap(partition, read_before, 0, GapReason.TOPIC_RECREATED)

    def _add_gap(
        self, partition: TopicPartition, first: int, next_offset: int, reason: GapReason
    ) -> None:
        kept = self._logs[partition].read(next_offset, max_records=1)
        # If the topic was recreated, the time of the new topic's first record does not bound the
        # gap.
        is_same_topic = reason is not GapReason.TOPIC_RECREATED
        gap = Gap(
            partition=partition,
            first_offset=first,
            next_offset=next_offset,
            reason=reason,
            time_before_ms=self._last_ms.get(partition),
            time_after_ms=kept[0].timestamp_ms if kept and is_same_topic else None,
        )
        self._gaps.append(gap)

    async def _report_gaps(self) -> None:
        gaps, self._gaps = self._gaps, []
        for gap in filter(None, map(self._reported.rest_of, gaps)):
            report_gap(gap, group=self._subscription.group)
            await self._subscription.on_gap(gap)

    def _must_hold(self, partition: TopicPartition) -> None:
        if partition not in self._positions:
            raise NotAssignedError(
                f"{partition.topic}-{partition.partition} is not assigned to this consumer "
                f"of the group {self._subscription.group!r}"
            )
