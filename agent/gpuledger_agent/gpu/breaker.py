"""Breakers: whether what fails again and again is asked, probed or left alone.

What happened and what time it is are arguments. What is asked in a tick is decided in `worker`.
"""

import time
from enum import Enum
from typing import Final

import structlog

from gpuledger.runtime import Backoff, RetryTimer
from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.metrics import BREAKER_OPEN, CALL_GROUPS_FAILED

_log = structlog.get_logger(__name__)

MAX_FAILURES: Final = 3
"""Failures one after the other after which a breaker opens."""


def slow_backoff() -> Backoff:
    """Return the waits between attempts that cost the other GPUs something."""
    return Backoff(first_seconds=5, max_seconds=300)


class Permit(Enum):
    """What may be done now."""

    QUERY = "query"
    """Query, and wait for the answer."""
    PROBE = "probe"
    """Query once, and let nothing wait for the answer."""
    SKIP = "skip"
    """Do not query."""


class BreakerLog:
    """The breakers that were logged as open.

    It outlives the workers that have them, so that an opening and its closing are each logged
    once, however often the source is opened again.
    """

    def __init__(self) -> None:
        self._since_seconds: dict[tuple[str, CallGroup], float] = {}

    def opened(self, gpu_uuid: str, group: CallGroup, *, reason: str | None) -> None:
        """Record that a breaker is open."""
        if (gpu_uuid, group) not in self._since_seconds:
            self._since_seconds[gpu_uuid, group] = time.monotonic()
            _log.warning("breaker_opened", gpu=gpu_uuid, call_group=group.value, reason=reason)

    def closed(self, gpu_uuid: str, group: CallGroup) -> None:
        """Record that a group was answered in its time."""
        since_seconds = self._since_seconds.pop((gpu_uuid, group), None)
        if since_seconds is not None:
            open_seconds = round(time.monotonic() - since_seconds, 3)
            _log.warning(
                "breaker_closed",
                gpu=gpu_uuid,
                call_group=group.value,
                open_seconds=open_seconds,
            )


class GroupBreaker:
    """The breaker of one group of one GPU; its state is a metric, and each change a log line.

    It opens if something fails again and again; then it lets single probes through, ever rarer.
    """

    def __init__(
        self, gpu_uuid: str, group: CallGroup, *, log: BreakerLog, backoff: Backoff
    ) -> None:
        self._gpu_uuid = gpu_uuid
        self._group = group
        self._log = log
        self._failures = 0
        self._has_succeeded = False
        self._probes = RetryTimer(backoff)
        self._metric = BREAKER_OPEN.labels(gpu_uuid=gpu_uuid, group=group.value)
        self._metric.set(0)
        self.is_open = False
        """Whether there are probes only."""

    def permit(self, now_ns: int) -> Permit:
        """Return what may be done now; a probe has to be followed by `succeeded` or `failed`."""
        if not self.is_open:
            return Permit.QUERY
        return Permit.PROBE if self._probes.is_due(now_ns) else Permit.SKIP

    def succeeded(self) -> None:
        """Close: it answered in its time."""
        if self._has_succeeded and not (self._failures or self.is_open):
            return
        self._has_succeeded, self._failures, self.is_open = True, 0, False
        self._probes.reset()
        self._metric.set(0)
        # Here alone: the breakers of a new worker are closed before anything has answered.
        self._log.closed(self._gpu_uuid, self._group)

    def failed(self, now_ns: int, *, reason: str) -> None:
        """Count a failure."""
        labels = {"gpu_uuid": self._gpu_uuid, "group": self._group.value, "reason": reason}
        CALL_GROUPS_FAILED.labels(**labels).inc()
        self._failures += 1
        # If it is open, it was a probe that failed: the next one comes later.
        if self.is_open or self._failures >= MAX_FAILURES:
            self.trip(now_ns, reason=reason)

    def trip(self, now_ns: int, *, reason: str | None = None) -> None:
        """Open at once: another failure would cost too much."""
        self.is_open = True
        self._probes.record_attempt(now_ns)
        self._metric.set(1)
        self._log.opened(self._gpu_uuid, self._group, reason=reason)
