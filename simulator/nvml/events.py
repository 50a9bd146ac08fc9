"""Event sets: what the driver tells of by itself.

A wait lasts as long on the machine as it says, whatever the scenario's clock does; what happened
meanwhile in scenario time is told.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

from simulator.faults import PlannedIncident
from simulator.nvml.session import Handle, Session

# ruff: noqa: N802, N803  # NVML's own names


_LOOK_SECONDS: Final = 0.05
_NO_INSTANCE: Final = 0xFFFFFFFF
_TYPES: Final = {
    "xid": pynvml.nvmlEventTypeXidCriticalError,
    "double_bit_error": pynvml.nvmlEventTypeDoubleBitEccError,
    "single_bit_storm": pynvml.nvmlEventTypeSingleBitEccErrorStorm,
    "memory_retirement": pynvml.nvmlEventTypeDramRetirementEvent,
    "memory_retirement_failure": pynvml.nvmlEventTypeDramRetirementFailure,
    "nonfatal_poison": pynvml.nvmlEventTypeNonFatalPoisonError,
    "fatal_poison": pynvml.nvmlEventTypeFatalPoisonError,
    "unavailable": pynvml.nvmlEventTypeGpuUnavailableError,
    "recovery_action": pynvml.nvmlEventTypeGpuRecoveryAction,
    "mig_change": pynvml.nvmlEventMigConfigChange,
}


@dataclass(eq=False)
class EventSet:
    """A set of events that its owner waits for."""

    masks: dict[int, int] = field(default_factory=dict)
    """By GPU, the events that are registered."""
    since_ns: dict[int, int] = field(default_factory=dict)
    """By GPU, when they were registered, since the scenario's start."""
    told: int = 0
    """How many of the node's incidents are behind it."""
    is_free: bool = False
    """Whether it was freed."""


class Events(Session):
    """The functions around event sets."""

    pause: Callable[[float], None] = staticmethod(time.sleep)
    """How a wait waits."""

    def nvmlEventSetCreate(self) -> EventSet:
        """Return a new set."""
        self._check_open()
        self._check_events()
        return EventSet()

    def nvmlEventSetFree(self, eventSet: EventSet) -> None:
        """Forget a set."""
        self._check_open()
        eventSet.is_free = True

    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int:
        """Return the bits of the events that a GPU tells of."""
        self._gpu(handle)
        self._check_events()
        return self._event_support.types

    def nvmlDeviceRegisterEvents(self, handle: Handle, eventTypes: int, eventSet: EventSet) -> None:
        """Have a GPU's events told to a set from now on; NotSupported for others than it has."""
        index = self._gpu(handle).facts.index
        self._check_events()
        if eventTypes & ~self._event_support.types:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        eventSet.masks[index] = eventSet.masks.get(index, 0) | eventTypes
        eventSet.since_ns.setdefault(index, self._since_epoch_ns())

    def nvmlEventSetWait_v2(self, eventSet: EventSet, timeoutms: int) -> Any:  # noqa: ANN401  # a struct of ctypes
        """Return the next event, without its time; NVMLError_Timeout if none comes in time."""
        found = self._wait(eventSet, timeoutms)
        return pynvml.nvmlFriendlyObject(
            {
                "device": Handle(found.spec.gpu, self._session),
                "eventType": _TYPES[found.spec.event],
                "eventData": _data(found),
                "gpuInstanceId": _instance(found.spec.gpu_instance),
                "computeInstanceId": _instance(found.spec.compute_instance),
            }
        )

    def nvmlEventSetWait_v3(self, eventSet: EventSet, params: Any) -> None:  # noqa: ANN401  # a struct of ctypes
        """Fill in the next event with its time; NVMLError_Timeout where there is none in time."""
        if self._event_support.version != "v3":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        found = self._wait(eventSet, params.timeoutMs)
        params.dataType = pynvml.NVML_EVENT_DATA_TYPE_NVML_EVENT
        params.uuid = self._gpus[found.spec.gpu].facts.uuid.encode()
        params.eventType = _TYPES[found.spec.event]
        params.eventData = _data(found)
        params.timestampUsec = self._stamp_us(found.time_ns)
        params.gpuInstanceId = _instance(found.spec.gpu_instance)
        params.computeInstanceId = _instance(found.spec.compute_instance)

    def _wait(self, events: EventSet, timeout_ms: int) -> PlannedIncident:
        session, give_up = self._session, time.monotonic() + timeout_ms / 1000
        while True:
            if not self._users or session != self._session or events.is_free:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            if found := self._next(events):
                return found
            if time.monotonic() >= give_up:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            self.pause(min(_LOOK_SECONDS, timeout_ms / 1000))

    def _next(self, events: EventSet) -> PlannedIncident | None:
        now_ns = self._since_epoch_ns()
        while events.told < len(self._incidents):
            one = self._incidents[events.told]
            if one.time_ns > now_ns:
                return None
            events.told += 1
            if _is_told(one, events):
                return one
        return None

    def _check_events(self) -> None:
        if self._event_support.version == "none":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _is_told(one: PlannedIncident, events: EventSet) -> bool:
    gpu = one.spec.gpu
    return (
        one.spec.told_by != "kmsg"
        and bool(events.masks.get(gpu, 0) & _TYPES[one.spec.event])
        and one.time_ns >= events.since_ns[gpu]
    )


def _data(one: PlannedIncident) -> int:
    """Return the XID; NVML's events of other kinds carry nothing."""
    return one.spec.xid or 0


def _instance(number: int | None) -> int:
    return _NO_INSTANCE if number is None else number


# What the driver tells of itself: that it will be unbound, and that it was bound.

# ruff: noqa: N802, N803  # NVML's own names


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
