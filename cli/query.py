"""`gpuledger query`: SQL over all tables of a store."""

import csv
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import duckdb
import orjson
from cyclopts import Parameter
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from cli.store_arguments import (
    StorageOption,
    StoreUri,
    require_writable,
    storage_options_of,
    written,
)
from gpuledger.errors import UserError
from gpuledger.store.views import create_views

_WIDTH_IN_FILES: Final = 10_000
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
    incidents, gaps and bill_lines, as far as there are any. Whole numbers stay whole; of JSON and
    CSV, decimals are written with all their digits.
    """
    # Bytes on a terminal help nobody, and Parquet is written from its end.
    if format == "parquet" and output is None:
        raise UserError("--format parquet: give the file to write as --output FILE")
    require_writable(output)
    with duckdb.connect() as connection:
        try:
            create_views(connection, store, storage_options_of(storage_option))
            found = connection.sql(sql)
            if found is None:
                raise UserError("the SQL gives no rows: begin it with SELECT, FROM, WITH or SHOW")
            if format == "parquet" and output is not None:
                with written(output) as file:
                    found.write_parquet(str(file))
                return 0
            columns, rows = found.columns, found.fetchall()
        except duckdb.Error as error:
            raise UserError(f"the store refuses the SQL: {error}") from error
    if output is None:
        _write(sys.stdout, format, columns, rows)
        return 0
    with written(output) as file, file.open("w", encoding="utf-8", newline="") as text:
        _write(text, format, columns, rows)
    return 0


def _write(file: Any, format: Format, columns: Sequence[str], rows: Sequence[Any]) -> None:  # noqa: ANN401, A002  # a text file; the option's name
    if format == "json":
        objects = [dict(zip(columns, map(_whole, row), strict=True)) for row in rows]
        file.write(orjson.dumps(objects, default=_shown, option=orjson.OPT_INDENT_2).decode())
        file.write("\n")
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
