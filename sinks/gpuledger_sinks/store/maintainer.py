"""The work of `gpuledger store maintain`: everything that a store needs except new rows.

`Maintainer` runs steps, each for one table: it sums up hours and days, removes rows older than
their retention, merges small files, and removes files that no reader or writer needs. A run may be
killed at any time; the next run continues. If two runs overlap and make the same change, Delta
rejects the later commit, and that run stops.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog

from gpuledger.clock import NS_PER_DAY, NS_PER_MS, Clock
from gpuledger.settings.secret import shown_url
from gpuledger.store.bill_table import BILL_LINES
from gpuledger.store.schema import ENTRIES, GAPS, PODS, SEEN_TICKS, TableSchema
from gpuledger.store.usage_schema import (
    INCIDENTS,
    INVENTORY,
    NAMESPACES,
    NODES,
    PENDING_PODS,
    USAGE,
    USAGE_DAILY,
    USAGE_HOURLY,
)
from gpuledger_sinks.store.compaction import compact, is_compaction_safe, small_files
from gpuledger_sinks.store.rollups import DAILY, HOURLY, Rollup
from gpuledger_sinks.store.table import StaleTableError, StreamTable

PARTITIONED: Final = (USAGE, USAGE_HOURLY, USAGE_DAILY, ENTRIES)
_OTHERS: Final = (PODS, PENDING_PODS, NODES, NAMESPACES, INVENTORY, INCIDENTS, GAPS)
_OWN: Final = (BILL_LINES, SEEN_TICKS)
"""Tables whose small files are not merged here."""
ALL_TABLES: Final = (*PARTITIONED, *_OTHERS, *_OWN)
"""All tables that a store may have, including those that sinks no longer write."""
SUM_UP: Final = "sum up"
REMOVE_OLD_ROWS: Final = "remove old rows"
MERGE: Final = "merge small files"
VACUUM: Final = "vacuum"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How long each table keeps its rows, in UTC days; 0 keeps all rows."""

    usage_days: int = 92
    """Days for which sums by minute are kept. The sums by hour are kept longer."""
    usage_hourly_days: int = 1_096
    """Days for which sums by hour are kept, three years by default. The sums by day are kept
    longer."""
    usage_daily_days: int = 0
    """Days for which sums by day are kept."""
    entries_days: int = 31
    """Days for which the rows of single ticks are kept, if they are stored."""


@dataclass(frozen=True, kw_only=True)
class MaintenanceSettings:
    """Which store to maintain, and how long its rows and files are kept."""

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    orphan_age_hours: int = 168
    """Minimum age at which a file that belongs to no version of its table is removed. Must be much
    longer than a write or a query may take."""
    retention: Retention = Retention()


@dataclass(frozen=True, kw_only=True)
class MaintenanceStep:
    """One action for one table."""

    action: str
    table: str
    unit: str
    """The unit of the counts, such as files or hours."""
    do: Callable[[], int] = field(repr=False)
    """Runs the action; returns the number of units changed."""
    count_due: Callable[[], int] = field(repr=False)
    """Returns the number of units that would change, without changing anything."""


@dataclass(frozen=True, kw_only=True)
class StepDone:
    """The result of a step."""

    action: str
    table: str
    unit: str
    count: int


Reporter = Callable[[int, int, MaintenanceStep], None]
"""Called right before each step with its number (from 1), the number of steps, and the step."""


@dataclass
class MaintenanceDone:
    """The steps that a run of the maintainer did, or would do."""

    steps: list[StepDone] = field(default_factory=list)
    lost_to_another: str | None = None
    """The error that showed that another run does the remaining steps; `None` if all were done."""


def report_nothing(number: int, total: int, step: MaintenanceStep) -> None:
    """Report nothing; the default of `run` and `plan`."""


class Maintainer:
    """Maintains the tables of a store. All methods block and must be called in a thread."""

    def __init__(self, settings: MaintenanceSettings, *, clock: Clock) -> None:
        """Maintain the store of the settings; `clock` decides which rows are too old."""
        self._settings, self._clock = settings, clock
        self._where: dict[str, Any] = {
            "store_uri": settings.uri,
            "storage_options": settings.storage_options,
        }
        self._hourly = Rollup(HOURLY, **self._where)
        self._daily = Rollup(DAILY, **self._where)
        self._is_safe: bool | None = None
        self._is_stopping = threading.Event()

    def stop(self) -> None:
        """Stop a run after its current step, or after the day that it is merging.

        May be called from any thread.
        """
        self._is_stopping.set()

    def run(self, report: Reporter = report_nothing) -> MaintenanceDone:
        """Run all steps; return the steps that were done.

        Raises ReceiverUnavailableError if the storage does not answer.
        """
        done = MaintenanceDone()
        try:
            # All steps are listed first, so that their number is known. Tables that the steps
            # create need neither a merge nor a vacuum yet.
            steps = list(self._steps())
            for number, step in enumerate(steps, start=1):
                if self._is_stopping.is_set():
                    break
                report(number, len(steps), step)
                done.steps.append(_done(step, step.do()))
        except StaleTableError as error:
            # Another run made the same change; it also does the remaining steps.
            done.lost_to_another = str(error)
        return done

    def plan(self, report: Reporter = report_nothing) -> MaintenanceDone:
        """Return what a run would do now, without changing anything.

        Each step is planned for the store as it is now, without the changes of earlier steps. Only
        the sums by day include the hours that would be summed up first. Raises
        ReceiverUnavailableError if the storage does not answer.
        """
        done = MaintenanceDone()
        steps = list(self._steps())
        for number, step in enumerate(steps, start=1):
            report(number, len(steps), step)
            done.steps.append(_done(step, step.count_due()))
        return done

    def _steps(self) -> Iterator[MaintenanceStep]:
        # The order matters: days are made from hours, and only summed rows may be removed.
        yield from self._sums()
        yield from self._retention()
        yield from self._merges()
        yield from self._vacuum()

    def _sums(self) -> Iterator[MaintenanceStep]:
        hourly, daily = self._hourly, self._daily
        for rollup, table, unit, count_due in (
            (hourly, USAGE_HOURLY, "hours", lambda: len(hourly.pending())),
            (daily, USAGE_DAILY, "days", lambda: len(daily.pending(hourly.pending()))),
        ):
            do = partial(rollup.run, time_ms=self._clock.time_ns() // NS_PER_MS)
            yield MaintenanceStep(
                action=SUM_UP, table=table.name, unit=unit, do=do, count_due=count_due
            )

    def _retention(self) -> Iterator[MaintenanceStep]:
        """Yield the steps that remove old rows; summed tables keep rows that are not summed yet."""
        retention, now_ns = self._settings.retention, self._clock.time_ns()
        today, time_ms = now_ns // NS_PER_DAY, now_ns // NS_PER_MS
        for schema, days, rollup in (
            (USAGE, retention.usage_days, self._hourly),
            (USAGE_HOURLY, retention.usage_hourly_days, self._daily),
            (USAGE_DAILY, retention.usage_daily_days, None),
            (ENTRIES, retention.entries_days, None),
        ):
            if not days:
                continue
            table, bound = StreamTable(schema, **self._where), today - days
            yield MaintenanceStep(
                action=REMOVE_OLD_ROWS,
                table=schema.name,
                unit="files",
                do=partial(table.remove_days_before, bound)
                if rollup is None
                else partial(rollup.purge, bound, time_ms=time_ms),
                count_due=partial(table.count_files_before, bound),
            )

    def _merges(self) -> Iterator[MaintenanceStep]:
        # Tested once per process, because the result depends only on the installed deltalake.
        if self._is_safe is None:
            self._is_safe = is_compaction_safe()
        if not self._is_safe:
            _log.warning("compaction_refused", url=shown_url(self._settings.uri))
            return
        for schema in (*PARTITIONED, *_OTHERS):
            table = StreamTable(schema, **self._where)
            if table.exists():
                yield MaintenanceStep(
                    action=MERGE,
                    table=schema.name,
                    unit="files",
                    do=partial(self._merge, table, schema),
                    count_due=partial(_count_small_files, table, schema),
                )

    def _merge(self, table: StreamTable, schema: TableSchema) -> int:
        merged = 0
        for day in small_files(table, schema):
            if self._is_stopping.is_set():
                break
            merged += compact(table, day)
        return merged

    def _vacuum(self) -> Iterator[MaintenanceStep]:
        hours = self._settings.orphan_age_hours
        for schema in ALL_TABLES:
            table = StreamTable(schema, **self._where)
            if table.exists():
                yield MaintenanceStep(
                    action=VACUUM,
                    table=schema.name,
                    unit="files",
                    do=partial(table.remove_orphans, older_than_hours=hours),
                    count_due=partial(table.count_orphans, older_than_hours=hours),
                )


def _done(step: MaintenanceStep, count: int) -> StepDone:
    return StepDone(action=step.action, table=step.table, unit=step.unit, count=count)


def _count_small_files(table: StreamTable, schema: TableSchema) -> int:
    return sum(small_files(table, schema).values())
