"""The source of GPU readings, from its opening to its closing.

An opening can take seconds, or hang, so it is done in a thread of its own: the first one and those
after a loss. When to open is decided in `driver`. Whoever else uses the open source is a
`SourceListener`, which begins after each opening and stops before each closing.
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
    """A further user of the source while it is open; called in the lifecycle's thread."""

    def opened(self, gpus: Sequence[Gpu]) -> None:
        """Begin: the source is open and these GPUs answer."""

    def closing(self) -> None:
        """Stop using it, and free what it gave, within about a second."""


class SourceLifecycle:
    """Opens and closes the source, and polls the driver's own events."""

    def __init__(self, source: GpuSource, *, listeners: Sequence[SourceListener]) -> None:
        self._source = source
        self._listeners = listeners
        self._events = source.driver_events
        self.worker = CallThread("source")
        """The thread in which all of it is done."""
        self._polling: Future[DriverEvent] | None = None
        self._is_late = False
        self.versions: Mapping[str, str | None] = {}
        """The node's versions by the fields of `Inventory`, as they were at the last opening."""

    @property
    def is_stuck(self) -> bool:
        """Whether its thread is not back from a poll of an earlier tick, so cannot open anything.

        The poll of this tick has only just begun: where no GPU is queried, it outlasts the tick.
        """
        return self._is_late and self._polling is not None and not self._polling.done()

    @property
    def unbind_capability(self) -> Capability:
        """Whether the driver reports its unbinding, and why not."""
        return self._events.capability

    def open(self) -> "Future[Sequence[Gpu]]":
        """Begin to open; the result is the GPUs that answer, or SourceLostError."""
        return self.worker.start(self._open)

    def close(self) -> "Future[None]":
        """Begin to close the source."""
        return self.worker.start(self._close)

    def end(self) -> None:
        """Let the thread end."""
        self.worker.end()

    def poll_driver_events(self) -> DriverEvent:
        """Return the driver's event since the last call; begins the next poll, waits for none."""
        event = DriverEvent.NOTHING
        self._is_late = self._polling is not None and not self._polling.done()
        if self._polling and not self._is_late:
            event, self._polling = self._polling.result(), None
        # At most one at a time: a poll that hangs must not fill the thread's queue.
        if self._polling is None and self._events.is_open:
            self._polling = self.worker.start(self._poll)
        return event

    def _poll(self) -> DriverEvent:
        try:
            return self._events.poll()
        except Exception:  # noqa: BLE001  # it must not end the agent, nor fail each tick
            # It would come at each tick: no more is listened to until the next opening.
            _log.exception("library_events_failed")
            self._events.close()
            return DriverEvent.NOTHING

    def _open(self) -> Sequence[Gpu]:
        try:
            # What the opening before gave must not outlive it.
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
            # Whatever else goes wrong is an opening that failed, and tried again like others.
            _log.exception("library_start_failed")
            raise LibraryLostError(f"{type(error).__name__}: {error}") from error
        return gpus

    def _close(self) -> None:
        # Listeners first: what they hold belongs to the library that is closed here.
        for listener in self._listeners:
            _call(listener.closing)
        self._events.close()
        self._source.close()


def _call(call: Callable[[], None]) -> None:
    """Call a listener; its mistakes must not keep the source from being opened or closed."""
    try:
        call()
    except Exception:  # noqa: BLE001  # said in the docstring
        _log.exception("library_user_failed")
