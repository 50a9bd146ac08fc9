"""`gpuledger query`: runs SQL on all tables of a store."""

import csv
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import duckdb
import orjson
from cyclopts import App, Parameter
from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gpuledger.errors import UserError
from gpuledger.settings.secret import shown_url
from gpuledger.store.confinement import confine, parse_question
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import create_views
from gpuledger.texts import escaped
from gpuledger_cli.long_work import run_interruptible
from gpuledger_cli.option_help import epilogue
from gpuledger_cli.store_arguments import (
    StorageOption,
    StoreUri,
    require_writable,
    storage_options_of,
    written,
)

_ANY_WIDTH: Final = 1_000_000_000
_ROWS_AT_ONCE: Final = 10_000
_WRAPPED: Final = 16
"""The minimum width of a column that is wrapped."""
Format = Literal["table", "csv", "json", "parquet"]


app = App(
    name="query",
    help_format="plaintext",
    help_epilogue=epilogue(
        "Views: usage, usage_hourly, usage_daily, entries, pods, pending_pods, nodes, namespaces,"
        " inventory, incidents, gaps and bill_lines. `DESCRIBE usage` lists the columns of one."
        " Only one statement that returns rows is accepted, and it cannot read other files.",
        examples={
            "Busy GPU seconds by namespace": (
                'gpuledger query --store gpuledger-store "SELECT namespace, sum(busy_seconds)\n'
                "    FROM usage_hourly WHERE category = 'pod' GROUP BY ALL\""
            ),
            "One line per column": (
                "gpuledger query --store gpuledger-store --expanded \\\n"
                '    "FROM incidents ORDER BY time DESC LIMIT 3"'
            ),
            "For a spreadsheet": (
                'gpuledger query --store gpuledger-store "FROM usage_daily" \\\n'
                "    --format csv --output usage.csv"
            ),
        },
    ),
)


@app.default
def query(
    sql: Annotated[str, Parameter(help="One statement in DuckDB's SQL.")],
    /,
    *,
    store: StoreUri,
    format: Annotated[Format, Parameter(help="Format of the result.")] = "table",  # noqa: A002  # the option's name
    expanded: Annotated[
        bool | None,
        Parameter(
            help="Print a line for each column instead of one for each row; by default if rows are"
            " wider than the terminal.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, Parameter(help="File to write to instead of standard output.")
    ] = None,
    storage_option: StorageOption = (),
) -> int:
    """Query the store in SQL, with names and readable units."""
    if expanded is not None and format != "table":
        raise UserError(f"--expanded: only for --format table, not {format}")
    # Parquet is binary, and its writer must seek.
    if format == "parquet" and output is None:
        raise UserError("--format parquet: missing --output; give the file to write")
    require_writable(output)
    with duckdb.connect() as connection:
        try:
            files = create_views(connection, store, storage_options_of(storage_option))
            with written(output) if output else nullcontext() as file:
                confine(connection, files, written=file and file.absolute())
                # Run the statement that was checked, and do not parse the text again.
                question = parse_question(connection, sql)
                run = partial(run_interruptible, interrupt=connection.interrupt)
                found = run(partial(connection.sql, question))
                _hint(sql, files, store)
                if format == "json":
                    _require_names(found.columns)
                # Only a batch of rows is in Python's memory at a time.
                fetch = partial(found.fetchmany, _ROWS_AT_ONCE)
                rows = chain.from_iterable(iter(partial(run, fetch), []))
                if format == "parquet":
                    run(partial(found.write_parquet, str(file)))
                elif file is None:
                    _write(sys.stdout, format, found.columns, rows, expanded=expanded)
                else:
                    with file.open("w", encoding="utf-8", newline="") as text:
                        _write(text, format, found.columns, rows, expanded=expanded)
        except duckdb.Error as error:
            raise UserError(f"cannot run the query: {error}") from error
    return 0


def _require_names(columns: Sequence[str]) -> None:
    """Raise UserError if columns share a name, because a JSON object would keep only one."""
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise UserError(
            f"--format json: duplicate column names: {', '.join(twice)}; rename them with AS"
        )


def _hint(sql: str, files: Mapping[str, Sequence[str]], store: str) -> None:
    """Write a hint if a query reads hourly or daily sums that do not exist yet."""
    for table in (USAGE_HOURLY.name, USAGE_DAILY.name):
        if re.search(rf"\b{table}\b", sql) and files[USAGE.name] and not files[table]:
            sys.stderr.write(
                f"gpuledger: {table} has no rows yet, because {USAGE.name} has not been summed up;"
                f" run `gpuledger store maintain --store {shown_url(store)}`\n"
            )


def _write(
    file: Any,  # noqa: ANN401  # a text file
    format: Format,  # noqa: A002  # the option's name
    columns: Sequence[str],
    rows: Iterable[Any],
    *,
    expanded: bool | None,
) -> None:
    if format == "json":
        before = "[\n  "
        for row in rows:
            found = dict(zip(columns, map(_whole, row), strict=True))
            text = orjson.dumps(found, default=_shown, option=orjson.OPT_INDENT_2).decode()
            file.write(before + text.replace("\n", "\n  "))
            before = ",\n  "
        file.write("[]\n" if before.startswith("[") else "\n]\n")
    elif format == "csv":
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_shown(value) for value in row] for row in rows)
    else:
        cells = [["" if value is None else str(_shown(value)) for value in row] for row in rows]
        print_rows(file, columns, cells, expanded=expanded)


def print_rows(
    file: Any,  # noqa: ANN401  # a text file
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    expanded: bool | None,
    width: int | None = None,
    wrapped: Collection[int] = (),
    droppable: Sequence[int] = (),
    right: Collection[int] = (),
) -> list[int]:
    """Print rows as a table, or one line per value if the table is wider than the terminal.

    `expanded` chooses one of the two forms; `None` chooses by width. A table that is too wide first
    wraps the columns `wrapped`, and then omits columns of `droppable`, in this order; the omitted
    ones are returned. Columns `right` are aligned to the right. Values are never cut. In a file or
    a pipe, the table is as wide as its values require. Control characters are escaped, because a
    terminal would obey them.
    """
    # As Text, because rich would parse brackets in a string as a style.
    texts = [[Text(escaped(cell)) for cell in row] for row in rows]
    console = Console(file=file, width=width)
    limit = console.width if width is not None or file.isatty() else _ANY_WIDTH
    widths = [
        max(cell_len(line) for cell in column for line in cell.plain.split("\n"))
        for column in zip(map(Text, columns), *texts, strict=True)
    ]
    widths = [min(each, _WRAPPED) if at in wrapped else each for at, each in enumerate(widths)]
    # With the borders and the spaces around each value.
    excess, omitted = sum(widths) + 3 * len(widths) + 1 - limit, list[int]()
    for at in droppable:
        if excess > 0:
            omitted.append(at)
            excess -= widths[at] + 3
    if rows and (excess > 0 if expanded is None else expanded):
        _print_expanded(console, columns, texts)
        return []
    kept = [at for at in range(len(columns)) if at not in omitted]
    table = Table(
        *(
            Column(
                Text(columns[at]),
                justify="right" if at in right else "left",
                no_wrap=at not in wrapped,
                min_width=widths[at],
                # Without it, words that are longer than a line are cut.
                overflow="fold",
            )
            for at in kept
        ),
        safe_box=True,
    )
    for row in texts:
        table.add_row(*(row[at] for at in kept))
    shown = Console(file=file, width=_ANY_WIDTH if excess > 0 else limit)
    shown.print(table, soft_wrap=True)
    return omitted


def _print_expanded(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[Text]]
) -> None:
    name_width = max(map(cell_len, columns))
    for number, row in enumerate(rows, start=1):
        head = f"-[ RECORD {number} ]"
        console.print(Text(head.ljust(name_width + 1, "-") + "+-"), soft_wrap=True)
        for name, cell in zip(columns, row, strict=True):
            label = name + " " * (name_width - cell_len(name)) + " | "
            # The other lines of a value are aligned below its first one.
            before = [label, *[" " * name_width + " | "] * cell.plain.count("\n")]
            for text, line in zip(before, cell.split("\n", allow_blank=True), strict=True):
                console.print(Text(text).append_text(line), soft_wrap=True)


def _shown(value: object) -> object:
    """Return a value for text output; decimals keep all digits, integers stay integers."""
    match value:
        case Decimal():
            return f"{value:f}"
        case list():
            return f"[{', '.join(_shown_within(each) for each in value)}]"
        case dict():
            pairs = (f"{name!r}: {_shown_within(each)}" for name, each in value.items())
            return f"{{{', '.join(pairs)}}}"
        case None | int() | float():
            return value
        case _:
            return str(value)


def _shown_within(value: object) -> str:
    # In quotes, because a text may contain a comma.
    return repr(value) if isinstance(value, str) else str(_shown(value))


def _whole(value: object) -> object:
    """Return a value that can be written as JSON, even if it contains integers above 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value))
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _whole(each) for name, each in value.items()}
    return value
