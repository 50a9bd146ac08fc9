"""`usage_hourly` and `usage_daily`: the sums of the table below, by a longer period.

A `Rollup` recomputes what was touched since it last ran. Which hours those are, the commits of the
table below say themselves (`gpuledger.store.commits`); where one does not, or the history does not
reach back so far, it is all that there are. The rows of a touched period are replaced in one commit
(replaceWhere), so that a reader sees the old sums or the new ones, and a commit that is killed has
done nothing; the last commit has the version of the table below up to which all is summed up, when
that version was made, and up to when each partition is complete with it. A table below that was
repaired has another commit of that number, or none: then all that there is is recomputed.

Of what the table below does not have any more, as its time was up (`purge`), nothing is recomputed:
rows that come so late are added to what is there. They are those of the snapshot that are not in
the one that was summed up before, and their commit has the version too, so that a run that is
killed and begun anew adds them once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final

import structlog
from arro3.core import Table
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from gpuledger.settings.secret import shown_url
from gpuledger.store.commits import (
    ALL,
    MARKED_COMMITS,
    PURGED_BEFORE,
    describe,
    hours_since,
    latest_commits,
    latest_marks,
    made_ms,
    marks_of_partitions,
    summed_time,
    summed_up_to,
)
from gpuledger.store.schema import PARTITION_COLUMN, TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger_sinks.store.damage import storage_errors
from gpuledger_sinks.store.table import StaleTableError, StreamTable

HOURS_A_DAY: Final = 24
_HISTORY: Final = 10_000
"""Commits that are looked through at most: a week of one each minute."""
_HUGE: Final = 2**47
"""Amounts beyond, 39 hours in nanoseconds, are made up: 65,536 of them may not fit into 64 bits."""
_HUGE_BYTE_TIME: Final = 10**33
_BYTE_TIMES: Final = frozenset({"memory_byte_ns", "measured_memory_byte_ns"})
_SUMS: Final = (
    "busy_ns",
    "measured_busy_ns",
    "memory_byte_ns",
    "measured_memory_byte_ns",
    "energy_millijoules",
    "measured_energy_millijoules",
    "allocated_ns",
    "unresponsive_ns",
    "sm_active_ns",
    "tensor_active_ns",
    "dram_active_ns",
    "sample_count",
)
_AGGREGATES: Final[Mapping[str, str]] = {
    **dict.fromkeys(_SUMS, "sum"),
    "first_offset": "min",
    "last_offset": "max",
    "ingested_time_ns": "max",
}
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


def sums_sql(
    period: Period, relation: str, where: str, *, has: Collection[str] | None = None
) -> str:
    """Return the SQL of the rows of the upper table, of what is true of the lower one's.

    Rows with an amount that somebody has made up stay rows of their own, so that no sum is more
    than its column holds. `has` are the columns that the lower table has, all where absent; a sum
    of one that was added since is null.
    """
    unit = period.target_column
    sums, singles, grouped = [], [], []
    for column in period.target.columns:
        name = column.name
        # Quoted: `cluster` is a word of SQL's own there.
        value = f"date_trunc('{unit}', {period.source_column})" if name == unit else f'"{name}"'
        if has is not None and name != unit and name not in has:
            value = "NULL"
        is_sum = name in _AGGREGATES and value != "NULL"
        sums.append(
            f'{_AGGREGATES[name]}({value}) AS "{name}"' if is_sum else f'{value} AS "{name}"'
        )
        singles.append(f'{value} AS "{name}"')
        if name not in _AGGREGATES and value != "NULL":
            grouped.append(value)
    huge = _huge_sql(has)
    # The least and the greatest value of a column tell that no file has such rows.
    return (
        f"SELECT {', '.join(sums)} FROM {relation}"  # noqa: S608  # no user's text
        f" WHERE ({where}) AND ({huge}) IS NOT TRUE GROUP BY {', '.join(grouped)}"
        f" UNION ALL SELECT {', '.join(singles)} FROM {relation} WHERE ({where}) AND ({huge})"
    )


def _huge_sql(has: Collection[str] | None) -> str:
    """Return the SQL of whether a row has an amount that is made up."""
    bounds = {
        name: _HUGE_BYTE_TIME if name in _BYTE_TIMES else _HUGE
        for name in _SUMS
        if has is None or name in has
    }
    # As text: a number of so many digits would be a floating-point one.
    return " OR ".join(
        f"{name} > CAST('{bound}' AS {kind}) OR {name} < CAST('-{bound}' AS {kind})"
        for name, bound in bounds.items()
        for kind in ("DECIMAL(38, 0)" if name in _BYTE_TIMES else "BIGINT",)
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


@dataclass(frozen=True, kw_only=True)
class _News:
    """What the table below has that is not summed up yet."""

    since: int | None
    """The version up to which all is; absent the first time, or where that version is gone."""
    is_first: bool
    """Whether nothing was ever summed up."""
    touched: set[int]
    """The first hours of the periods of which there are new rows."""
    marks: Mapping[str, int]
    """Up to when each partition is complete."""


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
        self._summed = summed_up_to(period.source.name)
        self._summed_late = f"{self._summed}|late"
        self._summed_time = summed_time(period.source.name)

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
            source, target = self._source.open(), None
            if self._target.exists():
                target = self._target.open()
            return pending | self._news_of(source, target).touched

    def purge(self, before_day: int, *, time_ms: int) -> int:
        """Remove the lower table's rows of days before this one; return how many files had some.

        Only what is summed up goes: rows that came since stay until that is done. Raises as `run`.
        """
        with storage_errors(self._source.uri):
            source = self._source.open()
            news = self._news_of(source, self._target.open())
            # What is not summed up yet would be lost. Of the version that is, days go in which
            # nobody has written since: else the commit is refused, and they go another time.
            if news.since is None:
                return 0
            source = self._source.open(version=news.since)
            days = {part[PARTITION_COLUMN] for part in source.partitions()}
            bound = _EPOCH + timedelta(days=before_day)
            old = sorted(day for day in days if day < str(bound))
            if not old:
                return 0
            listed = " OR ".join(f"{PARTITION_COLUMN} = '{day}'" for day in old)
            # In the commit that removes them, so that nobody ever recomputes from what is left.
            purged = max(before_day, source.transaction_version(PURGED_BEFORE) or 0)
            try:
                removed = source.delete(
                    listed,
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(PURGED_BEFORE, purged, time_ms)]
                    ),
                )
            except CommitFailedError:
                return 0  # rows came in between: the next run sums them up first
            return int(removed["num_removed_files"])

    def _run(self, time_ms: int) -> int:
        # A table of before gets the columns that were added since.
        self._target.load([])
        source, target = self._source.open(), self._target.open()
        # All below is of this snapshot: what is committed meanwhile is the next run's.
        news = self._news_of(source, target)
        if news.since == source.version():
            return 0
        purged = source.transaction_version(PURGED_BEFORE) or 0
        late = {hour for hour in news.touched if hour // HOURS_A_DAY < purged}
        if late and not news.is_first:
            self._add_late(source, target, late, since=news.since, time_ms=time_ms)
            target = self._target.open()
        # A commit a day, so that no more than a day's sums are held at once.
        by_day: dict[int, set[int]] = {}
        for hour in news.touched - late:
            by_day.setdefault(hour // HOURS_A_DAY, set()).add(hour)
        days: list[tuple[int, set[int]]] = sorted(by_day.items()) or [(0, set())]
        # With the last day: a run that is killed before does all days again, which replaces them by
        # the same, and until then nobody is told that they are there.
        done = [
            Transaction(self._summed, source.version(), time_ms),
            Transaction(self._summed_late, source.version(), time_ms),
            Transaction(self._summed_time, made_ms(latest_commits(source, 1)[0]), time_ms),
        ]
        marks = {**news.marks, ALL: min(news.marks.values())} if news.marks else None
        for day, hours in days[:-1]:
            self._replace(source, target, day, hours)
        day, hours = days[-1]
        self._replace(source, target, day, hours, done=done, valid_through=marks)
        return len(news.touched)

    def _news_of(self, source: DeltaTable, target: DeltaTable | None) -> _News:
        """Return what the lower table has that is not summed up yet."""
        since = None if target is None else target.transaction_version(self._summed)
        if target is None or since is None:
            return self._all_of(source, is_first=True)
        # With the commit that is summed up: whether it is still the same.
        count = source.version() - since + 1
        commits = latest_commits(source, min(count, _HISTORY))
        has_all = 0 < len(commits) == count
        summed_ms = target.transaction_version(self._summed_time)
        is_same = summed_ms is None or not has_all or summed_ms == made_ms(commits[-1])
        if count <= 0 or not is_same:
            _log.warning(
                "repaired_table_found", url=shown_url(self._source.uri), summed_version=since
            )
            return self._all_of(source, is_first=False)
        if since == source.version():
            return _News(since=since, is_first=False, touched=set(), marks={})
        touched = hours_since(commits[:-1]) if has_all else None
        known = marks_of_partitions(latest_commits(target, MARKED_COMMITS))
        new = marks_of_partitions(commits if known else latest_commits(source, MARKED_COMMITS))
        return _News(
            since=since,
            is_first=False,
            touched=self._periods_of(self._all_hours(source) if touched is None else touched),
            marks=latest_marks(known, new),
        )

    def _all_of(self, source: DeltaTable, *, is_first: bool) -> _News:
        return _News(
            since=None,
            is_first=is_first,
            touched=self._periods_of(self._all_hours(source)),
            marks=marks_of_partitions(latest_commits(source, MARKED_COMMITS)),
        )

    def _periods_of(self, hours: set[int]) -> set[int]:
        length = self._period.hours
        return {hour // length * length for hour in hours}

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
        done: Sequence[Transaction] = (),
        valid_through: Mapping[str, int] | None = None,
    ) -> None:
        """Replace the periods of a day in one commit."""
        column = self._period.source_column
        of_day = f"{PARTITION_COLUMN} = {_day_sql(day)}"
        begins = f"date_trunc('{self._period.target_column}', {column})"
        query = QueryBuilder().register("source", source)
        where = f"{of_day} AND ({hours_sql(begins, hours) or 'false'})"
        sums = sums_sql(self._period, "source", where, has=_columns_of(source))
        # By device, so that what is the same of it stands together: half of the bytes, and a tenth
        # of a bill's time.
        order = f'"cluster", node, gpu_uuid, {self._period.target_column}'
        rows = query.execute(f"SELECT * FROM ({sums}) ORDER BY {order}").read_all()  # noqa: S608  # no user's text
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
        self,
        source: DeltaTable,
        target: DeltaTable,
        late: set[int],
        *,
        since: int | None,
        time_ms: int,
    ) -> None:
        """Add the rows of purged periods that came since a version."""
        version = source.version()
        # A run that was killed may have added those of a version that it has not summed up.
        added = target.transaction_version(self._summed_late) or 0
        if since is not None and max(since, added) == version:
            return
        days = {hour // HOURS_A_DAY for hour in late}
        if since is None or added > version:
            rows = self._rows_beyond(source, target, days)
        else:
            rows = self._rows_since(source, days, since=max(since, added))
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

    def _rows_beyond(self, source: DeltaTable, target: DeltaTable, days: set[int]) -> Table:
        """Return the sums of the rows of purged days that are behind what they have, by offset.

        Where there is no version to compare with: what was moved out of the table below may have
        been summed up, and comes again.
        """
        listed = ", ".join(_day_sql(day) for day in sorted(days))
        where = f"{PARTITION_COLUMN} IN ({listed})"
        begin = f"date_trunc('{self._period.target_column}', source.{self._period.source_column})"
        is_new = (
            f"NOT EXISTS (SELECT 1 FROM (SELECT * FROM target WHERE {where}) AS kept"  # noqa: S608  # no user's text
            f" WHERE kept.{self._period.target_column} = {begin} AND kept.last_offset >="
            " source.last_offset AND kept.kafka_partition = source.kafka_partition"
            ' AND kept."cluster" = source."cluster" AND kept.node = source.node)'
        )
        sql = sums_sql(self._period, "source", f"{where} AND {is_new}", has=_columns_of(source))
        query = QueryBuilder().register("source", source).register("target", target)
        return query.execute(sql).read_all()

    def _rows_since(self, source: DeltaTable, days: set[int], *, since: int) -> Table:
        """Return the sums of the rows of purged days that came since a version."""
        # What is there now of a day that was purged since that version came after it was purged.
        # Of the others the rows of that version are left out, which may be gone as well.
        listed = {day: _day_sql(day) for day in sorted(days)}
        where = f"{PARTITION_COLUMN} IN ({', '.join(listed.values())})"
        has = _columns_of(source)
        sql = sums_sql(self._period, "source", where, has=has)
        query = QueryBuilder().register("source", source)
        try:
            before = self._source.open(version=since)
            purged = before.transaction_version(PURGED_BEFORE) or 0
            if is_known := [sql for day, sql in listed.items() if day < purged]:
                of_known = f"{PARTITION_COLUMN} IN ({', '.join(is_known)})"
                former = f"(SELECT * FROM before WHERE {of_known}) AS former"  # noqa: S608  # no user's text
                is_same = " AND ".join(
                    f'former."{name}" = source."{name}"'
                    for name in (*_PLACE, self._period.source_column)
                )
                is_new = f"NOT EXISTS (SELECT 1 FROM {former} WHERE {is_same})"  # noqa: S608  # no user's text
                new = sums_sql(self._period, "source", f"{where} AND {is_new}", has=has)
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


def _columns_of(table: DeltaTable) -> set[str]:
    return {field.name for field in table.schema().fields}
