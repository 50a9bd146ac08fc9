"""A machine's wall clock that is set back, by which most drivers stamp their samples.

Samples from before are stamped later then than those that follow, until they have left the driver's
buffers: `SetBack` tells so by the clock that nobody can set.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from gpuledger_agent.core.looks import Looked
from gpuledger_agent.core.raw import ProcessUtilizationSample, UtilizationSample

# More than a clock that is slewed loses in the longest tick, and less than a driver's window.
_MIN_SET_BACK_NS: Final = 50_000_000
# Longer than any driver keeps samples.
_BUFFERED_NS: Final = 150_000_000_000
# Longer than a tick's cover lags behind.
_MARGIN_NS: Final = 2_000_000_000
# The query takes as long at most, after the clock was read.
_AHEAD_US: Final = 1_000_000

_Stamped = TypeVar("_Stamped", UtilizationSample, ProcessUtilizationSample)


class SetBack:
    """Follows the wall clock from tick to tick."""

    def __init__(self) -> None:
        self._time_ns = 0
        self._offset_ns: int | None = None
        self._until_time_ns = 0
        self._until_boottime_ns = 0
        self.is_recent = False
        """Whether samples from before the clock was set back may be among the others now."""

    def follow(self, *, time_ns: int, boottime_ns: int) -> None:
        """Go on to the next tick's clocks."""
        offset_ns = time_ns - boottime_ns
        if self._offset_ns is not None and offset_ns < self._offset_ns - _MIN_SET_BACK_NS:
            # Set back twice, it has to pass the latest of all stamps.
            passed = max(self._time_ns, self._until_time_ns if self.is_recent else 0)
            self._until_time_ns = passed + _MARGIN_NS
            self._until_boottime_ns = boottime_ns + _BUFFERED_NS
            self.is_recent = True
        self._time_ns, self._offset_ns = time_ns, offset_ns
        if time_ns > self._until_time_ns or boottime_ns > self._until_boottime_ns:
            self.is_recent = False


def without_former(looked: Looked, *, now_us: int) -> Looked:
    """Return what was told without samples that are stamped later than the wall clock shows."""
    latest_us = now_us + _AHEAD_US

    def until(samples: Sequence[_Stamped] | None) -> tuple[_Stamped, ...] | None:
        if samples is None:
            return None
        return tuple(sample for sample in samples if sample.timestamp_us <= latest_us)

    return replace(
        looked,
        samples=until(looked.samples),
        memory_samples=until(looked.memory_samples),
        process_samples=until(looked.process_samples),
    )
