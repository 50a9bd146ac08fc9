"""Where a record goes that cannot be used: decoded or put aside, never lost in silence.

Here lives the one way in which every consumer turns its records into values. It knows the bus
and the codec; it knows no stage.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, TypeVar

import structlog
from prometheus_client import Counter

from gpuledger.bus.limits import MAX_MESSAGE_BYTES, size_bytes
from gpuledger.bus.protocol import (
    Message,
    Producer,
    Record,
    TopicPartition,
    Unreadable,
    UnreadableReason,
)
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import Decoder, encode, validate
from gpuledger.errors import BusError, UndecodableError
from gpuledger.records import DeadLetter
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.texts import shorten
from gpuledger.topics import Topic

T = TypeVar("T")
BusErrorT = TypeVar("BusErrorT", bound=BusError)

REASONS: Final = (
    "undecodable",
    "unreadable",
    "invalid",
    "too_large",
    "misplaced",
    "seq_ahead",
    "future",
    "too_old",
    "out_of_order",
    "rejected",
    "partial",
    "failing",
)
"""Why records are put aside; `unreadable` is of a batch."""
DEAD_LETTERS_TOTAL: Final = Counter(
    "gpuledger_dead_letters",
    "Records that could not be used and whose letters the dead-letter topic has, by topic and"
    f" reason: {', '.join(f'`{reason}`' for reason in REASONS)}.",
    ["topic", "reason"],
)
RECORDS_UNREADABLE_TOTAL: Final = Counter(
    "gpuledger_records_unreadable",
    "Offsets that were skipped because their batch could not be unpacked, by reason: `codec` (it is"
    " packed as none of gpuledger's is), `too_large` (more bytes, unpacked, than a batch may have),"
    " `too_many` (more records, or headers of one), `damaged`. The dead letters say of which"
    " topic.",
    ["reason"],
)
count_from_zero(RECORDS_UNREADABLE_TOTAL, reason=UnreadableReason)
DETAIL_CHARACTERS: Final = 1000
"""What a letter says is cut to so many: a detail may quote what the record says, and that is
anybody's."""
_BASE64_BYTES: Final = (MAX_MESSAGE_BYTES - 16 * DETAIL_CHARACTERS) // 4 * 3
"""Bytes of key and value that fit in a letter as base64, with room for all that it says besides."""
_SMALL_KEY_BYTES: Final = 1024
"""A key of so many bytes always fits in a letter."""
_SHOWN_KEY_CHARACTERS: Final = 120
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


def count_nowhere_else(reason: str, count: int) -> None:
    """Do nothing beside the counter of all stages: the default."""


class _QueuedDeadLetter(NamedTuple):
    """A letter that the topic does not have yet."""

    content: DeadLetter
    unreadable: Record | None
    """The record itself, which has no bytes, where it stands for what cannot be unpacked."""

    def message(self) -> Message:
        """Return what is published of it."""
        validate(self.content)
        key, timestamp_ms = self.content.topic.encode(), self.content.time_ns // NS_PER_MS
        return Message(key=key, value=encode(self.content), timestamp_ms=timestamp_ms)


@dataclass(frozen=True, kw_only=True)
class Drained:
    """The letters of one partition's records, taken out to be published along with its offsets."""

    dead_letters: Sequence[_QueuedDeadLetter]
    messages: Mapping[TopicPartition, list[Message]]
    """The same letters, by where they are to be published."""
    next_offsets: Mapping[TopicPartition, int]
    """Of the topics that are read from their beginning again: how far they have letters by that."""

    def explain(self, error: BusErrorT) -> BusErrorT:
        """Return the error with which they were not published, which says that they wait."""
        return _explain(error, waiting=len(self.dead_letters))


class DeadLetterQueue:
    """Decodes records, collects those that cannot be used, and publishes them as dead letters.

    Collected letters are published by `flush`, which a consumer calls before it commits the
    offsets of the records they stand for; or they are handed out by `drain`, to be published along
    with those offsets, and `acknowledge` says that they were. What was read is read again where
    neither succeeds, so a letter is counted and logged once the topic has it, and not before.

    A compacted topic that is read from its beginning at each start would have a letter for each bad
    record each time. Of `state_topics` the consumer commits how far they have letters
    (`next_offsets`), though it reads them from no such offset, and says so before it reads them
    again (`skip_before`).
    """

    def __init__(
        self,
        *,
        consumer: str,
        producer: Producer,
        topic: Topic,
        partitions: int,
        time_ns: Callable[[], int] = time.time_ns,
        repeats: Repeats = _repeats,
        count: Callable[[str, int], None] = count_nowhere_else,
        state_topics: Collection[str] = (),
    ) -> None:
        """Take what publishes; `count` gets the reason and the number of letters on the topic."""
        self._state_topics = frozenset(state_topics)
        self._has_dead_letters_before: dict[TopicPartition, int] = {}
        self._repeats = repeats
        self._consumer = consumer
        self._producer = producer
        self._topic = topic.name
        self._partitions = partitions
        self._time_ns = time_ns
        self._count = count
        self._waiting: list[_QueuedDeadLetter] = []
        self._publishing: dict[TopicPartition, list[_QueuedDeadLetter]] = {}
        """What a flush has in hand, by where it is published, less what is on the topic."""
        self._flushing = asyncio.Lock()
        self.rejected = 0

    def decode(self, decoder: Decoder[T], records: Sequence[Record]) -> Iterator[tuple[Record, T]]:
        """Yield each record with its value; what does not decode is put aside and left out.

        So is, undecoded, what is larger than a message may be: a batch that was made by hand may
        hold one record of all the bytes that are unpacked of it.
        """
        for record in records:
            if (size := size_bytes(record.key, record.value)) > MAX_MESSAGE_BYTES:
                detail = f"{record.topic}: {size} bytes, of {MAX_MESSAGE_BYTES} that a message has"
                self.reject(record, reason="too_large", detail=detail)
                continue
            try:
                yield record, decoder.decode(record.value)
            except UndecodableError as error:
                # Looked at here, where nothing decodes: a batch without a value never does.
                if (why := record.unreadable) is None:
                    self.reject(record, reason="undecodable", detail=str(error))
                else:
                    detail = describe_unreadable(record, why)
                    self.reject(record, reason="unreadable", detail=detail)

    def reject(self, record: Record, *, reason: str, detail: str) -> None:
        """Put a record aside, with the reason as one word and the detail as a sentence.

        The letter fits in a message whatever the record and the detail hold: a long detail is cut,
        and bytes that do not fit are left out, the key alone where it is long. Where they lie, and
        under which key, is said all the same.
        """
        at = TopicPartition(record.topic, record.partition)
        if record.offset < self._has_dead_letters_before.get(at, 0):
            return
        self.rejected += 1
        shown = shorten(detail, DETAIL_CHARACTERS)
        has_room = size_bytes(record.key, record.value) <= _BASE64_BYTES
        key, value = record.key, record.value
        if not has_room:
            note = "too large for a dead letter: read it there"
            shown = f"{shown} (the record of {show_key(key)} is {note})"
            key = key if key is not None and len(key) <= _SMALL_KEY_BYTES else None
            value = None
        content = DeadLetter(
            topic=record.topic,
            partition=record.partition,
            offset=record.first_offset,
            last_offset=record.offset if record.unreadable else None,
            consumer=self._consumer,
            reason=reason,
            detail=shown,
            time_ns=self._time_ns(),
            key_base64=_base64(key),
            value_base64=_base64(value),
        )
        self._waiting.append(_QueuedDeadLetter(content, record if record.unreadable else None))

    async def flush(self) -> None:
        """Publish what was put aside; where that fails, the rest stays for the next call.

        Raises the error of the bus, which then says how many letters wait.
        """
        # Whoever flushes meanwhile waits: what another one has in hand is not on the topic yet.
        async with self._flushing:
            # Others may put records aside while this waits for the bus; those are for the next
            # call. Or they may drop letters, which are neither tried again nor waited for.
            self._publishing, self._waiting = self._placed(self._waiting), []
            try:
                for at in list(self._publishing):
                    if dead_letters := tuple(self._publishing[at]):
                        await self._producer.publish(
                            *at, [dead_letter.message() for dead_letter in dead_letters]
                        )
                        self._acknowledge(dead_letters)
                    del self._publishing[at]
            except BusError as error:
                waiting = sum(map(len, self._publishing.values()))
                raise _explain(error, waiting=waiting) from error
            finally:
                self._waiting = [*chain.from_iterable(self._publishing.values()), *self._waiting]
                self._publishing = {}

    def waiting(self) -> set[int]:
        """Return the partitions whose records were put aside, with no letter published yet."""
        return {dead_letter.content.partition for dead_letter in self._waiting}

    def drain(self, partition: int) -> Drained:
        """Take out the letters of one partition's records, to be published where they belong."""
        dead_letters = [
            dead_letter
            for dead_letter in self._waiting
            if dead_letter.content.partition == partition
        ]
        if dead_letters:
            self._waiting = [
                dead_letter
                for dead_letter in self._waiting
                if dead_letter.content.partition != partition
            ]
        placed = self._placed(dead_letters)
        messages = {at: [dead_letter.message() for dead_letter in placed[at]] for at in placed}
        return Drained(
            dead_letters=dead_letters,
            messages=messages,
            next_offsets=self._next_offsets(dead_letters),
        )

    def skip_before(self, partition: TopicPartition, offset: int) -> None:
        """Make no letters of a partition's records before an offset: they have theirs."""
        self._has_dead_letters_before[partition] = offset

    def acknowledge(self, drained: Drained) -> None:
        """Record that letters which were taken out are on the topic."""
        self._acknowledge(drained.dead_letters)

    def drop(self, partition: int, *, topic: str | None = None) -> None:
        """Forget the letters of one partition's records, which will be read again.

        Of every topic where `topic` is `None`. What a flush is about to publish goes as well; of
        what it has handed to the bus already, only another attempt.
        """

        def stays(dead_letter: _QueuedDeadLetter) -> bool:
            content = dead_letter.content
            return content.partition != partition or topic not in {None, content.topic}

        self._waiting = [dead_letter for dead_letter in self._waiting if stays(dead_letter)]
        for at, dead_letters in self._publishing.items():
            self._publishing[at] = [
                dead_letter for dead_letter in dead_letters if stays(dead_letter)
            ]

    def _acknowledge(self, dead_letters: Sequence[_QueuedDeadLetter]) -> None:
        """Count letters, and log a line a minute for each topic and reason.

        A node may be refused at every tick.
        """
        alike: dict[tuple[str, str], list[DeadLetter]] = {}
        for dead_letter, unreadable in dead_letters:
            alike.setdefault((dead_letter.topic, dead_letter.reason), []).append(dead_letter)
            if unreadable is not None:
                count_unreadable(unreadable)
        for (topic, reason), those in alike.items():
            DEAD_LETTERS_TOTAL.labels(topic=topic, reason=reason).inc(len(those))
            self._count(reason, len(those))
            if count := self._repeats.count((self._consumer, topic, reason), more=len(those)):
                _log.warning(
                    "records_rejected",
                    count=count,
                    topic=topic,
                    reason=reason,
                    partition=those[0].partition,
                    offset=those[0].offset,
                    detail=those[0].detail,
                )

    def _next_offsets(self, dead_letters: Iterable[_QueuedDeadLetter]) -> dict[TopicPartition, int]:
        found: dict[TopicPartition, int] = {}
        for content, _ in dead_letters:
            if content.topic in self._state_topics:
                at = TopicPartition(content.topic, content.partition)
                last_offset = content.offset if content.last_offset is None else content.last_offset
                found[at] = max(last_offset + 1, found.get(at, 0))
        return found

    def _placed(
        self, dead_letters: Iterable[_QueuedDeadLetter]
    ) -> dict[TopicPartition, list[_QueuedDeadLetter]]:
        placed: dict[TopicPartition, list[_QueuedDeadLetter]] = {}
        for dead_letter in dead_letters:
            # Beside the record that it stands for, where there are as many partitions.
            partition = dead_letter.content.partition % self._partitions
            at = TopicPartition(self._topic, partition)
            placed.setdefault(at, []).append(dead_letter)
        return placed


def describe_unreadable(record: Record, why: Unreadable) -> str:
    """Return a sentence that says which offsets are in a batch that cannot be unpacked, and why."""
    return (
        f"{record.topic}: offsets {why.first_offset} to {record.offset} are in a batch that"
        f" cannot be unpacked: {why.detail}"
    )


def count_unreadable(record: Record) -> None:
    """Count the offsets that a record stands for, where their batch cannot be unpacked."""
    if (why := record.unreadable) is not None:
        count = record.offset + 1 - why.first_offset
        RECORDS_UNREADABLE_TOTAL.labels(reason=why.reason).inc(count)


def _explain(error: BusErrorT, *, waiting: int) -> BusErrorT:
    """Return an error of the same kind that says how many letters wait, where any do."""
    if not waiting:
        return error
    dead_letters = "1 dead letter waits" if waiting == 1 else f"{waiting} dead letters wait"
    return type(error)(f"{dead_letters} to be published: {error}")


def show_key(key: bytes | None) -> str:
    """Return a record's key for people: it says who wrote it, where that is known."""
    return (
        "no key"
        if key is None
        else shorten(repr(key.decode(errors="replace")), _SHOWN_KEY_CHARACTERS)
    )


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
