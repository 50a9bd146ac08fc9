"""Handling of records that cannot be used: every record is decoded or rejected, never lost.

All consumers convert their records to values with this module. It depends on the bus and the codec,
but on no component.
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
from gpuledger.dead_letter_reasons import DEAD_LETTER_REASONS
from gpuledger.errors import BusError, UndecodableError
from gpuledger.records import DeadLetter
from gpuledger.runtime.logs import Repeats
from gpuledger.runtime.process_metrics import count_from_zero
from gpuledger.texts import shorten
from gpuledger.topics import Topic

T = TypeVar("T")
BusErrorT = TypeVar("BusErrorT", bound=BusError)

DEAD_LETTERS_TOTAL: Final = Counter(
    "gpuledger_dead_letters",
    "Total number of rejected records that were written to the dead-letter topic, by topic and"
    f" reason: {', '.join(f'`{reason.name}`' for reason in DEAD_LETTER_REASONS)}.",
    ["topic", "reason"],
)
RECORDS_UNREADABLE_TOTAL: Final = Counter(
    "gpuledger_records_unreadable",
    "Total number of offsets in batches that could not be unpacked, by reason: `codec` (unsupported"
    " compression), `too_large`, `too_many` (records or headers), `damaged`.",
    ["reason"],
)
count_from_zero(RECORDS_UNREADABLE_TOTAL, reason=UnreadableReason)
DETAIL_CHARACTERS: Final = 1000
"""Maximum length of `detail`, because it may quote a record, and anybody may write records."""
_BASE64_BYTES: Final = (MAX_MESSAGE_BYTES - 16 * DETAIL_CHARACTERS) // 4 * 3
"""Bytes of key and value that fit as base64 in a dead-letter record, next to its other fields."""
_SMALL_KEY_BYTES: Final = 1024
"""A key of up to this many bytes always fits in a dead-letter record."""
_SHOWN_KEY_CHARACTERS: Final = 120
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


def count_nowhere_else(reason: str, count: int) -> None:
    """Do nothing; the default for `count`, for components without a counter of their own."""


class _QueuedDeadLetter(NamedTuple):
    """A dead-letter record that is not on the topic yet."""

    content: DeadLetter
    unreadable: Record | None
    """The placeholder record, if this dead-letter record is about a batch that cannot be
    unpacked."""

    def message(self) -> Message:
        """Return the message to publish."""
        validate(self.content)
        key, timestamp_ms = self.content.topic.encode(), self.content.time_ns // NS_PER_MS
        return Message(key=key, value=encode(self.content), timestamp_ms=timestamp_ms)


@dataclass(frozen=True, kw_only=True)
class Drained:
    """Dead-letter records about one partition, to be published with the partition's offsets."""

    dead_letters: Sequence[_QueuedDeadLetter]
    messages: Mapping[TopicPartition, list[Message]]
    """The dead-letter records as messages, by the topic and partition to publish them to."""
    next_offsets: Mapping[TopicPartition, int]
    """The offset after the last rejected record, for partitions of state topics only, which are
    read from their beginning."""

    def explain(self, error: BusErrorT) -> BusErrorT:
        """Return a publishing error with the number of unpublished dead-letter records."""
        return _explain(error, waiting=len(self.dead_letters))


class DeadLetterQueue:
    """Decodes records, and publishes a dead-letter record for each record that cannot be used.

    A consumer can publish the dead-letter records in two ways. Either it calls `flush` before it
    commits the offsets of the rejected records. Or it takes the dead-letter records with `drain`,
    publishes them together with those offsets, and then calls `acknowledge`. If publishing fails,
    the rejected records are read again, so a dead-letter record is counted and logged only once it
    is on the topic.

    `state_topics` are compacted and read from their beginning at each start. To avoid another
    dead-letter record for the same record at each start, the consumer commits the offset up to
    which dead-letter records exist (`next_offsets`). Before it reads the topic again from the
    beginning, it passes that offset to `skip_before`.
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
        """Store the arguments; `count` is called with a reason and its number of new records."""
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
        """Dead-letter records that a running flush has not published yet, by topic and
        partition."""
        self._flushing = asyncio.Lock()
        self.rejected = 0

    def decode(self, decoder: Decoder[T], records: Sequence[Record]) -> Iterator[tuple[Record, T]]:
        """Yield each record with its value; reject and leave out records that do not decode.

        Records that exceed the maximum message size are rejected without decoding. They can occur
        because a forged batch may contain one record as large as the whole unpacked batch.
        """
        for record in records:
            if (size := size_bytes(record.key, record.value)) > MAX_MESSAGE_BYTES:
                detail = f"{record.topic}: {size} bytes; a message has at most {MAX_MESSAGE_BYTES}"
                self.reject(record, reason="too_large", detail=detail)
                continue
            try:
                yield record, decoder.decode(record.value)
            except UndecodableError as error:
                # Checked only here, because a placeholder record has no value and never decodes.
                if (why := record.unreadable) is None:
                    self.reject(record, reason="undecodable", detail=str(error))
                else:
                    detail = describe_unreadable(record, why)
                    self.reject(record, reason="unreadable", detail=detail)

    def reject(self, record: Record, *, reason: str, detail: str) -> None:
        """Queue a dead-letter record, with the reason as one word and the detail as a sentence.

        The dead-letter record always fits in a message. A long detail is cut. If key and value do
        not fit, the value is left out, and so is a long key; the detail then contains the beginning
        of the key.
        """
        at = TopicPartition(record.topic, record.partition)
        if record.offset < self._has_dead_letters_before.get(at, 0):
            return
        self.rejected += 1
        shown = shorten(detail, DETAIL_CHARACTERS)
        has_room = size_bytes(record.key, record.value) <= _BASE64_BYTES
        key, value = record.key, record.value
        if not has_room:
            note = "too large to be copied; read it from its topic"
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
        """Publish the queued dead-letter records; if that fails, the rest stays for the next call.

        Raises the bus error with the number of waiting dead-letter records.
        """
        # Other callers wait, because the records of a running flush are not on the topic yet.
        async with self._flushing:
            # While this call waits for the bus, other tasks may reject records, which the next call
            # publishes. They may also drop records, which this call then neither publishes nor
            # retries.
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
        """Return the partitions whose dead-letter records are not published yet."""
        return {dead_letter.content.partition for dead_letter in self._waiting}

    def drain(self, partition: int) -> Drained:
        """Take out the dead-letter records about one partition, to be published by the caller."""
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
        """Ignore calls of `reject` for records before this offset.

        Call this if the dead-letter records for these records are already on the topic.
        """
        self._has_dead_letters_before[partition] = offset

    def acknowledge(self, drained: Drained) -> None:
        """Record that the dead-letter records from `drain` are on the topic."""
        self._acknowledge(drained.dead_letters)

    def drop(self, partition: int, *, topic: str | None = None) -> None:
        """Forget the dead-letter records about one partition, because it will be read again.

        `topic=None` means every topic. A running flush does not publish the forgotten records. If
        it has already passed some to the bus, these may still be published, but are not retried.
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
        """Count published records, and log at most one line per minute for each topic and reason.

        The lines are limited, because a node's records may be rejected at every tick.
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
            # The partition has the same number as the rejected record's, if there are enough
            # partitions.
            partition = dead_letter.content.partition % self._partitions
            at = TopicPartition(self._topic, partition)
            placed.setdefault(at, []).append(dead_letter)
        return placed


def describe_unreadable(record: Record, why: Unreadable) -> str:
    """Return a sentence with the offsets of a batch that cannot be unpacked, and the cause."""
    return (
        f"{record.topic}: offsets {why.first_offset} to {record.offset} are in a batch that"
        f" cannot be unpacked: {why.detail}"
    )


def count_unreadable(record: Record) -> None:
    """Count the offsets of an unreadable batch in the metric; ignore readable records."""
    if (why := record.unreadable) is not None:
        count = record.offset + 1 - why.first_offset
        RECORDS_UNREADABLE_TOTAL.labels(reason=why.reason).inc(count)


def _explain(error: BusErrorT, *, waiting: int) -> BusErrorT:
    """Return an error of the same type whose message has the number of waiting records, if any."""
    if not waiting:
        return error
    dead_letters = (
        "1 dead-letter record waits" if waiting == 1 else f"{waiting} dead-letter records wait"
    )
    return type(error)(f"{dead_letters} to be published: {error}")


def show_key(key: bytes | None) -> str:
    """Return a record's key as text for people; the key usually names the record's writer."""
    return (
        "no key"
        if key is None
        else shorten(repr(key.decode(errors="replace")), _SHOWN_KEY_CHARACTERS)
    )


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
