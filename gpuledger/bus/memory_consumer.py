"""The reading end of the bus in memory: one consumer, its positions and its waiting."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import structlog

from gpuledger.bus.memory_group import Group, Member
from gpuledger.bus.memory_log import PartitionLog
from gpuledger.bus.protocol import Record, Subscription, TopicPartition
from gpuledger.errors import BusUnavailableError, NotAssignedError, TopicsError

_log = structlog.get_logger(__name__)


class MemoryConsumer:
    """Reads the partitions that its group gave it; callbacks run within `poll`, the first joins."""

    def __init__(
        self,
        *,
        subscription: Subscription,
        group: Group,
        logs: Mapping[TopicPartition, PartitionLog],
    ) -> None:
        self._subscription = subscription
        self._group = group
        self._logs = logs
        self._positions: dict[TopicPartition, int] = {}
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
            if not self._group.is_replaced(member):
                await self._give_up()
        finally:
            self._hold(frozenset())
            self._group.leave(member)

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Wait for records; take part in a rebalance where one is due."""
        # A consumer that always finds records would keep every other task from running.
        await asyncio.sleep(0)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while True:
            self._woken.clear()
            await self._follow_group()
            records = self._take(max_records)
            if records or not await self._is_woken_before(deadline):
                return records

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit offsets of partitions that are held."""
        for place in offsets:
            self._must_hold(place)
        self._group.committed.update(offsets)

    async def committed(self, partition: TopicPartition) -> int | None:
        """Give the committed offset, or `None`."""
        return self._group.committed.get(partition)

    def assignment(self) -> frozenset[TopicPartition]:
        """Give the partitions that are held now."""
        return frozenset(self._positions)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no records of these partitions."""
        self._paused |= self.assignment() & set(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out records of these partitions again."""
        self._paused -= set(partitions)
        self._wake()

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        """Read on from this offset."""
        self._must_hold(partition)
        self._positions[partition] = max(offset, self._logs[partition].first_offset)
        self._wake()

    async def position(self, partition: TopicPartition) -> int:
        """Give the offset of the next record to be polled."""
        self._must_hold(partition)
        return self._logs[partition].next_offset(self._positions[partition])

    async def end_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Mapping[TopicPartition, int]:
        """Give the offsets that the next published records will get."""
        wanted = list(partitions)
        for place in wanted:
            if place not in self._logs:
                raise TopicsError(f"there is no partition {place} on this bus")
        return {place: self._logs[place].end_offset for place in wanted}

    async def _is_woken_before(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True

    async def _follow_group(self) -> None:
        member = self._member()
        if self._group.is_replaced(member):
            raise BusUnavailableError(
                f"another consumer took over the name {member.name!r} "
                f"in the group {self._subscription.group!r}"
            )
        if self._group.must_give_up(member):
            await self._give_up()
            self._group.give_up(member)
        if self._generation != member.generation:
            generation, share = member.generation, member.share
            self._hold(share)
            # Where the callback fails, the next poll calls it again.
            await self._subscription.on_assigned(share)
            self._generation = generation

    def _member(self) -> Member:
        """Give the membership; the first poll joins, as on Kafka, so that it waits for nobody."""
        if self._joined is None:
            self._joined = self._group.join(
                name=self._subscription.member,
                topics=self._subscription.topics,
                wake=self._wake,
            )
        return self._joined

    async def _give_up(self) -> None:
        try:
            if held := self.assignment():
                await self._subscription.on_revoked(held)
        finally:
            self._hold(frozenset())

    def _hold(self, places: frozenset[TopicPartition]) -> None:
        for place in self._positions:
            self._logs[place].readers.discard(self._wake)
        for place in places:
            self._logs[place].readers.add(self._wake)
        self._turns = sorted(places)
        self._positions = {place: self._group.committed.get(place, 0) for place in self._turns}
        self._paused.clear()

    def _take(self, max_records: int) -> dict[TopicPartition, Sequence[Record]]:
        taken: dict[TopicPartition, Sequence[Record]] = {}
        left = max_records
        for place in tuple(self._turns):
            if left and place not in self._paused and (records := self._read(place, left)):
                taken[place] = records
                left -= len(records)
                # Whoever was served goes last, so that a busy partition starves no other.
                self._turns.remove(place)
                self._turns.append(place)
        return taken

    def _read(self, place: TopicPartition, max_records: int) -> Sequence[Record]:
        log, position = self._logs[place], self._positions[place]
        if 0 < position < log.expired_before:
            lost = log.expired_before - position
            _log.warning(
                "records_expired_unread", topic=place.topic, records=lost, partition=place.partition
            )
        if position > log.end_offset:
            position = log.first_offset
        records = log.read(position, max_records=max_records)
        self._positions[place] = records[-1].offset + 1 if records else log.end_offset
        return records

    def _must_hold(self, place: TopicPartition) -> None:
        if place not in self._positions:
            raise NotAssignedError(
                f"{place.topic}-{place.partition} is not held by this consumer "
                f"of the group {self._subscription.group!r}"
            )
