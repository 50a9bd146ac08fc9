"""Gaps given their rows in the table `gaps`, each before any event behind it.

Here lives what waits for its row, and the asking of both tables; what a row says is decided in
`sinks.store.gaps`.
"""

from collections.abc import Collection, Sequence
from functools import partial

from gpuledger.bus.protocol import Gap, TopicPartition
from gpuledger.clock import Clock
from gpuledger.runtime.tasks import in_daemon_thread
from sinks.errors import ReceiverUnavailableError
from sinks.store.gaps import recorded_up_to, row_of, stream_of
from sinks.store.stored import Stored
from sinks.store.table import EntriesTable, GapsTable, StaleTableError


class GapRecording:
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

    def note(self, gap: Gap) -> None:
        """Remember a gap until it has its row."""
        self._waiting.append(gap)

    def of(self, partitions: Collection[TopicPartition]) -> list[Gap]:
        """Return the gaps of these partitions that wait for their rows."""
        return [gap for gap in self._waiting if gap.partition in partitions]

    async def record_once(self, gaps: Sequence[Gap]) -> None:
        """Return each gap its row; where another consumer does the same, look again.

        Raises ReceiverUnavailableError where that is to be tried again.
        """
        for stream, alike in self._by_stream(gaps).items():
            try:
                await in_daemon_thread(partial(self._record, stream, alike))
            except StaleTableError as error:
                raise ReceiverUnavailableError(str(error)) from error
            self._waiting = [each for each in self._waiting if each not in alike]

    def _by_stream(self, gaps: Sequence[Gap]) -> dict[str, list[Gap]]:
        by_stream: dict[str, list[Gap]] = {}
        for gap in gaps:
            stream = stream_of(self._stored.streams.of(gap.partition), gap)
            by_stream.setdefault(stream, []).append(gap)
        return by_stream

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
                time_before_us=self._time_before_us(gap),
                detected_us=time_ns // 1000,
            )
            if row is not None:
                rows.append(row)
                recorded = recorded_up_to(gap)
        if rows and recorded is not None:
            self._table.append(rows, {stream: recorded}, time_ms=time_ns // 1_000_000)

    def _time_before_us(self, gap: Gap) -> int | None:
        if gap.time_before_ms is not None:
            return gap.time_before_ms * 1000
        newest = self._entries.newest_time(gap.partition.partition)
        return None if newest is None else round(newest.timestamp() * 1e6)
