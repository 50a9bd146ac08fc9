"""When what killed writers have left in the store is removed, beside the sink's own work."""

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.settings.secret import shown_url
from sinks.errors import ReceiverUnavailableError
from sinks.metrics import ORPHANS_REMOVED_TOTAL
from sinks.settings import StoreSettings
from sinks.store.table import StreamTable

_log = structlog.get_logger(__name__)


class Maintenance:
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
