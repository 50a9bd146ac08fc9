"""The consume loop of all sinks: poll, decode, check, deliver, write dead letters, commit.

`run_sink` opens a sink of a kind and feeds it; `consume` is the loop.

Offsets are committed after the sink has acknowledged them and the dead letters of records before
them have been published. While a receiver is slow or unavailable, the partitions are paused and
polling continues, so that the consumer stays in its group and memory stays bounded by one poll. The
sink decides what to send and where.

A sink gets only records that are in their node's partition under their key, where the join writes
them. Otherwise, two members of the group could send the same node's series.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import structlog

from gpuledger.bus.gaps import GapCheck, known_time_ms
from gpuledger.bus.protocol import (
    Bus,
    Consumer,
    Gap,
    GapReason,
    Polled,
    Record,
    Subscription,
    TopicPartition,
)
from gpuledger.clock import Clock, SystemClock
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusError, NotAssignedError, UnavailableError
from gpuledger.lag import Lag
from gpuledger.placement import IsPlaced, placement_rule, reject_misplaced
from gpuledger.runtime import Backoff, Check, CheckSeverity, Readiness
from gpuledger.runtime.tasks import end_tasks, run_tasks
from gpuledger.topics import Topic, replay_group
from gpuledger_sinks.errors import retry_receiver
from gpuledger_sinks.metrics import ACKNOWLEDGED_TIMESTAMP_SECONDS, LAG_SECONDS, count_dropped
from gpuledger_sinks.protocol import (
    AcknowledgedOffsets,
    Batch,
    ConsumerConfig,
    Partitions,
    Sink,
    SinkContext,
)
from gpuledger_sinks.registry import SinkKind
from gpuledger_sinks.replays import MAX_POLL_RECORDS, ReplaySink

RELEASE_SECONDS: Final = 4.0
"""Time for a sink to finish its work on partitions that are being revoked."""
_GRACE_SECONDS: Final = 1.5
"""Time for a sink to finish its work on polled records when the loop ends. Requests that are not
answered by then are sent again after a restart."""
_FULL_POLL_SECONDS: Final = 0.05
_MAX_FAILURES: Final = 8
"""Number of successive bus failures after which the consumer is closed and reopened."""
_log = structlog.get_logger(__name__)


async def run_sink(
    kind: SinkKind,
    *,
    bus: Bus,
    settings: Any,  # noqa: ANN401  # the kind's section
    readiness: Readiness,
    group_instance_id: str | None = None,
    group: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Open a sink of this kind and feed it until cancelled; `group` defaults to the kind's own.

    If the kind takes replays, the sink also gets replayed events. Raises UserError for settings
    that cannot be used, or if the receiver already contains data of another source, such as rows of
    another topic.
    """
    clock, group = clock or SystemClock(), bus.topics.group(group or kind.group)
    async with kind.load()(
        bus=bus, settings=settings, readiness=readiness, clock=clock, group=group
    ) as sink:
        reading = consume(
            bus=bus,
            sink=sink,
            config=ConsumerConfig(
                group=group,
                group_instance_id=group_instance_id,
                decoders=_decoders(kind.topics(bus.topics)),
                max_poll_records=settings.max_poll_records,
            ),
            check=readiness.check(f"{kind.name}.kafka"),
            gaps=readiness.check(f"{kind.name}.gaps", severity=CheckSeverity.WARNING),
            clock=clock,
        )
        if not kind.takes_replays:
            await reading
            return
        replaying = consume(
            bus=bus,
            sink=ReplaySink(
                sink,
                group=group,
                events=bus.topics.events.name,
                retrying=retry_receiver(sink=kind.name, check=Check(), clock=clock),
            ),
            config=ConsumerConfig(
                group=replay_group(group),
                dead_letters_of=group,
                group_instance_id=group_instance_id,
                decoders=_decoders([bus.topics.replay]),
                max_poll_records=MAX_POLL_RECORDS,
            ),
            check=readiness.check(f"{kind.name}.replay", severity=CheckSeverity.WARNING),
            clock=clock,
        )
        async with run_tasks(reading, replaying) as tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()


def _decoders(topics: Iterable[Topic]) -> dict[str, Decoder[Any]]:
    return {topic.name: Decoder(topic=topic.name, record=topic.record) for topic in topics}


async def consume(
    *,
    bus: Bus,
    sink: Sink,
    config: ConsumerConfig,
    check: Check,
    clock: Clock,
    gaps: Check | None = None,
) -> None:
    """Feed the sink until cancelled; retry with backoff while the bus is unavailable."""
    _log.info(
        "sink_started",
        sink=sink.name,
        receiver=sink.receiver,
        group=config.group,
        group_instance_id=config.group_instance_id,
        topics=sorted(config.decoders),
    )
    lag = Lag(clock=clock)
    lag.answered()
    LAG_SECONDS.labels(sink=sink.name).set_function(lag.seconds)
    ACKNOWLEDGED_TIMESTAMP_SECONDS.labels(sink=sink.name).set_function(lag.newest_seconds)
    gap_check = GapCheck(gaps or Check())
    # Not a `RetryingCaller`: a session has no successful end, so its first successful poll resets
    # the backoff. Within a session, repeated failures decide when to rejoin the group.
    backoff = Backoff()
    while True:
        session = _Session(
            sink=sink, config=config, check=check, clock=clock, lag=lag, gap_check=gap_check
        )
        try:
            await session.run(bus)
        except NotAssignedError:
            # The sink used a partition that a rebalance had just moved: join the group again.
            continue
        except BusError as error:
            # The brokers answered in between, so this is a new outage.
            if session.has_polled:
                backoff.reset()
            check.failed(str(error))
            await clock.sleep(backoff.next_seconds())


@dataclass
class _Streak:
    """Successive failures of one kind of call; polls and commits are counted separately."""

    failures: int = 0
    backoff: Backoff = field(default_factory=Backoff)

    def end(self) -> None:
        self.failures = 0
        self.backoff.reset()


class _Session:
    """One open consumer with its producer of dead letters."""

    consumer: Consumer
    """Opened by `run` and not passed in, because its callbacks are this session's methods."""
    dead_letters: DeadLetterQueue
    """Opened by `run`, with a separate producer for each consumer."""
    bus: Bus
    """Set by `run`."""

    def __init__(
        self,
        *,
        sink: Sink,
        config: ConsumerConfig,
        check: Check,
        clock: Clock,
        lag: Lag,
        gap_check: GapCheck,
    ) -> None:
        self._sink, self._config, self._check, self._clock = sink, config, check, clock
        self._lag, self._gap_check = lag, gap_check
        self._progress = AcknowledgedOffsets()
        self._committing_lock = asyncio.Lock()
        self._polling, self._committing = _Streak(), _Streak()
        self.has_polled = False
        self._is_member = False
        self._hands_out_nothing = False
        self._is_newly_assigned = False
        self._is_preparing = False
        self._placed: dict[str, IsPlaced] = {}
        """The placement rule of each topic. It is forgotten when partitions are assigned, because
        their number may have changed."""

    async def run(self, bus: Bus) -> None:
        self.bus = bus
        subscription = Subscription(
            group=self._config.group,
            stage=self._sink.name,
            topics=tuple(self._config.decoders),
            group_instance_id=self._config.group_instance_id,
            on_assigned=self.on_assigned,
            on_revoked=self.on_revoked,
            on_gap=self.on_gap,
        )
        async with AsyncExitStack() as stack:
            # The queue is opened before the consumer, which may immediately report undecodable
            # records.
            self.dead_letters = DeadLetterQueue(
                consumer=self._config.dead_letters_of or self._config.group,
                producer=await stack.enter_async_context(bus.producer()),
                topic=bus.topics.dead_letters,
                partitions=await bus.partitions(bus.topics.dead_letters.name),
                time_ns=self._clock.time_ns,
                count=partial(count_dropped, self._sink.name),
            )
            self.consumer = await stack.enter_async_context(bus.consumer(subscription))
            self._lag.follow(self.consumer.withheld_seconds)
            while True:
                seconds = self._pause_full()
                polled = await self._poll(self._config.max_poll_records, timeout_seconds=seconds)
                if self._is_newly_assigned and not polled:
                    # New partitions take a moment to fetch. Their records count as lag even before
                    # the sink prepares, which may take long.
                    polled = await self._poll(self._config.max_poll_records)
                self._is_newly_assigned = False
                await self._handle(polled)
                await self._commit_done()

    def _context(self) -> SinkContext:
        """Return a context for records that are polled in the current epochs."""
        return SinkContext(
            consumer=self.consumer,
            dead_letters=self.dead_letters,
            progress=self._progress,
            lag=self._lag,
            epochs=self._progress.epochs,
        )

    async def on_gap(self, gap: Gap) -> None:
        """Report a gap that the consumer found, and pass it to the sink."""
        self._gap_check.add(gap)
        await self._sink.handle_gap(gap)

    async def on_assigned(self, partitions: Partitions) -> None:
        """Begin an epoch of newly assigned partitions, and pass them to the sink."""
        self._is_member = self._is_newly_assigned = True
        self._placed.clear()
        _log.info(
            "partitions_assigned",
            sink=self._sink.name,
            group=self._config.group,
            partitions={
                topic: sorted(partition for name, partition in partitions if name == topic)
                for topic in sorted({partition.topic for partition in partitions})
            },
        )
        if self._hands_out_nothing:
            # The partitions were assigned during a poll that only keeps the membership and must
            # return no records.
            self.consumer.pause(partitions)
        # The epoch begins before the sink is called, so that the sink's acknowledgements count for
        # it.
        self._progress.begin(partitions)
        await self._sink.assign(partitions)

    async def on_revoked(self, partitions: Partitions) -> None:
        """Commit acknowledged records; the next owner sends the others."""
        try:
            # The group waits for this call. A member that takes too long is removed from the group
            # and can no longer commit.
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._sink.release(partitions, self._context())
                await self._commit_done_once()
        except (TimeoutError, UnavailableError, BusError, NotAssignedError) as error:
            _log.info("commit_skipped", sink=self._sink.name, error=repr(error))
        finally:
            # The next owner reads and reports records that were not committed.
            self._progress.end(partitions)
            for topic, partition in partitions:
                self.dead_letters.drop(partition, topic=topic)
            self._lag.keep(self._progress.epochs)

    def _pause_full(self) -> float:
        """Pause partitions that the sink reports as full; return the poll timeout in seconds.

        The time is short if a partition is paused, because it may soon accept records again.
        """
        held, full = self.consumer.assignment(), self._sink.full()
        if full:
            self.consumer.pause(full & held)
            self.consumer.resume(held - full)
            return min(_FULL_POLL_SECONDS, self._config.poll_seconds)
        return self._config.poll_seconds

    async def _poll(self, max_records: int, *, timeout_seconds: float | None = None) -> Polled:
        """Return polled records; if the poll fails, wait and return none.

        Raises BusError after `_MAX_FAILURES` successive failures.
        """
        if timeout_seconds is None:
            timeout_seconds = self._config.poll_seconds
        try:
            polled = await self.consumer.poll(
                timeout_seconds=timeout_seconds, max_records=max_records
            )
        except BusError as error:
            await self._endure(error, self._polling)
            return {}
        self._polling.end()
        self.has_polled = True
        if self.consumer.is_answered():
            self._lag.answered()
        self._report_membership()
        return polled

    def _report_membership(self) -> None:
        """Pass the check once this member has joined its group, even if it has no partition.

        The check does not pass while polls or commits fail.
        """

        def describe_assignment() -> str:
            held = len(self.consumer.assignment())
            if not held:
                return "no partition assigned: the group has more members than partitions"
            return f"{held} partitions assigned, {self._lag.seconds():.0f} s behind"

        if self._polling.failures or self._committing.failures:
            return
        if self._is_member:
            self._check.ok(describe_assignment)
        elif not self._check.has_failed:
            self._check.waits(f"joining consumer group {self._config.group}")

    async def _endure(self, error: BusError, streak: _Streak) -> None:
        """Wait before the next attempt.

        Raises the error after `_MAX_FAILURES` successive failures, so that the consumer is
        reopened.
        """
        streak.failures += 1
        if streak.failures >= _MAX_FAILURES:
            raise error
        self._check.failed(str(error))
        await self._clock.sleep(streak.backoff.next_seconds())

    async def _work(self, polled: Polled, context: SinkContext) -> None:
        """Let the sink prepare, then pass on the records of partitions that are still assigned."""
        self._lag.polled(polled, at_end=self.consumer.at_end())
        self._is_preparing = True
        try:
            voided = await self._sink.prepare(context)
        finally:
            self._is_preparing = False
        # The offsets of these partitions were reset. Their records are polled again, and do not
        # count as lag until then.
        self._lag.forget(voided)
        placed = {at.topic: await self._placement(at.topic) for at in polled}
        # A partition may have been revoked meanwhile, and even assigned again.
        kept = {
            at: records
            for at, records in polled.items()
            if records and at not in voided and context.is_current(at)
        }
        for record in chain.from_iterable(kept.values()):
            if record.unreadable is not None:
                await self._sink.handle_gap(_gap_of(record))
        batches = [
            Batch(
                partition=at,
                items=self._decode(at.topic, records, placed[at.topic]),
                # The decoded items do not show this offset, because the last record may be
                # undecodable.
                next_offset=records[-1].offset + 1,
            )
            for at, records in kept.items()
        ]
        await self._sink.handle(batches, context)

    async def _placement(self, topic: str) -> IsPlaced:
        if (is_placed := self._placed.get(topic)) is None:
            is_placed = placement_rule(partitions=await self.bus.partitions(topic))
            self._placed[topic] = is_placed
        return is_placed

    def _decode(
        self, topic: str, records: Sequence[Record], is_placed: IsPlaced
    ) -> list[tuple[Record, Any]]:
        """Return the records that can be decoded and are in their node's partition."""
        node_of, dead_letters = self.bus.topics.by_name[topic].key_of, self.dead_letters
        return [
            (record, value)
            for record, value in dead_letters.decode(self._config.decoders[topic], records)
            if not reject_misplaced(
                record, node=node_of(value), is_placed=is_placed, dead_letters=dead_letters
            )
        ]

    async def _handle(self, polled: Polled) -> None:
        """Pass polled records to the sink; while it works, keep the membership in the group.

        If this call is cancelled or the bus fails, the sink's work is cancelled after
        `_GRACE_SECONDS`, in which requests in flight may still be answered.
        """
        context = self._context()
        work = asyncio.create_task(self._work(polled, context))
        try:
            try:
                await asyncio.wait({work}, timeout=self._config.poll_seconds)
                # A receiver may be unavailable for hours. A member that does not poll for
                # `max.poll.interval.ms` is removed from its group, and its partitions move.
                while not work.done():
                    await self._poll_paused()
                    self._drop_late_dead_letters(polled, context)
                    if self._is_preparing and not polled:
                        await self._check_ends()
                    await self._commit_done()
                await work
            finally:
                await end_tasks(work, grace_seconds=_GRACE_SECONDS)
        finally:
            self._drop_late_dead_letters(polled, context)
            self.consumer.resume(self.consumer.assignment())

    def _drop_late_dead_letters(self, polled: Polled, context: SinkContext) -> None:
        """Drop dead letters that the sink made after their partition was revoked."""
        for at in polled:
            if not context.is_current(at):
                self.dead_letters.drop(at.partition, topic=at.topic)

    async def _check_ends(self) -> None:
        """Count new records as lag while the sink prepares, because no poll returns them."""
        try:
            ends = await self.consumer.end_offsets(self.consumer.assignment())
        except (BusError, NotAssignedError):
            return  # polls report it
        # If the sink finished preparing during the query, these records are polled anyway.
        if self._is_preparing:
            self._lag.ends(ends)

    async def _poll_paused(self) -> None:
        """Poll with all partitions paused, only to keep the membership in the group."""
        self._hands_out_nothing = True
        try:
            self.consumer.pause(self.consumer.assignment())
            await self._poll(1)
        finally:
            self._hands_out_nothing = False

    async def _commit_done(self) -> None:
        """Publish dead letters and commit acknowledged offsets; on failure, retry.

        Raises BusError after `_MAX_FAILURES` successive failures.
        """
        while True:
            try:
                await self._commit_done_once()
            except BusError as error:
                await self._endure(error, self._committing)
                # The group rejects commits of a removed member until it has polled.
                await self._poll_paused()
            else:
                break
        if self._committing.failures:
            self._committing.end()
            self._report_membership()

    async def _commit_done_once(self) -> None:
        # A rebalance during a commit also commits.
        async with self._committing_lock:
            offsets = self._progress.uncommitted()
            # Dead letters first: after a crash in between, a committed record without its dead
            # letter would be lost. The offsets are read before the flush, so that each committed
            # record's dead letter is included in it.
            await self.dead_letters.flush()
            if offsets:
                await self.consumer.commit(offsets)
                self._progress.committed(offsets)


def _gap_of(record: Record) -> Gap:
    """Return a gap for a batch of records that is lost because it cannot be unpacked."""
    return Gap(
        partition=TopicPartition(record.topic, record.partition),
        first_offset=record.first_offset,
        next_offset=record.offset + 1,
        reason=GapReason.UNREADABLE,
        time_after_ms=known_time_ms(record.timestamp_ms),
    )
