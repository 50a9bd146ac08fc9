"""The seam to deltalake: open the table, read what it has of a stream, append with the offsets.

Everything here blocks and belongs in a thread. deltalake's exceptions stop here. The rule that
makes an append happen exactly once: it goes through the very table object from which the versions
were read, so that the commit fails if anybody else has appended of the same stream since.
"""

from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from arro3.core import Schema
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake import Field as DeltaField
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from gpuledger.errors import GpuledgerError, UserError
from sinks.errors import ReceiverUnavailableError
from sinks.store.columns import COLUMNS, PARTITION_COLUMN, SCHEMA, STATISTICS_COLUMNS, table_of
from sinks.store.rows import Row

T = TypeVar("T")
TABLE: Final = "entries"
_WRITER: Final = WriterProperties(
    compression="ZSTD",
    compression_level=3,
    column_properties={
        column.name: ColumnProperties(encoding=column.encoding, dictionary_enabled=False)
        for column in COLUMNS
        if column.encoding is not None
    },
)


class StaleTableError(GpuledgerError):
    """Somebody else has appended of the same stream since this table was loaded."""


def table_uri(store_uri: str) -> str:
    """Give the URI of the table `entries` of a store."""
    return f"{store_uri.rstrip('/')}/{TABLE}"


class EntriesTable:
    """The Delta table `entries` of a store, as one consumer sees it."""

    def __init__(self, *, store_uri: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.uri = table_uri(store_uri)
        self._options = dict(storage_options or {})
        self._table: DeltaTable | None = None
        self._versions: dict[str, int | None] = {}

    def load(self, streams: Iterable[str]) -> dict[str, int]:
        """Load the table anew, making it where there is none; give the last offset of each stream.

        A table of an older version gets the columns that were added since. Raises UserError where
        another table lies there, ReceiverUnavailableError where the storage does not answer.
        """
        try:
            self._table = self._open()
            _add_columns(self._table, self.uri)
        except (DeltaError, OSError) as error:
            raise ReceiverUnavailableError(f"store {self.uri}: {error}") from error
        versions = {stream: self._table.transaction_version(stream) for stream in streams}
        self._versions.update(versions)
        return {stream: version for stream, version in versions.items() if version is not None}

    def append(self, rows: list[Row], offsets: Mapping[str, int], *, time_ms: int) -> None:
        """Append rows together with the last offset of each stream, in one commit.

        Raises StaleTableError where another consumer was faster, ReceiverUnavailableError where
        the storage does not answer.
        """
        table = self._unchanged(offsets)
        transactions = [
            Transaction(stream, offset, time_ms) for stream, offset in sorted(offsets.items())
        ]
        data = table_of(rows)
        try:
            write_deltalake(
                table,
                data,
                mode="append",
                writer_properties=_WRITER,
                commit_properties=CommitProperties(app_transactions=transactions),
            )
        except CommitFailedError as error:
            raise StaleTableError(f"store {self.uri}: {error}") from error
        except (DeltaError, OSError) as error:
            raise ReceiverUnavailableError(f"store {self.uri}: {error}") from error
        self._versions.update(offsets)

    def _unchanged(self, offsets: Mapping[str, int]) -> DeltaTable:
        """Give the table if it stands where we left it: a commit may succeed and still raise."""
        if self._table is None:
            raise StaleTableError(f"store {self.uri}: not loaded yet")
        for stream, offset in offsets.items():
            stored, known = self._table.transaction_version(stream), self._versions.get(stream)
            if stored != known or (stored is not None and offset <= stored):
                raise StaleTableError(f"store {self.uri}: {stream} is at {stored}, not at {known}")
        return self._table

    def _open(self) -> DeltaTable:
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            pass
        try:
            return self._create()
        except (DeltaError, OSError):
            # Another consumer of the group may have made it in the meantime.
            return DeltaTable(self.uri, storage_options=self._options)

    def _create(self) -> DeltaTable:
        return DeltaTable.create(
            self.uri,
            schema=SCHEMA,
            partition_by=[PARTITION_COLUMN],
            name=TABLE,
            description="One row for each account entry of each GPU and tick.",
            # Statistics of the leading columns are what readers skip files by; more only
            # make the log large.
            configuration={"delta.dataSkippingNumIndexedCols": str(STATISTICS_COLUMNS)},
            storage_options=self._options,
        )


def _add_columns(table: DeltaTable, uri: str) -> None:
    """Add the columns that the table has not got yet; none of the others may differ.

    Where another sink adds them at the same time, this one loads what that one made.
    """
    missing = _missing(table, uri)
    if not missing:
        return
    try:
        table.alter.add_columns(missing)
    except CommitFailedError:
        table.update_incremental()
        if _missing(table, uri):
            raise


def _missing(table: DeltaTable, uri: str) -> list[DeltaField]:
    found, wanted = _columns(Schema.from_arrow(table.schema().to_arrow())), _columns(SCHEMA)
    names = {name for name, _ in found}
    missing = [one.name for one in COLUMNS if one.nullable and one.name not in names]
    differs = sorted({name for name, _ in found ^ wanted}.difference(missing))
    if differs:
        raise UserError(
            f"store {uri}: the table there differs in column {', '.join(differs)}; "
            "name another store.uri"
        )
    return [field for field in DeltaSchema.from_arrow(SCHEMA).fields if field.name in missing]


def _columns(schema: Schema) -> set[tuple[str, str]]:
    return {(field.name, str(field.type)) for field in map(schema.field, schema.names)}
