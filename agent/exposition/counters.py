"""The list of metrics to show, in dcgm-exporter's format: `FIELD, gauge|counter|label, help`.

Here a file is read, and every mistake in it named by file, line and reason. A field that DCGM has
and this agent has not is no mistake: it is skipped, said and counted.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, get_args

import structlog

from agent.exposition.fields import (
    SEVERAL_UNIT,
    Field,
    Kind,
    all_fields,
    find_field,
    is_dcgms,
    nearest_name,
)
from agent.metrics import COUNTERS_SKIPPED
from gpuledger.decode_errors import shorten, shorten_middle
from gpuledger.errors import UserError
from gpuledger.small_files import read_small_file

_log = structlog.get_logger(__name__)
_COLUMNS: Final = 3
_KINDS: Final = get_args(Kind)
_SHOWN_CHARACTERS: Final = 80
_MAX_BYTES: Final = 1024 * 1024
"""Of the file: DCGM's own list is 15 KiB."""


class Counter(NamedTuple):
    """One line of the list: a field, as what it is shown, and its help text."""

    field: Field
    """The field."""
    kind: str
    """`gauge`, `counter` or `label`."""
    meaning: str
    """The help text."""


def default_counters() -> tuple[Counter, ...]:
    """Return what dcgm-exporter shows without a file."""
    return tuple(
        Counter(field, field.kind, field.meaning) for field in all_fields() if field.is_default
    )


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
    name, kind, meaning = cells
    if kind not in _KINDS:
        raise ValueError(
            f"{_shorten(name)}: expected one of {', '.join(_KINDS)}, got {_shorten(kind)!r}"
        )
    field = find_field(name)
    if field is None and is_dcgms(name):
        return name
    if field is None:
        raise ValueError(_unknown(name))
    if field.is_text and kind != "label":
        raise ValueError(f"{name} is a text: its type can only be label, got {kind!r}")
    if field.unit == SEVERAL_UNIT and kind == "label":
        raise ValueError(f"{name} has several values: its type cannot be label")
    return Counter(field, kind, meaning)


def _unknown(name: str) -> str:
    nearest = nearest_name(name)
    shown = f"DCGM has no field {_shorten(name)!r}"
    return f"{shown}; the nearest is {nearest}" if nearest else shown


def _shorten(cell: str) -> str:
    """Return as much of a cell as a message quotes: a quote that is never closed takes lines in."""
    return shorten(cell, _SHOWN_CHARACTERS)
