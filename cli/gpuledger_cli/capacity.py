"""`gpuledger capacity`: the size, waste and future demand of a fleet of GPUs, from the store.

Each report in `gpuledger_reports.capacity.registry` is a command.
"""

import io
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from inspect import Parameter as SignatureParameter
from inspect import Signature
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TextIO

import duckdb
import orjson
from cyclopts import App, Parameter

from gpuledger.clock import NS_PER_US
from gpuledger.errors import ArgumentError, UserError
from gpuledger.settings.secret import shown_url
from gpuledger.texts import escaped
from gpuledger_cli.long_work import printing_progress, run_interruptible
from gpuledger_cli.option_help import epilogue
from gpuledger_cli.query import print_rows
from gpuledger_cli.store_arguments import (
    StorageOption,
    StoreUri,
    require_writable,
    storage_options_of,
    written,
)
from gpuledger_reports.capacity.asking import NO_HOURS, answer, ask, open_store, options_of
from gpuledger_reports.capacity.registry import REPORTS
from gpuledger_reports.capacity.report import (
    Answer,
    Question,
    Report,
    file_columns,
    file_rows,
    json_content,
    plain_cell,
)
from gpuledger_reports.presenting.output import as_csv, write_parquet
from gpuledger_reports.pricing.policy_file import read_policy
from gpuledger_reports.reading.times import time_text

_NOTHING: Final = 4
_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_LONG: Final = 24
"""If the options of an example have at least this many characters, they are on their own line."""
_REQUIRED: Final = SignatureParameter.empty
Text = str | None
Texts = tuple[str, ...]
Format = Literal["table", "json", "csv", "parquet"]
app = App(
    name="capacity",
    help_format="plaintext",
)


def _options_of(report: Report) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, type and default of each option of a report's command."""
    yield "store", StoreUri, _REQUIRED
    for name, option in options_of(report).items():
        own = Parameter(
            name=f"--{name.replace('_', '-')}",
            help=option.help,
            allow_leading_hyphen=option.may_be_negative,
            negative=(),
            show_default=False if option.is_list else None,
        )
        kind, default = (Texts, ()) if option.is_list else (Text, option.default)
        # `from` is a keyword of Python.
        yield f"{name}_" if name == "from" else name, Annotated[kind, own], default
    if report.has_prices:
        prices = "Price file (YAML) with prices and teams, as for `gpuledger bill`. The default is"
        prices += " example prices."
        yield "prices", Annotated[Path | None, Parameter(help=prices)], None
    yield "format", Annotated[Format, Parameter(help="Format of the result.")], "table"
    output = "File to write to instead of standard output; required for parquet."
    yield "output", Annotated[Path | None, Parameter(help=output)], None
    yield "storage_option", StorageOption, ()


def _add(report: Report, place: int) -> None:
    """Add the command of a report. `place` is its position in the list of commands."""

    def run(**given: Any) -> int:  # noqa: ANN401  # as in its signature
        return _run(report, **given)

    run.__signature__ = Signature(  # type: ignore[attr-defined]  # read by cyclopts
        [
            SignatureParameter(
                name, SignatureParameter.KEYWORD_ONLY, annotation=kind, default=default
            )
            for name, kind, default in _options_of(report)
        ]
    )
    command = f"gpuledger capacity {report.name} --store gpuledger-store"
    examples = {
        title: f"{command} {own}".rstrip() if len(own) < _LONG else f"{command} \\\n    {own}"
        for title, own in report.examples.items()
    }
    app.command(
        run,
        name=report.name,
        sort_key=place,
        help=report.summary,
        help_format="plaintext",
        help_epilogue=epilogue(
            report.about,
            examples=examples,
            codes={0: report.codes[0], _NOTHING: report.codes[1]},
        ),
    )


def _run(
    report: Report,
    *,
    store: str,
    storage_option: Sequence[str] = (),
    format: Format = "table",  # noqa: A002  # the option's name
    output: Path | None = None,
    prices: Path | None = None,
    **given: str | tuple[str, ...] | None,
) -> int:
    if format == "parquet" and output is None:
        raise UserError("--format parquet: missing --output; give the file to write")
    require_writable(output)
    policy = read_policy(prices).policy
    interrupted = threading.Event()

    def interrupt() -> None:
        interrupted.set()
        connection.interrupt()

    def advance(percent: int) -> None:
        # `connection.interrupt` stops only queries; other work stops here.
        if interrupted.is_set():
            raise KeyboardInterrupt
        show(percent)

    with (
        _naming_options(),
        duckdb.connect() as connection,
        printing_progress(100, what="percent", done="done") as show,
    ):
        complete = open_store(connection, store, storage_options_of(storage_option))
        question = ask(
            report,
            {
                name.rstrip("_"): text if isinstance(text, str) else ",".join(text)
                for name, text in given.items()
                if text is not None and text != ()
            },
            complete=complete,
            policy=policy,
            now_us=time.time_ns() // NS_PER_US,
            advance=advance,
        )
        found = run_interruptible(
            partial(answer, report, question, connection), interrupt=interrupt
        )
    if complete is None:
        sys.stderr.write(f"gpuledger: --store {shown_url(store)}: {NO_HOURS}\n")
    _write(report, question, found, format=format, output=output)
    return 0 if found.is_found else _NOTHING


@contextmanager
def _naming_options() -> Iterator[None]:
    """Convert errors to a UserError that names the option to change."""
    try:
        yield
    except ArgumentError as error:
        raise UserError(f"--{error.name.replace('_', '-')}: {error.problem}") from error
    except duckdb.OutOfMemoryException as error:
        raise UserError(f"{error}; give a shorter --window") from error


def _write(
    report: Report,
    question: Question,
    found: Answer,
    *,
    format: Format,  # noqa: A002  # the option's name
    output: Path | None,
) -> None:
    columns = file_columns(report, question.by, found.rows)
    if format == "parquet" and output is not None:
        with written(output) as path:
            write_parquet(columns, file_rows(question, found.rows), file=path)
    else:
        text = io.StringIO()
        file = text if output else sys.stdout
        if format == "json":
            content = json_content(report, question, found)
            file.write(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode() + "\n")
        elif format == "csv":
            file.write(as_csv([*columns], file_rows(question, found.rows)))
        else:
            _print_table(report, question, found, file)
        if output:
            with written(output) as path:
                path.write_text(text.getvalue(), encoding="utf-8")
    if format != "table":
        sys.stderr.writelines(f"gpuledger: {note}\n" for note in _notes(question, found))


def _notes(question: Question, found: Answer) -> Iterator[str]:
    """Yield each note as one printable line."""
    begin, end = map(time_text, question.window)
    for note in (f"Usage from {begin} to {end}.", *found.notes):
        yield escaped(note).replace("\n", "\\n")


def _print_table(report: Report, question: Question, found: Answer, file: TextIO) -> None:
    headings = {
        name: "GPU" if name == "gpu" else name.replace("_", " ").capitalize()
        for name in question.by
    }
    shown = {name: [plain_cell(name, row) for row in found.rows] for name in question.by}
    for name, heading in report.columns.items():
        cells = [report.cell(name, row) for row in found.rows]
        # Columns without any value are omitted, such as those of `--history`.
        if heading and any(cells):
            # Rows of the summary have different units.
            headings[name], shown[name] = heading, _aligned(cells) if report.dimensions else cells
    if found.rows:
        names = [*headings]
        omitted = print_rows(
            file,
            [*headings.values()],
            [*zip(*shown.values(), strict=True)],
            expanded=None,
            wrapped=[at for at, name in enumerate(names) if name in report.texts],
            droppable=[names.index(name) for name in report.droppable if name in names],
            right=[at for at, name in enumerate(names) if name in {*report.columns} - report.texts],
        )
        if omitted:
            file.write(
                f"Columns that do not fit: {', '.join(headings[names[at]] for at in omitted)}."
                " To see them, use --format csv, or append `| less -S`.\n"
            )
    elif not question.where:
        # With a selection, a note states that it has no rows.
        nothing = report.codes[1]
        file.write(f"{nothing[:1].upper()}{nothing[1:]}.\n")
    file.writelines(f"{note}\n" for note in _notes(question, found))


def _aligned(cells: list[str]) -> list[str]:
    """Return the numbers of a column with equal decimals and thousands separators."""
    if not all(map(_NUMBER.fullmatch, filter(None, cells))):
        return cells
    decimals = max(len(cell.partition(".")[2]) for cell in cells)
    return [f"{Decimal(cell):,.{decimals}f}" if cell else "" for cell in cells]


for _place, _report in enumerate(REPORTS.values()):
    _add(_report, _place)
