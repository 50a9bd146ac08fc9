"""The seam to NVML: opens the library, finds the GPUs, asks each of them all its questions.

Here live the driver's names, error codes and traps; its exceptions go no further than this module.
It takes any object with the functions of `pynvml`, the real module or the simulator's. Whether a
value can be true is judged elsewhere. Safe to ask different GPUs from different threads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pynvml

from agent.answers import GpuAnswers, LastSeen, ListedProcess, ProcessSample, Sample
from agent.metrics import NVML_ERRORS
from gpuledger.errors import UnavailableError
from gpuledger.records import ProcessKind

T = TypeVar("T")

_ATTEMPTS: Final = 3
# After these no handle is good any more; only a new start of the library helps.
_LOST: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_UNKNOWN,
    }
)
_UNSUPPORTED: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
    }
)
_STARTING: Final = ("nvmlInit", "nvmlDeviceGetCount")
# nvidia-ml-py raises an "error" of value 0 where the size call of a list succeeds with nothing.
_EMPTY: Final = frozenset({pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND})
_VALUE_FIELDS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
}
_LISTS: Final = {
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses_v3",
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}


class NvmlLostError(UnavailableError):
    """The library, or a GPU, is lost until the library is started again."""


class _UnsupportedError(UnavailableError):
    """The driver does not give this, now or later."""


class _FailedError(UnavailableError):
    """The driver did not give this, now."""


class Nvml:
    """The library, from its start to its end."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401  # pynvml is an untyped module
        self._library = library
        self._is_open = False
        self.missing = 0
        """GPUs that the driver counts and that did not answer at the start."""

    def open(self) -> list["Gpu"]:
        """Start the library and give the GPUs that answer; raises NvmlLostError."""
        _call(self._library, "nvmlInit")
        self._is_open = True
        count = _call(self._library, "nvmlDeviceGetCount")
        found = [self._find(index) for index in range(count)]
        gpus = [gpu for gpu in found if gpu]
        self.missing = count - len(gpus)
        return gpus

    def close(self) -> None:
        """Let go of the driver; a library that is lost has nothing to let go of."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            _call(self._library, "nvmlShutdown")
        except UnavailableError:
            return

    def _find(self, index: int) -> "Gpu | None":
        """Give the GPU at an index; one that is lost must not cost the others."""
        try:
            handle = _call(self._library, "nvmlDeviceGetHandleByIndex", index)
            uuid = _call(self._library, "nvmlDeviceGetUUID", handle)
        except UnavailableError:
            return None
        return Gpu(library=self._library, handle=handle, uuid=uuid, index=index)


@dataclass(kw_only=True)
class Gpu:
    """One GPU of an open library; what it does not support is asked once."""

    library: Any
    """The library that gave the handle."""
    handle: Any
    """The library's own handle."""
    uuid: str
    """Its identity."""
    index: int
    """The driver's index."""
    _unsupported: set[tuple[Any, ...]] = field(default_factory=set)

    def answer(self, last_seen: LastSeen) -> GpuAnswers:
        """Ask everything; raises NvmlLostError where the library must be started again."""
        samples = self._samples(pynvml.NVML_GPU_UTILIZATION_SAMPLES, last_seen.gpu_us)
        memory_samples = self._samples(pynvml.NVML_MEMORY_UTILIZATION_SAMPLES, last_seen.memory_us)
        rates = None if samples and memory_samples else self._ask("nvmlDeviceGetUtilizationRates")
        memory = self._ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        return GpuAnswers(
            uuid=self.uuid,
            index=self.index,
            model=self._ask("nvmlDeviceGetName"),
            samples=samples,
            memory_samples=memory_samples,
            percent=rates and rates.gpu,
            memory_percent=rates and rates.memory,
            memory_total_bytes=memory and memory.total,
            memory_used_bytes=memory and memory.used,
            memory_reserved_bytes=memory and memory.reserved,
            power_milliwatts=self._ask("nvmlDeviceGetPowerUsage"),
            energy_millijoules=self._ask("nvmlDeviceGetTotalEnergyConsumption"),
            temperature_celsius=self._ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            sm_clock_megahertz=self._ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            memory_clock_megahertz=self._ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
            process_samples=self._process_samples(last_seen.process_us),
            # Last, so that a process with samples is still looked for after they were taken.
            processes=self._processes(),
        )

    def _samples(self, kind: int, last_seen_us: int) -> tuple[Sample, ...] | None:
        def take() -> tuple[Sample, ...]:
            call = ("nvmlDeviceGetSamples", kind)
            value_type, samples = self._ask_once(call, last_seen_us, empty=(None, ()))
            name = _VALUE_FIELDS.get(value_type, "uiVal")
            return tuple(
                Sample(timestamp_us=one.timeStamp, percent=getattr(one.sampleValue, name))
                for one in samples
            )

        return _none_where_absent(take)

    def _process_samples(self, last_seen_us: int) -> tuple[ProcessSample, ...] | None:
        def take() -> tuple[ProcessSample, ...]:
            call = ("nvmlDeviceGetProcessUtilization",)
            return tuple(
                ProcessSample(
                    pid=one.pid,
                    timestamp_us=one.timeStamp,
                    sm_percent=one.smUtil,
                    memory_percent=one.memUtil,
                )
                for one in self._ask_once(call, last_seen_us, empty=())
            )

        return _none_where_absent(take)

    def _processes(self) -> tuple[ListedProcess, ...] | None:
        listed: list[ListedProcess] | None = None
        for kind, call in _LISTS.items():
            try:
                processes = self._ask_once((call,), empty=())
            except _UnsupportedError:
                continue
            except _FailedError:
                return None
            listed = [*(listed or ()), *_listed(processes, kind)]
        return None if listed is None else tuple(listed)

    def _ask(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # as the library has it
        return _none_where_absent(lambda: self._ask_once((name, *arguments)))

    def _ask_once(self, call: tuple[Any, ...], *more: Any, empty: Any = None) -> Any:  # noqa: ANN401  # as the library has it
        """Ask unless it is known to be unsupported; `more` arguments change from call to call."""
        if call in self._unsupported:
            raise _UnsupportedError(call[0])
        name, *arguments = call
        try:
            return _call(self.library, name, self.handle, *arguments, *more, empty=empty)
        except _UnsupportedError:
            self._unsupported.add(call)
            raise


def _listed(processes: Sequence[Any], kind: ProcessKind) -> list[ListedProcess]:
    return [
        ListedProcess(pid=one.pid, kind=kind, memory_bytes=one.usedGpuMemory) for one in processes
    ]


def _none_where_absent(take: Callable[[], T]) -> T | None:
    try:
        return take()
    except (_UnsupportedError, _FailedError):
        return None


def _call(library: Any, name: str, *arguments: Any, empty: Any = None) -> Any:  # noqa: ANN401  # as the library has it
    """Call a function; a list that grew between the library's two calls is asked for again."""
    function = getattr(library, name, None)
    if function is None:
        raise _UnsupportedError(f"{name}: this nvidia-ml-py does not have it")
    for _ in range(_ATTEMPTS):
        try:
            return function(*arguments)
        except pynvml.NVMLLibraryMismatchError as error:
            raise _UnsupportedError(f"{name}: {error}") from error
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                continue
            if empty is not None and error.value in _EMPTY:
                return empty
            raise _translate(name, error) from error
    NVML_ERRORS.labels(call=name, error="InsufficientSize").inc()
    raise _FailedError(f"{name}: its list grew {_ATTEMPTS} times while it was read")


def _translate(name: str, error: Any) -> UnavailableError:  # noqa: ANN401  # pynvml is untyped
    message = f"{name}: {error}"
    if error.value in _UNSUPPORTED and name not in _STARTING:
        return _UnsupportedError(message)
    NVML_ERRORS.labels(call=name, error=type(error).__name__.removeprefix("NVMLError_")).inc()
    if error.value in _LOST or name in _STARTING:
        return NvmlLostError(message)
    return _FailedError(message)
