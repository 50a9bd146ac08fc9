"""Openings of the source, the first one and those after a loss, in a thread of its own.

An opening can take seconds, or hang. When one is wanted is decided in `driver`.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

import structlog

from agent.gpu.source import DriverEvent, Gpu, GpuSource, LibraryLostError, SourceLostError
from agent.gpu.threads import Worker
from agent.metrics import NVML_STARTS
from gpuledger.records import Capability
from gpuledger.runtime import Backoff

_log = structlog.get_logger(__name__)
_CALM_NS: Final = 60_000_000_000


class SourceListener(Protocol):
    """Someone else who uses the source while it is open; called in the lifecycle's thread."""

    def opened(self, gpus: Sequence[Gpu]) -> None:
        """Begin: the source is open and these GPUs answer."""

    def closing(self) -> None:
        """Stop using it, and free what it gave, within about a second."""


class Retry:
    """When something may be tried again; the wait begins anew after a calm minute."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._tried_ns: int | None = None
        self._due_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether it may be tried."""
        return self._tried_ns is None or now_ns >= self._due_ns

    def record_attempt(self, now_ns: int) -> None:
        """Begin the wait before the next attempt."""
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(self._backoff.next_seconds() * 1e9)

    def wait(self, now_ns: int, seconds: float) -> None:
        """Do not try for `seconds`; the waits after that begin anew."""
        self._backoff.reset()
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(seconds * 1e9)

    def record_success(self, now_ns: int) -> None:
        """Forget earlier failures, unless they are so fresh that it may fail again at once."""
        if self._tried_ns is not None and now_ns - self._tried_ns > _CALM_NS:
            self._backoff.reset()
            self._tried_ns = None


class SourceLifecycle:
    """Opens and closes the source, and asks what the driver says of itself."""

    def __init__(self, source: GpuSource, *, listeners: Sequence[SourceListener]) -> None:
        self._source = source
        self._listeners = listeners
        self._events = source.driver_events
        self._worker = Worker("nvml")
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
        """Whether the driver tells of its unbinding, and why not."""
        return self._events.capability

    def open(self) -> "Future[Sequence[Gpu]]":
        """Begin to open; the result is the GPUs that answer, or SourceLostError."""
        return self._worker.start(self._try_to_open)

    def close(self) -> "Future[None]":
        """Begin to let go of the driver."""
        return self._worker.start(self._close)

    def end(self) -> None:
        """Let the thread end."""
        self._worker.end()

    def poll_driver_events(self) -> DriverEvent:
        """Return what the driver said since the last call; begins the next poll, waits for none."""
        event = DriverEvent.NOTHING
        self._is_late = self._polling is not None and not self._polling.done()
        if self._polling and not self._is_late:
            event, self._polling = self._polling.result(), None
        if self._polling is None and self._events.is_open:
            self._polling = self._worker.start(self._poll)
        return event

    def _poll(self) -> DriverEvent:
        try:
            return self._events.poll()
        except Exception:  # noqa: BLE001  # it must not end the agent, nor fail each tick
            # It would come at each tick: no more is listened to until the next opening.
            _log.exception("library_events_failed")
            self._events.close()
            return DriverEvent.NOTHING

    def _try_to_open(self) -> Sequence[Gpu]:
        """Open; whatever else goes wrong is an opening that failed, and tried again like others."""
        try:
            return self._open()
        except SourceLostError:
            raise
        except Exception as error:
            _log.exception("library_start_failed")
            raise LibraryLostError(f"{type(error).__name__}: {error}") from error

    def _open(self) -> Sequence[Gpu]:
        # What the opening before gave must not outlive it.
        self._close()
        NVML_STARTS.inc()
        gpus = self._source.open()
        self.versions = self._source.versions()
        self._events.open()
        for listener in self._listeners:
            _call(partial(listener.opened, gpus))
        return gpus

    def _close(self) -> None:
        # Listeners first: what they hold belongs to the library that is closed here.
        for listener in self._listeners:
            _call(listener.closing)
        self._events.close()
        self._source.close()


def _call(listener: Callable[[], None]) -> None:
    """Call a listener; its mistakes must not keep the source from being opened or closed."""
    try:
        listener()
    except Exception:  # noqa: BLE001  # said in the docstring
        _log.exception("library_user_failed")
