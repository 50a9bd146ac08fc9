"""Calls to NVML, and a client for one device that remembers unsupported calls.

NVML's error codes become the errors of `gpuledger_agent.gpu.protocol`; pynvml's exceptions do not
leave this module. A value can be unsupported in three ways: the binding lacks the function, the
driver's library lacks it, or the driver refuses the call. All three raise `UnsupportedError`. A
client remembers an unsupported call by its `Key` and does not repeat the call. Reopening the
library creates new clients, so all calls are tried again. Calls that only failed are repeated in
the next tick.
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
    """A wait for events timed out without an event, as most waits do."""


_ATTEMPTS: Final = 3
_UNSUPPORTED: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        # The struct's version is newer than the driver.
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
NOT_SUPPORTED: Final = "NotSupported"
"""NVML's error name for a call that the device does not support."""
NO_PERMISSION: Final = "NoPermission"
"""NVML's error name for a call that the agent is not permitted to make."""
_STARTING: Final = ("nvmlInit", "nvmlDeviceGetCount")
# Calls that every GPU supports. For these calls, "unknown error" means that the GPU is lost. Some
# drivers always answer certain other calls with this error.
_ESSENTIAL: Final = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
)
_SAMPLES: Final = "nvmlDeviceGetSamples"
_WAITING: Final = "nvmlEventSetWait"
# nvidia-ml-py raises an error with code 0 if the size call of a list succeeds with size 0.
_EMPTY: Final = frozenset({pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND})
# NVML's instance id if MIG is off.
_NO_INSTANCE: Final = 0xFFFFFFFF
_MAX_INT: Final = 2**31 - 1

# Errors that only reinitializing the library can resolve.
_LOST: Final[Mapping[int, type[SourceLostError]]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: LibraryLostError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverNotLoadedError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: LibraryLostError,
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuLostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuLostError,
    pynvml.NVML_ERROR_UNKNOWN: GpuLostError,
}


def none_where_absent(query: Callable[[], T]) -> T | None:
    """Return the result of `query`; `None` if it raises `UnsupportedError` or `FailedError`."""
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
    """Call the library's function with the same name as `function`, and return the answer.

    Raises `SourceLostError`, `UnsupportedError` or `FailedError`.
    """
    return cast("T", call_by_name(library, function.__name__, *arguments, **named))


def list_nvml(
    library: object,
    empty: T,
    function: Callable[Concatenate[NvmlLibrary, P], T],
    *arguments: P.args,
    **named: P.kwargs,
) -> T:
    """Call a function that returns a list, like `call_nvml`; return `empty` for an empty list."""
    return cast("T", call_by_name(library, function.__name__, *arguments, empty=empty, **named))


def call_by_name(library: object, name: str, *arguments: object, empty: object = None) -> object:
    """Call the library's function with this name, and return the answer.

    The binding reads a list with two driver calls. If the list grows in between, the function is
    called again. If `empty` is given, it is returned for an empty list. Raises `SourceLostError`,
    `UnsupportedError` or `FailedError`.
    """
    # Looked up at each call: which functions exist depends on the binding, not on the driver.
    function = getattr(library, name, None)
    if function is None:
        raise UnsupportedError(f"{name}: not available in this version of nvidia-ml-py")
    for _ in range(_ATTEMPTS):
        try:
            answer: object = function(*arguments)
        except pynvml.NVMLLibraryMismatchError as error:
            # If the binding is newer than the driver's library, it raises this before the call.
            raise UnsupportedError(f"{name}: {error}") from error
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                continue  # the list grew after the binding had queried its size
            if empty is not None and error.value in _EMPTY:
                return empty
            raise _translate(name, error) from error
        except UnicodeDecodeError as error:
            NVML_ERRORS.labels(call=name, error="NotText").inc()
            raise FailedError(f"{name}: invalid text from the driver") from error
        return answer
    NVML_ERRORS.labels(call=name, error="InsufficientSize").inc()
    raise FailedError(f"{name}: the list grew during each of {_ATTEMPTS} attempts to read it")


def _translate(name: str, error: pynvml.NVMLError) -> UnavailableError:
    message = f"{name}: {error}"
    if error.value == pynvml.NVML_ERROR_TIMEOUT and name.startswith(_WAITING):
        return NothingHappenedError(message)
    # A refusal of one of the first calls means that the driver does not work.
    if error.value in _UNSUPPORTED and name not in _STARTING:
        return UnsupportedError(message)
    NVML_ERRORS.labels(call=name, error=error_name(error)).inc()
    if error.value == pynvml.NVML_ERROR_UNKNOWN and name not in (*_STARTING, *_ESSENTIAL):
        return FailedError(message)
    lost = _LOST.get(error.value)
    # Before the library is initialized there are no GPUs, so no error can concern a single GPU.
    if name in _STARTING:
        return (DriverNotLoadedError if lost is DriverNotLoadedError else LibraryLostError)(message)
    return (lost or FailedError)(message)


Key = tuple[object, ...]
"""Identifies a query: the function's name, and those arguments after the handle that determine
whether the device supports the call."""


@dataclass(kw_only=True)
class DeviceClient:
    """Queries one device of an open library: a GPU or a MIG instance.

    Each query returns `None` if there is no answer, and raises `SourceLostError` if the library or
    the GPU is lost. `is_unsupported` returns whether the device never answers the query with a
    given key.
    """

    library: object
    """The library that returned the handle."""
    handle: object
    """The library's handle of the device."""
    outcomes: dict[Key, str | None] = field(default_factory=dict)
    """The outcome of each query, by key: `None` if it was answered, otherwise the driver's reason
    for which it is unsupported."""
    support_version: int = 0
    """Increases whenever the set of unsupported queries changes."""

    def query(
        self,
        function: Callable[Concatenate[NvmlLibrary, object, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T | None:
        """Return the answer of a function; `None` if there is no answer.

        If the call is unsupported, only calls with the same arguments count as unsupported.
        """
        return cast("T | None", self.query_key((function.__name__, *arguments), **named))

    def query_varying(
        self,
        function: Callable[Concatenate[NvmlLibrary, object, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T | None:
        """Return the answer of a function; `None` if there is no answer.

        If the call is unsupported, calls of the function with any arguments count as unsupported.
        """
        return cast("T | None", self.query_key((function.__name__,), *arguments, **named))

    def query_list(
        self,
        empty: T,
        function: Callable[Concatenate[NvmlLibrary, object, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T | None:
        """Return a list as `query_varying` does; return `empty` if the list is empty."""
        return cast(
            "T | None", self.query_key((function.__name__,), *arguments, empty=empty, **named)
        )

    def query_samples(self, kind: int, since_us: int) -> tuple[int | None, Sequence[object]] | None:
        """Return the type of a ring buffer's values, and its samples after `since_us`.

        Return `None` if there is no answer. If there are no samples, the type is `None`. If a
        `kind` of ring buffer is unsupported, it is not queried again.
        """
        answer = self.query_key((_SAMPLES, kind), since_us, empty=(None, ()))
        return cast("tuple[int | None, Sequence[object]] | None", answer)

    def fill(self, name: str, struct: str) -> object | None:
        """Call a function that fills a struct of pynvml; return the struct.

        `struct` is the struct's name. Return `None` if there is no answer.
        """
        if self.is_unsupported((name,)):
            return None
        filled: Structure = getattr(pynvml, struct)()
        return self.query_key((name,), byref(filled), fills=filled)

    def query_key(
        self, key: Key, *varying: object, empty: object = None, fills: object = None
    ) -> object | None:
        """Call the function that the key names, and return its answer; `None` if there is none.

        The function gets the key's arguments and the `varying` arguments, which are not part of the
        key. If the call fills a struct, pass the struct as `fills`: it is returned instead of the
        call's result. Raises `SourceLostError`.
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
        """A value that changes whenever `outcomes` changes.

        The number of outcomes and the support version are enough, because an outcome can change
        only from answered to unsupported.
        """
        return len(self.outcomes), self.support_version

    def is_unsupported(self, key: Key) -> bool:
        """Return whether the device is known not to support the query with this key."""
        return self.outcomes.get(key) is not None

    def mark_unsupported(self, key: Key, reason: str) -> None:
        """Remember that the device does not support the query with this key, for this reason."""
        self.support_version += 1
        self.outcomes[key] = reason

    def merge_refusals(self, parts: Sequence[Key], whole: Key) -> None:
        """If all queries in `parts` are unsupported, mark only the query `whole` as unsupported.

        This saves memory.
        """
        if all(map(self.is_unsupported, parts)):
            reasons = [self.outcomes.pop(part) for part in parts]
            self.mark_unsupported(whole, reasons[0] or "")

    def forget(self) -> None:
        """Forget all outcomes, so that all calls are tried again.

        Call it if the supported calls may have changed, for example if MIG was turned on or off.
        """
        self.support_version += 1
        self.outcomes.clear()


def reason_of(error: UnavailableError) -> str:
    """Return the name of the NVML error that is the cause of `error`, such as `NotSupported`.

    Return `FunctionNotFound` if the cause is not an NVML error.
    """
    cause = error.__cause__
    return error_name(cause) if isinstance(cause, pynvml.NVMLError) else "FunctionNotFound"


def error_name(error: pynvml.NVMLError) -> str:
    """Return NVML's name of an error, such as `NotSupported`."""
    return type(error).__name__.removeprefix("NVMLError_")


def instance_id(number: int) -> int | None:
    """Return a GPU or compute instance id; `None` if it is NVML's value for no instance."""
    return None if number == _NO_INSTANCE else number


def small_number(number: int | None) -> int | None:
    """Return an id or a count; `None` if the value cannot be an id or a count.

    NVML reports an unknown number as the greatest number of its type.
    """
    return number if number is not None and 0 <= number <= _MAX_INT else None


raw_getattr: Final[Any] = object.__getattribute__
"""`getattr` for struct members other than text.

The binding's attribute access decodes text. Even for a number, this takes longer than the driver
call that returned the number.
"""
