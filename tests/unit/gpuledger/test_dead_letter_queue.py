"""A record that cannot be used becomes a dead letter with its bytes and reason; nothing is lost."""

import asyncio
import base64
from collections.abc import Callable, Sequence

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, refuse_too_large
from gpuledger.bus.protocol import (
    Message,
    Record,
    TopicPartition,
    Unreadable,
    UnreadableReason,
)
from gpuledger.codec import Decoder
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.errors import BusUnavailableError, TopicsError
from gpuledger.records import DeadLetter, GpuReading
from gpuledger.runtime.logs import Repeats
from tests.default_topics import DEAD_LETTERS
from tests.errors import has_words
from tests.fakes.producer import KeepingProducer

GOOD = b'["u",0]'
DECODER = Decoder(topic="a.topic", record=GpuReading)
READ_DEAD_LETTER = Decoder(topic=DEAD_LETTERS.name, record=DeadLetter)
NOW_NS = 1_700_000_000_123_456_789


def record(value: bytes | None, *, offset: int = 0, partition: int = 3) -> Record:
    return Record("a.topic", partition, offset, 1, b"a-key", value)


def dead_letter_queue(producer: KeepingProducer, *, partitions: int = 2) -> DeadLetterQueue:
    return DeadLetterQueue(
        consumer="a-group",
        producer=producer,
        partitions=partitions,
        time_ns=lambda: NOW_NS,
        topic=DEAD_LETTERS,
    )


def found_dead_letters(producer: KeepingProducer) -> list[DeadLetter]:
    return [READ_DEAD_LETTER.decode(message.value) for message in producer.messages()]


def counted(reason: str) -> float:
    labels = {"topic": "a.topic", "reason": reason}
    return REGISTRY.get_sample_value("gpuledger_dead_letters_total", labels) or 0.0


def test_records_that_decode_are_returned_in_order_and_the_others_are_left_out() -> None:
    records = [record(GOOD), record(b"{", offset=1), record(GOOD, offset=2)]
    dead_letters = dead_letter_queue(KeepingProducer())

    decoded = list(dead_letters.decode(DECODER, records))

    assert decoded == [(one, GpuReading(uuid="u", index=0)) for one in records[::2]]
    assert dead_letters.rejected == 1


@pytest.mark.parametrize("value", [b"{", b"\xff\x00\xfe", b"", b"x" * 100_000, b'{"uuid":1}'])
async def test_a_dead_letter_has_the_position_the_reason_and_the_exact_bytes(value: bytes) -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    list(dead_letters.decode(DECODER, [record(value, offset=41)]))

    await dead_letters.flush()

    (dead_letter,) = found_dead_letters(producer)
    partition = (
        dead_letter.topic,
        dead_letter.partition,
        dead_letter.offset,
        dead_letter.consumer,
        dead_letter.time_ns,
    )
    assert partition == ("a.topic", 3, 41, "a-group", NOW_NS)
    assert dead_letter.reason == "undecodable"
    assert dead_letter.detail.startswith("a.topic: ")
    assert base64.b64decode(dead_letter.value_base64 or "", validate=True) == value
    assert base64.b64decode(dead_letter.key_base64 or "", validate=True) == b"a-key"


async def test_absent_bytes_stay_absent() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    dead_letters.reject(Record("a.topic", 0, 0, 1, None, None), reason="invalid", detail="why")

    await dead_letters.flush()

    (dead_letter,) = found_dead_letters(producer)
    assert (dead_letter.key_base64, dead_letter.value_base64) == (None, None)
    assert (dead_letter.reason, dead_letter.detail) == ("invalid", "why")


async def test_dead_letters_are_placed_by_their_records_partition_and_keyed_by_topic() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer, partitions=2)
    for partition, offset in [(0, 5), (1, 6), (2, 7), (0, 8)]:
        dead_letters.reject(
            record(b"", partition=partition, offset=offset), reason="invalid", detail=""
        )

    await dead_letters.flush()

    assert [(topic, at) for topic, at, _ in producer.batches] == [
        (DEAD_LETTERS.name, 0),
        (DEAD_LETTERS.name, 1),
    ]
    assert [dead_letter.offset for dead_letter in found_dead_letters(producer)] == [5, 7, 8, 6]
    assert {message.key for message in producer.messages()} == {b"a.topic"}
    assert {message.timestamp_ms for message in producer.messages()} == {1_700_000_000_123}


async def test_a_record_too_large_for_a_dead_letter_is_reported_without_its_bytes() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)

    dead_letters.reject(record(b"x" * 900_000), reason="undecodable", detail="why")
    await dead_letters.flush()

    (dead_letter,) = found_dead_letters(producer)
    assert (dead_letter.partition, dead_letter.offset, dead_letter.value_base64) == (3, 0, None)
    assert dead_letter.key_base64 == base64.b64encode(record(b"").key or b"").decode()
    assert dead_letter.detail == (
        "why (the record of 'a-key' is too large to be copied; read it from its topic)"
    )


async def test_a_key_that_does_not_fit_either_is_quoted_by_its_beginning() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)

    dead_letters.reject(
        record(b"x")._replace(key=b"\x00n" * 400_000), reason="invalid", detail="why"
    )
    await dead_letters.flush()

    (dead_letter,) = found_dead_letters(producer)
    assert (dead_letter.key_base64, dead_letter.value_base64) == (None, None)
    assert dead_letter.detail.startswith("why (the record of '\\x00n\\x00n")
    assert len(dead_letter.detail) < 250


async def test_without_dead_letters_nothing_is_published() -> None:
    producer = KeepingProducer()

    await dead_letter_queue(producer).flush()

    assert producer.batches == []


async def test_dead_letters_that_could_not_be_published_wait_for_the_next_flush() -> None:
    producer = KeepingProducer(refusals=1)
    dead_letters = dead_letter_queue(producer)
    dead_letters.reject(record(b"", offset=1), reason="invalid", detail="")

    with pytest.raises(BusUnavailableError):
        await dead_letters.flush()
    dead_letters.reject(record(b"", offset=2), reason="invalid", detail="")
    await dead_letters.flush()
    await dead_letters.flush()

    assert [dead_letter.offset for dead_letter in found_dead_letters(producer)] == [1, 2]


class FullProducer(KeepingProducer):
    """Rejects messages for a second partition."""

    is_full = True

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        if partition == 1 and self.is_full:
            raise BusUnavailableError("full")
        await super().publish(topic, partition, messages)


class BusyProducer(KeepingProducer):
    """A dead letter arrives while the batch before it is being published."""

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        await super().publish(topic, partition, messages)
        if len(self.batches) == 1:
            self.meanwhile()

    def meanwhile(self) -> None:
        raise NotImplementedError


async def test_a_dead_letter_that_arrives_during_a_flush_belongs_to_the_next_one() -> None:
    producer = BusyProducer()
    dead_letters = dead_letter_queue(producer)
    producer.meanwhile = lambda: dead_letters.reject(  # type: ignore[method-assign]  # each refers to the other
        record(b"", offset=2), reason="invalid", detail=""
    )
    dead_letters.reject(record(b"", offset=1), reason="invalid", detail="")

    await dead_letters.flush()
    assert [dead_letter.offset for dead_letter in found_dead_letters(producer)] == [1]
    await dead_letters.flush()
    assert [dead_letter.offset for dead_letter in found_dead_letters(producer)] == [1, 2]


async def test_each_dead_letter_is_counted_by_topic_and_reason_once_it_is_published() -> None:
    before = counted("undecodable"), counted("invalid")
    dead_letters = dead_letter_queue(KeepingProducer(refusals=1))
    list(dead_letters.decode(DECODER, [record(b"{"), record(b"["), record(GOOD)]))
    dead_letters.reject(record(GOOD), reason="invalid", detail="")

    with capture_logs() as lines, pytest.raises(BusUnavailableError):
        await dead_letters.flush()
    assert (counted("undecodable"), counted("invalid")) == before
    assert lines == []

    await dead_letters.flush()
    assert (counted("undecodable"), counted("invalid")) == (before[0] + 2, before[1] + 1)


def test_drained_dead_letters_are_counted_once_they_are_acknowledged() -> None:
    before, reported = counted("invalid"), list[tuple[str, int]]()
    dead_letters = DeadLetterQueue(
        consumer="a-group",
        producer=KeepingProducer(),
        partitions=1,
        count=lambda reason, count: reported.append((reason, count)),
        topic=DEAD_LETTERS,
    )
    dead_letters.reject(record(b""), reason="invalid", detail="why")
    dead_letters.drain(3)  # by a transaction that was aborted: the record is read again
    dead_letters.reject(record(b""), reason="invalid", detail="why")
    drained = dead_letters.drain(3)
    assert (counted("invalid"), reported) == (before, [])

    dead_letters.acknowledge(drained)

    assert (counted("invalid"), reported) == (before + 1, [("invalid", 1)])


async def test_dead_letters_of_a_partition_that_has_them_are_not_published_again() -> None:
    producer = FullProducer()
    dead_letters = dead_letter_queue(producer)
    for partition in (0, 1, 3):
        dead_letters.reject(record(b"", partition=partition), reason="invalid", detail="")

    with pytest.raises(BusUnavailableError, check=has_words("2 dead-letter records")):
        await dead_letters.flush()
    producer.is_full = False
    await dead_letters.flush()

    assert [dead_letter.partition for dead_letter in found_dead_letters(producer)] == [0, 1, 3]


def test_the_error_of_a_transaction_contains_the_number_of_waiting_dead_letters() -> None:
    dead_letters = dead_letter_queue(KeepingProducer())
    dead_letters.reject(record(b""), reason="invalid", detail="")
    error = TopicsError("there is no topic")

    explained = dead_letters.drain(3).explain(error)

    assert isinstance(explained, TopicsError)
    assert str(explained) == "1 dead-letter record waits to be published: there is no topic"
    assert dead_letters.drain(3).explain(error) is error


def test_dead_letters_can_be_drained_by_partition_to_be_published_elsewhere() -> None:
    dead_letters = dead_letter_queue(KeepingProducer())
    for offset, partition in enumerate((3, 4, 3)):
        dead_letters.reject(
            record(b"x", offset=offset, partition=partition), reason="r", detail="d"
        )

    ((at, messages),) = dead_letters.drain(3).messages.items()

    assert at == TopicPartition(DEAD_LETTERS.name, 3 % 2)
    assert [READ_DEAD_LETTER.decode(message.value).offset for message in messages] == [0, 2]
    assert dead_letters.drain(3).messages == {}
    assert dead_letters.waiting() == {4}


async def test_dead_letters_of_records_that_will_be_read_again_can_be_dropped() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    for partition in (3, 4):
        dead_letters.reject(record(b"x", partition=partition), reason="r", detail="d")

    dead_letters.drop(3)
    await dead_letters.flush()

    assert [dead_letter.partition for dead_letter in found_dead_letters(producer)] == [4]


async def test_dead_letters_are_dropped_for_the_given_topic_only() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    dead_letters.reject(record(b"x"), reason="r", detail="d")
    dead_letters.reject(record(b"x")._replace(topic="b.topic"), reason="r", detail="d")

    dead_letters.drop(3, topic="a.topic")
    await dead_letters.flush()

    assert [dead_letter.topic for dead_letter in found_dead_letters(producer)] == ["b.topic"]


async def test_a_dead_letter_that_is_dropped_while_its_flush_fails_is_not_published_later() -> None:
    class DroppingProducer(KeepingProducer):
        @override
        async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
            dead_letters.drop(3)
            await super().publish(topic, partition, messages)

    producer = DroppingProducer(refusals=1)
    dead_letters = dead_letter_queue(producer)
    for partition in (3, 5):
        dead_letters.reject(record(b"x", partition=partition), reason="r", detail="d")

    with pytest.raises(BusUnavailableError, check=has_words("1 dead-letter record ")):
        await dead_letters.flush()
    await dead_letters.flush()

    assert [dead_letter.partition for dead_letter in found_dead_letters(producer)] == [5]


class GatedProducer(KeepingProducer):
    """Runs a function before the first publish, and publishes nothing until its gate is open."""

    def __init__(self, *, refusals: int = 0, first: Callable[[], None] = lambda: None) -> None:
        super().__init__(refusals=refusals)
        self.gate = asyncio.Event()
        self.requests = asyncio.Event()
        self._first = first

    @override
    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        self._first()
        self.requests.set()
        await self.gate.wait()
        await super().publish(topic, partition, messages)


async def test_a_concurrent_flush_waits_until_the_dead_letters_are_on_the_topic() -> None:
    producer = GatedProducer()
    dead_letters = dead_letter_queue(producer)
    dead_letters.reject(record(b"x"), reason="r", detail="d")

    first = asyncio.create_task(dead_letters.flush())
    await producer.requests.wait()
    second = asyncio.create_task(dead_letters.flush())
    # Without the wait the flush would be done by now, and its caller would commit.
    await asyncio.wait({second}, timeout=0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done()
    producer.gate.set()
    await asyncio.gather(first, second)

    assert len(found_dead_letters(producer)) == 1


async def test_after_a_failed_flush_older_dead_letters_come_before_newer_ones() -> None:
    producer = GatedProducer(refusals=1)
    dead_letters = dead_letter_queue(producer)
    dead_letters.reject(record(b"x", offset=1), reason="r", detail="d")
    failing = asyncio.create_task(dead_letters.flush())
    await producer.requests.wait()
    dead_letters.reject(record(b"x", offset=2), reason="r", detail="d")
    producer.gate.set()
    with pytest.raises(BusUnavailableError):
        await failing

    await dead_letters.flush()

    assert [dead_letter.offset for dead_letter in found_dead_letters(producer)] == [1, 2]


async def test_a_partition_whose_dead_letters_were_all_dropped_gets_no_message() -> None:
    producer = GatedProducer(first=lambda: dead_letters.drop(4))
    producer.gate.set()
    dead_letters = dead_letter_queue(producer)
    for partition in (3, 4):
        dead_letters.reject(record(b"x", partition=partition), reason="r", detail="d")

    await dead_letters.flush()

    assert [partition for _, partition, _ in producer.batches] == [1]


async def test_repeated_rejections_are_logged_once_a_minute_for_each_topic_and_reason() -> None:
    now_seconds = 0.0
    dead_letters = DeadLetterQueue(
        consumer="a-group",
        producer=KeepingProducer(),
        partitions=1,
        repeats=Repeats(seconds=lambda: now_seconds),
        topic=DEAD_LETTERS,
    )
    with capture_logs() as lines:
        for now_seconds in map(float, range(0, 180, 2)):  # the clock reads it
            dead_letters.reject(record(b""), reason="future", detail="ahead")
            if now_seconds == 30.0:
                dead_letters.reject(record(b""), reason="invalid", detail="why")
            await dead_letters.flush()
            dead_letters.reject(record(b""), reason="future", detail="ahead")
            dead_letters.acknowledge(dead_letters.drain(3))

    reported = [(line["event"], line["reason"], line["count"]) for line in lines]
    assert reported == [
        ("records_rejected", "future", 1),
        ("records_rejected", "invalid", 1),
        ("records_rejected", "future", 60),
        ("records_rejected", "future", 60),
    ]


LONGEST = "\x7f" * 250_000
"""Quoted, this text has five times as many bytes as unquoted."""


@pytest.mark.parametrize("value_bytes", [0, 500_000, 736_000, 750_000, 8_000_000])
@pytest.mark.parametrize("detail", ["why", LONGEST, repr(LONGEST), "\U0001f600" * 250_000])
async def test_a_dead_letter_fits_in_a_message_whatever_its_record_is(
    value_bytes: int, detail: str
) -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    large = Record("t" * 249, 3, 1, 1, LONGEST.encode(), b"x" * value_bytes)

    dead_letters.reject(large, reason="invalid", detail=detail)
    await dead_letters.flush()

    refuse_too_large(DEAD_LETTERS.name, producer.messages())
    (dead_letter,) = found_dead_letters(producer)
    assert dead_letter.detail.startswith(detail[:1000])
    assert (dead_letter.value_base64 is None) == (dead_letter.key_base64 is None)


async def test_a_record_larger_than_a_message_is_rejected_undecoded_and_the_next_is_read() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    huge = GOOD[:-1] + b" " * MAX_MESSAGE_BYTES + b"]"
    DECODER.decode(huge)

    decoded = list(dead_letters.decode(DECODER, [record(huge), record(GOOD, offset=1)]))
    await dead_letters.flush()

    assert [read.offset for read, _ in decoded] == [1]
    (dead_letter,) = found_dead_letters(producer)
    assert (dead_letter.offset, dead_letter.reason, dead_letter.value_base64) == (
        0,
        "too_large",
        None,
    )
    assert dead_letter.detail.startswith(
        f"a.topic: {len(huge) + len(b'a-key')} bytes; a message has at most {MAX_MESSAGE_BYTES}"
    )


async def test_a_batch_that_cannot_be_decompressed_is_one_dead_letter_with_its_offsets() -> None:
    producer = KeepingProducer()
    dead_letters = dead_letter_queue(producer)
    unreadable = gzipped(range(40, 50))

    decoded = list(
        dead_letters.decode(DECODER, [record(GOOD), unreadable, record(GOOD, offset=50)])
    )
    await dead_letters.flush()

    assert [read.offset for read, _ in decoded] == [0, 50]
    (dead_letter,) = found_dead_letters(producer)
    assert (dead_letter.partition, dead_letter.offset, dead_letter.last_offset) == (3, 40, 49)
    assert (dead_letter.reason, dead_letter.key_base64, dead_letter.value_base64) == (
        "unreadable",
        None,
        None,
    )
    assert dead_letter.detail == (
        "a.topic: offsets 40 to 49 are in a batch that cannot be unpacked: it is packed with gzip"
    )


async def test_offsets_of_an_unreadable_batch_are_counted_with_its_dead_letter() -> None:
    before = unreadable_offsets("codec")
    dead_letters = dead_letter_queue(KeepingProducer())
    list(dead_letters.decode(DECODER, [gzipped(range(40, 50))]))
    dead_letters.drain(3)  # by a transaction that was aborted: the batch is read again
    list(dead_letters.decode(DECODER, [gzipped(range(40, 50))]))
    drained = dead_letters.drain(3)
    list(dead_letters.decode(DECODER, [gzipped(range(50, 53))]))
    assert unreadable_offsets("codec") == before

    dead_letters.acknowledge(drained)
    assert unreadable_offsets("codec") == before + 10

    await dead_letters.flush()
    assert unreadable_offsets("codec") == before + 13


def gzipped(offsets: range) -> Record:
    why = Unreadable(offsets[0], UnreadableReason.CODEC, "it is packed with gzip")
    return Record("a.topic", 3, offsets[-1], 1, None, None, why)


def unreadable_offsets(reason: str) -> float:
    labels = {"reason": reason}
    return REGISTRY.get_sample_value("gpuledger_records_unreadable_total", labels) or 0.0
