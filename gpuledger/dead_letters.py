"""Where a record goes that cannot be used: decoded or put aside, never lost in silence.

Here lives the one way in which every consumer turns its records into values. It knows the bus
and the codec; it knows no stage.
"""

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import structlog
from prometheus_client import Counter

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, Producer, Record, TopicPartition
from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import DeadLetter
from gpuledger.service.repeats import Repeats
from gpuledger.topics import DEAD_LETTERS

T = TypeVar("T")

DEAD_LETTERS_TOTAL: Final = Counter(
    "gpuledger_dead_letters",
    "Records that could not be used and were put aside for the dead-letter topic, by topic and"
    " reason: `undecodable`, `invalid`, `too_large`, `foreign_pod`, `foreign_key`, `future`,"
    " `out_of_order`, `rejected`.",
    ["topic", "reason"],
)
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
                self.bury(record, reason="undecodable", detail=str(error))

    def bury(self, record: Record, *, reason: str, detail: str) -> None:
        """Put a record aside, with the reason as one word and the detail as a sentence."""
        self.buried += 1
        DEAD_LETTERS_TOTAL.labels(topic=record.topic, reason=reason).inc()
        self._waiting.append(
            DeadLetter(
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                consumer=self._consumer,
                reason=reason,
                detail=detail,
                time_ns=self._time_ns(),
                key_base64=_base64(record.key),
                value_base64=_base64(record.value),
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


def _message(letter: DeadLetter) -> Message:
    """Leave out a value that makes the letter too large; where it lies is told all the same."""
    value = encode(letter)
    if len(value) + len(letter.topic) > MAX_MESSAGE_BYTES:
        detail = f"{letter.detail} (the record is too large for a dead letter: read it there)"
        value = encode(replace(letter, detail=detail, key_base64=None, value_base64=None))
    return Message(key=letter.topic.encode(), value=value, timestamp_ms=letter.time_ns // 1_000_000)


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
