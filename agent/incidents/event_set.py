"""One of the driver's event sets: what each GPU is registered for, and one event after the other.

Here NVML's events become sightings. Threads and new attempts are `events`'.
"""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_void_p, cast
from typing import Any, Final, Protocol

import pynvml
import structlog

from agent.gpu.nvidia.client import FailedError, NothingHappenedError, UnsupportedError, call_nvml
from agent.incidents.detection import Detection
from agent.metrics import EVENT_SET_FAILURES
from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError

SOURCE: Final = "nvml"
KINDS: Final = {
    pynvml.nvmlEventTypeXidCriticalError: "xid",
    pynvml.nvmlEventTypeDoubleBitEccError: "ecc_uncorrected",
    # Older bindings lack the names of what newer drivers tell, so these are by number.
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
_NO_INSTANCE: Final = 0xFFFFFFFF
_NS_PER_US: Final = 1_000
# Nobody says by which clock a driver stamps; a stamp that is far from now is by another one.
_CREDIBLE_NS: Final = 3_600_000_000_000

_log = structlog.get_logger(__name__)


class EventDevice(Protocol):
    """A GPU of an open library."""

    @property
    def uuid(self) -> str:
        """Its identity."""

    @property
    def index(self) -> int:
        """The driver's index of it."""

    @property
    def handle(self) -> Any:  # noqa: ANN401  # the library's own
        """The library's handle."""


class DriverEvents:
    """An event set in which every GPU is registered that can be."""

    def __init__(self, library: Any, gpus: Sequence[EventDevice], *, clock: Clock) -> None:  # noqa: ANN401  # pynvml is an untyped module
        """Make the set; raises UnavailableError where the driver makes none."""
        self._library = library
        self._clock = clock
        self._uuids: dict[Any, str] = {}
        self._has_v3: bool | None = None
        self._set = call_nvml(library, "nvmlEventSetCreate")
        for gpu in gpus:
            if self._register(gpu):
                self._uuids[_identity(gpu.handle)] = gpu.uuid

    def close(self) -> None:
        """Free the set; raises UnavailableError where the library is gone."""
        call_nvml(self._library, "nvmlEventSetFree", self._set)

    def take(self, timeout_ms: int) -> Detection | None:
        """Wait for the next event; `None` where there is none in time. Raises UnavailableError."""
        if not self._uuids:
            raise FailedError("no GPU can be registered for events")
        try:
            return self._take_v3(timeout_ms) if self._has_v3 is not False else self._v2(timeout_ms)
        except NothingHappenedError:
            return None

    def _take_v3(self, timeout_ms: int) -> Detection | None:
        try:
            found = self._v3(timeout_ms)
        except NothingHappenedError:
            self._has_v3 = True
            raise
        except (UnsupportedError, FailedError):
            if self._has_v3:
                raise
            self._has_v3 = False
            return self._v2(timeout_ms)
        self._has_v3 = True
        return found

    def _v3(self, timeout_ms: int) -> Detection | None:
        make = getattr(pynvml, "c_nvmlEventSetWait_v3_t", None)
        if make is None:
            raise UnsupportedError("nvmlEventSetWait_v3: this nvidia-ml-py does not have it")
        event = make()
        event.timeoutMs = timeout_ms
        call_nvml(self._library, "nvmlEventSetWait_v3", self._set, event)
        if event.dataType != pynvml.NVML_EVENT_DATA_TYPE_NVML_EVENT:
            return None
        try:
            uuid = event.uuid
        except UnicodeDecodeError:
            uuid = None
        return self._sighting(event, uuid, self._credible(event.timestampUsec * _NS_PER_US))

    def _v2(self, timeout_ms: int) -> Detection | None:
        event = call_nvml(self._library, "nvmlEventSetWait_v2", self._set, timeout_ms)
        now_ns = self._clock.time_ns()
        uuid = self._uuids.get(_identity(event.device)) or self._ask_uuid(event.device)
        return self._sighting(event, uuid, now_ns)

    def _ask_uuid(self, handle: Any) -> str | None:  # noqa: ANN401  # the library's own
        with suppress(UnavailableError):
            return str(call_nvml(self._library, "nvmlDeviceGetUUID", handle))
        return None

    def _credible(self, stamp_ns: int) -> int:
        now_ns = self._clock.time_ns()
        return stamp_ns if abs(now_ns - stamp_ns) <= _CREDIBLE_NS else now_ns

    def _sighting(self, event: Any, uuid: str | None, time_ns: int) -> Detection | None:  # noqa: ANN401  # a struct of ctypes
        kind = KINDS.get(event.eventType)
        if kind is None:
            return None
        is_xid = kind == "xid"
        return Detection(
            kind=kind,
            gpu_uuid=uuid or "unknown",
            time_ns=time_ns,
            source=SOURCE,
            xid=event.eventData if is_xid else None,
            gpu_instance=_instance(event.gpuInstanceId),
            compute_instance=_instance(event.computeInstanceId),
        )

    def _register(self, gpu: EventDevice) -> bool:
        """Register for what is wanted and supported; a GPU that refuses must not cost the rest."""
        try:
            supported = call_nvml(self._library, "nvmlDeviceGetSupportedEventTypes", gpu.handle)
            if supported & WANTED:
                self._register_bits(gpu, supported & WANTED)
        except UnavailableError as error:
            EVENT_SET_FAILURES.labels(reason="register").inc()
            _log.warning("gpu_events_refused", gpu=gpu.uuid, error=str(error))
            return False
        return bool(supported & WANTED)

    def _register_bits(self, gpu: EventDevice, bits: int) -> None:
        """Register all bits at once, else one by one: one that is refused must not cost the rest.

        Raises UnavailableError where none is taken.
        """
        try:
            self._register_mask(gpu, bits)
        except UnsupportedError:
            taken = [bit for bit in KINDS if bit & bits and self._takes(gpu, bit)]
            if not taken:
                raise

    def _takes(self, gpu: EventDevice, bit: int) -> bool:
        try:
            self._register_mask(gpu, bit)
        except UnsupportedError:
            return False
        return True

    def _register_mask(self, gpu: EventDevice, bits: int) -> None:
        call_nvml(self._library, "nvmlDeviceRegisterEvents", gpu.handle, bits, self._set)


def buses_of(library: Any, gpus: Sequence[EventDevice]) -> dict[str, str]:  # noqa: ANN401  # as above
    """Return the GPUs' UUIDs by the PCI addresses at which they are plugged in."""
    found = {}
    for gpu in gpus:
        with suppress(UnavailableError):
            found[call_nvml(library, "nvmlDeviceGetPciInfo_v3", gpu.handle).busId] = gpu.uuid
    return found


def _identity(handle: Any) -> Any:  # noqa: ANN401  # the library's own
    """Return what tells handles apart: the binding makes a new object each time."""
    if isinstance(handle, pynvml.c_nvmlDevice_t):
        return cast(handle, c_void_p).value
    return handle


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else number
