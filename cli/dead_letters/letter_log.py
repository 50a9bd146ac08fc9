"""What the topic of dead letters has: letters by their positions, and marks of those replayed.

A mark is a letter about a letter: its `topic` is the topic of dead letters itself, its partition
and offset those of the letter that was replayed, its reason `replayed`. It lies behind that letter
in the same partition, so retention removes it later. Marks have the topic's name as their key, by
which they are told from letters without being decoded.
"""

from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from cli.dead_letters.letter_filter import KeptLetter, LetterFilter, Position
from gpuledger.bus.protocol import HistoryReader, Message, Record, Span, TopicPartition
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of, encode
from gpuledger.dead_letter_queue import DETAIL_CHARACTERS
from gpuledger.errors import UndecodableError
from gpuledger.records import DeadLetter
from gpuledger.texts import shorten

REPLAYED: Final = "replayed"
"""The reason of a mark."""


def mark_of(
    letter: KeptLetter, *, topic: str, consumer: str, receiver: str, time_ns: int
) -> Message:
    """Return what says on the topic of dead letters that a letter was replayed to a consumer."""
    mark = DeadLetter(
        topic=topic,
        partition=letter.position.partition,
        offset=letter.position.offset,
        consumer=consumer,
        reason=REPLAYED,
        detail=shorten(f"replayed to {receiver}", DETAIL_CHARACTERS),
        time_ns=time_ns,
    )
    return Message(key=topic.encode(), value=encode(mark), timestamp_ms=time_ns // NS_PER_MS)


class ReplayedLetters:
    """Which letters have a mark: 8 bytes for each."""

    def __init__(self, positions: Mapping[int, Sequence[int]]) -> None:
        """Take the offsets of the letters that have one, by partition."""
        self._offsets = {
            partition: array("q", sorted(offsets)) for partition, offsets in positions.items()
        }

    def __contains__(self, position: Position) -> bool:
        """Return whether a letter has a mark."""
        offsets = self._offsets.get(position.partition, ())
        place = bisect_left(offsets, position.offset)
        return place < len(offsets) and offsets[place] == position.offset


@dataclass(kw_only=True)
class LetterLog:
    """The letters that a filter lets through, as they were when it was opened.

    A batch at a time is held.
    """

    reader: HistoryReader
    topic: str
    """The topic of dead letters."""
    wanted: LetterFilter
    spans: Mapping[TopicPartition, Span]
    """What is read: up to the ends of when it was opened."""
    missing: set[Position] = field(default_factory=set)
    """Positions that were asked for and not met yet."""
    unusable: int = 0
    """Records met that are no letters: who may write to the topic may write anything."""

    @classmethod
    async def open(cls, reader: HistoryReader, topic: str, wanted: LetterFilter) -> "LetterLog":
        """Look up what is to be read; raises TopicsError where there is no topic."""
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
        """How many offsets there are to read."""
        return sum(span.end - span.first for span in self.spans.values())

    async def find_replayed(self) -> ReplayedLetters:
        """Read the marks of the letters that are to be read: they lie behind them."""
        found: dict[int, array[int]] = {}
        async for record in self._records(lambda _count: None):
            if self._is_mark(record) and (mark := self._decode(record)) is not None:
                found.setdefault(record.partition, array("q")).append(mark.content.offset)
        return ReplayedLetters(found)

    async def letters(self, advance: Callable[[int], None]) -> AsyncGenerator[KeptLetter, None]:
        """Yield the letters, of each partition in order; `advance` hears how many were read."""
        self.unusable = 0
        async with aclosing(self._records(advance)) as records:
            async for record in records:
                if self._is_mark(record):
                    continue
                if (letter := self._decode(record)) is None:
                    self.unusable += 1
                elif self.wanted.lets_through(letter):
                    self.missing.discard(letter.position)
                    yield letter

    async def _records(self, advance: Callable[[int], None]) -> AsyncGenerator[Record, None]:
        for at, span in self.spans.items():
            async with aclosing(self.reader.read(at, span)) as chunks:
                async for records in chunks:
                    for record in records:
                        yield record
                    advance(len(records))

    def _is_mark(self, record: Record) -> bool:
        return record.key == self.topic.encode()

    def _decode(self, record: Record) -> KeptLetter | None:
        position = Position(record.partition, record.offset)
        try:
            content = decoder_of(self.topic, DeadLetter).decode(record.value)
            return KeptLetter.of(position, content)
        except (UndecodableError, ValueError):
            return None


def _cut(span: Span, offsets: Iterator[int]) -> Span:
    """Return the part of a span from the first of these offsets on; marks lie behind them all."""
    first = min(offsets, default=span.end)
    return Span(max(span.first, first), span.end)
