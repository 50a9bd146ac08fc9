"""The remote-write sink's shell: events in, samples out, one request a partition at a time.

Here live sending, and what becomes of a request that the receiver refuses. Series and requests are
made elsewhere in this package; the consume loop is `sinks.loop`'s.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Final

import structlog
from typing_extensions import override

from gpuledger.bus.protocol import Bus, Consumer, TopicPartition
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import BusError, NotAssignedError
from gpuledger.keys import node_key
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings.secret import shown_url
from sinks.errors import RejectedError, retry_receiver
from sinks.metrics import SENT_TOTAL, SERIES_FORGOTTEN_TOTAL, count_dropped
from sinks.protocol import Batch, LargeTurns, Partitions, Sink, SinkContext
from sinks.registry import REMOTE_WRITE
from sinks.remote_write.active_series import ActiveSeries, EncodedTick, series_budget
from sinks.remote_write.write_client import RemoteWriteClient, is_out_of_order, open_client
from sinks.remote_write.write_requests import (
    FUTURE,
    WriteRequest,
    WrittenTick,
    admit,
    split_into_requests,
)
from sinks.settings import RemoteWriteSettings
from sinks.timelines import TickOrder, Timelines

NAME: Final = REMOTE_WRITE.name
_RELEASE_SECONDS: Final = 3.0
_CANCEL_SECONDS: Final = 0.5  # both together within `loop.RELEASE_SECONDS`
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


@asynccontextmanager
async def open_sink(
    *,
    bus: Bus,  # noqa: ARG001  # as OpenSink has it
    settings: RemoteWriteSettings,
    readiness: Readiness,
    clock: Clock,
    group: str,  # noqa: ARG001  # as OpenSink has it
) -> AsyncIterator["RemoteWriteSink"]:
    """Open the sink that sends every event's samples to the receiver."""
    check = readiness.check("remote_write.receiver", severity=CheckSeverity.WARNING)
    check.ok("nothing sent yet")
    async with open_client(settings, readiness=readiness) as client:
        yield RemoteWriteSink(client=client, settings=settings, clock=clock, check=check)


class RemoteWriteSink(Sink):
    """Sends the samples of each partition in order, one request at a time."""

    name = NAME

    def __init__(
        self,
        *,
        client: RemoteWriteClient,
        settings: RemoteWriteSettings,
        clock: Clock,
        check: Check,
    ) -> None:
        self._client, self._settings, self._clock, self._check = client, settings, clock, check
        self.receiver = shown_url(settings.url)
        self._retry = retry_receiver(sink=NAME, check=check, clock=clock, receiver=self.receiver)
        self._budget = series_budget(settings.max_series_bytes)
        self._series: dict[TopicPartition, ActiveSeries] = {}
        self._timelines: dict[TopicPartition, Timelines] = {}
        self._repeated_before: dict[TopicPartition, int] = {}
        self._sending: dict[TopicPartition, asyncio.Task[None]] = {}
        self._turns = LargeTurns()

    @override
    async def assign(self, partitions: Partitions, context: SinkContext) -> None:
        """Begin without any series: those of who held these before are not known here."""
        for partition in partitions:
            if (series := self._series.pop(partition, None)) is not None:
                series.clear()
            # No end is sent of what the former owner has sent: its series go on here, and those
            # that do not end by themselves at the receiver, after five minutes.
            self._series[partition] = ActiveSeries(budget=self._budget)
            self._timelines[partition] = Timelines()
            self._repeated_before.pop(partition, None)

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Find out, of partitions newly held, up to where records may have been sent before."""
        # What lies there by now may have been sent by who held them before, and not been committed.
        unknown = context.consumer.assignment() - self._repeated_before.keys()
        if unknown:
            self._repeated_before.update(await context.consumer.end_offsets(unknown))
        return frozenset()

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Send what was polled; partitions go side by side, each in its order."""
        # Of one series no two requests may be on their way at once, or they overtake each other:
        # a node's series are all in one partition, and that sends one after another.
        async with asyncio.TaskGroup() as group:
            for batch in batches:
                at = batch.partition
                series = self._series.setdefault(at, ActiveSeries(budget=self._budget))
                self._sending[at] = group.create_task(self._send_all(batch, series, context))
        await self._end_silent(context)

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Let requests on their way be answered, then forget the series without ending them."""
        # Before anything is awaited: `handle` goes on meanwhile, and may end no series that the
        # next owner goes on with.
        released = [self._series.pop(at) for at in partitions if at in self._series]
        # A request that is cancelled on its way may have been taken: its ticks come twice.
        await end_tasks(
            *(self._sending.pop(at, None) for at in partitions),
            grace_seconds=_RELEASE_SECONDS,
            seconds=_CANCEL_SECONDS,
        )
        for series in released:
            series.clear()
        for partition in partitions:
            self._timelines.pop(partition, None)
            self._repeated_before.pop(partition, None)

    async def _send_all(self, batch: Batch, series: ActiveSeries, context: SinkContext) -> None:
        partition = batch.partition
        async with self._turns.enter(batch):
            # Ticks are encoded as requests are sent, so that few of them are held.
            requests = split_into_requests(
                self._ticks(batch, series, context),
                max_samples=self._settings.samples_per_request,
                repeated_before=self._repeated_before.get(partition, batch.next_offset),
            )
            for request in requests:
                await self._send(request, context)
                context.acknowledge(partition, request.next_offset, time_ns=request.newest_ns)
            # What came behind the last request was put aside, or had no samples.
            context.acknowledge(partition, batch.next_offset)

    async def _end_silent(self, context: SinkContext) -> None:
        """End the series of nodes of which nothing has come for long.

        What waits on the bus, as after an outage of the receiver, has come too: a node is silent
        where its partition is read to its end.
        """
        silent_ns = round(self._settings.stale_after_seconds * NS_PER_SECOND)
        before_ns = self._clock.monotonic_ns() - silent_ns
        silent = {at for at, series in self._series.items() if series.has_silent(before_ns)}
        read_to_the_end = await _read_to_the_end(silent, context.consumer)
        async with asyncio.TaskGroup() as group:
            for at in read_to_the_end:
                # It may have been given up meanwhile.
                if (series := self._series.get(at)) is not None:
                    ends = series.end_silent(before_ns=before_ns)
                    self._sending[at] = group.create_task(self._send_ends(ends))

    async def _send_ends(self, ends: Iterable[EncodedTick]) -> None:
        for tick in ends:
            try:
                await self._write(tick.body)
            except RejectedError as error:
                if count := _repeats.count("stale_markers", more=tick.samples):
                    _log.warning("stale_markers_rejected", count=count, error=str(error))
            else:
                SENT_TOTAL.labels(sink=NAME).inc(tick.samples)

    def _ticks(
        self, batch: Batch, series: ActiveSeries, context: SinkContext
    ) -> Iterator[WrittenTick]:
        forgotten_before = series.forgotten
        time_ns, now_ns = self._clock.time_ns(), self._clock.monotonic_ns()
        for record, event, order, refusal in admit(
            batch.items,
            self._timelines.setdefault(batch.partition, Timelines()),
            time_ns=time_ns,
            monotonic_ns=now_ns,
            max_ahead_ns=round(self._settings.max_future_seconds * NS_PER_SECOND),
        ):
            if refusal is not None:
                if refusal == FUTURE:
                    seconds = (event.time_ns - time_ns) / NS_PER_SECOND
                    detail = (
                        f"time_ns {event.time_ns} is {seconds:.0f} s ahead of this machine's clock,"
                        " or of the ticks behind it: its series would take nothing more until then"
                    )
                    context.dead_letters.reject(record, reason=refusal, detail=detail)
                else:
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
                    node=node_key(event), time_ns=event.time_ns, record=record, encoded=encoded
                )
        SERIES_FORGOTTEN_TOTAL.inc(series.forgotten - forgotten_before)

    async def _send(self, request: WriteRequest, context: SinkContext) -> None:
        try:
            await self._write(request.body)
        except RejectedError as error:
            if len(request.ticks) > 1:
                # One bad sample is enough for that: the others must not go down with it.
                for single in request.split():
                    await self._send(single, context)
                return
            # A 4xx must not be sent again, so the tick is put aside: all of it, as a receiver of
            # remote-write 1.0 takes a request whole or not at all.
            tick, message = request.ticks[0], str(error)
            is_order = is_out_of_order(message)
            if not is_order:
                self._check.failed(f"rejected: {message}")
                if count := _repeats.count("samples", more=tick.encoded.samples):
                    _log.warning("samples_rejected", count=count, error=message)
            # What is only out of order says nothing of the receiver: a node's clock was set back.
            reason = "out_of_order" if is_order else "rejected"
            context.dead_letters.reject(tick.record, reason=reason, detail=message)
        else:
            SENT_TOTAL.labels(sink=NAME).inc(request.samples)

    async def _write(self, body: bytes) -> None:
        attempts = count()
        await self._retry(lambda: self._client.write(body, attempt=next(attempts)))


async def _read_to_the_end(
    partitions: Collection[TopicPartition], consumer: Consumer
) -> list[TopicPartition]:
    """Return those of which there is nothing left to poll; none where the brokers do not answer."""
    if not partitions:
        return []
    try:
        ends = await consumer.end_offsets(partitions)
        return [at for at in sorted(partitions) if await consumer.position(at) >= ends[at]]
    except (BusError, NotAssignedError):
        return []
