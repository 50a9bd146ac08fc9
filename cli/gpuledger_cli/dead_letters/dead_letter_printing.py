"""Prints dead letters: the newest ones as a table or lines, or all of them while they are read."""

import heapq
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuledger.bus.protocol import Bus
from gpuledger_cli.dead_letters.dead_letter_log import DeadLetterFilter, DeadLetterLog
from gpuledger_cli.dead_letters.dead_letter_views import (
    TABLE_COLUMNS,
    DeadLetterCount,
    DeadLetterCounts,
    DeadLetterRow,
    cells_of,
    csv_line,
    json_line,
)

Format = Literal["table", "json", "csv"]
_WIDTH_IN_FILES: Final = 240


class DeadLetterPrinter:
    """Prints rows of dead letters.

    Without a limit, it prints each row when the row is added. With a limit, it prints only the
    newest rows, when it is closed.
    """

    def __init__(self, *, format: Format, limit: int) -> None:  # noqa: A002  # the option's name
        """Take the format and the maximum number of rows; 0 means no limit, but not for tables."""
        self._format, self._limit = format, limit
        self._newest: list[DeadLetterRow] = []
        self._count = 0
        if format == "csv":
            _print_line(csv_line(DeadLetterRow.__struct_fields__))

    def add(self, row: DeadLetterRow) -> None:
        """Print a row at once if there is no limit; otherwise keep it if it is among the newest."""
        self._count += 1
        if self._limit == 0:
            self._print_row(row)
        elif len(self._newest) < self._limit:
            heapq.heappush(self._newest, row)
        else:
            heapq.heappushpop(self._newest, row)

    def close(self) -> None:
        """Print the remaining rows, the newest last, and report how many were left out."""
        rows = sorted(self._newest)
        if self._format == "table":
            _print_table(TABLE_COLUMNS, map(cells_of, rows))
        else:
            for row in rows:
                self._print_row(row)
        if self._limit and self._count > self._limit:
            sys.stderr.write(
                f"gpuledger: the newest {self._limit} of {self._count} dead-letter records;"
                " --limit shows more\n"
            )

    def _print_row(self, row: DeadLetterRow) -> None:
        is_json = self._format == "json"
        cells = [getattr(row, field) for field in row.__struct_fields__]
        _print_line(json_line(row) if is_json else csv_line(cells))


def print_counts(counts: DeadLetterCounts, *, format: Format) -> None:  # noqa: A002  # as above
    """Print a row for each combination of values."""
    rows = list(counts.rows())
    if format == "json":
        for row in rows:
            _print_line(json_line(row))
        return
    columns = (*counts.fields, "count", "first", "last")
    cells = map(_cells_of_count, rows)
    if format == "table":
        _print_table(columns, cells)
        return
    for line in (columns, *cells):
        _print_line(csv_line(line))


def _cells_of_count(row: DeadLetterCount) -> tuple[str, ...]:
    return (*row.group.values(), str(row.count), row.first_time, row.last_time)


@asynccontextmanager
async def open_log(history: Bus, wanted: DeadLetterFilter) -> AsyncIterator[DeadLetterLog]:
    """Open the log; report at the end how many records were not dead letters."""
    async with history.reader() as reader:
        log = await DeadLetterLog.open(reader, history.topics.dead_letters.name, wanted)
        yield log
    if log.unusable:
        sys.stderr.write(
            f"gpuledger: {log.unusable} records of {log.topic} are not dead-letter records\n"
        )


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        # As Text, because rich would parse brackets in a record as a style.
        table.add_row(*(Text(" ".join(cell.split())) for cell in row))
    # Files have no width, and Rich's default of 80 columns would cut the names.
    Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILES).print(table)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
