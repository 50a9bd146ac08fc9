"""NVML's events: events about the driver itself, and GPU faults.

The driver announces that it will be unbound from a GPU, and that it was bound to a GPU. A program
that keeps the library open blocks the unbinding, so it must close the library if this event
arrives. If the driver or nvidia-ml-py does not support these events, no events arrive and
`capability` contains the reason.

GPU faults arrive through an event set in which every GPU is registered for the events that it
supports. If a GPU or a type of event is refused, the others are still registered. The thread that
waits and retries is in `gpuledger_agent.gpu.event_thread`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_void_p, cast
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import pynvml
import structlog

from gpuledger.clock import NS_PER_HOUR, NS_PER_US, Clock
from gpuledger.errors import UnavailableError
from gpuledger.records import Capability
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.gpu.nvidia.device_client import NothingHappenedError, call_nvml, instance_id
from gpuledger_agent.gpu.nvidia.library import EventData, NvmlLibrary
from gpuledger_agent.gpu.protocol import (
    DriverEvent,
    FailedError,
    GpuIdentity,
    UnsupportedError,
)
from gpuledger_agent.metrics import EVENT_SET_FAILURES

P = ParamSpec("P")
T = TypeVar("T")
# The shortest time: events are polled in each tick, and NVML does not document the meaning of 0.
_WAIT_MILLISECONDS: Final = 1
_MAX_EVENTS: Final = 16
_VERSIONS: Final = {
    "nvmlSystemEventSetCreate": "nvmlSystemEventSetCreateRequest_v1",
    "nvmlSystemRegisterEvents": "nvmlSystemRegisterEventRequest_v1",
    "nvmlSystemEventSetWait": "nvmlSystemEventSetWaitRequest_v1",
    "nvmlSystemEventSetFree": "nvmlSystemEventSetFreeRequest_v1",
}


class NvmlDriverEvents:
    """Events about the driver itself; all calls come from one thread."""

    def __init__(self, library: object) -> None:
        self._library = library
        self._set: object = None
        self._data: Any = None
        self._reason: str | None = "not open yet"

    @property
    def is_open(self) -> bool:
        """Whether events can be received."""
        return self._set is not None

    @property
    def capability(self) -> Capability:
        """Whether the driver announces that it will be unbound from a GPU and, if not, why not.

        Its name is that of the first function that `open` calls.
        """
        reason = self._reason
        return Capability(call="nvmlSystemEventSetCreate", supported=reason is None, reason=reason)

    def open(self) -> None:
        """Start to listen; if that is not supported, `capability` contains the reason."""
        try:
            self._set = self._call(NvmlLibrary.nvmlSystemEventSetCreate)
            # Looked up only here, because older bindings lack both constants.
            events = (
                pynvml.nvmlSystemEventTypeGpuDriverUnbind | pynvml.nvmlSystemEventTypeGpuDriverBind
            )
            self._call(NvmlLibrary.nvmlSystemRegisterEvents, events, self._set)
            self._data = (pynvml.c_nvmlSystemEventData_v1_t * _MAX_EVENTS)()
            self._reason = None
        except UnavailableError as error:
            self.close()
            self._reason = str(error)

    def poll(self) -> DriverEvent:
        """Return the event since the last call; after an error, stop listening."""
        if self._set is None:
            return DriverEvent.NOTHING
        try:
            happened = self._call(
                NvmlLibrary.nvmlSystemEventSetWait,
                self._set,
                _WAIT_MILLISECONDS,
                self._data,
                _MAX_EVENTS,
            )
        except UnavailableError as error:
            self.close()
            self._reason = str(error)
            return DriverEvent.NOTHING
        kinds = {event["eventType"] for event in happened}
        # If both arrived, the unbinding is more urgent: the driver waits for it.
        if pynvml.nvmlSystemEventTypeGpuDriverUnbind in kinds:
            return DriverEvent.UNBIND
        return DriverEvent.BIND if kinds else DriverEvent.NOTHING

    def close(self) -> None:
        """Free the event set."""
        held, self._set = self._set, None
        if held is None:
            return
        try:
            self._call(NvmlLibrary.nvmlSystemEventSetFree, held)
        except UnavailableError as error:
            self._reason = str(error)

    def _call(
        self,
        function: Callable[Concatenate[NvmlLibrary, int | None, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """Call a function of system events, with the version of its struct as the first argument.

        The version is `None` with older bindings, which lack both the struct and the function.
        """
        version: int | None = getattr(pynvml, _VERSIONS[function.__name__], None)
        return call_nvml(self._library, function, version, *arguments, **named)


SOURCE: Final = "nvml"
KINDS: Final = {
    pynvml.nvmlEventTypeXidCriticalError: "xid",
    pynvml.nvmlEventTypeDoubleBitEccError: "ecc_uncorrected",
    # Numbers, because older bindings lack the names.
    0x200: "ecc_corrected_storm",
    0x400: "page_retirement_pending",
    0x800: "page_retirement_failed",
    0x1000: "poison_nonfatal",
    0x2000: "poison_fatal",
    0x4000: "gpu_unavailable",
    0x8000: "recovery_action",
    0x100: "mig_changed",
}
WANTED: Final[int] = sum(KINDS)
# NVML does not document the clock of its time stamps. A stamp that is further from the present is
# not used.
_BELIEVABLE_NS: Final = NS_PER_HOUR

_log = structlog.get_logger(__name__)


class NvmlGpuEvents:
    """Faults that NVML reports for GPUs: an event set with all GPUs that can be registered."""

    def __init__(self, library: object, gpus: Sequence[GpuIdentity], *, clock: Clock) -> None:
        """Create the set and register the GPUs; raises `UnavailableError` if the set is refused."""
        self._library = library
        self._clock = clock
        self._uuids: dict[object, str] = {}
        self.has_v3: bool | None = None
        """Whether the driver has `nvmlEventSetWait_v3`; `None` before the first wait."""
        self._set = call_nvml(library, NvmlLibrary.nvmlEventSetCreate)
        for gpu in gpus:
            if self._register(gpu):
                self._uuids[_identity(gpu.handle)] = gpu.uuid

    def close(self) -> None:
        """Free the set; raises UnavailableError if the library is closed."""
        call_nvml(self._library, NvmlLibrary.nvmlEventSetFree, self._set)

    def wait(self, timeout_ms: int) -> Detection | None:
        """Return the next fault; `None` if none occurs within the timeout or its kind is unknown.

        Raises `UnavailableError`, also if no GPU could be registered.
        """
        if not self._uuids:
            raise FailedError("no GPU could be registered for events")
        try:
            return self._wait_v2(timeout_ms) if self.has_v3 is False else self._wait_v3(timeout_ms)
        except NothingHappenedError:
            return None

    def _wait_v3(self, timeout_ms: int) -> Detection | None:
        """Wait with the newest function, which also returns the event's time and GPU."""
        make = getattr(pynvml, "c_nvmlEventSetWait_v3_t", None)
        if make is None:
            self.has_v3 = False  # an older nvidia-ml-py
            return self._wait_v2(timeout_ms)
        event = make()
        event.timeoutMs = timeout_ms
        try:
            call_nvml(self._library, NvmlLibrary.nvmlEventSetWait_v3, self._set, event)
        except NothingHappenedError:
            self.has_v3 = True
            raise
        except (UnsupportedError, FailedError):
            # If the first call fails, the driver lacks the function; later errors are raised.
            if self.has_v3:
                raise
            self.has_v3 = False
            return self._wait_v2(timeout_ms)
        self.has_v3 = True
        # The members read below are valid only for this type of data.
        if event.dataType != pynvml.NVML_EVENT_DATA_TYPE_NVML_EVENT:
            return None
        try:
            uuid = event.uuid
        except UnicodeDecodeError:
            uuid = None
        now_ns, stamp_ns = self._clock.time_ns(), event.timestampUsec * NS_PER_US
        is_believable = abs(now_ns - stamp_ns) <= _BELIEVABLE_NS
        return _make_detection(event, uuid, stamp_ns if is_believable else now_ns)

    def _wait_v2(self, timeout_ms: int) -> Detection | None:
        event = call_nvml(self._library, NvmlLibrary.nvmlEventSetWait_v2, self._set, timeout_ms)
        # These events have no time stamp, so read the clock before any other call.
        now_ns = self._clock.time_ns()
        uuid = self._uuids.get(_identity(event.device))
        if uuid is None:
            with suppress(UnavailableError):
                uuid = str(call_nvml(self._library, NvmlLibrary.nvmlDeviceGetUUID, event.device))
        return _make_detection(event, uuid, now_ns)

    def _register(self, gpu: GpuIdentity) -> bool:
        """Register a GPU in the set for the wanted events that the GPU supports.

        Return whether the GPU was registered for any event. All events are registered in one call.
        If the driver refuses that call, they are registered one by one, so that a refused event
        does not affect the others. If a GPU cannot be registered at all, a warning is logged.
        """
        library, register = self._library, NvmlLibrary.nvmlDeviceRegisterEvents
        supported_types = NvmlLibrary.nvmlDeviceGetSupportedEventTypes
        try:
            bits = call_nvml(library, supported_types, gpu.handle) & WANTED
            if not bits:
                return False
            try:
                call_nvml(library, register, gpu.handle, bits, self._set)
            except UnsupportedError:
                registered = 0
                for bit in (kind for kind in KINDS if kind & bits):
                    with suppress(UnsupportedError):
                        call_nvml(library, register, gpu.handle, bit, self._set)
                        registered |= bit
                if not registered:
                    raise
        except UnavailableError as error:
            EVENT_SET_FAILURES.labels(reason="register").inc()
            _log.warning("gpu_events_refused", gpu=gpu.uuid, error=str(error))
            return False
        return True


def _make_detection(event: EventData, uuid: str | None, time_ns: int) -> Detection | None:
    kind = KINDS.get(event.eventType)
    # The event is of a kind that was not registered.
    if kind is None:
        return None
    return Detection(
        kind=kind,
        gpu_uuid=uuid or "unknown",
        time_ns=time_ns,
        source=SOURCE,
        # NVML sets the data only for XIDs.
        xid=event.eventData if kind == "xid" else None,
        gpu_instance=instance_id(event.gpuInstanceId),
        compute_instance=instance_id(event.computeInstanceId),
    )


def pci_buses_of(library: object, gpus: Sequence[GpuIdentity]) -> dict[str, str]:
    """Return the GPUs' UUIDs by PCI address, without GPUs that do not answer."""
    found = {}
    for gpu in gpus:
        with suppress(UnavailableError):
            found[call_nvml(library, NvmlLibrary.nvmlDeviceGetPciInfo_v3, gpu.handle).busId] = (
                gpu.uuid
            )
    return found


def _identity(handle: object) -> object:
    """Return a value that is equal for equal handles.

    The handles themselves cannot be compared, because the binding creates a new object each time.
    """
    if isinstance(handle, pynvml.c_nvmlDevice_t):
        return cast(handle, c_void_p).value
    return handle
