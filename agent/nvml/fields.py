"""The values behind NVML's numbered fields: many in one call, each with a return code of its own.

Whether a value can be true is judged elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import pynvml

from agent.metrics import NVML_ERRORS
from agent.nvml.calls import FailedError, GpuLostError, UnsupportedError, call_nvml
from agent.nvml.device import DeviceClient, reason_of
from agent.nvml.metric_specs import FieldValue
from agent.nvml.structs import peek
from gpuledger.errors import UnavailableError

_Key = tuple[Any, ...]
Name = str | tuple[str, int]
"""Ours of a field, with the link's number where it is of one link."""
_CALL: Final = "nvmlDeviceGetFieldValues"
_SUCCESS: Final = pynvml.NVML_SUCCESS
_VALUE_NAMES: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}
# A number that an older driver does not know is an invalid argument to it.
_REFUSALS: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
_LOST: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})


def value_name(value_type: int | None) -> str:
    """Return the member of the union that holds a value of this type."""
    return _VALUE_NAMES.get(value_type, "uiVal")


class FieldBatch:
    """Fields that are asked together."""

    def __init__(self, asker: DeviceClient, wanted: Sequence[tuple[Name, FieldValue]]) -> None:
        """`wanted` are fields by our names."""
        self._asker = asker
        self._wanted = [(name, field.key) for name, field in wanted]
        self._numbers = [(field.number, field.scope) for _, field in wanted]

    def ask(self) -> dict[Name, Any]:
        """Return those that the driver gives; raises NvmlLostError."""
        if not self._numbers or self._asker.is_refused((_CALL,)):
            return {}
        try:
            given = self._ask(self._wanted, self._numbers)
        except UnsupportedError as error:
            self._asker.refuse((_CALL,), reason_of(error))
            return {}
        except FailedError:
            if all(key in self._asker.outcomes for _, key in self._wanted):
                return {}
            # One number that is unknown to the driver may have cost all: each is tried alone, once.
            return self.ask_apart()
        self._asker.outcomes[_CALL,] = None
        return given

    def ask_apart(self) -> dict[Name, Any]:
        """Try each in a call of its own, whose refusal is its own; raises NvmlLostError."""
        given: dict[Name, Any] = {}
        for one, number in zip(self._wanted, self._numbers, strict=True):
            try:
                given |= self._ask([one], [number])
            except (UnsupportedError, FailedError) as error:
                refuse_alone(self._asker, one[1], error)
        return given

    def _ask(
        self, wanted: Sequence[tuple[Name, _Key]], numbers: Sequence[tuple[int, int]]
    ) -> dict[Name, Any]:
        given = {}
        values = call_nvml(self._asker.library, _CALL, self._asker.handle, numbers)
        for (name, key), value in zip(wanted, values, strict=False):
            if check_code(self._asker, key, peek(value, "nvmlReturn")):
                member = value_name(peek(value, "valueType"))
                given[name] = getattr(peek(value, "value"), member)
        return given


def refuse_alone(asker: DeviceClient, key: _Key, error: UnavailableError) -> None:
    """Remember that one of many was refused, asked alone; what only failed may come yet."""
    code = getattr(error.__cause__, "value", None)
    if code in _REFUSALS:
        asker.refuse(key, reason_of(error))


def check_code(asker: DeviceClient, key: _Key, code: int) -> bool:
    """Return whether a code inside a successful answer is success; raises NvmlLostError."""
    if code == _SUCCESS:
        asker.outcomes.setdefault(key, None)
        return True
    label = ":".join(map(str, key))
    if code in _LOST:
        raise GpuLostError(f"{label}: {_name_of(code)}")
    if code in _REFUSALS:
        asker.refuse(key, _name_of(code))
    else:
        NVML_ERRORS.labels(call=label, error=_name_of(code)).inc()
    return False


def _name_of(code: int) -> str:
    return type(pynvml.NVMLError(code)).__name__.removeprefix("NVMLError_")
