"""Which values of the driver can be true. Pure: what cannot be is left out and named.

Drivers do answer with utilization 4294967295 or memory 2^64-1; no such number may reach the books.
"""

from collections import Counter
from typing import Final

PERCENT: Final = (0, 100)
TEMPERATURE_CELSIUS: Final = (-20, 150)
POWER_MILLIWATTS: Final = (0, 3_000_000)
CLOCK_MEGAHERTZ: Final = (0, 20_000)
MEMORY_BYTES: Final = (0, 1 << 48)
ENERGY_MILLIJOULES: Final = (0, 1 << 62)
TIMESTAMP_US: Final = (0, 1 << 62)


class Sieve:
    """Keeps what can be true and counts, by reading, what cannot."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()

    def keep(self, value: int | None, limits: tuple[int, int], *, reading: str) -> int | None:
        """Give the value, or `None` where it was absent or lies outside the limits."""
        if value is None or limits[0] <= value <= limits[1]:
            return value
        self.dropped[reading] += 1
        return None
