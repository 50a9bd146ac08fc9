"""Every log line follows docs/reference/log-events.md; from `warning` on it has a row there."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "reference" / "log-events.md").read_text()
PACKAGES: Final = ("agent", "enricher", "sinks", "reports", "gpuledger", "cli", "simulator")
QUIET: Final = {"debug", "info"}
UNITS: Final = ("_count", "_seconds", "_bytes")
# Past tenses that do not end in -ed.
PAST: Final = frozenset(
    [
        "begun",
        "found",
        "held",
        "hung",
        "leapt",
        "lost",
        "read",
        "seen",
        "sent",
        "set",
        "torn",
        "undone",
        "withdrawn",
    ]
)
# Python's own keys of a log record.
OWN: Final = {"exc_info", "stack_info"}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A call that writes a log line."""

    place: str
    level: str
    event: str
    keys: tuple[str, ...]
    call: ast.Call


def _lines() -> Iterator[Line]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and _is_of_a_logger(node.func):
                    yield _line(node, f"{file.relative_to(ROOT)}:{node.lineno}")


def _is_of_a_logger(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "_log"
    )


def _line(call: ast.Call, place: str) -> Line:
    assert isinstance(call.func, ast.Attribute)
    event = call.args[-1]
    assert isinstance(event, ast.Constant), f"{place}: an event must be a string literal"
    assert isinstance(event.value, str)
    keys = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
    return Line(place=place, level=call.func.attr, event=event.value, keys=keys, call=call)


LINES: Final = list(_lines())
BY_PLACE: Final = pytest.mark.parametrize("line", LINES, ids=lambda line: line.place)


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in table[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


SHARED_KEYS: Final = {name for row in rows("Shared keys") for name in names(row[0])}
EVENTS: Final = {name for row in rows("Events from warning on") for name in names(row[0])}


@BY_PLACE
def test_an_event_is_a_noun_and_a_verb_in_the_past_tense(line: Line) -> None:
    assert re.fullmatch(r"[a-z]+(_[a-z]+)+", line.event)
    verb = line.event.rpartition("_")[2]
    assert verb.endswith("ed") or verb in PAST


@BY_PLACE
def test_a_key_is_a_word_in_snake_case(line: Line) -> None:
    assert not [key for key in line.keys if not re.fullmatch(r"[a-z]+(_[a-z]+)*", key)]


@BY_PLACE
def test_the_text_of_an_exception_is_under_error(line: Line) -> None:
    message = {
        keyword.arg
        for keyword in line.call.keywords
        if isinstance(keyword.value, ast.Call)
        and isinstance(keyword.value.func, ast.Name)
        and keyword.value.func.id in {"str", "repr"}
        and isinstance(keyword.value.args[0], ast.Name)
        and keyword.value.args[0].id in {"error", "end"}
    }

    assert message <= {"error"}


def test_a_key_of_several_events_is_in_the_table_or_ends_in_its_unit() -> None:
    events = defaultdict(set)
    for line in LINES:
        for key in line.keys:
            events[key].add(line.event)
    shared = {key for key, found in events.items() if len(found) > 1}

    assert not {key for key in shared - SHARED_KEYS - OWN if not key.endswith(UNITS)}


def test_every_event_from_warning_on_has_a_row_and_every_row_an_event() -> None:
    loud = {line.event for line in LINES if line.level not in QUIET}

    assert sorted(loud) == sorted(EVENTS)


def test_every_log_line_that_a_page_names_exists() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"\b(?:log line|warning,)\s+`([a-z]+(?:_[a-z]+)+)`", pages))

    assert named
    assert not named - {line.event for line in LINES}


def test_every_module_names_its_logger_log() -> None:
    """Our lines all go through `_log`; the tests above would not see any others."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    others = [
        file
        for file in files
        if "get_logger(" in (text := file.read_text())
        and "_log = structlog.get_logger(__name__)" not in text
    ]

    assert others == []
