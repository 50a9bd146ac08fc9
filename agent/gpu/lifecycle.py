"""The source from its opening to its closing, and the thread that listens to it meanwhile.

An opening can take seconds, or hang, so it is done in a thread of its own: the first one and those
after a loss. When one is wanted is decided in `driver`. Who else uses the open source is a
`SourceListener`, which begins after each opening and stops before each closing; the faults of GPUs
are waited for in an `EventThread`, which such a listener starts and ends.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

import structlog

from agent.core.incidents import Detection
from agent.gpu.protocol import (
    DriverEvent,
    Gpu,
    GpuEventSet,
    GpuIdentity,
    GpuSource,
    LibraryLostError,
    SourceLostError,
    UnsupportedError,
)
from agent.gpu.threads import CallThread
from agent.metrics import EVENT_SET_FAILURES, SOURCE_OPENINGS
from gpuledger.clock import Clock
from gpuledger.records import Capability
from gpuledger.runtime import Backoff

_log = structlog.get_logger(__name__)
_WAIT_SECONDS: Final = 0.5
_WAIT_MS: Final = round(_WAIT_SECONDS * 1000)


class SourceListener(Protocol):
    """Someone else who uses the source while it is open; called in the lifecycle's thread."""

    def opened(self, gpus: Sequence[Gpu]) -> None:
        """Begin: the source is open and these GPUs answer."""

    def closing(self) -> None:
        """Stop using it, and free what it gave, within about a second."""


class SourceLifecycle:
    """Opens and closes the source, and polls what the driver says of itself."""

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
        """Begin to let go of the driver."""
        return self.worker.start(self._close)

    def end(self) -> None:
        """Let the thread end."""
        self.worker.end()

    def poll_driver_events(self) -> DriverEvent:
        """Return what the driver said since the last call; begins the next poll, waits for none."""
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


class EventThread:
    """Waits for the faults of the GPUs of one open source, in a thread, until it is ended.

    Each wait is short, so that the thread ends and lets go of the driver within a second. A thread
    that hangs in the driver is left to itself, and frees nothing any more: what it holds belongs to
    a library that is closed.
    """

    def __init__(
        self,
        source: GpuSource,
        gpus: Sequence[GpuIdentity],
        *,
        clock: Clock,
        on_detection: Callable[[Detection], None],
        backoff: Backoff,
    ) -> None:
        self._source = source
        self._gpus = gpus
        self._clock = clock
        self._on_detection = on_detection
        self._backoff = backoff
        self._ending = threading.Event()
        self._is_leaked = False
        self._failed_at_seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name="gpu-events", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet, be it by itself or by `end`."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> bool:
        """Wait for its own end, for `seconds` at most; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self, seconds: float) -> bool:
        """Have it let go of the driver; return whether it has. Waits for `seconds` at most."""
        self._ending.set()
        self._is_leaked = not self.join(seconds)
        return not self._is_leaked

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                events = self._source.gpu_events(self._gpus, clock=self._clock)
            except UnsupportedError as error:
                # It would be refused again: the kernel's log is left as the only source.
                EVENT_SET_FAILURES.labels(reason="create").inc()
                _log.warning("event_set_refused", error=str(error))
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, others may come again
                self._fail("create", error)
                continue
            try:
                self._drain(events)
            except Exception as error:  # noqa: BLE001  # as above
                # With one GPU lost the whole set fails; a new one holds those that are left.
                self._fail("wait", error)
            finally:
                if not self._is_leaked:
                    with suppress(Exception):
                        events.close()

    def _drain(self, events: GpuEventSet) -> None:
        """Handle events as fast as they come, until the end or an error."""
        while not self._ending.is_set():
            began = time.monotonic()
            detection = events.wait(_WAIT_MS)
            self._backoff.reset()
            if self._failed_at_seconds is not None:
                failed_seconds = round(time.monotonic() - self._failed_at_seconds, 3)
                self._failed_at_seconds = None
                _log.warning("event_set_recovered", failed_seconds=failed_seconds)
            if detection:
                self._on_detection(detection)
            else:
                # A source's wait may end early, and must not be begun again and again then.
                self._ending.wait(began + _WAIT_SECONDS - time.monotonic())

    def _fail(self, reason: str, error: Exception) -> None:
        EVENT_SET_FAILURES.labels(reason=reason).inc()
        # One line when it begins and one when it is over, however often it is tried meanwhile.
        if self._failed_at_seconds is None:
            self._failed_at_seconds = time.monotonic()
            _log.warning("event_set_failed", reason=reason, error=repr(error))
        self._ending.wait(self._backoff.next_seconds())
