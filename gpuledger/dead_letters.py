"""Where a record goes that cannot be used: decoded or put aside, never lost in silence.

Here lives the one way in which every consumer turns its records into values. It knows the bus
and the codec; it knows no stage.
"""

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import structlog
from prometheus_client import Counter

from gpuledger.bus import metrics
from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import Message, Producer, Record, TopicPartition, Unreadable
from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.explaining import shorten
from gpuledger.records import DeadLetter
from gpuledger.service.repeats import Repeats
from gpuledger.topics import DEAD_LETTERS

T = TypeVar("T")

DEAD_LETTERS_TOTAL: Final = Counter(
    "gpuledger_dead_letters",
    "Records that could not be used and were put aside for the dead-letter topic, by topic and"
    " reason: `undecodable`, `unreadable` (a batch), `invalid`, `too_large`, `foreign_pod`,"
    " `foreign_key`, `future`, `out_of_order`, `rejected`.",
    ["topic", "reason"],
)
DETAIL_CHARACTERS: Final = 1000
"""What a letter says is cut to so many: a detail may quote what the record says, and that is
anybody's."""
_BASE64_BYTES: Final = (MAX_MESSAGE_BYTES - 16 * DETAIL_CHARACTERS) // 4 * 3
"""Bytes of key and value that fit in a letter as base64, with room for all that it says besides."""
_TOO_LARGE: Final = " (the record is too large for a dead letter: read it there)"
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class DeadLetterOffice:
    """Decodes records, collects those that cannot be used, and publishes them as dead letters.

    Collected letters are published by `flush`, which a consumer calls before it commits the
    offsets of the records they stand for; or they are handed out by `drain`, to be published along
    with those offsets.
    """

    def __init__(
        self,
        *,
        consumer: str,
        producer: Producer,
        partitions: int,
        time_ns: Callable[[], int] = time.time_ns,
        repeats: Repeats = _repeats,
    ) -> None:
        self._repeats = repeats
        self._consumer = consumer
        self._producer = producer
        self._partitions = partitions
        self._time_ns = time_ns
        self._waiting: list[DeadLetter] = []
        self.buried = 0

    def decode(self, decoder: Decoder[T], records: Sequence[Record]) -> Iterator[tuple[Record, T]]:
        """Give each record with its value; what does not decode is put aside and left out."""
        for record in records:
            try:
                yield record, decoder.decode(record.value)
            except UndecodableError as error:
                # Looked at here, where nothing decodes: a batch without a value never does.
                if (why := record.unreadable) is None:
                    self.bury(record, reason="undecodable", detail=str(error))
                else:
                    self.bury(record, reason="unreadable", detail=count_unreadable(record, why))

    def bury(self, record: Record, *, reason: str, detail: str) -> None:
        """Put a record aside, with the reason as one word and the detail as a sentence.

        The letter fits in a message whatever the record and the detail hold: a long detail is cut,
        and bytes that do not fit are left out. Where they lie is told all the same.
        """
        self.buried += 1
        DEAD_LETTERS_TOTAL.labels(topic=record.topic, reason=reason).inc()
        shown = shorten(detail, DETAIL_CHARACTERS)
        has_room = size_bytes(record.key, record.value) <= _BASE64_BYTES
        self._waiting.append(
            DeadLetter(
                topic=record.topic,
                partition=record.partition,
                offset=record.first_offset,
                last_offset=record.offset if record.unreadable else None,
                consumer=self._consumer,
                reason=reason,
                detail=shown if has_room else f"{shown}{_TOO_LARGE}",
                time_ns=self._time_ns(),
                key_base64=_base64(record.key) if has_room else None,
                value_base64=_base64(record.value) if has_room else None,
            )
        )

    async def flush(self) -> None:
        """Publish what was put aside; where that fails, it stays for the next call."""
        # Others may put records aside while this waits for the bus; those are for the next call.
        letters, self._waiting = self._waiting, []
        if not letters:
            return
        try:
            await self._publish(letters)
        except BaseException:
            self._waiting = letters + self._waiting
            raise
        self._tell(letters)

    def waiting(self) -> set[int]:
        """Give the partitions whose records were put aside, with no letter published yet."""
        return {letter.partition for letter in self._waiting}

    def drain(self, partition: int) -> dict[TopicPartition, list[Message]]:
        """Take out the letters of one partition's records, to be published where they belong."""
        letters = self.drop(partition)
        if letters:
            self._tell(letters)
        return self._placed(letters)

    def drop(self, partition: int) -> list[DeadLetter]:
        """Take out the letters of one partition's records, which will be read again."""
        letters = [each for each in self._waiting if each.partition == partition]
        if letters:
            self._waiting = [each for each in self._waiting if each.partition != partition]
        return letters

    def _tell(self, letters: Sequence[DeadLetter]) -> None:
        """Log a line a minute for each topic and reason: a node may be refused at every tick."""
        alike: dict[tuple[str, str], list[DeadLetter]] = {}
        for letter in letters:
            alike.setdefault((letter.topic, letter.reason), []).append(letter)
        for (topic, reason), told in alike.items():
            if count := self._repeats.count((self._consumer, topic, reason), more=len(told)):
                _log.warning(
                    "records_buried",
                    count=count,
                    topic=topic,
                    reason=reason,
                    partition=told[0].partition,
                    offset=told[0].offset,
                    detail=told[0].detail,
                )

    async def _publish(self, letters: Sequence[DeadLetter]) -> None:
        for place, messages in self._placed(letters).items():
            await self._producer.publish(*place, messages)

    def _placed(self, letters: Sequence[DeadLetter]) -> dict[TopicPartition, list[Message]]:
        placed: dict[TopicPartition, list[Message]] = {}
        for letter in letters:
            place = TopicPartition(DEAD_LETTERS.name, letter.partition % self._partitions)
            placed.setdefault(place, []).append(_message(letter))
        return placed


def count_unreadable(record: Record, why: Unreadable) -> str:
    """Count the records of a batch that cannot be unpacked; return a sentence that says why.

    Counted where it is put aside, as a consumer may read a batch more than once before that.
    """
    count = record.offset + 1 - why.first_offset
    metrics.RECORDS_UNREADABLE_TOTAL.labels(reason=why.reason).inc(count)
    return (
        f"{record.topic}: offsets {why.first_offset} to {record.offset} are in a batch that"
        f" cannot be unpacked: {why.detail}"
    )


def _message(letter: DeadLetter) -> Message:
    key, timestamp_ms = letter.topic.encode(), letter.time_ns // 1_000_000
    return Message(key=key, value=encode(letter), timestamp_ms=timestamp_ms)


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
