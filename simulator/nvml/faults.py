"""A library whose driver fails as the scenario says, around the one whose driver does not.

Each function is called through here, so that the subjects need not know of faults.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

import pynvml
from typing_extensions import override

from simulator.faults import PlannedFault
from simulator.nvml.library import NvmlFunction, SimulatedNvml
from simulator.nvml.session import Handle

_LOOK_SECONDS: Final = 0.02
_DEVICE_ERRORS: Final = {
    "lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "reset_required": pynvml.NVML_ERROR_RESET_REQUIRED,
}
_UNLOADING: Final = frozenset({"driver_reload", "unbind"})
_PLAIN_READINGS: Final = frozenset(
    {
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetSamples",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetFieldValues",
    }
)
# Who, when and what it is: without them a value is no value at all.
_KEPT: Final = frozenset(
    {"version", "pid", "timeStamp", "timestamp", "fieldId", "scopeId", "valueType", "nvmlReturn"}
)


class FaultyNvml(SimulatedNvml):
    """The NVML library of a node with faults."""

    def __init__(self, *arguments: Any, faults: Sequence[PlannedFault], **named: Any) -> None:  # noqa: ANN401  # as the library takes them
        super().__init__(*arguments, system_events=_system_events(faults), **named)
        self._faults = faults
        self._opened_ns = 0
        self._grown: Counter[tuple[int, str]] = Counter()
        self._unloaded: set[int] = set()

    @override
    def __getattr__(self, name: str) -> NvmlFunction:
        return _guard(self, name, super().__getattr__(name))

    def begin(self, call: str) -> None:
        """Before the library is opened or closed; raises the error that NVML would."""
        now_ns = self.session.since_epoch_ns()
        if call == "nvmlShutdown":
            self._unload_where_unused(now_ns)
            return
        for place, fault in enumerate(self._faults):
            if fault.is_there(now_ns) and fault.spec.kind == "version_mismatch":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
            if fault.spec.kind == "driver_reload" and now_ns >= fault.start_ns:
                self._unloaded.add(place)
            if fault.is_there(now_ns) and self._is_unloaded(place, fault):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if fault.end_ns is not None and fault.is_over(now_ns) and place in self._unloaded:
                self.session.driver_loaded_ns = max(self.session.driver_loaded_ns, fault.end_ns)
        self._opened_ns = now_ns

    def meet(self, call: str, gpu: int | None) -> None:
        """Before any other function; hangs, or raises the error that NVML would."""
        now_ns = self.session.since_epoch_ns()
        for fault in self._faults:
            self._meet_driver(fault, now_ns)
        for place, fault in enumerate(self._faults):
            if fault.is_of(gpu, call):
                self._meet_device(place, fault, call, now_ns)

    def distort(self, call: str, gpu: int | None, answer: Any) -> Any:  # noqa: ANN401  # as the library has it
        """Return the answer, or garbage in its place."""
        now_ns = self.session.since_epoch_ns()
        for fault in self._faults:
            is_meant = call in fault.spec.calls or (
                not fault.spec.calls and call in _PLAIN_READINGS
            )
            if fault.spec.kind == "garbage" and fault.is_there(now_ns) and is_meant:
                return garble(answer) if fault.is_of(gpu, call) else answer
        return answer

    def _meet_driver(self, fault: PlannedFault, now_ns: int) -> None:
        kind, is_there = fault.spec.kind, fault.is_there(now_ns)
        if kind == "version_mismatch" and is_there:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
        if kind == "driver_reload" and now_ns >= fault.start_ns > self._opened_ns:
            gone = pynvml.NVML_ERROR_DRIVER_NOT_LOADED if is_there else None
            raise pynvml.NVMLError(gone or pynvml.NVML_ERROR_UNINITIALIZED)

    def _meet_device(self, place: int, fault: PlannedFault, call: str, now_ns: int) -> None:
        kind = fault.spec.kind
        is_late = fault.end_ns is not None and self._opened_ns < fault.end_ns
        if kind in _DEVICE_ERRORS and now_ns >= fault.start_ns:
            if fault.is_there(now_ns) or is_late:
                raise pynvml.NVMLError(_DEVICE_ERRORS[kind])
        elif not fault.is_there(now_ns):
            return
        elif kind == "hang":
            self._hang(fault)
        elif kind == "not_supported":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        elif kind == "growing_list":
            self._grown[(place, call)] += 1
            if self._grown[(place, call)] % (fault.spec.failures + 1):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)

    def _hang(self, fault: PlannedFault) -> None:
        pause = threading.Event()
        while fault.is_there(self.session.since_epoch_ns()):
            pause.wait(None if fault.end_ns is None else _LOOK_SECONDS)

    def _unload_where_unused(self, now_ns: int) -> None:
        """Unbind the driver where its last user is about to go."""
        if self.session.users > 1:
            return
        for place, fault in enumerate(self._faults):
            if fault.spec.kind == "unbind" and fault.is_there(now_ns):
                self._unloaded.add(place)

    def _is_unloaded(self, place: int, fault: PlannedFault) -> bool:
        if fault.spec.kind == "unbind" and not self.session.users:
            self._unloaded.add(place)
        return fault.spec.kind in _UNLOADING and place in self._unloaded


def make_nvml(*arguments: Any, faults: Sequence[PlannedFault], **named: Any) -> SimulatedNvml:  # noqa: ANN401  # as the library takes them
    """Return the library of a node; without faults nothing stands between it and its user."""
    if not faults:
        return SimulatedNvml(*arguments, **named)
    return FaultyNvml(*arguments, faults=faults, **named)


def garble(value: Any) -> Any:  # noqa: ANN401  # as the library has it
    """Return a value of the same form that cannot be true."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 2**32 - 1
    if isinstance(value, tuple):
        return (value[0], *map(garble, value[1:]))
    if isinstance(value, list):
        return [garble(one) for one in value]
    if isinstance(value, ctypes.Structure):
        for name, kind in (field[:2] for field in value._fields_):
            if name not in _KEPT:
                setattr(value, name, _largest(kind, getattr(value, name)))
    return value


def _largest(kind: Any, held: Any) -> Any:  # noqa: ANN401  # any type of ctypes
    if kind in (ctypes.c_float, ctypes.c_double):
        return float("nan")
    if isinstance(held, int):
        return (1 << 8 * ctypes.sizeof(kind) - 1) - 1
    if issubclass(kind, ctypes.Union):
        return kind.from_buffer_copy(b"\xfe" * ctypes.sizeof(kind))
    return held


def _guard(library: FaultyNvml, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  # as the library takes them
        if name in ("nvmlInit", "nvmlShutdown"):
            library.begin(name)
            return function(*arguments, **named)
        gpu = _gpu_of(name, [*arguments, *named.values()])
        library.meet(name, gpu)
        return library.distort(name, gpu, function(*arguments, **named))

    return guarded


def _gpu_of(name: str, arguments: Sequence[Any]) -> int | None:
    if name == "nvmlDeviceGetHandleByIndex":
        return int(arguments[0])
    return next((one.index for one in arguments if isinstance(one, Handle)), None)


def _system_events(faults: Sequence[PlannedFault]) -> list[tuple[int, int]]:
    events = []
    for fault in faults:
        if fault.spec.kind == "unbind":
            events.append((fault.start_ns, pynvml.nvmlSystemEventTypeGpuDriverUnbind))
            if fault.end_ns is not None:
                events.append((fault.end_ns, pynvml.nvmlSystemEventTypeGpuDriverBind))
    return events
