"""Whether the machine's wall clock was set back of late, by the clock that nobody can set. Pure.

Most drivers stamp their samples by the wall clock. After it was set back, samples from before are
stamped later than those that follow, until they have left the driver's buffers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from agent.core.raw import ProcessUtilizationSample, RawGpuSample, UtilizationSample

_Stamped = TypeVar("_Stamped", UtilizationSample, ProcessUtilizationSample)
# More than a clock that is slewed loses in the longest tick, and less than a driver's window.
_MIN_NS: Final = 50_000_000
# Longer than any driver keeps samples.
_BUFFERED_NS: Final = 150_000_000_000
# Longer than a tick's cover lags behind.
_MARGIN_NS: Final = 2_000_000_000
# Asking takes as long at most, after the clock was read.
_AHEAD_US: Final = 1_000_000


class SetBack:
    """Follows the wall clock from tick to tick."""

    def __init__(self) -> None:
        self._time_ns = 0
        self._offset_ns: int | None = None
        self._until_time_ns = 0
        self._until_boottime_ns = 0
        self.shows = False
        """Whether samples from before the clock was set back may be among the others now."""

    def follow(self, *, time_ns: int, boottime_ns: int) -> None:
        """Go on to the next tick's clocks."""
        offset_ns = time_ns - boottime_ns
        if self._offset_ns is not None and offset_ns < self._offset_ns - _MIN_NS:
            passed = max(self._time_ns, self._until_time_ns if self.shows else 0)
            self._until_time_ns = passed + _MARGIN_NS
            self._until_boottime_ns = boottime_ns + _BUFFERED_NS
            self.shows = True
        self._time_ns, self._offset_ns = time_ns, offset_ns
        if time_ns > self._until_time_ns or boottime_ns > self._until_boottime_ns:
            self.shows = False


def without_former(answers: RawGpuSample, *, now_us: int) -> RawGpuSample:
    """Return the answers without samples that are stamped later than the wall clock shows."""
    latest_us = now_us + _AHEAD_US
    return replace(
        answers,
        samples=_until(answers.samples, latest_us),
        memory_samples=_until(answers.memory_samples, latest_us),
        process_samples=_until(answers.process_samples, latest_us),
    )


def _until(samples: Sequence[_Stamped] | None, latest_us: int) -> tuple[_Stamped, ...] | None:
    if samples is None:
        return None
    return tuple(sample for sample in samples if sample.timestamp_us <= latest_us)
