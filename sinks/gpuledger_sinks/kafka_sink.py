"""Writes messages made from every event to another Kafka topic, exactly once.

All sinks that write to Kafka use this module. Each poll becomes one transaction per partition, or
several if there are many messages. A transaction contains the messages, the dead letters and the
offset up to which events were read. Offsets are committed only in these transactions. The kind of
sink decides which messages are made from an event.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from typing_extensions import override

from gpuledger.bus.protocol import Bus, Consumer, Message, Producer, TopicPartition
from gpuledger.bus.transactional_writers import TransactionalWriters, pause_seconds_after
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import (
    BusError,
    FencedError,
    NotAssignedError,
    TopicsError,
)
from gpuledger.records import GpuEvent
from gpuledger.runtime import Backoff, Check, Readiness
from gpuledger_sinks.kafka_messages import UnfitError, ValuesOf, messages_of
from gpuledger_sinks.metrics import RETRIES_TOTAL, SENT_TOTAL, count_dropped
from gpuledger_sinks.protocol import (
    Batch,
    LargeTurns,
    Partitions,
    Refusal,
    RejectedEvent,
    Sink,
    SinkContext,
)
from gpuledger_sinks.registry import SinkKind
from gpuledger_sinks.timelines import SeenTicks
from gpuledger_sinks.watermarks import WatermarkRelay, open_relay

_FENCED_SECONDS: Final = 3.0
"""Pause after another sink took over a partition of this one. This is a consumer group's heartbeat
interval; after it, the group has reported the partition's owner."""
_FINISH_SECONDS: Final = 2.5
"""Time for a commit under way to finish when its partition is revoked."""
MAX_TRANSACTION_BYTES: Final = 16 * 2**20
"""Size of a transaction's messages above which no more are added. One event of the maximum message
size becomes at most 60 MB of rows."""


class KafkaSinkSettings(Protocol):
    """The settings of a sink that writes to Kafka."""

    @property
    def topic(self) -> str:
        """The topic to write to."""

    @property
    def commit_interval_seconds(self) -> float:
        """The pause after a transaction, in seconds, unless the poll was full."""

    @property
    def max_future_seconds(self) -> float:
        """How far in the future events may be, in seconds; later events become dead letters."""

    @property
    def max_poll_records(self) -> int:
        """Maximum number of events per poll."""


@asynccontextmanager
async def open_kafka_sink(
    kind: SinkKind,
    *,
    bus: Bus,
    settings: KafkaSinkSettings,
    values_of: ValuesOf,
    readiness: Readiness,
    clock: Clock,
    group: str,
) -> AsyncIterator["KafkaSink"]:
    """Open a sink that writes the messages of every event, in transactions of `group`.

    `values_of` returns the values of an event's messages. It raises ValueError if the event is
    invalid.
    """
    check = readiness.check(f"{kind.name}.receiver")
    check.ok("nothing written yet")
    async with AsyncExitStack() as stack:
        writers = await stack.enter_async_context(
            TransactionalWriters(bus=bus, group=group, finish_seconds=_FINISH_SECONDS)
        )
        relay: WatermarkRelay | None = None
        if kind.relays_watermarks:
            relay = await stack.enter_async_context(
                open_relay(
                    kind.name, bus=bus, readiness=readiness, clock=clock, output=settings.topic
                )
            )
        yield KafkaSink(
            name=kind.name,
            bus=bus,
            producer=await stack.enter_async_context(bus.producer()),
            settings=settings,
            values_of=values_of,
            writers=writers,
            relay=relay,
            check=check,
            clock=clock,
        )


class KafkaSink(Sink):
    """Writes each poll of a partition, with its offsets, in transactions of the partition."""

    def __init__(
        self,
        *,
        name: str,
        bus: Bus,
        producer: Producer,
        settings: KafkaSinkSettings,
        values_of: ValuesOf,
        writers: TransactionalWriters,
        relay: WatermarkRelay | None,
        check: Check,
        clock: Clock,
    ) -> None:
        self.name, self.receiver = name, f"topic {settings.topic}"
        self._bus, self._settings, self._check, self._clock = bus, settings, check, clock
        self._values_of, self._producer = values_of, producer
        self._writers, self._relay = writers, relay
        self._unopened: set[TopicPartition] = set()
        self._seen = SeenTicks(clock=clock)
        self._turns = LargeTurns()
        # Not a `RetryingCaller`: an aborted batch is polled again, not sent again.
        self._backoff = Backoff()
        self._partitions = 0
        self._undelivered: dict[TopicPartition, int] = {}
        """Partitions whose last transaction failed, and the offset that it was to commit."""
        self._cannot_take_over = False

    @override
    async def assign(self, partitions: Partitions) -> None:
        """Record new partitions; `prepare` takes them over."""
        self._unopened |= partitions

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Take over new partitions, and partitions whose transaction failed.

        Seeks to their committed offsets and returns them, so that their polled records are dropped.
        If the brokers fail, waits and leaves the partitions to the next call.
        """
        wanted = context.consumer.assignment() & self._unopened
        try:
            if wanted:
                await self._take_over(wanted, context)
        except BusError as error:
            # The polled records of all these partitions are dropped. The partitions that are not
            # taken over yet are taken over in the next call.
            self._cannot_take_over = True
            await self._pause([error])
        except NotAssignedError:
            pass  # after a rebalance, the next call takes over what is assigned then
        else:
            self._cannot_take_over = False
            self._pass_check()
        return wanted

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Deliver polled records by partition; records of a failed transaction are read again."""
        # One transaction per partition, so that partitions do not wait for each other.
        errors = await asyncio.gather(*(self._deliver(batch, context) for batch in batches))
        undone = [error for error in errors if error is not None]
        if undone:
            await self._pause(undone)
        if self._relay is not None:
            await self._record_done(self._relay, context)
        if not undone and batches:
            self._pass_check()
            self._backoff.reset()
            if sum(len(batch.items) for batch in batches) < self._settings.max_poll_records:
                await self._clock.sleep(self._settings.commit_interval_seconds)

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        """Let running commits finish and forget the partitions; the next owner continues them."""
        self._unopened -= partitions
        for partition in partitions:
            self._undelivered.pop(partition, None)
        await self._writers.close({partition.partition for partition in partitions})
        self._seen.forget(partitions)
        if self._relay is not None:
            self._relay.forget(partitions)

    async def _record_done(self, relay: WatermarkRelay, context: SinkContext) -> None:
        """Record that everything polled so far is committed, so that watermarks can be relayed."""
        relay.begin_if_due()
        for at in context.consumer.assignment() - self._unopened:
            # If the partition was just revoked, the next owner records its progress.
            with suppress(NotAssignedError):
                relay.record_done(at.partition, await context.consumer.position(at))

    def _pass_check(self) -> None:
        """Pass the check, unless a partition cannot be delivered."""
        if not self._undelivered and not self._cannot_take_over:
            self._check.ok(self.receiver)

    async def _take_over(self, wanted: Partitions, context: SinkContext) -> None:
        topic = self._settings.topic
        try:
            # The number of partitions is read each time, because partitions may have been added.
            self._partitions = await self._bus.partitions(topic)
        except TopicsError as error:
            if topic in self._bus.topics.by_name:
                raise
            raise TopicsError(
                f"{self.name}.topic: unknown topic: {topic}; gpuledger creates only its own topics,"
                f" so create it with Kafka's tools (kafka-topics.sh --create --topic {topic} …)"
            ) from error
        await self._writers.open({partition.partition for partition in wanted})
        # Offsets are read only after `open`; until then, another sink could still commit for a
        # partition.
        for partition in wanted:
            offset = await context.consumer.committed(partition) or 0
            if partition in context.consumer.assignment():
                await context.consumer.seek(partition, offset)
            await self._keep_moved(partition, offset, context.consumer)
            # The commit may have succeeded even though its response was lost.
            if offset >= self._undelivered.get(partition, 0):
                self._undelivered.pop(partition, None)
        self._seen.forget(wanted)
        # A partition that was revoked meanwhile has no writer. It stays unopened, because it may
        # have been assigned again.
        taken_over = {at for at in wanted if at.partition in self._writers}
        self._unopened -= taken_over
        if self._relay is not None:
            self._relay.follow(taken_over)

    async def _keep_moved(self, partition: TopicPartition, offset: int, consumer: Consumer) -> None:
        """Report that another program has set the partition's offset, and commit the offset."""
        is_moved = await consumer.report_moved(partition, read_before=None)
        if is_moved and partition.partition in self._writers:
            # If another sink has fenced this one, it reports the offset too.
            with suppress(FencedError):
                await self._writers.commit(partition.partition, {}, offsets={partition: offset})

    async def _deliver(self, batch: Batch, context: SinkContext) -> Exception | None:
        """Deliver a batch in one or more transactions, so that none is too large.

        Returns the error of a failed transaction, or `None`.
        """
        async with self._turns.enter(batch):
            for part in self._parts(batch, context):
                if batch.partition.partition not in self._writers:
                    # The partition was revoked meanwhile; its next owner makes the dead letters.
                    context.dead_letters.drop(batch.partition.partition)
                    return None
                if (error := await self._deliver_part(batch.partition, part, context)) is not None:
                    return error
        return None

    async def _deliver_part(
        self, partition: TopicPartition, part: "_Part", context: SinkContext
    ) -> Exception | None:
        """Write a part, the waiting dead letters and the part's offset in one transaction.

        Returns the error if the transaction failed, or `None`. Failed partitions are taken over
        again by `prepare`.
        """
        messages = part.messages
        # The output topic may have more or fewer partitions than the events' topic. All messages of
        # a node still go to one partition.
        target = TopicPartition(self._settings.topic, partition.partition % self._partitions)
        drained = context.dead_letters.drain(partition.partition)
        try:
            await self._writers.commit(
                partition.partition,
                {target: messages, **drained.messages},
                offsets={partition: part.next_offset},
            )
        except (FencedError, BusError) as error:
            if partition.partition not in self._writers:
                return None  # the partition was revoked, which ended the transaction
            self._unopened.add(partition)
            # A fenced writer has nothing to deliver, because another sink owns the partition.
            if isinstance(error, FencedError):
                return error
            self._undelivered[partition] = part.next_offset
            return drained.explain(error)
        context.dead_letters.acknowledge(drained)
        self._undelivered.pop(partition, None)
        SENT_TOTAL.labels(sink=self.name).inc(len(messages))
        # The offset is in the transaction, so the loop must not commit it again.
        context.acknowledge(
            partition, part.next_offset, time_ns=part.newest_ns, commits_itself=True
        )
        return None

    def _parts(self, batch: Batch, context: SinkContext) -> Iterator["_Part"]:
        """Yield the messages of a batch in parts, each small enough for one transaction."""
        newest_ns = self._newest_ns()
        part = _Part()
        for record, event in batch.items:
            if part.size_bytes >= MAX_TRANSACTION_BYTES:
                # Cut only between events, because half an event must not be committed.
                part.next_offset = record.offset
                yield part
                part = _Part()
            part.newest_ns = event.time_ns
            if not self._seen.is_new(batch.partition, event):
                count_dropped(self.name, "duplicate")
                continue
            try:
                messages = self._messages_of(event, newest_ns=newest_ns)
            except UnfitError as error:
                context.dead_letters.reject(record, reason=error.reason, detail=str(error))
            else:
                part.add(messages)
        part.next_offset = batch.next_offset
        yield part

    @override
    async def redeliver(self, rejected: Sequence[RejectedEvent], /) -> Sequence[Refusal | None]:
        """Write the messages of events to their partitions; return one result per event.

        The result is the reason if an event is rejected, otherwise `None`. The messages are written
        outside the sink's transactions, because a transaction would also commit the sink's offsets.
        If the brokers do not answer, the caller repeats the call. Readers recognise repeated
        messages by their identity.
        """
        partitions = await self._bus.partitions(self._settings.topic)
        return [await self._write_again(each, partitions=partitions) for each in rejected]

    async def _write_again(self, rejected: RejectedEvent, *, partitions: int) -> Refusal | None:
        try:
            messages = self._messages_of(rejected.event, newest_ns=self._newest_ns())
        except UnfitError as error:
            return Refusal(error.reason, str(error))
        if messages:
            partition = rejected.record.partition % partitions
            await self._producer.publish(self._settings.topic, partition, messages)
        return None

    def _newest_ns(self) -> int:
        return self._clock.time_ns() + round(self._settings.max_future_seconds * NS_PER_SECOND)

    def _messages_of(self, event: GpuEvent, *, newest_ns: int) -> list[Message]:
        return messages_of(
            event, values_of=self._values_of, topic=self._settings.topic, newest_ns=newest_ns
        )

    async def _pause(self, undone: Sequence[Exception]) -> None:
        pause_seconds = pause_seconds_after(
            undone, backoff_seconds=self._backoff.next_seconds(), fenced_seconds=_FENCED_SECONDS
        )
        RETRIES_TOTAL.labels(sink=self.name).inc(len(undone))
        for error in undone:
            # Fencing means that a partition has a new owner; the brokers have not failed.
            if not isinstance(error, FencedError):
                self._check.failed(str(error))
        await self._clock.sleep(pause_seconds)


@dataclass
class _Part:
    """The contents of one transaction."""

    messages: list[Message] = field(default_factory=list)
    size_bytes: int = 0
    next_offset: int = 0
    newest_ns: int | None = None
    """Time of the part's last event, in nanoseconds since the epoch; `None` without events."""

    def add(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self.size_bytes += sum(len(message.value or b"") for message in messages)
