"""The consume loop during rebalances: who owns records, dead letters and offsets."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.protocol import (
    Message,
    Polled,
    Producer,
    Record,
    TopicPartition,
)
from gpuledger.codec import encode
from gpuledger.errors import BusUnavailableError, NotAssignedError
from gpuledger.keys import key_in, split_key
from gpuledger.runtime import Check
from gpuledger.topics import partition_of_node
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.protocol import Batch, Partitions, SinkContext
from tests.default_topics import DEAD_LETTERS, EVENTS
from tests.hanging import HANG_SECONDS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    PARTITIONS,
    ManualClock,
    bus,
    dead_letters,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.consuming import (
    Recorder,
    Script,
    ScriptedBus,
    ScriptedConsumer,
    Step,
    consuming,
    first_of,
    is_committed,
    scripted,
)


@pytest.mark.parametrize(
    "error", [ReceiverUnavailableError("disk full"), NotAssignedError("another has it")]
)
async def test_partitions_are_released_even_if_the_receiver_or_the_commit_fails(
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


KEPT, LOST = (TopicPartition(EVENTS.name, number) for number in range(2))


async def test_unacknowledged_records_of_a_lost_partition_are_not_lag() -> None:
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

    assert details == ["2 partitions assigned, 42 s behind", "1 partitions assigned, 0 s behind"]


class ScriptedMember:
    """A member whose polls follow a script, and its commits; it ends after the last poll."""

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

    async def records_commits(self, consumer: ScriptedConsumer) -> Polled:
        self.commits = consumer.commits
        return {}

    async def ends(self, consumer: ScriptedConsumer) -> Polled:
        self.commits = consumer.commits
        self.over.set()
        return {}

    async def through(
        self,
        *steps: Step,
        on: ScriptedBus | None = None,
        **how: Any,  # noqa: ANN401  # as consuming takes it
    ) -> None:
        on = on or ScriptedBus(BUS_TOPICS)
        on.script = Script([*steps, *[self.records_commits] * 9, self.ends])
        async with running(consuming(on, self.sink, **how)):
            await asyncio.wait_for(self.over.wait(), HANG_SECONDS)
        self.given = on.script.given


class Stuck(Recorder):
    """A sink whose receiver is unavailable, and which accepts everything once it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.clear()


async def test_records_polled_before_a_partition_was_lost_and_regained_are_never_committed() -> (
    None
):
    member = ScriptedMember(Stuck())
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT, offset=4)),
        member.loses(KEPT),
        member.gains(KEPT),
        member.has_its_receiver_back,
    )

    assert member.sink.taken == [(KEPT, 4)]
    assert member.commits == []


async def test_records_polled_after_a_partition_was_regained_are_committed_at_any_offset() -> None:
    # The offsets of a recreated topic start again, below those that were processed before.
    member = ScriptedMember(Recorder())
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT, offset=4)),
        member.records_commits,
        member.loses(KEPT),
        member.gains(KEPT, brings=first_of(KEPT, offset=0)),
    )

    assert member.commits == [{KEPT: 5}, {KEPT: 1}]


class BusWithoutDeadLetters(ScriptedBus):
    """A bus without a topic of dead letters until the test creates it."""

    is_absent = True

    @override
    @asynccontextmanager
    async def producer(self) -> AsyncIterator[Producer]:
        async with super().producer() as producer:
            yield _ProducerWithoutDeadLetters(producer, self)


class _ProducerWithoutDeadLetters:
    def __init__(self, inner: Producer, on: BusWithoutDeadLetters) -> None:
        self._inner, self._on = inner, on

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if self._on.is_absent:
            raise BusUnavailableError("there is no such topic")
        await self._inner.publish(topic, partition, messages)


def bad_first_of(partition: TopicPartition) -> Polled:
    return {partition: [Record(*partition, 0, 1, b"key", b"{")]}


async def test_dead_letters_are_on_the_bus_before_the_offsets_after_them_are_committed() -> None:
    member = ScriptedMember(Recorder())
    committed_before: list[Mapping[TopicPartition, int]] = []

    async def topic_is_made(consumer: ScriptedConsumer) -> Polled:
        committed_before.extend(consumer.commits)
        on.is_absent = False
        return {}

    on = BusWithoutDeadLetters([replace(EVENTS, partitions=2), DEAD_LETTERS])
    bad = member.gains(KEPT, brings=bad_first_of(KEPT))
    await member.through(bad, member.records_commits, member.records_commits, topic_is_made, on=on)

    assert (committed_before, member.commits) == ([], [{KEPT: 1}])


async def test_dead_letters_of_a_lost_partition_are_left_to_its_next_owner() -> None:
    member = ScriptedMember(Recorder())

    async def topic_is_made(_: ScriptedConsumer) -> Polled:
        on.is_absent = False
        return {}

    on = BusWithoutDeadLetters([replace(EVENTS, partitions=2), DEAD_LETTERS])
    await member.through(
        member.gains(KEPT, LOST, brings={**bad_first_of(KEPT), **bad_first_of(LOST)}),
        member.loses(LOST),
        topic_is_made,
        on=on,
    )

    reported = [
        (dead_letter.topic, dead_letter.partition) for dead_letter in await dead_letters(on)
    ]
    assert reported == [KEPT]


async def test_a_record_rejected_after_its_partition_was_lost_is_not_published() -> None:
    class LateRejecting(Stuck):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            await super().handle(batches, context)
            for record, _ in (item for batch in batches for item in batch.items):
                context.dead_letters.reject(record, reason="invalid", detail="late")

    member = ScriptedMember(LateRejecting())

    on = ScriptedBus([replace(EVENTS, partitions=2), DEAD_LETTERS])
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT)),
        member.loses(KEPT),
        member.has_its_receiver_back,
        on=on,
    )

    assert member.sink.taken == [(KEPT, 0)]
    assert await dead_letters(on) == []


async def test_a_record_acknowledged_while_its_partition_is_released_is_committed() -> None:
    class Finishing(Recorder):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            self.entered += len(batches)

        @override
        async def release(self, partitions: Partitions, context: SinkContext) -> None:
            for partition in partitions:
                context.acknowledge(partition, 1)

    member = ScriptedMember(Finishing())
    await member.through(member.gains(KEPT, brings=first_of(KEPT)), member.loses(KEPT))

    assert member.commits == [{KEPT: 1}]


@pytest.mark.parametrize("comes_back", [0, 1])
async def test_a_partition_gained_during_processing_is_not_read_before_it_ends(
    comes_back: int,
) -> None:
    member = ScriptedMember(Stuck())
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


async def test_records_polled_before_the_sink_moved_its_position_are_discarded() -> None:
    class Setting(Recorder):
        is_set = False

        @override
        async def prepare(self, context: SinkContext) -> Partitions:
            voided = frozenset() if self.is_set else context.consumer.assignment()
            self.is_set = bool(voided)
            return voided

    member = ScriptedMember(Setting())
    await member.through(
        member.gains(KEPT, brings=first_of(KEPT, offset=4)),
        member.brings(first_of(KEPT, offset=2)),
    )

    assert member.sink.taken == [(KEPT, 2)]


async def test_offsets_that_the_sink_commits_itself_are_not_committed_again() -> None:
    class Committing(Recorder):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            for batch in batches:
                context.acknowledge(batch.partition, batch.next_offset, commits_itself=True)

    member, clock, check = ScriptedMember(Committing()), ManualClock(), Check()
    brings = member.gains(KEPT, brings=first_of(KEPT))
    await member.through(brings, check=check, clock=clock)
    clock.advance(20)

    assert member.commits == []
    assert check.detail.endswith(", 0 s behind")


async def test_records_of_a_new_partition_are_lag_before_the_sink_prepares() -> None:
    class Preparing(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.behind: list[float] = []

        @override
        async def prepare(self, context: SinkContext) -> Partitions:
            self.behind.append(context.lag.seconds())
            return frozenset()

    sink, clock = Preparing(), ManualClock()
    clock.advance(42)
    member = ScriptedMember(sink)
    # The poll that gains it returns nothing yet: its records are still being fetched.
    await member.through(member.gains(KEPT), member.brings(first_of(KEPT)), clock=clock)

    assert sink.behind[0] == 42


@pytest.mark.parametrize("comes_back", [0, 1])
async def test_a_partition_lost_while_the_sink_prepared_is_neither_processed_nor_lag(
    comes_back: int,
) -> None:
    class Preparing(Stuck):
        @override
        async def prepare(self, context: SinkContext) -> Partitions:
            await self.gate.wait()
            return frozenset()

    check, clock = Check(), ManualClock()
    member = ScriptedMember(Preparing())
    back = [member.gains(LOST)] if comes_back else []
    await member.through(
        member.gains(KEPT, LOST, brings=first_of(LOST)),
        member.loses(LOST),
        *back,
        member.has_its_receiver_back,
        check=check,
        clock=clock,
    )
    clock.advance(20)

    assert member.sink.taken == []
    assert check.detail.endswith(", 0 s behind")


async def test_placement_follows_the_number_of_partitions_at_the_next_assignment() -> None:
    """A sink continues with a topic that was recreated with another number."""
    on, member = ScriptedBus(BUS_TOPICS), ScriptedMember(Recorder())
    names = (f"node-{number}" for number in count())
    moved = next(
        key
        for key in (key_in("default", name) for name in names)
        if [partition_of_node(key, partitions=size) for size in (PARTITIONS, 3)] == [0, 1]
    )
    made = event(0, node=split_key(moved)[1])
    brings = {LOST: [Record(*LOST, 0, 1, moved.encode(), encode(made))]}

    async def grows(consumer: ScriptedConsumer) -> Polled:
        on.create([replace(EVENTS, partitions=3)])
        await consumer.gain(LOST)
        return brings

    await member.through(member.gains(KEPT, brings=first_of(KEPT)), grows, on=on)
    assert member.sink.taken == [(KEPT, 0), (LOST, 0)]
