"""Turns dead letters into rows, counts and full texts. Pure.

Dead letters quote untrusted records, so characters that are not printable never reach a terminal.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import orjson

from gpuledger.clock import NS_PER_MS
from gpuledger.codec import decoder_of
from gpuledger.errors import UndecodableError, UserError
from gpuledger.keys import split_key
from gpuledger.records import DeadLetter
from gpuledger.texts import readable, shorten
from gpuledger.time_ranges import write_moment
from gpuledger.topics import Topics
from gpuledger_cli.dead_letters.dead_letter_log import StoredDeadLetter, parse_position

Countable = Literal["consumer", "reason", "topic", "partition", "node"]
COUNTABLE: Final[tuple[Countable, ...]] = ("consumer", "reason", "topic", "partition", "node")
_DETAIL_CHARACTERS: Final = 100
_DUMPED_BYTES: Final = 256
_DUMP_WIDTH: Final = 16
_PRINTABLE: Final = range(0x20, 0x7F)
"""The printable characters of ASCII."""
_MAX_GROUPS: Final = 100_000


class DeadLetterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row in the output of `dead-letters list`; JSON and CSV have the same field names."""

    position: str
    """Position of the dead letter, which `show` and `replay` accept."""
    time: str
    """When the record was rejected, in UTC."""
    time_ns: int
    """The same in nanoseconds since the epoch."""
    consumer: str
    reason: str
    topic: str
    """Topic of the rejected record."""
    partition: int
    offset: int
    last_offset: int | None
    """Offset of the last record of a batch that cannot be unpacked; absent for single records."""
    key: str
    """Key of the rejected record; empty if unknown."""
    size_bytes: int | None
    """Size of the rejected record's value; absent if the dead letter has no value."""
    detail: str

    def __lt__(self, other: "DeadLetterRow") -> bool:
        """Return whether this row comes before another one, by `time` and then by position."""
        mine, others = (
            (row.time_ns // NS_PER_MS, parse_position(row.position)) for row in (self, other)
        )
        return mine < others


def row_of(dead_letter: StoredDeadLetter) -> DeadLetterRow:
    """Return the row of a dead letter."""
    content = dead_letter.content
    return DeadLetterRow(
        position=str(dead_letter.position),
        time=write_moment(content.time_ns // NS_PER_MS),
        time_ns=content.time_ns,
        consumer=readable(content.consumer),
        reason=readable(content.reason),
        topic=readable(content.topic),
        partition=content.partition,
        offset=content.offset,
        last_offset=content.last_offset,
        key=readable(dead_letter.key_text),
        size_bytes=None if dead_letter.value is None else len(dead_letter.value),
        detail=readable(content.detail),
    )


TABLE_COLUMNS: Final = (
    "position",
    "when",
    "consumer",
    "reason",
    "record",
    "key",
    "bytes",
    "detail",
)


def cells_of(row: DeadLetterRow) -> tuple[str, ...]:
    """Return the cells of a row, in the order of `TABLE_COLUMNS`."""
    last = f"-{row.last_offset}" if row.last_offset is not None else ""
    return (
        row.position,
        row.time,
        row.consumer,
        row.reason,
        f"{row.topic}[{row.partition}]@{row.offset}{last}",
        row.key or "-",
        "-" if row.size_bytes is None else str(row.size_bytes),
        shorten(" ".join(row.detail.split()), _DETAIL_CHARACTERS),
    )


def json_line(row: msgspec.Struct) -> str:
    """Return a row as one line of JSON."""
    return msgspec.json.encode(row).decode()


def csv_line(cells: Iterable[object]) -> str:
    """Return a line of CSV, without line end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return text.getvalue()


class DeadLetterCount(msgspec.Struct, frozen=True, kw_only=True):
    """Number of dead letters with the same values in some fields."""

    group: dict[str, str]
    """The values by field name."""
    count: int
    first_time: str
    """When the first of these records was rejected, in UTC."""
    last_time: str


class _Group(NamedTuple):
    dead_letters: int
    first_ms: int
    last_ms: int


class DeadLetterCounts:
    """Counts dead letters by the values of some fields."""

    def __init__(self, fields: Sequence[Countable]) -> None:
        """Take the fields to count by."""
        self.fields = fields
        self._groups: dict[tuple[str, ...], _Group] = {}

    def add(self, dead_letter: StoredDeadLetter) -> None:
        """Count a dead letter; raises UserError if there are too many combinations of values."""
        time_ms = dead_letter.content.time_ns // NS_PER_MS
        group = tuple(_value_of(dead_letter, field) for field in self.fields)
        if group not in self._groups and len(self._groups) >= _MAX_GROUPS:
            raise UserError(f"--count-by: more than {_MAX_GROUPS} rows; count by fewer fields")
        dead_letters, first_ms, last_ms = self._groups.get(group, _Group(0, time_ms, time_ms))
        self._groups[group] = _Group(
            dead_letters + 1, min(first_ms, time_ms), max(last_ms, time_ms)
        )

    def rows(self) -> Iterator[DeadLetterCount]:
        """Yield a row for each combination of values, the largest count first."""
        for values, group in sorted(
            self._groups.items(), key=lambda item: (-item[1].dead_letters, item[0])
        ):
            yield DeadLetterCount(
                group=dict(zip(self.fields, values, strict=True)),
                count=group.dead_letters,
                first_time=write_moment(group.first_ms),
                last_time=write_moment(group.last_ms),
            )


def parse_count_by(text: str) -> tuple[Countable, ...]:
    """Return the fields of a comma-separated list; raises UserError for an unknown field."""
    known = {str(field): field for field in COUNTABLE}
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--count-by: unknown field: {unknown[0]!r}; use {', '.join(COUNTABLE)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def _value_of(dead_letter: StoredDeadLetter, field: Countable) -> str:
    if field == "node":
        key = readable(dead_letter.key_text)
        return key if split_key(key)[1] else "-"
    return readable(str(getattr(dead_letter.content, field)))


def full_text(dead_letter: StoredDeadLetter, topics: Topics) -> str:
    """Return a text with all fields of a dead letter and the value of the rejected record."""
    content = dead_letter.content
    last = f" to {content.last_offset}" if content.last_offset is not None else ""
    key = "none" if dead_letter.key is None else readable(dead_letter.key)
    when = write_moment(content.time_ns // NS_PER_MS)
    facts = {
        "position": str(dead_letter.position),
        "rejected": f"{when} by {readable(content.consumer)}",
        "reason": readable(content.reason),
        "record": f"{readable(content.topic)}, partition {content.partition},"
        f" offset {content.offset}{last}",
        "key": key,
    }
    lines = [f"{name:<12} {text}" for name, text in facts.items()]
    return "\n".join([*lines, "", "detail:", readable(content.detail), ""]) + (
        _value_text(dead_letter, topics)
    )


def _value_text(dead_letter: StoredDeadLetter, topics: Topics) -> str:
    content, value = dead_letter.content, dead_letter.value
    if value is None:
        if content.last_offset is not None:
            return "\nno bytes: the batch cannot be unpacked\n"
        return (
            "\nno bytes: the record had none, or was too large to be copied; see"
            f" {readable(content.topic)}[{content.partition}]@{content.offset} while the topic"
            " keeps it\n"
        )
    description = _describe_record(content, value, topics)
    try:
        # Escaped to ASCII, because other characters may control a terminal.
        shown = json.dumps(orjson.loads(value), indent=2)
    except (orjson.JSONDecodeError, RecursionError):
        shown = hex_dump(value)
    return f"\nvalue, {len(value)} bytes, {description}:\n{shown}\n"


def _describe_record(content: DeadLetter, value: bytes, topics: Topics) -> str:
    topic = topics.by_name.get(content.topic)
    if topic is None:
        return "of an unknown topic"
    try:
        decoder_of(topic.name, topic.record).decode(value)
    except UndecodableError as error:
        problem = "" if str(error) in content.detail else f" ({readable(str(error))})"
        return f"not a record of its topic{problem}"
    return f"a {topic.record.__name__} of {topic.name}"


def hex_dump(value: bytes) -> str:
    """Return the first bytes of a value in hexadecimal, and as ASCII if printable."""
    lines = []
    for at in range(0, min(len(value), _DUMPED_BYTES), _DUMP_WIDTH):
        part = value[at : at + _DUMP_WIDTH]
        text = "".join(chr(byte) if byte in _PRINTABLE else "." for byte in part)
        lines.append(f"{at:08x}  {part.hex(' '):<{3 * _DUMP_WIDTH - 1}}  {text}")
    left = len(value) - _DUMPED_BYTES
    return "\n".join(lines) + (f"\n… {left} more bytes" if left > 0 else "")
