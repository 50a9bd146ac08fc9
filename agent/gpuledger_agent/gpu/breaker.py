"""Circuit breakers, which decide whether a failing call group is queried, probed or skipped.

Breakers do not call the driver: callers pass the outcomes and times of calls. `worker` decides
which groups a tick queries.
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
"""Number of consecutive failures that open a breaker."""


def slow_backoff() -> Backoff:
    """Return a backoff of 5 to 300 seconds, for attempts that disturb the other GPUs."""
    return Backoff(first_seconds=5, max_seconds=300)


def probe_backoff(group: CallGroup) -> Backoff:
    """Return a backoff for probes of a call group.

    A GPU is unresponsive until USAGE is answered, so this group is probed at least every 30 s.
    """
    if group is CallGroup.USAGE:
        return Backoff(first_seconds=5, max_seconds=30)
    return slow_backoff()


class Permit(Enum):
    """How a call group may be queried now."""

    QUERY = "query"
    """Query, and wait for the answer."""
    PROBE = "probe"
    """Query once, without waiting for the answer."""
    SKIP = "skip"
    """Do not query."""


class BreakerLog:
    """Logs when breakers open and close.

    The log outlives the workers, so each opening and each closing is logged only once, however
    often the source is reopened.
    """

    def __init__(self) -> None:
        self._since_seconds: dict[tuple[str, CallGroup], float] = {}

    def opened(self, gpu_uuid: str, group: CallGroup, *, reason: str | None) -> None:
        """Record that a breaker is open; log it if the breaker was closed."""
        if (gpu_uuid, group) not in self._since_seconds:
            self._since_seconds[gpu_uuid, group] = time.monotonic()
            _log.warning("breaker_opened", gpu=gpu_uuid, call_group=group.value, reason=reason)

    def closed(self, gpu_uuid: str, group: CallGroup) -> None:
        """Record that a call group was answered in time; log it if its breaker was open."""
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
    """The breaker of one call group of one GPU; exports and logs whether it is open.

    The breaker opens after repeated failures. An open breaker permits only single probes, at
    increasing intervals.
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
        """Whether only probes are permitted."""

    def permit(self, now_ns: int) -> Permit:
        """Return whether and how the group may be queried now.

        After a query or a probe, call `succeeded` or `failed`.
        """
        if not self.is_open:
            return Permit.QUERY
        return Permit.PROBE if self._probes.is_due(now_ns) else Permit.SKIP

    def succeeded(self) -> None:
        """Record that the group was answered in time, and close the breaker."""
        if self._has_succeeded and not (self._failures or self.is_open):
            return
        self._has_succeeded, self._failures, self.is_open = True, 0, False
        self._probes.reset()
        self._metric.set(0)
        # Not in the constructor: a new worker's breakers are closed before any group has answered.
        self._log.closed(self._gpu_uuid, self._group)

    def failed(self, now_ns: int, *, reason: str) -> None:
        """Count a failure; open the breaker after `MAX_FAILURES` consecutive failures."""
        labels = {"gpu_uuid": self._gpu_uuid, "group": self._group.value, "reason": reason}
        CALL_GROUPS_FAILED.labels(**labels).inc()
        self._failures += 1
        # If the breaker is open, a probe has failed; `trip` then delays the next probe.
        if self.is_open or self._failures >= MAX_FAILURES:
            self.trip(now_ns, reason=reason)

    def trip(self, now_ns: int, *, reason: str | None = None) -> None:
        """Open the breaker now, without waiting for further failures."""
        self.is_open = True
        self._probes.record_attempt(now_ns)
        self._metric.set(1)
        self._log.opened(self._gpu_uuid, self._group, reason=reason)
