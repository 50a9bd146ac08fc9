"""Opens and closes the GPU source.

Opening and closing can take seconds or hang, so a separate thread does it. `driver` decides when to
open the source. Other users of the open source are `SourceListener`s: they start each time after
the source was opened, and stop before it is closed.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import structlog

from gpuledger.records import Capability
from gpuledger_agent.gpu.protocol import (
    DriverEvent,
    Gpu,
    GpuSource,
    LibraryLostError,
    SourceLostError,
)
from gpuledger_agent.gpu.threads import CallThread
from gpuledger_agent.metrics import SOURCE_OPENINGS

_log = structlog.get_logger(__name__)


class SourceListener(Protocol):
    """Another user of the open source; both methods are called in the lifecycle's thread."""

    def opened(self, gpus: Sequence[Gpu]) -> None:
        """Start to use the source, which has been opened; `gpus` are the GPUs that answer."""

    def closing(self) -> None:
        """Stop using the source and free its objects, within about a second."""


class SourceLifecycle:
    """Opens and closes the source in a thread, and polls the driver's events about itself."""

    def __init__(self, source: GpuSource, *, listeners: Sequence[SourceListener]) -> None:
        self._source = source
        self._listeners = listeners
        self._events = source.driver_events
        self.worker = CallThread("source")
        """The thread that opens and closes the source, and polls the driver's events."""
        self._polling: Future[DriverEvent] | None = None
        self._is_late = False
        self.versions: Mapping[str, str | None] = {}
        """The node's versions when the source was last opened, keyed by field of `Inventory`."""

    @property
    def is_stuck(self) -> bool:
        """Whether the thread hangs in a poll of driver events that an earlier tick started.

        The thread cannot open the source until that poll returns. A poll that the current tick has
        started does not count, because it may simply need more time than a tick without GPUs.
        """
        return self._is_late and self._polling is not None and not self._polling.done()

    @property
    def unbind_capability(self) -> Capability:
        """Whether the driver announces that it will be unbound from a GPU and, if not, why not."""
        return self._events.capability

    def open(self) -> "Future[Sequence[Gpu]]":
        """Start to open the source; the future returns the GPUs that answer.

        The future raises `SourceLostError` if the source cannot be opened.
        """
        return self.worker.start(self._open)

    def close(self) -> "Future[None]":
        """Start to close the source."""
        return self.worker.start(self._close)

    def end(self) -> None:
        """End the thread."""
        self.worker.end()

    def poll_driver_events(self) -> DriverEvent:
        """Return the event that the last poll found, and start the next poll, without waiting.

        If the last poll is still running, return `NOTHING`.
        """
        event = DriverEvent.NOTHING
        self._is_late = self._polling is not None and not self._polling.done()
        if self._polling and not self._is_late:
            event, self._polling = self._polling.result(), None
        # One poll at a time, so that a poll that hangs does not fill the thread's queue.
        if self._polling is None and self._events.is_open:
            self._polling = self.worker.start(self._poll)
        return event

    def _poll(self) -> DriverEvent:
        try:
            return self._events.poll()
        except Exception:  # noqa: BLE001  # it must not end the agent or fail each tick
            # The error would recur in each tick, so stop listening until the source is reopened.
            _log.exception("library_events_failed")
            self._events.close()
            return DriverEvent.NOTHING

    def _open(self) -> Sequence[Gpu]:
        try:
            # Close first: no object of the previously opened source may stay in use.
            self._close()
            SOURCE_OPENINGS.inc()
            gpus = self._source.open()
            self.versions = self._source.versions()
            self._events.open()
            for listener in self._listeners:
                _call(partial(listener.opened, gpus))
        except SourceLostError:
            raise
        except Exception as error:
            # Any other error also means that the source is not open; `driver` tries again.
            _log.exception("library_start_failed")
            raise LibraryLostError(f"{type(error).__name__}: {error}") from error
        return gpus

    def _close(self) -> None:
        # Listeners first: they hold objects of the library, which is closed below.
        for listener in self._listeners:
            _call(listener.closing)
        self._events.close()
        self._source.close()


def _call(call: Callable[[], None]) -> None:
    """Call a listener; its errors must not prevent the source from being opened or closed."""
    try:
        call()
    except Exception:  # noqa: BLE001  # see the docstring
        _log.exception("library_user_failed")
