"""Reads the dead-letter topic and selects records by a filter."""

import base64
import re
from collections import defaultdict
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
from gpuledger.texts import find_near, readable

_MAX_NAMES: Final = 10_000
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

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names by which a filter finds it, by field."""
        content, key = self.content, self.key_text
        return {
            "consumer": (content.consumer,),
            "reason": (content.reason,),
            "topic": (content.topic,),
            "key": (key,),
            # The node's key, and its name without the cluster.
            "node": (key, split_key(key)[1] or key),
        }


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
    def names(self) -> dict[str, Sequence[str]]:
        """The wanted names by field, without fields for which every name matches."""
        fields = {
            "consumer": self.consumers,
            "reason": self.reasons,
            "topic": self.topics,
            "key": () if self.key is None else (self.key,),
            "node": () if self.node is None else (self.node,),
        }
        return {field: names for field, names in fields.items() if names}

    @property
    def is_empty(self) -> bool:
        """Whether every dead letter matches."""
        return self == DeadLetterFilter()

    def offsets_in(self, partition: int) -> Iterator[int]:
        """Yield the offsets of the wanted positions in a partition."""
        return (position.offset for position in self.positions if position.partition == partition)

    def lets_through(self, kept: StoredDeadLetter) -> bool:
        """Return whether a dead letter matches."""
        time_ms, names = kept.content.time_ns // NS_PER_MS, kept.names
        return (
            (not self.positions or kept.position in self.positions)
            and (self.since_ms is None or time_ms >= self.since_ms)
            and (self.until_ms is None or time_ms < self.until_ms)
            and not any(
                set(names[field]).isdisjoint(wanted) for field, wanted in self.names.items()
            )
        )


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
    others_names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Names of these dead letters, at most 10,000 for each field that the filter uses."""

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
                    self._count_other(dead_letter)

    async def _records(self, advance: Callable[[int], None]) -> AsyncGenerator[Record, None]:
        for at, span in self.spans.items():
            async with aclosing(self.reader.read(at, span)) as chunks:
                async for records in chunks:
                    for record in records:
                        yield record
                    advance(len(records))

    def _count_other(self, dead_letter: StoredDeadLetter) -> None:
        self.others += 1
        for field_name in self.wanted.names:
            names = self.others_names[field_name]
            if len(names) < _MAX_NAMES:
                names.update(dead_letter.names[field_name])

    def why_none(self) -> str:
        """Return in one line why no dead letter matched; call it after all were read."""
        if not self.others:
            since = "" if self.wanted.since_ms is None else " since then"
            return f"no dead-letter records{since}"
        return f"none of {self.others} dead-letter records matches{self._hint()}"

    def _hint(self) -> str:
        """Return a hint at the first requested name that no dead letter has; else an empty text.

        An unknown reason is not an error, because an older or newer release may use it.
        """
        reasons = {reason.name for reason in DEAD_LETTER_REASONS}
        for field_name, wanted in self.wanted.names.items():
            known = self.others_names[field_name] | (reasons if field_name == "reason" else set())
            for name in wanted:
                if name not in known:
                    near = find_near(name, known) or min(
                        (each for each in known if name in each), default=None
                    )
                    meant = f", did you mean {readable(near)}?" if near else ""
                    return f"; unknown {field_name} {name!r}{meant}"
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
