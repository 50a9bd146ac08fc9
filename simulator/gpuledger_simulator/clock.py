"""The simulation's clocks: one that runs faster than real time, and one that tests move by hand.

Both keep scenario time: event times, sleeps and intervals are in scenario seconds. `NodeClock` adds
a node's wall clock, which may be wrong and may be set.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from gpuledger.clock import NS_PER_SECOND, Clock, SystemClock


class ScaledClock:
    """Scenario time: `epoch + (real time - epoch) * speed`; equal in all processes of a run."""

    def __init__(self, *, epoch_ns: int, speed: float, machine: Clock | None = None) -> None:
        self._machine = machine or SystemClock()
        self._epoch_ns = epoch_ns
        self._speed = speed
        # The monotonic clock starts with this process, because only its differences are meaningful.
        self._monotonic_zero_ns = self._machine.monotonic_ns()

    def time_ns(self) -> int:
        """Return nanoseconds since the Unix epoch, in scenario time."""
        return self._epoch_ns + int((self._machine.time_ns() - self._epoch_ns) * self._speed)

    def monotonic_ns(self) -> int:
        """Return nanoseconds that never decrease, in scenario time."""
        return int((self._machine.monotonic_ns() - self._monotonic_zero_ns) * self._speed)

    def boottime_ns(self) -> int:
        """Return nanoseconds since the scenario's epoch; `NodeClock` counts from its boot."""
        return self.time_ns() - self._epoch_ns

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of scenario time."""
        await asyncio.sleep(seconds / self._speed)


class ManualClock:
    """Scenario time that stands still until a test moves it."""

    def __init__(self, *, start_ns: int) -> None:
        self._start_ns = start_ns
        self._now_ns = start_ns

    def advance(self, seconds: float) -> None:
        """Advance the clock by `seconds`."""
        self._now_ns += round(seconds * NS_PER_SECOND)

    def advance_to(self, now_ns: int) -> None:
        """Advance the clock to a time in nanoseconds since the Unix epoch."""
        self._now_ns = max(self._now_ns, now_ns)

    def time_ns(self) -> int:
        """Return nanoseconds since the Unix epoch."""
        return self._now_ns

    def monotonic_ns(self) -> int:
        """Return nanoseconds since this clock was created."""
        return self._now_ns - self._start_ns

    def boottime_ns(self) -> int:
        """Return nanoseconds since this clock was created."""
        return self._now_ns - self._start_ns

    async def sleep(self, seconds: float) -> None:
        """Advance the clock by `seconds` without waiting."""
        self.advance(seconds)
        await asyncio.sleep(0)


class SetClock(NamedTuple):
    """A step of a node's wall clock."""

    at_ns: int
    """Time of the step, in nanoseconds since the Unix epoch in scenario time."""
    by_ns: int
    """Size of the step; negative if the clock is set back."""


class NodeClock:
    """A node's clock: the simulation's clock, with a wall clock that can be set and a boot time.

    Events on the node happen in scenario time, independent of the node's wall clock. The time since
    boot and the monotonic clock are never set.
    """

    def __init__(self, clock: Clock, *, boot_time_ns: int, steps: Sequence[SetClock] = ()) -> None:
        self._clock = clock
        self._boot_time_ns = boot_time_ns
        self._steps = tuple(steps)

    def time_ns(self) -> int:
        """Return nanoseconds since the Unix epoch on the node's wall clock."""
        return self.shown_ns(self._clock.time_ns())

    def shown_ns(self, scenario_ns: int) -> int:
        """Return the wall clock's reading at an instant of scenario time."""
        if not self._steps:
            return scenario_ns
        # Steps are relative, so the steps before this instant add up.
        set_by_ns = sum(step.by_ns for step in self._steps if step.at_ns <= scenario_ns)
        return max(0, scenario_ns + set_by_ns)

    def monotonic_ns(self) -> int:
        """Return nanoseconds that never decrease."""
        return self._clock.monotonic_ns()

    def boottime_ns(self) -> int:
        """Return nanoseconds since the node's boot."""
        return self._clock.time_ns() - self._boot_time_ns

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of scenario time."""
        await self._clock.sleep(seconds)
