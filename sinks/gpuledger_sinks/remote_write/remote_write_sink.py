"""The remote-write sink: sends events as samples, one request per partition at a time.

This module takes over partitions and limits the records that wait in each. `partition_sender` sends
the records of a partition and handles rejections; `gpuledger_sinks.loop` polls and commits.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from typing_extensions import override

from gpuledger.bus.protocol import Bus, Consumer, TopicPartition
from gpuledger.bus.transactional_writers import pause_seconds_after
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import BusError, FencedError, NotAssignedError
from gpuledger.ledger.series import EventSeries
from gpuledger.records import NodeCounters
from gpuledger.runtime import Backoff, Check, CheckSeverity, Readiness
from gpuledger.settings.secret import shown_url
from gpuledger.topics import Topics
from gpuledger_sinks.errors import retry_receiver
from gpuledger_sinks.metrics import RETRIES_TOTAL, WAITING_BYTES
from gpuledger_sinks.protocol import (
    Batch,
    LargeTurns,
    Partitions,
    Refusal,
    RejectedEvent,
    Sink,
    SinkContext,
)
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.active_series import series_budget
from gpuledger_sinks.remote_write.counter_state import CounterState, open_counter_state
from gpuledger_sinks.remote_write.partition_sender import (
    IncidentsTakenOver,
    PartitionSender,
    SenderParts,
    TakenOver,
)
from gpuledger_sinks.remote_write.remote_write_redelivery import RemoteWriteRedelivery
from gpuledger_sinks.remote_write.request_writer import Writer
from gpuledger_sinks.remote_write.write_client import RemoteWriteClient, open_client
from gpuledger_sinks.settings import RemoteWriteSettings

NAME: Final = REMOTE_WRITE.name


_FENCED_SECONDS: Final = 3.0
"""Pause after another sink took over a partition of this one. This is a consumer group's heartbeat
interval; after it, the group has reported the partition's owner."""


@asynccontextmanager
async def open_sink(
    *,
    bus: Bus,
    settings: RemoteWriteSettings,
    readiness: Readiness,
    clock: Clock,
    group: str,
) -> AsyncIterator["RemoteWriteSink"]:
    """Open the sink that sends every event's samples to the receiver.

    Raises SettingsError if a file with the receiver's credentials cannot be used.
    """
    check = readiness.check("remote_write.receiver", severity=CheckSeverity.WARNING)
    check.ok("nothing sent yet")
    counters = readiness.check("remote_write.counters")
    # A member without partitions has nothing to take over.
    counters.ok("no partition assigned yet")
    async with (
        open_client(settings, readiness=readiness) as client,
        open_counter_state(bus=bus, group=group, clock=clock) as state,
    ):
        sink = RemoteWriteSink(
            client=client,
            state=state,
            settings=settings,
            clock=clock,
            check=check,
            counters=counters,
            topics=bus.topics,
        )
        try:
            yield sink
        finally:
            sink.close()


class RemoteWriteSink(Sink):
    """Sends the samples of each partition in order; a slow partition does not delay the others."""

    name = NAME

    def __init__(
        self,
        *,
        client: RemoteWriteClient,
        state: CounterState,
        settings: RemoteWriteSettings,
        clock: Clock,
        check: Check,
        counters: Check,
        topics: Topics,
    ) -> None:
        """Send with `client`, and keep counters in `state`.

        `check` reports failures of the client, and `counters` failures of the state.
        """
        self._settings, self._clock, self._state = settings, clock, state
        self._events = topics.events.name
        self._incidents = topics.attributed_incidents.name
        self._counters_check = counters
        self.receiver = shown_url(settings.url)
        self._shared = SenderParts(
            writer=Writer(
                client=client,
                retry=retry_receiver(sink=NAME, check=check, clock=clock, receiver=self.receiver),
                clock=clock,
                poison_seconds=settings.poison_seconds,
            ),
            state=state,
            settings=settings,
            clock=clock,
            check=check,
            budget=series_budget(settings.max_series_bytes),
            values=EventSeries(settings.sent_labels),
            turns=LargeTurns(),
        )
        self._redelivery = RemoteWriteRedelivery(
            writer=self._shared.writer, settings=settings, clock=clock
        )
        # Not a `RetryingCaller`: an aborted batch is polled again, not sent again.
        self._backoff = Backoff()
        self._unopened: set[TopicPartition] = set()
        # Incidents and events with the same number share a sender, because they share counters.
        self._senders: dict[TopicPartition, PartitionSender] = {}
        WAITING_BYTES.labels(sink=NAME).set_function(self._waiting_bytes)

    @override
    async def assign(self, partitions: Partitions) -> None:
        """Record new partitions; `prepare` takes them over."""
        for partition in partitions:
            if (former := self._senders.pop(partition, None)) is not None:
                former.abandon()
        self._unopened |= partitions

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Take over new partitions, and partitions whose commit failed.

        Seeks to their committed offsets and returns them, so that their polled records are dropped.
        If the brokers fail, waits and leaves the partitions to the next call.
        """
        undone = {
            at.partition: error for at, sender in self._senders.items() if (error := sender.undone)
        }
        # Includes the partitions with this number of all topics, because they share transactions.
        for at in [at for at in self._senders if at.partition in undone]:
            self._senders.pop(at).abandon()
            self._unopened.add(at)
        if undone:
            await self._pause(list(undone.values()))
        held = context.consumer.assignment()
        # While members with different versions are in the group, a partition's incidents and events
        # may have different owners. Only a sink that has both counts incidents.
        wanted = frozenset(
            at
            for at in held & self._unopened
            if at.topic != self._incidents or self._events_beside(at) in held
        )
        if not wanted:
            return frozenset()
        try:
            await self._take_over(wanted, context)
        except BusError as error:
            # The polled records of all these partitions are dropped. The partitions that are not
            # taken over yet are taken over in the next call.
            await self._pause([error])
        except NotAssignedError:
            pass  # after a rebalance, the next call takes over what is assigned then
        else:
            self._backoff.reset()
            self._counters_check.ok("counters continue from the saved state")
        return wanted

    @override
    def full(self) -> Partitions:
        """Return the partitions whose waiting records have used up their share of the queue."""
        part = max(1, self._settings.queue_bytes // max(1, len(self._distinct_senders())))
        return frozenset(at for at, sender in self._senders.items() if sender.waiting_bytes >= part)

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Queue polled records for sending, without waiting until they are sent."""
        for batch in batches:
            # A partition that was revoked since the poll has no sender.
            if (sender := self._senders.get(batch.partition)) is not None:
                sender.add(batch, context)
        for sender in self._distinct_senders():
            sender.check()
        await self._end_silent(context)

    @override
    async def redeliver(self, rejected: Sequence[RejectedEvent], /) -> Sequence[Refusal | None]:
        """Send each event separately; return why each is rejected, or `None` if accepted."""
        return [await self._redelivery.send(each) for each in rejected]

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Let requests in flight finish, then forget the series without ending them."""
        # Senders are removed before the first `await`: `handle` may run meanwhile, and must not end
        # series that the next owner continues.
        self._unopened -= partitions
        released = {self._senders.pop(at) for at in partitions if at in self._senders}
        await asyncio.gather(*(sender.end(context) for sender in released))
        await self._state.close({at.partition for at in partitions})

    def close(self) -> None:
        """End the remaining senders, for example if the consumer did not revoke its partitions."""
        for sender in self._senders.values():
            sender.abandon()
        self._senders.clear()

    async def _take_over(self, wanted: Partitions, context: SinkContext) -> None:
        counted = await self._state.take_over({at.partition for at in wanted})
        # A previous owner may have sent records before these offsets without committing them.
        ends = await context.consumer.end_offsets(wanted)
        still_held = wanted & context.consumer.assignment()
        # Partitions of incidents come last, because they are added to the sender of the events.
        for at in sorted(still_held, key=lambda at: at.topic == self._incidents):
            # Offsets are read only after `take_over`; until then, another sink could still commit
            # for a partition.
            committed = await context.consumer.committed(at)
            await self._keep_moved(at, committed or 0, context.consumer, counted[at.partition])
            await context.consumer.seek(at, committed or 0)
            # A partition that was revoked meanwhile has no writer, and may have been assigned
            # again.
            if at.partition not in self._state or at not in self._unopened:
                continue
            if at.topic != self._incidents:
                self._senders[at] = PartitionSender(
                    at,
                    shared=self._shared,
                    taken_over=TakenOver(
                        # Only ticks are counted. Readings may be older than the ticks that are
                        # counted already.
                        counted=counted[at.partition] if at.topic == self._events else {},
                        repeated_before=ends[at],
                    ),
                )
            elif (sender := self._senders.get(self._events_beside(at))) is not None:
                sender.add_incidents(_taken_over(at, committed=committed, end=ends[at]))
                self._senders[at] = sender
            else:
                continue
            self._unopened.discard(at)

    async def _keep_moved(
        self,
        at: TopicPartition,
        offset: int,
        consumer: Consumer,
        counted: Mapping[str, NodeCounters],
    ) -> None:
        """Report that another program has set the partition's offset, and commit the offset.

        Nothing is reported if the group has no counters, because it then starts where an operator
        wants it to.
        """
        if not counted:
            return
        # The counters have no offsets of readings and incidents.
        known = [each.next_offset for each in counted.values() if each.next_offset is not None]
        read_before = max(known, default=None) if at.topic == self._events else None
        is_moved = await consumer.report_moved(at, read_before=read_before)
        if is_moved and at.partition in self._state:
            # If another sink has fenced this one, it reports the offset too.
            with suppress(FencedError):
                await self._state.commit(at.partition, (), offsets={at: offset})

    def _events_beside(self, at: TopicPartition) -> TopicPartition:
        return TopicPartition(self._events, at.partition)

    def _distinct_senders(self) -> Collection[PartitionSender]:
        return set(self._senders.values())

    async def _pause(self, errors: Sequence[Exception]) -> None:
        RETRIES_TOTAL.labels(sink=NAME).inc(len(errors))
        for error in errors:
            # Fencing means that a partition has a new owner; the brokers have not failed.
            if not isinstance(error, FencedError):
                self._counters_check.failed(str(error))
        await self._clock.sleep(
            pause_seconds_after(
                errors, backoff_seconds=self._backoff.next_seconds(), fenced_seconds=_FENCED_SECONDS
            )
        )

    async def _end_silent(self, context: SinkContext) -> None:
        """Close overdue intervals, and end the series of unresponsive nodes.

        A node is unresponsive only if its partition was read to the end and everything read was
        sent. Otherwise its ticks may still wait in Kafka, for example after an outage of the
        receiver.
        """
        unresponsive_ns = round(self._settings.stale_after_seconds * NS_PER_SECOND)
        now_ns = self._clock.monotonic_ns()
        unresponsive = {
            at
            for at, sender in self._senders.items()
            if at.topic != self._incidents
            and sender.has_silent(unresponsive_ns=unresponsive_ns, now_ns=now_ns)
        }
        for at in await _read_to_the_end(unresponsive, context.consumer):
            # The partition may have been revoked meanwhile.
            if (sender := self._senders.get(at)) is not None:
                sender.end_silent(context, unresponsive_ns=unresponsive_ns, now_ns=now_ns)

    def _waiting_bytes(self) -> int:
        return sum(sender.waiting_bytes for sender in self._distinct_senders())


def _taken_over(at: TopicPartition, *, committed: int | None, end: int) -> IncidentsTakenOver:
    """Return the state from which the sender continues a partition's incidents."""
    if committed is not None:
        return IncidentsTakenOver(at=at, old_before=0)
    # Without a committed offset, offset 0 is committed if the partition is empty. The first
    # incident is then counted regardless of its age.
    return IncidentsTakenOver(at=at, old_before=end, next_offset=None if end else 0)


async def _read_to_the_end(
    partitions: Collection[TopicPartition], consumer: Consumer
) -> list[TopicPartition]:
    """Return the partitions that were polled to the end; none if the brokers do not answer."""
    if not partitions:
        return []
    try:
        ends = await consumer.end_offsets(partitions)
        return [at for at in sorted(partitions) if await consumer.position(at) >= ends[at]]
    except (BusError, NotAssignedError):
        return []
