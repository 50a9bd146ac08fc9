"""`gpuledger store`: maintains a store."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

from cyclopts import App, Parameter
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpuledger.clock import SystemClock
from gpuledger.errors import UserError
from gpuledger.settings.secret import shown_url
from gpuledger.store.query import no_store
from gpuledger.store.schema import ENTRIES, TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger.time_ranges import DAYS, HOURS, parse_whole, write_duration
from gpuledger_cli.option_help import (
    duration_option,
    epilogue,
    limits,
    parse_seconds,
)
from gpuledger_cli.store_arguments import StorageOption, StoreUri, storage_options_of
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.store.maintainer import (
    Maintainer,
    MaintenanceDone,
    MaintenanceSettings,
    MaintenanceStep,
    Reporter,
    Retention,
    report_nothing,
)
from gpuledger_sinks.store.table import StreamTable

_LOST: Final = 1
_DEFAULT_AGE_HOURS: Final = MaintenanceSettings(uri="").orphan_age_hours
_RETENTION: Final = Retention()
_END_SECONDS: Final = 8.0
"""How long the current step may take after the process is asked to end."""
_WIDTH_IN_FILES: Final = 100

app = App(name="store", help_format="plaintext")


def retention_option(table: TableSchema) -> Parameter:
    """Return the command-line option for a table's retention."""
    return duration_option(
        f"How long {table.name} keeps its rows, in whole days; 0d keeps them all", forms=DAYS.forms
    )


@app.command(
    help_epilogue=epilogue(
        "Run it every ten minutes: with --every, or in a CronJob.",
        examples={
            "Once": "gpuledger store maintain --store s3://ledger/gpuledger",
            "Every ten minutes until SIGTERM": "gpuledger store maintain --every 10m",
            "What would it do?": "gpuledger store maintain --dry-run",
        },
        codes={
            1: "another maintainer is running and does the rest",
            2: "no store there, the storage is unavailable, or invalid input",
        },
    )
)
def maintain(
    *,
    store: StoreUri,
    storage_option: StorageOption = (),
    every: Annotated[
        str | None, duration_option("Repeat at this interval until SIGTERM", forms=limits(1))
    ] = None,
    dry_run: Annotated[
        bool, Parameter(help="Print what would be done and change nothing.", negative=())
    ] = False,
    orphan_age: Annotated[
        str,
        duration_option(
            "Minimum age of unreferenced files to remove, in whole hours; keep it far longer than"
            " a write or a query takes",
            forms=HOURS.forms,
        ),
    ] = write_duration(_DEFAULT_AGE_HOURS * HOURS.ms),
    usage_retention: Annotated[str, retention_option(USAGE)] = f"{_RETENTION.usage_days}d",
    usage_hourly_retention: Annotated[
        str, retention_option(USAGE_HOURLY)
    ] = f"{_RETENTION.usage_hourly_days}d",
    usage_daily_retention: Annotated[
        str, retention_option(USAGE_DAILY)
    ] = f"{_RETENTION.usage_daily_days}d",
    entries_retention: Annotated[str, retention_option(ENTRIES)] = f"{_RETENTION.entries_days}d",
    verbose: Annotated[
        bool,
        Parameter(help="Print each step as it begins, even if it has nothing to do.", negative=()),
    ] = False,
) -> int:
    """Sum up hours and days, remove old rows, merge small files, and vacuum."""
    settings = MaintenanceSettings(
        uri=store,
        storage_options=storage_options_of(storage_option),
        orphan_age_hours=parse_whole(orphan_age, option="--orphan-age", unit=HOURS, minimum=1),
        retention=Retention(
            usage_days=parse_whole(usage_retention, option="--usage-retention", unit=DAYS),
            usage_hourly_days=parse_whole(
                usage_hourly_retention, option="--usage-hourly-retention", unit=DAYS
            ),
            usage_daily_days=parse_whole(
                usage_daily_retention, option="--usage-daily-retention", unit=DAYS
            ),
            entries_days=parse_whole(entries_retention, option="--entries-retention", unit=DAYS),
        ),
    )
    if every is None:
        return _maintain(
            Maintainer(settings, clock=SystemClock()), settings, dry_run=dry_run, verbose=verbose
        )
    if dry_run:
        raise UserError("--dry-run and --every: give only one of them")
    _Repeated(settings, every_seconds=parse_seconds(every, option="--every", minimum=1)).run()
    return 0


def _maintain(
    maintainer: Maintainer, settings: MaintenanceSettings, *, dry_run: bool, verbose: bool
) -> int:
    try:
        _require_store(settings)
        with _reporting(verbose=verbose) as report:
            done = maintainer.plan(report) if dry_run else maintainer.run(report)
    except ReceiverUnavailableError as error:
        raise UserError(str(error)) from error
    _print_done(done, title="Would be done" if dry_run else "Done")
    if done.lost_to_another is None:
        return 0
    shown = shown_url(settings.uri)
    sys.stderr.write(f"another maintainer of {shown} runs at the same time; it does the rest\n")
    return _LOST


class _Repeated:
    """Maintains a store at an interval until a signal ends it."""

    def __init__(self, settings: MaintenanceSettings, *, every_seconds: float) -> None:
        self._settings, self._every_seconds = settings, every_seconds
        self._maintainer = Maintainer(settings, clock=SystemClock())
        self._is_ending = False
        self._changed = threading.Event()
        self._defect: BaseException | None = None

    def run(self) -> None:
        """Run until SIGTERM or SIGINT, and return at most ten seconds later."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        while not self._is_ending:
            begun = time.monotonic()
            # In a daemon thread, because a step may block for longer than _END_SECONDS.
            once = threading.Thread(target=self._once, daemon=True)
            once.start()
            self._changed.wait()
            once.join(_END_SECONDS)
            if self._defect is not None:
                raise self._defect
            if not self._is_ending:
                self._changed.clear()
                self._changed.wait(max(0.0, begun + self._every_seconds - time.monotonic()))
                self._changed.clear()

    def _once(self) -> None:
        try:
            _maintain(self._maintainer, self._settings, dry_run=False, verbose=False)
        except UserError as error:
            # The store may not exist yet or the storage may be unavailable; the next run tries
            # again.
            sys.stderr.write(f"gpuledger: {error}\n")
        except BaseException as error:  # noqa: BLE001  # raised in the main thread
            self._defect = error
        finally:
            self._changed.set()

    def _end(self) -> None:
        self._is_ending = True
        self._maintainer.stop()
        self._changed.set()


def _require_store(settings: MaintenanceSettings) -> None:
    """Raise UserError if there is no store, so that a mistyped URI does not create one."""
    tables = [
        StreamTable(schema, store_uri=settings.uri, storage_options=settings.storage_options)
        for schema in (USAGE, ENTRIES)
    ]
    if not any(table.exists() for table in tables):
        raise no_store(settings.uri, "no store at")


@contextmanager
def _reporting(*, verbose: bool) -> Iterator[Reporter]:
    """Yield a function that reports a step: in a line of its own, or in one line that changes."""
    if verbose:
        yield _print_step
    elif sys.stderr.isatty():
        # On standard error, because results go to standard output.
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
    """Print a row for each step that changed something."""
    # In most runs nearly every step has nothing to do, and gets no row.
    table = Table("step", "table", title, safe_box=True)
    for step in done.steps:
        if step.count:
            # All units are plurals.
            unit = step.unit.removesuffix("s") if step.count == 1 else step.unit
            table.add_row(step.action, step.table, f"{step.count} {unit}")
    if not table.row_count:
        table.add_row("nothing to do", "", "")
    width = None if sys.stdout.isatty() else _WIDTH_IN_FILES
    Console(file=sys.stdout, width=width).print(table)
