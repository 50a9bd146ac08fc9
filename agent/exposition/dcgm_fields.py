"""The table of DCGM's fields that this node can answer, and the list that chooses among them.

`dcgm_fields.csv` beside this module is the table; it is searched by either of a field's names. The
list is in dcgm-exporter's format: `FIELD, gauge|counter|label, help`. Every mistake in it is named
by file, line and reason. A field that DCGM has and this agent has not is no mistake: it is skipped,
said and counted.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import structlog

from agent.exposition.device import Read, read_at
from agent.metrics import COUNTERS_SKIPPED
from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file
from gpuledger.texts import find_near, shorten, shorten_middle

Kind = Literal["gauge", "counter", "label"]
_log = structlog.get_logger(__name__)
_KINDS: Final = get_args(Kind)
_COLUMNS: Final = 3
_SHOWN_CHARACTERS: Final = 80
FILE: Final = Path(__file__).with_name("dcgm_fields.csv")
NAMES_FILE: Final = Path(__file__).with_name("dcgm_names.txt")
MULTI_SERIES_UNIT: Final = "multi_series"
"""The unit of a field with several series of a device."""
_SAME: Final = "="
_OF_MEMORY: Final = {
    "reading.memory_used_bytes",
    "reading.memory_total_bytes",
    "reading.memory_reserved_bytes",
    "derived.memory_free_bytes",
    "derived.memory_used_ratio",
}


class Field(NamedTuple):
    """One field of DCGM's."""

    old: str
    """The name that it has had until DCGM 4.5, under which dcgm-exporter shows it."""
    new: str
    """The name that it has since DCGM 4.6."""
    kind: Kind
    """What dcgm-exporter's own list makes of it."""
    is_default: bool
    """Whether dcgm-exporter's own list shows it."""
    help: str
    """The help text of that list."""
    path: str
    """Where its value stands: part and field of a device."""
    unit: str
    """The unit in which DCGM gives it, or empty where the record has the same."""
    read: Read
    """Reads its value."""

    @property
    def is_text(self) -> bool:
        """Whether its value is a text, which can only be a label."""
        return self.unit == "text"

    @property
    def is_of_memory(self) -> bool:
        """Whether it tells of a memory, which compute instances of one GPU instance share."""
        return self.path in _OF_MEMORY


@cache
def all_fields() -> tuple[Field, ...]:
    """Return the table in its order."""
    with FILE.open(newline="") as lines:
        rows = csv.reader(line for line in lines if not line.startswith("#"))
        return tuple(
            Field(
                old=old,
                new=old if new == _SAME else new,
                kind=kind,  # type: ignore[arg-type]  # a test holds the file to the kinds
                is_default=default == "on",
                help=help_text,
                path=path,
                unit=unit,
                read=read_at(path, unit),
            )
            for old, new, kind, default, help_text, path, unit in rows
        )


def find_field(name: str) -> Field | None:
    """Find a field by its old or its new name."""
    return next((field for field in all_fields() if name in (field.old, field.new)), None)


def is_dcgm_name(name: str) -> bool:
    """Return whether DCGM, or dcgm-exporter, has a field of this name, be it ours or not."""
    return name in _read_names()


def nearest_name(name: str) -> str | None:
    """Return the name of DCGM's most like `name`; `None` if none is like it."""
    return find_near(name, sorted(_read_names()))


def _read_names() -> frozenset[str]:
    """Read all of DCGM's names; not kept, as only a list with a name that is not ours asks."""
    lines = NAMES_FILE.read_text(encoding="ascii").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


class Counter(NamedTuple):
    """One line of the list: a field, as what it is shown, and its help text."""

    field: Field
    """The field."""
    kind: str
    """`gauge`, `counter` or `label`."""
    help: str
    """The help text."""


def default_counters() -> tuple[Counter, ...]:
    """Return what dcgm-exporter shows without a file."""
    return tuple(
        Counter(field, field.kind, field.help) for field in all_fields() if field.is_default
    )


_MAX_BYTES: Final = 1024 * 1024
"""Of the file: DCGM's own list is 15 KiB."""


def read_counters(path: Path) -> tuple[Counter, ...]:
    """Read a list, and warn of the lines that are skipped.

    Raises `UserError` naming file, line and reason.
    """
    try:
        text = read_small_file(path, max_bytes=_MAX_BYTES).decode()
    except OSError as error:
        raise UserError(
            f"exposition.counters_file: cannot read {path}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"exposition.counters_file: {path} is no UTF-8 text") from error
    skipped: list[str] = []
    counters = tuple(parse_counters(text.splitlines(), name=str(path), skip=skipped.append))
    COUNTERS_SKIPPED.set(len(skipped))
    if skipped:
        _log.warning("counters_skipped", file=str(path), fields=skipped)
    return counters


def parse_counters(
    lines: Iterable[str], *, name: str, skip: Callable[[str], None]
) -> Iterator[Counter]:
    """Yield the counters of a list called `name`; raises `UserError`.

    `skip` is told each field that DCGM has and this agent has not.
    """
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            counter = _parse(line)
            if isinstance(counter, str):
                skip(counter)
                continue
            if counter.field.old in seen:
                raise ValueError(f"{counter.field.old} is in the list twice")  # noqa: TRY301  # all named below
        except (ValueError, csv.Error) as error:
            raise UserError(f"{name}:{number}: {shorten_middle(str(error))}") from error
        seen.add(counter.field.old)
        yield counter


def _parse(line: str) -> Counter | str:
    """Return the counter of a line, or the name of a field that only DCGM has."""
    cells = [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True, strict=True))]
    if len(cells) != _COLUMNS:
        raise ValueError(
            f"expected 3 columns (field, type, help), got {len(cells)};"
            " a help text with commas needs double quotes"
        )
    name, kind, help_text = cells
    if kind not in _KINDS:
        raise ValueError(
            f"{_shorten(name)}: expected one of {', '.join(_KINDS)}, got {_shorten(kind)!r}"
        )
    field = find_field(name)
    if field is None and is_dcgm_name(name):
        return name
    if field is None:
        nearest = nearest_name(name)
        hint = f"; the nearest is {nearest}" if nearest else ""
        raise ValueError(f"DCGM has no field {_shorten(name)!r}{hint}")
    if field.is_text and kind != "label":
        raise ValueError(f"{name} is a text: its type can only be label, got {kind!r}")
    if field.unit == MULTI_SERIES_UNIT and kind == "label":
        raise ValueError(f"{name} has several values: its type cannot be label")
    return Counter(field, kind, help_text)


def _shorten(cell: str) -> str:
    """Return as much of a cell as a message quotes: a quote that is never closed takes lines in."""
    return shorten(cell, _SHOWN_CHARACTERS)
