"""How far the clocks of nodes, API server and this machine are apart, as far as that shows.

Nothing is corrected by it. A clock that is behind looks like a way that is slow, so of each pair
only one direction can be known: what is seen before it can have happened.
"""

import math
from typing import Final

import structlog

from enricher.join import metrics
from gpuledger.records import PodRecord
from gpuledger.runtime.logs import Repeats

_log = structlog.get_logger(__name__)


class ClockSkew:
    """Watches ticks and pods as they are taken up, and shows what they tell of clocks."""

    def __init__(self) -> None:
        self._ages_ns = WindowedMin()
        self._leads_ns = WindowedMin()
        self._steps = Repeats()

    def see_ticks(self, newest_ns: int, *, now_ns: int) -> None:
        """Take how new the newest of some ticks is: from the future, a node's clock is ahead."""
        if self._ages_ns.add(now_ns - newest_ns, now_ns=now_ns):
            metrics.MIN_AGE_SECONDS.set(self._ages_ns.least / 1e9)

    def see_pod(self, pod: PodRecord, *, now_ns: int) -> None:
        """Take a pod: that its node had it before it was made shows the node's clock behind.

        A static pod's node has it before the API server knows of it.
        """
        if pod.started_time_ns is None or pod.config_hash is not None:
            return
        if self._leads_ns.add(pod.started_time_ns - pod.created_time_ns, now_ns=now_ns):
            metrics.NODE_BEHIND_SECONDS.set(max(0.0, -self._leads_ns.least / 1e9))

    def see_step(self, node: str, seconds: float) -> None:
        """Record that a node's clock was set; what it stamps from now on is of a new timeline.

        It is logged at once, as no tick may come after it. A clock that is set to and fro, tick by
        tick, is one state and not a line each: a line a minute for each node and direction.
        """
        direction = "ahead" if seconds > 0 else "back"
        metrics.CLOCK_STEPS_TOTAL.labels(direction=direction).inc()
        if count := self._steps.count((node, direction)):
            _log.warning("node_clock_set", node=node, by_seconds=round(seconds, 3), count=count)


# The least and the most of what was seen of late, in constant memory.

_WINDOW_NS: Final = 300 * 10**9


class WindowedMin:
    """The least of what was seen in this window of five minutes and in the one before."""

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


class WindowedMax:
    """The same for the most."""

    def __init__(self) -> None:
        self._negated = WindowedMin()

    def add(self, value: float, *, now_ns: int) -> bool:
        """Take a value; say whether the most may be another than before."""
        return self._negated.add(-value, now_ns=now_ns)

    @property
    def most(self) -> float:
        """The greatest value; minus infinity where there was none."""
        return -self._negated.least
