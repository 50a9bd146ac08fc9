"""Runs a capacity report: parses the options of the command or request, and reads the store.

Invalid options raise `ArgumentError`, which names the option or parameter.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import duckdb

from gpuledger.errors import ArgumentError
from gpuledger.store.object_files import is_object_store
from gpuledger.store.query import relation
from gpuledger.store.usage_schema import USAGE_HOURLY
from gpuledger.store.views import create_views, valid_through
from gpuledger.texts import find_near, shorten
from gpuledger.time_ranges import HOURS, RANGE_FORMS, TIME_FORMS, is_duration, parse_whole
from gpuledger_reports.capacity.impossible import (
    leave_out_impossible,
    note_on_counted_twice,
    notes_on_impossible,
)
from gpuledger_reports.capacity.report import Answer, Option, Question, Report, Row, split_items
from gpuledger_reports.pricing.periods import bill_window, parse_window
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.times import HOUR_US, Window, time_text
from gpuledger_reports.reading.usage_sums import StoreReadError

_MAX_DIGITS: Final = 18
_WINDOW_FORMS: Final = RANGE_FORMS.replace("until now", "until the end of complete usage")
NO_HOURS: Final = (
    "usage_hourly has no complete hour yet, because usage has not been summed up or its first hour"
    " has not ended; run `gpuledger store maintain`"
)
"""The error message if there is no complete usage."""


def options_of(report: Report) -> dict[str, Option]:
    """Return the options of a report's command by name."""
    days = report.default_window and report.default_window.removesuffix("d")
    default = f"the last {days} days of complete usage" if days else "all complete usage"
    window = f"Time range, by default {default}. Range (UTC): {_WINDOW_FORMS}."
    begin = "Start of the time range instead of --window, a whole hour"
    end = "End of the time range (exclusive), by default the end of complete usage"
    found = {
        "window": Option(help=window),
        "from": Option(help=f"{begin}. Time: {TIME_FORMS}.", may_be_negative=True),
        "to": Option(help=f"{end}. Time: {TIME_FORMS}.", may_be_negative=True),
    }
    names = ", ".join(report.dimensions)
    if report.dimensions and report.has_by:
        by = f"Dimensions, separated by commas: {names}."
        found["by"] = Option(help=by, default=report.default_by)
    if report.dimensions:
        keys = "a dimension" if report.has_by else f"one of {names}"
        where = f"Selects rows: KEY=VALUE, separated by commas; KEY is {keys}."
        found["where"] = Option(help=where, is_list=True)
        top = "Number of rows to show, the most important first"
        top += "; with --history, of each day." if "history" in report.options else "."
        found["top"] = Option(help=top)
    return found | dict(report.options)


def parameters_of(report: Report) -> dict[str, Option]:
    """Return the options that HTTP requests may give, by name."""
    return {name: each for name, each in options_of(report).items() if not each.is_file}


def open_store(
    connection: duckdb.DuckDBPyConnection, store: str, options: Mapping[str, str] | None = None
) -> Window | None:
    """Create the store's views; return the window of complete hourly usage, if any.

    Raises `UserError` if the store does not exist, and `StoreReadError` if reading it fails.
    """
    # DuckDB would show the progress of long queries on standard output.
    connection.execute("SET enable_progress_bar = false")
    # Reports read the same files many times. Files on disk are in the operating system's cache.
    keeps_files = is_object_store(store)
    connection.execute(
        f"SET parquet_metadata_cache = true; SET enable_external_file_cache = {keeps_files}"
    )
    with _reading():
        files = create_views(connection, store, options)[USAGE_HOURLY.name]
        leave_out_impossible(connection)
        if not files:
            return None
        # From the files, because the view would join descriptions.
        limits = f"SELECT epoch_us(min(hour)), epoch_us(max(hour)) FROM {relation(files)}"  # noqa: S608  # quoted files
        ((begin_us, newest_us),) = connection.sql(limits).fetchall()
    complete = valid_through(store, USAGE_HOURLY.name, options)
    # The newest hour may be incomplete, unless a mark includes it.
    end_us = newest_us
    if complete is not None:
        end_us = min(newest_us + HOUR_US, round(complete.timestamp()) * 10**6 // HOUR_US * HOUR_US)
    # The first hour may have usage of only a part, which bills contain, too.
    return Window(begin_us, end_us) if begin_us < end_us else None


def ask(
    report: Report,
    given: Mapping[str, str],
    *,
    complete: Window | None,
    policy: BillPolicy,
    now_us: int,
    advance: Callable[[int], None],
) -> Question:
    """Parse the options of a report; `given` has their texts by name.

    `complete` is the window of complete usage, as returned by `open_store`.
    """
    return Question(
        window=_window(report, given, complete=complete, now_us=now_us),
        by=_dimensions(report, given.get("by", report.default_by)),
        where=_where(report, given.get("where", "")),
        policy=policy,
        top=_top(given["top"]) if "top" in given else None,
        options=report.parse_options(given),
        complete=complete,
        advance=advance,
    )


def answer(report: Report, question: Question, connection: duckdb.DuckDBPyConnection) -> Answer:
    """Return a report's answer, with at most `top` rows.

    The report also groups by the dimensions of `where`, so selecting rows never splits a sum.

    Raises `StoreReadError` if reading fails, and DuckDB's error if memory runs out.
    """
    added = [name for name in question.where if name not in question.by]
    with _reading():
        found = report.read(connection, replace(question, by=(*question.by, *added)))
        impossible = notes_on_impossible(connection, question.window)
        twice = note_on_counted_twice(connection, question.window)
        found = replace(found, notes=[*found.notes, *impossible, *twice])
    rows = [row for row in found.rows if question.selects(row)]
    if question.top is not None:
        rows = [*_first_of_days(rows, question.top)]
    if hidden := {*added} - report.columns.keys():
        rows = [{name: row[name] for name in row if name not in hidden} for row in rows]
    notes = [*_selection(report, question, is_empty=not rows), *found.notes]
    if rows and report.has_money and question.policy == read_policy(None).policy:
        notes.append("Costs are at built-in example prices; give a price file.")
    return Answer(rows=rows, notes=notes, is_found=found.is_found and bool(rows))


def _first_of_days(rows: Iterable[Row], number: int) -> Iterator[Row]:
    """Yield the first rows of each day, or of all rows if they have no days."""
    seen = Counter[str | None]()
    for row in rows:
        seen[row.get("day")] += 1
        if seen[row.get("day")] <= number:
            yield row


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except duckdb.OutOfMemoryException:
        raise
    except duckdb.Error as error:
        raise StoreReadError(f"cannot read the store: {error}") from error


def _window(
    report: Report, given: Mapping[str, str], *, complete: Window | None, now_us: int
) -> Window:
    known = complete or Window(0, now_us // HOUR_US * HOUR_US)
    times = {name: given[name] for name in ("from", "to") if name in given}
    text = given.get("window", None if times else report.default_window)
    if text is not None and times:
        raise ArgumentError("window", "conflicts with from and to; give either, not both")
    if text is None:
        asked = bill_window(times, now_us=now_us, complete_until_us=lambda: known.end_us) or known
    elif is_duration(text):
        hours = parse_whole(text, option="window", unit=HOURS, minimum=1)
        asked = Window(known.end_us - hours * HOUR_US, known.end_us)
    else:
        asked = parse_window(text, option="window", now_us=now_us)
    window = Window(max(asked.begin_us, known.begin_us), min(asked.end_us, known.end_us))
    if window.begin_us >= window.end_us:
        begin, end = map(time_text, known)
        raise ArgumentError(
            "from" if times else "window",
            f"has no complete usage; give a time between {begin} and {end}",
        )
    return window


def _dimensions(report: Report, by: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in by.split(",") if name.strip()))
    if not report.dimensions:
        return ()
    if not names:
        raise ArgumentError("by", f"empty; choose from {', '.join(report.dimensions)}")
    for name in names:
        _require_dimension(report, name, option="by")
    return names


def _require_dimension(report: Report, name: str, *, option: str) -> None:
    if name not in report.dimensions:
        near = find_near(name, report.dimensions)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(report.dimensions)}"
        raise ArgumentError(option, f"unknown dimension {shorten(name, 40)!r}; {hint}")


def _where(report: Report, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in split_items(text):
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals:
            raise ArgumentError("where", f"invalid value {shorten(item, 40)!r}; give KEY=VALUE")
        _require_dimension(report, name, option="where")
        if name in found:
            raise ArgumentError("where", f"{name} is given twice; give one value")
        found[name] = value
    return found


def _selection(report: Report, question: Question, *, is_empty: bool) -> Iterator[str]:
    if question.where:
        shown = ", ".join(f"{name}={shorten(value, 80)}" for name, value in question.where.items())
        hint = f" Group by {', '.join(question.where)} to see all values." if report.has_by else ""
        yield (
            f"No row has {shown}.{hint}"
            if is_empty
            else f"Only rows with {shown}. The following notes may be about all rows."
        )


def _top(text: str) -> int:
    # Python converts at most 4,300 digits.
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS and int(text)):
        raise ArgumentError(
            "top", f"invalid value {shorten(text, 40)!r}; give a whole number from 1"
        )
    return int(text)
