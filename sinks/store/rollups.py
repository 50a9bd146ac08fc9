"""`usage_hourly` and `usage_daily`: the sums of the table below, by a longer period.

A `Rollup` recomputes what was touched since it last ran. Which hours those are, the commits of the
table below say themselves (`gpuledger.store.commits`); where one does not, or the history does not
reach back so far, it is all that there are. The rows of a touched period are replaced in one commit
(replaceWhere), so that a reader sees the old sums or the new ones, and a commit that is killed has
done nothing; the last commit has the version of the table below up to which all is summed up.

Of what the table below does not have any more, as its time was up (`purge`), nothing is recomputed:
rows that come so late are added to what is there. They are those of the snapshot that are not in
the one that was summed up before, and their commit has the version too, so that a run that is
killed and begun anew adds them once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final

import structlog
from arro3.core import Table
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from gpuledger.settings.secret import shown_url
from gpuledger.store.commits import describe, hours_of, valid_through_us
from gpuledger.store.schema import PARTITION_COLUMN, TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from sinks.store.damage import storage_errors
from sinks.store.table import StaleTableError, StreamTable

HOURS_A_DAY: Final = 24
_PURGED_BEFORE: Final = "gpuledger|purged_before"
_HISTORY: Final = 10_000
"""Commits that are looked through at most: a week of one each minute."""
_MARKS: Final = 100
"""Commits in which is looked for up to when the table is complete."""
_SUMS: Final = (
    "busy_ns",
    "measured_busy_ns",
    "memory_byte_ns",
    "measured_memory_byte_ns",
    "energy_millijoules",
    "measured_energy_millijoules",
    "held_ns",
    "silent_ns",
    "sm_active_ns",
    "tensor_active_ns",
    "dram_active_ns",
    "tick_count",
)
_AGGREGATES: Final[Mapping[str, str]] = {
    **dict.fromkeys(_SUMS, "sum"),
    "first_offset": "min",
    "last_offset": "max",
    "ingested_time_ns": "max",
}
_ADDS_ROWS: Final = "WRITE"
_PLACE: Final = (
    *("kafka_partition", "first_offset", "last_offset", PARTITION_COLUMN),
    *("cluster", "node"),
)
_GONE: Final = "not found"
"""What is said of a file of a former version that was removed as nobody needs it."""
_EPOCH: Final = date(1970, 1, 1)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Period:
    """What a rollup sums up, and into what."""

    source: TableSchema
    source_column: str
    target: TableSchema
    target_column: str
    hours: int
    """How many hours a period has."""


HOURLY: Final = Period(
    source=USAGE, source_column="minute", target=USAGE_HOURLY, target_column="hour", hours=1
)
DAILY: Final = Period(
    source=USAGE_HOURLY,
    source_column="hour",
    target=USAGE_DAILY,
    target_column="day",
    hours=HOURS_A_DAY,
)


def sums_sql(period: Period, relation: str, where: str) -> str:
    """Return the SQL of the rows of the upper table, of what is true of the lower one's."""
    unit = period.target_column
    selected, grouped = [], []
    for column in period.target.columns:
        name = column.name
        if name in _AGGREGATES:
            selected.append(f'{_AGGREGATES[name]}("{name}") AS "{name}"')
            continue
        # Quoted: `cluster` is a word of SQL's own there.
        value = f"date_trunc('{unit}', {period.source_column})" if name == unit else f'"{name}"'
        selected.append(f'{value} AS "{name}"')
        grouped.append(value)
    return (
        f"SELECT {', '.join(selected)} FROM {relation} WHERE {where}"  # noqa: S608  # no user's text
        f" GROUP BY {', '.join(grouped)}"
    )


def hours_sql(column: str, hours: Iterable[int]) -> str:
    """Return the SQL of whether a time begins one of these hours since 1970."""
    return " OR ".join(f"{column} = {_time_sql(hour)}" for hour in sorted(hours))


def _time_sql(hour: int) -> str:
    day, of_day = divmod(hour, HOURS_A_DAY)
    shown = f"{_EPOCH + timedelta(days=day)} {of_day:02}:00:00Z"
    return f"arrow_cast('{shown}', 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _day_sql(day: int) -> str:
    return f"'{_EPOCH + timedelta(days=day)}'"


class Rollup:
    """Keeps one table of sums in step with the table below."""

    def __init__(
        self,
        period: Period,
        *,
        store_uri: str,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        where: dict[str, Any] = {"store_uri": store_uri, "storage_options": storage_options}
        self._period = period
        self._source = StreamTable(period.source, **where)
        self._target = StreamTable(period.target, **where)
        self._summed = f"gpuledger|{period.source.name}"
        self._summed_late = f"{self._summed}|late"

    def run(self, *, time_ms: int) -> int:
        """Sum up what was touched since the last run; return how many periods that were.

        Raises StaleTableError where somebody else does the same, ReceiverUnavailableError where the
        storage does not answer.
        """
        with storage_errors(self._target.uri):
            try:
                return self._run(time_ms)
            except CommitFailedError as error:
                raise StaleTableError(f"store {self._target.uri}: {error}") from error

    def pending(self, touched_below: Iterable[int] = ()) -> set[int]:
        """Return the first hours of the periods that a run would sum up, and change nothing.

        `touched_below` are first hours of the lower table's periods that would be summed up before.
        Raises ReceiverUnavailableError where the storage does not answer.
        """
        hours = self._period.hours
        pending = {hour // hours * hours for hour in touched_below}
        # Neither table is opened where it is not there: that would make it.
        if not self._source.exists():
            return pending
        with storage_errors(self._target.uri):
            source, summed = self._source.open(), None
            if self._target.exists():
                summed = self._target.open().transaction_version(self._summed)
            if summed != source.version():
                pending |= self._touched(source, since=summed)
        return pending

    def purge(self, before_day: int, *, time_ms: int) -> int:
        """Remove the lower table's rows of days before this one; return how many files had some.

        Only what is summed up goes: rows that came since stay until that is done. Raises as `run`.
        """
        with storage_errors(self._source.uri):
            source = self._source.open()
            summed = self._target.open().transaction_version(self._summed)
            # What is not summed up yet would be lost: it goes with the run after next.
            if summed != source.version():
                return 0
            days = {part[PARTITION_COLUMN] for part in source.partitions()}
            bound = _EPOCH + timedelta(days=before_day)
            old = sorted(day for day in days if day < str(bound))
            if not old:
                return 0
            listed = " OR ".join(f"{PARTITION_COLUMN} = '{day}'" for day in old)
            # In the commit that removes them, so that nobody ever recomputes from what is left.
            purged = max(before_day, source.transaction_version(_PURGED_BEFORE) or 0)
            try:
                removed = source.delete(
                    listed,
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(_PURGED_BEFORE, purged, time_ms)]
                    ),
                )
            except CommitFailedError:
                return 0  # rows came in between: the next run sums them up first
            return int(removed["num_removed_files"])

    def _run(self, time_ms: int) -> int:
        source, target = self._source.open(), self._target.open()
        summed, version = target.transaction_version(self._summed), source.version()
        if summed == version:
            return 0
        # All below is of this snapshot: what is committed meanwhile is the next run's.
        touched = self._touched(source, since=summed)
        purged = source.transaction_version(_PURGED_BEFORE) or 0
        late = {hour for hour in touched if hour // HOURS_A_DAY < purged}
        marks = valid_through_us(source.history(_MARKS))
        valid_through = {"all": min(marks.values())} if marks else None
        if late and summed is not None:
            self._add_late(source, target, late, since=summed, time_ms=time_ms)
            target = self._target.open()
        # A commit a day, so that no more than a day's sums are held at once.
        by_day: dict[int, set[int]] = {}
        for hour in touched - late:
            by_day.setdefault(hour // HOURS_A_DAY, set()).add(hour)
        days: list[tuple[int, set[int]]] = sorted(by_day.items()) or [(0, set())]
        for day, hours in days:
            # The version goes with the last day: a run that is killed before does all days again,
            # which replaces them by the same.
            is_last = day == days[-1][0]
            done = [Transaction(self._summed, version, time_ms)] if is_last else []
            self._replace(source, target, day, hours, done=done, valid_through=valid_through)
        return len(touched)

    def _touched(self, source: DeltaTable, *, since: int | None) -> set[int]:
        """Return the first hours of the periods of which rows came since a version."""
        found: set[int] | None = set()
        # The first time there is nothing to go by but the rows themselves.
        if since is None or source.version() - since > _HISTORY:
            found = None
        else:
            commits = [
                commit
                for commit in source.history(source.version() - since)
                if commit["version"] > since
            ]
            if len(commits) < source.version() - since:
                found = None
            for commit in commits:
                # A compaction, a purge or a new column brings no rows.
                if found is None or commit.get("operation") != _ADDS_ROWS:
                    continue
                told = hours_of(commit)
                found = None if told is None else found | told
        if found is None:
            found = self._all_hours(source)
        length = self._period.hours
        return {hour // length * length for hour in found}

    def _all_hours(self, source: DeltaTable) -> set[int]:
        query = QueryBuilder().register("source", source)
        found = query.execute(
            f"SELECT DISTINCT date_trunc('hour', {self._period.source_column}) AS hour FROM source"  # noqa: S608  # no user's text
        ).read_all()
        return {int(time.timestamp()) // 3600 for time in found["hour"].to_pylist()}

    def _replace(
        self,
        source: DeltaTable,
        target: DeltaTable,
        day: int,
        hours: set[int],
        *,
        done: Sequence[Transaction],
        valid_through: Mapping[str, int] | None,
    ) -> None:
        """Replace the periods of a day in one commit."""
        column = self._period.source_column
        of_day = f"{PARTITION_COLUMN} = {_day_sql(day)}"
        begins = f"date_trunc('{self._period.target_column}', {column})"
        query = QueryBuilder().register("source", source)
        where = f"{of_day} AND ({hours_sql(begins, hours) or 'false'})"
        rows = query.execute(sums_sql(self._period, "source", where)).read_all()
        replaced = hours_sql(self._period.target_column, hours) or "false"
        write_deltalake(
            target,
            self._period.target.conform(rows),
            mode="overwrite",
            predicate=f"{of_day} AND ({replaced})",
            writer_properties=self._target.writer,
            commit_properties=CommitProperties(
                app_transactions=list(done),
                custom_metadata=describe(hours=hours, valid_through=valid_through),
            ),
        )

    def _add_late(
        self, source: DeltaTable, target: DeltaTable, late: set[int], *, since: int, time_ms: int
    ) -> None:
        """Add the rows of purged periods that came since a version."""
        version = source.version()
        # A run that was killed may have added those of a version that it has not summed up.
        since = max(since, target.transaction_version(self._summed_late) or 0)
        if since == version:
            return
        days = {hour // HOURS_A_DAY for hour in late}
        rows = self._rows_since(source, days, since=since)
        write_deltalake(
            target,
            self._period.target.conform(rows),
            mode="append",
            writer_properties=self._target.writer,
            commit_properties=CommitProperties(
                app_transactions=[Transaction(self._summed_late, version, time_ms)],
                custom_metadata=describe(hours=late),
            ),
        )

    def _rows_since(self, source: DeltaTable, days: set[int], *, since: int) -> Table:
        """Return the sums of the rows of purged days that came since a version."""
        # What is there now of a day that was purged since that version came after it was purged.
        # Of the others the rows of that version are left out, which may be gone as well.
        listed = {day: _day_sql(day) for day in sorted(days)}
        where = f"{PARTITION_COLUMN} IN ({', '.join(listed.values())})"
        sql = sums_sql(self._period, "source", where)
        query = QueryBuilder().register("source", source)
        try:
            before = self._source.open(version=since)
            purged = before.transaction_version(_PURGED_BEFORE) or 0
            if is_known := [sql for day, sql in listed.items() if day < purged]:
                of_known = f"{PARTITION_COLUMN} IN ({', '.join(is_known)})"
                former = f"(SELECT * FROM before WHERE {of_known}) AS former"  # noqa: S608  # no user's text
                is_same = " AND ".join(
                    f'former."{name}" = source."{name}"'
                    for name in (*_PLACE, self._period.source_column)
                )
                is_new = f"NOT EXISTS (SELECT 1 FROM {former} WHERE {is_same})"  # noqa: S608  # no user's text
                new = sums_sql(self._period, "source", f"{where} AND {is_new}")
                return query.register("before", before).execute(new).read_all()
        # DataFusion's errors have no class of their own.
        except Exception as error:
            if not isinstance(error, DeltaError) and _GONE not in str(error):
                raise
            # Cleaned up long ago: what is there of purged days came after they were purged.
            _log.info(
                "former_version_lost", url=shown_url(self._source.uri), error=str(error)[:300]
            )
        return query.execute(sql).read_all()
