"""The simulation's clocks: one that runs faster than the machine, and one that is moved by hand.

Both keep scenario time: event times, sleeps and intervals are in its seconds. A node's own clock is
one of them as the node shows it: its wall clock may be wrong, and be set, as the scenario says.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from gpuledger.clock import NS_PER_SECOND, Clock, SystemClock


class ScaledClock:
    """Scenario time: `epoch + (machine's time - epoch) * speed`, so all processes agree on it."""

    def __init__(self, *, epoch_ns: int, speed: float, machine: Clock | None = None) -> None:
        self._machine = machine or SystemClock()
        self._epoch_ns = epoch_ns
        self._speed = speed
        # From this process's own zero: only differences of a monotonic clock mean anything.
        self._monotonic_zero_ns = self._machine.monotonic_ns()

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch, in scenario time."""
        return self._epoch_ns + int((self._machine.time_ns() - self._epoch_ns) * self._speed)

    def monotonic_ns(self) -> int:
        """Nanoseconds that never fall, in scenario time."""
        return int((self._machine.monotonic_ns() - self._monotonic_zero_ns) * self._speed)

    def boottime_ns(self) -> int:
        """Nanoseconds since the scenario's epoch; a node's own clock counts from its boot."""
        return self.time_ns() - self._epoch_ns

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of scenario time."""
        await asyncio.sleep(seconds / self._speed)


class ManualClock:
    """Scenario time that stands still until it is moved: for tests and fast replays."""

    def __init__(self, *, start_ns: int) -> None:
        self._start_ns = start_ns
        self._now_ns = start_ns

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`."""
        self._now_ns += round(seconds * NS_PER_SECOND)

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return self._now_ns

    def monotonic_ns(self) -> int:
        """Nanoseconds since this clock was made."""
        return self._now_ns - self._start_ns

    def boottime_ns(self) -> int:
        """Nanoseconds since this clock was made."""
        return self._now_ns - self._start_ns

    async def sleep(self, seconds: float) -> None:
        """Move on by `seconds` at once."""
        self.advance(seconds)
        await asyncio.sleep(0)


class SetClock(NamedTuple):
    """A node's wall clock is set."""

    at_ns: int
    """When, nanoseconds since the Unix epoch in scenario time."""
    by_ns: int
    """How far ahead; below zero back."""


class NodeClock:
    """A node's clock: the simulation's, with the time since the node's boot.

    What happens on the node happens in scenario time, whatever its wall clock shows; the time since
    boot and the monotonic clock are never set.
    """

    def __init__(self, clock: Clock, *, boot_time_ns: int, steps: Sequence[SetClock] = ()) -> None:
        self._clock = clock
        self._boot_time_ns = boot_time_ns
        self._steps = tuple(steps)

    def time_ns(self) -> int:
        """Nanoseconds since the Unix epoch, as the node's wall clock shows them."""
        return self.shown_ns(self._clock.time_ns())

    def shown_ns(self, scenario_ns: int) -> int:
        """Return what the wall clock shows at an instant of the scenario."""
        if not self._steps:
            return scenario_ns
        # Each step is by how far the clock was moved, so what it shows is moved by all before.
        set_by_ns = sum(step.by_ns for step in self._steps if step.at_ns <= scenario_ns)
        return max(0, scenario_ns + set_by_ns)

    def monotonic_ns(self) -> int:
        """Nanoseconds that never fall."""
        return self._clock.monotonic_ns()

    def boottime_ns(self) -> int:
        """Nanoseconds since the node's boot."""
        return self._clock.time_ns() - self._boot_time_ns

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of scenario time."""
        await self._clock.sleep(seconds)
