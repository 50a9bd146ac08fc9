"""Calls of the library, and of one device of it.

The library's error codes become the errors of the seam (`gpuledger_agent.gpu.protocol`), and its exceptions
go no further than this module. A driver says in three ways that it does not give something: the
binding lacks the function, the driver's library lacks it, or the call is refused. All of them are
`UnsupportedError`; a device is queried once, and what it does not support is remembered by its
`Key`. Opening the library again makes new clients, so everything is probed again. What failed is
queried again at the next tick.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, byref
from dataclasses import dataclass, field
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import pynvml

from gpuledger.errors import UnavailableError
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.protocol import (
    DriverNotLoadedError,
    FailedError,
    GpuLostError,
    LibraryLostError,
    SourceLostError,
    UnsupportedError,
)
from gpuledger_agent.metrics import NVML_ERRORS

P = ParamSpec("P")
T = TypeVar("T")


class NothingHappenedError(FailedError):
    """A wait for events ended without an event, as most do."""


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
NOT_SUPPORTED: Final = "NotSupported"
"""The driver's name of the refusal of what the device does not have."""
NO_PERMISSION: Final = "NoPermission"
"""The same of what the agent has no right to."""
_STARTING: Final = ("nvmlInit", "nvmlDeviceGetCount")
# Some drivers answer a single call with "unknown error" for ever. Only of a call that every GPU
# can answer does it say that the GPU is lost.
_ESSENTIAL: Final = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
)
_SAMPLES: Final = "nvmlDeviceGetSamples"
_WAITING: Final = "nvmlEventSetWait"
# nvidia-ml-py raises an "error" of value 0 where the size call of a list succeeds with nothing.
_EMPTY: Final = frozenset({pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND})
# What stands in place of an id where MIG is off.
_NO_INSTANCE: Final = 0xFFFFFFFF
_MAX_INT: Final = 2**31 - 1

# After these only a new start of the library helps.
_LOST: Final[Mapping[int, type[SourceLostError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: LibraryLostError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverNotLoadedError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: LibraryLostError,
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuLostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuLostError,
    pynvml.NVML_ERROR_UNKNOWN: GpuLostError,
}


def none_where_absent(query: Callable[[], T]) -> T | None:
    """Return what a query returns, or `None` where the driver does not give it, now or ever."""
    try:
        return query()
    except (UnsupportedError, FailedError):
        return None


def call_nvml(
    library: object,
    function: Callable[Concatenate[NvmlLibrary, P], T],
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """Call the library's own function; raises SourceLostError, UnsupportedError, FailedError."""
    return cast("T", call_by_name(library, function.__name__, *arguments, **named))


def list_nvml(
    library: object,
    empty: T,
    function: Callable[Concatenate[NvmlLibrary, P], T],
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """As `call_nvml`; `empty` is the answer where the library has nothing to list."""
    return cast("T", call_by_name(library, function.__name__, *arguments, empty=empty, **named))


def call_by_name(library: object, name: str, *arguments: object, empty: object = None) -> object:
    """Call a function; a list that grew between the library's two calls is queried again."""
    # Looked up at each call: which functions there are depends on the binding, not on the driver.
    function = getattr(library, name, None)
    if function is None:
        raise UnsupportedError(f"{name}: this nvidia-ml-py does not have it")
    for _ in range(_ATTEMPTS):
        try:
            answer: object = function(*arguments)
        except pynvml.NVMLLibraryMismatchError as error:
            # The binding raises it where it is newer than the library, before it calls anything.
            raise UnsupportedError(f"{name}: {error}") from error
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                continue  # the binding asked for the size, and then for a list that is longer
            if empty is not None and error.value in _EMPTY:
                return empty
            raise _translate(name, error) from error
        except UnicodeDecodeError as error:
            NVML_ERRORS.labels(call=name, error="NotText").inc()
            raise FailedError(f"{name}: what the driver wrote is no text") from error
        return answer
    NVML_ERRORS.labels(call=name, error="InsufficientSize").inc()
    raise FailedError(f"{name}: its list grew {_ATTEMPTS} times while it was read")


def _translate(name: str, error: pynvml.NVMLError) -> UnavailableError:
    message = f"{name}: {error}"
    if error.value == pynvml.NVML_ERROR_TIMEOUT and name.startswith(_WAITING):
        return NothingHappenedError(message)
    # Of the first calls a refusal means that there is no driver to speak of.
    if error.value in _UNSUPPORTED and name not in _STARTING:
        return UnsupportedError(message)
    NVML_ERRORS.labels(call=name, error=error_name(error)).inc()
    if error.value == pynvml.NVML_ERROR_UNKNOWN and name not in (*_STARTING, *_ESSENTIAL):
        return FailedError(message)
    lost = _LOST.get(error.value)
    # Without a start there are no GPUs, so whatever it says it cannot be of one of them.
    if name in _STARTING:
        return (DriverNotLoadedError if lost is DriverNotLoadedError else LibraryLostError)(message)
    return (lost or FailedError)(message)


Key = tuple[object, ...]
"""A function's name and the arguments behind the handle that never change."""


@dataclass(kw_only=True)
class DeviceClient:
    """Queries one device of an open library, a GPU or a MIG instance.

    Each query returns `None` where there is no answer, and raises SourceLostError. Where it makes a
    difference whether that is for now or for good, `is_unsupported` says it of the query's key: the
    function's name, and the arguments by which a refusal is remembered.
    """

    library: object
    """The library that gave the handle."""
    handle: object
    """The library's own handle."""
    outcomes: dict[Key, str | None] = field(default_factory=dict)
    """What was queried so far, with the driver's reason where it is not supported."""
    support_version: int = 0
    """Changes whenever what is unsupported does."""

    def query(
        self,
        function: Callable[Concatenate[NvmlLibrary, object, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T | None:
        """Return the answer; a refusal is remembered of the function with these arguments."""
        return cast("T | None", self.query_key((function.__name__, *arguments), **named))

    def query_varying(
        self,
        function: Callable[Concatenate[NvmlLibrary, object, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T | None:
        """Return the answer; a refusal is remembered of the function, whatever the arguments."""
        return cast("T | None", self.query_key((function.__name__,), *arguments, **named))

    def query_list(
        self,
        empty: T,
        function: Callable[Concatenate[NvmlLibrary, object, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T | None:
        """As `query_varying`; `empty` is the answer where there is nothing to list."""
        return cast(
            "T | None", self.query_key((function.__name__,), *arguments, empty=empty, **named)
        )

    def query_samples(self, kind: int, since_us: int) -> tuple[int | None, Sequence[object]] | None:
        """Return the samples of a ring buffer and their type; one kind may be refused alone."""
        answer = self.query_key((_SAMPLES, kind), since_us, empty=(None, ()))
        return cast("tuple[int | None, Sequence[object]] | None", answer)

    def fill(self, name: str, struct: str) -> object | None:
        """Return the struct that the function filled."""
        if self.is_unsupported((name,)):
            return None
        filled: Structure = getattr(pynvml, struct)()
        return self.query_key((name,), byref(filled), fills=filled)

    def query_key(
        self, key: Key, *varying: object, empty: object = None, fills: object = None
    ) -> object | None:
        """Return the answer to a call; `varying` arguments are no part of what is remembered.

        Where the call fills a struct, that is the answer, whatever the call returns.
        """
        if self.is_unsupported(key):
            return None
        name, *arguments = key
        try:
            answer = call_by_name(
                self.library, str(name), self.handle, *arguments, *varying, empty=empty
            )
        except UnsupportedError as error:
            self.mark_unsupported(key, reason_of(error))
            return None
        except FailedError:
            return None
        self.outcomes[key] = None
        return answer if fills is None else fills

    @property
    def outcomes_version(self) -> tuple[int, int]:
        """What changes whenever the outcomes do: what was answered once is only refused later."""
        return len(self.outcomes), self.support_version

    def is_unsupported(self, key: Key) -> bool:
        """Return whether the device is known not to support it."""
        return self.outcomes.get(key) is not None

    def mark_unsupported(self, key: Key, reason: str) -> None:
        """Remember that the device does not support it."""
        self.support_version += 1
        self.outcomes[key] = reason

    def merge_refusals(self, parts: Sequence[Key], whole: Key) -> None:
        """Remember as one refusal what was refused of each part, if of each it was."""
        if all(map(self.is_unsupported, parts)):
            reasons = [self.outcomes.pop(part) for part in parts]
            self.mark_unsupported(whole, reasons[0] or "")

    def forget(self) -> None:
        """Probe everything again: what is supported has changed, as it does with MIG."""
        self.support_version += 1
        self.outcomes.clear()


def reason_of(error: UnavailableError) -> str:
    """Return the driver's name of a refusal, such as `NotSupported`."""
    cause = error.__cause__
    # Without a cause, or with the binding's own, it is the function that is missing.
    return error_name(cause) if isinstance(cause, pynvml.NVMLError) else "FunctionNotFound"


def error_name(error: pynvml.NVMLError) -> str:
    """Return NVML's name of an error, such as `NotSupported`."""
    return type(error).__name__.removeprefix("NVMLError_")


def instance_id(number: int) -> int | None:
    """Return an id of a GPU or compute instance, `None` for NVML's number of none."""
    return None if number == _NO_INSTANCE else number


def small_number(number: int | None) -> int | None:
    """Return an id or a count where the value can be one.

    NVML's greatest number stands for an unknown one.
    """
    return number if number is not None and 0 <= number <= _MAX_INT else None


raw_getattr: Final[Any] = object.__getattribute__
"""`getattr` for members that are no text.

The binding's own attribute access decodes text, and for a number costs more than the call of the
driver that it came from.
"""
