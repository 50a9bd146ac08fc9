"""Samples by stamps that can be true, before anything goes by them.

One that is stamped far ahead would have all that come after it taken for old.
"""

from collections import Counter
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from gpuledger.clock import NS_PER_US
from gpuledger_agent.core.raw import ClockReading, GpuLook, RawGpuSample
from gpuledger_agent.core.readings import TIMESTAMP_US

_AHEAD_US: Final = 60_000_000
_FIELDS: Final = ("samples", "memory_samples", "process_samples")

_Answer = TypeVar("_Answer", GpuLook, RawGpuSample)


class StampFilter:
    """Leaves out the samples of one GPU whose stamps cannot be true, and counts them."""

    def __init__(self) -> None:
        self._ahead_us: int | None = None
        self._dropped: Counter[str] = Counter()

    def filter(self, answer: _Answer, at: ClockReading) -> _Answer:
        """Return an answer of that time without the samples whose stamps cannot be true.

        A driver stamps by the machine's wall clock, or by one that began later. Where that was set
        back, what stamps showed before counts. Several stamps that agree show another clock.
        """
        stamps = {one.timestamp_us for name in _FIELDS for one in getattr(answer, name) or ()}
        if not stamps:
            return answer
        monotonic_us, lowest_us = at.monotonic_ns // NS_PER_US, TIMESTAMP_US[0]
        latest_us = self._latest_us(stamps, at)
        newest_us = max((stamp for stamp in stamps if stamp <= latest_us), default=None)
        if newest_us is not None:
            ahead_us = newest_us - monotonic_us
            self._ahead_us = ahead_us if self._ahead_us is None else max(self._ahead_us, ahead_us)
        if newest_us == max(stamps) and min(stamps) >= lowest_us:
            return answer
        kept: dict[str, Any] = {}
        for name in _FIELDS:
            if (told := getattr(answer, name)) is not None:
                kept[name] = tuple(
                    one for one in told if lowest_us <= one.timestamp_us <= latest_us
                )
                self._dropped[name] += len(told) - len(kept[name])
        return replace(answer, **kept)

    def drain_dropped(self) -> Counter[str]:
        """Return how many samples of which field were left out since the last call."""
        dropped, self._dropped = self._dropped, Counter()
        return dropped

    def forget(self) -> None:
        """Forget the driver's clock: it may be another one."""
        self._ahead_us = None

    def _latest_us(self, stamps: set[int], at: ClockReading) -> int:
        """Return the latest stamp that can be true."""
        now_us = at.time_ns // NS_PER_US
        if self._ahead_us is not None:
            now_us = max(now_us, at.monotonic_ns // NS_PER_US + self._ahead_us)
        latest_us = now_us + _AHEAD_US
        possible = sorted(stamp for stamp in stamps if stamp <= TIMESTAMP_US[1])
        if possible and possible[0] > latest_us:
            first_us = possible[0]
            agreeing = [stamp for stamp in possible if stamp <= first_us + _AHEAD_US]
            if len(agreeing) > 1:
                return agreeing[-1]
        return min(latest_us, TIMESTAMP_US[1])
