"""The topic of dead letters: its letters, which of them are meant, and marks of those replayed.

A mark is a letter about a letter: its `topic` is the topic of dead letters itself, its partition
and offset those of the letter that was replayed, its reason `replayed`. It lies behind that letter
in the same partition, so retention removes it later. Marks have the topic's name as their key, by
which they are told from letters without being decoded.
"""

import base64
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from typing_extensions import override

from gpuledger.bus.protocol import HistoryReader, Message, Record, Span, TopicPartition
from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of, encode
from gpuledger.dead_letter_queue import DETAIL_CHARACTERS, REASONS
from gpuledger.errors import UndecodableError, UserError
from gpuledger.keys import split_key
from gpuledger.records import DeadLetter
from gpuledger.texts import find_near, readable, shorten

_POSITION: Final = re.compile(r"(?P<partition>\d{1,9}):(?P<offset>\d{1,18})")


class Position(NamedTuple):
    """Where a letter lies itself, on the topic of dead letters; by it people name it."""

    partition: int
    offset: int

    @override
    def __str__(self) -> str:
        """Return it as `parse_position` reads it."""
        return f"{self.partition}:{self.offset}"


def parse_position(text: str) -> Position:
    """Return a position; raises UserError for a text that is none."""
    found = _POSITION.fullmatch(text)
    if found is None:
        raise UserError(
            f"{text!r} is no position of a dead letter; give PARTITION:OFFSET, such as 0:17, as"
            " `gpuledger dead-letters list` shows it"
        )
    return Position(int(found["partition"]), int(found["offset"]))


class KeptLetter(NamedTuple):
    """A letter, and where it lies itself."""

    position: Position
    content: DeadLetter
    key: bytes | None
    """The key of the record that it stands for; `None` where none is known."""
    value: bytes | None
    """The bytes of the record; `None` where it had none, or where they are left out."""

    @classmethod
    def of(cls, position: Position, content: DeadLetter) -> "KeptLetter":
        """Unpack a letter's record; raises ValueError for what is no base64."""
        return cls(position, content, _bytes(content.key_base64), _bytes(content.value_base64))

    @property
    def key_text(self) -> str:
        """The record's key as text; empty where none is known."""
        return (self.key or b"").decode(errors="replace")


def _bytes(encoded: str | None) -> bytes | None:
    return None if encoded is None else base64.b64decode(encoded, validate=True)


@dataclass(frozen=True, kw_only=True)
class LetterFilter:
    """What all chosen letters have in common; what is empty or `None` is no condition."""

    positions: frozenset[Position] = frozenset()
    since_ms: int | None = None
    """Put aside at this time or later, milliseconds since the epoch."""
    until_ms: int | None = None
    """Put aside before this time."""
    consumers: Sequence[str] = ()
    """By one of these consumer groups."""
    reasons: Sequence[str] = ()
    topics: Sequence[str] = ()
    """Of a record of one of these topics."""
    key: str | None = None
    """Of a record under this very key."""
    node: str | None = None
    """Of a record under the key of this node, `<cluster>/<node>`, or of any node of this name."""

    @property
    def is_empty(self) -> bool:
        """Whether it lets every letter through."""
        return self == LetterFilter()

    def offsets_in(self, partition: int) -> Iterator[int]:
        """Yield the offsets of the positions in a partition."""
        return (position.offset for position in self.positions if position.partition == partition)

    def lets_through(self, kept: KeptLetter) -> bool:
        """Return whether a letter is meant."""
        letter = kept.content
        time_ms = letter.time_ns // NS_PER_MS
        return (
            (not self.positions or kept.position in self.positions)
            and (self.since_ms is None or time_ms >= self.since_ms)
            and (self.until_ms is None or time_ms < self.until_ms)
            and (not self.consumers or letter.consumer in self.consumers)
            and (not self.reasons or letter.reason in self.reasons)
            and (not self.topics or letter.topic in self.topics)
            and (self.key is None or kept.key_text == self.key)
            and (self.node is None or self.node in _names_of(kept.key_text))
        )


def _names_of(key: str) -> tuple[str, str]:
    """Return by what a node may be named whose key this is."""
    return key, split_key(key)[1] or key


_MAX_VALUES: Final = 1000
"""Of how many values it is known that letters have them: a letter may say anything."""
_SHOWN_GROUPS: Final = 3


class PassedOver:
    """The letters that were read and are not meant: why there are none where there are others."""

    def __init__(self, wanted: LetterFilter) -> None:
        """Take what letters are meant."""
        self._wanted, self._of_anyone = wanted, replace(wanted, consumers=())
        self._letters = 0
        self._reasons: set[str] = set()
        self._topics: set[str] = set()
        self._groups: Counter[str] = Counter()
        """How many letters would be meant of other groups."""

    def add(self, kept: KeptLetter) -> None:
        """Take a letter that the filter did not let through."""
        self._letters += 1
        letter = kept.content
        for seen, value in ((self._reasons, letter.reason), (self._topics, letter.topic)):
            if len(seen) < _MAX_VALUES:
                seen.add(value)
        is_known = letter.consumer in self._groups or len(self._groups) < _MAX_VALUES
        if is_known and self._of_anyone.lets_through(kept):
            self._groups[letter.consumer] += 1

    def why_none(self) -> str:
        """Return why no letter is meant, in one line."""
        if not self._letters:
            return (
                "no dead letter" if self._wanted.since_ms is None else "no dead letter since then"
            )
        # A word that is mistyped comes first: of which group the letters are says nothing then.
        for field_, values, seen, known in (
            ("reason", self._wanted.reasons, self._reasons, REASONS),
            ("topic", self._wanted.topics, self._topics, ()),
        ):
            for value in values:
                if value not in seen:
                    return self._none_has(field_, value, near=find_near(value, {*seen, *known}))
        if self._groups:
            return self._of_other_groups()
        return f"none of {self._letters} dead letters meets all that is asked for"

    def _none_has(self, name: str, value: str, *, near: str | None) -> str:
        said = f"none of {self._letters} dead letters has the {name} {value!r}"
        return f"{said}; did you mean {readable(near)!r}?" if near and near != value else said

    def _of_other_groups(self) -> str:
        meant = " or ".join(map(repr, self._wanted.consumers))
        names = [readable(name) for name, _ in self._groups.most_common()]
        more = len(names) - _SHOWN_GROUPS
        shown = ", ".join(names[:_SHOWN_GROUPS]) + (f" and {more} more" if more > 0 else "")
        return (
            f"no such dead letter is of the group {meant}; {self._groups.total()} belong to other"
            f" groups: {shown}: --consumer chooses one"
        )


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
    passed_over: PassedOver = field(init=False)
    """The letters met that the filter did not let through."""

    def __post_init__(self) -> None:
        """Begin with none passed over."""
        self.passed_over = PassedOver(self.wanted)

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
        self.unusable, self.passed_over = 0, PassedOver(self.wanted)
        async with aclosing(self._records(advance)) as records:
            async for record in records:
                if self._is_mark(record):
                    continue
                if (letter := self._decode(record)) is None:
                    self.unusable += 1
                elif self.wanted.lets_through(letter):
                    self.missing.discard(letter.position)
                    yield letter
                else:
                    self.passed_over.add(letter)

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
