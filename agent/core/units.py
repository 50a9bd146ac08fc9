"""The driver's units: which values can be true, and how one becomes a number in ours.

The bounds are those of the records (`gpuledger.records.bounds`), so that what is kept can be sent.
Drivers do answer with utilization 4294967295 or memory 2^64-1; no such number may reach the books:
what cannot be true is left out, counted and named.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuledger.records import bounds

_MAX: Final = 2**63 - 1
_MILLION: Final = 1_000_000
_PARTS_PER_PERCENT: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What the driver counts in; ours is `value * times`, as a whole number, or `value / over`."""

    name: str
    """The driver's unit, for people."""
    low: float = 0
    """The least that can be true, in the driver's unit."""
    high: float = _MAX
    """The most that can be true, in the driver's unit."""
    times: int = 1
    """What one of the driver's is in ours."""
    over: int | None = None
    """Of a ratio: how many of the driver's make one of ours."""
    cap: float | None = None
    """The most that ours can be, where the driver's is beyond it by rounding."""
    is_total: bool = False
    """Whether it only rises, until it begins again."""
    max_per_second: int | None = None
    """Of a total: by how much it can rise."""
    wraps: bool = False
    """Of a total: whether a fall may also be the counter's end."""
    choices: Mapping[int, Any] = field(default_factory=dict)
    """Where it is no quantity: what each number means."""


RATIO: Final = Unit(name="%", high=100, over=100)
# Of the speed that the fans are meant to run at most; they may run faster.
FAN_SPEED: Final = Unit(name="%", high=bounds.MAX_FAN_RATIO * 100, over=100)
ACTIVITY: Final = Unit(name="%", high=100.5, over=100, cap=1.0)
CELSIUS: Final = Unit(name="°C", low=bounds.MIN_CELSIUS, high=bounds.MAX_CELSIUS)
MEGAHERTZ: Final = Unit(name="MHz", high=bounds.MAX_HERTZ // 1_000_000, times=1_000_000)
MILLIWATTS: Final = Unit(name="mW", high=bounds.MAX_MILLIWATTS)
MILLIJOULES: Final = Unit(
    name="mJ",
    high=bounds.MAX_MILLIJOULES,
    is_total=True,
    max_per_second=bounds.MAX_MILLIWATTS,
)
MEMORY_BYTES: Final = Unit(name="B", high=bounds.MAX_MEMORY_BYTES)
BITS: Final = Unit(name="bits")
NUMBER: Final = Unit(name="number", high=1 << 16)
COUNT: Final = Unit(name="count")
EVER: Final = Unit(name="count", is_total=True)
NANOSECONDS: Final = Unit(
    # Counters of all the GPU's units may be read an instant apart, so a second more than time.
    name="ns",
    high=bounds.MAX_DURATION_NS,
    is_total=True,
    max_per_second=2_000_000_000,
)
PCIE_BYTES: Final = Unit(name="B", high=1 << 62, is_total=True, max_per_second=1 << 38, wraps=True)
KIBIBYTES: Final = Unit(name="KiB", high=1 << 52, times=1024, is_total=True, max_per_second=1 << 32)
KIBIBYTES_OF_A_LINK: Final = Unit(
    name="KiB", high=1 << 52, times=1024, is_total=True, max_per_second=1 << 28
)
MEBIBYTES_PER_SECOND: Final = Unit(
    name="MiB/s", high=bounds.MAX_BYTES_PER_SECOND >> 20, times=1 << 20
)
FLAG: Final = Unit(name="0 or 1", choices={0: False, 1: True})
PERFORMANCE_STATE: Final = Unit(name="P-state", high=bounds.MAX_PERFORMANCE_STATE)
RECOVERY: Final = Unit(
    name="action",
    choices={
        0: "none",
        1: "reset",
        2: "reboot",
        3: "drain_p2p",
        4: "drain_and_reset",
        5: "recover_imex_domain",
        6: "bus_reset",
        7: "system_reboot",
    },
)
FABRIC_STATE: Final = Unit(
    name="state", choices={0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
)


PERCENT: Final = (0, 100)
MEMORY_LIMITS: Final = (0, bounds.MAX_MEMORY_BYTES)
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
        if not isinstance(value, int | float) or not math.isfinite(value):
            self.drop(reading, "not_a_number")
            return False
        if unit.choices:
            # A newer driver may have a number for something that nobody here knows.
            reason, is_true = "unknown", value in unit.choices
        else:
            reason, is_true = "out_of_range", unit.low <= value <= unit.high
        if not is_true:
            self.drop(reading, reason)
        return is_true


def converter(unit: Unit) -> Callable[[Any], Any]:
    """Return what brings values that can be true into our unit, and the type of their field."""
    times, over, cap = unit.times, unit.over, unit.cap
    # One function for each kind of unit: each is called for some hundred values a tick.
    if unit.choices:
        return unit.choices.__getitem__
    if over is None:
        return lambda value: int(value * times)
    parts = _MILLION / over
    if cap is None:
        return lambda value: int(value * parts + 0.5) / _MILLION
    return lambda value: min(cap, int(value * parts + 0.5) / _MILLION)


def ratio_of(percent: float) -> float:
    """Return a ratio with six digits: a millionth is less than any driver measures."""
    # A fifth of what round() costs, for some hundred ratios a tick.
    return int(percent * _PARTS_PER_PERCENT + 0.5) / _MILLION
