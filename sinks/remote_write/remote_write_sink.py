"""The remote-write sink's shell: events in, samples out, one request a partition at a time.

Here lives which partitions there are, and how much may wait of each. How one is sent, and what
becomes of what a receiver refuses, is `partition_sender`'s; the consume loop is `sinks.loop`'s.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final

from typing_extensions import override

from gpuledger.bus.protocol import Bus, Consumer, TopicPartition
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import BusError, NotAssignedError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.settings.secret import shown_url
from sinks.errors import retry_receiver
from sinks.metrics import OVER_BUDGET_TOTAL, WAITING_BYTES
from sinks.protocol import Batch, LargeTurns, Partitions, Sink, SinkContext
from sinks.registry import REMOTE_WRITE
from sinks.remote_write.active_series import series_budget
from sinks.remote_write.namespace_budgets import NamespaceBudgets
from sinks.remote_write.partition_sender import PartitionSender, Writer
from sinks.remote_write.write_client import RemoteWriteClient, open_client
from sinks.settings import RemoteWriteSettings

NAME: Final = REMOTE_WRITE.name


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
        sink = RemoteWriteSink(client=client, settings=settings, clock=clock, check=check)
        try:
            yield sink
        finally:
            sink.close()


class RemoteWriteSink(Sink):
    """Has the samples of each partition sent in order; one that is held up holds up no other."""

    name = NAME

    def __init__(
        self,
        *,
        client: RemoteWriteClient,
        settings: RemoteWriteSettings,
        clock: Clock,
        check: Check,
    ) -> None:
        self._settings, self._clock, self._check = settings, clock, check
        self.receiver = shown_url(settings.url)
        self._writer = Writer(
            client=client,
            retry=retry_receiver(sink=NAME, check=check, clock=clock, receiver=self.receiver),
            clock=clock,
            poison_seconds=settings.poison_seconds,
        )
        self._budget = series_budget(settings.max_series_bytes)
        self._namespaces = NamespaceBudgets(settings.max_series_per_namespace)
        count_from_zero(OVER_BUDGET_TOTAL, rule=settings.max_series_per_namespace)
        self._turns = LargeTurns()
        self._senders: dict[TopicPartition, PartitionSender] = {}
        WAITING_BYTES.labels(sink=NAME).set_function(self._waiting_bytes)

    @override
    async def assign(self, partitions: Partitions, context: SinkContext) -> None:
        """Begin without any series: those of who held these before are not known here."""
        for partition in partitions:
            if (former := self._senders.pop(partition, None)) is not None:
                former.abandon()
            # No end is sent of what the former owner has sent: its series go on here, and those
            # that do not end by themselves at the receiver, after five minutes.
            self._senders[partition] = PartitionSender(
                writer=self._writer,
                settings=self._settings,
                clock=self._clock,
                check=self._check,
                budget=self._budget,
                turns=self._turns,
                namespaces=self._namespaces,
            )

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Find out, of partitions newly held, up to where records may have been sent before."""
        # What lies there by now may have been sent by who held them before, and not been committed.
        unknown = [at for at, sender in self._senders.items() if sender.repeated_before is None]
        held = context.consumer.assignment().intersection(unknown)
        if held:
            for at, end in (await context.consumer.end_offsets(held)).items():
                if (sender := self._senders.get(at)) is not None:
                    sender.repeated_before = end
        return frozenset()

    @override
    def full(self) -> Partitions:
        """Return the partitions of which enough waits: each has an equal part of what may."""
        part = self._settings.queue_bytes // max(1, len(self._senders))
        return frozenset(at for at, sender in self._senders.items() if sender.waiting_bytes >= part)

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Have what was polled sent behind what waits of its partition; do not wait for it."""
        for batch in batches:
            # Given up since it was polled, it is somebody else's.
            if (sender := self._senders.get(batch.partition)) is not None:
                sender.add(batch, context)
        for sender in self._senders.values():
            sender.check()
        await self._end_silent(context)

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Let requests on their way be answered, then forget the series without ending them."""
        # Before anything is awaited: `handle` goes on meanwhile, and may end no series that the
        # next owner goes on with.
        released = [self._senders.pop(at) for at in partitions if at in self._senders]
        await asyncio.gather(*(sender.end() for sender in released))

    def close(self) -> None:
        """End what is left, as after a consumer that gave nothing up."""
        for sender in self._senders.values():
            sender.abandon()
        self._senders.clear()

    async def _end_silent(self, context: SinkContext) -> None:
        """End the series of nodes of which nothing has come for long.

        What waits on the bus, as after an outage of the receiver, has come too: a node is silent
        where its partition is read to its end, and all that was read is sent.
        """
        silent_ns = round(self._settings.stale_after_seconds * NS_PER_SECOND)
        before_ns = self._clock.monotonic_ns() - silent_ns
        silent = {at for at, sender in self._senders.items() if sender.has_silent(before_ns)}
        for at in await _read_to_the_end(silent, context.consumer):
            # It may have been given up meanwhile.
            if (sender := self._senders.get(at)) is not None:
                sender.end_silent(before_ns=before_ns)

    def _waiting_bytes(self) -> int:
        return sum(sender.waiting_bytes for sender in self._senders.values())


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
