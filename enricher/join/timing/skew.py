"""How far the clocks of nodes, API server and this machine are apart, as far as that shows.

Nothing is corrected by it. A clock that is behind looks like a way that is slow, so of each pair
only one direction can be known: what is seen before it can have happened.
"""

from typing import Final

import structlog

from enricher.join import metrics
from enricher.join.timing.recent import RecentLeast
from gpuledger.records import PodRecord

_LINE_NS: Final = 60 * 10**9
_log = structlog.get_logger(__name__)


class ClockSkew:
    """Watches ticks and pods as they are taken up, and shows what they tell of clocks."""

    def __init__(self) -> None:
        self._ages_ns = RecentLeast()
        self._leads_ns = RecentLeast()
        self._first_step: tuple[str, float] | None = None
        self._uncounted = 0
        self._told_ns = -_LINE_NS

    def see_ticks(self, newest_ns: int, *, now_ns: int) -> None:
        """Take how new the newest of some ticks is: from the future, a node's clock is ahead."""
        if self._ages_ns.add(now_ns - newest_ns, now_ns=now_ns):
            metrics.LEAST_AGE_SECONDS.set(self._ages_ns.least / 1e9)

    def see_pod(self, pod: PodRecord, *, now_ns: int) -> None:
        """Take a pod: that its node had it before it was made shows the node's clock behind.

        A static pod's node has it before the API server knows of it.
        """
        if pod.started_time_ns is None or pod.config_hash is not None:
            return
        if self._leads_ns.add(pod.started_time_ns - pod.created_time_ns, now_ns=now_ns):
            metrics.NODE_BEHIND_SECONDS.set(max(0.0, -self._leads_ns.least / 1e9))

    def see_step(self, node: str, seconds: float) -> None:
        """Record that a node's clock was set; what it stamps from now on is of a new timeline."""
        metrics.CLOCK_STEPS_TOTAL.labels(direction="ahead" if seconds > 0 else "back").inc()
        self._uncounted += 1
        self._first_step = self._first_step or (node, seconds)

    def tell_steps(self, now_ns: int) -> None:
        """Log one of the settings recorded since the last line for all; one line a minute at most.

        A clock that is set to and fro, tick by tick, is one state and not a line each.
        """
        if self._first_step is None or 0 <= now_ns - self._told_ns < _LINE_NS:
            return
        node, seconds = self._first_step
        _log.warning(
            "node_clock_set", node=node, by_seconds=round(seconds, 3), count=self._uncounted
        )
        self._first_step, self._uncounted, self._told_ns = None, 0, now_ns
