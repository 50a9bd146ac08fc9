"""The table `bill_lines`: closed bills by revision. Rows in it are never changed.

Each revision is appended in one commit, whose transaction identifier contains the bill's period and
dimensions. If two processes append the same revision, the table rejects one of the commits.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from arro3.core import DataType
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from gpuledger.errors import UserError
from gpuledger.store.object_files import resolve_options
from gpuledger.store.schema import StoreColumn, TableSchema, table_uri

_TEXT: Final = DataType.utf8()
_TIME: Final = DataType.timestamp("us", tz="UTC")
_SECONDS: Final = DataType.decimal128(28, 3)
_BYTE_SECONDS: Final = DataType.decimal128(38, 0)
_ENERGY: Final = DataType.decimal128(28, 6)
# No currency has more than four decimal places.
_COST: Final = DataType.decimal128(38, 4)


def _columns(kind: DataType, *names: str, nullable: bool = False) -> list[StoreColumn]:
    made_as = DataType.int64() if kind is _TIME else None
    return [StoreColumn(name=name, kind=kind, made_as=made_as, nullable=nullable) for name in names]


BILL_LINES: Final = TableSchema(
    name="bill_lines",
    description="One row for each line of each revision of a closed bill.",
    columns=(
        *_columns(_TIME, "period_begin", "period_end"),
        # JSON: the names of the dimensions, which distinguish bills of the same period.
        *_columns(_TEXT, "dimensions"),
        *_columns(DataType.int32(), "revision"),
        *_columns(DataType.int32(), "supersedes", nullable=True),
        *_columns(_TEXT, "line", "dimension_values"),
        # `correction` if a later revision changes the line by this amount; otherwise null.
        *_columns(_TEXT, "charge_class", "idle_kind", nullable=True),
        *_columns(_SECONDS, "allocated_gpu_seconds", "used_gpu_seconds", "billed_gpu_seconds"),
        *_columns(_BYTE_SECONDS, "memory_byte_seconds"),
        *_columns(_ENERGY, "energy_kilowatt_hours"),
        *_columns(_COST, "gpu_cost", "energy_cost", "shared_cost", "unused_cost", "cost"),
        # JSON: the line's parts by price; null for a correction.
        *_columns(_TEXT, "parts", nullable=True),
        *_columns(_TEXT, "currency", "policy_name", "policy_sha256", "table_versions"),
        *_columns(_TEXT, "data_coverage_ratio", "measured_ratio", nullable=True),
        *_columns(_TIME, "valid_through", "closed_time"),
        *_columns(_SECONDS, "used_by_others_gpu_seconds", nullable=True),
        *_columns(_TEXT, "note", "approved_by", nullable=True),
    ),
    statistics_columns=4,
)


def append_revision(
    store_uri: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    stream: str,
    revision: int,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Append the rows of a revision; raise `UserError` if this revision already exists.

    `stream` identifies the bill: its period and dimensions.
    """
    options = resolve_options(storage_options)
    uri = table_uri(store_uri, BILL_LINES.name)
    try:
        table = DeltaTable(uri, storage_options=options)
    except TableNotFoundError:
        table = _made_table(uri, options)
    # The revision is read from the object that is used for writing, so that both use the same
    # version of the table.
    if (table.transaction_version(stream) or 0) >= revision:
        raise _too_late(revision)
    _add_columns(table)
    # If two processes read the same version, Delta rejects the second one's transaction.
    names = [column.name for column in BILL_LINES.columns]
    transaction = Transaction(stream, revision, time.time_ns() // 10**6)
    try:
        write_deltalake(
            table,
            BILL_LINES.table_of([tuple(row[name] for name in names) for row in rows]),
            mode="append",
            commit_properties=CommitProperties(app_transactions=[transaction]),
        )
    except CommitFailedError as error:
        raise _too_late(revision) from error


def _add_columns(table: DeltaTable) -> None:
    """Add the columns that an older table does not have."""
    names = {field.name for field in table.schema().fields}
    fields = Schema.from_arrow(BILL_LINES.arrow).fields
    if missing := [each for each in fields if each.nullable and each.name not in names]:
        table.alter.add_columns(missing)


def _made_table(uri: str, options: dict[str, str] | None) -> DeltaTable:
    """Return the table, creating it if it is missing; safe if two processes create it at once."""
    try:
        return DeltaTable.create(uri, BILL_LINES.arrow, mode="ignore", storage_options=options)
    except CommitFailedError:
        return DeltaTable(uri, storage_options=options)


def _too_late(revision: int) -> UserError:
    return UserError(
        f"revision {revision} of this bill has just been closed by someone else; look at it, and"
        " close again if something still has to be corrected"
    )
