"""The consume loop: what is committed, what is put aside, and what waits."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.memory_consumer import MemoryConsumer
from gpuledger.bus.protocol import (
    Consumer,
    Gap,
    GapReason,
    Message,
    Polled,
    Producer,
    Record,
    Subscription,
    TopicPartition,
    Unreadable,
    UnreadableReason,
)
from gpuledger.codec import Decoder, encode
from gpuledger.errors import BusUnavailableError, NotAssignedError
from gpuledger.records import GpuEvent
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.topics import DEAD_LETTERS, EVENTS, Topic
from sinks.errors import ReceiverUnavailableError, RejectedError
from sinks.loop import consume
from sinks.protocol import Batch, ConsumerConfig, Partitions, Progress, Sink, SinkContext
from sinks.retrying import until_answered
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    NODE,
    PARTITIONS,
    SECOND_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    place_of,
    publish,
    running,
)

GROUP = "test"
AT = place_of(NODE)


class Recorder(Sink):
    """A sink that takes everything, when its gate is open."""

    name = "recorder"

    def __init__(self, receiver: str = "") -> None:
        self.receiver = receiver
        self.gaps: list[tuple[Gap, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = 0
        self.taken: list[tuple[TopicPartition, int]] = []
        self.released: list[Partitions] = []
        self.acknowledges = True

    @override
    async def assign(self, partitions: Partitions, context: SinkContext) -> None:
        pass

    @override
    async def handle_gap(self, gap: Gap) -> None:
        self.gaps.append((gap, len(self.taken)))

    @override
    async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
        self.entered += len(batches)
        for batch in batches:
            await self.gate.wait()
            self.taken += [(batch.partition, record.offset) for record, _ in batch.items]
            if self.acknowledges:
                context.acknowledge(batch.partition, batch.next_offset)

    @override
    async def release(self, partitions: Partitions, context: SinkContext) -> None:
        self.released.append(partitions)


def consuming(on: Any, sink: Recorder, **how: Any) -> asyncio.Future[None]:  # noqa: ANN401  # any bus
    values: dict[str, Any] = {"group": GROUP, "poll_seconds": 0.01, **how}
    decoders = {EVENTS.name: Decoder(topic=EVENTS.name, record=GpuEvent)}
    check = values.pop("check", Check())
    clock = values.pop("clock", ManualClock())
    gaps = values.pop("gaps", None)
    return asyncio.ensure_future(
        consume(
            bus=on,
            sink=sink,
            config=ConsumerConfig(decoders=decoders, **values),
            check=check,
            clock=clock,
            gaps=gaps,
        )
    )


def is_committed(on: MemoryBus, offset: int | None) -> Callable[[], bool]:
    return lambda: committed(on, GROUP, AT) == offset


async def test_what_is_acknowledged_is_committed_and_nothing_else() -> None:
    on, sink = bus(), Recorder()
    await publish(on, event(0), event(1))
    async with running(consuming(on, sink)):
        await eventually(is_committed(on, 2))
        sink.acknowledges = False
        await publish(on, event(2))
        await eventually(lambda: len(sink.taken) == 3)
        polls = sink.entered
        await publish(on, event(3, node="node-c"))
        await eventually(lambda: sink.entered > polls)
    assert committed(on, GROUP, AT) == 2


async def test_what_cannot_be_decoded_is_a_dead_letter_and_the_rest_is_taken() -> None:
    on, sink = bus(), Recorder()
    await publish(on, b"bad", event(1), b"worse")
    async with running(consuming(on, sink)):
        await eventually(is_committed(on, 3))
        assert [letter.offset for letter in await dead_letters(on)] == [0, 2]

    assert [offset for _, offset in sink.taken] == [1]


async def test_while_a_receiver_is_slow_polling_goes_on_and_brings_nothing_more() -> None:
    on, sink = bus(), Recorder()
    await publish(on, event(0))
    sink.gate.clear()
    async with running(consuming(on, sink)):
        await eventually(lambda: sink.entered == 1)
        await publish(on, event(1), event(2))
        # Another member can only join where this one goes on polling.
        async with running(consuming(on, other := Recorder())):
            await eventually(lambda: sink.released)
            assert sink.entered == 1
            sink.gate.set()
            await eventually(is_committed(on, 3))
    offsets = sorted(offset for _, offset in {*sink.taken, *other.taken})
    assert offsets == [0, 1, 2]


async def test_an_end_commits_what_was_acknowledged_last() -> None:
    on, sink = bus(), Recorder()
    await publish(on, event(0))
    async with running(consuming(on, sink)):
        sink.gate.clear()
        await eventually(lambda: sink.entered == 1)
        asyncio.get_running_loop().call_later(0.05, sink.gate.set)

    assert committed(on, GROUP, AT) == 1
    assert sink.released


@pytest.mark.parametrize(
    "error", [ReceiverUnavailableError("disk full"), NotAssignedError("another has it")]
)
async def test_partitions_are_given_up_where_the_receiver_or_the_commit_fails(
    error: Exception,
) -> None:
    class Failing(Recorder):
        @override
        async def release(self, partitions: Partitions, context: SinkContext) -> None:
            await super().release(partitions, context)
            raise error

    on, sink = bus(), Failing()
    await publish(on, event(0))
    with capture_logs() as logged:
        async with running(consuming(on, sink)) as member:
            await eventually(is_committed(on, 1))
            async with running(consuming(on, Recorder())):
                await eventually(lambda: len(sink.released) == 1)
            await publish(on, event(1))
            await eventually(is_committed(on, 2))
            assert not member.done()

    assert member.cancelled()
    assert "commit_skipped" in {line["event"] for line in logged}


class Flaky(MemoryConsumer):
    """A consumer whose first calls of one kind fail."""

    failures: Mapping[str, int]

    def _maybe_fail(self, what: str) -> None:
        left = dict(self.failures)
        if left.get(what, 0) > 0:
            left[what] -= 1
            self.failures = left
            raise BusUnavailableError(f"no broker for {what}")

    @override
    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        self._maybe_fail("poll")
        return await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)

    @override
    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._maybe_fail("commit")
        await super().commit(offsets)


class FlakyBus(MemoryBus):
    """A bus that opens flaky consumers, and fails to open some."""

    failures: Mapping[str, int] = {}
    opened = 0
    newest: "Flaky"

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            assert isinstance(consumer, MemoryConsumer)
            consumer.__class__ = Flaky
            consumer.failures = self.failures if self.opened == 0 else {}  # type: ignore[attr-defined]  # it is flaky now
            self.opened += 1
            self.newest = cast("Flaky", consumer)
            yield consumer


class Spoiled(MemoryConsumer):
    """A consumer that cannot unpack what is no JSON, as if it came in a batch of ten."""

    @override
    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        polled = await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)
        return {at: [self._spoil(record) for record in records] for at, records in polled.items()}

    def _spoil(self, record: Record) -> Record:
        if record.value != b"spoiled":
            return record
        why = Unreadable(record.offset - 1, UnreadableReason.CODEC, "it is packed with gzip")
        return record._replace(key=None, value=None, unreadable=why)


class SpoiledBus(MemoryBus):
    """A bus whose consumers cannot unpack some batches."""

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        async with super().consumer(subscription) as consumer:
            consumer.__class__ = Spoiled
            yield consumer


async def test_a_batch_that_cannot_be_unpacked_is_told_to_the_sink_before_what_is_behind_it() -> (
    None
):
    on, sink, gaps = SpoiledBus(), Recorder(), Readiness().check("gaps")
    on.create(BUS_TOPICS)
    await publish(on, event(0), b"undecodable", b"spoiled", event(3))
    async with running(consuming(on, sink, gaps=gaps)):
        await eventually(is_committed(on, 4))
        (_, letter) = await dead_letters(on)

    ((gap, taken_before),) = sink.gaps
    assert (gap.partition, gap.reason, gap.missed) == (AT, GapReason.UNREADABLE, 2)
    assert (gap.first_offset, gap.next_offset, taken_before) == (1, 3, 0)
    assert (letter.reason, letter.offset, letter.last_offset) == ("unreadable", 1, 2)
    assert [offset for _, offset in sink.taken] == [0, 3]
    assert not gaps.has_failed  # what lies there and is skipped is told by its letter


def flaky(**failures: int) -> FlakyBus:
    made = FlakyBus()
    made.failures = failures
    made.create(BUS_TOPICS)
    return made


@pytest.mark.parametrize(
    ("failures", "opened"),
    [({"poll": 3}, 1), ({"commit": 3}, 1), ({"poll": 8}, 2), ({"commit": 8}, 2)],
)
async def test_a_bus_that_fails_is_tried_again_and_at_last_opened_anew(
    failures: dict[str, int], opened: int
) -> None:
    on, sink, clock, check = flaky(**failures), Recorder(), ManualClock(), Check()
    await publish(on, event(0), event(1))
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(is_committed(on, 2))
        await eventually(lambda: check.is_ok)

    assert on.opened == opened
    assert len(clock.slept) == sum(failures.values())
    assert clock.slept[1] > clock.slept[0]


async def test_the_check_of_the_bus_recovers_while_the_receiver_is_still_away() -> None:
    on, sink, clock, check = flaky(), Recorder(), ManualClock(), Check()
    await publish(on, event(0))
    sink.gate.clear()
    async with running(consuming(on, sink, check=check, clock=clock)):
        await eventually(lambda: sink.entered and check.is_ok)
        for _ in range(9):
            on.newest.failures = {"poll": 1}
            await eventually(lambda: check.has_failed or not on.newest.failures["poll"])
            await eventually(lambda: check.is_ok)

    # Failures that are far apart are no reason to open the consumer anew.
    assert on.opened == 1


async def test_while_commits_fail_and_polls_do_not_the_check_goes_on_failing() -> None:
    on, sink, told = flaky(commit=5), Recorder(), list[bool]()
    watched = Check(on_change=lambda each: told.append(each.is_ok))
    await publish(on, event(0))
    async with running(consuming(on, sink, check=watched)):
        await eventually(is_committed(on, 1))
        await eventually(lambda: watched.is_ok)

    assert told[-2:] == [False, True]
    assert told.count(False) == 1


async def test_a_topic_that_is_missing_is_named_and_waited_for() -> None:
    on, sink, clock, check = MemoryBus([EVENTS]), Recorder(), ManualClock(), Check()
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(lambda: "gpuledger.dead-letters.v1" in check.detail)
        assert not check.is_ok
        on.create([DEAD_LETTERS])
        await eventually(lambda: check.is_ok)


async def test_a_member_for_which_no_partition_is_left_is_ready_and_says_so() -> None:
    on = MemoryBus([Topic(name=EVENTS.name, record=GpuEvent, key="node", partitions=1)])
    on.create([DEAD_LETTERS])
    checks = [Check(), Check()]
    async with (
        running(consuming(on, Recorder(), check=checks[0])),
        running(consuming(on, Recorder(), check=checks[1])),
    ):
        await eventually(
            lambda: (
                sorted(check.detail for check in checks)
                == ["1 partitions held, 0 s behind", "no partition: the group has members enough"]
            )
        )
        assert all(check.is_ok for check in checks)


async def test_an_error_of_the_sink_itself_ends_the_loop() -> None:
    class Broken(Recorder):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consuming(bus(), Broken())


async def test_the_start_says_what_runs_where_to_and_as_whom_and_then_what_it_holds() -> None:
    with capture_logs() as logged:
        async with running(consuming(bus(), Recorder("http://prometheus:9090/write"))):
            await eventually(lambda: len(logged) >= 2)

    started, assigned = logged[:2]
    assert started == {
        "event": "sink_started",
        "log_level": "info",
        "sink": "recorder",
        "receiver": "http://prometheus:9090/write",
        "group": GROUP,
        "member": None,
        "topics": [EVENTS.name],
    }
    assert assigned["partitions"] == {EVENTS.name: list(range(PARTITIONS))}


async def test_an_outage_of_the_bus_is_logged_where_it_begins_and_where_it_ends() -> None:
    on, sink, readiness = flaky(poll=7), Recorder(), Readiness()
    await publish(on, event(0))
    with capture_logs() as logged:
        async with running(consuming(on, sink, check=readiness.check("t.bus"))):
            await eventually(is_committed(on, 1))

    told = [line["event"] for line in logged if line["log_level"] != "info" or "check" in line]
    assert told == ["check_failed", "check_recovered"]


async def test_the_detail_of_a_healthy_sink_is_that_of_the_moment() -> None:
    on, sink, clock, check = bus(), Recorder(), ManualClock(), Check()
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(lambda: check.is_ok)
        assert check.detail == f"{PARTITIONS} partitions held, 0 s behind"
        sink.gate.clear()
        await publish(on, event(0))
        await eventually(lambda: sink.entered == 1)
        clock.now_ns += 42 * SECOND_NS
        assert check.detail == f"{PARTITIONS} partitions held, 42 s behind"
        sink.gate.set()
        await eventually(lambda: check.detail.endswith(", 0 s behind"))


async def test_what_was_removed_unread_stays_in_the_check_of_gaps_and_the_sink_ready() -> None:
    on, sink, readiness = bus(), Recorder(), Readiness()
    gaps = readiness.check("t.gaps", severity=CheckSeverity.WARNING)
    how = {"check": readiness.check("t.bus"), "gaps": gaps}
    await publish(on, *map(event, range(4)))
    async with running(consuming(on, sink, **how)):
        await eventually(is_committed(on, 4))
        assert gaps.detail == "no record was missed"
    await publish(on, *map(event, range(4, 9)))
    on.remove_before(AT, 7)

    async with running(consuming(on, sink, **how)):
        await eventually(is_committed(on, 9))
        assert readiness.is_ready()
        assert "from offset 4: 3 offsets (retention)" in gaps.detail
        await publish(on, event(10))
        await eventually(is_committed(on, 10))
        assert not gaps.is_ok

    assert [offset for _, offset in sink.taken] == [0, 1, 2, 3, 7, 8, 9]


async def test_an_outage_of_the_receiver_is_logged_where_it_begins_and_where_it_ends() -> None:
    check = Readiness().check("t.receiver")

    async def attempt(number: int) -> None:
        if number < 20:
            raise ReceiverUnavailableError("connection refused")

    with capture_logs() as logged:
        await until_answered(attempt, sink="t", check=check, clock=ManualClock(), receiver="there")

    assert [line["event"] for line in logged] == ["check_failed", "check_recovered"]
    assert check.detail == "there"


def test_progress_gives_what_is_done_beyond_what_was_committed() -> None:
    progress, other = Progress(), TopicPartition("t", 1)
    progress.begin({AT, other})
    progress.done(AT, 5)
    progress.done(AT, 3)
    progress.done(other, 7)
    assert progress.uncommitted() == {AT: 5, other: 7}

    progress.committed({AT: 5})
    assert progress.uncommitted() == {other: 7}

    progress.end({other})
    assert progress.uncommitted() == {}
    progress.begin({other})
    progress.done(other, 9)
    progress.begin({other})
    assert progress.uncommitted() == {}
    progress.done(other, 1)
    assert progress.uncommitted() == {other: 1}


@pytest.mark.parametrize("failures", [0, 1, 4])
async def test_an_attempt_is_repeated_with_growing_pauses_until_it_is_answered(
    failures: int,
) -> None:
    clock, check = ManualClock(), Check()

    async def attempt(number: int) -> int:
        if number < failures:
            assert number == 0 or not check.is_ok
            raise ReceiverUnavailableError("later")
        return number

    assert await until_answered(attempt, sink="t", check=check, clock=clock) == failures
    assert check.is_ok
    assert clock.slept == sorted(clock.slept)
    assert len(clock.slept) == failures


async def test_a_receiver_that_names_a_time_is_left_alone_until_then() -> None:
    clock = ManualClock()

    async def attempt(number: int) -> None:
        if number == 0:
            raise ReceiverUnavailableError("later", retry_after_seconds=42)

    await until_answered(attempt, sink="t", check=Check(), clock=clock)

    assert clock.slept == [42]


async def test_a_final_answer_is_not_tried_again() -> None:
    async def attempt(number: int) -> None:
        raise RejectedError("400 no")

    with pytest.raises(RejectedError, match="400 no"):
        await until_answered(attempt, sink="t", check=Check(), clock=ManualClock())


def test_the_tests_topics_have_the_partitions_that_they_say() -> None:
    assert {place.partition for place in bus()._logs if place.topic == EVENTS.name} == set(
        range(PARTITIONS)
    )


class ScriptedConsumer:
    """A consumer each of whose polls is a step of the test's; after the last nothing comes."""

    def __init__(self, subscription: Subscription, script: "Script") -> None:
        self._subscription, self._script = subscription, script
        self._held: Partitions = frozenset()
        self._paused: set[TopicPartition] = set()
        self.commits: list[Mapping[TopicPartition, int]] = []

    async def poll(
        self, *, timeout_seconds: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        await asyncio.sleep(0)
        step = next(self._script, None)
        brought = {} if step is None else await step(self)
        given = {at: records for at, records in brought.items() if at not in self._paused}
        self._script.given += [(at, one.offset) for at in given for one in given[at]]
        return given

    async def gain(self, partition: TopicPartition) -> None:
        self._held |= {partition}
        await self._subscription.on_assigned(frozenset({partition}))

    async def lose(self, partition: TopicPartition) -> None:
        await self._subscription.on_revoked(frozenset({partition}))
        self._held -= {partition}
        self._paused -= {partition}

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        assert offsets.keys() <= self._held
        self.commits.append(offsets)

    def withheld_seconds(self) -> float:
        return 0.0

    def assignment(self) -> Partitions:
        return self._held

    def pause(self, partitions: Partitions) -> None:
        self._paused |= partitions & self._held

    def resume(self, partitions: Partitions) -> None:
        self._paused -= partitions


Step = Callable[[ScriptedConsumer], Awaitable[Mapping[TopicPartition, Sequence[Record]]]]


class Script:
    """The steps that are left, and what was given in those that were done."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = iter(steps)
        self.given: list[tuple[TopicPartition, int]] = []

    def __next__(self) -> Step:
        return next(self._steps)


class ScriptedBus(MemoryBus):
    script: Script

    @override
    @asynccontextmanager
    async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
        yield cast("Consumer", ScriptedConsumer(subscription, self.script))


def scripted(*steps: Step) -> ScriptedBus:
    made = ScriptedBus()
    made.script = Script(steps)
    return made


def first_of(partition: TopicPartition, *, offset: int = 0) -> Polled:
    made, at = event(0), (*partition, offset)
    return {partition: [Record(*at, made.time_ns // 1_000_000, b"key", encode(made))]}


KEPT, LOST = (TopicPartition(EVENTS.name, number) for number in range(2))


async def test_what_was_not_acknowledged_of_a_partition_that_is_given_up_is_no_lag() -> None:
    sink, clock, check = Recorder(), ManualClock(), Check()
    sink.acknowledges = False

    async def begins(consumer: ScriptedConsumer) -> Mapping[TopicPartition, Sequence[Record]]:
        await consumer.gain(KEPT)
        await consumer.gain(LOST)
        return first_of(LOST)

    async def it_is_behind(_: ScriptedConsumer) -> Mapping[TopicPartition, Sequence[Record]]:
        clock.advance(42)
        details.append(check.detail)
        return {}

    async def it_goes(consumer: ScriptedConsumer) -> Mapping[TopicPartition, Sequence[Record]]:
        await consumer.lose(LOST)
        return {}

    async def shown(_: ScriptedConsumer) -> Mapping[TopicPartition, Sequence[Record]]:
        details.append(check.detail)
        return {}

    details: list[str] = []
    on = scripted(begins, it_is_behind, it_goes, shown)
    async with running(consuming(on, sink, clock=clock, check=check)):
        await eventually(lambda: len(details) == 2)

    assert details == ["2 partitions held, 42 s behind", "1 partitions held, 0 s behind"]


class Held:
    """What a member goes through, poll by poll, and what it committed; all polls end with it."""

    def __init__(self, sink: Recorder) -> None:
        self.sink = sink
        self.over = asyncio.Event()
        self.commits: list[Mapping[TopicPartition, int]] = []
        self.given: list[tuple[TopicPartition, int]] = []

    def gains(self, *partitions: TopicPartition, brings: Polled | None = None) -> Step:
        async def step(consumer: ScriptedConsumer) -> Polled:
            for partition in partitions:
                await consumer.gain(partition)
            return brings or {}

        return step

    def loses(self, *partitions: TopicPartition) -> Step:
        async def step(consumer: ScriptedConsumer) -> Polled:
            for partition in partitions:
                await consumer.lose(partition)
            return {}

        return step

    def brings(self, brought: Polled) -> Step:
        async def step(_: ScriptedConsumer) -> Polled:
            return brought

        return step

    async def has_its_receiver_back(self, _: ScriptedConsumer) -> Polled:
        self.sink.gate.set()
        return {}

    async def looks(self, consumer: ScriptedConsumer) -> Polled:
        self.commits = consumer.commits
        return {}

    async def ends(self, consumer: ScriptedConsumer) -> Polled:
        self.commits = consumer.commits
        self.over.set()
        return {}

    async def through(self, *steps: Step, **how: Any) -> None:  # noqa: ANN401  # as consuming takes it
        idle = [self.looks] * 9
        on = scripted(*steps, *idle, self.ends)
        async with running(consuming(on, self.sink, **how)):
            await asyncio.wait_for(self.over.wait(), 10)
        self.given = on.script.given


class Stuck(Recorder):
    """A sink whose receiver is away, and which tells of everything once it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()


async def test_what_was_polled_before_a_partition_went_and_came_back_is_never_committed() -> None:
    member = Held(Stuck())
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT, offset=4)),
        member.loses(KEPT),
        member.gains(KEPT),
        member.has_its_receiver_back,
    )

    assert member.sink.taken == [(KEPT, 4)]
    assert member.commits == []


async def test_of_a_partition_that_came_back_what_is_polled_then_is_committed_as_it_is() -> None:
    # After a topic was made anew its offsets begin again, below those that were done before.
    member = Held(Recorder())
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT, offset=4)),
        member.looks,
        member.loses(KEPT),
        member.gains(KEPT, brings=first_of(KEPT, offset=0)),
    )

    assert member.commits == [{KEPT: 5}, {KEPT: 1}]


class LetterlessBus(ScriptedBus):
    """A bus whose topic of dead letters is absent until it is made."""

    is_absent = True

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as producer:
            yield _LetterlessProducer(producer, self)


class _LetterlessProducer:
    def __init__(self, inner: Producer, on: LetterlessBus) -> None:
        self._inner, self._on = inner, on

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if self._on.is_absent:
            raise BusUnavailableError("there is no such topic")
        await self._inner.publish(topic, partition, messages)


def bad_first_of(partition: TopicPartition) -> Polled:
    return {partition: [Record(*partition, 0, 1, b"key", b"{")]}


async def test_dead_letters_lie_on_the_bus_before_the_offsets_behind_them_are_committed() -> None:
    member = Held(Recorder())
    committed_before: list[Mapping[TopicPartition, int]] = []

    async def topic_is_made(consumer: ScriptedConsumer) -> Polled:
        committed_before.extend(consumer.commits)
        on.is_absent = False
        return {}

    on = LetterlessBus([replace(EVENTS, partitions=2), DEAD_LETTERS])
    bad = member.gains(KEPT, brings=bad_first_of(KEPT))
    on.script = Script([bad, member.looks, member.looks, topic_is_made, member.looks, member.ends])
    async with running(consuming(on, member.sink)):
        await asyncio.wait_for(member.over.wait(), 10)

    assert (committed_before, member.commits) == ([], [{KEPT: 1}])


async def test_letters_of_a_partition_that_is_given_up_are_the_next_owners_to_publish() -> None:
    member, over = Held(Recorder()), asyncio.Event()

    async def topic_is_made(_: ScriptedConsumer) -> Polled:
        on.is_absent = False
        return {}

    async def ends(_: ScriptedConsumer) -> Polled:
        over.set()
        return {}

    on = LetterlessBus([replace(EVENTS, partitions=2), DEAD_LETTERS])
    on.script = Script(
        [
            member.gains(KEPT, LOST, brings={**bad_first_of(KEPT), **bad_first_of(LOST)}),
            member.loses(LOST),
            topic_is_made,
            member.looks,
            ends,
        ]
    )
    async with running(consuming(on, member.sink)):
        await asyncio.wait_for(over.wait(), 10)

    told = [(letter.topic, letter.partition) for letter in await dead_letters(on)]
    assert told == [KEPT]


async def test_what_is_put_aside_after_its_partition_was_given_up_is_not_published() -> None:
    class LateRejecting(Stuck):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            await super().handle(batches, context)
            for record, _ in (item for batch in batches for item in batch.items):
                context.dead_letters.reject(record, reason="invalid", detail="late")

    sink, over = LateRejecting(), asyncio.Event()
    member = Held(sink)

    async def ends(_: ScriptedConsumer) -> Polled:
        over.set()
        return {}

    on = ScriptedBus([replace(EVENTS, partitions=2), DEAD_LETTERS])
    on.script = Script(
        [
            member.gains(KEPT, brings=first_of(KEPT)),
            member.loses(KEPT),
            member.has_its_receiver_back,
            member.looks,
            member.looks,
            ends,
        ]
    )
    async with running(consuming(on, sink)):
        await asyncio.wait_for(over.wait(), 10)

    assert sink.taken == [(KEPT, 0)]
    assert await dead_letters(on) == []


async def test_what_is_acknowledged_while_it_is_given_up_is_committed() -> None:
    class Finishing(Recorder):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            self.entered += len(batches)

        @override
        async def release(self, partitions: Partitions, context: SinkContext) -> None:
            for partition in partitions:
                context.acknowledge(partition, 1)

    member = Held(Finishing())
    await member.through(member.gains(KEPT, brings=first_of(KEPT)), member.loses(KEPT))

    assert member.commits == [{KEPT: 1}]


@pytest.mark.parametrize("comes_back", [0, 1])
async def test_of_a_partition_that_comes_beside_the_work_nothing_is_read_before_it_is_over(
    comes_back: int,
) -> None:
    member = Held(Stuck())
    back = [member.loses(LOST), member.gains(LOST, brings=first_of(LOST))] if comes_back else []
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT)),
        member.gains(LOST, brings=first_of(LOST)),
        *back,
        member.has_its_receiver_back,
        *[member.brings(first_of(LOST))] * 3,
    )

    taken = member.sink.taken
    assert set(taken) == {(KEPT, 0), (LOST, 0)}
    assert member.given == taken


async def test_what_was_polled_before_the_sink_set_its_partition_elsewhere_is_let_go() -> None:
    class Setting(Recorder):
        is_set = False

        @override
        async def prepare(self, context: SinkContext) -> Partitions:
            voided = frozenset() if self.is_set else context.consumer.assignment()
            self.is_set = bool(voided)
            return voided

    member = Held(Setting())
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT, offset=4)),
        member.brings(first_of(KEPT, offset=2)),
    )

    assert member.sink.taken == [(KEPT, 2)]


async def test_what_the_sink_has_committed_itself_is_not_committed_again() -> None:
    class Committing(Recorder):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            for batch in batches:
                context.acknowledge(batch.partition, batch.next_offset, is_committed=True)

    member, clock, check = Held(Committing()), ManualClock(), Check()
    brings = member.gains(KEPT, brings=first_of(KEPT))
    await member.through(brings, check=check, clock=clock)
    clock.advance(42)

    assert member.commits == []
    assert check.detail.endswith(", 0 s behind")


@pytest.mark.parametrize("comes_back", [0, 1])
async def test_what_left_while_the_sink_prepared_is_neither_worked_on_nor_behind(
    comes_back: int,
) -> None:
    class Preparing(Stuck):
        @override
        async def prepare(self, context: SinkContext) -> Partitions:
            await self.gate.wait()
            return frozenset()

    check, clock = Check(), ManualClock()
    member = Held(Preparing())
    back = [member.gains(LOST)] if comes_back else []
    await member.through(
        member.gains(KEPT, LOST, brings=first_of(LOST)),
        member.loses(LOST),
        *back,
        member.has_its_receiver_back,
        check=check,
        clock=clock,
    )
    clock.advance(3600)

    assert member.sink.taken == []
    assert check.detail.endswith(", 0 s behind")


async def test_a_commit_that_is_refused_until_the_group_was_polled_is_tried_after_a_poll() -> None:
    class Polls(MemoryConsumer):
        has_polled = True

        @override
        async def poll(self, *, timeout_seconds: float, max_records: int) -> Polled:
            self.has_polled = True
            return await super().poll(timeout_seconds=timeout_seconds, max_records=max_records)

        @override
        async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
            if refused[0] < 3 or not self.has_polled:
                refused[0] += 1
                self.has_polled = False
                raise BusUnavailableError("the group is rebalancing")
            await super().commit(offsets)

    class PollingBus(MemoryBus):
        opened = 0

        @override
        @asynccontextmanager
        async def consumer(self, subscription: Subscription) -> AsyncIterator[Consumer]:
            async with super().consumer(subscription) as consumer:
                consumer.__class__ = Polls
                self.opened += 1
                yield consumer

    refused = [0]
    on, sink = PollingBus(), Recorder()
    on.create(BUS_TOPICS)
    await publish(on, event(0))
    async with running(consuming(on, sink)):
        await eventually(is_committed(on, 1))

    assert (refused, on.opened) == ([3], 1)
