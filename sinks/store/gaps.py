"""The table `gaps`: what was gone, or unreadable, before it could be stored, each once.

A gap is written before any row behind it. Its stream's number is the offset up to which gaps are
recorded, in the commit of the row itself: whoever finds the same gap again, after a crash or on
another machine, writes what is left of it. What a row says is computed first (pure), then
`GapRecorder` asks both tables and writes.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from gpuledger.bus.protocol import Gap, TopicPartition
from gpuledger.clock import Clock
from gpuledger.runtime.tasks import in_daemon_thread
from sinks.errors import ReceiverUnavailableError
from sinks.store.stored import Stored
from sinks.store.table import EntriesTable, GapsTable, StaleTableError


def stream_of(stream: str, gap: Gap) -> str:
    """Return the stream of a gap: that of its partition, and of its kind."""
    return f"{stream}|{gap.reason.value}"


def recorded_up_to(gap: Gap) -> int:
    """Return the number that the gap's row leaves in its stream."""
    return gap.next_offset if gap.has_end else gap.first_offset


def row_of(
    gap: Gap,
    *,
    stored: int | None,
    recorded: int | None,
    topic_id: str | None,
    time_before_us: int | None,
    detected_us: int,
) -> tuple[Any, ...] | None:
    """Return the row of a gap, in the columns' order, or `None` where all of it is known.

    `stored` is the last offset that the table has, `recorded` the number of the gap's stream.
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
    """Gaps that were not looked up in the table yet.

    A consumer reports a gap once, so that of a partition that is given up waits here: it may come
    back before anybody recorded it.
    """

    def __init__(
        self, *, gaps: GapsTable, entries: EntriesTable, stored: Stored, clock: Clock
    ) -> None:
        self._table, self._entries = gaps, entries
        self._stored, self._clock = stored, clock
        self._waiting: list[Gap] = []

    def add(self, gap: Gap) -> None:
        """Remember a gap until it has its row."""
        self._waiting.append(gap)

    def of(self, partitions: Collection[TopicPartition]) -> list[Gap]:
        """Return the gaps of these partitions that wait for their rows."""
        return [gap for gap in self._waiting if gap.partition in partitions]

    async def record_once(self, gaps: Sequence[Gap]) -> None:
        """Return each gap its row; where another consumer does the same, look again.

        Raises ReceiverUnavailableError where that is to be tried again.
        """
        by_stream: dict[str, list[Gap]] = {}
        for gap in gaps:
            stream = stream_of(self._stored.streams.of(gap.partition), gap)
            by_stream.setdefault(stream, []).append(gap)
        for stream, alike in by_stream.items():
            try:
                await in_daemon_thread(partial(self._record, stream, alike))
            except StaleTableError as error:
                raise ReceiverUnavailableError(str(error)) from error
            self._waiting = [gap for gap in self._waiting if gap not in alike]

    def _record(self, stream: str, gaps: Sequence[Gap]) -> None:
        """Write the rows of one stream in one commit: a poll may bring many gaps."""
        recorded = self._table.load([stream]).get(stream)
        time_ns = self._clock.time_ns()
        rows = []
        for gap in gaps:
            row = row_of(
                gap,
                stored=self._stored.last_offsets.get(gap.partition),
                recorded=recorded,
                topic_id=self._stored.topic_id if gap.has_end else None,
                time_before_us=self._find_time_before_us(gap),
                detected_us=time_ns // 1000,
            )
            if row is not None:
                rows.append(row)
                recorded = recorded_up_to(gap)
        if rows and recorded is not None:
            self._table.append(rows, {stream: recorded}, time_ms=time_ns // 1_000_000)

    def _find_time_before_us(self, gap: Gap) -> int | None:
        """Return the time of the last record before a gap: by Kafka, else of the newest row."""
        if gap.time_before_ms is not None:
            return gap.time_before_ms * 1000
        newest = self._entries.newest_time(gap.partition.partition)
        return None if newest is None else round(newest.timestamp() * 1e6)
