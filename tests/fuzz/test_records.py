"""Records of every topic, the dead letters of rejected ones, and the join's output for the rest."""

import asyncio
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.limits import refuse_too_large
from gpuledger.bus.protocol import Record
from gpuledger.codec import decoder_of, encode, validate
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import UndecodableError
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import AttributedIncident, DeadLetter, GpuEvent
from gpuledger.topics import Topic
from gpuledger_enricher.join.stage import JoinStage
from tests.default_topics import (
    ATTRIBUTED_INCIDENTS,
    BY_NAME,
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    PODS,
    PROCESSES,
    SAMPLES,
    TOPICS,
)
from tests.fakes.producer import KeepingProducer
from tests.fuzz.mutations import changed_bytes, changed_json
from tests.unit.enricher.join.ticks import anywhere

MESSAGES = Path(__file__).parents[1] / "data" / "messages"


def golden(topic: Topic) -> list[bytes]:
    return [file.read_bytes() for file in sorted((MESSAGES / topic.name).glob("*.json"))]


def values(topic: Topic) -> st.SearchStrategy[bytes]:
    seeds = golden(topic)
    return changed_bytes(seeds) | changed_json(seeds)


def dead_letter_queue(producer: KeepingProducer) -> DeadLetterQueue:
    return DeadLetterQueue(consumer="fuzz", producer=producer, partitions=1, topic=DEAD_LETTERS)


def check_dead_letters(dead_letters: DeadLetterQueue, producer: KeepingProducer) -> None:
    """Check that every dead letter fits on the bus and can be read."""
    asyncio.run(dead_letters.flush())
    refuse_too_large(DEAD_LETTERS.name, producer.messages())
    for message in producer.messages():
        decoder_of(DEAD_LETTERS.name, DeadLetter).decode(message.value)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
@given(data=st.data())
def test_a_rejected_record_fits_in_a_dead_letter_and_an_accepted_one_encodes_back(
    topic: Topic, data: st.DataObject
) -> None:
    value = data.draw(values(topic))
    decoder = decoder_of(topic.name, topic.record)
    try:
        found = decoder.decode(value)
    except UndecodableError:
        producer = KeepingProducer()
        dead_letters = dead_letter_queue(producer)
        place = Record(topic.name, 0, 0, 1, b"k", value)
        assert list(dead_letters.decode(decoder, [place])) == []
        check_dead_letters(dead_letters, producer)
    else:
        validate(found)
        assert decoder.decode(encode(found)) == found


@given(
    sample=values(SAMPLES),
    pods=st.lists(values(PODS), max_size=2),
    process=values(PROCESSES),
    incident=values(INCIDENTS),
    key=st.sampled_from([None, b"", b"\xff", "own"]),
)
def test_whatever_the_input_the_events_of_the_join_can_be_read_and_balance(
    sample: bytes, pods: list[bytes], process: bytes, incident: bytes, key: bytes | str | None
) -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    stage = JoinStage(dead_letters=dead_letters, is_placed=anywhere, topics=TOPICS)
    stage.take_pods([record_of(PODS, pod, key) for pod in pods])
    stage.take_processes([record_of(PROCESSES, process, key)])
    attributed = stage.take_incidents([record_of(INCIDENTS, incident, key)])
    events = stage.take_samples([record_of(SAMPLES, sample, key)])
    read = [decoder_of(EVENTS.name, GpuEvent).decode(one.value) for one in events]
    for one in attributed:
        decoder_of(ATTRIBUTED_INCIDENTS.name, AttributedIncident).decode(one.value)
    refuse_too_large(EVENTS.name, [*events, *attributed])
    if read:
        assert list(imbalances(read[0].gpus, read[0].interval_ns)) == []
    check_dead_letters(dead_letters, producer)


def record_of(topic: Topic, value: bytes, key: bytes | str | None) -> Record:
    """Return the record with that key; `own` means the key that the record itself has."""
    if isinstance(key, str):
        key = own_key(topic, value)
    return Record(topic.name, 0, 0, 1, key, value)


def own_key(topic: Topic, value: bytes) -> bytes | None:
    try:
        found = decoder_of(topic.name, BY_NAME[topic.name].record).decode(value)
    except UndecodableError:
        return None
    return "/".join(str(attrgetter(part)(found)) for part in topic.key.split("/")).encode()
