"""Time as a seam: the clocks that a component uses, so that a simulator can run faster.

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
    """Anything that can wait."""

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of this clock's time."""


class Clock(Sleeper, Protocol):
    """Three clocks and a way to wait."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch; the machine's owner may set this clock back or forward."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that is never set, for measuring intervals."""

    def boottime_ns(self) -> int:
        """Nanoseconds since boot, including time in suspend."""


class SystemClock:
    """The machine's clocks."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Nanoseconds of the kernel's monotonic clock."""
        return time.monotonic_ns()

    def boottime_ns(self) -> int:
        """Nanoseconds since boot (`CLOCK_BOOTTIME`), including time in suspend."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await asyncio.sleep(seconds)
