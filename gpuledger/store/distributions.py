"""Distributions of minutes by value: the bucket columns of `usage_hourly` and `usage_daily`.

A `Distribution` has one column per bucket: the number of minutes whose value is above the previous
bound, and at most the column's own. Counts of rows, hours and devices can be added in plain SQL, on
any engine, and percentiles are derived from the sums. A percentile is the upper bound of its
bucket, so the true value is between the previous bound and this one.

In rows of the category `idle`, the buckets of busy time count the time in which kernels of any
process ran in the allocated part. In contrast, `busy_ns` of these rows is the time in which none
ran. Negative values count in the first bucket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

GIB: Final = 2**30
_MORE: Final = "more"


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A quantity that each minute has, and the columns that count minutes by its value."""

    name: str
    """Prefix of the columns."""
    bounds: tuple[int, ...]
    """The upper bound of each bucket, in the unit of the column names."""
    unit: int
    """The size of the bounds' unit in nanoseconds or bytes, the unit of the quantity."""
    has_more: bool = False
    """Whether an extra bucket counts values above all bounds. Otherwise, the last bucket does."""

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, from the lowest bucket to the highest."""
        more = (_MORE,) if self.has_more else ()
        return tuple(f"{self.name}_{bound}" for bound in (*self.bounds, *more))

    @property
    def minutes_sql(self) -> str:
        """The SQL aggregate for the number of minutes with a value; null without counts."""
        return self._first_sql(len(self.columns))

    def percentile_sql(self, percent: int) -> str:
        """Return the SQL aggregate for a percentile of all minutes, in the unit of the columns.

        The result is the upper bound of the bucket that contains the percentile: the smallest bound
        that at least `percent` of 100 minutes do not exceed. 100 is the maximum. It is null if no
        minute has a value, and if the percentile is above all bounds.
        """
        cases = " ".join(
            f"WHEN 100 * ({self._first_sql(index)}) >= {percent} * ({self.minutes_sql})"
            f" THEN {bound}"
            for index, bound in enumerate(self.bounds, start=1)
        )
        return f"CASE WHEN {self.minutes_sql} > 0 THEN CASE {cases} END END"

    def _first_sql(self, count: int) -> str:
        return " + ".join(f"sum({column})" for column in self.columns[:count])

    def percentile(self, counts: Sequence[int], percent: int) -> int | None:
        """Return the percentile of counts, as `percentile_sql` does. Counts are in column order."""
        total, so_far = sum(counts), 0
        for bound, count in zip(self.bounds, counts, strict=not self.has_more):
            so_far += count
            if total and 100 * so_far >= percent * total:
                return bound
        return None


_PERCENTS: Final = (0, 5, *range(10, 101, 10))
_PERCENT_OF_A_MINUTE: Final = 600_000_000
BUSY: Final = Distribution(name="busy_minutes", bounds=_PERCENTS, unit=_PERCENT_OF_A_MINUTE)
"""Percent of the minute in which kernels ran on the device."""
DRAM: Final = Distribution(name="dram_minutes", bounds=_PERCENTS, unit=_PERCENT_OF_A_MINUTE)
"""Percent of the minute in which the memory interface worked; null without the chip's counters."""
MEMORY: Final = Distribution(
    name="memory_minutes",
    bounds=(1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192),
    unit=GIB,
    has_more=True,
)
"""Mean memory of the minute in GiB. The bounds are sizes of GPUs and MIG profiles."""
DISTRIBUTIONS: Final = (BUSY, DRAM, MEMORY)
MEMORY_MAX: Final = "memory_bytes_max"
"""The largest mean memory of a minute."""
ALLOCATED: Final = "allocated_minutes"
"""Bitmap of an hour: bit m is set if the device was allocated in minute m, and at least part of its
use in this minute is known."""
USED: Final = "used_minutes"
"""Bitmap of an hour: bit m is set if kernels ran in minute m."""
BITMAPS: Final = (ALLOCATED, USED)
"""Combine bitmaps of rows with `bit_or`."""
