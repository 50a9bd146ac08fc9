"""The times of fast polls: queries to GPUs between two ticks.

A tick queries every GPU once. That suffices for a GPU with one container and a driver that returns
a sample per window and process. Fast polls cover the other cases:

- **Shared GPUs, one sample per process.** Some drivers return one sample per process for the whole
  time since the last query. They do not document whether the sample is the mean, the newest window,
  or the mean of the used windows. With one query per window, all three are equal.
- **No samples.** Some drivers return only the utilization of their latest window. The mean over
  queries of each window is close to the mean over the interval.
- **Energy.** The energy counter shows the energy until now, but the time that a tick covers ends
  some windows before the tick. The counter is therefore also read at the moment at which the next
  tick's covered time will end.
- **Long ticks.** Drivers discard samples of an idle GPU after some seconds. If ticks are longer
  than a second, every GPU is polled each second.
- **Short processes.** Each fast poll also reads process lists. After a process started or ended,
  its GPU is polled more frequently.

`gpuledger_agent.core.gpu_sampler` decides which GPUs need frequent polls.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND

MAX_PAUSE_NS: Final = NS_PER_SECOND
"""Maximum time between two polls of samples. All known drivers keep the last second's samples."""
_APART_NS: Final = 20_000_000
"""Minimum time between a fast poll and a tick; a closer poll would return the same values."""


class OthersScope(Enum):
    """The scope of a fast poll for GPUs that are not watched closely.

    GPUs that are watched closely are always queried for everything (`ALL`).
    """

    NOTHING = "nothing"
    """These GPUs are not polled."""
    ENERGY = "energy"
    """Energy only."""
    ALL = "all"
    """Samples, energy and processes."""


class FastPollTime(NamedTuple):
    """The time of one fast poll, and its scope."""

    at_ns: int
    """Time on the monotonic clock."""
    others: OthersScope
    """The scope for GPUs that are not watched closely."""


@dataclass(frozen=True, kw_only=True)
class FastPollPlan:
    """The fast polls between two ticks; all times are from the monotonic clock."""

    begin_ns: int
    """The time of the earlier tick."""
    end_ns: int
    """The time of the later tick."""
    lag_ns: int
    """Time between the end of a tick's covered time and the tick itself. Energy is read when the
    covered time of the next tick ends. If the lag exceeds the time between two ticks, energy is
    read when the covered time of a later tick ends."""
    pause_ns: int
    """The pause between two polls of the GPUs that are watched closely."""

    def next(self, now_ns: int, *, is_close: bool) -> FastPollTime | None:
        """Return the next fast poll after `now_ns`; `None` if the later tick comes before it.

        `is_close` is whether any GPU is watched closely now.
        """
        after_ns, last_ns = max(now_ns, self.begin_ns) + _APART_NS, self.end_ns - _APART_NS
        length_ns = self.end_ns - self.begin_ns
        cover_ns = self.end_ns - self.lag_ns % max(1, length_ns)
        # From narrow to wide, so that the wider scope wins if two times are equal.
        times: dict[int, OthersScope] = {}
        if is_close:
            times[self._next_of(self.pause_ns, after_ns)] = OthersScope.NOTHING
        if cover_ns > after_ns:
            times[cover_ns] = OthersScope.ENERGY
        times[self._next_of(MAX_PAUSE_NS, after_ns)] = OthersScope.ALL
        at_ns = min(times)
        return FastPollTime(at_ns, times[at_ns]) if at_ns < last_ns else None

    def _next_of(self, period_ns: int, after_ns: int) -> int:
        """Return the first multiple of `period_ns` since `begin_ns` that is after `after_ns`."""
        return after_ns + period_ns - (after_ns - self.begin_ns) % period_ns
