"""A sink uses a record only in its node's partition under its node's key, as the join does."""

from typing import Any, Final, NamedTuple

import pytest
from prometheus_client import REGISTRY

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message
from gpuledger.codec import Decoder, encode
from gpuledger.records import ReplayedEvent
from gpuledger.runtime import Check, Readiness
from gpuledger.topics import Topic
from gpuledger_cli.dead_letters.dead_letter_log import DeadLetterFilter
from gpuledger_cli.dead_letters.dead_letter_replay import replay_dead_letters
from gpuledger_sinks.loop import consume, run_sink
from gpuledger_sinks.protocol import ConsumerConfig
from gpuledger_sinks.registry import ROWS
from gpuledger_sinks.settings import RowsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS, READINGS, REPLAY
from tests.default_topics import ROWS as ROWS_TOPIC
from tests.unit.gpuledger.ledger.test_health import healthy, readings
from tests.unit.sinks.builders import (
    KEY,
    NODE,
    ManualClock,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    place_of,
    running,
)
from tests.unit.sinks.consuming import GROUP, Recorder
from tests.unit.sinks.remote_write.happened import attributed, incident

HOME: Final = place_of(NODE).partition
OF_NODE: Final[dict[str, tuple[Topic, Any]]] = {
    "an event": (EVENTS, event()),
    "readings": (READINGS, readings(0, healthy(7))),
    "an incident": (ATTRIBUTED_INCIDENTS, attributed(incident())),
    "a replayed event": (
        REPLAY,
        ReplayedEvent(consumer=GROUP, partition=HOME, offset=0, event=event()),
    ),
}


class Place(NamedTuple):
    """Where a record is written."""

    key: bytes | None = KEY
    partition: int = HOME


ELSEWHERE: Final = {
    "under another node's key": Place(key=b"default/node-b"),
    "under the key of the same node in another cluster": Place(key=b"other/node-a"),
    "under the empty key": Place(key=b""),
    "without a key": Place(key=None),
    "in another partition": Place(partition=1 - HOME),
}


async def write(on: MemoryBus, topic: Topic, value: object, place: Place) -> None:
    async with on.producer() as producer:
        message = Message(key=place.key, value=encode(value), timestamp_ms=0)
        await producer.publish(topic.name, place.partition, [message])


def counted(topic: Topic) -> float:
    labels = {"topic": topic.name, "reason": "misplaced"}
    return REGISTRY.get_sample_value("gpuledger_dead_letters_total", labels) or 0


def is_done(on: MemoryBus, topic: Topic, place: Place) -> bool:
    """Return whether the offsets after both records are committed."""
    at = place_of(NODE, topic.name)
    elsewhere = at._replace(partition=place.partition)
    ends = {elsewhere: 1} | {at: 2 if at == elsewhere else 1}
    return all(committed(on, GROUP, each) == end for each, end in ends.items())


@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("what", OF_NODE)
async def test_a_misplaced_record_becomes_a_dead_letter_and_the_next_one_is_used(
    what: str, where: str
) -> None:
    (topic, value), place = OF_NODE[what], ELSEWHERE[where]
    on, sink, before = bus(), Recorder(), counted(topic)
    await write(on, topic, value, place)
    await write(on, topic, value, Place())
    reading = consume(
        bus=on,
        sink=sink,
        config=ConsumerConfig(
            group=GROUP,
            poll_seconds=0.01,
            decoders={topic.name: Decoder(topic=topic.name, record=topic.record)},
        ),
        check=Check(),
        clock=ManualClock(),
    )
    async with running(reading):
        await eventually(lambda: is_done(on, topic, place))

    assert sink.taken == [(place_of(NODE, topic.name), int(place.partition == HOME))]
    (dead_letter,) = await dead_letters(on)
    assert (dead_letter.topic, dead_letter.reason) == (topic.name, "misplaced")
    assert f"of node default/{NODE} belongs in partition {HOME} under key " in dead_letter.detail
    assert counted(topic) == before + 1


@pytest.mark.parametrize(
    ("place", "code", "offsets"),
    [
        (Place(partition=1 - HOME), 0, [0]),
        # Its key still is another node's.
        (Place(key=b"default/node-b"), 3, []),
    ],
)
async def test_an_event_of_another_partition_can_be_replayed_and_one_of_another_key_cannot(
    place: Place, code: int, offsets: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    on, one = bus(), event()
    await write(on, EVENTS, one, place)
    sink = run_sink(
        ROWS, bus=on, settings=RowsSettings(), readiness=Readiness(), clock=ManualClock()
    )
    async with running(sink):
        await eventually(lambda: on.kept("gpuledger.dead-letters.v1"))
        assert on.kept(ROWS_TOPIC.name) == []
        assert code == await replay_dead_letters(
            on, DeadLetterFilter(), is_rehearsal=False, clock=ManualClock()
        )
        assert [each.offset for each in on.kept(REPLAY.name)] == offsets
        if offsets:
            await eventually(lambda: on.kept(ROWS_TOPIC.name))
    assert ("its key is the key of another node" in capsys.readouterr().out) == (not offsets)
    assert len(await dead_letters(on)) == 1
