"""What the driver tells of itself: that it will be unbound, and that it was bound."""
# ruff: noqa: N802, N803  # NVML's own names

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from simulator.nvml.session import Session

_MS_PER_SECOND = 1000


@dataclass(eq=False)
class SystemEventSet:
    """A set of events of the driver that its owner waits for."""

    mask: int
    """What is registered."""
    told_ns: int
    """Until when it was told what happened, since the scenario's start."""


class SystemEventCalls(Session):
    """The functions that tell of the driver itself."""

    _system_events: Sequence[tuple[int, int]] = ()
    """When, since the scenario's start, and NVML's number of what happens."""

    def nvmlSystemEventSetCreate(self, version: int) -> SystemEventSet:
        """Return a set that nothing is registered in."""
        self._check_request(version, pynvml.nvmlSystemEventSetCreateRequest_v1)
        return SystemEventSet(mask=0, told_ns=self._since_epoch_ns())

    def nvmlSystemEventSetFree(self, version: int, setHandle: SystemEventSet) -> None:
        """Let a set go."""
        self._check_request(version, pynvml.nvmlSystemEventSetFreeRequest_v1)
        setHandle.mask = 0

    def nvmlSystemRegisterEvents(
        self, version: int, eventTypes: int, setHandle: SystemEventSet
    ) -> None:
        """Register for kinds of events."""
        self._check_request(version, pynvml.nvmlSystemRegisterEventRequest_v1)
        setHandle.mask |= eventTypes

    def nvmlSystemEventSetWait(
        self,
        version: int,
        setHandle: SystemEventSet,
        timeoutMs: int,
        eventData: Any,  # noqa: ANN401  # an array of ctypes
        eventDataSize: int,
    ) -> list[dict[str, int]]:
        """Return what happened since the wait before; nothing after `timeoutMs` of machine time."""
        self._check_request(version, pynvml.nvmlSystemEventSetWaitRequest_v1)
        end = time.monotonic() + timeoutMs / _MS_PER_SECOND
        while True:
            happened = self._happened(setHandle)[:eventDataSize]
            if happened or time.monotonic() >= end:
                break
            time.sleep(min(0.02, timeoutMs / _MS_PER_SECOND))
        for place, kind in enumerate(happened):
            eventData[place].eventType = kind
        return [{"eventType": kind, "gpuId": 0} for kind in happened]

    def _happened(self, held: SystemEventSet) -> list[int]:
        since_ns, held.told_ns = held.told_ns, self._since_epoch_ns()
        return [
            kind
            for at_ns, kind in self._system_events
            if since_ns < at_ns <= held.told_ns and kind & held.mask
        ]

    def _check_request(self, version: int, expected: int) -> None:
        self._check_open()
        if version != expected:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
