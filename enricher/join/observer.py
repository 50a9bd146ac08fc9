"""What shows of a worker's ticks and pods in its metrics and its log; nothing follows from it.

Here lateness, gaps, pending pods and clocks are counted, and the books are checked against the
devices. What an event says of them is decided elsewhere.
"""

from collections.abc import Iterable
from typing import Final

import structlog

from enricher.join import metrics
from enricher.join.booking.settlement import settled_seconds
from enricher.join.pods.describe import PodDescriptions
from enricher.join.pods.pending import PendingPods
from enricher.join.progress.passage import NodeWatermark
from enricher.join.progress.skew import ClockSkew, WindowedMax
from enricher.join.progress.unbooked import UnbookedNodes
from gpuledger.bus.protocol import Record
from gpuledger.ledger.quantities import conservation_error
from gpuledger.records import GpuEvent, NodeSample, PodRecord
from gpuledger.runtime.logs import Repeats
from gpuledger.texts import shorten

# Checking costs about as much as booking: this is less than a hundredth of the work.
TICKS_PER_CHECK: Final = 200
NAMES_SHOWN: Final = 4
"""Of a pod: its UID and a few of its containers; a line is no place for all that a tick may say."""
NAME_CHARACTERS: Final = 100
_log = structlog.get_logger(__name__)


class JoinObserver:
    """Follows a worker's work; memory is bounded by the pods that are waited for."""

    def __init__(self, *, pending_pod_timeout_seconds: float) -> None:
        self._pending = PendingPods(pending_pod_timeout_seconds=pending_pod_timeout_seconds)
        self._skew = ClockSkew()
        self._errors = WindowedMax()
        self._ticks_to_check = 1
        self._newest_ns = 0
        self._ahead = Repeats()
        self._unbooked = UnbookedNodes()
        self._foreign = Repeats()

    def see_pod(self, pod: PodRecord, *, now_ns: int) -> Iterable[str]:
        """Record that a pod's record has come; yield the nodes that named it before."""
        self._skew.see_pod(pod, now_ns=now_ns)
        for waiting in self._pending.resolve(pod):
            metrics.PENDING_DELAY_SECONDS.observe(max(0, now_ns - waiting.first_ns) / 1e9)
            yield waiting.node

    def see_event(
        self,
        event: GpuEvent,
        sample: NodeSample,
        said: PodDescriptions,
        *,
        partition: int,
        now_ns: int,
    ) -> None:
        """Record that a tick was booked."""
        if sample.time_ns > self._newest_ns:  # noqa: PLR1730 - max() costs three times as much, for each tick
            self._newest_ns = sample.time_ns
        if self._unbooked:
            self._unbooked.see_booked(event.node)
        if event.late:
            metrics.LATE_TOTAL.inc()
        if event.gap_ns is not None:
            metrics.GAPS_TOTAL.inc()
            metrics.GAP_SECONDS_TOTAL.inc(event.gap_ns / 1e9)
        if event.settlements:
            metrics.SETTLED_SECONDS_TOTAL.inc(settled_seconds(event.settlements))
        if said.pending:
            metrics.PENDING_TOTAL.inc(len(said.pending))
            self._pending.note(said.pending, node=event.node, partition=partition, now_ns=now_ns)
        if said.foreign:
            self.see_foreign(event.node, said.foreign)
        if said.unknown_holders:
            metrics.NAMES_REFUSED_TOTAL.labels(reason=metrics.UNKNOWN_HOLDER).inc(
                said.unknown_holders
            )
        self._ticks_to_check -= 1
        if not self._ticks_to_check:
            self._ticks_to_check = TICKS_PER_CHECK
            self._check(event, sample, now_ns=now_ns)

    def see_foreign(self, node: str, pods: Iterable[PodRecord]) -> None:
        """Record that a node named pods that the API server has placed on other nodes."""
        pods = list(pods)
        if not pods:
            return
        metrics.NAMES_REFUSED_TOTAL.labels(reason=metrics.FOREIGN_POD).inc(len(pods))
        if count := self._foreign.count(node, more=len(pods)):
            _log.warning(
                "pod_names_refused",
                node=node,
                reason=metrics.FOREIGN_POD,
                pods=[f"{pods[0].namespace}/{pods[0].name}"],
                pod_uid=pods[0].uid,
                pod_node=pods[0].node,
                count=count,
            )

    def see_step(self, node: str, seconds: float) -> None:
        """Record that a node's clock was set since the tick before."""
        self._skew.see_step(node, seconds)

    def see_seq_ahead(self, node: str, seconds: float) -> None:
        """Record that a tick of a node runs ahead of its boot, be it booked or put aside."""
        metrics.SEQ_AHEAD_TOTAL.inc()
        if count := self._ahead.count(node):
            _log.warning("node_seq_leapt", node=node, by_seconds=round(seconds, 3), count=count)

    def see_refused(self, record: Record, sample: NodeSample, *, now_ns: int) -> None:
        """Record that a tick was put aside, as its `seq` runs ahead by more than can be."""
        written_ns = record.timestamp_ms * 1_000_000
        self._unbooked.see_refused(
            sample.node, partition=record.partition, written_ns=written_ns, now_ns=now_ns
        )

    def see_duplicate(
        self, record: Record, sample: NodeSample, watermark: NodeWatermark | None, *, now_ns: int
    ) -> None:
        """Record that a tick counts as booked before, and tell of a node whose ticks all do."""
        metrics.DUPLICATES_TOTAL.inc()
        seq = watermark.seq_of(sample.boot_id) if watermark else None
        written_ns = record.timestamp_ms * 1_000_000
        is_unbooked = self._unbooked.see_duplicate(
            sample.node, partition=record.partition, written_ns=written_ns, now_ns=now_ns
        )
        if is_unbooked and seq is not None:
            by_seconds = (seq - sample.seq) / 1e3
            _log.warning("node_seq_leapt", node=sample.node, by_seconds=by_seconds, count=1)

    def tell(self, now_ns: int) -> None:
        """Show the clocks and who is waited for; log one pod for all that did not come in time."""
        if self._newest_ns:
            self._skew.see_ticks(self._newest_ns, now_ns=now_ns)
            self._newest_ns = 0
        self._unbooked.show(now_ns)
        expired = self._pending.expire(now_ns)
        metrics.PENDING.set(len(self._pending))
        if expired:
            metrics.UNKNOWN_TOTAL.inc(len(expired))
            first = expired[0]
            shown = [shorten(name, NAME_CHARACTERS) for name in first.names[:NAMES_SHOWN]]
            _log.warning("pods_not_found", count=len(expired), node=first.node, example=shown)

    def forget(self, partition: int) -> None:
        """Forget what belongs to a partition that is no longer held."""
        self._pending.forget(partition)
        self._unbooked.forget(partition)

    def _check(self, event: GpuEvent, sample: NodeSample, *, now_ns: int) -> None:
        error = conservation_error(event.gpus, sample.interval_ns / 1e9)
        if self._errors.add(error, now_ns=now_ns):
            metrics.CONSERVATION_ERROR_RATIO.set(self._errors.maximum)
