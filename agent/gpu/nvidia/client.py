"""One call of the library: its error codes become ours, and a list that grew is asked for again.

Here live the driver's names of errors; its exceptions go no further than this module.
"""

from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import pynvml

from agent.gpu.source import (
    DriverNotLoadedError,
    FailedError,
    GpuLostError,
    LibraryLostError,
    NothingHappenedError,
    SourceLostError,
    UnsupportedError,
)
from agent.metrics import NVML_ERRORS
from gpuledger.errors import UnavailableError

T = TypeVar("T")

_ATTEMPTS: Final = 3
_UNSUPPORTED: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        # A struct that is newer than the driver.
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
_STARTING: Final = ("nvmlInit", "nvmlDeviceGetCount")
# Some drivers answer a single call with "unknown error" for ever. Only of a call that every GPU
# can answer does it say that the GPU is lost.
_TELLING: Final = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
)
_WAITING: Final = "nvmlEventSetWait"
# nvidia-ml-py raises an "error" of value 0 where the size call of a list succeeds with nothing.
_EMPTY: Final = frozenset({pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND})


# After these only a new start of the library helps.
_LOST: Final[Mapping[int, type[SourceLostError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: LibraryLostError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverNotLoadedError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: LibraryLostError,
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuLostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuLostError,
    pynvml.NVML_ERROR_UNKNOWN: GpuLostError,
}


def none_where_absent(take: Callable[[], T]) -> T | None:
    """Return what `take` gives, or `None` where the driver does not give it, now or ever."""
    try:
        return take()
    except (UnsupportedError, FailedError):
        return None


def call_nvml(library: Any, name: str, *arguments: Any, empty: Any = None) -> Any:  # noqa: ANN401  # as the library has it
    """Call a function; a list that grew between the library's two calls is asked for again."""
    function = getattr(library, name, None)
    if function is None:
        raise UnsupportedError(f"{name}: this nvidia-ml-py does not have it")
    for _ in range(_ATTEMPTS):
        try:
            return function(*arguments)
        except pynvml.NVMLLibraryMismatchError as error:
            raise UnsupportedError(f"{name}: {error}") from error
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                continue
            if empty is not None and error.value in _EMPTY:
                return empty
            raise _translate(name, error) from error
        except UnicodeDecodeError as error:
            NVML_ERRORS.labels(call=name, error="NotText").inc()
            raise FailedError(f"{name}: what the driver wrote is no text") from error
    NVML_ERRORS.labels(call=name, error="InsufficientSize").inc()
    raise FailedError(f"{name}: its list grew {_ATTEMPTS} times while it was read")


def _translate(name: str, error: Any) -> UnavailableError:  # noqa: ANN401  # pynvml is untyped
    message = f"{name}: {error}"
    if error.value == pynvml.NVML_ERROR_TIMEOUT and name.startswith(_WAITING):
        return NothingHappenedError(message)
    if error.value in _UNSUPPORTED and name not in _STARTING:
        return UnsupportedError(message)
    NVML_ERRORS.labels(call=name, error=type(error).__name__.removeprefix("NVMLError_")).inc()
    if error.value == pynvml.NVML_ERROR_UNKNOWN and name not in (*_STARTING, *_TELLING):
        return FailedError(message)
    lost = _LOST.get(error.value)
    if name in _STARTING:
        return (DriverNotLoadedError if lost is DriverNotLoadedError else LibraryLostError)(message)
    return (lost or FailedError)(message)


Key = tuple[Any, ...]
"""A function's name and the arguments behind the handle that never change."""


@dataclass(kw_only=True)
class DeviceClient:
    """Asks one device of an open library."""

    library: Any
    """The library that gave the handle."""
    handle: Any
    """The library's own handle."""
    outcomes: dict[Key, str | None] = field(default_factory=dict)
    """What was asked so far, with the driver's reason where it is not supported."""
    refusals: int = 0
    """Changes whenever what is refused does."""

    def ask(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # as the library has it
        """Return the answer, or `None` where there is none; raises SourceLostError."""
        if self.is_refused((name, *arguments)):
            return None
        try:
            return self.insist((name, *arguments))
        except (UnsupportedError, FailedError):
            return None

    def fill(self, name: str, struct: str) -> Any:  # noqa: ANN401  # as the library has it
        """Return the struct that the function filled, or `None`; raises SourceLostError."""
        if self.is_refused((name,)):
            return None
        filled = getattr(pynvml, struct)()
        try:
            self.insist((name,), byref(filled))
        except (UnsupportedError, FailedError):
            return None
        return filled

    def insist(self, key: Key, *more: Any, empty: Any = None) -> Any:  # noqa: ANN401  # as the library has it
        """Return the answer; `more` arguments change from call to call.

        Raises UnsupportedError (at once where that is known), FailedError and SourceLostError.
        """
        reason = self.outcomes.get(key)
        if reason is not None:
            raise UnsupportedError(f"{key[0]}: {reason}")
        name, *arguments = key
        try:
            answer = call_nvml(self.library, name, self.handle, *arguments, *more, empty=empty)
        except UnsupportedError as error:
            self.refuse(key, reason_of(error))
            raise
        self.outcomes[key] = None
        return answer

    def is_refused(self, key: Key) -> bool:
        """Whether the device is known not to support it."""
        return self.outcomes.get(key) is not None

    def refuse(self, key: Key, reason: str) -> None:
        """Remember that the device does not support it."""
        self.refusals += 1
        self.outcomes[key] = reason

    def forget(self) -> None:
        """Probe everything again: what is supported has changed, as it does with MIG."""
        self.refusals += 1
        self.outcomes.clear()


def reason_of(error: UnavailableError) -> str:
    """Return the driver's name of a refusal, such as `NotSupported`."""
    cause = error.__cause__
    if isinstance(cause, pynvml.NVMLError):
        return type(cause).__name__.removeprefix("NVMLError_")
    return "FunctionNotFound"


peek: Final[Any] = object.__getattribute__
"""`getattr` for members that are no text.

The binding's own attribute access decodes text, and for a number costs more than the call of the
driver that it came from.
"""
