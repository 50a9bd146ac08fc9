"""When to poll GPUs between two ticks, and which of them.

A tick queries every GPU once. That is enough if one container is on a GPU, and if the driver gives
a sample for each of its windows and processes. It is not enough

- if a driver gives one sample per process for all the time since the last query. Whether that is
  the mean, the newest window or the mean of the windows of use, no driver documents. Queried in
  each of its windows, all of them agree: so a GPU that several containers share is polled as often;
- for energy, which is a counter of this instant, while a tick covers the driver's time up to some
  windows ago: so it is read when that time comes;
- in ticks that are longer than the driver keeps samples of an idle GPU: so each second is polled;
- for processes that come and go within a tick: so if some did recently, the lists are read in
  between, too.

Which GPUs need it is decided in `gpuledger_agent.core.gpu_sampler`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from gpuledger.clock import NS_PER_SECOND

MAX_PAUSE_NS: Final = NS_PER_SECOND
"""Longest time without samples: no driver is known to lose those of the last second."""
_APART_NS: Final = 20_000_000
"""A fast poll that is nearer to a tick would show nothing else."""


class OthersScope(Enum):
    """What is read from GPUs that are not watched closely. Those that are get a full poll."""

    NOTHING = "nothing"
    """They are left out."""
    ENERGY = "energy"
    """The board's energy."""
    ALL = "all"
    """Samples, energy and processes."""


class FastPollTime(NamedTuple):
    """When to poll."""

    at_ns: int
    """By the monotonic clock."""
    others: OthersScope
    """What of those that are not watched closely."""


@dataclass(frozen=True, kw_only=True)
class FastPollPlan:
    """When to poll between two ticks; times are of the monotonic clock."""

    begin_ns: int
    """When the first of the two was."""
    end_ns: int
    """When the other one will be."""
    lag_ns: int
    """How long before its end a tick's cover ends: energy is read then. If the lag is several
    ticks, it is the cover of a tick to come."""
    pause_ns: int
    """The time from one fast poll of what is watched closely to the next."""

    def next(self, now_ns: int, *, is_close: bool) -> FastPollTime | None:
        """Return when to poll next; `None` if not before the tick.

        `is_close` is whether any GPU is watched closely, as far as is known by now.
        """
        after_ns, last_ns = max(now_ns, self.begin_ns) + _APART_NS, self.end_ns - _APART_NS
        length_ns = self.end_ns - self.begin_ns
        cover_ns = self.end_ns - self.lag_ns % max(1, length_ns)
        # The widest scope comes last: it is taken if times are the same.
        times: dict[int, OthersScope] = {}
        if is_close:
            times[self._next_of(self.pause_ns, after_ns)] = OthersScope.NOTHING
        if cover_ns > after_ns:
            times[cover_ns] = OthersScope.ENERGY
        times[self._next_of(MAX_PAUSE_NS, after_ns)] = OthersScope.ALL
        at_ns = min(times)
        return FastPollTime(at_ns, times[at_ns]) if at_ns < last_ns else None

    def _next_of(self, period_ns: int, after_ns: int) -> int:
        """Return the first time after another one that is some periods behind the beginning."""
        return after_ns + period_ns - (after_ns - self.begin_ns) % period_ns
