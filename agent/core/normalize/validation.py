"""Which values of the driver can be true: what cannot be is left out, counted and named.

The bounds are those of the records (`gpuledger.records.bounds`), so that what is kept can be sent.
Drivers do answer with utilization 4294967295 or memory 2^64-1; no such number may reach the books.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from agent.core.units import Unit
from gpuledger.records import bounds

PERCENT: Final = (0, 100)
MEMORY_BYTES: Final = (0, bounds.MAX_MEMORY_BYTES)
PID: Final = (1, bounds.MAX_PID)
TIMESTAMP_US: Final = (0, 1 << 62)


class Validator:
    """Keeps what can be true and counts, by reading and reason, what cannot."""

    def __init__(self) -> None:
        self.dropped: Counter[tuple[str, str]] = Counter()

    def drop(self, reading: str, reason: str) -> None:
        """Count a value that is left out."""
        self.dropped[reading, reason] += 1

    def keep(self, value: int | None, limits: tuple[int, int], *, reading: str) -> int | None:
        """Return the value, or `None` where it was absent or lies outside the limits."""
        if value is None or limits[0] <= value <= limits[1]:
            return value
        self.drop(reading, "out_of_range")
        return None

    def is_plausible(self, value: Any, unit: Unit, *, reading: str) -> bool:  # noqa: ANN401  # whatever the driver says
        """Return whether a value can be true by its unit alone; an absent one is not counted."""
        if value is None:
            return False
        reason = _reason_against(value, unit)
        if reason:
            self.drop(reading, reason)
        return reason is None


def _reason_against(value: Any, unit: Unit) -> str | None:  # noqa: ANN401  # whatever the driver says
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "not_a_number"
    if unit.choices:
        return None if value in unit.choices else "unknown"
    return None if unit.low <= value <= unit.high else "out_of_range"


def converter(unit: Unit) -> Callable[[Any], Any]:
    """Return what brings values that can be true into our unit, and the type of their field."""
    times, over, cap = unit.times, unit.over or 1, unit.cap
    # One function for each kind of unit: each is called for some hundred values a tick.
    if unit.choices:
        return unit.choices.__getitem__
    if cap is not None:
        return lambda value: min(cap, value * times / over)
    if unit.over is not None:
        return lambda value: value * times / over
    return lambda value: int(value) * times
