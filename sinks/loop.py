"""The one consume loop of all sinks: poll, decode, hand over, put aside, commit.

`run_sink` opens a sink of a kind and feeds it; `consume` is the loop.

Offsets are committed after the sink has acknowledged them and after the dead letters before them
lie on the bus. While a receiver is slow or away the partitions are paused and polling goes on, so
that the group keeps its member and memory stays bounded by one poll. What is sent, and to whom, is
the sink's business.
"""

import asyncio
from collections.abc import Iterable
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
from gpuledger.runtime import Backoff, Check, CheckSeverity, Readiness
from gpuledger.topics import DEAD_LETTERS
from sinks.concurrency import work_beside
from sinks.context import EpochContext, Progress
from sinks.metrics import ACKNOWLEDGED_TIMESTAMP_SECONDS, LAG_SECONDS, count_dropped
from sinks.protocol import Batch, ConsumerConfig, Partitions, Sink
from sinks.registry import SinkKind

RELEASE_SECONDS: Final = 4.0
"""How long a sink may take to finish what it holds of partitions that are being given up."""
_MAX_FAILURES: Final = 8
"""After so many failures of the bus in a row the consumer is closed and opened anew."""
_log = structlog.get_logger(__name__)


async def run_sink(
    kind: SinkKind,
    *,
    bus: Bus,
    settings: Any,  # noqa: ANN401  # the kind's section
    readiness: Readiness,
    member: str | None = None,
    group: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Open a sink of this kind and feed it until cancelled, by default as its own group.

    A sink that writes to Kafka needs a `TransactionalBus`. Raises UserError for settings that
    cannot be used, and where a receiver has what cannot be gone on from.
    """
    clock, group = clock or SystemClock(), group or kind.group
    async with kind.load()(
        bus=bus, settings=settings, readiness=readiness, clock=clock, group=group
    ) as sink:
        await consume(
            bus=bus,
            sink=sink,
            config=ConsumerConfig(
                group=group,
                member=member,
                decoders={
                    topic.name: Decoder(topic=topic.name, record=topic.record)
                    for topic in kind.topics
                },
                max_poll_records=settings.max_poll_records,
            ),
            check=readiness.check(f"{kind.name}.bus"),
            gaps=readiness.check(f"{kind.name}.gaps", severity=CheckSeverity.WARNING),
            clock=clock,
        )


async def consume(
    *,
    bus: Bus,
    sink: Sink,
    config: ConsumerConfig,
    check: Check,
    clock: Clock,
    gaps: Check | None = None,
) -> None:
    """Feed the sink until cancelled; wait for brokers, topics and rights with growing pauses."""
    _log.info(
        "sink_started",
        sink=sink.name,
        receiver=sink.receiver,
        group=config.group,
        member=config.member,
        topics=sorted(config.decoders),
    )
    lag = Lag(clock=clock)
    LAG_SECONDS.labels(sink=sink.name).set_function(lag.seconds)
    ACKNOWLEDGED_TIMESTAMP_SECONDS.labels(sink=sink.name).set_function(lag.newest_seconds)
    gap_check = GapCheck(gaps or Check())
    # Not a `RetryingCaller`: a session has no end, so that the first poll that succeeds resets the
    # waits; within it, streaks of failures decide when the group is joined anew.
    backoff = Backoff()
    while True:
        session = _Session(
            sink=sink, config=config, check=check, clock=clock, lag=lag, gap_check=gap_check
        )
        try:
            await session.run(bus)
        except NotAssignedError:
            # A rebalance came between the sink's question and the answer: join anew.
            continue
        except BusError as error:
            if session.has_polled:
                backoff.reset()
            await _pause(check, clock, backoff, error)


async def _pause(check: Check, clock: Clock, backoff: Backoff, error: BusError) -> None:
    check.failed(str(error))
    await clock.sleep(backoff.next_seconds())


@dataclass
class _Streak:
    """Failures in a row of one kind of call: a poll that succeeds says nothing of the commits."""

    failures: int = 0
    backoff: Backoff = field(default_factory=Backoff)

    def end(self) -> None:
        self.failures = 0
        self.backoff.reset()


class _Session:
    """One opened consumer with its producer of dead letters."""

    consumer: Consumer
    dead_letters: DeadLetterQueue

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
        self._progress = Progress()
        self._settling = asyncio.Lock()
        self._polling, self._committing = _Streak(), _Streak()
        self.has_polled = False
        self._is_member = False
        self._hands_out_nothing = False
        self._is_newly_assigned = False
        self._is_preparing = False

    async def run(self, bus: Bus) -> None:
        async with AsyncExitStack() as stack:
            self.dead_letters = DeadLetterQueue(
                consumer=self._config.group,
                producer=await stack.enter_async_context(bus.producer()),
                partitions=await bus.partitions(DEAD_LETTERS.name),
                time_ns=self._clock.time_ns,
                count=partial(count_dropped, self._sink.name),
            )
            self.consumer = await stack.enter_async_context(bus.consumer(self._subscription()))
            self._lag.follow(self.consumer.withheld_seconds)
            while True:
                await self._handle(await self._poll_anew())
                await self._settle()

    def _context(self) -> EpochContext:
        """Return the context for what is polled, or given up, in the epochs of now."""
        return EpochContext(
            consumer=self.consumer,
            dead_letters=self.dead_letters,
            progress=self._progress,
            lag=self._lag,
            epochs=self._progress.epochs,
        )

    def _subscription(self) -> Subscription:
        return Subscription(
            group=self._config.group,
            topics=tuple(self._config.decoders),
            member=self._config.member,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_gap=self._on_gap,
        )

    async def _on_gap(self, gap: Gap) -> None:
        self._gap_check.add(gap)
        await self._sink.handle_gap(gap)

    async def _on_assigned(self, partitions: Partitions) -> None:
        self._is_member = self._is_newly_assigned = True
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
            # This came with a poll for the membership alone: nothing may be handed out by it.
            self.consumer.pause(partitions)
        self._progress.begin(partitions)
        await self._sink.assign(partitions, self._context())

    async def _on_revoked(self, partitions: Partitions) -> None:
        """Commit what the receiver has; what it does not have is the next owner's to send."""
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._sink.release(partitions, self._context())
                await self._settle_once()
        except (TimeoutError, UnavailableError, BusError, NotAssignedError) as error:
            _log.warning("commit_skipped", sink=self._sink.name, error=repr(error))
        finally:
            # What was read of them and not committed is the next owner's to read and to report.
            self._progress.end(partitions)
            self._drop_letters(partitions)
            self._lag.keep(self._progress.epochs)

    def _drop_letters(self, partitions: Iterable[TopicPartition]) -> None:
        for topic, partition in partitions:
            self.dead_letters.drop(partition, topic=topic)

    async def _poll(self, max_records: int) -> Polled:
        """Poll; wait and return nothing where that fails."""
        try:
            polled = await self.consumer.poll(
                timeout_seconds=self._config.poll_seconds, max_records=max_records
            )
        except BusError as error:
            await self._endure(error, self._polling)
            return {}
        self._polling.end()
        self.has_polled = True
        self._report_membership()
        return polled

    async def _poll_anew(self) -> Polled:
        """Poll; twice where partitions have come and the first brought nothing of them.

        What waits there takes a moment to be fetched, and is lag from before the sink prepares.
        """
        polled = await self._poll(self._config.max_poll_records)
        if self._is_newly_assigned and not polled:
            polled = await self._poll(self._config.max_poll_records)
        self._is_newly_assigned = False
        return polled

    def _report_membership(self) -> None:
        """Pass the check once the group has answered, even with no partition for this member.

        Where polls are answered and commits are not, or the other way round, it goes on failing.
        """
        if self._polling.failures or self._committing.failures:
            return
        if self._is_member:
            self._check.ok(self._describe_assignment)
        elif not self._check.has_failed:
            self._check.waits(f"joining the group {self._config.group}")

    def _describe_assignment(self) -> str:
        held = len(self.consumer.assignment())
        if not held:
            return "no partition: the group has members enough"
        return f"{held} partitions held, {self._lag.seconds():.0f} s behind"

    async def _endure(self, error: BusError, streak: _Streak) -> None:
        """Wait before the next attempt; a consumer that fails again and again is opened anew."""
        streak.failures += 1
        if streak.failures >= _MAX_FAILURES:
            raise error
        await _pause(self._check, self._clock, streak.backoff, error)

    def _decode(self, polled: Polled) -> list[Batch]:
        return [
            Batch(
                partition=partition,
                items=list(
                    self.dead_letters.decode(self._config.decoders[partition.topic], records)
                ),
                next_offset=records[-1].offset + 1,
            )
            for partition, records in polled.items()
            if records
        ]

    async def _work(self, polled: Polled, context: EpochContext) -> None:
        self._lag.polled(polled)
        voided = await self._prepare(context)
        # A partition may also have been given up meanwhile, or given up and come back.
        kept = {
            at: records
            for at, records in polled.items()
            if at not in voided and context.is_current(at)
        }
        for record in chain.from_iterable(kept.values()):
            if record.unreadable is not None:
                await self._sink.handle_gap(_gap_of(record))
        await self._sink.handle(self._decode(kept), context)

    async def _prepare(self, context: EpochContext) -> Partitions:
        """Have the sink do what must come before; what it set back is polled again."""
        self._is_preparing = True
        try:
            voided = await self._sink.prepare(context)
        finally:
            self._is_preparing = False
        self._lag.forget(voided)
        return voided

    async def _handle(self, polled: Polled) -> None:
        """Let the sink work; where that takes long, keep the membership of the group alive."""
        context = self._context()
        try:
            await work_beside(
                self._work(polled, context),
                meanwhile=partial(self._keep_membership, polled, context),
                after_seconds=self._config.poll_seconds,
            )
        finally:
            self._drop_late_letters(polled, context)
            self.consumer.resume(self.consumer.assignment())

    def _drop_late_letters(self, polled: Polled, context: EpochContext) -> None:
        """Forget what the sink put aside after its partition was given up."""
        self._drop_letters(at for at in polled if not context.is_current(at))

    async def _keep_membership(self, polled: Polled, context: EpochContext) -> None:
        await self._poll_paused()
        self._drop_late_letters(polled, context)
        if self._is_preparing and not polled:
            await self._look_at_ends()
        await self._settle()

    async def _look_at_ends(self) -> None:
        """Look whether anything has come: the sink takes nothing, so none of it is polled."""
        try:
            ends = await self.consumer.end_offsets(self.consumer.assignment())
        except (BusError, NotAssignedError):
            return  # polls say so
        if self._is_preparing:
            self._lag.ends(ends)

    async def _poll_paused(self) -> None:
        """Poll for the group's sake alone: nothing is handed out, nor of what comes in by this."""
        self._hands_out_nothing = True
        try:
            self.consumer.pause(self.consumer.assignment())
            await self._poll(1)
        finally:
            self._hands_out_nothing = False

    async def _settle(self) -> None:
        """Publish the dead letters and commit what is done; nothing more is taken before that."""
        while True:
            try:
                await self._settle_once()
            except BusError as error:
                await self._endure(error, self._committing)
                # One that the group gave up is refused until it has polled.
                await self._poll_paused()
            else:
                break
        if self._committing.failures:
            self._committing.end()
            self._report_membership()

    async def _settle_once(self) -> None:
        async with self._settling:
            offsets = self._progress.uncommitted()
            await self.dead_letters.flush()
            if offsets:
                await self.consumer.commit(offsets)
                self._progress.committed(offsets)


def _gap_of(record: Record) -> Gap:
    """Return what is missing for good where records cannot be unpacked."""
    return Gap(
        partition=TopicPartition(record.topic, record.partition),
        first_offset=record.first_offset,
        next_offset=record.offset + 1,
        reason=GapReason.UNREADABLE,
        time_after_ms=known_time_ms(record.timestamp_ms),
    )
