"""The definition of a capacity report: its question, its answer, its columns and its own options.

Each report is a module of this package that defines `REPORT`; `registry` lists them. The command,
the HTTP API and the headline metrics are generated from the registry.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import duckdb
import orjson

from gpuledger.errors import ArgumentError
from gpuledger.texts import shorten
from gpuledger.time_ranges import DAYS, WholeUnit, parse_whole
from gpuledger_reports.pricing.policy import BillPolicy
from gpuledger_reports.reading.times import Window, time_text

T = TypeVar("T")
Row = dict[str, Any]
"""JSON values by column: text, numbers, lists or objects; `None` if unknown."""
Key = tuple[str | None, ...]
"""The value of each dimension of a group; `None` if unknown."""
GPU_DIMENSIONS: Final[Mapping[str, str]] = {
    "cluster": "cluster",
    "pool": "node_pool",
    "model": "model",
    "instance_type": "instance_type",
    "zone": "zone",
    "capacity_type": "capacity_type",
}
"""The column, in the views of usage, of each dimension of GPUs."""
_PERIOD: Final = ("period_begin", "period_end")
"""The columns of files for the time range, as in files of bills."""


def as_written(text: str, _: str) -> str:
    """Return the text of an option unchanged."""
    return text


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a report, for the command and for HTTP requests. Its value is given as text."""

    help: str
    default: str | None = None
    """The default as text. If it is `None`, the option's value is `None` by default."""
    parse: Callable[[str, str], Any] = as_written
    """Converts the text; the second argument is the option's name. Raises `ArgumentError`."""
    may_be_negative: bool = False
    is_file: bool = False
    """Whether the value is a path of a local file; HTTP requests cannot set it."""
    is_list: bool = False
    """Whether the command accepts it several times; a text has items separated by commas."""


def whole(
    unit: WholeUnit = DAYS, *, minimum: int = 1, maximum: int | None = None
) -> Callable[[str, str], int]:
    """Return a parser for a duration in whole units."""

    def parse(text: str, name: str) -> int:
        count = parse_whole(text, option=name, unit=unit, minimum=minimum)
        if maximum is not None and count > maximum:
            raise ArgumentError(name, f"{text!r} is longer than {maximum} {unit.name}")
        return count

    return parse


def one_of(*choices: str) -> Callable[[str, str], str]:
    """Return a parser that accepts only these texts."""

    def parse(text: str, name: str) -> str:
        if text not in choices:
            problem = f"invalid value {shorten(text, 40)!r}; give {' or '.join(choices)}"
            raise ArgumentError(name, problem)
        return text

    return parse


def split_items(text: str) -> list[str]:
    """Return the items of a list. A part without an equals sign belongs to the item before it.

    A value may thus contain commas, as in `team=Search, Ads,pool=training`.
    """
    found: list[str] = []
    for part in text.split(",") if text else ():
        if found and "=" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _ignore(_: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a report."""

    window: Window
    """Whole hours of complete usage."""
    by: tuple[str, ...]
    """Names of the report's dimensions."""
    policy: BillPolicy
    """The prices, teams and currency of costs."""
    where: Mapping[str, str] = field(default_factory=dict)
    """The value of each dimension by which rows are selected; an empty one means unknown."""
    complete: Window | None = None
    """The window of all complete usage, which contains `window`; `None` without usage."""
    top: int | None = None
    """Maximum number of rows, of each day if rows have one. `answer` applies it to sorted rows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The parsed value of each of the report's own options."""
    advance: Callable[[int], None] = _ignore
    """Called with the progress since the last call, in percent."""

    def selects(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the values of `where`."""
        return all((row[name] or "") == value for name, value in self.where.items())

    def each(self, items: Sequence[T]) -> Iterator[T]:
        """Yield items, and report progress after each, 100 percent in total."""
        for at, item in enumerate(items):
            yield item
            self.advance(100 * (at + 1) // len(items) - 100 * at // len(items))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The rows of a report, the most important first."""

    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    """Sentences for the user, such as which data is missing."""
    is_found: bool = True
    """Whether the report found something; if not, or without rows, the exit code is 4."""


def plain_cell(name: str, row: Mapping[str, Any]) -> str:
    """Format a value for the table. Columns `…_ratio` are shown in percent."""
    value = row[name]
    if value is None:
        return ""
    if name.endswith("_ratio"):
        return f"{100 * value:.3g} %"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def rounded_cell(name: str, row: Mapping[str, Any]) -> str:
    """Format a value for the table, with at most two decimals."""
    value = row[name]
    return plain_cell(name, {name: round(value, 2) if isinstance(value, float) else value})


@dataclass(frozen=True, kw_only=True)
class Report:
    """A capacity report. Amounts are GPUs or GPU-hours, unless a column's name has another unit."""

    name: str
    summary: str
    """One sentence."""
    about: str = ""
    """How to read the result, and how it is computed, in a few sentences."""
    examples: Mapping[str, str]
    """Titles, each with the arguments after `gpuledger capacity NAME --store STORE`."""
    columns: Mapping[str, str]
    """The columns after the dimensions, with headings. The table omits columns without one."""
    droppable: tuple[str, ...] = ()
    """The columns that a table omits if it is wider than the terminal, the first one first."""
    texts: frozenset[str] = frozenset({"note"})
    """The columns that are text; the others are numbers or times."""
    counts: frozenset[str] = frozenset()
    """The columns that are whole numbers."""
    dimensions: Mapping[str, str]
    """The names that `by` accepts, each with its SQL."""
    default_by: str
    has_by: bool = True
    """Whether the option `by` chooses the dimensions of rows."""
    default_window: str | None = "30d"
    """`None` for all complete usage."""
    has_money: bool = False
    """Whether the report has costs, which depend on prices."""
    options: Mapping[str, Option] = field(default_factory=dict)
    codes: tuple[str, str] = ("the report has rows", "nothing is found")
    """The meanings of exit codes 0 and 4."""
    cell: Callable[[str, Mapping[str, Any]], str] = plain_cell
    """Formats a value for the table, given the column's name and the row."""
    read: Callable[[duckdb.DuckDBPyConnection, Question], Answer]
    """Answers a question, given a connection with the store's views."""

    @property
    def has_prices(self) -> bool:
        """Whether the report depends on the price file, which has prices and teams."""
        return self.has_money or "team" in self.dimensions

    def parse_options(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Parse the report's own options; return the value of each, or its default."""
        return {
            name: None if text is None else option.parse(text, name)
            for name, option in self.options.items()
            for text in [given.get(name, option.default)]
        }

    def default_question(self, question: Question, *, by: tuple[str, ...] = ()) -> Question:
        """Return a question to this report for the same data, with the report's defaults."""
        return replace(
            question,
            window=question.window if self.default_window else question.complete or question.window,
            by=by or tuple(self.default_by.split(",")),
            top=None,
            where={},
            options=self.parse_options({}),
            advance=_ignore,
        )


def file_columns(report: Report, by: Iterable[str], rows: Iterable[Row]) -> dict[str, str]:
    """Return the DuckDB type of each column of `file_rows`. Times end with `_begin` or `_end`."""
    texts = report.texts | {name for row in rows for name in row if isinstance(row[name], str)}
    numbers = dict.fromkeys(report.columns, "DOUBLE") | dict.fromkeys(report.counts, "BIGINT")
    return {
        name: "TIMESTAMP WITH TIME ZONE"
        if name.endswith(("_begin", "_end"))
        else "DATE"
        if name == "day"
        else "VARCHAR"
        if name in by or name in texts
        else numbers[name]
        for name in (*by, *report.columns, *_PERIOD)
    }


def file_rows(question: Question, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows for CSV and Parquet, with the time range, and lists and objects as JSON."""
    period = dict(zip(_PERIOD, map(time_text, question.window), strict=True))
    for row in rows:
        yield {
            name: orjson.dumps(value).decode() if isinstance(value, list | dict) else value
            for name, value in (row | period).items()
        }


def json_content(report: Report, question: Question, found: Answer) -> dict[str, Any]:
    """Return the JSON object of an answer."""
    begin, end = map(time_text, question.window)
    return {
        "report": report.name,
        "from": begin,
        "to": end,
        "by": question.by,
        "rows": found.rows,
        "notes": found.notes,
    }
