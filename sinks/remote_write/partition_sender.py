"""One partition of the remote-write sink: what waits to be sent of it, and the task that sends it.

A partition has at most one request on its way, so that no two of a series overtake each other; the
partitions go side by side, and one that is held up holds up no other.

**Refusals.** A receiver of remote-write 1.0 may take a request whole or not at all, so one bad
sample costs all that travel with it. What is refused is divided until the refused tick is alone;
the others are delivered. Its node travels apart for a while then, as its next tick is likely to be
refused, too.

**Repetitions.** What lay in the partition when it was assigned may have been delivered before, and
not been committed. A strict receiver refuses that as out of order. So a node's ticks that are
refused so before its first one that is taken are repetitions, which are counted, and no losses.

**Poison.** A receiver may answer one request with 5xx for ever, which is to be tried again for
ever. Where it takes others meanwhile, that ends: such a request is divided, and what is left of it
goes aside with the receiver's words (`Writer`).
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final

import structlog

from gpuledger.clock import NS_PER_MINUTE, NS_PER_SECOND, Clock
from gpuledger.keys import node_key
from gpuledger.recent import Budget
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check, RetryingCaller
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import end_tasks
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.metrics import (
    OVER_BUDGET_TOTAL,
    SENT_TOTAL,
    SERIES_FORGOTTEN_TOTAL,
    count_dropped,
    measure_request,
)
from sinks.protocol import Batch, LargeTurns, SinkContext
from sinks.registry import REMOTE_WRITE
from sinks.remote_write.active_series import ActiveSeries, EncodedTick
from sinks.remote_write.namespace_budgets import NamespaceBudgets, OverBudget
from sinks.remote_write.write_client import RemoteWriteClient, is_behind_newer, is_out_of_order
from sinks.remote_write.write_requests import (
    FUTURE,
    TOO_OLD,
    AgeLimits,
    WriteRequest,
    WrittenTick,
    admit,
    split_into_requests,
)
from sinks.settings import RemoteWriteSettings
from sinks.timelines import TickOrder, Timelines

NAME: Final = REMOTE_WRITE.name
APART_NS: Final = NS_PER_MINUTE
"""How long a node whose tick was refused travels apart from others."""
_TAKES_OTHERS_NS: Final = NS_PER_MINUTE
"""A receiver that took another request within that time is at work."""
_POISON_ATTEMPTS: Final = 5
_DIVIDED_PART: Final = 10
"""Several ticks together have this part of the time that one has before it goes aside."""
_RELEASE_SECONDS: Final = 3.0
_CANCEL_SECONDS: Final = 0.5  # both together within `loop.RELEASE_SECONDS`
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class FailingError(RejectedError):
    """The receiver fails at this request for long, and takes others; the message is its own."""


class Writer:
    """Writes requests until they are taken or refused; one for all partitions.

    It knows by that whether a receiver which fails at one request takes others.
    """

    def __init__(
        self,
        *,
        client: RemoteWriteClient,
        retry: RetryingCaller[ReceiverUnavailableError],
        clock: Clock,
        poison_seconds: float,
    ) -> None:
        """Take what sends; after `poison_seconds` of failures one tick goes aside, 0 is never."""
        self._client, self._retry, self._clock = client, retry, clock
        self._poison_ns = round(poison_seconds * NS_PER_SECOND)
        self._taken_ns = -_TAKES_OTHERS_NS

    async def write(self, body: bytes, *, ticks: int) -> None:
        """Return when the receiver has taken the samples of so many ticks.

        Raises RejectedError where it refuses them, FailingError where it fails at them alone.
        """
        begun_ns, attempts = self._clock.monotonic_ns(), count()

        async def attempt() -> None:
            number = next(attempts)
            try:
                with measure_request(NAME, len(body)):
                    await self._client.write(body, attempt=number)
            except ReceiverUnavailableError as error:
                if self._is_poison(begun_ns, attempts=number + 1, ticks=ticks):
                    raise FailingError(str(error)) from error
                raise

        await self._retry(attempt)
        self._taken_ns = self._clock.monotonic_ns()

    def _is_poison(self, begun_ns: int, *, attempts: int, ticks: int) -> bool:
        now_ns = self._clock.monotonic_ns()
        limit_ns = self._poison_ns // _DIVIDED_PART if ticks > 1 else self._poison_ns
        takes_others = self._taken_ns > begun_ns and now_ns - self._taken_ns < _TAKES_OTHERS_NS
        is_long = attempts >= _POISON_ATTEMPTS and now_ns - begun_ns >= limit_ns
        return bool(limit_ns) and takes_others and is_long


@dataclass(frozen=True, kw_only=True)
class _PolledBatch:
    batch: Batch
    context: SinkContext
    size_bytes: int


class PartitionSender:
    """Sends what it is given of one partition, in order, for as long as that takes."""

    def __init__(
        self,
        *,
        writer: Writer,
        settings: RemoteWriteSettings,
        clock: Clock,
        check: Check,
        budget: Budget,
        turns: LargeTurns,
        namespaces: NamespaceBudgets | None = None,
    ) -> None:
        self._writer, self._settings, self._clock = writer, settings, clock
        self._check, self._turns = check, turns
        self._series = ActiveSeries(
            budget=budget,
            external_labels=settings.external_labels,
            sent_labels=settings.sent_labels,
            health_interval_seconds=settings.health_interval_seconds,
            dcgm=settings.dcgm,
            namespaces=namespaces,
        )
        self._timelines = Timelines()
        self._waiting: deque[_PolledBatch] = deque()
        self._task: asyncio.Task[None] | None = None
        self._is_ending = False
        self._apart_until_ns: dict[str, int] = {}
        self._taken_nodes: set[str] = set()
        self.repeated_before: int | None = None
        """The offset before which records may have been delivered by a former owner; `None` while
        that is not known."""
        self.waiting_bytes = 0
        """How many bytes of records are held that were not sent yet."""

    def add(self, batch: Batch, context: SinkContext) -> None:
        """Take what was polled, to be sent behind what waits."""
        size_bytes = sum(len(record.value or b"") for record, _ in batch.items)
        self._waiting.append(_PolledBatch(batch=batch, context=context, size_bytes=size_bytes))
        self.waiting_bytes += size_bytes
        if self._task is None:
            self._task = asyncio.create_task(self._send_waiting())

    def check(self) -> None:
        """Raise what has ended the task: a defect must end the sink."""
        if self._task is not None and self._task.done():
            self._task.result()
            self._task = asyncio.create_task(self._send_waiting()) if self._waiting else None

    def has_silent(self, before_ns: int) -> bool:
        """Return whether nothing waits, and there are nodes whose last tick came before that."""
        return self._task is None and self._series.has_silent(before_ns)

    def end_silent(self, *, before_ns: int) -> None:
        """Begin to end the series of nodes whose last tick came before that; nothing may wait."""
        self._task = asyncio.create_task(
            self._send_ends(self._series.end_silent(before_ns=before_ns))
        )

    async def end(self) -> None:
        """Let the request on its way be answered, and forget all else, without ending series.

        A request that is cancelled on its way may have been taken: its ticks come twice.
        """
        self._forget_waiting()
        await end_tasks(self._task, grace_seconds=_RELEASE_SECONDS, seconds=_CANCEL_SECONDS)
        self._series.clear()

    def abandon(self) -> None:
        """End without waiting: the partition was lost, and has come back already."""
        self._forget_waiting()
        if self._task is not None:
            self._task.cancel()
        self._series.clear()

    def _forget_waiting(self) -> None:
        self._is_ending = True
        self._waiting.clear()
        self.waiting_bytes = 0

    async def _send_waiting(self) -> None:
        while self._waiting:
            polled = self._waiting[0]
            await self._send_batch(polled.batch, polled.context)
            # Given up in between: then nothing waits any more.
            if not self._is_ending:
                self._waiting.popleft()
                self.waiting_bytes -= polled.size_bytes

    async def _send_batch(self, batch: Batch, context: SinkContext) -> None:
        partition = batch.partition
        async with self._turns.enter(batch):
            # Ticks are encoded as requests are sent, so that few of them are held.
            requests = split_into_requests(
                self._ticks(batch, context),
                max_samples=self._settings.samples_per_request,
                is_apart=self._is_apart,
            )
            for request in requests:
                await self._send(request, context)
                context.acknowledge(partition, request.next_offset, time_ns=request.newest_ns)
                if self._is_ending:
                    return
            # What came behind the last request was put aside, or had no samples.
            context.acknowledge(partition, batch.next_offset)

    def _ticks(self, batch: Batch, context: SinkContext) -> Iterator[WrittenTick]:
        series, settings = self._series, self._settings
        forgotten_before = series.forgotten
        time_ns, now_ns = self._clock.time_ns(), self._clock.monotonic_ns()
        for record, event, order, refusal in admit(
            batch.items,
            self._timelines,
            time_ns=time_ns,
            monotonic_ns=now_ns,
            limits=AgeLimits.of(settings),
        ):
            if refusal in {FUTURE, TOO_OLD}:
                detail = _explain_age(event.time_ns - time_ns, time_ns=event.time_ns)
                context.dead_letters.reject(record, reason=refusal or "", detail=detail)
                continue
            if refusal is not None:
                count_dropped(NAME, refusal)
                continue
            try:
                encoded = (
                    series.encode_past(event, now_ns=now_ns)
                    if order is TickOrder.SUPERSEDED
                    else series.encode(event, now_ns=now_ns)
                )
            except ValueError as error:
                context.dead_letters.reject(record, reason="invalid", detail=str(error))
                continue
            if encoded.samples:
                yield WrittenTick(
                    node=node_key(event),
                    time_ns=event.time_ns,
                    record=record,
                    encoded=encoded,
                    is_late=isinstance(event, GpuEvent) and bool(event.late),
                )
        SERIES_FORGOTTEN_TOTAL.inc(series.forgotten - forgotten_before)
        _tell_left_out(series.take_left_out())

    async def _send(self, request: WriteRequest, context: SinkContext) -> None:
        try:
            await self._writer.write(request.body, ticks=len(request.ticks))
        except RejectedError as error:
            if len(request.ticks) > 1:
                for part in request.halves():
                    await self._send(part, context)
            else:
                self._put_aside(request.ticks[0], error, context)
        else:
            SENT_TOTAL.labels(sink=NAME).inc(request.samples)
            for tick in request.ticks:
                self._apart_until_ns.pop(tick.node, None)
                if self._may_be_repeated(tick):
                    self._taken_nodes.add(tick.node)

    def _put_aside(self, tick: WrittenTick, error: RejectedError, context: SinkContext) -> None:
        """Go on without a tick that is refused: it must not be sent again."""
        self._apart_until_ns[tick.node] = self._clock.monotonic_ns() + APART_NS
        message = str(error)
        is_order = is_out_of_order(message)
        if is_behind_newer(message) and self._is_repetition(tick):
            count_dropped(NAME, "repeated")
            return
        # What is only out of order says nothing of the receiver: a node's clock was set back.
        if not is_order:
            self._check.failed(f"rejected: {message}")
            if number := _repeats.count("samples", more=tick.encoded.samples):
                _log.warning("samples_rejected", count=number, error=message)
        reason = "out_of_order" if is_order else "rejected"
        if isinstance(error, FailingError):
            reason = "failing"
        context.dead_letters.reject(tick.record, reason=reason, detail=message)

    def _may_be_repeated(self, tick: WrittenTick) -> bool:
        return tick.record.offset < (self.repeated_before or 0)

    def _is_repetition(self, tick: WrittenTick) -> bool:
        """Return whether a tick that is behind what the receiver has was sent to it before.

        One that came late to Kafka is behind it by itself.
        """
        is_first = tick.node not in self._taken_nodes and not tick.is_late
        return is_first and self._may_be_repeated(tick)

    def _is_apart(self, node: str) -> bool:
        until_ns = self._apart_until_ns.get(node)
        if until_ns is None:
            return False
        if self._clock.monotonic_ns() < until_ns:
            return True
        del self._apart_until_ns[node]
        return False

    async def _send_ends(self, ends: Iterable[EncodedTick]) -> None:
        for tick in ends:
            if self._is_ending:
                return
            try:
                await self._writer.write(tick.body, ticks=1)
            except RejectedError as error:
                if number := _repeats.count("stale_markers", more=tick.samples):
                    _log.warning("stale_markers_rejected", count=number, error=str(error))
            else:
                SENT_TOTAL.labels(sink=NAME).inc(tick.samples)


def _tell_left_out(left_out: Mapping[OverBudget, int]) -> None:
    for one, samples in left_out.items():
        # The page names nobody: who may read it is not who may know of all pods.
        OVER_BUDGET_TOTAL.labels(rule=one.rule).inc(samples)
        if number := _repeats.count(one, more=samples):
            _log.warning("namespace_samples_dropped", count=number, **one._asdict())


def _explain_age(ahead_ns: int, *, time_ns: int) -> str:
    seconds = ahead_ns / NS_PER_SECOND
    if seconds < 0:
        return f"time_ns {time_ns} is {-seconds:.0f} s old, more than remote_write.max_age_seconds"
    return (
        f"time_ns {time_ns} is {seconds:.0f} s ahead of this machine's clock,"
        " or of the ticks behind it: its series would take nothing more until then"
    )
