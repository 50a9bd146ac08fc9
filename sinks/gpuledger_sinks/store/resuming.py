"""Resumes after the last stored records, if the topic is the same, and records gaps.

`Resuming` sets assigned partitions to the position at which the tables end, and fails if the tables
have rows of another topic. `gpuledger_sinks.store.stored` compares offsets and identities.

The table `gaps` lists the records that were deleted or unreadable before they could be stored, each
once. A gap is written before any row that follows it. For each partition and reason, the table also
stores the offset up to which gaps are recorded, in the same commit as the gap's row. A sink that
finds the gap again, after a crash or on another machine, therefore writes only the part that is
missing. `GapRecorder` queries both tables and writes; `gap_row_of` computes a row (pure).
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import structlog

from gpuledger.bus.protocol import Consumer, Gap, GapReason, TopicPartition
from gpuledger.clock import NS_PER_MS, NS_PER_US, Clock
from gpuledger.errors import BusUnavailableError
from gpuledger.runtime import RetryingCaller
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.protocol import Partitions
from gpuledger_sinks.store.seen import NodeTicks, SeenTable
from gpuledger_sinks.store.stored import (
    Stored,
    Target,
    other_topic,
    position_of,
    refuse_shorter_topic,
)
from gpuledger_sinks.store.table import GapsTable, StaleTableError, TimedTable

_log = structlog.get_logger(__name__)


def stream_of(stream: str, gap: Gap) -> str:
    """Return the name under which `gaps` stores the offset up to which gaps are recorded.

    The name consists of the name of the partition's stream and the gap's reason.
    """
    return f"{stream}|{gap.reason.value}"


def recorded_up_to(gap: Gap) -> int:
    """Return the offset up to which gaps are recorded once this gap's row is written."""
    return gap.next_offset if gap.has_end else gap.first_offset


def gap_row_of(
    gap: Gap,
    *,
    stored: int | None,
    recorded: int | None,
    topic_id: str | None,
    time_before_us: int | None,
    detected_us: int,
) -> tuple[Any, ...] | None:
    """Return the row of a gap, in the order of the columns, or `None` if it is already recorded.

    `stored` is the last offset whose rows are stored for the partition. `recorded` is the offset up
    to which gaps of this partition and reason are already recorded. The other arguments are values
    of columns. Times are in microseconds since the epoch.
    """
    first = gap.first_offset if stored is None else max(gap.first_offset, stored + 1)
    if recorded is not None:
        if recorded >= recorded_up_to(gap):
            return None
        first = max(first, recorded) if gap.has_end else first
    next_offset = gap.next_offset if gap.has_end else None
    if next_offset is not None and first >= next_offset:
        return None
    return (
        *gap.partition,
        gap.reason.value,
        first,
        next_offset,
        None if next_offset is None else next_offset - first,
        time_before_us,
        None if gap.time_after_ms is None else gap.time_after_ms * 1000,
        detected_us,
        topic_id,
    )


class GapRecorder:
    """Keeps gaps until their rows are written.

    A consumer reports a gap only once. Gaps of a revoked partition are therefore kept as well: the
    partition may be assigned again before another sink has recorded them.
    """

    def __init__(self, *, gaps: GapsTable, rows: TimedTable, stored: Stored, clock: Clock) -> None:
        """Write to the table `gaps`; look up the time before a gap in the table `rows`."""
        self._table, self._rows = gaps, rows
        self._stored, self._clock = stored, clock
        self._waiting: list[Gap] = []

    def add(self, gap: Gap) -> None:
        """Keep a gap until its row is written."""
        self._waiting.append(gap)

    def of(self, partitions: Collection[TopicPartition]) -> list[Gap]:
        """Return the gaps of these partitions whose rows are not written yet."""
        return [gap for gap in self._waiting if gap.partition in partitions]

    async def record_once(self, gaps: Sequence[Gap]) -> None:
        """Write a row for each gap that is not recorded yet, in one attempt.

        Raises ReceiverUnavailableError if the caller must retry, for example because another
        consumer has written to the same stream.
        """
        by_stream: dict[str, list[Gap]] = {}
        for gap in gaps:
            stream = stream_of(self._stored.streams.of(gap.partition), gap)
            by_stream.setdefault(stream, []).append(gap)
        for stream, alike in by_stream.items():
            try:
                await in_daemon_thread(partial(self._record, stream, alike))
            except StaleTableError as error:
                # The next attempt loads what the other consumer wrote.
                raise ReceiverUnavailableError(str(error)) from error
            self._waiting = [gap for gap in self._waiting if gap not in alike]

    def _record(self, stream: str, gaps: Sequence[Gap]) -> None:
        """Write the rows of one stream in one commit, because there may be many gaps."""
        recorded = self._table.load([stream]).get(stream)
        time_ns = self._clock.time_ns()
        rows = []
        for gap in gaps:
            # The time of the last record before the gap, or else the time of the newest stored row.
            time_before_us = None if gap.time_before_ms is None else gap.time_before_ms * 1000
            if time_before_us is None:
                newest = self._rows.newest_time(gap.partition.partition)
                time_before_us = None if newest is None else round(newest.timestamp() * 1e6)
            row = gap_row_of(
                gap,
                stored=self._stored.last_offsets.get(gap.partition),
                recorded=recorded,
                topic_id=self._stored.topic_id if gap.has_end else None,
                time_before_us=time_before_us,
                detected_us=time_ns // NS_PER_US,
            )
            if row is not None:
                rows.append(row)
                recorded = recorded_up_to(gap)
        if rows and recorded is not None:
            self._table.append(rows, {stream: recorded}, time_ms=time_ns // NS_PER_MS)


class Resuming:
    """Sets each assigned partition to the first offset whose rows are not in the tables."""

    def __init__(
        self,
        *,
        targets: Sequence[Target],
        seen: SeenTable,
        gaps: GapsTable,
        recorder: GapRecorder,
        topic: str,
        retrying: RetryingCaller[ReceiverUnavailableError],
        retry_brokers: RetryingCaller[ReceiverUnavailableError],
    ) -> None:
        self._targets, self._seen, self._gaps_table = targets, seen, gaps
        # Gaps follow the offsets of the first table, which always exists.
        self._stored = targets[0].stored
        self._recorder, self._retrying = recorder, retrying
        self._topic = topic
        self._retry_brokers = retry_brokers
        self._unsought: set[TopicPartition] = set()
        self._others: list[TopicPartition] = []
        """Partitions for which a table has rows of another topic with the same name."""

    @property
    def topic_id(self) -> str | None:
        """The id of the topic when partitions were last set to a position; `None` if unknown."""
        return self._stored.topic_id

    def require(self, partitions: Collection[TopicPartition]) -> None:
        """Require that these partitions are set to their position before they are read."""
        self._unsought.update(partitions)

    def cancel(self, partitions: Collection[TopicPartition]) -> None:
        """No longer require that these partitions are set to their position."""
        self._unsought.difference_update(partitions)

    def is_due(self, consumer: Consumer) -> bool:
        """Return whether an assigned partition must still be set to its position."""
        return bool(consumer.assignment() & self._unsought)

    def is_needed(self, partition: TopicPartition) -> bool:
        """Return whether this partition must still be set to its position."""
        return partition in self._unsought

    def ready(self, consumer: Consumer) -> Partitions:
        """Return the assigned partitions that are set to their position."""
        return consumer.assignment() - self._unsought

    async def seek(self, consumer: Consumer) -> dict[TopicPartition, NodeTicks]:
        """Set partitions to the offset after which the tables have no rows.

        Returns these partitions with the ticks seen before that offset. Raises UserError if a table
        has rows of another topic, or more rows than the partition has records.
        """
        topic_id = await consumer.topic_id(self._topic)
        if topic_id != self._stored.topic_id:
            # All assigned partitions were set to positions in another topic.
            self.require(consumer.assignment())
        for target in self._targets:
            target.stored.topic_id = topic_id
        wanted = consumer.assignment() & self._unsought
        seen = await self._look_up(wanted)
        ends = await consumer.end_offsets(wanted)
        positions = {at: position_of(self._targets, at) for at in wanted}
        for partition in wanted:
            for target in self._targets:
                last_offset = target.stored.last_offsets.get(partition, -1)
                refuse_shorter_topic(partition, last_offset=last_offset, end=ends[partition])
        for partition, position in positions.items():
            # Only the tables' offset is used. The group's offset is committed after the rows, so it
            # may be behind, or ahead if a table was restored from a copy.
            await consumer.seek(partition, position + 1)
        self.cancel(wanted)
        return seen

    async def topic_id_now(self, consumer: Consumer) -> str | None:
        """Return the current id of the topic; wait until the brokers answer.

        Returns `None` without a query if the brokers do not support topic ids.
        """
        if self._stored.topic_id is None:
            return None

        async def query() -> str | None:
            try:
                return await consumer.topic_id(self._topic)
            except BusUnavailableError as error:
                raise ReceiverUnavailableError(str(error)) from error

        # This failure does not concern the store. Polls continue and report the brokers' failure.
        return await self._retry_brokers(query)

    async def record(self, gaps: Sequence[Gap]) -> None:
        """Write a row for each gap that is not recorded yet; retry until the table answers."""

        async def record_once() -> None:
            with self._retrying.awaiting():
                await self._recorder.record_once(gaps)

        await self._retrying(record_once)

    async def refuse_rows(
        self, partitions: Collection[TopicPartition], *, topic_id: str | None
    ) -> None:
        """Raise the error for collected rows that may come from a recreated topic.

        Raises StaleTableError if the table has no rows of these partitions, which can then be read
        again. Otherwise raises UserError.
        """
        stored = sorted(self._stored.last_offsets.keys() & partitions)
        if not stored:
            raise StaleTableError(
                f"the topic {self._topic} was recreated before any row was stored"
            )
        await self._refuse_other_topic(stored, topic_id=topic_id)

    async def _look_up(self, wanted: Partitions) -> dict[TopicPartition, NodeTicks]:
        """Load the tables' offsets of partitions; return the ticks seen up to these offsets.

        Raises UserError if the stored offsets belong to another topic.
        """

        def load() -> list[dict[str, int]]:
            # Creates the table `gaps`, so that readers find an empty table, not a missing one.
            self._gaps_table.load([])
            found = [target.table.load(target.stored.names_of(wanted)) for target in self._targets]
            for target in self._targets:
                target.stored.complete_through = target.table.complete_through()
            return found

        async def query() -> dict[str, tuple[int, NodeTicks]]:
            with self._retrying.awaiting():
                found = await in_daemon_thread(load)
                others = self._learn(wanted, found)
                offsets = {} if others else self._offsets_of(wanted)
                return await in_daemon_thread(partial(self._seen.read, offsets))

        found = await self._retrying(query)
        if others := self._others:
            await self._refuse_other_topic(others, topic_id=self._stored.topic_id)
        for stream, last in self._offsets_of(wanted).items():
            if found.get(stream, (None, {}))[0] != last:
                # The tables were copied at different times. Ticks without a record count as not
                # seen.
                _log.warning("seen_samples_lost", stream=stream, offset=last)
        return {at: found.get(self._stored.streams.of(at), (-1, {}))[1] for at in wanted}

    def _learn(
        self, wanted: Partitions, found: Sequence[Mapping[str, int]]
    ) -> list[TopicPartition]:
        """Take over the offsets and topic identities that were loaded from each table.

        Returns the partitions for which a table has rows of another topic.
        """
        self._others = sorted(
            {
                at
                for target, numbers in zip(self._targets, found, strict=True)
                for at in wanted
                if not target.stored.learn(at, numbers)
            }
        )
        return self._others

    def _offsets_of(self, wanted: Partitions) -> dict[str, int]:
        """Return the last offset that all tables have, by stream; empty partitions are left out."""
        positions = {self._stored.streams.of(at): position_of(self._targets, at) for at in wanted}
        return {stream: last for stream, last in positions.items() if last >= 0}

    async def _refuse_other_topic(
        self, partitions: Sequence[TopicPartition], *, topic_id: str | None
    ) -> None:
        """Record that the remaining records of the old topic are lost, then raise UserError."""
        last_offsets = {at: self._stored.last_offsets.get(at, -1) for at in partitions}
        gaps = [
            Gap(
                partition=partition,
                first_offset=last_offset + 1,
                next_offset=0,
                reason=GapReason.TOPIC_RECREATED,
            )
            for partition, last_offset in last_offsets.items()
        ]
        await self.record(gaps)
        first = partitions[0]
        raise other_topic(first, last_offset=last_offsets[first], topic_id=topic_id)
