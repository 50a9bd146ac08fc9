"""OpenCost's fields: the bill's dimensions for each, and its value for a line. Pure.

Requests group allocations by fields, and filters compare their values.
"""

from collections.abc import Mapping
from typing import Final

from gpuledger_reports.pricing.policy import dimension_names, is_dimension
from gpuledger_reports.pricing.tenants import (
    ABSENT,
    HOST,
    IDLE,
    NO_DATA,
    UNALLOCATED,
    UNKNOWN,
    UNRESPONSIVE,
    UNUSED,
)

CONTROLLER_KINDS: Final = {
    "deployment": "Deployment",
    "statefulset": "StatefulSet",
    "daemonset": "DaemonSet",
    "job": "Job",
}
"""OpenCost's names for controllers of one kind."""
WITHOUT_VALUE: Final = ("container", "service")
"""Fields of OpenCost that bills do not have; their value is always `__unallocated__`."""
NO_OWNER: Final = ABSENT | {IDLE, UNUSED, UNRESPONSIVE, HOST, UNALLOCATED, NO_DATA, UNKNOWN}
"""Special values of tenant dimensions that do not name an owner."""
_DIMENSIONS: Final = {
    "controller": ("owner_kind", "owner_name"),
    "controllerKind": ("owner_kind",),
    "controllerName": ("owner_name",),
    **dict.fromkeys(CONTROLLER_KINDS, ("owner_kind", "owner_name")),
}
Values = Mapping[str, str]
"""A line's dimension values, by name."""


def field_names() -> str:
    """Return the names of all fields, separated by commas, for messages."""
    own = [field for field in (*_DIMENSIONS, *WITHOUT_VALUE) if not is_dimension(field)]
    return ", ".join((*own, dimension_names()))


def dimensions_of(field: str) -> tuple[str, ...]:
    """Return the bill's dimensions for a field; empty if it is unknown or never has a value."""
    return _DIMENSIONS.get(field) or ((field,) if is_dimension(field) else ())


def value_of(field: str, values: Values) -> str:
    """Return a line's value of a field, such as a name; `__unallocated__` if it is missing."""
    if field in WITHOUT_VALUE:
        return UNALLOCATED
    kind = values.get("owner_kind", "")
    if field == "controller":
        name = values["owner_name"]
        return UNALLOCATED if NO_OWNER & {kind, name} else f"{kind.lower()}:{name}"
    if field in CONTROLLER_KINDS and kind != CONTROLLER_KINDS[field]:
        return UNALLOCATED
    # All other fields have one dimension, and the last one is the name.
    value = values[_DIMENSIONS.get(field, (field,))[-1]]
    if value in NO_OWNER:
        return UNALLOCATED
    return value.lower() if field == "controllerKind" else value
