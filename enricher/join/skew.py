"""How far the clocks of nodes, API server and this machine are apart, as far as that shows.

Nothing is corrected by it. A clock that is behind looks like a way that is slow, so of each pair
only one direction can be known: what is seen before it can have happened.
"""

import math
from typing import Final

from enricher.join import metrics
from gpuledger.records import NodeSample, PodRecord

_WINDOW_NS: Final = 300 * 10**9


class RecentLeast:
    """The least of what was seen in the last two windows, in constant memory."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._now = self._before = math.inf

    def add(self, value: float, *, now_ns: int) -> bool:
        """Take a value; say whether the least may be another than before."""
        since_ns = now_ns - self._begun_ns
        is_over = not 0 <= since_ns < _WINDOW_NS
        if is_over:
            self._before = self._now if since_ns < 2 * _WINDOW_NS else math.inf
            self._now, self._begun_ns = math.inf, now_ns
        if value < self._now:
            self._now = value
            return True
        return is_over

    @property
    def least(self) -> float:
        """The least value; infinite where there was none."""
        return min(self._now, self._before)


class ClockSkew:
    """Watches ticks and pods as they are taken up, and shows what they tell of clocks."""

    def __init__(self) -> None:
        self._ages_ns = RecentLeast()
        self._leads_ns = RecentLeast()

    def see_tick(self, sample: NodeSample, *, now_ns: int) -> None:
        """Take a tick: that it is from the future shows a node's clock ahead of this machine's."""
        if self._ages_ns.add(now_ns - sample.time_ns, now_ns=now_ns):
            metrics.LEAST_AGE_SECONDS.set(self._ages_ns.least / 1e9)

    def see_pod(self, pod: PodRecord, *, now_ns: int) -> None:
        """Take a pod: that its node had it before it was made shows the node's clock behind.

        A static pod's node has it before the API server knows of it.
        """
        if pod.started_time_ns is None or pod.config_hash is not None:
            return
        if self._leads_ns.add(pod.started_time_ns - pod.created_time_ns, now_ns=now_ns):
            metrics.NODE_BEHIND_SECONDS.set(max(0.0, -self._leads_ns.least / 1e9))
