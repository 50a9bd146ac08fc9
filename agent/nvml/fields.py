"""The values behind NVML's numbered fields: many in one call, each with a return code of its own.

Whether a value can be true is judged elsewhere.
"""

from collections.abc import Sequence
from typing import Any, Final

import pynvml

from agent.metrics import NVML_ERRORS
from agent.nvml.asking import Asker
from agent.nvml.calls import FailedError, GpuLostError, UnsupportedError
from agent.nvml.questions import FieldValue

_CALL: Final = "nvmlDeviceGetFieldValues"
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
    """Give the member of the union that holds a value of this type."""
    return _VALUE_NAMES.get(value_type, "uiVal")


def ask_fields(asker: Asker, wanted: Sequence[tuple[str, FieldValue]]) -> dict[str, Any]:
    """Give the fields that the driver gives, by our names, in one call; raises NvmlLostError."""
    asked = [one for one in wanted if not asker.is_refused(one[1].key)]
    try:
        return _ask_together(asker, asked)
    except UnsupportedError:
        return {}
    except FailedError:
        if all(field.key in asker.outcomes for _, field in asked):
            return {}
    # One number that is unknown to the driver may have cost all: each must be tried alone, once.
    return _ask_apart(asker, asked)


def _ask_together(asker: Asker, asked: Sequence[tuple[str, FieldValue]]) -> dict[str, Any]:
    numbers = [(field.number, field.scope) for _, field in asked]
    given = {}
    values = asker.insist((_CALL,), numbers) if numbers else ()
    for (name, field), value in zip(asked, values, strict=False):
        if check_code(asker, field.key, value.nvmlReturn):
            given[name] = getattr(value.value, value_name(value.valueType))
    return given


def _ask_apart(asker: Asker, asked: Sequence[tuple[str, FieldValue]]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for one in asked:
        try:
            given |= _ask_together(asker, [one])
        except FailedError as error:
            asker.refuse(one[1].key, _name_of(getattr(error.__cause__, "value", 0)))
    return given


def check_code(asker: Asker, key: tuple[Any, ...], code: int) -> bool:
    """Tell whether a code inside a successful answer is success; raises NvmlLostError."""
    if code == pynvml.NVML_SUCCESS:
        asker.outcomes[key] = None
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
