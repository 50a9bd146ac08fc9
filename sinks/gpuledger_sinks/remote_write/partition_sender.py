"""One partition of the remote-write sink: its waiting records, and the task that sends them.

A partition has at most one request in flight, so that samples of a series never overtake each
other. Partitions send concurrently, so a slow partition does not delay the others.

A receiver of remote-write 1.0 may accept a request only as a whole, so one bad sample rejects all
samples in it. A rejected request is divided until the rejected tick is isolated and the other ticks
are delivered. `refused_ticks` decides what to do with rejected ticks.

**Incidents** have their own topic, and come from its partition with the same number. They are
counted in the same state as the node's events, so both go through one queue. The counters of
incidents are committed before they are sent (`node_incidents`).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from gpuledger.bus.protocol import Record, TopicPartition
from gpuledger.clock import NS_PER_HOUR, NS_PER_MS, NS_PER_SECOND, Clock
from gpuledger.errors import BusError, FencedError
from gpuledger.keys import node_key
from gpuledger.ledger.series import EventSeries
from gpuledger.recent import Budget, Recent
from gpuledger.records import Incident, NodeCounters, NodeReadings
from gpuledger.runtime import Check
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.secret import shown_url
from gpuledger_sinks.errors import PartialWriteError, RejectedError
from gpuledger_sinks.metrics import (
    COUNTERS_ENDED_TOTAL,
    OVER_LIMIT_TOTAL,
    SENT_TOTAL,
    SERIES_FORGOTTEN_TOTAL,
    UNWRITTEN_SAMPLES_TOTAL,
    count_dropped,
)
from gpuledger_sinks.protocol import Batch, LargeTurns, SinkContext
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.active_series import ActiveSeries, EncodedTick
from gpuledger_sinks.remote_write.counter_state import CounterState
from gpuledger_sinks.remote_write.node_intervals import (
    HealthOfNode,
    IntervalSamples,
    NodeIntervals,
)
from gpuledger_sinks.remote_write.refused_ticks import RefusedTicks
from gpuledger_sinks.remote_write.request_writer import Writer
from gpuledger_sinks.remote_write.wire import encode_time
from gpuledger_sinks.remote_write.write_requests import (
    DUPLICATE,
    FUTURE,
    TOO_OLD,
    AgeLimits,
    WriteRequest,
    WrittenTick,
    admit,
    split_into_requests,
)
from gpuledger_sinks.settings import RemoteWriteSettings
from gpuledger_sinks.timelines import TickOrder, TickRecord, Timelines

NAME: Final = REMOTE_WRITE.name
_MAX_NODES: Final = 5_000
"""Maximum number of nodes per partition. With 10,000 nodes on twelve partitions, a partition has a
fifth of this number."""
_LATE_NS: Final = 2 * NS_PER_SECOND
"""How long after its latest possible end an interval is closed if no further tick comes."""
_OLD_INCIDENT_NS: Final = NS_PER_HOUR
"""Incidents older than this are not counted if the group has counted no incidents so far."""
_RELEASE_SECONDS: Final = 3.0
_CANCEL_SECONDS: Final = 0.5  # the sum must be below `loop.RELEASE_SECONDS`
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


@dataclass(frozen=True, kw_only=True)
class _PolledBatch:
    batch: Batch
    context: SinkContext
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """The saved state of a partition from which its sender continues."""

    counted: Mapping[str, NodeCounters]
    """The counters of each node, by its key."""
    repeated_before: int
    """A previous owner may have delivered records before this offset."""


@dataclass(frozen=True, kw_only=True)
class IncidentsTakenOver:
    """The saved state of a partition's incidents from which its sender continues."""

    at: TopicPartition
    old_before: int
    """Old incidents before this offset are dropped, because the group has counted no incidents so
    far; 0 if it has counted any."""
    next_offset: int | None = None
    """The offset to commit before the first incident is read; `None` to commit nothing."""


@dataclass(frozen=True, kw_only=True)
class SenderParts:
    """The objects that the senders of all partitions share."""

    writer: Writer
    state: CounterState
    settings: RemoteWriteSettings
    clock: Clock
    check: Check
    budget: Budget
    """Memory for the labels of all series."""
    values: EventSeries
    """Makes the values of a tick."""
    turns: LargeTurns


class PartitionSender:
    """Sends the records of one partition in order, and retries without a time limit."""

    def __init__(self, at: TopicPartition, *, shared: SenderParts, taken_over: TakenOver) -> None:
        """Continue from the partition's saved counters."""
        self._at, self._shared, self._settings = at, shared, shared.settings
        self._clock, self._interval_ns = shared.clock, interval_ns_of(shared.settings)
        self._series = ActiveSeries(
            budget=shared.budget,
            external_labels=shared.settings.external_labels,
            max_series=shared.settings.max_series_per_node,
        )
        self._timelines = Timelines()
        self._nodes: Recent[str, NodeIntervals] = Recent(max_a_day=_MAX_NODES)
        self._incident_series = ActiveSeries(
            budget=shared.budget,
            external_labels=shared.settings.external_labels,
        )
        self._incidents: IncidentsTakenOver | None = None
        self._incidents_offset: int | None = None
        self._health: Recent[str, HealthOfNode] = Recent(max_a_day=_MAX_NODES)
        self._health_ns = round(shared.settings.health_interval_seconds * NS_PER_SECOND)
        self._former: set[str] = set()
        """Nodes whose series a previous owner sent, and which have had no tick since then."""
        for node, counted in taken_over.counted.items():
            self._restore(node, counted)
        self._waiting: deque[_PolledBatch] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._refused = RefusedTicks(
            receiver=shown_url(shared.settings.url),
            check=shared.check,
            clock=shared.clock,
            repeated_before=taken_over.repeated_before,
        )
        self._sent_offset: int | None = None
        self._committed_offsets: Mapping[TopicPartition, int] = {}
        self._commit_ns = round(shared.settings.commit_interval_seconds * NS_PER_SECOND)
        self._committed_ns = self._clock.monotonic_ns() - self._commit_ns
        self._is_uncommitted = False
        self.waiting_bytes = 0
        """Size of the records that were not sent yet, in bytes as stored in Kafka."""
        self.undone: BusError | FencedError | None = None
        """Why sent samples could not be committed; the partition must be taken over again."""

    def add_incidents(self, taken_over: IncidentsTakenOver) -> None:
        """Also count the incidents in the partition with the same number, from the saved state."""
        self._incidents, self._incidents_offset = taken_over, taken_over.next_offset

    def add(self, batch: Batch, context: SinkContext) -> None:
        """Queue polled records for sending."""
        if self.undone is not None:
            return  # the records are polled again
        size_bytes = sum(len(record.value or b"") for record, _ in batch.items)
        self._waiting.append(_PolledBatch(batch=batch, context=context, size_bytes=size_bytes))
        self.waiting_bytes += size_bytes
        if self._task is None:
            self._task = asyncio.create_task(self._send_waiting())

    def check(self) -> None:
        """Raise the error of a failed task, because a defect must end the sink.

        If a task has ended and records wait, starts the next task.
        """
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = asyncio.create_task(self._send_waiting()) if self._waiting else None

    def has_silent(self, *, unresponsive_ns: int, now_ns: int) -> bool:
        """Return whether `end_silent` has work, which may be only a commit.

        False while records wait. `unresponsive_ns` is the time without ticks after which a node's
        series end.
        """
        if self._task is not None or self.undone is not None:
            return False
        if self._is_uncommitted and self._is_due(now_ns):
            return True
        # Incidents have separate series, which end together with the node's other series.
        before_ns = now_ns - unresponsive_ns
        return any(series.has_silent(before_ns) for series in self._all_series) or any(
            self._overdue(now_ns)
        )

    def end_silent(self, context: SinkContext, *, unresponsive_ns: int, now_ns: int) -> None:
        """Start a task that closes and sends overdue intervals; no records may be waiting.

        It also ends the series of nodes without ticks for `unresponsive_ns`, and commits.
        """
        self._task = asyncio.create_task(
            self._send_silent(context, now_ns - unresponsive_ns, now_ns)
        )

    async def end(self, context: SinkContext) -> None:
        """Let the request in flight finish, then forget the partition's records and series.

        Sends no stale markers, because the partition's next owner continues the series. A request
        that takes too long is cancelled. The receiver may still have accepted it, so its ticks may
        be sent twice. If all requests were answered, the state is committed.
        """
        # Checked before `_forget_waiting`, because a batch stays in the queue until it is done.
        is_idle = not self._waiting and (self._task is None or self._task.done())
        self._forget_waiting()
        if is_idle and self._is_uncommitted and self.undone is None:
            self._task = asyncio.create_task(self._commit(context))
        await end_tasks(self._task, grace_seconds=_RELEASE_SECONDS, seconds=_CANCEL_SECONDS)
        self._clear()

    def abandon(self) -> None:
        """End without waiting and without a commit, because the partition was lost."""
        self._forget_waiting()
        if self._task is not None:
            self._task.cancel()
        self._clear()

    @property
    def _all_series(self) -> tuple[ActiveSeries, ActiveSeries]:
        return self._series, self._incident_series

    def _clear(self) -> None:
        for series in self._all_series:
            series.clear()

    def _restore(self, node: str, counted: NodeCounters) -> None:
        try:
            intervals = self._new_node(node, counted)
        except ValueError as error:
            # Its counters restart, which readers see as a reset.
            if count := _repeats.count("counters"):
                _log.warning("counters_skipped", key=node, count=count, error=str(error))
            return
        self._nodes[node] = intervals
        self._timelines.restore(
            node,
            intervals.boots,
            time_ns=counted.time_ns,
            received_ns=self._clock.monotonic_ns(),
        )
        self._former.add(node)

    def _new_node(self, node: str, counted: NodeCounters | None = None) -> NodeIntervals:
        return NodeIntervals(
            node,
            values=self._shared.values,
            interval_ns=self._interval_ns,
            incidents_ns=self._health_ns,
            counted=counted,
        )

    def _forget_waiting(self) -> None:
        self._is_ending = True
        self._waiting.clear()
        self.waiting_bytes = 0

    async def _send_waiting(self) -> None:
        while self._waiting and self.undone is None:
            polled = self._waiting[0]
            if not await self._work_on(polled):
                return
            self._is_uncommitted = True
            # If the partition was revoked during the last request, everything counted was answered.
            if self._is_ending:
                await self._commit(polled.context)
                return
            self._waiting.popleft()
            self.waiting_bytes -= polled.size_bytes
            if self._is_due(self._clock.monotonic_ns()):
                await self._commit(polled.context)

    async def _work_on(self, polled: _PolledBatch) -> bool:
        """Send the ticks or count the incidents of a batch; return whether it is finished."""
        if self._incidents is not None and polled.batch.partition == self._incidents.at:
            await self._count_incidents(polled.batch, polled.context, self._incidents)
            return True
        return await self._send_batch(polled.batch, polled.context)

    async def _send_batch(self, batch: Batch, context: SinkContext) -> bool:
        """Send the ticks of a batch; return whether all were sent.

        False if the partition is being revoked. The counters then include ticks that were not sent,
        and must not be committed.
        """
        async with self._shared.turns.enter(batch):
            # Ticks are encoded only when their request is sent, so that few are in memory.
            requests = split_into_requests(
                self._ticks(batch, context),
                max_samples=self._settings.samples_per_request,
                is_apart=self._refused.is_apart,
            )
            for request in requests:
                if self._is_ending:
                    return False
                await self._send(request, context)
                context.acknowledge(
                    self._at, request.sent_before, time_ns=request.newest_ns, commits_itself=True
                )
            # Records after the last request belong to open intervals, or were rejected.
            self._sent_offset = batch.next_offset
            context.acknowledge(self._at, batch.next_offset, commits_itself=True)
        return True

    async def _count_incidents(
        self, batch: Batch, context: SinkContext, taken_over: IncidentsTakenOver
    ) -> None:
        """Count incidents and commit the counters, after which they may be sent."""
        now_ns = self._clock.monotonic_ns()
        too_old_ns = self._clock.time_ns() - _OLD_INCIDENT_NS
        for record, attributed in batch.items:
            incident: Incident = attributed.incident
            if record.offset < taken_over.old_before and incident.time_ns < too_old_ns:
                count_dropped(NAME, TOO_OLD)
            elif not self._node(node_key(incident), now_ns).count_incident(incident):
                count_dropped(NAME, DUPLICATE)
        self._incidents_offset = batch.next_offset
        await self._commit(context)
        if self.undone is None:
            context.acknowledge(batch.partition, batch.next_offset, commits_itself=True)

    def _node(self, key: str, now_ns: int) -> NodeIntervals:
        self._nodes.go_on(now_ns)
        if (node := self._nodes.get(key)) is None:
            node = self._nodes[key] = self._new_node(key)
        return node

    def _is_due(self, now_ns: int) -> bool:
        return now_ns - self._committed_ns >= self._commit_ns

    async def _commit(self, context: SinkContext) -> None:
        """Commit changed counters with the offsets of the first records that they do not include.

        No request may be in flight, because the counters must match the answered requests. Sets
        `undone` if the commit fails.
        """
        offsets = self._next_offsets()
        changed = [node for node in self._nodes.values() if node.has_changed]
        self._committed_ns, self._is_uncommitted = self._clock.monotonic_ns(), False
        if not offsets or (not changed and offsets == self._committed_offsets):
            return
        try:
            # Dead letters first: after a crash in between, a committed record without its dead
            # letter would be lost.
            await context.dead_letters.flush()
            await self._shared.state.commit(self._at.partition, changed, offsets=offsets)
        except (BusError, FencedError) as error:
            self.undone = error
        else:
            self._committed_offsets = offsets
        COUNTERS_ENDED_TOTAL.inc(sum(node.take_ended_early() for node in changed))

    def _next_offsets(self) -> Mapping[TopicPartition, int]:
        """Return for each partition the offset of the first record that is not counted yet."""
        offsets: dict[TopicPartition, int] = {}
        if (offset := self._next_offset()) is not None:
            offsets[self._at] = offset
        if self._incidents is not None and self._incidents_offset is not None:
            offsets[self._incidents.at] = self._incidents_offset
        return offsets

    def _next_offset(self) -> int | None:
        """Return the offset of the first tick not counted yet; `None` if nothing was sent."""
        opened = [
            offset for node in self._nodes.values() if (offset := node.first_offset) is not None
        ]
        return min(opened, default=self._sent_offset)

    def _ticks(self, batch: Batch, context: SinkContext) -> Iterator[WrittenTick]:
        forgotten_before = self._forgotten
        time_ns, now_ns = self._clock.time_ns(), self._clock.monotonic_ns()
        for record, event, order, refusal in admit(
            batch.items,
            self._timelines,
            time_ns=time_ns,
            monotonic_ns=now_ns,
            limits=AgeLimits.of(self._settings),
        ):
            if refusal in {FUTURE, TOO_OLD}:
                detail = _explain_age(event.time_ns - time_ns, time_ns=event.time_ns)
                context.dead_letters.reject(record, reason=refusal or "", detail=detail)
                continue
            if refusal is not None:
                count_dropped(NAME, refusal)
                continue
            is_past = order is TickOrder.SUPERSEDED
            try:
                # Raises ValueError before the tick is counted, because rejected ticks are not
                # counted.
                encode_time(event.time_ns // NS_PER_MS)
                closed = self._add(event, record, is_past=is_past, now_ns=now_ns)
                yield from self._written(closed, now_ns)
            except ValueError as error:
                context.dead_letters.reject(record, reason="invalid", detail=str(error))
        SERIES_FORGOTTEN_TOTAL.inc(self._forgotten - forgotten_before)
        _count_left_out(self._series.take_left_out())

    @property
    def _forgotten(self) -> int:
        return sum(series.forgotten for series in self._all_series)

    def _add(
        self, event: TickRecord, record: Record, *, is_past: bool, now_ns: int
    ) -> Iterator[IntervalSamples]:
        """Add a tick to its node; yield the samples to send."""
        key = node_key(event)
        # The time of receipt is recorded here, because samples may be sent much later.
        for series in self._all_series:
            series.observe(key, now_ns=now_ns)
        if isinstance(event, NodeReadings):
            self._health.go_on(now_ns)
            if (health := self._health.get(key)) is None:
                health = self._health[key] = HealthOfNode(key, every_ns=self._health_ns)
            return health.add(event, record, is_past=is_past)
        node = self._node(key, now_ns)
        if key in self._former:
            # The series are restored only with the node's first tick, because a partition may have
            # thousands of nodes.
            self._former.discard(key)
            self._series.restore(node.sent_before(record), now_ns=now_ns)
        node.received_ns = now_ns
        return node.add(event, record, is_past=is_past)

    def _written(self, closed: Iterable[IntervalSamples], now_ns: int) -> Iterator[WrittenTick]:
        for samples in closed:
            series = self._incident_series if samples.is_of_incidents else self._series
            encoded = series.encode(samples, now_ns=now_ns)
            if encoded.samples:
                yield WrittenTick(
                    node=samples.node,
                    time_ns=samples.time_ns,
                    record=samples.record,
                    encoded=encoded,
                    is_late=samples.is_late,
                    is_repeated=samples.is_repeated,
                )

    async def _send(self, request: WriteRequest, context: SinkContext) -> None:
        try:
            written = await self._shared.writer.write(request, ticks=len(request.ticks))
        except PartialWriteError as error:
            _count_written(error.written, of=request.samples)
            self._refused.reject_part(request, error, context.dead_letters)
        except RejectedError as error:
            if len(request.ticks) > 1:
                for part in request.halves():
                    await self._send(part, context)
            else:
                self._refused.reject(request.ticks[0], error, context.dead_letters)
        else:
            _count_written(written, of=request.samples)
            self._refused.record_taken(request)

    def _overdue(self, now_ns: int) -> Iterator[NodeIntervals]:
        """Yield the nodes whose open interval must be closed although no further tick came."""
        before_ns = now_ns - 2 * self._interval_ns - _LATE_NS
        for node in self._nodes.values():
            if node.first_offset is not None and node.received_ns < before_ns:
                yield node

    async def _send_silent(self, context: SinkContext, before_ns: int, now_ns: int) -> None:
        """Send the overdue intervals, and end the series of unresponsive nodes."""
        for node in list(self._overdue(now_ns)):
            for tick in self._written(node.close(), now_ns):
                await self._send(WriteRequest(ticks=(tick,)), context)
        for series in self._all_series:
            for ends in series.end_silent(before_ns=before_ns):
                if self._is_ending:
                    return
                if ends.samples:
                    await self._send_ends(ends)
        if not self._is_ending:
            await self._commit(context)

    async def _send_ends(self, ends: EncodedTick) -> None:
        try:
            written = await self._shared.writer.write(ends, ticks=1)
        except RejectedError as error:
            if number := _repeats.count("stale_markers", more=ends.samples):
                _log.warning("stale_markers_rejected", count=number, error=str(error))
        else:
            _count_written(written, of=ends.samples)


def _count_written(written: int, *, of: int) -> None:
    SENT_TOTAL.labels(sink=NAME).inc(written)
    UNWRITTEN_SAMPLES_TOTAL.labels(sink=NAME).inc(of - written)


def interval_ns_of(settings: RemoteWriteSettings) -> int:
    """Return the length of an interval in nanoseconds; 0 means one interval per tick."""
    return round(settings.interval_seconds * NS_PER_SECOND)


def _count_left_out(left_out: Mapping[str, int]) -> None:
    for node, samples in left_out.items():
        OVER_LIMIT_TOTAL.inc(samples)
        if number := _repeats.count(node, more=samples):
            _log.warning("remote_write_samples_dropped", key=node, count=number)


def _explain_age(ahead_ns: int, *, time_ns: int) -> str:
    seconds = ahead_ns / NS_PER_SECOND
    if seconds < 0:
        return f"time_ns: {time_ns} is {-seconds:.0f} s old, more than remote_write.max_age_seconds"
    return (
        f"time_ns: {time_ns} is {seconds:.0f} s ahead of this machine's clock,"
        " or of the samples after it; the receiver would reject its series until then"
    )
