"""Event sets: events that the driver reports, so that callers need not query values repeatedly.

A wait lasts as long as its timeout in real time, independent of the scenario's speed. It returns
the events that happened during this wait in scenario time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

from gpuledger_simulator.nvml.session import Handle, Session, Subject
from gpuledger_simulator.plan import PlannedIncident

# ruff: noqa: N802, N803  # NVML's own names


_POLL_INTERVAL_SECONDS: Final = 0.05
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
    """A set of event types for which a caller waits."""

    masks: dict[int, int] = field(default_factory=dict)
    """Registered event types by GPU."""
    since_ns: dict[int, int] = field(default_factory=dict)
    """Time of registration by GPU, in nanoseconds since the scenario's start."""
    reported: int = 0
    """Number of the node's incidents that the set has reported or skipped."""
    is_free: bool = False
    """Whether the set was freed."""


class Events(Subject):
    """The functions for event sets."""

    pause: Callable[[float], None] = staticmethod(time.sleep)
    """The function that sleeps between polls; tests replace it."""

    def nvmlEventSetCreate(self) -> EventSet:
        """Return a new set; raise NotSupported if the driver has no events."""
        self._session.check_open()
        self._check_events()
        return EventSet()

    def nvmlEventSetFree(self, eventSet: EventSet) -> None:
        """Free a set."""
        self._session.check_open()
        eventSet.is_free = True

    def nvmlDeviceGetSupportedEventTypes(self, handle: Handle) -> int:
        """Return the bit mask of the event types that a GPU supports."""
        self._session.gpu(handle)
        self._check_events()
        return self._session.event_support.types

    def nvmlDeviceRegisterEvents(self, handle: Handle, eventTypes: int, eventSet: EventSet) -> None:
        """Add event types of a GPU to a set, for events from now on.

        Raise NotSupported for types that the GPU does not support.
        """
        index = self._session.gpu(handle).facts.index
        self._check_events()
        if eventTypes & ~self._session.event_support.types:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        eventSet.masks[index] = eventSet.masks.get(index, 0) | eventTypes
        eventSet.since_ns.setdefault(index, self._session.since_epoch_ns())

    def nvmlEventSetWait_v2(self, eventSet: EventSet, timeoutms: int) -> Any:  # noqa: ANN401  # a struct of ctypes
        """Return the next event without its time; raise NVMLError_Timeout if none comes in time."""
        found = self._wait(eventSet, timeoutms)
        return pynvml.nvmlFriendlyObject(
            {
                "device": Handle(found.spec.gpu, self._session.number),
                "eventType": _TYPES[found.spec.event],
                "eventData": found.spec.xid or 0,  # other events have no data
                "gpuInstanceId": _instance(found.spec.gpu_instance),
                "computeInstanceId": _instance(found.spec.compute_instance),
            }
        )

    def nvmlEventSetWait_v3(self, eventSet: EventSet, params: Any) -> None:  # noqa: ANN401  # a struct of ctypes
        """Fill in the next event with its time.

        Raise NVMLError_Timeout if no event comes in time, and FunctionNotFound before version 3.
        """
        if self._session.event_support.version != "v3":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        found = self._wait(eventSet, params.timeoutMs)
        params.dataType = pynvml.NVML_EVENT_DATA_TYPE_NVML_EVENT
        params.uuid = self._session.gpus[found.spec.gpu].facts.uuid.encode()
        params.eventType = _TYPES[found.spec.event]
        params.eventData = found.spec.xid or 0
        params.timestampUsec = self._session.stamp_us(found.time_ns)
        params.gpuInstanceId = _instance(found.spec.gpu_instance)
        params.computeInstanceId = _instance(found.spec.compute_instance)

    def _wait(self, events: EventSet, timeout_ms: int) -> PlannedIncident:
        session, give_up = self._session.number, time.monotonic() + timeout_ms / 1000
        while True:
            # As with the real driver, the wait ends if the library is shut down or if another
            # thread frees the set.
            if not self._session.users or session != self._session.number or events.is_free:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
            if found := self._next(events):
                return found
            if time.monotonic() >= give_up:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
            self.pause(min(_POLL_INTERVAL_SECONDS, timeout_ms / 1000))

    def _next(self, events: EventSet) -> PlannedIncident | None:
        now_ns = self._session.since_epoch_ns()
        while events.reported < len(self._session.incidents):
            incident = self._session.incidents[events.reported]
            if incident.time_ns > now_ns:
                return None
            # Also counts incidents that are not reported, because a later registration must not
            # report them.
            events.reported += 1
            gpu = incident.spec.gpu
            if (
                incident.spec.reported_by != "kmsg"
                and events.masks.get(gpu, 0) & _TYPES[incident.spec.event]
                and incident.time_ns >= events.since_ns[gpu]
            ):
                return incident
        return None

    def _check_events(self) -> None:
        if self._session.event_support.version == "none":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def _instance(number: int | None) -> int:
    return _NO_INSTANCE if number is None else number


_MS_PER_SECOND = 1000


@dataclass(eq=False)
class SystemEventSet:
    """A set of types of driver events for which a caller waits."""

    mask: int
    """Registered event types."""
    reported_ns: int
    """Time up to which events were reported, in nanoseconds since the scenario's start."""


class SystemEventCalls(Subject):
    """The functions for events of the driver itself, such as unbind."""

    def __init__(self, session: Session, happened: Sequence[tuple[int, int]] = ()) -> None:
        """Take the events to report, each as a tuple: time, in ns since the start, and type."""
        super().__init__(session)
        self._system_events = happened

    def nvmlSystemEventSetCreate(self, version: int) -> SystemEventSet:
        """Return a set without registered event types."""
        self._check_request(version, pynvml.nvmlSystemEventSetCreateRequest_v1)
        return SystemEventSet(mask=0, reported_ns=self._session.since_epoch_ns())

    def nvmlSystemEventSetFree(self, version: int, setHandle: SystemEventSet) -> None:
        """Free a set."""
        self._check_request(version, pynvml.nvmlSystemEventSetFreeRequest_v1)
        setHandle.mask = 0

    def nvmlSystemRegisterEvents(
        self, version: int, eventTypes: int, setHandle: SystemEventSet
    ) -> None:
        """Add event types to a set."""
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
        """Return the events since the previous wait.

        Returns an empty list if there are none within `timeoutMs` of real time.
        """
        self._check_request(version, pynvml.nvmlSystemEventSetWaitRequest_v1)
        end = time.monotonic() + timeoutMs / _MS_PER_SECOND
        while True:
            since_ns, setHandle.reported_ns = setHandle.reported_ns, self._session.since_epoch_ns()
            happened = [
                kind
                for at_ns, kind in self._system_events
                if since_ns < at_ns <= setHandle.reported_ns and kind & setHandle.mask
            ][:eventDataSize]
            # The timeout is in real time: the scenario's clock may run faster, but the caller's
            # thread must wait as long as requested.
            if happened or time.monotonic() >= end:
                break
            time.sleep(min(0.02, timeoutMs / _MS_PER_SECOND))
        for index, kind in enumerate(happened):
            eventData[index].eventType = kind
        return [{"eventType": kind, "gpuId": 0} for kind in happened]

    def _check_request(self, version: int, expected: int) -> None:
        self._session.check_open()
        if version != expected:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
