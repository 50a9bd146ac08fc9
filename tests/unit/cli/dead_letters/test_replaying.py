"""A replay writes each dead letter once, to where only its consumer takes it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.bus.protocol import TopicPartition
from gpuledger.codec import decoder_of
from gpuledger.records import GpuEvent, ReplayedEvent
from gpuledger.runtime import Readiness
from gpuledger_cli.dead_letters.dead_letter_log import DeadLetterFilter, Position
from gpuledger_cli.dead_letters.dead_letter_replay import replay_dead_letters
from gpuledger_enricher.join.join_command import run_join
from gpuledger_enricher.join.join_settings import JoinSettings, JoinTuning
from gpuledger_sinks.registry import ALERTS, REMOTE_WRITE, STORE
from tests.default_topics import DEAD_LETTERS, EVENTS, PODS, READINGS, REPLAY, SAMPLES, TOPICS
from tests.unit.cli.dead_letters.builders import JOIN, record_of, reject
from tests.unit.enricher.join.ticks import sample
from tests.unit.sinks.builders import (
    NODE,
    ManualClock,
    bus,
    event,
    eventually,
    place_of,
    running,
)

if TYPE_CHECKING:
    from gpuledger.bus.memory import MemoryBus
    from gpuledger.bus.protocol import Record

JOINING = JoinSettings(join=JoinTuning(poll_timeout_seconds=0.02, podwatch_timeout_seconds=0))


async def replay(on: MemoryBus, *, is_rehearsal: bool = False, **wanted: Any) -> int:  # noqa: ANN401  # a filter's
    return await replay_dead_letters(
        on, DeadLetterFilter(**wanted), is_rehearsal=is_rehearsal, clock=ManualClock()
    )


def contents(on: MemoryBus) -> dict[str, int]:
    """Return how many records each topic has."""
    return {topic.name: len(on.kept(topic.name)) for topic in TOPICS}


def replayed_on(on: MemoryBus) -> list[tuple[str, int, int]]:
    """Return the consumer, the partition and the offset of each event on the replay topic."""
    found = (
        decoder_of(REPLAY.name, ReplayedEvent).decode(one.value) for one in on.kept(REPLAY.name)
    )
    return [(one.consumer, one.partition, one.offset) for one in found]


async def test_an_event_is_written_to_the_replay_topic_with_its_consumer_and_its_position(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    await reject(on, record_of(event(0), offset=7))
    await reject(on, record_of(event(1)), consumer="their-group")
    before = contents(on)

    assert await replay(on) == 0

    at = place_of(NODE)
    assert replayed_on(on) == [
        (REMOTE_WRITE.group, at.partition, 7),
        ("their-group", at.partition, 0),
    ]
    assert {record.partition for record in on.kept(REPLAY.name)} == {at.partition}
    assert contents(on) == before | {REPLAY.name: 2}
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"1 replayed to {REMOTE_WRITE.group}",
        "1 replayed to their-group",
    ]


async def test_a_tick_returns_to_its_nodes_partition_and_is_booked_once() -> None:
    on = bus()
    record = record_of(sample(seq=5000))
    await reject(on, record._replace(partition=1 - record.partition), consumer=JOIN)
    assert await replay(on) == 0
    assert await replay(on) == 0

    first, _ = on.kept(SAMPLES.name)
    assert (first.partition, first.key, first.value, first.timestamp_ms) == (
        record.partition,
        record.key,
        record.value,
        record.timestamp_ms,
    )
    async with running(run_join(bus=on, settings=JOINING, readiness=Readiness())):
        at = TopicPartition(SAMPLES.name, record.partition)
        await eventually(lambda: on.committed(JOIN, at) == 2)
    (booked,) = on.kept(EVENTS.name)
    assert decoder_of(EVENTS.name, GpuEvent).decode(booked.value).seq == 5000


async def test_a_dry_run_counts_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(b"no event", offset=1))
    before = contents(on)

    assert await replay(on, is_rehearsal=True) == 3

    assert contents(on) == before
    *_, counted, last = capsys.readouterr().out.splitlines()
    assert counted == f"1 would be replayed to {REMOTE_WRITE.group}"
    assert last == "nothing was sent; add --yes to send"


@pytest.mark.parametrize(
    ("dead_letter", "consumer", "why"),
    [
        (record_of(b"no event"), REMOTE_WRITE.group, "gpuledger.events.v1: not JSON"),
        (record_of(None), REMOTE_WRITE.group, "no bytes"),
        (record_of(event())._replace(key=b"odd"), REMOTE_WRITE.group, "its key is not a node key"),
        (record_of(event())._replace(topic=PODS.name), JOIN, "gpuledger.pods.v1 are not replayed"),
        (record_of(event())._replace(topic=READINGS.name), STORE.group, "are not replayed"),
        (record_of(event()), ALERTS.group, "gpuledger-alerts takes no replays"),
    ],
)
async def test_a_dead_letter_that_cannot_be_replayed_is_omitted_with_the_reason(
    dead_letter: Record, consumer: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    on = bus()
    await reject(on, dead_letter, consumer=consumer)
    before = contents(on)

    assert await replay(on) == 3

    assert contents(on) == before
    assert why in capsys.readouterr().out


async def test_only_the_selected_dead_letters_are_replayed_and_a_missing_position_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    await reject(on, *(record_of(event(tick), offset=tick) for tick in range(3)))

    assert await replay(on, positions=frozenset({Position(0, 1)})) == 0
    assert await replay(on, positions=frozenset({Position(0, 77)})) == 3
    assert await replay(on, consumers=["nobody"]) == 0

    assert [offset for _, _, offset in replayed_on(on)] == [1]
    shown = capsys.readouterr().out
    assert "1 cannot be replayed: no dead-letter record at 0:77" in shown
    assert "none of 3 dead-letter records matches" in shown


async def test_only_one_of_several_dead_letters_of_a_record_is_replayed() -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(event(1), offset=1))
    await reject(on, record_of(event(0)), reason="out_of_order")

    assert await replay(on) == 0
    assert len(on.kept(REPLAY.name)) == 2


async def test_dead_letters_whose_identities_have_the_same_hash_are_all_replayed() -> None:
    on, offsets = bus(), [7, 7 + sys.hash_info.modulus]
    for offset in offsets:
        await reject(on, record_of(event(0), offset=offset))
    assert await replay(on) == 0
    assert [offset for _, _, offset in replayed_on(on)] == offsets


async def test_many_dead_letters_are_written_in_their_order() -> None:
    on = bus()
    await reject(on, *(record_of(event(tick), offset=tick) for tick in range(250)))

    assert await replay(on) == 0
    assert [offset for _, _, offset in replayed_on(on)] == list(range(250))
    assert len(on.kept(DEAD_LETTERS.name)) == 250
