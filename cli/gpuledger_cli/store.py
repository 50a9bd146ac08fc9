"""`gpuledger store`: what a store needs from time to time, done once."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuledger.clock import SystemClock
from gpuledger.errors import UserError
from gpuledger.settings.secret import shown_url
from gpuledger.store.schema import ENTRIES, TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger_cli.store_arguments import StorageOption, StoreUri, storage_options_of
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import StoreRetentionSettings, StoreSettings
from gpuledger_sinks.store.maintainer import (
    Maintainer,
    MaintenanceDone,
    MaintenanceStep,
    Reporter,
    report_nothing,
)
from gpuledger_sinks.store.table import StreamTable

_HELD: Final = 1
_DEFAULTS: Final = StoreSettings()
_WIDTH_IN_FILES: Final = 100

app = App(name="store", help="Maintain the tables of a store.")


def days_of(table: TableSchema) -> Parameter:
    """Return the option that says for how long a table keeps its rows."""
    return Parameter(
        help=f"For how many days {table.name} keeps its rows; 0 is for ever.",
        validator=Number(gte=0),
    )


@app.command
def maintain(
    *,
    store: StoreUri,
    storage_option: StorageOption = (),
    dry_run: Annotated[
        bool, Parameter(help="Say what would be done, and change nothing.", negative=())
    ] = False,
    orphan_age_hours: Annotated[
        int,
        Parameter(
            help="How old a file must be that no version of its table has any more, or never had,"
            " before it is removed; far more than a write or a reader's query takes.",
            validator=Number(gte=1),
        ),
    ] = _DEFAULTS.orphan_age_hours,
    usage_days: Annotated[int, days_of(USAGE)] = _DEFAULTS.retention.usage_days,
    usage_hourly_days: Annotated[
        int, days_of(USAGE_HOURLY)
    ] = _DEFAULTS.retention.usage_hourly_days,
    usage_daily_days: Annotated[int, days_of(USAGE_DAILY)] = _DEFAULTS.retention.usage_daily_days,
    entries_days: Annotated[int, days_of(ENTRIES)] = _DEFAULTS.retention.entries_days,
    verbose: Annotated[
        bool,
        Parameter(help="Name each step as it begins, also where it finds nothing.", negative=()),
    ] = False,
) -> int:
    """Sum up hours and days, remove what is too old, merge small files, and vacuum; once.

    Give the days of the sink's settings (store.retention). Exit code 1 where somebody else is at
    it, 2 where there is no store or the storage does not answer.
    """
    try:
        settings = StoreSettings(
            uri=store,
            storage_options=storage_options_of(storage_option),
            orphan_age_hours=orphan_age_hours,
            retention=StoreRetentionSettings(
                usage_days=usage_days,
                usage_hourly_days=usage_hourly_days,
                usage_daily_days=usage_daily_days,
                entries_days=entries_days,
            ),
        )
    except ValueError as error:
        raise UserError(f"--store: {error}") from error
    try:
        _require_store(settings)
        maintainer = Maintainer(settings, clock=SystemClock(), vacuums=True)
        with _reporting(verbose=verbose) as report:
            done = maintainer.plan(report) if dry_run else maintainer.run(report)
    except ReceiverUnavailableError as error:
        raise UserError(str(error)) from error
    shown = shown_url(store)
    if done.held is not None:
        line = f"somebody else maintains {shown} ({done.held.holder}, until {done.held.until})"
        sys.stderr.write(f"{line}\n" if dry_run else f"{line}: nothing was done\n")
    if dry_run or done.held is None:
        _print_done(done, title="Would be done" if dry_run else "Done")
    if done.lost_to_another is not None:
        sys.stderr.write(f"somebody else maintains {shown} too, and goes on with the rest\n")
    # A plan that is of a store in somebody's hands is a plan all the same.
    is_done = done.held is None and done.lost_to_another is None
    return 0 if dry_run or is_done else _HELD


def _require_store(settings: StoreSettings) -> None:
    """Raise UserError where there is no store: a mistyped address shall not become one."""
    tables = [
        StreamTable(schema, store_uri=settings.uri, storage_options=settings.storage_options)
        for schema in (USAGE, ENTRIES)
    ]
    if not any(table.exists() for table in tables):
        raise UserError(
            f"no store at {shown_url(settings.uri)}; give the store.uri of a `gpuledger-sink store`"
            " that has written there"
        )


@contextmanager
def _reporting(*, verbose: bool) -> Iterator[Reporter]:
    """Say which step is under way: a line each, or on a terminal one line that is written over."""
    if verbose:
        yield _print_step
    elif sys.stderr.isatty():
        # On standard error, as results go to standard output.
        terminal = Console(stderr=True)
        with Live(console=terminal, transient=True, auto_refresh=False) as line:
            yield lambda *step: line.update(Text(_title(*step)), refresh=True)
    else:
        yield report_nothing


def _print_step(number: int, total: int, step: MaintenanceStep) -> None:
    sys.stderr.write(f"gpuledger: {_title(number, total, step)}\n")
    sys.stderr.flush()


def _title(number: int, total: int, step: MaintenanceStep) -> str:
    return f"{number} of {total}: {step.action} ({step.table})"


def _print_done(done: MaintenanceDone, *, title: str) -> None:
    """Print a row for each step that had something to do."""
    # What was looked at and needed nothing is not in it: on most runs that is nearly every step.
    table = Table("step", "table", title, safe_box=True)
    for step in done.steps:
        if step.count:
            table.add_row(step.action, step.table, f"{step.count} {step.unit}")
    if not table.row_count:
        table.add_row("nothing to do", "", "")
    width = None if sys.stdout.isatty() else _WIDTH_IN_FILES
    Console(file=sys.stdout, width=width).print(table)
