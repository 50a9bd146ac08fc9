"""Where a record goes that cannot be used: decoded or put aside, never lost in silence.

Here lives the one way in which every consumer turns its records into values. It knows the bus
and the codec; it knows no stage.
"""

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, TypeVar

import structlog
from prometheus_client import Counter

from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.bus.protocol import Message, Producer, Record, TopicPartition
from gpuledger.codec import Decoder, encode
from gpuledger.errors import BusError, UndecodableError
from gpuledger.records import DeadLetter
from gpuledger.service.repeats import Repeats
from gpuledger.topics import DEAD_LETTERS

T = TypeVar("T")
BusErrorT = TypeVar("BusErrorT", bound=BusError)

DEAD_LETTERS_TOTAL: Final = Counter(
    "gpuledger_dead_letters",
    "Records that could not be used and whose letters the dead-letter topic has, by topic and"
    " reason: `undecodable`, `invalid`, `too_large`, `misplaced`, `seq_ahead`,"
    " `future`,"
    " `out_of_order`, `rejected`.",
    ["topic", "reason"],
)
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


def count_nowhere_else(reason: str, count: int) -> None:
    """Do nothing beside the counter of all stages: the default."""


@dataclass(frozen=True, kw_only=True)
class Drained:
    """The letters of one partition's records, taken out to be published along with its offsets."""

    letters: Sequence[DeadLetter]
    messages: Mapping[TopicPartition, list[Message]]
    """The same letters, by where they are to be published."""

    def explain(self, error: BusErrorT) -> BusErrorT:
        """Return the error with which they were not published, which says that they wait."""
        return _explain(error, waiting=len(self.letters))


class DeadLetterOffice:
    """Decodes records, collects those that cannot be used, and publishes them as dead letters.

    Collected letters are published by `flush`, which a consumer calls before it commits the
    offsets of the records they stand for; or they are handed out by `drain`, to be published along
    with those offsets, and `acknowledge` says that they were. What was read is read again where
    neither succeeds, so a letter is counted and told once the topic has it, and not before.
    """

    def __init__(
        self,
        *,
        consumer: str,
        producer: Producer,
        partitions: int,
        time_ns: Callable[[], int] = time.time_ns,
        repeats: Repeats = _repeats,
        count: Callable[[str, int], None] = count_nowhere_else,
    ) -> None:
        """Take what publishes; `count` is told the reason and number of letters on the topic."""
        self._repeats = repeats
        self._consumer = consumer
        self._producer = producer
        self._partitions = partitions
        self._time_ns = time_ns
        self._count = count
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
        """Publish what was put aside; where that fails, the rest stays for the next call.

        Raises the error of the bus, which then says how many letters wait.
        """
        # Others may put records aside while this waits for the bus; those are for the next call.
        placed, self._waiting = self._placed(self._waiting), []
        try:
            for place in list(placed):
                await self._producer.publish(*place, [_message(each) for each in placed[place]])
                self._acknowledge(placed.pop(place))
        except BusError as error:
            raise _explain(error, waiting=sum(map(len, placed.values()))) from error
        finally:
            self._waiting = [*chain.from_iterable(placed.values()), *self._waiting]

    def waiting(self) -> set[int]:
        """Give the partitions whose records were put aside, with no letter published yet."""
        return {letter.partition for letter in self._waiting}

    def drain(self, partition: int) -> Drained:
        """Take out the letters of one partition's records, to be published where they belong."""
        letters = self.drop(partition)
        placed = self._placed(letters)
        messages = {place: [_message(each) for each in placed[place]] for place in placed}
        return Drained(letters=letters, messages=messages)

    def acknowledge(self, drained: Drained) -> None:
        """Record that letters which were taken out are on the topic."""
        self._acknowledge(drained.letters)

    def drop(self, partition: int) -> list[DeadLetter]:
        """Take out the letters of one partition's records, which will be read again."""
        letters = [each for each in self._waiting if each.partition == partition]
        if letters:
            self._waiting = [each for each in self._waiting if each.partition != partition]
        return letters

    def _acknowledge(self, letters: Sequence[DeadLetter]) -> None:
        """Count letters, and log a line a minute for each topic and reason.

        A node may be refused at every tick.
        """
        alike: dict[tuple[str, str], list[DeadLetter]] = {}
        for letter in letters:
            alike.setdefault((letter.topic, letter.reason), []).append(letter)
        for (topic, reason), those in alike.items():
            DEAD_LETTERS_TOTAL.labels(topic=topic, reason=reason).inc(len(those))
            self._count(reason, len(those))
            if count := self._repeats.count((self._consumer, topic, reason), more=len(those)):
                _log.warning(
                    "records_buried",
                    count=count,
                    topic=topic,
                    reason=reason,
                    partition=those[0].partition,
                    offset=those[0].offset,
                    detail=those[0].detail,
                )

    def _placed(self, letters: Iterable[DeadLetter]) -> dict[TopicPartition, list[DeadLetter]]:
        placed: dict[TopicPartition, list[DeadLetter]] = {}
        for letter in letters:
            place = TopicPartition(DEAD_LETTERS.name, letter.partition % self._partitions)
            placed.setdefault(place, []).append(letter)
        return placed


def _explain(error: BusErrorT, *, waiting: int) -> BusErrorT:
    """Return an error of the same kind that says how many letters wait, where any do."""
    if not waiting:
        return error
    letters = "1 dead letter waits" if waiting == 1 else f"{waiting} dead letters wait"
    return type(error)(f"{letters} to be published: {error}")


def _message(letter: DeadLetter) -> Message:
    """Leave out a value that makes the letter too large; where it lies is told all the same."""
    value = encode(letter)
    if len(value) + len(letter.topic) > MAX_MESSAGE_BYTES:
        detail = f"{letter.detail} (the record is too large for a dead letter: read it there)"
        value = encode(replace(letter, detail=detail, key_base64=None, value_base64=None))
    return Message(key=letter.topic.encode(), value=value, timestamp_ms=letter.time_ns // 1_000_000)


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
