"""Measures how far the store's maintenance is behind the rows that its sinks write.

`gpuledger store maintain` runs in another process, and may not run at all. Each run records the
time of the newest rows that its sums include, and the sink compares this time with the newest rows.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from gpuledger.clock import NS_PER_MINUTE, NS_PER_MS, NS_PER_SECOND, Clock
from gpuledger.runtime.tasks import end_tasks, in_daemon_thread
from gpuledger.store.commits import newest_ms, summed_time
from gpuledger.store.usage_schema import USAGE, USAGE_HOURLY
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.metrics import MAINTENANCE_LAG_SECONDS
from gpuledger_sinks.settings import StoreSettings
from gpuledger_sinks.store.damage import storage_errors
from gpuledger_sinks.store.table import StreamTable

_INTERVAL_NS: Final = 5 * NS_PER_MINUTE


class MaintenanceLag:
    """Measures in the background how long the newest rows have waited to be summed up."""

    def __init__(self, settings: StoreSettings, *, clock: Clock) -> None:
        where: dict[str, Any] = {
            "store_uri": settings.uri,
            "storage_options": settings.storage_options,
        }
        self._usage, self._hourly = StreamTable(USAGE, **where), StreamTable(USAGE_HOURLY, **where)
        self._clock, self._begun_ns = clock, clock.time_ns()
        self._next_ns = clock.monotonic_ns() + _INTERVAL_NS
        self._running: asyncio.Task[None] | None = None

    def begin_if_due(self) -> None:
        """Start a measurement in the background if one is due and none is running."""
        now_ns = self._clock.monotonic_ns()
        if now_ns < self._next_ns or (self._running and not self._running.done()):
            return
        self._next_ns = now_ns + _INTERVAL_NS
        self._running = asyncio.create_task(self._run())

    async def end(self) -> None:
        """Cancel a running measurement."""
        await end_tasks(self._running)

    async def _run(self) -> None:
        try:
            lag_ns = await in_daemon_thread(self._measure)
        except ReceiverUnavailableError:
            return  # the check of the receiver reports it; the metric keeps its last value
        MAINTENANCE_LAG_SECONDS.set(lag_ns / NS_PER_SECOND)

    def _measure(self) -> int:
        """Return the time from the newest summed rows to the newest rows, in nanoseconds.

        Raises ReceiverUnavailableError if the storage does not answer.
        """
        if not self._usage.exists():
            return 0
        with storage_errors(self._usage.uri):
            written_ms = newest_ms(self._usage.open())
            summed_ms = None
            if self._hourly.exists():
                summed_ms = self._hourly.open().transaction_version(summed_time(USAGE.name))
        # If nothing was ever summed up, the lag is counted from the start of this sink.
        summed_ns = self._begun_ns if summed_ms is None else summed_ms * NS_PER_MS
        return max(0, written_ms * NS_PER_MS - summed_ns)


@asynccontextmanager
async def measured_lag(settings: StoreSettings, *, clock: Clock) -> AsyncIterator[MaintenanceLag]:
    """Measure the lag of a store while the context is open."""
    lag = MaintenanceLag(settings, clock=clock)
    try:
        yield lag
    finally:
        await lag.end()
