"""The thread that waits for the faults of the GPUs while their source is open.

How it works. Waiting for the driver's events blocks, so a thread does nothing else. It alternates
between two steps until it ends:

- create: make an event set in which the GPUs are registered;
- wait: wait on that set, half a second at a time, and hand over each fault that comes.

An error in either step frees the set, if there is one, and leads back to `create` after a pause
that grows while nothing succeeds. So one lost GPU, with which its whole set fails, costs the others
one pause: the next set holds those that are left. A row of errors is one failure (`_Failures`),
with one log line when it begins and one when a wait succeeds again.

The thread ends in one of three ways:

- `end` was called: it sees that after the wait that it is in, frees the set and returns;
- the driver has no event sets: it returns by itself, as it would be refused again;
- it hangs in the driver for longer than `end` waits: it is leaked. The library may be closed by the
  time the driver returns, and the set belonged to it, so a leaked thread frees nothing.
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
# Short, so that the thread ends and frees its set within a second.
_WAIT_SECONDS: Final = 0.5
_WAIT_MS: Final = round(_WAIT_SECONDS * 1000)


class EventThread:
    """Waits for the faults of these GPUs from its construction until `end`."""

    def __init__(
        self,
        source: GpuSource,
        gpus: Sequence[GpuIdentity],
        *,
        clock: Clock,
        on_detection: Callable[[Detection], None],
        backoff: Backoff,
    ) -> None:
        """Start the thread, in which `on_detection` is called with each fault."""
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
        """Whether it has not ended yet, by itself or by `end`."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> bool:
        """Wait until it ends by itself, for `seconds` at most; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def end(self, seconds: float) -> bool:
        """End it; return whether it has ended within `seconds`. If not it is leaked."""
        self._ending.set()
        self._is_leaked = not self.join(seconds)
        return not self._is_leaked

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                events = self._source.gpu_events(self._gpus, clock=self._clock)
            except UnsupportedError as error:
                # The kernel's log is left as the only source of faults.
                EVENT_SET_FAILURES.labels(reason="create").inc()
                _log.warning("event_set_refused", error=str(error))
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, the next set may work
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
        """Hand over faults as fast as they come, until `end` is called or a wait fails."""
        while not self._ending.is_set():
            begin_seconds = time.monotonic()
            detection = events.wait(_WAIT_MS)
            self._failures.recover()
            if detection:
                self._on_detection(detection)
            else:
                # A driver may return before the time is up; calling it at once again would spin.
                self._ending.wait(begin_seconds + _WAIT_SECONDS - time.monotonic())

    def _pause_after(self, step: str, error: Exception) -> None:
        self._ending.wait(self._failures.record(step, error))


class _Failures:
    """The errors since a wait last succeeded, which are one failure in the log."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._began_seconds: float | None = None
        """When the first of them came, by the monotonic clock; `None` while there is none."""

    def record(self, step: str, error: Exception) -> float:
        """Record an error in a step; return for how many seconds to pause."""
        EVENT_SET_FAILURES.labels(reason=step).inc()
        if self._began_seconds is None:
            self._began_seconds = time.monotonic()
            _log.warning("event_set_failed", reason=step, error=repr(error))
        return self._backoff.next_seconds()

    def recover(self) -> None:
        """Record that a wait succeeded."""
        self._backoff.reset()
        if self._began_seconds is not None:
            failed_seconds = round(time.monotonic() - self._began_seconds, 3)
            self._began_seconds = None
            _log.warning("event_set_recovered", failed_seconds=failed_seconds)
