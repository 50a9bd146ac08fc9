"""When to query again what did not answer, and the log of it.

The breaker is pure: what happened and what time it is are its arguments. The log outlives the
workers, so that an opening and its closing are each logged once, however often the source is
opened again.
"""

import time
from enum import Enum
from typing import Final

import structlog

from agent.core.raw import CallGroup
from gpuledger.runtime import Backoff

MAX_FAILURES: Final = 3
"""Failures one after the other after which a breaker opens."""


class Permit(Enum):
    """What may be done now."""

    ASK = "ask"
    """Ask, and wait for the answer."""
    PROBE = "probe"
    """Ask once, and let nothing wait for the answer."""
    SKIP = "skip"
    """Do not ask."""


class Breaker:
    """Opens where something fails again and again; then lets single probes through, ever rarer."""

    def __init__(self, *, backoff: Backoff, max_failures: int = MAX_FAILURES) -> None:
        self._backoff = backoff
        self._max_failures = max_failures
        self._failures = 0
        self._retry_ns: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is asked by probes only."""
        return self._retry_ns is not None

    def permit(self, now_ns: int) -> Permit:
        """Return what may be done now; a probe has to be followed by `succeeded` or `failed`."""
        if self._retry_ns is None:
            return Permit.ASK
        return Permit.SKIP if now_ns < self._retry_ns else Permit.PROBE

    def succeeded(self) -> None:
        """Close: it answered in its time."""
        self._failures = 0
        self._retry_ns = None
        self._backoff.reset()

    def failed(self, now_ns: int) -> bool:
        """Count a failure; return whether it opened by it."""
        self._failures += 1
        was_open = self.is_open
        # Where it is open, it was a probe that failed: the next one comes later.
        if was_open or self._failures >= self._max_failures:
            self._wait(now_ns)
        return self.is_open and not was_open

    def trip(self, now_ns: int) -> bool:
        """Open at once: another failure would cost too much; return whether it opened by it."""
        was_open = self.is_open
        self._wait(now_ns)
        return not was_open

    def _wait(self, now_ns: int) -> None:
        self._retry_ns = now_ns + round(self._backoff.next_seconds() * 1e9)


_log = structlog.get_logger(__name__)


class BreakerLog:
    """The breakers that were logged as open; it outlives the workers that have them."""

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
