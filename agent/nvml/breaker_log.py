"""The log of breakers: each opening and its closing once, however often the library starts."""

import time

import structlog

from agent.nvml.raw import CallGroup

_log = structlog.get_logger(__name__)


class BreakerLog:
    """Which breakers were said to be open; it outlives the threads that have them."""

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
