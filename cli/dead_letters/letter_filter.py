"""Which dead letters are meant: by what they say, or by where they lie. Pure."""

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from typing_extensions import override

from gpuledger.clock import NS_PER_MS
from gpuledger.errors import UserError
from gpuledger.keys import split_key
from gpuledger.records import DeadLetter

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
        return (each.offset for each in self.positions if each.partition == partition)

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
