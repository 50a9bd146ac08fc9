"""The thread that waits for the driver's events while the library is open.

Each wait is short, so that the thread ends and lets go of the driver within a second. A thread
that hangs in the driver is left to itself, and frees nothing any more: what it holds belongs to a
library that is closed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from agent.core.incidents import Detection
from agent.gpu.source import GpuEventSet, GpuIdentity, GpuSource, UnsupportedError
from agent.metrics import EVENT_SET_FAILURES
from gpuledger.clock import Clock
from gpuledger.runtime import Backoff

_WAIT_SECONDS: Final = 0.5
_WAIT_MS: Final = round(_WAIT_SECONDS * 1000)
_log = structlog.get_logger(__name__)


class EventThread:
    """Watches the GPUs of one open library until it is ended."""

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
        self._is_abandoned = False
        self._failed_at_seconds: float | None = None
        self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet, told to or not."""
        return self._thread.is_alive()

    def end(self, seconds: float) -> bool:
        """Have it let go of the driver; tells whether it has. Waits for `seconds` at most."""
        self._ending.set()
        self._thread.join(seconds)
        self._is_abandoned = self._thread.is_alive()
        return not self._is_abandoned

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                events = self._source.gpu_events(self._gpus, clock=self._clock)
            except UnsupportedError as error:
                EVENT_SET_FAILURES.labels(reason="create").inc()
                _log.warning("event_set_refused", error=str(error))
                return
            except Exception as error:  # noqa: BLE001  # whatever it is, others may come again
                self._fail("create", error)
                continue
            self._drain(events)

    def _drain(self, events: GpuEventSet) -> None:
        """Take events as fast as they come, until the end or an error."""
        try:
            while not self._ending.is_set():
                began = time.monotonic()
                detection = events.wait(_WAIT_MS)
                self._works()
                if detection:
                    self._on_detection(detection)
                else:
                    # A wait may end early, and must not be begun again and again then.
                    self._ending.wait(began + _WAIT_SECONDS - time.monotonic())
        except Exception as error:  # noqa: BLE001  # as above
            # With one GPU lost the whole set fails; a new one holds those that are left.
            self._fail("wait", error)
        finally:
            self._free(events)

    def _free(self, events: GpuEventSet) -> None:
        if not self._is_abandoned:
            with suppress(Exception):
                events.close()

    def _fail(self, reason: str, error: Exception) -> None:
        EVENT_SET_FAILURES.labels(reason=reason).inc()
        if self._failed_at_seconds is None:
            self._failed_at_seconds = time.monotonic()
            _log.warning("event_set_failed", reason=reason, error=repr(error))
        self._ending.wait(self._backoff.next_seconds())

    def _works(self) -> None:
        self._backoff.reset()
        if self._failed_at_seconds is not None:
            failed_seconds = round(time.monotonic() - self._failed_at_seconds, 3)
            self._failed_at_seconds = None
            _log.warning("event_set_recovered", failed_seconds=failed_seconds)
