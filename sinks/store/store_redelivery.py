"""Append the rows of refused events to the store, beside the sink that goes on there.

Under a stream of its own: the offsets of the sink's partitions stay where they are. A row has the
place of the record that its event was read from, so that who reads the table finds a row that comes
twice by what identifies it.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from typing_extensions import override

from gpuledger.bus.protocol import Bus
from gpuledger.clock import NS_PER_MS, Clock
from gpuledger.runtime import Readiness
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.settings.secret import shown_url
from sinks.errors import ReceiverUnavailableError
from sinks.redelivery import Redelivery, Refusals, RefusedEvent
from sinks.settings import StoreSettings
from sinks.store.buffer import DayWindow, Row, rows_of
from sinks.store.table import EntriesTable, StaleTableError

_STREAM: Final = "gpuledger-dead-letters"
_MAX_BATCH: Final = 100
"""Events of one commit: each costs a file a day, and one event may be a hundred megabytes."""


@asynccontextmanager
async def open_redelivery(
    *,
    bus: Bus,
    settings: StoreSettings,
    readiness: Readiness,  # noqa: ARG001  # as OpenRedelivery has it
    clock: Clock,
) -> AsyncIterator["StoreRedelivery"]:
    """Open the redelivery to the table of these settings; it is loaded with the first batch."""
    table = EntriesTable(store_uri=settings.uri, storage_options=settings.storage_options)
    yield StoreRedelivery(
        table=table, stream=bus.topics.group(_STREAM), settings=settings, clock=clock
    )


class StoreRedelivery(Redelivery):
    """Appends a batch in one commit."""

    max_batch = _MAX_BATCH

    def __init__(
        self, *, table: EntriesTable, stream: str, settings: StoreSettings, clock: Clock
    ) -> None:
        self.receiver = f"store {shown_url(table.uri)}"
        self._table, self._stream, self._clock = table, stream, clock
        self._window = DayWindow(
            max_age_seconds=settings.max_age_seconds,
            max_future_seconds=settings.max_future_seconds,
        )

    @override
    async def deliver(self, batch: Sequence[RefusedEvent]) -> Refusals:
        """Append the rows of all events whose days are stored, or of none."""
        rows: list[Row] = []
        refusals = [self._add(rows, each) for each in batch]
        if rows:
            await in_daemon_thread(partial(self._append, rows))
        return refusals

    def _add(self, rows: list[Row], refused: RefusedEvent) -> str | None:
        now_ns = self._clock.time_ns()
        try:
            of_event = list(rows_of(refused.event, refused.record, ingested_time_ns=now_ns))
        except ValueError as error:
            return f"invalid: {error}"
        days = {row[0] for row in of_event}
        if refusal := self._window.refusal_of(days, now_ns=now_ns):
            return f"{refusal.reason}: {refusal.detail}"
        rows += of_event
        return None

    def _append(self, rows: Sequence[Row]) -> None:
        last = self._table.load([self._stream]).get(self._stream, 0)
        now_ns = self._clock.time_ns()
        # Any number that grows: which letters are done is on the topic of letters, not here.
        number = {self._stream: max(now_ns, last + 1)}
        try:
            self._table.append(rows, number, time_ms=now_ns // NS_PER_MS)
        except StaleTableError as error:
            raise ReceiverUnavailableError(f"another replay appends there: {error}") from error
