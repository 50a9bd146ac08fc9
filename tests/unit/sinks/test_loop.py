"""The consume loop: what it commits, rejects, and waits for."""

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


async def test_only_acknowledged_records_are_committed() -> None:
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


async def test_an_undecodable_record_becomes_a_dead_letter_and_the_others_are_processed() -> None:
    on, sink = bus(), Recorder()
    await publish(on, b"bad", event(1), b"worse")
    async with running(consuming(on, sink)):
        await eventually(is_committed(on, 3))
        assert [dead_letter.offset for dead_letter in await dead_letters(on)] == [0, 2]

    assert [offset for _, offset in sink.taken] == [1]


async def test_polling_continues_without_new_records_while_a_receiver_is_slow() -> None:
    on, sink = bus(), Recorder()
    await publish(on, event(0))
    sink.gate.clear()
    async with running(consuming(on, sink)):
        await eventually(lambda: sink.entered == 1)
        await publish(on, event(1), event(2))
        # Another member can join only if this one continues to poll.
        async with running(consuming(on, other := Recorder())):
            await eventually(lambda: sink.released)
            assert sink.entered == 1
            sink.gate.set()
            await eventually(is_committed(on, 3))
    offsets = sorted(offset for _, offset in {*sink.taken, *other.taken})
    assert offsets == [0, 1, 2]


async def test_the_last_acknowledged_offset_is_committed_at_the_end() -> None:
    on, sink = bus(), Recorder()
    await publish(on, event(0))
    async with running(consuming(on, sink)):
        sink.gate.clear()
        await eventually(lambda: sink.entered == 1)
        asyncio.get_running_loop().call_later(0.05, sink.gate.set)

    assert committed(on, GROUP, AT) == 1
    assert sink.released


async def test_an_unreadable_batch_is_reported_to_the_sink_before_the_records_after_it() -> None:
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
    assert not gaps.has_failed  # skipped records that still exist are reported by their dead letter


async def test_an_error_of_the_sink_itself_ends_the_loop() -> None:
    class Broken(Recorder):
        @override
        async def handle(self, batches: Sequence[Batch], context: SinkContext) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consuming(bus(), Broken())


async def test_the_start_logs_sink_receiver_and_group_and_then_the_partitions() -> None:
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


def test_uncommitted_offsets_are_those_acknowledged_after_the_last_commit() -> None:
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


async def test_the_topics_of_the_tests_have_the_declared_partitions() -> None:
    assert await bus().partitions(EVENTS.name) == PARTITIONS
