"""Time as a seam: what a stage needs to know of clocks, so that a simulator can run faster.

Here live the protocol, the machine's own clock and the units of time. No schedule, no loop.
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
    """What can wait."""

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of this clock's time."""


class Clock(Sleeper, Protocol):
    """Three readings of time and one way to wait."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch; may be set back and forth by the machine's owner."""

    def monotonic_ns(self) -> int:
        """Nanoseconds of a clock that is never set, for measuring intervals."""

    def boottime_ns(self) -> int:
        """Nanoseconds since boot, suspended time included."""


class SystemClock:
    """The machine's clocks."""

    def time_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Nanoseconds of the kernel's monotonic clock."""
        return time.monotonic_ns()

    def boottime_ns(self) -> int:
        """Nanoseconds since boot (`CLOCK_BOOTTIME`), suspended time included."""
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await asyncio.sleep(seconds)
