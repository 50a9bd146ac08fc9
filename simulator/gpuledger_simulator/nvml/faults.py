"""Wraps the simulated NVML library, so that the faults of a scenario affect its functions.

While a fault is active, the wrapper blocks a call, raises an error, or changes the result. The
functions themselves need not handle faults.
"""

import ctypes
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial, wraps
from typing import Any, Final

import pynvml
from typing_extensions import override

from gpuledger_simulator.nvml import NvmlFunction, SimulatedNvml
from gpuledger_simulator.nvml.session import Handle
from gpuledger_simulator.plan import PlannedFault

_POLL_INTERVAL_SECONDS: Final = 0.02
_DEVICE_ERRORS: Final = {
    "lost": pynvml.NVML_ERROR_GPU_IS_LOST,
    "reset_required": pynvml.NVML_ERROR_RESET_REQUIRED,
}
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
# These fields identify a value. With garbage in them, the value would be unusable, not wrong.
_KEPT: Final = frozenset(
    {"version", "pid", "timeStamp", "timestamp", "fieldId", "scopeId", "valueType", "nvmlReturn"}
)


class FaultyNvml(SimulatedNvml):
    """The NVML library of a node with faults."""

    def __init__(self, *arguments: Any, faults: Sequence[PlannedFault], **named: Any) -> None:  # noqa: ANN401  # arguments of the library
        super().__init__(*arguments, system_events=_system_events(faults), **named)
        self._faults = faults
        self._opened_ns = 0
        self._requested_ns: dict[int, int] = {}
        """When each GPU was last requested by its PCI address."""
        self._grown: Counter[tuple[int, str, int | None]] = Counter()
        self._unloaded: set[int] = set()
        self._frozen: dict[tuple[int, str, int | None], Any] = {}
        if find := self.__dict__.get("_nvmlGetFunctionPointer"):
            self._nvmlGetFunctionPointer = partial(self._find_function, find)

    @override
    def __getattr__(self, name: str) -> NvmlFunction:
        """Return the library's function, wrapped with the node's faults."""
        function = super().__getattr__(name)

        @wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401  # arguments of the library
            if name in ("nvmlInit", "nvmlShutdown"):
                self.begin(name)
                return function(*arguments, **named)
            # A call identifies its GPU by a handle, or by an index if it requests the handle.
            given = [*arguments, *named.values()]
            gpu = next((one.index for one in given if isinstance(one, Handle)), None)
            if name == "nvmlDeviceGetHandleByIndex":
                gpu = int(arguments[0])
            elif name == "nvmlDeviceGetHandleByPciBusId":
                gpu = function(*arguments).index
                self._requested_ns[gpu] = self.session.since_epoch_ns()
            self.meet(name, gpu)
            return self.distort(name, gpu, function(*arguments, **named))

        return guarded

    def _find_function(self, find: NvmlFunction, name: str) -> NvmlFunction:
        """Return the driver's function with this name, wrapped with the node's faults.

        `find` returns the function without faults. nvidia-ml-py calls the driver's functions.
        """
        function = find(name)

        def guarded(handle: Handle, *arguments: Any) -> int:  # noqa: ANN401  # arguments of the library
            try:
                self.meet(name, handle.index)
            except pynvml.NVMLError as error:
                return int(error.value)
            return int(function(handle, *arguments))

        return guarded

    def begin(self, call: str) -> None:
        """Apply the faults before a call that opens or closes the library.

        If a fault makes the call fail, raise the error that NVML would raise.
        """
        now_ns = self.session.since_epoch_ns()
        if call == "nvmlShutdown":
            # The driver is unbound when its last user closes the library; this shutdown may be the
            # last one.
            if self.session.users <= 1:
                self._unloaded |= {
                    number
                    for number, fault in enumerate(self._faults)
                    if fault.spec.kind == "unbind" and fault.is_there(now_ns)
                }
            return
        for number, fault in enumerate(self._faults):
            kind, is_there = fault.spec.kind, fault.is_there(now_ns)
            if is_there and kind == "version_mismatch":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
            is_unbound = kind == "unbind" and is_there and not self.session.users
            if is_unbound or (kind == "driver_reload" and now_ns >= fault.start_ns):
                self._unloaded.add(number)
            if is_there and number in self._unloaded:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
            # The counters restart when the driver is loaded again, even if the library was not open
            # at that time.
            if fault.end_ns is not None and fault.is_over(now_ns) and number in self._unloaded:
                self.session.driver_loaded_ns = max(self.session.driver_loaded_ns, fault.end_ns)
        self._opened_ns = now_ns

    def meet(self, call: str, gpu: int | None) -> None:
        """Apply the faults before any other call of the library.

        If a fault makes the call hang, block. If a fault makes it fail, raise the error that NVML
        would raise.
        """
        now_ns = self.session.since_epoch_ns()
        # Faults of the driver come first, because no device responds without a driver.
        for fault in self._faults:
            kind, is_there = fault.spec.kind, fault.is_there(now_ns)
            if kind == "version_mismatch" and is_there:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
            if kind == "driver_reload" and now_ns >= fault.start_ns > self._opened_ns:
                gone = pynvml.NVML_ERROR_DRIVER_NOT_LOADED if is_there else None
                raise pynvml.NVMLError(gone or pynvml.NVML_ERROR_UNINITIALIZED)
        for number, fault in enumerate(self._faults):
            if fault.is_of(gpu, call):
                self._meet_device(number, fault, call, now_ns, gpu)

    def distort(self, call: str, gpu: int | None, answer: Any) -> Any:  # noqa: ANN401  # results of the library
        """Return a call's result, `answer`, after the faults have been applied.

        A fault may replace the result by garbage, or by the first result since the fault began.
        """
        now_ns = self.session.since_epoch_ns()
        for number, fault in enumerate(self._faults):
            if fault.spec.kind == "frozen" and fault.is_there(now_ns) and fault.is_of(gpu, call):
                return self._frozen.setdefault((number, call, gpu), answer)
            is_meant = call in fault.spec.calls or (
                not fault.spec.calls and call in _PLAIN_READINGS
            )
            if fault.spec.kind == "garbage" and fault.is_there(now_ns) and is_meant:
                return garble(answer) if fault.is_of(gpu, call) else answer
        return answer

    def _meet_device(
        self, number: int, fault: PlannedFault, call: str, now_ns: int, gpu: int | None
    ) -> None:
        kind = fault.spec.kind
        # A GPU stays lost after the fault's end until nvmlInit is called again, or until the GPU is
        # requested by its PCI address.
        attached_ns = max(self._opened_ns, self._requested_ns.get(gpu, 0) if gpu is not None else 0)
        is_late = fault.end_ns is not None and attached_ns < fault.end_ns
        if kind in _DEVICE_ERRORS and now_ns >= fault.start_ns:
            if fault.is_there(now_ns) or is_late:
                raise pynvml.NVMLError(_DEVICE_ERRORS[kind])
        elif not fault.is_there(now_ns):
            return
        elif kind == "hang":
            # A fault without an end blocks permanently. Otherwise the end is polled, because
            # scenario time may run at any speed.
            pause = threading.Event()
            while fault.is_there(self.session.since_epoch_ns()):
                pause.wait(None if fault.end_ns is None else _POLL_INTERVAL_SECONDS)
        elif kind == "not_supported":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        elif kind == "growing_list":
            self._grown[number, call, gpu] += 1
            if self._grown[number, call, gpu] % (fault.spec.failures + 1):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)


def make_nvml(*arguments: Any, faults: Sequence[PlannedFault], **named: Any) -> SimulatedNvml:  # noqa: ANN401  # arguments of the library
    """Return the NVML library of a node; it is wrapped only if the node has faults."""
    if not faults:
        return SimulatedNvml(*arguments, **named)
    return FaultyNvml(*arguments, faults=faults, **named)


def garble(value: Any) -> Any:  # noqa: ANN401  # results of the library
    """Return a value of the same type that is impossible for a reading, such as 2^32 - 1."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 2**32 - 1  # -1 as an unsigned integer
    if isinstance(value, tuple):
        # The first element is the type of the values.
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


def _system_events(faults: Sequence[PlannedFault]) -> list[tuple[int, int]]:
    events = []
    for fault in faults:
        if fault.spec.kind == "unbind":
            events.append((fault.start_ns, pynvml.nvmlSystemEventTypeGpuDriverUnbind))
            if fault.end_ns is not None:
                events.append((fault.end_ns, pynvml.nvmlSystemEventTypeGpuDriverBind))
    return events
