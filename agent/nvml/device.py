"""Questions to one device, a GPU or a MIG instance: what it does not support is asked once.

Here lives what is remembered of a device's answers and refusals. Which questions there are lives
elsewhere. A new start of the library makes new askers, so everything is probed again.
"""

from ctypes import byref
from dataclasses import dataclass, field
from typing import Any

import pynvml

from agent.nvml.calls import FailedError, UnsupportedError, call_nvml
from gpuledger.errors import UnavailableError

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
        """Return the answer, or `None` where there is none; raises NvmlLostError."""
        if self.is_refused((name, *arguments)):
            return None
        try:
            return self.insist((name, *arguments))
        except (UnsupportedError, FailedError):
            return None

    def fill(self, name: str, struct: str) -> Any:  # noqa: ANN401  # as the library has it
        """Return the struct that the function filled, or `None`; raises NvmlLostError."""
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

        Raises UnsupportedError where it is known to be unsupported, FailedError and NvmlLostError.
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
