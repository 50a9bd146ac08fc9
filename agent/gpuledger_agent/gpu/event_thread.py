"""A thread that waits for GPU faults while the source is open.

Waiting for the driver's events blocks, so the thread does nothing else. Until it ends, it
alternates between two steps:

- create: create an event set and register the GPUs in it;
- wait: wait on the set, half a second at a time, and pass on each fault.

After an error in either step, the thread frees the set, pauses, and creates a new one. The pause
grows until a wait succeeds. If a GPU is lost, waiting for its whole set fails. The events of the
other GPUs are interrupted for only one pause, because the next set contains only the GPUs that are
left. Consecutive errors count as one failure (`_Failures`): one log line reports the first error,
and one the next successful wait.

The thread ends in one of three ways:

- `end` was called: after the current wait, the thread frees the set and returns;
- the driver does not support event sets: the thread returns, because a retry would fail too;
- the thread hangs in the driver for longer than `end` waits: the thread is left running (leaked).
  It then does not free the set, because the library may be closed by the time the driver returns.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from gpuledger.clock import Clock
from gpuledger.runtime import Backoff
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.gpu.protocol import GpuEventSet, GpuIdentity, GpuSource, UnsupportedError
from gpuledger_agent.metrics import EVENT_SET_FAILURES

_log = structlog.get_logger(__name__)
# How long one wait lasts: short enough for the thread to free its set and end within a second.
_WAIT_SECONDS: Final = 0.5
_WAIT_MS: Final = round(_WAIT_SECONDS * 1000)


class EventThread:
    """Waits for faults of the given GPUs from construction until `end`."""

    def __init__(
        self,
        source: GpuSource,
        gpus: Sequence[GpuIdentity],
        *,
        clock: Clock,
        on_detection: Callable[[Detection], None],
        backoff: Backoff,
    ) -> None:
        """Start a new thread, which calls `on_detection` with each fault."""
        self._source = source
        self._gpus = gpus
        self._clock = clock
        self._on_detection = on_detection
        self._failures = _Failures(backoff)
        self._ending = threading.Event()
        self._is_leaked = False
        self._thread = threading.Thread(target=self._run, name="gpu-events", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread is still running."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> bool:
        """Wait at most `seconds` for the thread to end; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self, seconds: float) -> bool:
        """Request that the thread ends; return whether it has ended within `seconds`.

        A thread that has not ended hangs in the driver. It is left running and does not free its
        event set.
        """
        self._ending.set()
        self._is_leaked = not self.join(seconds)
        return not self._is_leaked

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                events = self._source.gpu_events(self._gpus, clock=self._clock)
            except UnsupportedError as error:
                # Faults are then detected only in the kernel log.
                EVENT_SET_FAILURES.labels(reason="create").inc()
                _log.warning("event_set_refused", error=str(error))
                return
            except Exception as error:  # noqa: BLE001  # after any error, the next set may work
                self._pause_after("create", error)
                continue
            try:
                self._wait_on(events)
            except Exception as error:  # noqa: BLE001  # as above
                self._pause_after("wait", error)
            finally:
                if not self._is_leaked:
                    with suppress(Exception):
                        events.close()

    def _wait_on(self, events: GpuEventSet) -> None:
        """Pass on faults as they arrive, until `end` is called or a wait fails."""
        while not self._ending.is_set():
            begin_seconds = time.monotonic()
            detection = events.wait(_WAIT_MS)
            self._failures.recover()
            if detection:
                self._on_detection(detection)
            else:
                # A driver may return before the timeout. Without this wait, the loop would spin.
                self._ending.wait(begin_seconds + _WAIT_SECONDS - time.monotonic())

    def _pause_after(self, step: str, error: Exception) -> None:
        self._ending.wait(self._failures.record(step, error))


class _Failures:
    """Logs the errors since the last successful wait for GPU events as one failure."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._began_seconds: float | None = None
        """Monotonic time of the first error; `None` if there is none."""

    def record(self, step: str, error: Exception) -> float:
        """Record an error in the step `create` or `wait`; return how many seconds to pause."""
        EVENT_SET_FAILURES.labels(reason=step).inc()
        if self._began_seconds is None:
            self._began_seconds = time.monotonic()
            _log.warning("event_set_failed", reason=step, error=repr(error))
        return self._backoff.next_seconds()

    def recover(self) -> None:
        """Record that a wait for GPU events succeeded, which ends the failure."""
        self._backoff.reset()
        if self._began_seconds is not None:
            failed_seconds = round(time.monotonic() - self._began_seconds, 3)
            self._began_seconds = None
            _log.warning("event_set_recovered", failed_seconds=failed_seconds)
