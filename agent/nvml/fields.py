"""The values behind NVML's numbered fields: many in one call, each with a return code of its own.

Whether a value can be true is judged elsewhere.
"""

from typing import Final

import pynvml

_VALUE_NAMES: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def value_name(value_type: int | None) -> str:
    """Give the member of the union that holds a value of this type."""
    return _VALUE_NAMES.get(value_type, "uiVal")
