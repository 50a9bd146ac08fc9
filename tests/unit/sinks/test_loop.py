"""The consume loop: what is committed, what is put aside, and what waits."""

import asyncio
from collections.abc import (
    Sequence,
)

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.protocol import (
    GapReason,
    TopicPartition,
)
from gpuledger.runtime import Readiness
from gpuledger_sinks.protocol import AcknowledgedOffsets, Batch, SinkContext
from tests.default_topics import EVENTS
from tests.unit.sinks.builders import (
    BUS_TOPICS,
    PARTITIONS,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.consuming import AT, GROUP, Recorder, SpoiledBus, consuming, is_committed


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
        assert [dead_letter.offset for dead_letter in await dead_letters(on)] == [0, 2]

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


async def test_a_batch_that_cannot_be_unpacked_is_told_to_the_sink_before_what_is_behind_it() -> (
    None
):
    on, sink, gaps = SpoiledBus(), Recorder(), Readiness().check("gaps")
    on.create(BUS_TOPICS)
    await publish(on, event(0), b"undecodable", b"spoiled", event(3))
    async with running(consuming(on, sink, gaps=gaps)):
        await eventually(is_committed(on, 4))
        (_, dead_letter) = await dead_letters(on)

    ((gap, taken_before),) = sink.gaps
    assert (gap.partition, gap.reason, gap.missed) == (AT, GapReason.UNREADABLE, 2)
    assert (gap.first_offset, gap.next_offset, taken_before) == (1, 3, 0)
    assert (dead_letter.reason, dead_letter.offset, dead_letter.last_offset) == ("unreadable", 1, 2)
    assert [offset for _, offset in sink.taken] == [0, 3]
    assert not gaps.has_failed  # what lies there and is skipped is told by its letter


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
        "group_instance_id": None,
        "topics": [EVENTS.name],
    }
    assert assigned["partitions"] == {EVENTS.name: list(range(PARTITIONS))}


def test_progress_gives_what_is_done_beyond_what_was_committed() -> None:
    progress, other = AcknowledgedOffsets(), TopicPartition("t", 1)
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


async def test_the_tests_topics_have_the_partitions_that_they_say() -> None:
    assert await bus().partitions(EVENTS.name) == PARTITIONS
