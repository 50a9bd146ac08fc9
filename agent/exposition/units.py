"""How a value of a record becomes a number of DCGM's: MiB, percent, MHz, mJ, ns. Pure."""

from collections.abc import Callable
from typing import Any, Final

_RECOVERY_CODES: Final = {
    "none": 0,
    "reset": 1,
    "reboot": 2,
    "drain_p2p": 3,
    "drain_and_reset": 4,
}
Converted = float | str | None
Unit = Callable[[Any], Converted]


def unit_of(name: str) -> Unit:
    """Return the conversion that a table names; raises KeyError where there is none."""
    kind, _, number = name.partition(" ")
    if kind == "link":
        return _link(number)
    return _item(int(number)) if kind == "item" else UNITS[name]


def _link(number: str) -> Unit:
    return lambda values: values.get(number)


def _item(place: int) -> Unit:
    return lambda values: values[place] if place < len(values) else None


UNITS: Final[dict[str, Unit]] = {
    "": lambda value: int(value) if isinstance(value, bool) else value,
    "MiB": lambda value: value // (1 << 20),
    "%": lambda value: round(value * 100, 4),
    "MHz": lambda value: value // 1_000_000,
    "mJ": lambda value: round(value * 1e3),
    "ns": lambda value: round(value * 1e9),
    "recovery": _RECOVERY_CODES.get,
    "text": str,
    "several": lambda value: value,
}
