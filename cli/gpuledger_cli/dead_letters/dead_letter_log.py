"""Reads the dead-letter topic and selects records by a filter."""

import base64
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from typing_extensions import override

from gpuledger.bus.protocol import HistoryReader, Record, Span, TopicPartition
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.dead_letter_reasons import DEAD_LETTER_REASONS
from gpuledger.errors import UndecodableError, UserError
from gpuledger.keys import split_key
from gpuledger.records import DeadLetter
from gpuledger.texts import find_near

_POSITION: Final = re.compile(r"(?P<partition>\d{1,9}):(?P<offset>\d{1,18})")


class Position(NamedTuple):
    """Position on the dead-letter topic, by which users refer to a dead letter."""

    partition: int
    offset: int

    @override
    def __str__(self) -> str:
        """Return the position as text, such as `0:17`, which `parse_position` reads."""
        return f"{self.partition}:{self.offset}"


def parse_position(text: str) -> Position:
    """Return a position; raises UserError if the text is not one."""
    found = _POSITION.fullmatch(text)
    if found is None:
        raise UserError(
            f"invalid position of a dead-letter record: {text!r}; give PARTITION:OFFSET, such as"
            " 0:17, from `gpuledger dead-letters list`"
        )
    return Position(int(found["partition"]), int(found["offset"]))


class StoredDeadLetter(NamedTuple):
    """A dead letter and its position."""

    position: Position
    content: DeadLetter
    key: bytes | None
    """Key of the rejected record; `None` if unknown."""
    value: bytes | None
    """Value of the rejected record; `None` if it had none, or if it was left out as too large."""

    @classmethod
    def of(cls, position: Position, content: DeadLetter) -> "StoredDeadLetter":
        """Decode key and value of the rejected record; raises ValueError for invalid base64."""
        return cls(position, content, _bytes(content.key_base64), _bytes(content.value_base64))

    @property
    def key_text(self) -> str:
        """The record's key as text; empty if unknown."""
        return (self.key or b"").decode(errors="replace")


def _bytes(encoded: str | None) -> bytes | None:
    return None if encoded is None else base64.b64decode(encoded, validate=True)


@dataclass(frozen=True, kw_only=True)
class DeadLetterFilter:
    """Conditions that dead letters must all meet; empty values and `None` match everything."""

    positions: frozenset[Position] = frozenset()
    since_ms: int | None = None
    """Rejected at this time or later, in milliseconds since the epoch."""
    until_ms: int | None = None
    """Rejected before this time."""
    consumers: Sequence[str] = ()
    """Rejected by one of these consumer groups."""
    reasons: Sequence[str] = ()
    topics: Sequence[str] = ()
    """The rejected record was on one of these topics."""
    key: str | None = None
    """The rejected record has exactly this key."""
    node: str | None = None
    """The record's key is this node key, `<cluster>/<node>`, or has this node name."""

    @property
    def is_empty(self) -> bool:
        """Whether every dead letter matches."""
        return self == DeadLetterFilter()

    def offsets_in(self, partition: int) -> Iterator[int]:
        """Yield the offsets of the wanted positions in a partition."""
        return (position.offset for position in self.positions if position.partition == partition)

    def lets_through(self, kept: StoredDeadLetter) -> bool:
        """Return whether a dead letter matches."""
        dead_letter = kept.content
        time_ms = dead_letter.time_ns // NS_PER_MS
        return (
            (not self.positions or kept.position in self.positions)
            and (self.since_ms is None or time_ms >= self.since_ms)
            and (self.until_ms is None or time_ms < self.until_ms)
            and (not self.consumers or dead_letter.consumer in self.consumers)
            and (not self.reasons or dead_letter.reason in self.reasons)
            and (not self.topics or dead_letter.topic in self.topics)
            and (self.key is None or kept.key_text == self.key)
            and (self.node is None or self.node in _names_of(kept.key_text))
        )


def _names_of(key: str) -> tuple[str, str]:
    """Return the names of the node with this key: the key itself, and its name without cluster."""
    return key, split_key(key)[1] or key


@dataclass(kw_only=True)
class DeadLetterLog:
    """The dead letters that match a filter, up to the time when the log was opened.

    Only one batch of records is in memory at a time.
    """

    reader: HistoryReader
    topic: str
    """The dead-letter topic."""
    wanted: DeadLetterFilter
    spans: Mapping[TopicPartition, Span]
    """Offsets to read, up to the ends when the log was opened."""
    missing: set[Position] = field(default_factory=set)
    """Requested positions that were not found yet."""
    unusable: int = 0
    """Number of records that are not dead letters. Any client may write them to the topic."""
    others: int = 0
    """Number of dead letters that did not match."""

    @classmethod
    async def open(
        cls, reader: HistoryReader, topic: str, wanted: DeadLetterFilter
    ) -> "DeadLetterLog":
        """Look up the offsets to read; raises TopicsError if the topic does not exist."""
        spans = dict(await reader.spans(topic))
        if wanted.positions:
            spans = {at: _cut(span, wanted.offsets_in(at.partition)) for at, span in spans.items()}
        elif wanted.since_ms is not None:
            first = await reader.offsets_at(spans, wanted.since_ms)
            spans = {at: Span(max(span.first, first[at]), span.end) for at, span in spans.items()}
        spans = {at: span for at, span in spans.items() if span.end > span.first}
        missing = set(wanted.positions)
        return cls(reader=reader, topic=topic, wanted=wanted, spans=spans, missing=missing)

    @property
    def offsets(self) -> int:
        """Number of offsets to read."""
        return sum(span.end - span.first for span in self.spans.values())

    async def dead_letters(
        self, advance: Callable[[int], None]
    ) -> AsyncGenerator[StoredDeadLetter, None]:
        """Yield matching dead letters, each partition in order.

        `advance` is called with the number of records in each batch that was read.
        """
        async with aclosing(self._records(advance)) as records:
            async for record in records:
                if (dead_letter := self._decode(record)) is None:
                    self.unusable += 1
                elif self.wanted.lets_through(dead_letter):
                    self.missing.discard(dead_letter.position)
                    yield dead_letter
                else:
                    self.others += 1

    async def _records(self, advance: Callable[[int], None]) -> AsyncGenerator[Record, None]:
        for at, span in self.spans.items():
            async with aclosing(self.reader.read(at, span)) as chunks:
                async for records in chunks:
                    for record in records:
                        yield record
                    advance(len(records))

    def why_none(self) -> str:
        """Return in one line why no dead letter matched; call it after all were read."""
        if not self.others:
            since = "" if self.wanted.since_ms is None else " since then"
            return f"no dead-letter records{since}"
        return f"none of {self.others} dead-letter records matches{self._hint()}"

    def _hint(self) -> str:
        """Return a hint if a requested reason is unknown, else an empty text.

        An unknown reason is not an error, because an older or newer release may use it.
        """
        known = [reason.name for reason in DEAD_LETTER_REASONS]
        for reason in self.wanted.reasons:
            if reason not in known:
                near = find_near(reason, known)
                return f"; unknown reason {reason!r}" + (f", did you mean {near}?" if near else "")
        return ""

    def _decode(self, record: Record) -> StoredDeadLetter | None:
        position = Position(record.partition, record.offset)
        try:
            content = decoder_of(self.topic, DeadLetter).decode(record.value)
            return StoredDeadLetter.of(position, content)
        except (UndecodableError, ValueError):
            return None


def _cut(span: Span, offsets: Iterator[int]) -> Span:
    """Return the part of a span between the first and the last of these offsets."""
    wanted = sorted(offset for offset in offsets if span.first <= offset < span.end)
    return Span(wanted[0], wanted[-1] + 1) if wanted else Span(span.end, span.end)
