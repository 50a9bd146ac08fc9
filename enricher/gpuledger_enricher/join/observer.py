"""Reports a worker's ticks and pods in metrics and logs, without influencing the events.

The observer counts late ticks, gaps, pending pods and clock differences. It also checks that the
entries of a tick sum to the device totals.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import structlog

from gpuledger.bus.protocol import Record
from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.keys import node_key, split_key
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import GpuEvent, NodeSample, PodRecord
from gpuledger.runtime.logs import Repeats
from gpuledger.texts import shorten
from gpuledger_enricher.join import join_metrics as metrics
from gpuledger_enricher.join.booking.late_adjustments import adjusted_ns
from gpuledger_enricher.join.pods.describe import PodDescriptions
from gpuledger_enricher.join.pods.pending import PendingPods
from gpuledger_enricher.join.progress.passage import NodeWatermark

# A check costs about as much as booking, so one check in 200 ticks adds less than 1 % of work.
TICKS_PER_CHECK: Final = 200
NAMES_SHOWN: Final = 4
"""Maximum number of names of a pod in a log line: its UID and a few of its container ids."""
NAME_CHARACTERS: Final = 100
MAX_NODES_SHOWN: Final = 100
"""Maximum number of unresponsive nodes of a partition that have a series each."""
# Longer than a scrape interval, so that a minimum is not replaced before it is scraped.
_WINDOW_NS: Final = 300 * NS_PER_SECOND
_log = structlog.get_logger(__name__)
UNBOOKED_AFTER_NS: Final = 60 * NS_PER_SECOND
"""How long all new ticks of a node must stay unbooked before the node is counted as unbooked. A
worker that rereads ticks that another worker has booked takes less time than this to catch up."""
FRESH_NS: Final = 60 * NS_PER_SECOND
"""Maximum age of a tick that counts as new; an older one may have been sent or read again."""


@dataclass(kw_only=True)
class _NodeHistory:
    partition: int
    first_ns: int
    """When the first unbooked tick after the last booked one was read."""
    last_ns: int
    """When the last unbooked tick was read."""
    is_reported: bool = False

    @property
    def is_unbooked(self) -> bool:
        return self.last_ns - self.first_ns >= UNBOOKED_AFTER_NS


class UnbookedNodes:
    """Finds nodes whose new ticks all stay unbooked.

    There are three causes:

    - They count as duplicates. Within a boot, a node's `seq` never decreases, so a real duplicate
      is an old tick. If new ticks count as duplicates, an earlier tick had a `seq` that the node
      has not reached yet.
    - They are rejected because their `seq` runs too far ahead. Then the node did not send the
      booked ticks of this boot.
    - They overlap booked ticks, because another writer covers the node's time.

    Whether a tick is new depends on the timestamp of its record and on the time of reading, not on
    the node's own time. Memory is bounded by the nodes that have a watermark.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, _NodeHistory] = {}

    def observe_duplicate(self, node: str, *, partition: int, written_ns: int, now_ns: int) -> bool:
        """Record that a tick counts as a duplicate; return whether the node must be reported now.

        A node is reported once. It can be reported again after one of its ticks was booked.
        """
        found = self.observe_unbooked(
            node, partition=partition, written_ns=written_ns, now_ns=now_ns
        )
        if found is None:
            return False
        is_new, found.is_reported = not found.is_reported, found.is_unbooked
        return is_new and found.is_reported

    def observe_unbooked(
        self, node: str, *, partition: int, written_ns: int, now_ns: int
    ) -> _NodeHistory | None:
        """Record an unbooked tick and return its node's history; `None` if the tick is not new."""
        if abs(now_ns - written_ns) > FRESH_NS:
            return None
        found = self._nodes.get(node)
        # After a pause, start over: a minute without ticks is not a minute of unbooked ticks.
        if found is None or now_ns - found.last_ns > FRESH_NS:
            found = _NodeHistory(partition=partition, first_ns=now_ns, last_ns=now_ns)
            self._nodes[node] = found
        found.last_ns = now_ns
        return found

    def observe_booked(self, node: str) -> None:
        """Record that a tick of the node was booked."""
        self._nodes.pop(node, None)

    def show(self, now_ns: int) -> None:
        """Update the metric; drop nodes that had no unbooked tick in the last minute."""
        gone = [
            name for name, history in self._nodes.items() if now_ns - history.last_ns > FRESH_NS
        ]
        for name in gone:
            del self._nodes[name]
        metrics.NODES_UNBOOKED.set(sum(history.is_unbooked for history in self._nodes.values()))

    def forget(self, partition: int) -> None:
        """Forget the nodes of a partition that is no longer assigned."""
        self._nodes = {
            name: history for name, history in self._nodes.items() if history.partition != partition
        }
        metrics.NODES_UNBOOKED.set(sum(history.is_unbooked for history in self._nodes.values()))


class UnresponsiveNodes:
    """Shows in a metric which nodes send no samples, for each of the worker's partitions."""

    def __init__(self) -> None:
        self._shown: dict[int, set[str]] = {}

    def show(self, partition: int, unresponsive: Iterable[tuple[str, int]]) -> None:
        """Show a partition's unresponsive nodes, with the times of their last ticks."""
        before = self._shown.get(partition, set())
        since_ns = dict(islice(unresponsive, MAX_NODES_SHOWN))
        for node in before - since_ns.keys():
            metrics.NODE_UNRESPONSIVE_SINCE.remove(*split_key(node))
        for node, time_ns in since_ns.items():
            labels = metrics.NODE_UNRESPONSIVE_SINCE.labels(*split_key(node))
            labels.set(time_ns / NS_PER_SECOND)
        self._shown[partition] = {*since_ns}

    def forget(self, partition: int) -> None:
        """Stop showing the nodes of a partition, because another worker has it now."""
        self.show(partition, ())
        del self._shown[partition]


class ClockSkew:
    """Detects differences between the clocks of nodes, the API server and this machine.

    Times are not corrected. For each pair of clocks, only one direction can be detected: a time
    that is before its earliest possible value. The other direction looks like a slow pipeline.
    """

    def __init__(self) -> None:
        self._ages_ns = WindowedMin()
        self._leads_ns = WindowedMin()
        self._steps = Repeats()

    def observe_ticks(self, newest_ns: int, *, now_ns: int) -> None:
        """Record the age of the newest tick of a poll; if negative, the node's clock is ahead."""
        if self._ages_ns.add(now_ns - newest_ns, now_ns=now_ns):
            metrics.MIN_AGE_SECONDS.set(self._ages_ns.minimum / NS_PER_SECOND)

    def observe_pod(self, pod: PodRecord, *, now_ns: int) -> None:
        """Record a pod; if it started before it was created, the clock of its node is behind.

        Static pods are ignored, because nodes start them before the API server has an object for
        them.
        """
        if pod.started_time_ns is None or pod.config_hash is not None:
            return
        if self._leads_ns.add(pod.started_time_ns - pod.created_time_ns, now_ns=now_ns):
            metrics.NODE_BEHIND_SECONDS.set(max(0.0, -self._leads_ns.minimum / NS_PER_SECOND))

    def observe_clock_step(self, node: str, seconds: float) -> None:
        """Record that a node's clock was set, so its timestamps start a new timeline.

        The step is logged at once, because there may be no further tick. At most one line a minute
        is logged per node and direction, even if a clock is set back and forth with every tick.
        """
        direction = "ahead" if seconds > 0 else "back"
        metrics.CLOCK_STEPS_TOTAL.labels(direction=direction).inc()
        if count := self._steps.count((node, direction)):
            _log.warning(
                "node_clock_stepped", **_names(node), by_seconds=round(seconds, 3), count=count
            )


class WindowedMin:
    """The minimum of the values in the current window of five minutes and in the previous one.

    Only two minimums are stored, so the time that they cover varies between five and ten minutes.
    """

    def __init__(self) -> None:
        self._begun_ns = 0
        self._now = self._before = math.inf

    def add(self, value: float, *, now_ns: int) -> bool:
        """Record a value; return whether the minimum may have changed."""
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
    def minimum(self) -> float:
        """The minimum; infinite without values."""
        return min(self._now, self._before)


def _names(node: str) -> dict[str, str]:
    """Return the log fields that name a node, given its key."""
    cluster, name = split_key(node)
    return {"cluster": cluster, "node": name}


class JoinObserver:
    """Observes the results of a worker; memory is bounded by pending pods and nodes."""

    def __init__(self, *, pending_pod_timeout_seconds: float) -> None:
        self._pending = PendingPods(pending_pod_timeout_seconds=pending_pod_timeout_seconds)
        self._skew = ClockSkew()
        self._ticks_to_check = 1
        self._overlaps = Repeats()
        self._newest_ns = 0
        self._ahead = Repeats()
        self._new_clusters = Repeats()
        self._unbooked = UnbookedNodes()
        self._unresponsive = UnresponsiveNodes()
        self._foreign = Repeats()
        self._unbalanced = Repeats()

    def observe_pod(self, pod: PodRecord, *, now_ns: int) -> Iterable[str]:
        """Record that a pod was read; yield the keys of nodes whose ticks named the pod before."""
        self._skew.observe_pod(pod, now_ns=now_ns)
        for waiting in self._pending.resolve(pod):
            metrics.PENDING_DELAY_SECONDS.observe(max(0, now_ns - waiting.first_ns) / NS_PER_SECOND)
            yield waiting.node

    def observe_overlap(
        self,
        record: Record,
        sample: NodeSample,
        watermark: NodeWatermark,
        overlap_ns: int,
        *,
        now_ns: int,
    ) -> None:
        """Record that a tick was skipped because its time is booked already.

        At most one line a minute is logged per node.
        """
        node = node_key(sample)
        metrics.OVERLAPPING_TOTAL.inc()
        metrics.OVERLAPPING_SECONDS_TOTAL.inc(sample.interval_ns / NS_PER_SECOND)
        # Ticks of one of two real agents are booked, so their node does not count as unbooked. If a
        # writer covers the node's time with forged ticks, it does.
        self.observe_unbooked(record, sample, now_ns=now_ns)
        if count := self._overlaps.count(node):
            _log.warning(
                "samples_overlapped",
                **_names(node),
                boot_ids=[sample.boot_id, watermark.boot_id],
                overlap_seconds=round(overlap_ns / NS_PER_SECOND, 3),
                count=count,
            )

    def observe_event(
        self,
        event: GpuEvent,
        sample: NodeSample,
        descriptions: PodDescriptions,
        *,
        partition: int,
        now_ns: int,
    ) -> None:
        """Record that a tick was booked."""
        node = node_key(event)
        # One tick per poll: the newest one shows the minimum delay of the pipeline best.
        if sample.time_ns > self._newest_ns:  # noqa: PLR1730 - max() costs three times as much, for each tick
            self._newest_ns = sample.time_ns
        self._unbooked.observe_booked(node)
        if event.late:
            metrics.LATE_TOTAL.inc()
        if event.gap_ns is not None:
            metrics.GAPS_TOTAL.inc()
            metrics.GAP_SECONDS_TOTAL.inc(event.gap_ns / NS_PER_SECOND)
        if event.late_adjustments:
            metrics.LATE_ADJUSTED_SECONDS_TOTAL.inc(adjusted_ns(event.late_adjustments) / 1e9)
        if descriptions.pending:
            metrics.PENDING_TOTAL.inc(len(descriptions.pending))
            self._pending.record(
                descriptions.pending, node=node, partition=partition, now_ns=now_ns
            )
        if descriptions.foreign:
            self.observe_foreign(node, descriptions.foreign)
        if descriptions.named:
            metrics.NAMED_TOTAL.inc(descriptions.named)
        if descriptions.foreign_allocatees:
            metrics.NAMES_REFUSED_TOTAL.labels(reason=metrics.FOREIGN_ALLOCATION).inc(
                descriptions.foreign_allocatees
            )
        self._ticks_to_check -= 1
        if not self._ticks_to_check:
            self._ticks_to_check = TICKS_PER_CHECK
            self._check(event, interval_ns=sample.interval_ns)

    def _check(self, event: GpuEvent, *, interval_ns: int) -> None:
        """Check that the entries of a tick sum to its device totals."""
        wrong = next(imbalances(event.gpus, interval_ns), None)
        if wrong is None:
            return
        metrics.UNBALANCED_TOTAL.inc()
        if count := self._unbalanced.count(wrong.quantity):
            _log.error(
                "sample_unbalanced",
                cluster=event.cluster,
                node=event.node,
                boot_id=event.boot_id,
                seq=event.seq,
                gpu_uuid=wrong.gpu_uuid,
                quantity=wrong.quantity,
                total=wrong.total,
                booked=wrong.booked,
                count=count,
            )

    def observe_foreign(self, node: str, pods: Iterable[PodRecord]) -> None:
        """Record that a node named pods that the API server has placed on other nodes."""
        pods = list(pods)
        if not pods:
            return
        metrics.NAMES_REFUSED_TOTAL.labels(reason=metrics.FOREIGN_POD).inc(len(pods))
        if count := self._foreign.count(node, more=len(pods)):
            _log.warning(
                "pod_names_rejected",
                **_names(node),
                reason=metrics.FOREIGN_POD,
                pods=[f"{pods[0].namespace}/{pods[0].name}"],
                pod_uid=pods[0].uid,
                pod_node=pods[0].node,
                count=count,
            )

    def observe_unresponsive(self, partition: int, nodes: Iterable[tuple[str, int]]) -> None:
        """Record which nodes of a partition send no ticks, and the times of their last ticks."""
        self._unresponsive.show(partition, nodes)

    def observe_clock_step(self, node: str, seconds: float) -> None:
        """Record that a node's clock was set after the previous tick."""
        self._skew.observe_clock_step(node, seconds)

    def observe_new_cluster(self, node: str) -> None:
        """Record that the first tick of a cluster came before any watermark that names it."""
        metrics.NEW_CLUSTERS_TOTAL.inc()
        if count := self._new_clusters.count("new_cluster"):
            _log.info("cluster_appeared", **_names(node), count=count)

    def observe_seq_ahead(self, node: str, seconds: float) -> None:
        """Record that the `seq` of a booked or rejected tick exceeds the time since boot."""
        metrics.SEQ_AHEAD_TOTAL.inc()
        if count := self._ahead.count(node):
            _log.warning(
                "node_seq_leapt", **_names(node), by_seconds=round(seconds, 3), count=count
            )

    def observe_unbooked(self, record: Record, sample: NodeSample, *, now_ns: int) -> None:
        """Record that a tick was not booked although it is not a duplicate."""
        written_ns = record.timestamp_ms * NS_PER_MS
        self._unbooked.observe_unbooked(
            node_key(sample), partition=record.partition, written_ns=written_ns, now_ns=now_ns
        )

    def observe_duplicate(
        self, record: Record, sample: NodeSample, watermark: NodeWatermark, *, now_ns: int
    ) -> None:
        """Record a duplicate tick; log a warning if all new ticks of its node are duplicates."""
        metrics.DUPLICATES_TOTAL.inc()
        written_ns = record.timestamp_ms * NS_PER_MS
        is_unbooked = self._unbooked.observe_duplicate(
            node_key(sample), partition=record.partition, written_ns=written_ns, now_ns=now_ns
        )
        if is_unbooked and (boot := watermark.boot_of(sample.boot_id)):
            by_seconds = (boot.seq - sample.seq) / 1e3
            _log.warning(
                "node_seq_leapt",
                **_names(node_key(sample)),
                by_seconds=by_seconds,
                count=1,
            )

    def report(self, now_ns: int) -> None:
        """Update the metrics of clocks and pending pods.

        Pods whose records did not come in time share one log line, with one of them as an example.
        """
        if self._newest_ns:
            self._skew.observe_ticks(self._newest_ns, now_ns=now_ns)
            self._newest_ns = 0
        self._unbooked.show(now_ns)
        expired = self._pending.expire(now_ns)
        metrics.PENDING.set(len(self._pending))
        if expired:
            metrics.UNKNOWN_TOTAL.inc(len(expired))
            first = expired[0]
            shown = [
                shorten(split_key(name)[1], NAME_CHARACTERS) for name in first.names[:NAMES_SHOWN]
            ]
            _log.warning("pods_not_found", count=len(expired), **_names(first.node), example=shown)

    def forget(self, partition: int) -> None:
        """Forget the pods and nodes of a partition that is no longer assigned."""
        self._pending.forget(partition)
        self._unbooked.forget(partition)
        self._unresponsive.forget(partition)
