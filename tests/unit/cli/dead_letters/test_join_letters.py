"""Letters of the join are written back where it books them, and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import decoder_of, encode
from gpuledger.keys import node_key
from gpuledger.records import GpuEvent, NodeProgress
from gpuledger.runtime import Readiness
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from tests.default_topics import EVENTS, PODS, PROGRESS, SAMPLES
from tests.unit.cli.dead_letters.builders import (
    JOIN,
    counted,
    join_target,
    record_of,
    reject,
    replay,
)
from tests.unit.enricher.join.ticks import process, sample
from tests.unit.sinks.builders import ManualClock, bus, eventually, place_of, running

if TYPE_CHECKING:
    from gpuledger.bus.memory import MemoryBus
    from gpuledger.bus.protocol import Record
    from gpuledger.records import NodeSample
    from gpuledger_cli.dead_letters.letter_replay import LetterOutcome

SETTINGS = JoinSettings(join=JoinTuning(poll_timeout_seconds=0.02, podwatch_timeout_seconds=0))


async def put_back(on: MemoryBus) -> LetterOutcome:
    clock = ManualClock()
    return await replay(on, join_target(on, clock=clock), clock=clock)


async def set_booked(on: MemoryBus, booked: NodeSample) -> None:
    """Write down that a tick is booked, as the join does."""
    progress = NodeProgress(
        cluster=booked.cluster,
        node=booked.node,
        boot_id=booked.boot_id,
        seq=booked.seq,
        time_ns=booked.time_ns,
        offset=0,
        begun_time_ns=booked.time_ns - booked.seq * 10**6,
    )
    at = place_of(booked.node, PROGRESS.name)
    async with on.producer() as producer:
        message = Message(node_key(booked).encode(), encode(progress), booked.time_ns // 10**6)
        await producer.publish(*at, [message])


async def test_a_tick_that_was_not_booked_is_written_back_and_booked_once() -> None:
    on = bus()
    record = record_of(sample(seq=5000))
    await reject(on, record, record, consumer=JOIN, reason="undecodable")
    outcome = await put_back(on)

    assert counted(outcome) == (2, 0, 0, 0)
    (first, _) = on.kept(SAMPLES.name)
    assert (first.partition, first.key, first.value, first.timestamp_ms) == (
        record.partition,
        record.key,
        record.value,
        record.timestamp_ms,
    )
    async with running(run_join(bus=on, settings=SETTINGS, readiness=Readiness())):
        await eventually(lambda: on.kept(EVENTS.name))
        at = TopicPartition(SAMPLES.name, record.partition)
        await eventually(lambda: on.committed(JOIN, at) == 2)
    (event,) = on.kept(EVENTS.name)
    assert decoder_of(EVENTS.name, GpuEvent).decode(event.value).seq == 5000


@pytest.mark.parametrize(
    ("letter", "why"),
    [
        (record_of(sample(seq=5000)), "ticks behind it are booked of its node"),
        (record_of(sample(seq=4999)), "ticks behind it are booked of its node"),
        (record_of(sample(seq=400_000_000)), "ahead of its boot"),
        (record_of(sample(seq=6000, interval_ns=0)), "it contradicts itself still: field interval"),
        (
            record_of(sample(seq=6000, processes=[process(gpu=7)])),
            "it contradicts itself still: field processes[0].gpu: 7",
        ),
        (record_of(sample(seq=6000))._replace(key=b"other/node"), "belongs in partition"),
        (record_of(sample(seq=6000))._replace(value=b"{}"), "it cannot be decoded by this version"),
        (record_of(sample(seq=6000))._replace(topic=PODS.name), "which is not read there"),
    ],
    ids=[
        "booked",
        "before_booked",
        "ahead",
        "no_interval",
        "no_position",
        "misplaced",
        "undecodable",
        "of_podwatch",
    ],
)
async def test_what_the_join_would_not_book_is_left_out_and_told_why(
    letter: Record, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = bus()
    await set_booked(on, sample(seq=5000))
    await reject(on, letter, consumer=JOIN)
    outcome = await put_back(on)

    assert counted(outcome) == (0, 0, 1, 0)
    assert why in capsys.readouterr().out
    assert on.kept(SAMPLES.name) == []


async def test_a_tick_beyond_what_is_booked_and_one_of_another_boot_are_written_back() -> None:
    on = bus()
    await set_booked(on, sample(seq=5000))
    letters = (record_of(sample(seq=6000)), record_of(sample(seq=10, boot_id="another")))
    await reject(on, *letters, consumer=JOIN)

    assert counted(await put_back(on)) == (2, 0, 0, 0)
    assert [record.value for record in on.kept(SAMPLES.name)] == [one.value for one in letters]


async def test_a_node_that_the_join_forgot_is_booked_anew() -> None:
    on = bus()
    await set_booked(on, sample(seq=5000))
    async with on.producer() as producer:
        gone = Message(node_key(sample()).encode(), None, 1)
        await producer.publish(*place_of("node-a", PROGRESS.name), [gone])
    await reject(on, record_of(sample(seq=4000)), consumer=JOIN)

    assert counted(await put_back(on)) == (1, 0, 0, 0)


async def test_the_second_replay_writes_nothing_back() -> None:
    on = bus()
    await reject(on, record_of(sample()), consumer=JOIN)
    await put_back(on)

    assert counted(await put_back(on)) == (0, 0, 0, 1)
    assert len(on.kept(SAMPLES.name)) == 1
