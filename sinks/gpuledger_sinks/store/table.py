"""Delta tables: reads the last offset of each stream, and appends rows with new offsets.

All calls block and must be made in a thread. Except `StreamTable.open`, they translate deltalake's
exceptions. An append happens exactly once, because it uses the table object from which the offsets
were read: the commit fails if another writer has appended to the same stream since then.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any, Final

import structlog
from arro3.core import Schema
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    QueryBuilder,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake import Field as DeltaField
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from gpuledger.errors import GpuledgerError, UserError
from gpuledger.store.commits import complete_through_us
from gpuledger.store.object_files import resolve_options
from gpuledger.store.schema import ENTRIES, GAPS, PARTITION_COLUMN, TableSchema, table_uri
from gpuledger.store.usage_schema import USAGE
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.store.damage import (
    ANNOUNCED_COMMITS,
    announce,
    explain_incomplete,
    first_line_of,
    is_complete,
    storage_errors,
)

_log = structlog.get_logger(__name__)
_EPOCH: Final = date(1970, 1, 1).toordinal()
_NO_FACTS: Final[Mapping[str, int]] = {}
_NO_COMMIT_INFO: Final[Mapping[str, str]] = {}


class StaleTableError(GpuledgerError):
    """Another writer has appended to the same stream since this table was loaded."""


class StreamTable:
    """A Delta table with rows from streams, such as partitions, and each stream's last offset."""

    def __init__(
        self,
        schema: TableSchema,
        *,
        store_uri: str,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.uri = table_uri(store_uri, schema.name)
        self._schema = schema
        self._options = resolve_options(storage_options)
        # Times, offsets and quantities rarely repeat. The encodings chosen for these columns take a
        # third fewer bytes than dictionaries, and less time to write.
        self.writer = WriterProperties(
            compression="ZSTD",
            compression_level=3,
            column_properties={
                column.name: ColumnProperties(encoding=column.encoding, dictionary_enabled=False)
                for column in schema.columns
                if column.encoding is not None
            },
        )
        self._table: DeltaTable | None = None
        self._versions: dict[str, int | None] = {}

    def load(self, streams: Iterable[str]) -> dict[str, int]:
        """Load the table again, creating it if missing; return each stream's last offset.

        Adds new columns to an older table. Raises UserError if the table has other columns, and
        ReceiverUnavailableError if the storage does not answer or the table is damaged.
        """
        with storage_errors(self.uri):
            table = self.open()
            history = table.history(ANNOUNCED_COMMITS)
            # The history may include commits made after the table was loaded.
            table.update_incremental()
            if not is_complete(history, table.transaction_version):
                damage = explain_incomplete(self.uri)
                raise ReceiverUnavailableError(f"store {self.uri}: {damage}")
            self._add_columns(table)
            versions = {stream: table.transaction_version(stream) for stream in streams}
        self._table = table
        self._versions.update(versions)
        return {stream: version for stream, version in versions.items() if version is not None}

    def append(
        self,
        rows: Sequence[tuple[Any, ...]],
        offsets: Mapping[str, int],
        *,
        time_ms: int,
        after: Mapping[str, int | None] | None = None,
        facts: Mapping[str, int] = _NO_FACTS,
        commit_info: Mapping[str, str] = _NO_COMMIT_INFO,
    ) -> None:
        """Append rows together with the last offset of each stream, in one commit.

        `after` has the last offsets that the table must still have, by default those that were
        loaded last. A caller whose thread may start late takes them from `last_offsets` beforehand:
        the table may be loaded again before the thread starts. `facts` are further numbers to store
        by name, which may have any value. `commit_info` is added to the commit's information
        (`gpuledger.store.commits`). Raises StaleTableError if another writer was faster, and
        ReceiverUnavailableError if the storage does not answer.
        """
        with storage_errors(self.uri):
            table = self._unchanged(offsets, self._versions if after is None else after)
        numbers = {**offsets, **facts}
        transactions = [
            Transaction(name, number, time_ms) for name, number in sorted(numbers.items())
        ]
        with storage_errors(self.uri):
            data = self._schema.table_of(rows)
            try:
                write_deltalake(
                    table,
                    data,
                    mode="append",
                    writer_properties=self.writer,
                    commit_properties=CommitProperties(
                        app_transactions=transactions,
                        custom_metadata=announce(offsets) | {**commit_info},
                    ),
                )
            except CommitFailedError as error:
                # Another sink has committed to the same stream since this table was loaded. With a
                # newly loaded table, the same rows would be accepted and stored twice.
                raise StaleTableError(f"store {self.uri}: {error}") from error
        self._versions.update(offsets)

    def last_offsets(self, streams: Iterable[str]) -> dict[str, int | None]:
        """Return each stream's last offset as loaded or appended; `None` if it has none."""
        return {stream: self._versions.get(stream) for stream in streams}

    def complete_through(self) -> dict[str, int]:
        """Return the time through which each partition is complete at the loaded version.

        The times are in microseconds since the epoch, by partition number. Raises
        ReceiverUnavailableError if the storage does not answer.
        """
        if self._table is None:
            return {}
        with storage_errors(self.uri):
            return complete_through_us(self._table)

    def exists(self) -> bool:
        """Return whether the table exists.

        Raises ReceiverUnavailableError if the storage does not answer.
        """
        with storage_errors(self.uri):
            return DeltaTable.is_deltatable(self.uri, storage_options=self._options)

    def remove_rows(self, predicate: str) -> int:
        """Remove the rows that match an SQL condition; return the number of files removed.

        Returns 0 without removing anything if another writer has changed these rows meanwhile.
        Raises ReceiverUnavailableError if the storage does not answer.
        """
        with storage_errors(self.uri):
            try:
                return int(self.open().delete(predicate)["num_removed_files"])
            except CommitFailedError:
                return 0

    def remove_days_before(self, day: int) -> int:
        """Remove the rows of days before `day`, counted from 1970; return the number of files.

        Raises ReceiverUnavailableError if the storage does not answer.
        """
        if not self.exists():
            return 0
        bound = str(date.fromordinal(_EPOCH + day))
        with storage_errors(self.uri):
            days = {part[PARTITION_COLUMN] for part in self.open().partitions()}
        old = sorted(each for each in days if each < bound)
        if not old:
            return 0
        return self.remove_rows(" OR ".join(f"{PARTITION_COLUMN} = '{each}'" for each in old))

    def count_files_before(self, day: int) -> int:
        """Return the number of files with rows of days before `day`, counted from 1970.

        Raises ReceiverUnavailableError if the storage does not answer.
        """
        if not self.exists():
            return 0
        bound = str(date.fromordinal(_EPOCH + day))
        # The log is sufficient, because each file has rows of only one day.
        with storage_errors(self.uri):
            actions = self.open().get_add_actions(flatten=True)
        days = actions[f"partition.{PARTITION_COLUMN}"].to_pylist()
        return sum(str(each) < bound for each in days)

    def remove_orphans(self, *, older_than_hours: int) -> int:
        """Remove files older than `older_than_hours` that the table no longer references.

        Such files come from writers that were killed before their commit, or their rows were merged
        or removed at least that long ago. Returns the number of files. Raises
        ReceiverUnavailableError if the storage does not answer.
        """
        return self._vacuum(older_than_hours, dry_run=False)

    def count_orphans(self, *, older_than_hours: int) -> int:
        """Return how many files `remove_orphans` would remove; raises the same errors."""
        return self._vacuum(older_than_hours, dry_run=True)

    def _vacuum(self, older_than_hours: int, *, dry_run: bool) -> int:
        with storage_errors(self.uri):
            try:
                table = DeltaTable(self.uri, storage_options=self._options)
            except TableNotFoundError:
                return 0
            removed = table.vacuum(
                retention_hours=older_than_hours,
                dry_run=dry_run,
                # Otherwise deltalake rejects times below a week.
                enforce_retention_duration=False,
                # Without `full`, deltalake finds only files that were once part of the table.
                full=True,
            )
        return len(removed)

    def _unchanged(self, offsets: Mapping[str, int], after: Mapping[str, int | None]) -> DeltaTable:
        """Return the loaded table if its offsets equal those in `after` and are below `offsets`.

        Otherwise raises StaleTableError, for example after a commit that succeeded although it
        raised an error.
        """
        if self._table is None:
            raise StaleTableError(f"store {self.uri}: not loaded yet")
        for stream, offset in offsets.items():
            # Delta would accept a lower number. This check ensures that offsets only grow; the
            # commit ensures that no other writer has appended meanwhile.
            stored, known = self._table.transaction_version(stream), after.get(stream)
            if stored != known or (stored is not None and offset <= stored):
                raise StaleTableError(f"store {self.uri}: {stream} is at {stored}, not at {known}")
        return self._table

    def open(self, *, version: int | None = None) -> DeltaTable:
        """Return the table at its newest version or at `version`; create it if it is missing.

        Raises deltalake's errors, so call it within `storage_errors`.
        """
        try:
            return DeltaTable(self.uri, version=version, storage_options=self._options)
        except TableNotFoundError:
            pass
        schema = self._schema
        try:
            return DeltaTable.create(
                self.uri,
                schema=schema.arrow,
                partition_by=list(schema.partition_by),
                name=schema.name,
                description=schema.description,
                # Statistics add a minimum and a maximum of each column to the log of every commit.
                configuration={
                    "delta.dataSkippingNumIndexedCols": str(schema.statistics_columns),
                    **schema.configuration,
                },
                storage_options=self._options,
            )
        except (DeltaError, OSError):
            # Another consumer of the group may have created it meanwhile.
            return DeltaTable(self.uri, storage_options=self._options)

    def _add_columns(self, table: DeltaTable) -> None:
        """Add the columns that an older table does not have; raise UserError if others differ.

        If another sink adds them at the same time, loads its change instead.
        """
        missing = self._missing(table)
        if not missing:
            return
        try:
            table.alter.add_columns(missing)
        except CommitFailedError:
            table.update_incremental()
            if self._missing(table):
                raise

    def _missing(self, table: DeltaTable) -> list[DeltaField]:
        schema, columns = self._schema.arrow, self._schema.columns
        # Types are compared as well, because deltalake would silently convert 2.5 to 2.
        found, wanted = (
            {(field.name, str(field.type)) for field in map(columns_of.field, columns_of.names)}
            for columns_of in (Schema.from_arrow(table.schema().to_arrow()), schema)
        )
        names = {name for name, _ in found}
        missing = [
            column.name for column in columns if column.nullable and column.name not in names
        ]
        differs = sorted({name for name, _ in found ^ wanted}.difference(missing))
        if differs:
            raise UserError(
                f"store {self.uri}: the table there differs in column {', '.join(differs)};"
                " set another store.uri"
            )
        return [field for field in DeltaSchema.from_arrow(schema).fields if field.name in missing]


class TimedTable(StreamTable):
    """A table whose rows have a time and the partition of their events."""

    time_column: str
    """The column with the time of a row."""
    offset_columns: Sequence[str]
    """The columns with the first and the last offset of a row's events."""

    def single_events(
        self, places: Collection[tuple[int, int]], *, days: Iterable[int]
    ) -> set[tuple[int, int]]:
        """Return the partitions and offsets among `places` that have rows of their own.

        Such a row contains only the event at this offset. Searches only these days, counted from
        1970. Raises ReceiverUnavailableError if the storage does not answer.
        """
        if self._table is None or not places:
            return set()
        first, last = self.offset_columns
        listed = ", ".join(f"'{date.fromordinal(_EPOCH + day)}'" for day in sorted(days))
        offsets = ", ".join(str(offset) for _, offset in sorted(places))
        with storage_errors(self.uri):
            query = QueryBuilder().register(self._schema.name, self._table)
            found = query.execute(
                f"SELECT DISTINCT kafka_partition, {first} AS first FROM {self._schema.name}"  # noqa: S608  # no user's text
                f" WHERE {PARTITION_COLUMN} IN ({listed}) AND {first} = {last}"
                f" AND {first} IN ({offsets})"
            ).read_all()
        columns = (found["kafka_partition"].to_pylist(), found["first"].to_pylist())
        return set(zip(*columns, strict=True)) & set(places)

    def newest_time(self, kafka_partition: int) -> datetime | None:
        """Return the time of the newest row from a partition, or `None` if there is none.

        Searches the newest days first. Also returns `None`, and logs the error, if the rows cannot
        be read, for example because a data file is damaged. Raises ReceiverUnavailableError if the
        table's log cannot be read.
        """
        if self._table is None:
            return None
        with storage_errors(self.uri):
            days = {part[PARTITION_COLUMN] for part in self._table.partitions()}
        try:
            query = QueryBuilder().register(self._schema.name, self._table)
            for day in sorted(days, reverse=True):
                found = query.execute(
                    f"SELECT max({self.time_column}) AS newest FROM {self._schema.name}"  # noqa: S608  # no user's text
                    f" WHERE {PARTITION_COLUMN} = '{day}' AND kafka_partition = {kafka_partition}"
                )
                newest: datetime | None = found.read_all()["newest"].to_pylist()[0]
                if newest is not None:
                    return newest
        except Exception as error:  # noqa: BLE001  # DataFusion's errors do not have their own class
            _log.warning(
                "time_lookup_failed", partition=kafka_partition, error=first_line_of(error)
            )
        return None


class EntriesTable(TimedTable):
    """The table `entries` of a store."""

    time_column = "time"
    offset_columns = ("kafka_offset", "kafka_offset")

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        super().__init__(ENTRIES, store_uri=store_uri, storage_options=storage_options)


class UsageTable(TimedTable):
    """The table `usage` of a store."""

    time_column = "minute"
    offset_columns = ("first_offset", "last_offset")

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        super().__init__(USAGE, store_uri=store_uri, storage_options=storage_options)


class GapsTable(StreamTable):
    """The table `gaps` of a store."""

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        super().__init__(GAPS, store_uri=store_uri, storage_options=storage_options)
