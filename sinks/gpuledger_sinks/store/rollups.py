"""`usage_hourly` and `usage_daily`: sums of a source table over longer periods.

The source of `usage_hourly` is `usage`; the source of `usage_daily` is `usage_hourly`. A `Rollup`
recomputes the periods that have new rows since its last run. Each commit of the source records its
hours (`gpuledger.store.commits`). If a commit does not, or the history is too short, all periods
are recomputed. The rows of a period are replaced in one commit (replaceWhere), so that readers see
either the old or the new sums.

The last commit of a run records the source's version up to which all rows are summed up, the time
of this version, and how far each partition is complete. If the source no longer has this version,
or has it with another time, the source was repaired, and all periods are recomputed.

Periods whose rows were purged from the source because of their age cannot be recomputed. If rows
for such a period arrive late, they are added to the existing sums. Late rows are the rows of the
current version that are not in the version summed up last. The commit that adds them also records
the current version, so that a run that is killed and restarted adds them once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Final

import structlog
from arro3.core import RecordBatch, Table
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
    newest_ms,
    summed_time,
    summed_up_to,
)
from gpuledger.store.distributions import (
    ALLOCATED,
    BITMAPS,
    BUSY,
    DISTRIBUTIONS,
    DRAM,
    MEMORY,
    MEMORY_MAX,
    USED,
    Distribution,
)
from gpuledger.store.query import sql_type
from gpuledger.store.schema import PARTITION_COLUMN, TableSchema
from gpuledger.store.usage_schema import USAGE, USAGE_DAILY, USAGE_HOURLY
from gpuledger_sinks.store.damage import storage_errors
from gpuledger_sinks.store.table import StaleTableError, StreamTable

HOURS_A_DAY: Final = 24
_HISTORY: Final = 10_000
"""Maximum number of commits to read: a week with one per minute."""
_SLICE_ROWS: Final = 1_000_000
"""Approximate number of source rows to sum up at a time: an hour of 4,000 GPUs, whose minutes take
less than a gigabyte."""
_HUGE: Final = 2**47
"""Amounts above this (39 hours in nanoseconds) are implausible. The sum of 65,536 such amounts
could exceed 64 bits."""
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
    "scaled_allocated_ns",
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
    **{column: "sum" for each in DISTRIBUTIONS for column in each.columns},
    MEMORY_MAX: "max",
    **dict.fromkeys(BITMAPS, "bit_or"),
}
_PLACE: Final = (
    *("kafka_partition", "first_offset", "last_offset", PARTITION_COLUMN),
    *("cluster", "node"),
)
_GONE: Final = "not found"
"""A part of the error message for a removed file of an old version."""
_EPOCH: Final = date(1970, 1, 1)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Period:
    """The source and target tables of a rollup, and the length of its periods."""

    source: TableSchema
    source_column: str
    target: TableSchema
    target_column: str
    hours: int
    """Length of a period in hours."""
    of_minutes: Mapping[str, str] = field(default_factory=dict)
    """SQL of target columns that are computed for each minute, and then aggregated."""


def _bucket_sql(distribution: Distribution, value: str) -> str:
    """Return SQL for the index of a value's bucket; null if the value is null."""
    cases = " ".join(
        f"WHEN {value} <= {bound * distribution.unit} THEN {index}"
        for index, bound in enumerate(distribution.bounds)
    )
    last = len(distribution.columns) - 1
    return f"CASE WHEN {value} IS NOT NULL THEN CASE {cases} ELSE {last} END END"


_MINUTE_VALUES: Final[Sequence[Mapping[str, str]]] = (
    {
        # In rows of `idle`, `busy_ns` is the time in which no kernel ran.
        "used_ns": "CASE WHEN category = 'idle'"
        " THEN allocated_ns - coalesce(unresponsive_ns, 0) - busy_ns ELSE busy_ns END",
        "memory_bytes": "CAST(round(CAST(memory_byte_ns AS DOUBLE) / 6e10) AS BIGINT)",
        "bit": "CAST(1 AS BIGINT) << CAST(date_part('minute', minute) AS BIGINT)",
    },
    {
        BUSY.name: _bucket_sql(BUSY, "used_ns"),
        DRAM.name: _bucket_sql(DRAM, "dram_active_ns"),
        MEMORY.name: _bucket_sql(MEMORY, "memory_bytes"),
    },
)
"""SQL of values that are computed from the sums of a minute. The second mapping uses values of the
first one."""
_OF_MINUTES: Final[Mapping[str, str]] = {
    **{
        column: f"CAST({each.name} = {index} AS BIGINT)"
        for each in DISTRIBUTIONS
        for index, column in enumerate(each.columns)
    },
    MEMORY_MAX: "memory_bytes",
    # Unknown is not idle: a minute counts as allocated only if its use is known.
    ALLOCATED: "CASE WHEN allocated_ns > 0 AND used_ns IS NOT NULL THEN bit"
    " WHEN allocated_ns IS NOT NULL THEN 0 END",
    USED: "CASE WHEN used_ns > 0 THEN bit WHEN used_ns IS NOT NULL THEN 0 END",
}
"""SQL of the columns of `usage_hourly` that are aggregated from the values of minutes."""
HOURLY: Final = Period(
    source=USAGE,
    source_column="minute",
    target=USAGE_HOURLY,
    target_column="hour",
    hours=1,
    of_minutes=_OF_MINUTES,
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
    """Return the SQL that sums rows of the period's source into rows of its target table.

    `where` selects the source rows. Rows with implausible amounts stay separate, so that no
    sum overflows its column. `has` are the columns of the source table, by default all of them.
    Sums of missing columns are null.
    """
    read = {
        column.name: f'"{column.name}"'
        if has is None or column.name in has
        else f"CAST(NULL AS {sql_type(column)})"
        for column in period.source.columns
    }
    huge = _huge_sql(has)
    rows = _select_sql(read, f"{relation} WHERE ({where}) AND ({huge}) IS NOT TRUE")
    if period.of_minutes:
        # If the sink wrote in the middle of a minute, the minute has several rows.
        rows = _sums_sql({name: f'"{name}"' for name in read}, rows)
        for values in _MINUTE_VALUES:
            rows = f"SELECT *, {_listed(values)} FROM ({rows})"  # noqa: S608  # no user's text
    unit = period.target_column
    # Quoted, because `cluster` is a keyword of the SQL dialect.
    made = {column.name: f'"{column.name}"' for column in period.target.columns}
    made[unit] = f"date_trunc('{unit}', {period.source_column})"
    # The second query reads almost nothing: files without such rows are excluded by statistics.
    separate = _select_sql(read, f"{relation} WHERE ({where}) AND ({huge})")
    separate = _select_sql(made | dict.fromkeys(period.of_minutes, "NULL"), f"({separate})")
    return f"{_sums_sql(made | {**period.of_minutes}, rows)} UNION ALL {separate}"


def _sums_sql(values: Mapping[str, str], rows: str) -> str:
    """Return the SQL that groups rows by all columns that are not aggregated."""
    sums = {
        name: f"{_AGGREGATES[name]}({value})" if name in _AGGREGATES else value
        for name, value in values.items()
    }
    keys = ", ".join(value for name, value in values.items() if name not in _AGGREGATES)
    return _select_sql(sums, f"({rows}) GROUP BY {keys}")


def _select_sql(values: Mapping[str, str], rows: str) -> str:
    return f"SELECT {_listed(values)} FROM {rows}"  # noqa: S608  # no user's text


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f'{value} AS "{name}"' for name, value in values.items())


def _huge_sql(has: Collection[str] | None) -> str:
    """Return the SQL condition that a row has an implausible amount."""
    bounds = {
        name: _HUGE_BYTE_TIME if name in _BYTE_TIMES else _HUGE
        for name in _SUMS
        if has is None or name in has
    }
    # The bounds are texts, because a number with so many digits would become floating-point.
    return " OR ".join(
        f"{name} > CAST('{bound}' AS {kind}) OR {name} < CAST('-{bound}' AS {kind})"
        for name, bound in bounds.items()
        for kind in ("DECIMAL(38, 0)" if name in _BYTE_TIMES else "BIGINT",)
    )


def hours_sql(column: str, hours: Iterable[int]) -> str:
    """Return the SQL condition that a time is the start of one of these hours since 1970."""
    return " OR ".join(f"{column} = {_time_sql(hour)}" for hour in sorted(hours))


def _time_sql(hour: int) -> str:
    day, of_day = divmod(hour, HOURS_A_DAY)
    shown = f"{_EPOCH + timedelta(days=day)} {of_day:02}:00:00Z"
    return f"arrow_cast('{shown}', 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _day_sql(day: int) -> str:
    return f"'{_EPOCH + timedelta(days=day)}'"


@dataclass(frozen=True, kw_only=True)
class _News:
    """The changes in the source table that are not summed up yet."""

    since: int | None
    """The version summed up last; `None` in the first run, or if that version no longer exists."""
    is_first: bool
    """Whether nothing was ever summed up."""
    touched: set[int]
    """The first hours of the periods with new rows, counted from 1970."""
    marks: Mapping[str, int]
    """The time through which each partition is complete, in microseconds."""


class Rollup:
    """Keeps one table of sums up to date with its source table."""

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
        """Sum up the periods with new rows since the last run; return the number of periods.

        Raises StaleTableError if another process does the same, and ReceiverUnavailableError if the
        storage does not answer.
        """
        with storage_errors(self._target.uri):
            try:
                return self._run(time_ms)
            except CommitFailedError as error:
                raise StaleTableError(f"store {self._target.uri}: {error}") from error

    def pending(self, touched_below: Iterable[int] = ()) -> set[int]:
        """Return the periods that a run would sum up, each by its first hour; change nothing.

        `touched_below` are the first hours of the periods that the source table would get from an
        earlier step. Raises ReceiverUnavailableError if the storage does not answer.
        """
        hours = self._period.hours
        pending = {hour // hours * hours for hour in touched_below}
        # Missing tables are not opened, because that would create them.
        if not self._source.exists():
            return pending
        with storage_errors(self._target.uri):
            source, target = self._source.open(), None
            if self._target.exists():
                target = self._target.open()
            return pending | self._news_of(source, target).touched

    def purge(self, before_day: int, *, time_ms: int) -> int:
        """Remove the source's rows of days before `before_day`; return the number of files removed.

        Days are counted from 1970. Removes only days whose rows are all summed up. Raises
        ReceiverUnavailableError if the storage does not answer.
        """
        with storage_errors(self._source.uri):
            source = self._source.open()
            news = self._news_of(source, self._target.open())
            # Rows that are not summed up would be lost, so days are deleted from the version that
            # is summed up. If a day has newer rows, Delta rejects the commit, and a later run
            # deletes the day.
            if news.since is None:
                return 0
            source = self._source.open(version=news.since)
            days = {part[PARTITION_COLUMN] for part in source.partitions()}
            bound = _EPOCH + timedelta(days=before_day)
            old = sorted(day for day in days if day < str(bound))
            if not old:
                return 0
            listed = " OR ".join(f"{PARTITION_COLUMN} = '{day}'" for day in old)
            # `purged` is recorded in the commit that removes the rows, so that these days are never
            # recomputed from the remaining rows.
            purged = max(before_day, source.transaction_version(PURGED_BEFORE) or 0)
            try:
                removed = source.delete(
                    listed,
                    commit_properties=CommitProperties(
                        app_transactions=[Transaction(PURGED_BEFORE, purged, time_ms)]
                    ),
                )
            except CommitFailedError:
                return 0  # there are newer rows; the next run sums them up first
            return int(removed["num_removed_files"])

    def _run(self, time_ms: int) -> int:
        # Adds new columns to an older table.
        self._target.load([])
        source, target = self._source.open(), self._target.open()
        # This run uses only this snapshot; the next run processes later commits.
        news = self._news_of(source, target)
        if news.since == source.version():
            return 0
        purged = source.transaction_version(PURGED_BEFORE) or 0
        late = {hour for hour in news.touched if hour // HOURS_A_DAY < purged}
        if late and not news.is_first:
            self._add_late(source, target, late, since=news.since, time_ms=time_ms)
            target = self._target.open()
        # One commit per day, so that at most one day's sums are in memory.
        by_day: dict[int, set[int]] = {}
        for hour in news.touched - late:
            by_day.setdefault(hour // HOURS_A_DAY, set()).add(hour)
        days: list[tuple[int, set[int]]] = sorted(by_day.items()) or [(0, set())]
        # `done` is recorded only with the last day. If a run is killed earlier, the next run
        # repeats all days with the same result.
        done = [
            Transaction(self._summed, source.version(), time_ms),
            Transaction(self._summed_late, source.version(), time_ms),
            Transaction(self._summed_time, newest_ms(source), time_ms),
        ]
        marks = {**news.marks, ALL: min(news.marks.values())} if news.marks else None
        for day, hours in days[:-1]:
            self._replace(source, target, day, hours)
        day, hours = days[-1]
        self._replace(source, target, day, hours, done=done, valid_through=marks)
        return len(news.touched)

    def _news_of(self, source: DeltaTable, target: DeltaTable | None) -> _News:
        """Return the changes in the source table that are not summed up yet."""
        since = None if target is None else target.transaction_version(self._summed)
        if target is None or since is None:
            return self._all_of(source, is_first=True)
        # Includes the commit that was summed up last, to check that it is still the same.
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
        """Replace the sums of some periods of a day in one commit."""
        of_day = f"{PARTITION_COLUMN} = {_day_sql(day)}"
        query = QueryBuilder().register("source", source)
        # More partitions need more memory and more processor time in total.
        query.execute("SET datafusion.execution.target_partitions = 1").read_all()
        has = _columns_of(source)
        batches = [
            batch
            for where in self._slices(query, of_day, sorted(hours))
            for batch in self._sums_of(query, where, has)
        ]
        replaced = hours_sql(self._period.target_column, hours) or "false"
        write_deltalake(
            target,
            Table.from_batches(batches, schema=self._period.target.arrow),
            mode="overwrite",
            predicate=f"{of_day} AND ({replaced})",
            writer_properties=self._target.writer,
            commit_properties=CommitProperties(
                app_transactions=list(done),
                custom_metadata=describe(hours=hours, valid_through=valid_through),
            ),
        )

    def _slices(self, query: QueryBuilder, of_day: str, hours: Sequence[int]) -> Iterator[str]:
        """Yield SQL conditions that divide the periods' rows into parts that fit into memory."""
        column, length = self._period.source_column, self._period.hours
        for hour in hours:
            begin, end = _time_sql(hour), _time_sql(hour + length)
            # A range lets the engine skip files by their statistics.
            of_period = f"{of_day} AND {column} >= {begin} AND {column} < {end}"
            found = query.execute(f"SELECT count(*) AS rows FROM source WHERE {of_period}")  # noqa: S608  # no user's text
            count = found.read_all()["rows"].to_pylist()[0] // _SLICE_ROWS + 1
            # The last digit of a UUID is random.
            for index in range(count):
                yield f"{of_period} AND ascii(right(gpu_uuid, 1)) % {count} = {index}"

    def _sums_of(
        self, query: QueryBuilder, where: str, has: Collection[str]
    ) -> Iterable[RecordBatch]:
        # Sorted by device, so that equal values are adjacent. This halves the size and makes bills
        # ten times as fast.
        sql = f"{sums_sql(self._period, 'source', where, has=has)} ORDER BY cluster, node, gpu_uuid"
        return self._period.target.conform(query.execute(sql).read_all()).to_batches()

    def _add_late(
        self,
        source: DeltaTable,
        target: DeltaTable,
        late: set[int],
        *,
        since: int | None,
        time_ms: int,
    ) -> None:
        """Add the sums of rows that arrived after version `since` but belong to purged periods."""
        version = source.version()
        # A killed run may have added the late rows of a version that it has not summed up.
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
        """Return the sums of rows of purged days that have higher offsets than the target's rows.

        Used if there is no version to compare with. Rows whose offsets the target already has may
        have been summed up before.
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
        """Return the sums of rows that arrived after version `since` but belong to purged days."""
        # If a day was purged after that version, all its rows arrived after the purge. For a day
        # that was purged before, the rows that already existed in that version are left out.
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
        # DataFusion's errors do not have their own class.
        except Exception as error:
            if not isinstance(error, DeltaError) and _GONE not in str(error):
                raise
            # The files of that version no longer exist: all rows of purged days count as new.
            _log.info(
                "former_version_lost", url=shown_url(self._source.uri), error=str(error)[:300]
            )
        return query.execute(sql).read_all()


def _columns_of(table: DeltaTable) -> set[str]:
    return {field.name for field in table.schema().fields}
