"""What a sink does for its store beside writing rows: from time to time, in the background.

`OrphanRemoval` removes what killed writers have left, of all tables of the store.
`MaintainerTask` does what one sink does for all (`gpuledger_sinks.store.maintainer`). Neither holds up a row,
and what fails is tried again when it is due the next time.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.runtime.tasks import end_tasks, in_daemon_thread
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.metrics import ORPHANS_REMOVED_TOTAL
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.maintainer import ALL_TABLES, Maintainer
from gpuledger_sinks.store.table import StreamTable

_END_SECONDS: Final = 5.0
"""How long the end of a sink waits for a step that is under way: most are over by then."""
_log = structlog.get_logger(__name__)


class OrphanRemoval:
    """Looks for orphan files at the start and from time to time, beside the sink's own work."""

    def __init__(
        self, *, tables: Sequence[StreamTable], settings: StoreSettings, clock: Clock
    ) -> None:
        self._tables, self._settings, self._clock = tables, settings, clock
        self._next_ns: int | None = None
        self._running: asyncio.Task[None] | None = None

    def begin_if_due(self) -> None:
        """Begin in the background where it is time and the last one is over."""
        interval_ns = round(self._settings.maintenance_interval_seconds * NS_PER_SECOND)
        now_ns = self._clock.monotonic_ns()
        is_due = self._next_ns is None or now_ns >= self._next_ns
        if interval_ns == 0 or not is_due or (self._running and not self._running.done()):
            return
        self._next_ns = now_ns + interval_ns
        self._running = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Leave what is under way; a call that has begun goes on unseen, and harms nothing."""
        await end_tasks(self._running)

    async def _run(self) -> None:
        """Remove the orphans of every table; what cannot be done now is done next time."""
        hours = self._settings.orphan_age_hours
        for table in self._tables:
            try:
                removed = await in_daemon_thread(
                    partial(table.remove_orphans, older_than_hours=hours)
                )
            except Exception as error:  # noqa: BLE001  # the sink does its own work without it
                # What the storage said is a sentence; of a defect its class says more.
                is_explained = isinstance(error, ReceiverUnavailableError)
                shown = str(error) if is_explained else repr(error)
                _log.warning("maintenance_failed", url=shown_url(table.uri), error=shown)
                continue
            ORPHANS_REMOVED_TOTAL.inc(removed)
            if removed:
                _log.info("orphans_removed", url=shown_url(table.uri), count=removed)


class MaintainerTask:
    """Runs the maintainer from time to time, first when the first interval is over."""

    def __init__(self, maintainer: Maintainer, *, settings: StoreSettings, clock: Clock) -> None:
        self._maintainer, self._settings, self._clock = maintainer, settings, clock
        self._interval_ns = round(settings.rollup_interval_seconds * NS_PER_SECOND)
        # Sinks that start together shall not all ask for the lease before there is a row.
        self._next_ns = clock.monotonic_ns() + self._interval_ns
        self._running: asyncio.Task[None] | None = None

    def begin_if_due(self) -> None:
        """Begin in the background where it is time and the last run is over."""
        now_ns = self._clock.monotonic_ns()
        is_running = self._running is not None and not self._running.done()
        if self._interval_ns == 0 or now_ns < self._next_ns or is_running:
            return
        # From now, and not from when it ends: a run that takes long is followed at once.
        self._next_ns = now_ns + self._interval_ns
        self._running = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Have a run that is under way end and let its lease go, where that takes no long time.

        Where it does, the lease ends by itself.
        """
        self._maintainer.stop()
        await end_tasks(self._running, grace_seconds=_END_SECONDS)

    async def _run(self) -> None:
        url = shown_url(self._settings.uri)
        try:
            done = await in_daemon_thread(self._maintainer.run)
        except Exception as error:  # noqa: BLE001  # the sink does its own work without it
            is_explained = isinstance(error, ReceiverUnavailableError)
            shown = str(error) if is_explained else repr(error)
            _log.warning("maintenance_failed", url=url, error=shown)
            return
        if not done.is_held_by_another:
            _log.info(
                "store_maintained",
                url=url,
                hours=done.hours,
                days=done.days,
                purged_files=done.purged_files,
                compacted_files=done.compacted_files,
            )


@asynccontextmanager
async def open_upkeep(
    settings: StoreSettings, *, clock: Clock
) -> AsyncIterator[tuple[OrphanRemoval, MaintainerTask]]:
    """Open both for a store; what they have under way ends with the context."""
    tables = [
        StreamTable(schema, store_uri=settings.uri, storage_options=settings.storage_options)
        # Also those that this sink writes no more: of them too the maintainer replaces files.
        for schema in ALL_TABLES
    ]
    orphan_removal = OrphanRemoval(tables=tables, settings=settings, clock=clock)
    maintainer_task = MaintainerTask(
        Maintainer(settings, clock=clock), settings=settings, clock=clock
    )
    try:
        yield orphan_removal, maintainer_task
    finally:
        await maintainer_task.end()
        await orphan_removal.end()
