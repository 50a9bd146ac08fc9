"""Counters over time: whether one fell, wrapped, or rose by more than it can. Pure.

A counter that fell has begun again. One that leapt is not believed until it goes on from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from agent.nvml.questions import Unit

# Of 32 bits, or of 32 bits in KiB.
_WIDTHS: Final = (1 << 32, 1 << 42)


@dataclass(frozen=True, kw_only=True)
class Total:
    """What is remembered of one counter, in the driver's unit."""

    value: int
    """The last value that was believed."""
    suspect: int | None = None
    """The last value that was not."""
    wrapped: int = 0
    """What its wraps have added so far."""


Totals = Mapping[str, Total]


@dataclass
class Ledger:
    """The counters of one GPU in one tick."""

    before: Totals
    """What is remembered of the ticks before."""
    interval_ns: int
    """Length of the tick."""
    rare_interval_ns: int | None = None
    """Time since what is not asked in each tick was asked before; `None`: the tick's length."""
    after: dict[str, Total] = field(default_factory=dict)
    """What is to be remembered."""
    fell: list[str] = field(default_factory=list)
    """Those that have begun again."""

    def __post_init__(self) -> None:
        self.after.update(self.before)

    def enter(self, name: str, value: int, unit: Unit, *, is_rare: bool = False) -> int | None:
        """Give the counter's value, its wraps added; `None` where it is not believed yet."""
        was = self.before.get(name)
        if was is None:
            self.after[name] = Total(value=value)
            return value
        if value == was.value:
            return value + was.wrapped
        most = self._most(unit, is_rare=is_rare)
        if value < was.value:
            return self._fallen(name, value, was, unit, most)
        if most is not None and value - was.value > most and not _goes_on(was.suspect, value, most):
            self.after[name] = replace(was, suspect=value)
            return None
        self.after[name] = Total(value=value, wrapped=was.wrapped)
        return value + was.wrapped

    def _fallen(self, name: str, value: int, was: Total, unit: Unit, most: int | None) -> int:
        width = next((width for width in _WIDTHS if was.value < width), 0)
        risen = width - was.value + value
        # Where another one has begun again, so has this one.
        if unit.wraps and width and not self.fell and most is not None and risen <= most:
            self.after[name] = Total(value=value, wrapped=was.wrapped + width)
            return value + was.wrapped + width
        self.after[name] = Total(value=value)
        self.fell.append(name)
        return value

    def _most(self, unit: Unit, *, is_rare: bool) -> int | None:
        """Give by how much the counter can have risen, with a second more for clocks apart."""
        if unit.most_per_second is None:
            return None
        rare_ns = self.rare_interval_ns if is_rare else None
        interval_ns = self.interval_ns if rare_ns is None else rare_ns
        return unit.most_per_second * (interval_ns + 1_000_000_000) // 1_000_000_000


def _goes_on(suspect: int | None, value: int, most: int) -> bool:
    return suspect is not None and 0 <= value - suspect <= most
