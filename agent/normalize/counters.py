"""Counters over time: whether one fell, wrapped, or rose by more than it can. Pure.

A counter that fell has begun again. One that leapt is not believed until it goes on from there.
How much one can rise is by the time since it was read, as not every counter is read in each tick.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from agent.core.units import Unit

# Of 32 bits, or of 32 bits in KiB.
_WIDTHS: Final = (1 << 32, 1 << 42)
_NS_PER_SECOND: Final = 1_000_000_000
# The driver's clock and ours are apart.
_SLACK_NS: Final = 1_000_000_000


class Total(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of one counter, in the driver's unit.

    One is made for each counter that is read: a struct, as it is cheap to make.
    """

    value: int
    """The last value that was believed."""
    read_ns: int
    """When it was read, by the monotonic clock."""
    wrapped: int = 0
    """What its wraps have added so far."""
    suspect: "Total | None" = None
    """What was read since and is not believed."""


Totals = Mapping[str, Total]


@dataclass
class CounterTracker:
    """The counters of one GPU in one tick."""

    before: Totals
    """What is remembered of the ticks before."""
    now_ns: int
    """When they are read, by the monotonic clock."""
    after: dict[str, Total] = field(default_factory=dict)
    """What is to be remembered."""
    fell: list[str] = field(default_factory=list)
    """Those that have begun again."""

    def __post_init__(self) -> None:
        self.after.update(self.before)

    def enter(self, name: str, value: int, unit: Unit) -> int | None:
        """Return the counter's value, its wraps added; `None` where it is not believed yet."""
        was = self.before.get(name)
        if was is None:
            self.after[name] = Total(value, self.now_ns)
            return value
        if value < was.value:
            return self._fallen(name, value, was, unit)
        if value != was.value and not self._goes_on(was, value, unit):
            self.after[name] = msgspec.structs.replace(was, suspect=Total(value, self.now_ns))
            return None
        self.after[name] = Total(value, self.now_ns, was.wrapped)
        return value + was.wrapped

    def _goes_on(self, was: Total, value: int, unit: Unit) -> bool:
        """Return whether it rose by no more than it can, even from what was not believed before."""
        if self._can_rise(value - was.value, was, unit):
            return True
        suspect = was.suspect
        return suspect is not None and self._can_rise(value - suspect.value, suspect, unit)

    def _can_rise(self, risen: int, since: Total, unit: Unit) -> bool:
        if unit.max_per_second is None:
            return True
        most = unit.max_per_second * (self.now_ns - since.read_ns + _SLACK_NS) // _NS_PER_SECOND
        return 0 <= risen <= most

    def _fallen(self, name: str, value: int, was: Total, unit: Unit) -> int:
        width = next((width for width in _WIDTHS if was.value < width), 0)
        risen = width - was.value + value
        # Where another one has begun again, so has this one.
        if unit.wraps and width and not self.fell and self._can_rise(risen, was, unit):
            self.after[name] = Total(value, self.now_ns, was.wrapped + width)
            return value + was.wrapped + width
        self.after[name] = Total(value, self.now_ns)
        self.fell.append(name)
        return value
