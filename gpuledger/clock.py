"""The clocks that a component uses, behind an interface, so that a simulator can run faster.

This module holds the protocols, the machine's own clock and the units of time, but no schedules.
"""

import asyncio
import time
from typing import Final, Protocol

NS_PER_SECOND: Final = 1_000_000_000
NS_PER_MS: Final = 1_000_000
NS_PER_US: Final = 1_000
NS_PER_MINUTE: Final = 60 * NS_PER_SECOND
NS_PER_HOUR: Final = 60 * NS_PER_MINUTE
NS_PER_DAY: Final = 24 * NS_PER_HOUR


class Sleeper(Protocol):
    """A clock by which a caller can wait."""

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of this clock's time."""


class Clock(Sleeper, Protocol):
    """The wall clock, the monotonic clock and the time since boot, and a way to wait."""

    def time_ns(self) -> int:
        """Return the nanoseconds since the epoch; this clock may be set back or forward."""

    def monotonic_ns(self) -> int:
        """Return the nanoseconds of a clock that is never set, for measuring intervals."""

    def boottime_ns(self) -> int:
        """Return the nanoseconds since boot, including time in suspend."""


class SystemClock:
    """The machine's clocks."""

    def time_ns(self) -> int:
        """Return the nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Return the nanoseconds of the kernel's monotonic clock."""
        return time.monotonic_ns()

    def boottime_ns(self) -> int:
        """Return the nanoseconds since boot (`CLOCK_BOOTTIME`), including time in suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await asyncio.sleep(seconds)


def boot_time_ns(clock: Clock) -> int:
    """Return the time of the boot by the wall clock, in nanoseconds since the epoch.

    It changes only if the wall clock is set.
    """
    return clock.time_ns() - clock.boottime_ns()
