"""Learns how late a driver's samples come.

A driver usually returns a window's sample as soon as the window has closed. If a query returns no
sample of a window that has closed by then, but a later query does, the sample is late. Two clocks
show that a window had closed: the driver's own, which has reached every time stamp that an answer
has contained, and the machine's wall clock, which most drivers use for their time stamps.

`gpuledger_agent.core.gpu_sampler` ends ticks earlier if samples are late.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from msgspec.structs import replace

from gpuledger.clock import NS_PER_SECOND, NS_PER_US
from gpuledger_agent.core.normalize.driver_clock import DRIFT_RATIO, DriverClock
from gpuledger_agent.core.raw import AnswerTime

_MIN_LATE_WINDOWS: Final = 0.5
"""A sample is late if it comes more than this part of a window after its window has closed. Stamps
jitter by less."""
_SHIFT_US: Final = 500_000
"""Lateness up to which booked time is right to one percent of a minute."""
_MAX_LATE_US: Final = 10_000_000
"""Stamps that are further behind are from another clock."""
_TIMES_TO_LEARN: Final = 3
"""Number of answers with late samples within `_LEARNING_NS`, so that lateness is confirmed."""
_LEARNING_NS: Final = 60 * NS_PER_SECOND
_KNOWN_NS: Final = 3600 * NS_PER_SECOND
"""How long lateness counts after it was last confirmed."""


class Lateness(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How late a driver's samples have come so far."""

    behind_us: float = 0.0
    """The maximum lateness by the driver's own clock; 0 if samples come in time."""
    shift_us: float = 0.0
    """The maximum lateness by the wall clock, if that is more than `_SHIFT_US`; otherwise 0."""
    late_ns: tuple[int, ...] = ()
    """When the last answers with late samples came, by the monotonic clock."""
    known_until_ns: int = 0
    """Until when the lateness counts."""
    newest_us: int = 0
    """The newest time stamp so far."""
    clock_us: float = 0.0
    """The minimum of the driver's clock when it gave the last answer."""
    answered_ns: int = 0
    """When it gave the last answer, by the monotonic clock."""
    closed_us: float = 0.0
    """The minimum of the driver's clock when the last answer was requested."""
    wall_us: float = 0.0
    """The wall clock at that time."""

    @property
    def late_us(self) -> float:
        """The maximum confirmed lateness by the driver's own clock."""
        return self.behind_us if self._is_known else 0.0

    @property
    def shifts_usage(self) -> bool:
        """Whether samples come so late that booked time is wrong by more than a percent."""
        return self._is_known and max(self.behind_us, self.shift_us) > _SHIFT_US

    @property
    def _is_known(self) -> bool:
        return self.answered_ns < self.known_until_ns

    def correct(self, clock: DriverClock, *, wall_us: float) -> DriverClock:
        """Return the driver's clock without the lateness of the samples that showed it.

        `wall_us` is the wall clock at the time of `clock`. The result is `clock` if samples are not
        late by the wall clock.
        """
        behind_us = wall_us - clock.latest_us
        if not (self.shifts_usage and self.shift_us and 0 < behind_us <= _MAX_LATE_US):
            return clock
        return replace(
            clock, earliest_us=clock.earliest_us + behind_us, latest_us=clock.latest_us + behind_us
        )

    def interrupt(self) -> "Lateness":
        """Return what was learned, without the last answer; see `WindowLength.interrupt`."""
        return replace(self, newest_us=0, clock_us=0.0)

    def learn(
        self, stamps: Iterable[int], *, given: AnswerTime, wall_us: float, window_us: float
    ) -> "Lateness":
        """Return the lateness after an answer with these time stamps.

        `wall_us` is the wall clock when the answer was requested.
        """
        fresh = [stamp for stamp in stamps if stamp > self.newest_us]
        newest_us, first_us = max(fresh, default=self.newest_us), min(fresh, default=0)
        behind_us = shift_us = 0.0
        if fresh and self.newest_us:
            behind_us = _late(self.closed_us - first_us, _MIN_LATE_WINDOWS * window_us)
            shift_us = _late(self.wall_us - first_us, _SHIFT_US)
        since_us = (given.answered_ns - self.answered_ns) / NS_PER_US
        clock_us = max(newest_us, self.clock_us + since_us * (1 - DRIFT_RATIO))
        waited_us = (given.answered_ns - given.requested_ns) / NS_PER_US
        known, at_ns = self, given.answered_ns
        if behind_us or shift_us:
            late_ns = (*self.late_ns, at_ns)[-_TIMES_TO_LEARN:]
            is_recent = bool(self.late_ns) and at_ns - self.late_ns[-1] < _LEARNING_NS
            keeps = self._is_known or is_recent
            is_shown = len(late_ns) == _TIMES_TO_LEARN and at_ns - late_ns[0] < _LEARNING_NS
            known = replace(
                self,
                behind_us=max(self.behind_us if keeps else 0.0, behind_us),
                shift_us=max(self.shift_us if keeps else 0.0, shift_us),
                late_ns=late_ns,
                known_until_ns=at_ns + _KNOWN_NS if is_shown else self.known_until_ns,
            )
        return replace(
            known,
            newest_us=newest_us,
            clock_us=clock_us,
            answered_ns=given.answered_ns,
            closed_us=clock_us - waited_us * (1 + DRIFT_RATIO),
            wall_us=wall_us,
        )


def _late(late_us: float, min_us: float) -> float:
    return late_us if min_us < late_us <= _MAX_LATE_US else 0.0
