"""`gpuledger query`: SQL over all tables of a store."""

import csv
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import duckdb
import orjson
from cyclopts import Parameter
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from gpuledger.errors import UserError
from gpuledger.settings.secret import shown_url
from gpuledger.store.confinement import confine, parse_question
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.store.views import create_views
from gpuledger_cli.store_arguments import (
    StorageOption,
    StoreUri,
    require_writable,
    storage_options_of,
    written,
)

_WIDTH_IN_FILES: Final = 10_000
_ROWS_AT_ONCE: Final = 10_000
Format = Literal["table", "csv", "json", "parquet"]


def query(
    sql: Annotated[str, Parameter(help="What to ask, in DuckDB's SQL.")],
    /,
    *,
    store: StoreUri,
    format: Annotated[Format, Parameter(help="How to show what is found.")] = "table",  # noqa: A002  # the option's name
    output: Annotated[
        Path | None, Parameter(help="File to write to instead of standard output.")
    ] = None,
    storage_option: StorageOption = (),
) -> int:
    """Ask the store in SQL. Each table is a view, with readable units and names joined to it.

    The tables: usage, usage_hourly, usage_daily, entries, pods, nodes, namespaces, inventory,
    incidents, gaps and bill_lines. One statement that gives rows is answered, and reads no other
    file. Whole numbers stay whole; of JSON and CSV, decimals are written with all their digits.
    """
    # Bytes on a terminal help nobody, and Parquet is written from its end.
    if format == "parquet" and output is None:
        raise UserError("--format parquet: give the file to write as --output FILE")
    require_writable(output)
    with duckdb.connect() as connection:
        try:
            files = create_views(connection, store, storage_options_of(storage_option))
            with written(output) if output else nullcontext() as file:
                confine(connection, files, written=file and file.absolute())
                # What was looked at is what runs, and not the text once more.
                found = connection.sql(parse_question(connection, sql))
                _hint(sql, files, store)
                if format == "json":
                    _require_names(found.columns)
                # Few rows are Python's at a time.
                rows = chain.from_iterable(iter(partial(found.fetchmany, _ROWS_AT_ONCE), []))
                if format == "parquet":
                    found.write_parquet(str(file))
                elif file is None:
                    _write(sys.stdout, format, found.columns, rows)
                else:
                    with file.open("w", encoding="utf-8", newline="") as text:
                        _write(text, format, found.columns, rows)
        except duckdb.Error as error:
            raise UserError(f"the store refuses the SQL: {error}") from error
    return 0


def _require_names(columns: Sequence[str]) -> None:
    """Raise UserError where two columns have one name, of which an object has one value."""
    if twice := [name for name, count in Counter(columns).items() if count > 1]:
        raise UserError(
            f"--format json: several columns are called {', '.join(twice)}; give them names of"
            " their own, with AS"
        )


def _hint(sql: str, files: Mapping[str, Sequence[str]], store: str) -> None:
    """Say how sums come to be where a query asks for some that nobody has made yet."""
    for table in (USAGE_HOURLY.name, USAGE_DAILY.name):
        if re.search(rf"\b{table}\b", sql) and files[USAGE.name] and not files[table]:
            sys.stderr.write(
                f"gpuledger: {table} has no rows yet, as nobody has summed up {USAGE.name}:"
                f" `gpuledger store maintain --store {shown_url(store)}` does, and so does a"
                " running `gpuledger sink store`\n"
            )


def _write(file: Any, format: Format, columns: Sequence[str], rows: Iterable[Any]) -> None:  # noqa: ANN401, A002  # a text file; the option's name
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
        # Texts: what stands in brackets would be taken for a style.
        table = Table(*(Column(Text(name)) for name in columns), safe_box=True)
        for row in rows:
            table.add_row(*[Text("" if value is None else str(_shown(value))) for value in row])
        # In a file or a pipe nothing is cut off.
        Console(file=file, width=None if file.isatty() else _WIDTH_IN_FILES).print(table)


def _shown(value: object) -> object:
    """Return a value as text has it: decimals with all their digits, whole numbers as such."""
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
    # In quotes: a text may have a comma.
    return repr(value) if isinstance(value, str) else str(_shown(value))


def _whole(value: object) -> object:
    """Return a value as JSON can have it: numbers of any size, also within lists and structs."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return orjson.Fragment(str(value))
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _whole(each) for name, each in value.items()}
    return value
