"""Write something of every event to another topic of Kafka, exactly once.

Here lives the shell of the sinks that do so. Each poll becomes one transaction a partition, or a
few where much is made of it: what was made of the events, the dead letters, and the offset up to
which they were read. The offsets are in no other commit. What is made of an event is the kind's
business.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from typing_extensions import override

from gpuledger.bus.protocol import Bus, Message, Producer, TopicPartition
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
"""A heartbeat of any group: by then it has said who has a partition now."""
_FINISH_SECONDS: Final = 2.5
"""How long a commit that is under way may go on when its partition is given up."""
MAX_TRANSACTION_BYTES: Final = 16 * 2**20
"""Bytes of what was made of events beyond which no more is made before it is written; one event of
a message's size comes to 60 MB of rows at most."""


class KafkaSinkSettings(Protocol):
    """What the settings of every kind that writes to Kafka have."""

    @property
    def topic(self) -> str:
        """The topic that is written to."""

    @property
    def commit_interval_seconds(self) -> float:
        """How long more is waited for between transactions, unless a poll was full."""

    @property
    def max_future_seconds(self) -> float:
        """Events further in the future are put aside."""

    @property
    def max_poll_records(self) -> int:
        """The most events of a poll."""


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
    """Open a sink that writes what `values_of` makes of every event, as transactions of `group`.

    `values_of` returns the values of an event's messages; it raises ValueError for an event that is
    broken.
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
    """Holds a writer for each partition, and puts every poll into one transaction of it."""

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
        # Not a `RetryingCaller`: what was undone is polled again, not sent again.
        self._backoff = Backoff()
        self._partitions = 0
        self._undelivered: dict[TopicPartition, int] = {}
        """Partitions of which a delivery was undone, and the offset that it was to commit."""
        self._cannot_take_over = False

    @override
    async def assign(self, partitions: Partitions) -> None:
        """Remember that these have yet to be taken over."""
        self._unopened |= partitions

    @override
    async def prepare(self, context: SinkContext) -> Partitions:
        """Take over what is newly held, and what was undone, and go to where that is committed."""
        wanted = context.consumer.assignment() & self._unopened
        try:
            if wanted:
                await self._take_over(wanted, context)
        except BusError as error:
            # What was polled of these is let go, and what is left of them is taken over next time.
            self._cannot_take_over = True
            await self._pause([error])
        except NotAssignedError:
            pass  # a rebalance came between: what is held then is taken over next time
        else:
            self._cannot_take_over = False
            self._pass_check()
        return wanted

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        """Deliver what was polled of each partition; what is undone is read again."""
        # A transaction spans one partition, so that partitions do not wait for each other.
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
        """Let commits under way end; who holds these next goes on from there."""
        self._unopened -= partitions
        for partition in partitions:
            self._undelivered.pop(partition, None)
        await self._writers.close({partition.partition for partition in partitions})
        self._seen.forget(partitions)
        if self._relay is not None:
            self._relay.forget(partitions)

    async def _record_done(self, relay: WatermarkRelay, context: SinkContext) -> None:
        """Record how far partitions are done: all that was polled of them is committed."""
        relay.begin_if_due()
        for at in context.consumer.assignment() - self._unopened:
            # Given up a moment ago: its next owner records it.
            with suppress(NotAssignedError):
                relay.record_done(at.partition, await context.consumer.position(at))

    def _pass_check(self) -> None:
        """Pass the check, unless there is a partition of which nothing can be delivered."""
        if not self._undelivered and not self._cannot_take_over:
            self._check.ok(self.receiver)

    async def _take_over(self, wanted: Partitions, context: SinkContext) -> None:
        topic = self._settings.topic
        try:
            # Each time, as partitions may have been added since.
            self._partitions = await self._bus.partitions(topic)
        except TopicsError as error:
            if topic in self._bus.topics.by_name:
                raise
            raise TopicsError(
                f"{self.name}.topic: there is no topic {topic} on these brokers; it is none of "
                f"gpuledger's own, so make it with Kafka's tools "
                f"(kafka-topics.sh --create --topic {topic} …)"
            ) from error
        await self._writers.open({partition.partition for partition in wanted})
        # Only now: until its id was taken, somebody else could have committed for a partition.
        for partition in wanted:
            offset = await context.consumer.committed(partition) or 0
            if partition in context.consumer.assignment():
                await context.consumer.seek(partition, offset)
            # The answer to a commit may have been all that was lost.
            if offset >= self._undelivered.get(partition, 0):
                self._undelivered.pop(partition, None)
        self._seen.forget(wanted)
        # One that was given up meanwhile has no writer, and may have come back since.
        taken_over = {at for at in wanted if at.partition in self._writers}
        self._unopened -= taken_over
        if self._relay is not None:
            self._relay.follow(taken_over)

    async def _deliver(self, batch: Batch, context: SinkContext) -> Exception | None:
        """Deliver a batch, in as many transactions as it takes for none to be too large.

        Returns what undid one of them.
        """
        async with self._turns.enter(batch):
            for part in self._parts(batch, context):
                if batch.partition.partition not in self._writers:
                    # Given up meanwhile: the next owner's to say.
                    context.dead_letters.drop(batch.partition.partition)
                    return None
                if (error := await self._deliver_part(batch.partition, part, context)) is not None:
                    return error
        return None

    async def _deliver_part(
        self, partition: TopicPartition, part: "_Part", context: SinkContext
    ) -> Exception | None:
        """Write a part, the dead letters before its end, and that offset, in one transaction."""
        messages = part.messages
        # A topic of another number of partitions still keeps a node's messages in one of them.
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
                return None  # given up meanwhile, which is what ended it
            self._unopened.add(partition)
            # One that was shut out has nothing to deliver: another one has it.
            if isinstance(error, FencedError):
                return error
            self._undelivered[partition] = part.next_offset
            return drained.explain(error)
        context.dead_letters.acknowledge(drained)
        self._undelivered.pop(partition, None)
        SENT_TOTAL.labels(sink=self.name).inc(len(messages))
        # The offset is in the transaction: a commit of the loop would be a second one.
        context.acknowledge(
            partition, part.next_offset, time_ns=part.newest_ns, commits_itself=True
        )
        return None

    def _parts(self, batch: Batch, context: SinkContext) -> Iterator["_Part"]:
        """Yield what is made of a batch, cut where it is more than is held at once."""
        newest_ns = self._newest_ns()
        part = _Part()
        for record, event in batch.items:
            if part.size_bytes >= MAX_TRANSACTION_BYTES:
                # Before an event and never within one: half of an event would be committed.
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
        """Write the messages of events to the partitions in which they would be.

        Not in the sink's transactions, which have its own offsets: a batch of which no answer comes
        is written twice. Readers recognise that by the identity that each message has.
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
            # Being shut out is how a partition changes hands, and no failure of the brokers.
            if not isinstance(error, FencedError):
                self._check.failed(str(error))
        await self._clock.sleep(pause_seconds)


@dataclass
class _Part:
    """What goes into one transaction."""

    messages: list[Message] = field(default_factory=list)
    size_bytes: int = 0
    next_offset: int = 0
    newest_ns: int | None = None
    """Time of the last event in it."""

    def add(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self.size_bytes += sum(len(message.value or b"") for message in messages)
